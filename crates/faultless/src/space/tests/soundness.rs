//! Misuse by safe code that could break the subsystem. The result is a panic with a message, before
//! any change. Compile errors for misuse are tested in examples at the declarations.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::audit::{audit, audit_with, stable_entry};
use crate::fault::Access;
use crate::fault::prefault::ThreadStreams;
use crate::file::Object;
use crate::heap::Shared;
use crate::space::{
    Advice, Backing, DeviceMemory, MapFlags, MemPolicy, MemoryLock, PrivateCopies, Prot,
    RemapFlags, Space,
};
use crate::table::format::{CANONICAL_END, CacheMode, ENTRIES, USER_END, USER_ROOT_ENTRIES};
use crate::table::node::{self, ROOT};
use crate::testing::TestMachine;
use crate::testing::guest::{self, TestVm, cpu, store};
use crate::vm::Cpu;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::string::{String, ToString};
use std::vec::Vec;

const AT: u64 = 1 << 30;
const P: u64 = PAGE_SIZE;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);
const FIXED: MapFlags = PRIVATE.union(MapFlags::FIXED);
/// Frames of a machine.
const FRAMES: u32 = 64;

type TestSpace = Space<TestMachine>;
type TestCpu<'v> = Cpu<'v, TestMachine>;

/// Returns the panic message of `misuse`.
fn says<R>(what: &str, misuse: impl FnOnce() -> R) -> String {
    let Err(message) = catch_unwind(AssertUnwindSafe(misuse)) else {
        panic!("{what}: no panic");
    };
    match message.downcast::<String>() {
        Ok(message) => *message,
        Err(message) => message
            .downcast::<&str>()
            .map_or_else(|_| panic!("{what}: no sentence"), |message| message.to_string()),
    }
}

/// Checks that the subsystem contains only its initial allocations.
fn assert_clean(vm: &TestVm) {
    let cpu = cpu(vm, 0);
    cpu.drain();
    assert_eq!(audit(&cpu, &[]).unwrap().taken(), 1);
}

fn done<R>(_: R) {}

/// An operation on a space, and on an object mapped there.
type Operation = (&'static str, fn(&TestCpu<'_>, &TestSpace, &Shared<Object>));

const OPERATIONS: &[Operation] = &[
    ("activate", |cpu, space, _| space.activate(cpu)),
    // SAFETY: the machine has no MMU, and the call panics.
    ("deactivate", |cpu, space, _| unsafe { space.deactivate(cpu) }),
    ("fault_remote", |cpu, space, _| done(space.fault_remote(cpu, AT, Access::Write))),
    ("fault", |cpu, space, _| {
        done(space.fault(cpu, &ThreadStreams::new(), AT, Access::Write));
    }),
    ("fault, segv", |cpu, space, _| done(space.fault_remote(cpu, 2 * AT, Access::Write))),
    ("exit_thread", |cpu, space, _| space.exit_thread(cpu, &ThreadStreams::new())),
    ("mmap", |cpu, space, _| done(space.mmap(cpu, None, P, RW, PRIVATE))),
    ("mmap, shared", |cpu, space, _| {
        done(space.mmap(cpu, None, P, RW, MapFlags::SHARED | MapFlags::ANONYMOUS));
    }),
    ("mmap_object", |cpu, space, object| {
        let backing = Backing { object, first: 0, may_write: true };
        done(space.mmap_object(cpu, None, P, RW, MapFlags::SHARED, backing));
    }),
    ("mmap_device", |cpu, space, _| {
        let (first, cache) = (cpu.vm().machine().device(), CacheMode::Uncached);
        let device = DeviceMemory { first, cache, tag: 0, may_write: true };
        // SAFETY: the call panics.
        done(unsafe { space.mmap_device(cpu, None, P, RW, MapFlags::SHARED, device) });
    }),
    ("pin", |cpu, space, _| done(space.pin(cpu, AT, P, true))),
    ("munmap", |cpu, space, _| done(space.munmap(cpu, AT, P))),
    ("mprotect", |cpu, space, _| done(space.mprotect(cpu, AT, P, Prot::READ))),
    ("munmap, no length", |cpu, space, _| done(space.munmap(cpu, AT, 0))),
    ("munmap, unaligned", |cpu, space, _| done(space.munmap(cpu, AT + 1, P))),
    ("mprotect, no length", |cpu, space, _| done(space.mprotect(cpu, AT, 0, Prot::READ))),
    ("mprotect, unaligned", |cpu, space, _| done(space.mprotect(cpu, AT + 1, P, Prot::READ))),
    ("mlock, no length", |cpu, space, _| done(space.mlock(cpu, AT, 0, MemoryLock::Now))),
    ("mlock, unaligned", |cpu, space, _| done(space.mlock(cpu, AT + 1, P, MemoryLock::Now))),
    ("mbind, no length", |cpu, space, _| done(space.mbind(cpu, AT, 0, MemPolicy::Local))),
    ("madvise, no length", |cpu, space, _| done(space.madvise(cpu, AT, 0, Advice::DontNeed))),
    ("mremap, no length", |cpu, space, _| {
        done(space.mremap(cpu, AT, 0, 0, RemapFlags::empty(), 0));
    }),
    ("mmap, no length", |cpu, space, _| done(space.mmap(cpu, None, 0, RW, PRIVATE))),
    ("mincore, no length", |cpu, space, _| done(space.mincore(cpu, AT, 0, drop))),
    ("mincore, unaligned", |cpu, space, _| done(space.mincore(cpu, AT + 1, P, drop))),
    ("evict, no length", |cpu, space, _| done(space.evict(cpu, AT, 0))),
    ("pin, no length", |cpu, space, _| done(space.pin(cpu, AT, 0, true))),
    ("read_bytes, no length", |cpu, space, _| done(space.read_bytes(cpu, AT, &mut []))),
    ("pages, no length", |cpu, space, _| {
        space.pages(cpu, VirtRange { start: AT, end: AT }, |_, _| ());
    }),
    ("write_protect", |cpu, space, object| space.write_protect(cpu, object, 0..1)),
    ("mremap", |cpu, space, _| {
        done(space.mremap(cpu, AT, P, 4 * P, RemapFlags::MAYMOVE, 0));
    }),
    ("mlock", |cpu, space, _| done(space.mlock(cpu, AT, P, MemoryLock::Now))),
    ("mbind", |cpu, space, _| done(space.mbind(cpu, AT, P, MemPolicy::Local))),
    ("madvise", |cpu, space, _| done(space.madvise(cpu, AT, P, Advice::DontNeed))),
    ("madvise, populate", |cpu, space, _| {
        done(space.madvise(cpu, AT, P, Advice::PopulateWrite));
    }),
    ("set_heap_start", |cpu, space, _| done(space.set_heap_start(cpu, AT))),
    ("brk", |cpu, space, _| done(space.brk(cpu, u64::MAX))),
    ("fork", |cpu, space, _| done(space.fork(cpu))),
    ("revoke", |cpu, space, object| space.revoke(cpu, object, 0..u64::MAX, PrivateCopies::Drop)),
    ("areas", |cpu, space, _| space.areas(cpu, drop)),
    ("each_area", |cpu, space, _| space.each_area(cpu, VirtRange::USER, |_| true)),
    ("maps", |cpu, space, _| done(space.maps(cpu).to_string())),
    ("page_at", |cpu, space, _| done(space.page_at(cpu, AT))),
    ("mincore", |cpu, space, _| done(space.mincore(cpu, AT, P, drop))),
    ("walk", |cpu, space, _| done(space.walk(cpu, AT, Access::Write))),
    ("read_bytes", |cpu, space, _| done(space.read_bytes(cpu, AT, &mut [0; 8]))),
    ("write_bytes", |cpu, space, _| done(space.write_bytes(cpu, AT, &[0; 8]))),
    ("is_mapped", |cpu, space, _| done(space.is_mapped(cpu, VirtRange::page(AT)))),
    ("shared_place", |cpu, space, _| done(space.shared_place(cpu, AT))),
    ("resident_pages", |cpu, space, _| done(space.resident_pages(cpu))),
    ("map_count", |cpu, space, _| done(space.map_count(cpu))),
    ("audit", |cpu, space, _| done(audit(cpu, &[space]))),
    ("audit_with", |cpu, _, object| done(audit_with(cpu, &[], &[object]))),
    ("stable_entry", |cpu, space, _| done(stable_entry(cpu, space, AT))),
    ("release", |cpu, _, object| Object::release(object.clone(), cpu)),
    ("set_pages", |cpu, _, object| done(object.set_pages(cpu, 0))),
    ("free_pages", |cpu, _, object| object.free_pages(cpu, 0..1)),
    ("has_page", |cpu, _, object| done(object.has_page(cpu, 0))),
    ("Object::resident_pages", |cpu, _, object| done(object.resident_pages(cpu))),
    ("read_page", |cpu, _, object| done(object.read_page(cpu, 0, |_| ()))),
    ("write_page", |cpu, _, object| done(object.write_page(cpu, 0, |_| ()))),
];

#[test]
fn spaces_and_objects_require_cpus_of_their_vm() {
    let (mine, other) = (guest::vm(1, FRAMES), guest::vm(1, FRAMES));
    {
        let (mine, other) = (cpu(&mine, 0), cpu(&other, 0));
        let space = Space::new(&mine).unwrap();
        let object = Object::try_new(&mine, 2, 0).unwrap();
        space.mmap(&mine, AT, 2 * P, RW, FIXED).unwrap();
        store(&mine, &space, AT, 42).unwrap();
        object.write_page(&mine, 0, |_| ()).unwrap();
        let backing = Backing { object: &object, first: 0, may_write: true };
        space.mmap_object(&mine, AT + 8 * P, P, RW, MapFlags::SHARED, backing).unwrap();
        store(&mine, &space, AT + 8 * P, 43).unwrap();
        for (name, operation) in OPERATIONS {
            let message = says(name, || operation(&other, &space, &object));
            assert!(message.contains("of another Vm"), "{name}: {message}");
        }
        // Objects of one subsystem cannot be mapped in spaces of another either.
        let elsewhere = Space::new(&other).unwrap();
        let backing = Backing { object: &object, first: 0, may_write: true };
        let message = says("mmap_object", || {
            elsewhere.mmap_object(&other, None, P, RW, MapFlags::SHARED, backing)
        });
        assert!(message.contains("of another Vm"), "{message}");
        let message =
            says("revoke", || elsewhere.revoke(&other, &object, 0..1, PrivateCopies::Keep));
        assert!(message.contains("of another Vm"), "{message}");
        let message = says("write_protect", || elsewhere.write_protect(&other, &object, 0..1));
        assert!(message.contains("of another Vm"), "{message}");
        elsewhere.exit(&other);
        assert_eq!(guest::load(&mine, &space, AT), Ok(42));
        space.exit(&mine);
        Object::release(object, &mine);
    }
    assert_clean(&mine);
    assert_clean(&other);
}

#[test]
fn a_space_ends_only_on_a_cpu_of_its_vm() {
    let (mine, other) = (guest::vm(1, FRAMES), guest::vm(1, FRAMES));
    let space = Space::new(&cpu(&mine, 0)).unwrap();
    let message = says("exit", || space.exit(&cpu(&other, 0)));
    assert!(message.contains("of another Vm"), "{message}");
    assert_clean(&other);
    // The space was dropped.
    assert_clean(&mine);
}

/// CPUs use the tables of the spaces they run.
#[test]
fn a_running_space_does_not_end() {
    let vm = guest::vm(2, FRAMES);
    let cpus = [cpu(&vm, 0), cpu(&vm, 1)];
    let space = || Space::new(&cpus[0]).unwrap();
    let running = space();
    running.activate(&cpus[1]);
    assert!(says("exit", || running.exit(&cpus[0])).contains("while CPU 1 runs it"));
    let running = space();
    running.activate(&cpus[0]);
    assert!(says("exit", || running.exit(&cpus[0])).contains("while CPU 0 runs it"));
}

/// A CPU runs one space at a time, once, and can leave only a space it runs. A space therefore
/// knows its running CPUs.
#[test]
fn a_cpu_runs_one_space() {
    let vm = guest::vm(2, FRAMES);
    {
        let cpus = [cpu(&vm, 0), cpu(&vm, 1)];
        let [space, other] = [(); 2].map(|()| Space::new(&cpus[0]).unwrap());
        // SAFETY: the machine has no MMU.
        let leave = |space: &TestSpace, at: usize| unsafe { space.deactivate(&cpus[at]) };
        assert!(says("leaves", || leave(&space, 0)).contains("does not run"));
        space.activate(&cpus[0]);
        assert!(says("runs twice", || space.activate(&cpus[0])).contains("already runs"));
        assert!(says("runs both", || other.activate(&cpus[0])).contains("but runs"));
        assert!(says("deactivates another space", || leave(&other, 0)).contains("does not run"));
        assert!(says("deactivates on another CPU", || leave(&space, 1)).contains("does not run"));
        leave(&space, 0);
        assert!(says("deactivates twice", || leave(&space, 0)).contains("does not run"));
        other.activate(&cpus[0]);
        leave(&other, 0);
        other.exit(&cpus[0]);
        space.exit(&cpus[1]);
        cpus[1].drain();
    }
    assert_clean(&vm);
}

/// A subsystem keeps its identity when it moves. A space accepts no other subsystem at the old
/// location.
#[test]
fn a_moved_vm_keeps_its_identity() {
    let (mut mine, mut other) = (guest::vm(1, FRAMES), guest::vm(1, FRAMES));
    let space = Space::new(&cpu(&mine, 0)).unwrap();
    core::mem::swap(&mut mine, &mut other);
    assert!(
        says("fault", || space.fault_remote(&cpu(&mine, 0), AT, Access::Read))
            .contains("another Vm")
    );
    assert!(space.fault_remote(&cpu(&other, 0), AT, Access::Read).is_err(), "no mapping");
    space.exit(&cpu(&other, 0));
    assert_clean(&other);
}

/// Open sections are counted in a byte next to the epoch. With an overflow, the sections would
/// protect no memory.
#[test]
fn nested_listings_keep_their_vmas_or_panic() {
    fn nested(cpus: &[TestCpu<'_>; 2], space: &TestSpace, depth: u32) {
        space.each_area(&cpus[0], VirtRange::USER, |area| {
            if depth == 256 {
                // If no section were open any more, this call would not wait.
                space.munmap(&cpus[1], AT, P).unwrap();
                cpus[1].wait_grace();
                return false;
            }
            nested(cpus, space, depth + 1);
            assert_eq!(area.range.start, AT, "a visited VMA was freed");
            false
        });
    }
    let vm = guest::vm(2, FRAMES);
    {
        let cpus = [cpu(&vm, 0), cpu(&vm, 1)];
        let cpu = &cpus[0];
        let space = Space::new(cpu).unwrap();
        space.mmap(cpu, AT, P, RW, FIXED).unwrap();
        let message = says("each_area", || nested(&cpus, &space, 1));
        assert!(message.contains("nest at most 255 deep"), "{message}");
        // All sections are closed again.
        space.munmap(cpu, AT, P).unwrap();
        cpu.wait_grace();
        space.exit(cpu);
    }
    assert_clean(&vm);
}

/// A CPU that waited for a grace period inside one of its own sections would wait forever.
#[test]
fn waiting_for_a_grace_period_in_a_listing_panics() {
    let vm = guest::vm(1, FRAMES);
    {
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        space.mmap(&cpu, AT, P, RW, FIXED).unwrap();
        space.mmap(&cpu, AT + 8 * P, P, RW, FIXED).unwrap();
        // The owner of a space retires no VMAs.
        vm.set(crate::knob::Setting::EditInPlace(false));
        space.munmap(&cpu, AT, P).unwrap();
        let message = says("wait_grace", || space.areas(&cpu, |_| cpu.wait_grace()));
        assert!(message.contains("grace"), "{message}");
        space.exit(&cpu);
    }
    assert_clean(&vm);
}

/// The upper half of a root table belongs to the kernel, and leads to tables in frames possibly
/// unknown to the machine.
#[test]
fn lookups_do_not_enter_the_kernel_half() {
    let vm = guest::vm(1, FRAMES);
    {
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        // SAFETY: the root of a live space; its upper half is the test's, the kernel.
        let slots = unsafe { node::entries(vm.machine(), space.root()) };
        let kernel = crate::table::Entry::table(crate::FrameNumber(0x00de_adbe));
        for slot in &slots[USER_ROOT_ENTRIES..] {
            slot.store(kernel.0, crate::sync::atomic::Ordering::Relaxed);
        }
        let heads = [USER_END, CANONICAL_END, 0xffff_8000_0000_0000, u64::MAX];
        for addr in heads {
            assert_eq!(space.page_at(&cpu, addr), None, "{addr:#x}");
            assert!(space.fault_remote(&cpu, addr, Access::Read).is_err(), "{addr:#x}");
            assert_eq!(space.shared_place(&cpu, addr), None, "{addr:#x}");
            assert_eq!(space.walk(&cpu, addr, Access::Write), None, "{addr:#x}");
            assert!(space.write_bytes(&cpu, addr, &[1]).is_err(), "{addr:#x}");
            assert!(space.pin(&cpu, addr, 1, false).is_err(), "{addr:#x}");
            assert_eq!(stable_entry(&cpu, &space, addr), None, "{addr:#x}");
            assert!(space.mincore(&cpu, addr & !(P - 1), P, drop).is_err(), "{addr:#x}");
        }
        let indices: Vec<_> = (USER_ROOT_ENTRIES..ENTRIES)
            .map(|at| node::index(at as u64 * node::entry_span(ROOT), ROOT))
            .collect();
        assert!(
            indices.iter().all(|at| *at >= USER_ROOT_ENTRIES),
            "a walk would find the stored entries"
        );
        space.exit(&cpu);
    }
    assert_clean(&vm);
}
