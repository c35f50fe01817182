//! Private pages that leave memory for the swap area and come back: no contents are lost, and the
//! right programs get the pages.

use crate::audit::{audit, audit_with};
use crate::error::Errno;
use crate::fault::{Access, FaultError, FaultKind};
use crate::file::Object;
use crate::knob::{Locking, Setting};
use crate::space::{Advice, MemoryLock, PrivateCopies, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::sync::atomic::Ordering;
use crate::sync::wait::{Yield, until};
use crate::testing::Zeros;
use crate::testing::guest::{
    self, AT, FIXED, P, PRIVATE, RW, SHARED, TestCpu, TestSpace, TestVm, cpu, load, map, store,
};
use crate::testing::store::{Memory, PAGE, Plan, file};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use std::vec::Vec;

const READ: Prot = Prot::READ;

/// Makes a store of `slots` pages the swap area.
pub(crate) fn swap_on(cpu: &TestCpu<'_>, slots: u64) -> Arc<Memory> {
    let memory = Memory::new(slots, 0);
    cpu.swap_on(memory.clone()).unwrap();
    memory
}

/// Runs `test` on a machine of `frames` frames and `slots` slots, with `pages` pages of private
/// memory at `AT`.
pub(crate) fn with_swap(
    (frames, slots, pages): (u32, u64, u64),
    test: impl Fn(&TestCpu<'_>, &TestSpace, &Arc<Memory>),
) {
    for locking in Locking::ALL {
        for deferred in [false, true] {
            let vm = guest::vm(1, frames);
            vm.set(Setting::Locking(locking));
            vm.set(Setting::DeferredFlush(deferred));
            let cpu = cpu(&vm, 0);
            let memory = swap_on(&cpu, slots);
            let space = Space::new(&cpu).unwrap();
            map(&cpu, &space, 0, pages, RW);
            test(&cpu, &space, &memory);
            finish(&cpu, Vec::from([space]));
        }
    }
}

/// Ends the spaces, and checks that only the area's tables, the zero page, and unused pages of the
/// swap cache remain.
pub(crate) fn finish(cpu: &TestCpu<'_>, spaces: Vec<TestSpace>) {
    cpu.drain();
    audit(cpu, &spaces.iter().collect::<Vec<_>>()).unwrap();
    spaces.into_iter().for_each(|space| space.exit(cpu));
    cpu.drain();
    assert_eq!(cpu.swap_usage().1, 0, "a slot is lost");
    cpu.reclaim(u64::MAX);
    cpu.drain();
    let census = audit(cpu, &[]).unwrap();
    assert_eq!((census.anon, census.shared), (0, 0), "pages without users remain");
    assert_eq!(census.taken(), census.tables + 1);
}

pub(crate) fn count(cpu: &TestCpu<'_>, counter: Counter) -> u64 {
    cpu.vm().totals().get(counter)
}

pub(crate) fn page_out(cpu: &TestCpu<'_>, space: &TestSpace, page: u64, pages: u64) {
    space.madvise(cpu, AT + page * P, pages * P, Advice::PageOut).unwrap();
}

pub(crate) fn is_swapped(cpu: &TestCpu<'_>, space: &TestSpace, page: u64) -> bool {
    space.entry_at(cpu, AT + page * P).is_swapped()
}

#[test]
fn stores_may_exceed_memory() {
    with_swap((48, 200, 100), |cpu, space, memory| {
        for round in 1..4 {
            for page in 0..100 {
                store(cpu, space, AT + page * P, 1000 * round + page).unwrap();
            }
            for page in 0..100 {
                assert_eq!(load(cpu, space, AT + page * P), Ok(1000 * round + page));
            }
        }
        assert_eq!(space.swapped_pages(cpu) + space.resident_pages(cpu), 100);
        assert!(space.swapped_pages(cpu) > 50);
        assert!(count(cpu, Counter::SwapOut) > 200, "{}", count(cpu, Counter::SwapOut));
        assert!(count(cpu, Counter::SwapIn) > 200, "{}", count(cpu, Counter::SwapIn));
        assert_eq!(count(cpu, Counter::PrefaultWasted), 0);
        assert!(!memory.writes.lock().unwrap().is_empty());
    });
}

#[test]
fn a_shared_page_used_by_any_program_stays() {
    with_swap((256, 200, 160), |cpu, space, _| {
        (0..160).for_each(|page| store(cpu, space, AT + page * P, 70 + page).unwrap());
        let child = space.fork(cpu).unwrap();
        // At first all seem used.
        let mut freed = cpu.reclaim(1);
        while freed < 60 {
            for (space, pages) in [(space, 0..20), (&child, 20..40)] {
                for page in pages {
                    assert_eq!(load(cpu, space, AT + page * P), Ok(70 + page));
                }
            }
            freed += cpu.reclaim(10);
            let gone = (0..40).filter(|page| is_swapped(cpu, space, *page)).count();
            assert_eq!(gone, 0, "used pages were evicted");
        }
        child.exit(cpu);
    });
}

#[test]
fn swapped_pages_are_reported() {
    with_swap((64, 16, 8), |cpu, space, _| {
        (0..4).for_each(|page| store(cpu, space, AT + page * P, 70 + page).unwrap());
        page_out(cpu, space, 1, 2);
        assert_eq!((space.swapped_pages(cpu), space.resident_pages(cpu)), (2, 2));
        assert_eq!(cpu.swap_usage(), (16, 2));
        let mut core = Vec::new();
        space.mincore(cpu, AT, 4 * P, |there| core.push(there)).unwrap();
        assert_eq!(core, [true, false, false, true]);
        let mut listed = Vec::new();
        space.areas(cpu, |area| listed.push((area.resident, area.swapped)));
        assert_eq!(listed, [(2, 2)]);
        assert!(space.page_at(cpu, AT + P).is_none());
        let mut status = [Ok(9)];
        space.page_nodes(cpu, &[AT + P], &mut status);
        assert_eq!(status, [Err(Errno::ENOENT)]);
        assert_eq!(space.fault_remote(cpu, AT + P, Access::Read), Ok(FaultKind::Swapped));
        assert_eq!(load(cpu, space, AT + P), Ok(71));
        assert_eq!((space.swapped_pages(cpu), cpu.swap_usage().1), (1, 1));
        let counts = [Counter::SwapOut, Counter::SwapIn, Counter::SwapPage, Counter::MajorFault];
        assert_eq!(counts.map(|counter| count(cpu, counter)), [2, 1, 1, 1]);
        // From outside, as by a program.
        let mut bytes = [0; 8];
        space.read_bytes(cpu, AT + 2 * P, &mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 72);
        assert_eq!(cpu.swap_usage().1, 0);
    });
}

#[test]
fn only_one_swap_area_is_accepted() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    assert_eq!(cpu.swap_usage(), (0, 0));
    assert_eq!(cpu.swap_on(Memory::new(0, 100)), Err(Errno::EINVAL), "no whole page");
    // A frame for the root, and a frame for every 512 pages.
    assert_eq!(cpu.swap_on(Memory::new(512 * 80, 0)), Err(Errno::ENOMEM));
    swap_on(&cpu, 600);
    assert_eq!(cpu.swap_on(Memory::new(5, 0)), Err(Errno::EBUSY));
    cpu.drain();
    assert_eq!(audit(&cpu, &[]).unwrap().tables, 3);
}

#[test]
fn no_page_is_swapped_out_without_tables() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let file = file(&cpu, &Memory::new(32, 0));
    (0..32).for_each(|page| assert_eq!(guest::read_object(&cpu, &file, page), Some(page + 1)));
    for frames in [65, 1 << 19, 1 << 30] {
        assert_eq!(cpu.swap_on(Arc::new(Zeros(frames * 512))), Err(Errno::ENOMEM), "{frames}");
        assert_eq!(file.resident_pages(&cpu), 32, "{frames}");
    }
    Object::release(file, &cpu);
}

#[test]
fn a_full_area_accepts_no_pages() {
    with_swap((48, 8, 100), |cpu, space, _| {
        let mut stored = 0;
        let error = loop {
            match store(cpu, space, AT + stored * P, 7 + stored) {
                Ok(()) => stored += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error, FaultError::OutOfMemory);
        assert_eq!(cpu.swap_usage(), (8, 8));
        // The freed slots are used again.
        space.madvise(cpu, AT, 12 * P, Advice::DontNeed).unwrap();
        assert!(cpu.swap_usage().1 < 8);
        for page in 12..stored {
            assert_eq!(load(cpu, space, AT + page * P), Ok(7 + page));
        }
        for page in 0..12 {
            assert_eq!(load(cpu, space, AT + page * P), Ok(0));
        }
    });
}

/// A page that returns to its only owner is not copied. A page of two owners is copied.
#[test]
fn the_last_owner_reuses_the_page() {
    with_swap((64, 16, 8), |cpu, space, memory| {
        store(cpu, space, AT, 5).unwrap();
        store(cpu, space, AT + P, 6).unwrap();
        let child = space.fork(cpu).unwrap();
        cpu.reclaim(64);
        assert!([space, &child].iter().all(|space| is_swapped(cpu, space, 1)));
        assert_eq!(cpu.swap_usage().1, 2);
        assert_eq!(space.fault_remote(cpu, AT, Access::Write), Ok(FaultKind::Copy));
        store(cpu, space, AT, 50).unwrap();
        assert_eq!(child.fault_remote(cpu, AT, Access::Read), Ok(FaultKind::Swapped));
        assert_eq!((load(cpu, &child, AT), load(cpu, space, AT)), (Ok(5), Ok(50)));
        assert_eq!(memory.reads.lock().unwrap().len(), 1, "one read");
        // A child of a space with swapped pages.
        let second = space.fork(cpu).unwrap();
        assert_eq!(second.swapped_pages(cpu), 1);
        assert_eq!(load(cpu, &second, AT + P), Ok(6));
        child.exit(cpu);
        assert_eq!(space.fault_remote(cpu, AT + P, Access::Write), Ok(FaultKind::Swapped));
        assert_eq!(cpu.swap_usage().1, 0);
        store(cpu, space, AT + P, 60).unwrap();
        assert_eq!((load(cpu, &second, AT + P), load(cpu, &second, AT)), (Ok(6), Ok(50)));
        cpu.drain();
        audit(cpu, &[space, &second]).unwrap();
        second.exit(cpu);
    });
}

#[test]
fn used_pages_stay() {
    with_swap((128, 64, 32), |cpu, space, _| {
        (0..32).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
        space.mlock(cpu, AT + 9 * P, P, MemoryLock::Now).unwrap();
        let pins = space.pin(cpu, AT + 17 * P, P, true).unwrap();
        for part in [0..9, 10..32] {
            page_out(cpu, space, part.start, part.end - part.start);
        }
        cpu.reclaim(64);
        assert_eq!((space.swapped_pages(cpu), space.resident_pages(cpu)), (30, 2));
        assert!(!is_swapped(cpu, space, 9) && !is_swapped(cpu, space, 17));
        // A part of a locked range, a growing locked range, and a range locked in place.
        space.mlock(cpu, AT + 9 * P, P, MemoryLock::No).unwrap();
        space.mlock(cpu, AT, 8 * P, MemoryLock::Now).unwrap();
        space.munmap(cpu, AT + 2 * P, P).unwrap();
        (0..2).chain(3..12).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page)));
        cpu.reclaim(64);
        let stay: Vec<u64> =
            (0..32).filter(|page| !is_swapped(cpu, space, *page) && *page != 2).collect();
        assert_eq!(stay, [0, 1, 3, 4, 5, 6, 7, 17]);
        drop(pins);
        space.mlock(cpu, AT, 2 * P, MemoryLock::No).unwrap();
        space.mlock(cpu, AT + 3 * P, 5 * P, MemoryLock::No).unwrap();
        cpu.reclaim(64);
        assert_eq!(space.resident_pages(cpu), 0);
        // Zero pages that were only read need no write.
        space.madvise(cpu, AT + 20 * P, 4 * P, Advice::DontNeed).unwrap();
        (20..24).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(0)));
        page_out(cpu, space, 20, 4);
        assert!((20..24).all(|page| !is_swapped(cpu, space, page)));
    });
}

#[test]
fn repeatedly_used_pages_survive_a_scan() {
    with_swap((160, 1024, 600), |cpu, space, memory| {
        let hot = || (0..16).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(page)));
        (0..16).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
        for page in 16..600 {
            store(cpu, space, AT + page * P, page).unwrap();
            if page % 4 == 0 {
                hot();
            }
        }
        let reads = memory.reads.lock().unwrap().len();
        assert!(reads <= 24, "{reads} reads of pages in constant use");
        assert_eq!(count(cpu, Counter::PrefaultWasted), 0, "used pages do not count as wasted");
    });
}

#[test]
fn calls_keep_swapped_pages() {
    with_swap((64, 16, 16), |cpu, space, _| {
        (0..8).for_each(|page| store(cpu, space, AT + page * P, 30 + page).unwrap());
        page_out(cpu, space, 0, 8);
        assert_eq!(space.swapped_pages(cpu), 8);
        // Removed and restored permissions, then reduced permissions.
        space.mprotect(cpu, AT, P, Prot::empty()).unwrap();
        let segv = Err(FaultError::Segv { mapped: true });
        assert_eq!(load(cpu, space, AT), segv);
        space.mprotect(cpu, AT, P, RW).unwrap();
        space.mprotect(cpu, AT + P, P, READ).unwrap();
        assert_eq!((load(cpu, space, AT), load(cpu, space, AT + P)), (Ok(30), Ok(31)));
        assert_eq!(store(cpu, space, AT + P, 1), segv.map(drop));
        space.mprotect(cpu, AT + P, P, RW).unwrap();
        store(cpu, space, AT + P, 131).unwrap();
        assert_eq!(load(cpu, space, AT + P), Ok(131));
        // A move onto other swapped pages.
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        space.mremap(cpu, AT + 2 * P, 2 * P, 2 * P, flags, AT + 6 * P).unwrap();
        assert_eq!(space.swapped_pages(cpu), 4);
        assert_eq!((load(cpu, space, AT + 6 * P), load(cpu, space, AT + 7 * P)), (Ok(32), Ok(33)));
        cpu.drain();
        audit(cpu, &[space]).unwrap();
        // Unneeded pages free their slots.
        page_out(cpu, space, 4, 4);
        assert_eq!(space.swapped_pages(cpu), 4);
        space.madvise(cpu, AT + 4 * P, P, Advice::DontNeed).unwrap();
        space.madvise(cpu, AT + 5 * P, P, Advice::Free).unwrap();
        space.munmap(cpu, AT + 6 * P, P).unwrap();
        space.mmap(cpu, AT + 7 * P, P, RW, FIXED).unwrap();
        assert_eq!((space.swapped_pages(cpu), cpu.swap_usage().1), (0, 0));
        assert_eq!((load(cpu, space, AT + 4 * P), load(cpu, space, AT + 7 * P)), (Ok(0), Ok(0)));
    });
}

#[test]
fn pins_swap_pages_in() {
    with_swap((64, 16, 16), |cpu, space, _| {
        (0..4).for_each(|page| store(cpu, space, AT + page * P, 5 + page).unwrap());
        let child = space.fork(cpu).unwrap();
        cpu.reclaim(64);
        // The same for read-only memory: the space gets its own page.
        space.mprotect(cpu, AT, 2 * P, READ).unwrap();
        let pins = space.pin(cpu, AT, 2 * P, false).unwrap();
        let more = space.pin(cpu, AT + 2 * P, P, true).unwrap();
        assert_eq!(space.swapped_pages(cpu), 1);
        cpu.reclaim(64);
        assert_eq!(space.resident_pages(cpu), 3);
        for page in 0..4 {
            assert_eq!(load(cpu, &child, AT + page * P), Ok(5 + page));
            assert_eq!(load(cpu, space, AT + page * P), Ok(5 + page));
        }
        drop((pins, more));
        child.exit(cpu);
    });
}

/// A child's copy of a pinned page is filled before eviction.
#[test]
fn copies_of_pinned_pages_are_swapped_after_filling() {
    with_swap((64, 32, 8), |cpu, space, _| {
        (0..4).for_each(|page| store(cpu, space, AT + page * P, 5 + page).unwrap());
        let pins = space.pin(cpu, AT, 4 * P, true).unwrap();
        let child = space.fork(cpu).unwrap();
        cpu.reclaim(64);
        assert_eq!((space.swapped_pages(cpu), child.swapped_pages(cpu)), (0, 4));
        (0..4).for_each(|page| assert_eq!(load(cpu, &child, AT + page * P), Ok(5 + page)));
        drop(pins);
        child.exit(cpu);
    });
}

#[test]
fn private_copies_of_files_are_swapped() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    swap_on(&cpu, 32);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(8, 0);
    let file = file(&cpu, &memory);
    guest::map_object(&cpu, &space, (0, 8), RW, PRIVATE, (&file, 0));
    guest::map_object(&cpu, &space, (16, 8), RW, SHARED, (&file, 0));
    (0..4).for_each(|page| store(&cpu, &space, AT + page * P, 90 + page).unwrap());
    cpu.reclaim(64);
    assert_eq!((space.swapped_pages(&cpu), file.resident_pages(&cpu)), (4, 0));
    assert_eq!((load(&cpu, &space, AT), load(&cpu, &space, AT + 16 * P)), (Ok(90), Ok(1)));
    // A hole in the file keeps the private copies; a truncation removes them.
    file.punch(&cpu, 1..2).unwrap();
    space.revoke(&cpu, &file, 1..2, PrivateCopies::Keep);
    assert_eq!((load(&cpu, &space, AT + P), load(&cpu, &space, AT + 17 * P)), (Ok(91), Ok(0)));
    file.set_len(&cpu, 2 * P).unwrap();
    space.revoke(&cpu, &file, 2..u64::MAX, PrivateCopies::Drop);
    assert_eq!((space.swapped_pages(&cpu), cpu.swap_usage().1), (0, 0));
    assert_eq!(load(&cpu, &space, AT + 2 * P), Err(FaultError::Bus));
    cpu.drain();
    audit_with(&cpu, &[&space], &[&file]).unwrap();
    space.exit(&cpu);
    Object::release(file, &cpu);
    finish(&cpu, Vec::new());
}

#[test]
fn an_unwritable_page_stays() {
    with_swap((64, 16, 8), |cpu, space, memory| {
        (0..8).for_each(|page| store(cpu, space, AT + page * P, 5 + page).unwrap());
        memory.plan([Plan::Fail(PAGE), Plan::Fail(0)]);
        page_out(cpu, space, 0, 8);
        assert_eq!(space.swapped_pages(cpu), 8);
        assert_eq!(count(cpu, Counter::SwapOut), 1);
        // One page is read again; the other pages are present.
        for page in (0..8).rev() {
            assert_eq!(load(cpu, space, AT + page * P), Ok(5 + page));
        }
        assert_eq!((count(cpu, Counter::SwapIn), cpu.swap_usage().1), (1, 0));
        page_out(cpu, space, 0, 8);
        assert_eq!(count(cpu, Counter::SwapOut), 9);
        assert_eq!(load(cpu, space, AT), Ok(5));
    });
}

#[test]
fn an_unreadable_swapped_page_raises_a_bus_error() {
    with_swap((64, 16, 8), |cpu, space, memory| {
        (0..2).for_each(|page| store(cpu, space, AT + page * P, 5 + page).unwrap());
        let child = space.fork(cpu).unwrap();
        cpu.reclaim(64);
        memory.plan([Plan::Fail(0)]);
        assert_eq!(load(cpu, space, AT), Err(FaultError::Bus));
        assert_eq!((load(cpu, space, AT + P), load(cpu, &child, AT)), (Ok(6), Ok(5)));
        memory.plan([Plan::Fail(100)]);
        page_out(cpu, &child, 0, 2);
        assert_eq!(load(cpu, space, AT), Ok(5));
        child.exit(cpu);
        page_out(cpu, space, 0, 2);
        memory.plan([Plan::Fail(0)]);
        assert_eq!(space.pin(cpu, AT, P, true).unwrap_err().errno, Errno::EFAULT);
        space.munmap(cpu, AT, P).unwrap();
        assert_eq!((space.swapped_pages(cpu), cpu.swap_usage().1), (1, 1));
    });
}

#[test]
fn a_page_may_be_read_later() {
    with_swap((64, 16, 8), |cpu, space, memory| {
        store(cpu, space, AT, 5).unwrap();
        store(cpu, space, AT + P, 6).unwrap();
        page_out(cpu, space, 0, 2);
        memory.plan([Plan::Later, Plan::Later]);
        assert_eq!(space.fault_remote(cpu, AT, Access::Read), Ok(FaultKind::Pending));
        let pending = cpu.pending_read().unwrap();
        assert_eq!(space.fault_remote(cpu, AT, Access::Write), Ok(FaultKind::Pending));
        assert_eq!(cpu.pending_read().unwrap().id(), pending.id(), "one read");
        memory.complete(cpu, None);
        assert_eq!(pending.outcome(), Some(Ok(())));
        assert_eq!(load(cpu, space, AT), Ok(5));
        // During the read, the program frees the page, and another page gets its slot.
        assert_eq!(space.fault_remote(cpu, AT + P, Access::Read), Ok(FaultKind::Pending));
        let _pending = cpu.pending_read().unwrap();
        space.madvise(cpu, AT + P, P, Advice::DontNeed).unwrap();
        (0..8).for_each(|page| store(cpu, space, AT + page * P, 50 + page).unwrap());
        page_out(cpu, space, 0, 8);
        page_out(cpu, space, 0, 8);
        (0..8).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(50 + page)));
        page_out(cpu, space, 0, 8);
        memory.complete(cpu, None);
        (0..8).for_each(|page| assert_eq!(load(cpu, space, AT + page * P), Ok(50 + page)));
    });
}

/// Whenever a fault on a swapped page, or the swap-out of the page, transfers bytes, another CPU
/// changes the page.
#[test]
fn concurrent_changes_during_swap_lose_no_stores() {
    type Worst = fn(&TestCpu<'_>, &TestSpace);
    let worst: [Worst; 6] = [
        |cpu, space| assert_eq!(load(cpu, space, AT), Ok(5)),
        |cpu, space| store(cpu, space, AT + 8, 7).unwrap(),
        |cpu, space| space.madvise(cpu, AT, P, Advice::DontNeed).unwrap(),
        |cpu, space| space.mprotect(cpu, AT, P, Prot::empty()).unwrap(),
        |cpu, _| {
            cpu.reclaim(8);
        },
        |cpu, space| {
            let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
            space.mremap(cpu, AT, P, P, flags, AT + 4 * P).unwrap();
        },
    ];
    for (which, worst) in worst.into_iter().enumerate() {
        for nth in 1..12 {
            for comes_back in [false, true] {
                let vm: TestVm = guest::vm(2, 64);
                let (here, there) = (cpu(&vm, 0), cpu(&vm, 1));
                let memory = swap_on(&here, 8);
                let space = Space::new(&here).unwrap();
                map(&here, &space, 0, 2, RW);
                map(&here, &space, 4, 2, RW);
                store(&here, &space, AT, 5).unwrap();
                let child = space.fork(&here).unwrap();
                if nth % 2 == 0 {
                    load(&here, &child, AT).unwrap();
                }
                if comes_back {
                    here.reclaim(8);
                    memory.writes.lock().unwrap().clear();
                }
                let space = &space;
                let met = vm.machine().at_look(
                    nth,
                    move || worst(&there, space),
                    || {
                        if comes_back {
                            let _refused = store(&here, space, AT + 16, 9);
                        } else {
                            here.reclaim(8);
                        }
                    },
                );
                let now = |at: u64| load(&here, space, at);
                match (which, met) {
                    (2, true) => assert!(matches!(now(AT), Ok(0 | 5))),
                    (3, true) => assert_eq!(now(AT), Err(FaultError::Segv { mapped: true })),
                    (5, true) => assert_eq!(now(AT + 4 * P), Ok(5)),
                    _ => assert_eq!(now(AT), Ok(5)),
                }
                if which == 1 && met {
                    assert_eq!(now(AT + 8), Ok(7));
                }
                assert_eq!(load(&here, &child, AT), Ok(5));
                cpu(&vm, 1).drain();
                here.drain();
                audit(&here, &[space, &child]).unwrap();
            }
        }
    }
}

/// The pages of a batch: the step of the hand for 256 frames.
const BATCH: u64 = 256 / 32;

/// A CPU finds no frame while another CPU writes to the swap area. The CPU waits until the other
/// CPU has evicted its pages, and evicts no page of the program in the meantime.
#[test]
fn a_cpu_without_frames_waits_for_the_writing_cpu() {
    let vm = guest::vm(3, 256);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    let memory = swap_on(&cpu0, 2000);
    map(&cpu0, &space, 0, 600, RW);
    thread::scope(|scope| {
        // The store's calls wait for this lock.
        let disk = memory.bytes.lock().unwrap();
        let (vm, space) = (&vm, &space);
        let stores = move |id, pages: Range<u64>| {
            let cpu = cpu(vm, id);
            pages.into_iter().try_for_each(|page| store(&cpu, space, AT + page * P, page))
        };
        let writer = scope.spawn(move || stores(1, 0..300));
        until(&Yield, || vm.is_held());
        let other = scope.spawn(move || stores(2, 400..401));
        thread::sleep(Duration::from_millis(100));
        let ended = other.is_finished() || writer.is_finished();
        let swapped = space.core.swapped.load(Ordering::Relaxed);
        let scanned = vm.totals().get(Counter::PageScanned);
        drop(disk);
        assert!(!ended, "no frame is free before the disk has written");
        assert!(swapped <= BATCH, "{swapped} pages were evicted, more than one batch");
        assert!(
            scanned < 2 * 256,
            "{scanned} scanned pages: the hand advanced though no page could be evicted"
        );
        assert_eq!(writer.join().unwrap(), Ok(()));
        assert_eq!(other.join().unwrap(), Ok(()), "memory is not exhausted");
    });
    (0..300).for_each(|page| assert_eq!(load(&cpu0, &space, AT + page * P), Ok(page)));
    space.exit(&cpu0);
}
