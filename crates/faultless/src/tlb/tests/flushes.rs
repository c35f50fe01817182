//! The number of flushes of each call: zero if no TLB can hold the changed entries.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::fault::{Access, FaultKind};
use crate::machine::{CpuId, Invalidate};
use crate::space::{Advice, MapFlags, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::testing::TestMachine;
use crate::testing::guest::{self, cpu, load, store};
use crate::vm::Cpu;
use std::vec::Vec;

const P: u64 = PAGE_SIZE;
/// In the middle of a table's range; the first page of this range is in use.
const AT: u64 = (1 << 30) + 8 * P;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

type TestSpace = Space<TestMachine>;
type TestCpu<'v> = Cpu<'v, TestMachine>;

/// Runs `test` with a space that runs on CPU 0 of two. The space has 16 untouched pages at `AT`,
/// and a table that maps another page.
fn with_space(frames: u32, test: impl FnOnce(&TestCpu<'_>, &TestSpace)) {
    let vm = guest::vm(2, frames);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    space.activate(&cpu);
    map(&cpu, &space, 1 << 30, 1);
    store(&cpu, &space, 1 << 30, 1).unwrap();
    map(&cpu, &space, AT, 16);
    test(&cpu, &space);
    assert_eq!(vm.totals().get(Counter::TlbShootdownSent), 0, "no other CPU runs the space");
    // SAFETY: the machine has no MMU.
    unsafe { space.deactivate(&cpu) };
    space.exit(&cpu);
    cpu.drain();
    assert_eq!(crate::audit::audit(&cpu, &[]).unwrap().taken(), 1);
}

fn map(cpu: &TestCpu<'_>, space: &TestSpace, at: u64, pages: u64) {
    assert_eq!(space.mmap(cpu, at, pages * P, RW, FIXED), Ok(at));
}

/// Returns the invalidations requested of all CPUs while `call` ran.
fn dropped<R>(cpu: &TestCpu<'_>, call: impl FnOnce() -> R) -> Vec<Invalidate> {
    cpu.vm().machine().invalidated.lock().unwrap().clear();
    call();
    let dropped = cpu.vm().machine().invalidated.lock().unwrap().split_off(0);
    assert!(dropped.iter().all(|&(on, ..)| on == CpuId(0)), "{dropped:?}");
    dropped.into_iter().map(|(_, _, what)| what).collect()
}

fn pages(first: u64, pages: u64) -> Vec<Invalidate> {
    Vec::from([Invalidate::Range(VirtRange::new(AT + first * P, AT + (first + pages) * P))])
}

#[test]
fn untouched_pages_are_not_flushed() {
    with_space(512, |cpu, space| {
        let dont_need = || space.madvise(cpu, AT, 16 * P, Advice::DontNeed).unwrap();
        assert_eq!(dropped(cpu, dont_need), []);
        assert_eq!(dropped(cpu, || space.madvise(cpu, AT, 16 * P, Advice::Free).unwrap()), []);
        assert_eq!(dropped(cpu, || space.mprotect(cpu, AT, 16 * P, Prot::empty()).unwrap()), []);
        assert_eq!(dropped(cpu, || space.mprotect(cpu, AT, 16 * P, RW).unwrap()), []);
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        let there = AT + 32 * P;
        let moved = || space.mremap(cpu, AT, 16 * P, 16 * P, flags, there).unwrap();
        assert_eq!(dropped(cpu, moved), []);
        assert_eq!(dropped(cpu, || map(cpu, space, there, 16)), []);
        assert_eq!(dropped(cpu, || space.munmap(cpu, there, 16 * P).unwrap()), []);
        // A range without a table needs no flush either.
        map(cpu, space, (5 << 30) - 128 * P, 256);
        assert_eq!(dropped(cpu, || space.munmap(cpu, (5 << 30) - 128 * P, 256 * P).unwrap()), []);
    });
}

#[test]
fn entries_hidden_from_the_mmu_are_not_flushed() {
    with_space(512, |cpu, space| {
        for page in 0..4 {
            store(cpu, space, AT + page * P, page).unwrap();
        }
        assert_eq!(load(cpu, space, AT + 4 * P), Ok(0), "the zero page");
        let hide = || space.mprotect(cpu, AT, 16 * P, Prot::empty()).unwrap();
        assert_eq!(dropped(cpu, hide), pages(0, 5), "once");
        // Hidden pages go, copied, moved or not, without another flush.
        let mut child = None;
        let fork = dropped(cpu, || child = Some(space.fork(cpu).unwrap()));
        assert_eq!(fork.len(), 1, "one flush of the other page in the table: {fork:?}");
        child.unwrap().exit(cpu);
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        let there = AT + 32 * P;
        let moved = || space.mremap(cpu, AT, 2 * P, 2 * P, flags, there).unwrap();
        assert_eq!(dropped(cpu, moved), []);
        let dont_need = || space.madvise(cpu, there, P, Advice::DontNeed).unwrap();
        assert_eq!(dropped(cpu, dont_need), []);
        assert_eq!(dropped(cpu, || space.munmap(cpu, there, 2 * P).unwrap()), []);
        assert_eq!(dropped(cpu, || space.munmap(cpu, AT + 2 * P, 14 * P).unwrap()), []);
    });
}

#[test]
fn touched_pages_are_flushed_from_first_to_last() {
    with_space(512, |cpu, space| {
        let touch = |pages: &[u64]| {
            pages.iter().for_each(|page| store(cpu, space, AT + page * P, *page).unwrap());
        };
        touch(&[1, 3, 6]);
        let dont_need = || space.madvise(cpu, AT, 16 * P, Advice::DontNeed).unwrap();
        assert_eq!(dropped(cpu, dont_need), pages(1, 6));
        touch(&[2, 4]);
        let free = || space.madvise(cpu, AT, 16 * P, Advice::Free).unwrap();
        assert_eq!(dropped(cpu, free), pages(2, 3));
        touch(&[0, 9]);
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        let there = AT + 32 * P;
        let moved = || space.mremap(cpu, AT, 16 * P, 16 * P, flags, there).unwrap();
        assert_eq!(dropped(cpu, moved), pages(0, 10));
        let unmap = || space.munmap(cpu, there, 16 * P).unwrap();
        assert_eq!(dropped(cpu, unmap), pages(32, 10));
    });
}

/// The CPU may hold an older translation, which would cause another fault.
#[test]
fn a_spurious_fault_drops_the_local_translation() {
    with_space(512, |cpu, space| {
        store(cpu, space, AT + P, 1).unwrap();
        for access in [Access::Read, Access::Write] {
            let fault =
                || assert_eq!(space.fault_remote(cpu, AT + P, access), Ok(FaultKind::Spurious));
            assert_eq!(dropped(cpu, fault), pages(1, 1));
        }
    });
}

#[test]
fn added_rights_are_not_flushed() {
    with_space(512, |cpu, space| {
        store(cpu, space, AT, 1).unwrap();
        store(cpu, space, AT + P, 1).unwrap();
        let protect = |prot| dropped(cpu, || space.mprotect(cpu, AT, 2 * P, prot).unwrap());
        assert_eq!(protect(Prot::READ), pages(0, 2), "the pages lose write permission");
        assert_eq!(protect(RW), []);
        assert_eq!(protect(RW | Prot::EXEC), []);
        assert!(space.entry_at(cpu, AT).is_executable());
        assert_eq!(protect(RW), pages(0, 2), "the pages lose execute permission");
        assert_eq!(protect(Prot::READ), [], "no store since the last flush");
        assert_eq!(protect(Prot::READ | Prot::EXEC), []);
        assert_eq!(protect(Prot::empty()), pages(0, 2));
        assert_eq!(protect(RW | Prot::EXEC), []);
    });
}

#[test]
fn a_fork_drops_only_writable_translations_of_its_cpu() {
    with_space(512, |cpu, space| {
        assert_eq!(load(cpu, space, AT), Ok(0));
        for page in 4..6 {
            store(cpu, space, AT + page * P, page).unwrap();
        }
        let fork = || dropped(cpu, || space.fork(cpu).unwrap().exit(cpu));
        let from_the_one_besides = Invalidate::Range(VirtRange::new(1 << 30, AT + 6 * P));
        assert_eq!(fork(), [from_the_one_besides], "in one range");
        assert_eq!(fork(), [], "no entry allowed stores since");
        store(cpu, space, AT + 5 * P, 1).unwrap();
        assert_eq!(fork(), pages(5, 1));
    });
}

/// Returns the flushes of an unmapping, and of a discard, of `tables` tables with `touched` pages
/// each. A batch has room for the pages of two tables, 1/64 of all frames.
fn flushes_of_tables(tables: u64, touched: u64) -> [Vec<Invalidate>; 2] {
    let (at, len) = (2 << 30, tables * 512 * P);
    let calls: [fn(&TestCpu<'_>, &TestSpace, u64, u64); 2] = [
        |cpu, space, at, len| space.munmap(cpu, at, len).unwrap(),
        |cpu, space, at, len| space.madvise(cpu, at, len, Advice::DontNeed).unwrap(),
    ];
    calls.map(|call| {
        let mut flushes = Vec::new();
        with_space((64 << 10) + 64, |cpu, space| {
            map(cpu, space, at, tables * 512);
            for page in (0..tables * 512).filter(|page| page % 512 < touched) {
                store(cpu, space, at + page * P, page).unwrap();
            }
            flushes = dropped(cpu, || call(cpu, space, at, len));
            assert_eq!(space.resident_pages(cpu), 1, "the other page in the table");
        });
        flushes
    })
}

#[test]
fn a_large_memory_flushes_once_for_several_tables() {
    let twice = || Vec::from([Invalidate::All, Invalidate::All]);
    assert_eq!(flushes_of_tables(4, 512), [twice(), twice()]);
}

/// A discard holds the entries of sixteen tables at once; an unmapping holds none.
#[test]
fn sixteen_tables_are_discarded_with_one_flush() {
    let count = |tables| flushes_of_tables(tables, 3).map(|flushes| flushes.len());
    assert_eq!([2, 16, 17, 33].map(count), [[1, 1], [1, 1], [1, 2], [1, 3]]);
}

/// The last page of one table and the second page of the next table are flushed together. Both
/// tables map other pages, and stay.
#[test]
fn batch_flushes_the_pages_of_all_its_tables() {
    let at = 2 << 30;
    let calls: [fn(&TestCpu<'_>, &TestSpace, u64, u64); 2] = [
        |cpu, space, at, len| space.munmap(cpu, at, len).unwrap(),
        |cpu, space, at, len| space.madvise(cpu, at, len, Advice::DontNeed).unwrap(),
    ];
    for touched in [&[511, 513][..], &[500, 510, 512], &[511, 512, 520], &[490, 520]] {
        for call in calls {
            with_space(64 << 10, |cpu, space| {
                map(cpu, space, at, 2 * 512);
                let pages = [&[0, 1023], touched].concat();
                pages.iter().for_each(|page| store(cpu, space, at + page * P, 1).unwrap());
                let [first, last] = [touched[0], touched[touched.len() - 1]];
                let all = VirtRange::new(at + first * P, at + (last + 1) * P);
                let flushes = dropped(cpu, || call(cpu, space, all.start, all.len()));
                assert_eq!(flushes, [Invalidate::Range(all)], "{touched:?}");
            });
        }
    }
}
