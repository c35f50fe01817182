//! Panics of a kernel's closures and stores: the unwinding clears all flags, closes all sections,
//! and loses no frame and no store to a file.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::audit::audit_with;
use crate::error::Errno;
use crate::fault::Access;
use crate::fault::prefault::ThreadStreams;
use crate::file::{BackingStore, Object, ReadRun, StoreError, WriteRun};
use crate::heap::Shared;
use crate::knob::{Locking, Setting};
use crate::space::{Advice, Label, MemPolicy, NodeSet, Prot, Space};
use crate::stat::Counter;
use crate::testing::guest::{
    self, AT, P, PRIVATE, RW, SHARED, TestCpu, TestSpace, cpu, load, map, map_object, store,
};
use crate::testing::store::{Memory, file, finish, write_back};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::string::ToString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::vec::Vec;

const PLANTED: &str = "planted";

/// Makes `call`, which must panic with the planted panic and leave the CPU idle.
fn unwinds<R>(cpu: &TestCpu<'_>, name: &str, call: impl FnOnce() -> R) {
    let Err(payload) = catch_unwind(AssertUnwindSafe(call)) else { panic!("{name}: no panic") };
    assert_eq!(payload.downcast_ref::<&str>(), Some(&PLANTED), "{name}");
    is_idle(cpu, name);
}

/// Checks that the CPU is in no call: all flags are clear, and no lock is held.
fn is_idle(cpu: &TestCpu<'_>, name: &str) {
    let state = cpu.state();
    assert!(!state.evicting.get() && !state.awaits_turn.get(), "{name}: flags of reclaim");
    assert!(cpu.thread().is_none(), "{name}: a thread");
    assert!(!cpu.vm().is_held(), "{name}: pages are held");
    if cfg!(debug_assertions) {
        assert_eq!(std::format!("{:?}", cpu.local().order()), "{}", "{name}: the CPU holds a lock");
    }
}

/// A store in memory whose next writes or reads panic, before or after the transfer of the bytes.
#[derive(Debug)]
struct Panics {
    memory: Arc<Memory>,
    writes: AtomicU64,
    reads: AtomicU64,
    first: bool,
}

impl Panics {
    fn new(pages: u64, writes: u64, first: bool) -> Arc<Self> {
        let [writes, reads] = [writes, 0].map(AtomicU64::new);
        Arc::new(Self { memory: Memory::new(pages, 0), writes, reads, first })
    }

    /// Does `call`. The call panics while `left` is not 0, and then counts down.
    fn run<R>(&self, left: &AtomicU64, call: impl FnOnce() -> R) -> R {
        let panics = left.load(Ordering::Relaxed) != 0;
        left.store(left.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed);
        if panics && self.first {
            planted();
        }
        let done = call();
        if panics {
            planted();
        }
        done
    }
}

impl BackingStore for Panics {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn preferred_pages(&self) -> usize {
        4
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        self.run(&self.reads, || self.memory.read(run))
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        self.run(&self.writes, || self.memory.write(run))
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.memory.set_len(bytes)
    }
}

type Closure = (&'static str, fn(&TestCpu<'_>, &TestSpace, &Shared<Object>));

fn planted() -> ! {
    std::panic::panic_any(PLANTED)
}

/// All public functions with a closure parameter. `every_public_closure_is_in_the_table` compares
/// this table with the sources.
const CLOSURES: &[Closure] = &[
    ("overwrite_page", |cpu, _, object| {
        let _ = object.overwrite_page(cpu, 3, |_| planted());
    }),
    ("overwrite_page", |cpu, _, object| {
        let _ = object.overwrite_page(cpu, 0, |_| planted());
    }),
    ("each_resident", |cpu, _, object| object.each_resident(cpu, |_, _| planted())),
    ("read_page", |cpu, _, object| object.read_page(cpu, 0, |_| planted()).unwrap()),
    ("write_page", |cpu, _, object| object.write_page(cpu, 0, |_| planted()).unwrap()),
    ("write_page", |cpu, _, object| object.write_page(cpu, 2, |_| planted()).unwrap()),
    ("write_back", |cpu, _, object| {
        let _ = object.write_back(cpu, 0..9, |_| planted());
    }),
    ("each_swap_cached", |cpu, _, _| cpu.each_swap_cached(|_| planted())),
    ("pages", |cpu, space, _| space.pages(cpu, VirtRange::new(AT, AT + P), |_, _| planted())),
    ("maps_with", |cpu, space, _| {
        let label = |_| -> Option<Label<&str>> { planted() };
        drop(space.maps_with(cpu, label).to_string());
    }),
    ("areas", |cpu, space, _| space.areas(cpu, |_| planted())),
    ("each_area", |cpu, space, _| space.each_area(cpu, VirtRange::USER, |_| planted())),
    ("mincore", |cpu, space, _| {
        let _ = space.mincore(cpu, AT, P, |_| planted());
    }),
    ("for_thread", |cpu, _, _| cpu.for_thread(&ThreadStreams::new(), || planted())),
];

#[test]
fn a_panic_of_each_closure_leaves_no_state() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    cpu.swap_on(Memory::new(32, 0)).unwrap();
    let memory = Memory::new(4, 0);
    let object = file(&cpu, &memory);
    map_object(&cpu, &space, (0, 4), RW, SHARED, (&object, 0));
    map(&cpu, &space, 8, 4, RW);
    store(&cpu, &space, AT, 70).unwrap();
    (8..12).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    // A page read from the swap area stays in memory until it is loaded.
    space.evict(&cpu, AT + 8 * P, 4 * P).unwrap();
    assert!(space.entry_at(&cpu, AT + 8 * P).is_swapped());
    let swap = vm.swap.get().unwrap().object().clone();
    swap.read_ahead(&cpu, 0..4).unwrap();
    Object::release(swap, &cpu);
    for (name, closure) in CLOSURES {
        unwinds(&cpu, name, || closure(&cpu, &space, &object));
        cpu.drain();
        audit_with(&cpu, &[&space], &[&object]).unwrap_or_else(|found| panic!("{name}: {found:?}"));
    }
    write_back(&cpu, &[&space], &object).unwrap();
    assert_eq!(memory.word(0), 70);
    (8..12).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page)));
}

/// The names of public functions with a closure parameter, outside of crate-private modules.
#[test]
#[cfg_attr(miri, ignore = "reads the sources")]
fn every_public_closure_is_in_the_table() {
    let top = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = ["file", "space", "reclaim", "vm", "fault"].map(|part| top.join(part));
    // Their types have no name outside.
    let internal = ["batch.rs", "tree.rs", "amend.rs"];
    let mut found = Vec::new();
    for part in files {
        for entry in std::fs::read_dir(part).unwrap().map(Result::unwrap) {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.ends_with(".rs") || internal.contains(&name.as_str()) {
                continue;
            }
            let text = std::fs::read_to_string(entry.path()).unwrap();
            for part in text.split("    pub fn ").skip(1) {
                let head = part.split('{').next().unwrap();
                let closure = ["Fn(", "FnMut(", "FnOnce("].iter().any(|kind| head.contains(kind));
                if closure {
                    found.push(head.split(['(', '<']).next().unwrap().to_string());
                }
            }
        }
    }
    let mut listed: Vec<_> = CLOSURES.iter().map(|(name, _)| name.to_string()).collect();
    listed.dedup();
    found.sort();
    listed.sort();
    assert_eq!(found, listed);
}

#[test]
fn write_back_with_a_panicking_protect_loses_no_store() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let (space, memory) = (Space::new(&cpu).unwrap(), Memory::new(8, 0));
    let object = file(&cpu, &memory);
    map_object(&cpu, &space, (0, 8), RW, SHARED, (&object, 0));
    (0..8).for_each(|page| store(&cpu, &space, AT + page * P, 70 + page).unwrap());
    unwinds(&cpu, "write_back", || object.write_back(&cpu, 0..8, |_| planted()));
    assert!((0..8).all(|page| object.is_dirty(&cpu, page)), "all pages are dirty");
    assert_eq!(write_back(&cpu, &[&space], &object), Ok(8));
    assert!((0..8).all(|page| memory.word(page) == 70 + page));
    finish(&cpu, space, Vec::from([object]));
}

#[test]
fn write_page_panicking_after_a_store_keeps_the_page_dirty() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let (space, memory) = (Space::new(&cpu).unwrap(), Memory::new(2, 0));
    let object = file(&cpu, &memory);
    let write = |at: *mut u8| {
        // SAFETY: the bytes of a page, aligned.
        unsafe { at.cast::<u64>().write(99) };
        planted()
    };
    unwinds(&cpu, "write_page", || object.write_page(&cpu, 1, write).unwrap());
    assert_eq!(write_back(&cpu, &[], &object), Ok(1));
    assert_eq!(memory.word(1), 99);
    finish(&cpu, space, Vec::from([object]));
}

/// The swap store panics repeatedly. Afterwards the same CPU still swaps, and no page has lost its
/// words.
#[test]
fn a_panicking_swap_store_does_not_end_eviction() {
    for first in [true, false] {
        let vm = guest::vm(1, 64);
        let cpu = cpu(&vm, 0);
        let disk = Panics::new(128, 3, first);
        cpu.swap_on(disk.clone()).unwrap();
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, 0, 100, RW);
        for page in 0..100 {
            let stores = || store(&cpu, &space, AT + page * P, 500 + page).unwrap();
            while disk.writes.load(Ordering::Relaxed) != 0
                && catch_unwind(AssertUnwindSafe(stores)).is_err()
            {
                is_idle(&cpu, "a fault");
                cpu.drain();
                audit_with(&cpu, &[&space], &[]).unwrap();
            }
            stores();
        }
        assert_eq!(disk.writes.load(Ordering::Relaxed), 0, "the store panicked");
        (0..100).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(500 + page)));
        finish_swapped(&cpu, space);
    }
}

fn finish_swapped(cpu: &TestCpu<'_>, space: TestSpace) {
    space.exit(cpu);
    cpu.drain();
    assert_eq!(cpu.swap_usage().1, 0, "a slot is lost");
    cpu.reclaim(u64::MAX);
    cpu.drain();
    let census = audit_with(cpu, &[], &[]).unwrap();
    assert_eq!((census.anon, census.shared), (0, 0), "pages remain");
}

/// A page whose eviction write panicked stays dirty, and open files receive the error.
#[test]
fn a_store_panicking_in_eviction_is_written_again() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let disk = Panics::new(16, 1, true);
    let object = Object::of_store(&cpu, disk.clone(), 5).unwrap();
    let space = Space::new(&cpu).unwrap();
    map_object(&cpu, &space, (0, 16), RW, SHARED, (&object, 0));
    (0..16).for_each(|page| store(&cpu, &space, AT + page * P, 70 + page).unwrap());
    let mut seen = object.errors_seen();
    unwinds(&cpu, "evict", || object.evict(&cpu, 0..16));
    assert_eq!(object.write_error(&mut seen), Some(Errno::EIO));
    assert!((0..16).all(|page| object.is_dirty(&cpu, page)), "no page was written");
    assert_eq!(object.evict(&cpu, 0..16), 16);
    assert!((0..16).all(|page| disk.memory.word(page) == 70 + page));
    finish(&cpu, space, Vec::from([object]));
}

/// A panicking read ends like a dropped read: its pages stay absent, and the next access reads
/// again.
#[test]
fn a_store_panicking_in_a_read_is_read_again() {
    const READS: &[Closure] = &[
        ("fault", |cpu, space, _| _ = load(cpu, space, AT + P)),
        ("store", |cpu, space, _| _ = store(cpu, space, AT + P, 2)),
        ("pin", |cpu, space, _| drop(space.pin(cpu, AT, 2 * P, false))),
        ("will_need", |cpu, space, _| _ = space.madvise(cpu, AT, 4 * P, Advice::WillNeed)),
        ("populate", |cpu, space, _| _ = space.madvise(cpu, AT, P, Advice::PopulateRead)),
        ("read_ahead", |cpu, _, object| _ = object.read_ahead(cpu, 0..4)),
        ("read_exactly", |cpu, _, object| _ = object.read_exactly(cpu, 1..3)),
        ("read_in_sequence", |cpu, _, object| {
            _ = object.read_in_sequence(cpu, &ThreadStreams::new(), 0..2);
        }),
        ("read_page", |cpu, _, object| _ = object.read_page(cpu, 1, |_| ())),
        ("write_page", |cpu, _, object| _ = object.write_page(cpu, 1, |_| ())),
    ];
    for locking in Locking::ALL {
        for (name, read) in READS {
            for first in [true, false] {
                let vm = guest::vm(1, 64);
                vm.set(Setting::Locking(locking));
                let cpu = cpu(&vm, 0);
                let disk = Panics::new(8, 0, first);
                let object = Object::of_store(&cpu, disk.clone(), 5).unwrap();
                let space = Space::new(&cpu).unwrap();
                map_object(&cpu, &space, (0, 8), RW, SHARED, (&object, 0));
                disk.reads.store(1, Ordering::Relaxed);
                unwinds(&cpu, name, || read(&cpu, &space, &object));
                cpu.drain();
                audit_with(&cpu, &[&space], &[&object])
                    .unwrap_or_else(|found| panic!("{name}, {locking:?}: {found:?}"));
                assert!((0..4).all(|page| !object.has_page(&cpu, page)), "{name}, {locking:?}");
                read(&cpu, &space, &object);
                assert_eq!(load(&cpu, &space, AT + P), Ok(2), "{name}, {locking:?}");
                assert_eq!(load(&cpu, &space, AT + 4 * P), Ok(5));
                finish(&cpu, space, Vec::from([object]));
            }
        }
    }
}

/// The swap store panics as a page comes back. The slot keeps the page.
#[test]
fn a_swap_store_panicking_in_a_read_is_read_again() {
    for first in [true, false] {
        let vm = guest::vm(1, 64);
        let cpu = cpu(&vm, 0);
        let disk = Panics::new(32, 0, first);
        cpu.swap_on(disk.clone()).unwrap();
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, 0, 4, RW);
        (0..4).for_each(|page| store(&cpu, &space, AT + page * P, 70 + page).unwrap());
        space.evict(&cpu, AT, 4 * P).unwrap();
        for page in 0..4 {
            disk.reads.store(1, Ordering::Relaxed);
            let at = AT + page * P;
            unwinds(&cpu, "fault", || _ = load(&cpu, &space, at));
            cpu.drain();
            audit_with(&cpu, &[&space], &[]).unwrap();
            assert!(space.entry_at(&cpu, at).is_swapped());
            assert_eq!(load(&cpu, &space, at), Ok(70 + page));
        }
        finish_swapped(&cpu, space);
    }
}

/// The store panics while objects end: with the last reference, with the space that maps them, and
/// with dropped spaces and objects.
#[test]
fn objects_and_spaces_end_with_a_panicking_store() {
    type End = fn(&TestCpu<'_>, TestSpace, Vec<Shared<Object>>);
    let ends: [(&str, End); 3] = [
        ("exit", |cpu, space, objects| {
            objects.into_iter().for_each(|object| Object::release(object, cpu));
            space.exit(cpu);
        }),
        ("munmap", |cpu, space, objects| {
            drop(objects);
            let done = catch_unwind(AssertUnwindSafe(|| space.munmap(cpu, AT, 64 * P)));
            drop(space);
            if let Err(payload) = done {
                std::panic::resume_unwind(payload);
            }
            cpu.drain();
        }),
        ("end_dropped", |cpu, space, objects| {
            drop((space, objects));
            cpu.drain();
        }),
    ];
    for (name, end) in ends {
        let vm = guest::vm(1, 64);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let disks = [2, 0, 0].map(|writes| Panics::new(8, writes, true));
        let objects: Vec<_> =
            disks.iter().map(|disk| Object::of_store(&cpu, disk.clone(), 5).unwrap()).collect();
        for (at, object) in (0..).zip(&objects) {
            map_object(&cpu, &space, (16 * at, 8), RW, SHARED, (object, 0));
            store(&cpu, &space, AT + 16 * at * P, 70).unwrap();
        }
        unwinds(&cpu, name, || end(&cpu, space, objects));
        cpu.drain();
        assert_eq!(audit_with(&cpu, &[], &[]).unwrap().taken(), 1, "{name}: frames are lost");
        assert_eq!(vm.totals().get(Counter::WriteBackLost), 1, "{name}");
        assert!(disks[1..].iter().all(|disk| disk.memory.word(0) == 70), "{name}");
    }
}

#[test]
fn a_panicking_watcher_leaves_no_state() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    vm.trace.watch(&crate::stat::TracePoint::ALL, Arc::new(|_| planted()));
    unwinds(&cpu, "watch", || space.fault_remote(&cpu, 5 * PAGE_SIZE, Access::Read));
    vm.trace.unwatch();
    // A fault in memory with a policy prepares a frame before the fault finds the access forbidden.
    map(&cpu, &space, 0, 1, Prot::READ);
    space.mbind(&cpu, AT, P, MemPolicy::Interleave(NodeSet::only(0))).unwrap();
    cpu.drain();
    let free = vm.free_frames();
    vm.trace.watch(&crate::stat::TracePoint::ALL, Arc::new(|_| planted()));
    unwinds(&cpu, "watch", || space.fault_remote(&cpu, AT, Access::Write));
    vm.trace.unwatch();
    cpu.drain();
    assert_eq!(vm.free_frames(), free, "the prepared frame is free again");
    finish(&cpu, space, Vec::new());
}

/// A store to a VMA with a policy prepares a frame before the fault reads the page. If the store of
/// the object panics in this read, the frame is free again, once.
#[test]
fn a_panicking_read_frees_the_prepared_frame() {
    for locking in Locking::ALL {
        for (flags, first) in [(SHARED, true), (SHARED, false), (PRIVATE, true), (PRIVATE, false)] {
            let name = std::format!("{locking:?}, {flags:?}, {first}");
            let vm = guest::vm(1, 64);
            vm.set(Setting::Locking(locking));
            let cpu = cpu(&vm, 0);
            let disk = Panics::new(8, 0, first);
            let object = Object::of_store(&cpu, disk.clone(), 5).unwrap();
            let space = Space::new(&cpu).unwrap();
            map_object(&cpu, &space, (0, 8), RW, flags, (&object, 0));
            space.mbind(&cpu, AT, 8 * P, MemPolicy::Interleave(NodeSet::only(0))).unwrap();
            // From now on a fault needs no frame for a table.
            assert_eq!(load(&cpu, &space, AT + 4 * P), Ok(5));
            cpu.drain();
            let free = vm.free_frames();
            for _ in 0..3 {
                disk.reads.store(1, Ordering::Relaxed);
                unwinds(&cpu, &name, || _ = store(&cpu, &space, AT + P, 2));
                cpu.drain();
                audit_with(&cpu, &[&space], &[&object]).unwrap();
                assert_eq!(vm.free_frames(), free, "{name}: the prepared frame is free again");
            }
            store(&cpu, &space, AT + P, 2).unwrap();
            assert_eq!(load(&cpu, &space, AT + P), Ok(2));
            cpu.drain();
            audit_with(&cpu, &[&space], &[&object]).unwrap();
            finish(&cpu, space, Vec::from([object]));
        }
    }
}
