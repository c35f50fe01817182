//! Lazily freed pages: the operations that keep and find them, and moves that run out of frames.

use super::swap::{count, is_swapped, page_out, with_swap};
use crate::addr::{PAGE_SIZE as P, VirtRange};
use crate::audit::audit;
use crate::error::Errno;
use crate::fault::FaultError;
use crate::file::Object;
use crate::knob::{Locking, Setting};
use crate::space::{Advice, MapFlags, MemoryLock, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::sync::wait::Spin;
use crate::table::node::{self, LAST};
use crate::table::protocol::{self, MOST_TAKEN};
use crate::table::walk::{Reached, descend};
use crate::testing::TestMachine;
use crate::testing::guest::{self, TestVm, cpu, load, store};
use crate::testing::store::{Memory, file};
use crate::tlb::tests::deferred::beside;
use crate::vm::Cpu;
use std::thread;
use std::time::Duration;
use std::vec::Vec;

const GIB: u64 = 1 << 30;
const AT: u64 = GIB;
/// Memory to be freed lazily.
const LAZY: u64 = 4 * GIB;
const TO: u64 = 2 * GIB;
const FAR: u64 = 8 * GIB;
/// In the next last-level table.
const NEXT: u64 = 512 * P;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags =
    MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED).union(MapFlags::NORESERVE);
const MOVE: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);

type TestCpu<'v> = Cpu<'v, TestMachine>;
type TestSpace = Space<TestMachine>;

/// A space with two VMAs of two pages, at `AT` and `distance` above, that hold 11 and 44.
fn with_two(cpu: &TestCpu<'_>, distance: u64) -> TestSpace {
    let space = Space::new(cpu).unwrap();
    for (at, value) in [(AT, 11), (AT + distance, 44)] {
        space.mmap(cpu, at, 2 * P, RW, FIXED).unwrap();
        store(cpu, &space, at, value).unwrap();
    }
    space
}

/// Stores to pages until `leave` frames are free, and frees the pages lazily. Returns the number of
/// pages.
fn free_lazily(vm: &TestVm, cpu: &TestCpu<'_>, space: &TestSpace, leave: u64) -> u64 {
    space.mmap(cpu, LAZY, GIB, RW, FIXED).unwrap();
    let mut pages = 0;
    while vm.free_frames() > leave {
        store(cpu, space, LAZY + pages * P, 1).unwrap();
        pages += 1;
    }
    space.madvise(cpu, LAZY, pages * P, Advice::Free).unwrap();
    pages
}

/// Stores to fresh pages until memory is out.
fn fill(cpu: &TestCpu<'_>, space: &TestSpace) {
    space.mmap(cpu, FAR, GIB, RW, FIXED).unwrap();
    let full = (0..).find_map(|page| store(cpu, space, FAR + page * P, 1).err());
    assert_eq!(full, Some(FaultError::OutOfMemory));
}

fn end(cpu: &TestCpu<'_>, space: TestSpace) {
    cpu.drain();
    audit(cpu, &[&space]).unwrap();
    space.exit(cpu);
    cpu.drain();
    audit(cpu, &[]).unwrap();
}

#[test]
fn a_partly_refused_move_of_several_vmas_loses_no_pages() {
    for keep in [RemapFlags::DONTUNMAP, RemapFlags::empty()] {
        let vm = guest::vm(1, 512);
        let cpu = cpu(&vm, 0);
        let space = with_two(&cpu, 4 * P);
        // The second VMA, either the old or the new one, would exceed the limit.
        vm.set(Setting::MaxMapCount(if keep.is_empty() { 1 } else { 3 }));
        let moved = space.mremap(&cpu, AT, 6 * P, 6 * P, MOVE | keep, TO);
        vm.set(Setting::MaxMapCount(65530));
        let values = |at| [load(&cpu, &space, at), load(&cpu, &space, at + 4 * P)];
        let (here, there) = (values(AT), values(TO));
        assert!(there[0] == Ok(11) || here[0] == Ok(11), "{moved:?}: {here:?} {there:?}");
        assert!(there[1] == Ok(44) || here[1] == Ok(44), "{moved:?}: {here:?} {there:?}");
        end(&cpu, space);
    }
}

#[test]
fn a_move_of_several_vmas_continues_after_reclaim() {
    for keep in [RemapFlags::DONTUNMAP, RemapFlags::empty()] {
        let vm = guest::vm(1, 200);
        let cpu = cpu(&vm, 0);
        // The second needs a table of its own, for which there is no frame.
        let space = with_two(&cpu, NEXT);
        free_lazily(&vm, &cpu, &space, 2);
        let len = NEXT + 2 * P;
        assert_eq!(space.mremap(&cpu, AT, len, len, MOVE | keep, FAR), Ok(FAR));
        assert_eq!(load(&cpu, &space, FAR), Ok(11));
        assert_eq!(load(&cpu, &space, FAR + NEXT), Ok(44));
        let left = if keep.is_empty() { Err(FaultError::Segv { mapped: false }) } else { Ok(0) };
        assert_eq!([AT, AT + NEXT].map(|at| load(&cpu, &space, at)), [left; 2]);
        assert_ne!(vm.totals().get(Counter::LazilyFreed), 0);
        end(&cpu, space);
    }
}

#[test]
fn a_range_that_begins_with_a_hole_reports_no_mapping() {
    let vm = guest::vm(1, 200);
    let cpu = cpu(&vm, 0);
    let space = with_two(&cpu, 4 * P);
    let refused = space.mremap(&cpu, AT + 2 * P, 4 * P, 4 * P, MOVE, TO).unwrap_err();
    assert_eq!(refused.errno, Errno::EFAULT);
    end(&cpu, space);
}

/// Two CPUs need frames at once. While one CPU reclaims, the other must not get an out-of-memory
/// error.
#[test]
fn memory_is_not_out_while_another_cpu_reclaims() {
    for round in 0..8 {
        let vm = guest::vm(3, 4400);
        let (a, b, c) = (cpu(&vm, 0), cpu(&vm, 1), cpu(&vm, 2));
        let space = Space::new(&a).unwrap();
        let pages = free_lazily(&vm, &a, &space, 128);
        space.mmap(&a, FAR, 2 * GIB, RW, FIXED).unwrap();
        a.drain();
        let store_many = |cpu: TestCpu<'_>, from: u64| {
            let failed = (0..1000).find(|page| store(&cpu, &space, from + page * P, 5).is_err());
            (failed, pages - vm.totals().get(Counter::LazilyFreed))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = [(b, FAR), (c, FAR + GIB)]
                .map(|(cpu, from)| scope.spawn(move || store_many(cpu, from)))
                .into();
            for thread in threads {
                let (failed, left) = thread.join().unwrap();
                assert_eq!(failed, None, "round {round}: {left} lazily freed pages remain");
            }
        });
    }
}

#[test]
fn locked_and_populated_pages_stay() {
    let lock = |cpu: &TestCpu<'_>, space: &TestSpace| space.mlock(cpu, AT, 8 * P, MemoryLock::Now);
    let on_fault =
        |cpu: &TestCpu<'_>, space: &TestSpace| space.mlock(cpu, AT, 8 * P, MemoryLock::OnFault);
    let populate =
        |cpu: &TestCpu<'_>, space: &TestSpace| space.madvise(cpu, AT, 8 * P, Advice::PopulateWrite);
    let read =
        |cpu: &TestCpu<'_>, space: &TestSpace| space.madvise(cpu, AT, 8 * P, Advice::PopulateRead);
    type Keep<'a> = &'a dyn Fn(&TestCpu<'_>, &TestSpace) -> Result<(), crate::error::Error>;
    let ways: [(Keep<'_>, usize); 4] = [(&lock, 8), (&on_fault, 8), (&populate, 8), (&read, 0)];
    for (way, (keep, stay)) in ways.into_iter().enumerate() {
        let vm = guest::vm(1, 256);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        space.mmap(&cpu, AT, 8 * P, RW, FIXED).unwrap();
        (0..8).for_each(|page| store(&cpu, &space, AT + page * P, 1 + page).unwrap());
        space.madvise(&cpu, AT, 8 * P, Advice::Free).unwrap();
        keep(&cpu, &space).unwrap();
        fill(&cpu, &space);
        let present = |page: &u64| space.entry_at(&cpu, AT + page * P).is_present();
        assert_eq!((0..8).filter(present).count(), stay, "way {way}");
        space.munmap(&cpu, FAR, GIB).unwrap();
        cpu.drain();
        let value = |page| if stay == 8 { 1 + page } else { 0 };
        (0..8).for_each(|page| {
            assert_eq!(load(&cpu, &space, AT + page * P), Ok(value(page)), "way {way}");
        });
        end(&cpu, space);
    }
}

/// Dropped spaces stay on the list of spaces with lazily freed pages.
#[test]
fn a_long_list_of_spaces_is_dropped_without_a_deep_stack() {
    let many = if cfg!(miri) { 20 } else { 3000 };
    let drops = move || {
        let vm = guest::vm(1, 5 * many + 200);
        let own = cpu(&vm, 0);
        for _ in 0..many {
            let space = Space::new(&own).unwrap();
            space.mmap(&own, AT, P, RW, FIXED).unwrap();
            store(&own, &space, AT, 1).unwrap();
            space.madvise(&own, AT, P, Advice::Free).unwrap();
        }
    };
    std::thread::Builder::new().stack_size(256 << 10).spawn(drops).unwrap().join().unwrap();
}

/// Creates a space of `pages` lazily freed pages from `AT` on. Page n contains n + 1.
fn freed_lazily(cpu: &TestCpu<'_>, pages: u64) -> TestSpace {
    let space = Space::new(cpu).unwrap();
    space.mmap(cpu, AT, pages * P, RW, FIXED).unwrap();
    (0..pages).for_each(|page| store(cpu, &space, AT + page * P, page + 1).unwrap());
    space.madvise(cpu, AT, pages * P, Advice::Free).unwrap();
    space
}

#[test]
fn a_page_held_by_a_fault_is_reclaimed_later() {
    let vm = guest::vm(2, 256);
    let [cpu0, cpu1] = [0, 1].map(|id| cpu(&vm, id));
    let space = freed_lazily(&cpu0, 4);
    let section = cpu0.section();
    // SAFETY: inside a grace section.
    let Reached::Last(slots) = (unsafe { descend(vm.machine(), space.root(), AT) }) else {
        panic!("a table")
    };
    let slot = &slots[node::index(AT + 2 * P, LAST)];
    let held = protocol::take(slot, node::load(slot), &Spin).unwrap();
    assert_eq!(cpu1.reclaim_lazy(4), 3);
    held.revert();
    drop(section);
    assert_eq!(cpu1.reclaim_lazy(4), 1);
    assert_eq!(cpu1.reclaim_lazy(4), 0);
    cpu1.drain();
    end(&cpu0, space);
}

#[test]
fn reclaim_frees_about_the_requested_number() {
    let vm = guest::vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let pages = 4 * MOST_TAKEN as u64;
    let space = freed_lazily(&cpu, pages);
    let freed = cpu.reclaim_lazy(MOST_TAKEN + 1);
    assert!((MOST_TAKEN + 1..=2 * MOST_TAKEN).contains(&freed), "{freed}");
    assert_eq!(load(&cpu, &space, AT + (pages - 1) * P), Ok(pages));
    assert_eq!(cpu.reclaim_lazy(usize::MAX), 4 * MOST_TAKEN - freed);
    assert_eq!(load(&cpu, &space, AT + (pages - 1) * P), Ok(0));
    end(&cpu, space);
}

/// Under every policy, an operation with a lock of the space, even a fault on one page, keeps
/// reclaim out.
#[test]
fn reclaim_waits_for_the_locks_of_every_policy() {
    for locking in Locking::ALL {
        let vm = guest::vm(2, 256);
        vm.set(Setting::Locking(locking));
        let cpu0 = cpu(&vm, 0);
        let space = freed_lazily(&cpu0, 2);
        let reclaim = || {
            let cpu1 = cpu(&vm, 1);
            let freed = cpu1.reclaim_lazy(2);
            cpu1.drain();
            freed
        };
        thread::scope(|scope| {
            let held = space.share(&cpu0, VirtRange::page(AT), Counter::RangeLockFault);
            let reclaim = scope.spawn(reclaim);
            thread::sleep(Duration::from_millis(20));
            let waits = !reclaim.is_finished();
            drop(held);
            assert_eq!((waits, reclaim.join().unwrap()), (true, 2), "{locking:?}");
        });
        end(&cpu0, space);
    }
}

/// Paging out by advice, without a swap area. A page shared with another space stays.
#[test]
fn lazily_freed_pages_are_evicted() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = freed_lazily(&cpu, 4);
    store(&cpu, &space, AT, 15).unwrap();
    space.madvise(&cpu, AT, 2 * P, Advice::PageOut).unwrap();
    let child = space.fork(&cpu).unwrap();
    space.madvise(&cpu, AT, 4 * P, Advice::PageOut).unwrap();
    assert_eq!((space.resident_pages(&cpu), child.resident_pages(&cpu)), (3, 3));
    assert_eq!(vm.totals().get(Counter::LazilyFreed), 1);
    assert_eq!([0, 1, 2, 3].map(|at| load(&cpu, &space, AT + at * P).unwrap()), [15, 0, 3, 4]);
    // A kernel that evicts a program also evicts shared pages. Pages with other contents cannot be
    // evicted.
    space.evict(&cpu, AT, 4 * P).unwrap();
    assert_eq!([0, 1, 2, 3].map(|at| load(&cpu, &child, AT + at * P).unwrap()), [15, 0, 0, 0]);
    assert_eq!(vm.totals().get(Counter::LazilyFreed), 3);
    cpu.drain();
    audit(&cpu, &[&space, &child]).unwrap();
    [space, child].into_iter().for_each(|space| space.exit(&cpu));
}

/// The flush is necessary although the page, shared by a fork, is read-only: the next load must
/// return zeros.
#[test]
fn a_lazily_freed_page_is_evicted_with_a_flush() {
    let vm = guest::vm(2, 256);
    let cpu = cpu(&vm, 0);
    let space = freed_lazily(&cpu, 2);
    let child = space.fork(&cpu).unwrap();
    beside(&vm, &space, || {
        assert_eq!(load(&cpu, &space, AT), Ok(1));
        space.evict(&cpu, AT, 2 * P).unwrap();
        let counts = [Counter::LazilyFreed, Counter::FlushDeferred].map(|it| count(&cpu, it));
        assert_eq!(counts, [2, 0]);
        assert_eq!((load(&cpu, &space, AT), vm.usage().flush_pending), (Ok(0), 0));
    });
    child.exit(&cpu);
    end(&cpu, space);
}

/// A lazily freed page that one of its programs needs again is swapped out. After its swap-in, the
/// page no longer counts as lazily freed.
#[test]
fn a_swapped_in_page_is_not_lazily_freed() {
    with_swap((64, 16, 16), |cpu, space, _| {
        store(cpu, space, AT, 5).unwrap();
        store(cpu, space, AT + P, 6).unwrap();
        space.madvise(cpu, AT, 2 * P, Advice::Free).unwrap();
        let child = space.fork(cpu).unwrap();
        space.mlock(cpu, AT, P, MemoryLock::Now).unwrap();
        space.mlock(cpu, AT, P, MemoryLock::No).unwrap();
        space.evict(cpu, AT, P).unwrap();
        assert!(is_swapped(cpu, space, 0) && is_swapped(cpu, &child, 0));
        assert_eq!((load(cpu, space, AT), load(cpu, &child, AT)), (Ok(5), Ok(5)));
        cpu.reclaim_lazy(64);
        for space in [space, &child] {
            assert_eq!((load(cpu, space, AT), load(cpu, space, AT + P)), (Ok(5), Ok(0)));
        }
        child.exit(cpu);
    });
}

/// Lazily freed pages are dropped without a write, by advice and by reclaim. Pages with a later
/// store are swapped out.
#[test]
fn lazily_freed_pages_are_not_swapped_out() {
    with_swap((64, 16, 16), |cpu, space, _| {
        (0..8).for_each(|page| store(cpu, space, AT + page * P, 5 + page).unwrap());
        space.madvise(cpu, AT, 8 * P, Advice::Free).unwrap();
        store(cpu, space, AT, 15).unwrap();
        page_out(cpu, space, 0, 4);
        assert_eq!((space.swapped_pages(cpu), count(cpu, Counter::LazilyFreed)), (1, 3));
        assert_eq!(count(cpu, Counter::PageStolen), 4);
        assert!(is_swapped(cpu, space, 0));
        assert_eq!((load(cpu, space, AT), load(cpu, space, AT + P)), (Ok(15), Ok(0)));
        // A locked page is needed again.
        space.mlock(cpu, AT + 4 * P, P, MemoryLock::Now).unwrap();
        space.evict(cpu, AT + 4 * P, 4 * P).unwrap();
        assert_eq!((space.swapped_pages(cpu), count(cpu, Counter::LazilyFreed)), (0, 6));
        assert_eq!((load(cpu, space, AT + 4 * P), load(cpu, space, AT + 7 * P)), (Ok(9), Ok(0)));
    });
}

/// Unmapped file pages do not count as lazily freed pages.
#[test]
fn unmapped_pages_of_files_are_evicted_once() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = freed_lazily(&cpu, 1);
    let memory = Memory::new(16, 0);
    let file = file(&cpu, &memory);
    file.read_ahead(&cpu, 0..8).unwrap();
    assert_eq!(file.evict(&cpu, 0..16), 8);
    let counts = [Counter::PageStolen, Counter::LazilyFreed].map(|it| count(&cpu, it));
    assert_eq!(counts, [8, 0]);
    Object::release(file, &cpu);
    end(&cpu, space);
}

/// The order in which the spaces got lazily freed pages does not matter.
#[test]
fn lazily_freed_pages_of_all_spaces_are_found() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let spaces = [(); 3].map(|()| Space::new(&cpu).unwrap());
    for space in [&spaces[1], &spaces[2], &spaces[0]] {
        guest::map(&cpu, space, 0, 4, guest::RW);
        store(&cpu, space, AT, 1).unwrap();
        space.madvise(&cpu, AT, 4 * P, Advice::Free).unwrap();
    }
    assert_eq!(cpu.reclaim_lazy(usize::MAX), 3);
    spaces.into_iter().for_each(|space| space.exit(&cpu));
}
