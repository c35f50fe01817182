//! Locked memory: the accounting, the pages that stay, and inheritance.

use crate::addr::VirtRange;
use crate::audit::audit;
use crate::error::Errno::{self, EINVAL, ENOMEM};
use crate::space::{Advice, MapFlags, MemoryLock, RemapFlags, Space};
use crate::testing::guest::{self, AT, FIXED, P, RW, TestCpu, TestSpace, cpu, load, store};
use std::vec::Vec;

/// Returns the number of pages and the lock of each VMA.
fn locks(cpu: &TestCpu<'_>, space: &TestSpace) -> Vec<(u64, MemoryLock)> {
    let mut locks = Vec::new();
    space.each_area(cpu, VirtRange::USER, |area| {
        locks.push((area.range.pages(), area.lock()));
        true
    });
    locks
}

/// A space of eight pages, with all frames accounted for at the end.
fn with_space(test: impl FnOnce(&TestCpu<'_>, &TestSpace)) {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    space.mmap(&cpu, AT, 8 * P, RW, FIXED).unwrap();
    test(&cpu, &space);
    cpu.drain();
    audit(&cpu, &[&space]).unwrap();
    space.exit(&cpu);
    cpu.drain();
    assert_eq!(audit(&cpu, &[]).unwrap().taken(), 1);
}

#[test]
fn locking_splits_and_unlocking_merges() {
    with_space(|cpu, space| {
        let lock = |page: u64, pages: u64, how| {
            space.mlock(cpu, AT + page * P, pages * P, how).map_err(|error| error.errno)
        };
        assert_eq!(lock(1, 3, MemoryLock::Now), Ok(()));
        assert_eq!(lock(5, 1, MemoryLock::OnFault), Ok(()));
        let split = [
            (1, MemoryLock::No),
            (3, MemoryLock::Now),
            (1, MemoryLock::No),
            (1, MemoryLock::OnFault),
            (2, MemoryLock::No),
        ];
        assert_eq!(locks(cpu, space), split);
        assert_eq!(space.locked_pages(cpu), 4);
        assert_eq!(lock(2, 4, MemoryLock::Now), Ok(()));
        assert_eq!(
            locks(cpu, space),
            [(1, MemoryLock::No), (5, MemoryLock::Now), (2, MemoryLock::No)]
        );
        assert_eq!(lock(0, 9, MemoryLock::OnFault), Err(ENOMEM), "pages below the hole are locked");
        assert_eq!(locks(cpu, space), [(8, MemoryLock::OnFault)]);
        assert_eq!(lock(0, 8, MemoryLock::No), Ok(()));
        assert_eq!((locks(cpu, space), space.locked_pages(cpu)), ([(8, MemoryLock::No)].into(), 0));
        assert_eq!(lock(9, 1, MemoryLock::No), Err(ENOMEM));
        assert_eq!(lock(9, 0, MemoryLock::Now), Ok(()));
        let refused = |addr, len| space.mlock(cpu, addr, len, MemoryLock::Now).map_err(|e| e.errno);
        assert_eq!((refused(AT + 1, P), refused(AT, u64::MAX - P)), (Err(EINVAL), Err(EINVAL)));
    });
}

#[test]
fn advice_does_not_discard_locked_pages() {
    with_space(|cpu, space| {
        (0..8).for_each(|page| store(cpu, space, AT + page * P, page + 1).unwrap());
        space.mlock(cpu, AT + 2 * P, P, MemoryLock::Now).unwrap();
        let advise = |page: u64, pages: u64, advice| -> Result<(), Errno> {
            space.madvise(cpu, AT + page * P, pages * P, advice).map_err(|error| error.errno)
        };
        for advice in [Advice::DontNeed, Advice::Free] {
            assert_eq!(advise(2, 1, advice), Err(EINVAL));
        }
        assert_eq!(
            advise(1, 3, Advice::DontNeed),
            Err(EINVAL),
            "pages before the locked page are discarded"
        );
        let loaded = |page: u64| load(cpu, space, AT + page * P).unwrap();
        assert_eq!([1, 2, 3].map(loaded), [0, 3, 4]);
        assert_eq!(advise(2, 2, Advice::DontNeedLocked), Ok(()));
        assert_eq!([2, 3, 4].map(loaded), [0, 0, 5]);
    });
}

#[test]
fn locks_move_and_are_not_inherited() {
    with_space(|cpu, space| {
        let flags = FIXED | MapFlags::LOCKED;
        space.mmap(cpu, AT + 8 * P, 2 * P, RW, flags).unwrap();
        assert_eq!(locks(cpu, space), [(8, MemoryLock::No), (2, MemoryLock::Now)]);
        let to = AT + 32 * P;
        let moves = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        space.mremap(cpu, AT + 8 * P, 2 * P, 5 * P, moves, to).unwrap();
        assert_eq!(locks(cpu, space), [(8, MemoryLock::No), (5, MemoryLock::Now)]);
        space.mlock(cpu, AT, P, MemoryLock::OnFault).unwrap();
        let child = space.fork(cpu).unwrap();
        assert_eq!((child.locked_pages(cpu), space.locked_pages(cpu)), (0, 6));
        child.exit(cpu);
        let keeps = moves | RemapFlags::DONTUNMAP;
        space.mremap(cpu, to, 5 * P, 5 * P, keeps, to + 32 * P).unwrap();
        let left = [
            (1, MemoryLock::OnFault),
            (7, MemoryLock::No),
            (5, MemoryLock::No),
            (5, MemoryLock::Now),
        ];
        assert_eq!(locks(cpu, space), left, "no page remains to be locked");
    });
}

#[test]
fn dontunmap_of_a_part_unlocks_the_whole_vma() {
    let keeps = RemapFlags::MAYMOVE | RemapFlags::FIXED | RemapFlags::DONTUNMAP;
    let (away, beside) = (AT + 32 * P, AT + 8 * P);
    let two = [(8, MemoryLock::No), (2, MemoryLock::Now)];
    for (touched, to, left) in [
        (true, away, &two[..]),
        (true, beside, &two),
        (false, away, &two),
        // The new VMA was never written, and merges with the old VMA.
        (false, beside, &[(10, MemoryLock::No)]),
    ] {
        with_space(|cpu, space| {
            if touched {
                store(cpu, space, AT + 2 * P, 7).unwrap();
            }
            space.mlock(cpu, AT, 8 * P, MemoryLock::Now).unwrap();
            space.mremap(cpu, AT + 2 * P, 2 * P, 2 * P, keeps, to).unwrap();
            assert_eq!(locks(cpu, space), left, "touched: {touched}, to {to:#x}");
            space.madvise(cpu, AT, 8 * P, Advice::DontNeed).expect("no locked page");
        });
    }
}
