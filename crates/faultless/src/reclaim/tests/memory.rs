//! Exhausted memory: before a fault or a call returns an out-of-memory error, all unneeded memory
//! is freed.

use crate::addr::PAGE_SIZE as P;
use crate::audit::audit;
use crate::error::Errno;
use crate::fault::{Access, FaultError, FaultKind};
use crate::file::Object;
use crate::frame::FrameMeta;
use crate::knob::Setting;
use crate::space::area::VmaFlags;
use crate::space::{Advice, Backing, MapFlags, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::testing::TestMachine;
use crate::testing::guest::{self, TestVm, cpu, load, store};
use crate::vm::Cpu;
use std::vec;
use std::vec::Vec;

type TestCpu<'v> = Cpu<'v, TestMachine>;
type TestSpace = Space<TestMachine>;

const AT: u64 = 1 << 30;
const GIB: u64 = 1 << 30;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);

fn map(cpu: &TestCpu<'_>, space: &TestSpace, at: u64, len: u64) {
    let flags = PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    space.mmap(cpu, at, len, RW, flags).unwrap();
}

/// Stores to pages from `at` on until memory is out, and returns how many were served.
fn fill(cpu: &TestCpu<'_>, space: &TestSpace, at: u64) -> u64 {
    let mut page = 0;
    loop {
        match store(cpu, space, at + page * P, page) {
            Ok(()) => page += 1,
            Err(error) => {
                assert_eq!(error, FaultError::OutOfMemory);
                return page;
            }
        }
    }
}

fn end(vm: &TestVm, cpus: &[&TestCpu<'_>], spaces: Vec<TestSpace>) {
    cpus.iter().for_each(|cpu| cpu.drain());
    audit(cpus[0], &spaces.iter().collect::<Vec<_>>()).unwrap();
    spaces.into_iter().for_each(|space| space.exit(cpus[0]));
    cpus.iter().for_each(|cpu| cpu.drain());
    audit(cpus[0], &[]).unwrap();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

/// One CPU unlinks hundreds of tables and then idles. Another CPU needs their frames.
#[test]
fn tables_retired_by_another_cpu_are_freed_before_memory_is_out() {
    let vm = guest::vm(2, 513);
    let (here, there) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = Space::new(&there).unwrap();
    map(&there, &space, AT, 120 * GIB);
    (0..120).for_each(|gib| store(&there, &space, AT + gib * GIB, gib).unwrap());
    space.munmap(&there, AT, 120 * GIB).unwrap();
    let mine = Space::new(&here).unwrap();
    map(&here, &mine, AT, GIB);
    let served = fill(&here, &mine, AT);
    let census = vm.census(&here).unwrap();
    assert_eq!(census.retired, 0, "unreachable frames are not free: {census:?}");
    assert_eq!(census.free, 0, "{census:?}");
    // Two roots, three tables, the zero page, and the other CPU's stock.
    assert!(served >= 512 - 6 - 64, "memory was out after {served} pages: {census:?}");
    end(&vm, &[&here, &there], vec![space, mine]);
}

/// Each table is one retired object, even if several tables are unlinked together.
#[test]
fn retired_tables_are_counted_one_by_one() {
    let vm = guest::vm(1, 1024);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 512 * GIB, 512 * GIB);
    (0..200).for_each(|gib| store(&cpu, &space, (512 + gib) * GIB, gib).unwrap());
    let before = vm.totals();
    space.munmap(&cpu, 512 * GIB, 512 * GIB).unwrap();
    assert_eq!(vm.totals().since(&before).get(Counter::TablePruned), 1 + 200 + 200);
    // With this many retired objects, the next calls of any kind free them soon.
    (0..2).for_each(|_| space.munmap(&cpu, AT, P).unwrap());
    assert_eq!(vm.census(&cpu).unwrap().retired, 0);
    end(&vm, &[&cpu], vec![space]);
}

/// An idle CPU frees its retired objects.
#[test]
fn an_idle_cpu_frees_its_retired_objects() {
    let vm = guest::vm(1, 513);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, AT, 40 * GIB);
    (0..40).for_each(|gib| store(&cpu, &space, AT + gib * GIB, gib).unwrap());
    space.munmap(&cpu, AT, 40 * GIB).unwrap();
    assert_eq!(vm.census(&cpu).unwrap().retired, 80);
    assert_eq!(cpu.zero_ahead(8), 0, "no pool of zeroed frames");
    assert_eq!(vm.census(&cpu).unwrap().retired, 0);
    end(&vm, &[&cpu], vec![space]);
}

/// A call that fails for another reason than a lack of frames reclaims no pages.
#[test]
fn lazily_freed_pages_stay_while_there_are_frames() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, AT, 16 * P);
    (0..16).for_each(|page| store(&cpu, &space, AT + page * P, 1 + page).unwrap());
    space.madvise(&cpu, AT, 8 * P, Advice::Free).unwrap();
    // The mapping cannot grow in place.
    let refused = space.mremap(&cpu, AT, P, 2 * P, RemapFlags::empty(), 0).unwrap_err();
    assert_eq!(refused.errno, Errno::ENOMEM);
    (0..8).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(1 + page)));
    let counts = vm.totals();
    assert_eq!([Counter::LazyFree, Counter::LazilyFreed].map(|of| counts.get(of)), [8, 0]);
    end(&vm, &[&cpu], vec![space]);
}

/// Lazily freed pages of a program are available to every CPU that needs a frame.
#[test]
fn lazily_freed_pages_are_reclaimed_before_memory_is_out() {
    for (forked, others) in [(false, false), (false, true), (true, false)] {
        let vm = guest::vm(2, 256);
        let (here, there) = (cpu(&vm, 0), cpu(&vm, 1));
        let space = Space::new(&here).unwrap();
        map(&here, &space, AT, GIB);
        (0..128).for_each(|page| store(&here, &space, AT + page * P, 1 + page).unwrap());
        space.madvise(&here, AT, 128 * P, Advice::Free).unwrap();
        // A page with a later store is kept.
        store(&here, &space, AT + 7 * P, 77).unwrap();
        let child = forked.then(|| space.fork(&here).unwrap());
        let other = others.then(|| Space::new(&there).unwrap());
        let before = vm.totals();
        let served = match &other {
            Some(other) => {
                here.drain();
                map(&there, other, AT, GIB);
                fill(&there, other, AT)
            }
            None => fill(&here, &space, AT + 256 * P),
        };
        let census = vm.census(&here).unwrap();
        assert!(served > 220, "memory was out after {served} pages: {census:?}");
        let reclaimed = vm.totals().since(&before).get(Counter::LazilyFreed);
        assert_eq!(reclaimed, if forked { 2 * 127 } else { 127 });
        assert_eq!(load(&here, &space, AT + 7 * P), Ok(77));
        if let Some(child) = &child {
            assert_eq!(load(&here, child, AT + 7 * P), Ok(77));
        }
        assert_eq!(load(&here, &space, AT), Ok(0));
        let spaces = [Some(space), other, child].into_iter().flatten().collect();
        end(&vm, &[&here, &there], spaces);
    }
}

/// Moved pages and hidden pages are reclaimed as well, as are pages only read since.
#[test]
fn moved_lazily_freed_pages_are_reclaimed() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, AT, 128 * P);
    (0..128).for_each(|page| store(&cpu, &space, AT + page * P, 1 + page).unwrap());
    space.madvise(&cpu, AT, 128 * P, Advice::Free).unwrap();
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    space.mremap(&cpu, AT, 64 * P, 64 * P, flags, 9 * GIB).unwrap();
    space.mprotect(&cpu, AT + 64 * P, 32 * P, Prot::empty()).unwrap();
    assert_eq!(load(&cpu, &space, 9 * GIB), Ok(1));
    map(&cpu, &space, 3 * GIB, GIB);
    let before = vm.totals();
    let served = fill(&cpu, &space, 3 * GIB);
    assert!(served > 220, "memory was out after {served} pages");
    assert_eq!(vm.totals().since(&before).get(Counter::LazilyFreed), 128);
    assert_eq!(load(&cpu, &space, 9 * GIB), Ok(0));
    end(&vm, &[&cpu], vec![space]);
}

/// An ended space is removed from the list. The spaces listed before and after the ended space
/// stay.
#[test]
fn ended_spaces_are_not_scanned() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let advised = |pages: u64| {
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, AT, pages * P);
        (0..pages).for_each(|page| store(&cpu, &space, AT + page * P, 1).unwrap());
        space.madvise(&cpu, AT, pages * P, Advice::Free).unwrap();
        space
    };
    let end_of = |space: TestSpace| {
        let core = space.core.clone();
        space.exit(&cpu);
        assert!(core.into_last().is_some(), "an ended space is still on the list");
    };
    for _ in 0..3 {
        end_of(advised(100));
    }
    let [first, second, third, fourth] = [20, 50, 20, 20].map(advised);
    [third, first, fourth].into_iter().for_each(end_of);
    map(&cpu, &second, 3 * GIB, GIB);
    let before = vm.totals();
    assert!(fill(&cpu, &second, 3 * GIB) > 220);
    assert_eq!(vm.totals().since(&before).get(Counter::LazilyFreed), 50);
    end(&vm, &[&cpu], vec![second]);
}

/// A call that needs many frames at once gets the frames of lazily freed pages.
#[test]
fn fork_and_mremap_reclaim_lazily_freed_pages() {
    for moves in [false, true] {
        let vm = guest::vm(1, 256);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, AT, 100 * P);
        (0..100).for_each(|page| store(&cpu, &space, AT + page * P, 1).unwrap());
        space.madvise(&cpu, AT, 100 * P, Advice::Free).unwrap();
        map(&cpu, &space, 3 * GIB, 40 * GIB);
        (0..20).for_each(|gib| store(&cpu, &space, (3 + gib) * GIB, gib).unwrap());
        cpu.drain();
        vm.set(Setting::FrameLimit(vm.total_frames() - vm.free_frames()));
        if moves {
            let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
            space.mremap(&cpu, 3 * GIB, 20 * GIB, 20 * GIB, flags, 600 * GIB).unwrap();
            assert_ne!(vm.totals().get(Counter::LazilyFreed), 0);
            (0..20).for_each(|gib| assert_eq!(load(&cpu, &space, (600 + gib) * GIB), Ok(gib)));
            end(&vm, &[&cpu], vec![space]);
        } else {
            let child = space.fork(&cpu).unwrap();
            assert_eq!(load(&cpu, &child, 4 * GIB), Ok(1));
            end(&vm, &[&cpu], vec![space, child]);
        }
    }
}

/// A fork that cannot count another mapping of a page fails, and the parent is unchanged.
#[test]
fn fork_fails_for_a_page_at_the_mapping_limit() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, AT, 8 * P);
    (0..8).for_each(|page| store(&cpu, &space, AT + page * P, 1 + page).unwrap());
    let meta = vm.frames.meta(space.entry_at(&cpu, AT + 5 * P).frame());
    meta.preset_refs(FrameMeta::MAX_MAPPINGS);
    assert_eq!(space.fork(&cpu).unwrap_err().errno, Errno::ENOMEM);
    assert_eq!(meta.refs(), FrameMeta::MAX_MAPPINGS);
    // With one mapping less, there is room for one child.
    meta.preset_refs(FrameMeta::MAX_MAPPINGS - 1);
    let child = space.fork(&cpu).unwrap();
    assert_eq!(meta.refs(), FrameMeta::MAX_MAPPINGS);
    assert_eq!(space.fork(&cpu).unwrap_err().errno, Errno::ENOMEM);
    // A store still gets its copy: the temporary reference for the copy is always available.
    assert_eq!(child.fault_remote(&cpu, AT + 5 * P, Access::Write), Ok(FaultKind::Copy));
    meta.preset_refs(1);
    for page in 0..8 {
        assert_eq!(load(&cpu, &child, AT + page * P), Ok(1 + page));
        store(&cpu, &space, AT + page * P, 10 + page).unwrap();
    }
    end(&vm, &[&cpu], vec![space, child]);
}

/// A fault that cannot count another mapping of a file page fails, however often the fault is
/// repeated. Copies of the page and kernel accesses succeed.
#[test]
fn a_file_page_at_the_mapping_limit_is_refused() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = Object::try_new(&cpu, 8, 1).unwrap();
    // SAFETY: the bytes of a page, aligned.
    let put = |at: *mut u8| unsafe { at.cast::<u64>().write(5) };
    // SAFETY: as above.
    let get = |at: Option<*const u8>| at.map(|at| unsafe { at.cast::<u64>().read() });
    (0..8).for_each(|page| file.write_page(&cpu, page, put).unwrap());
    let backing = || Backing { object: &file, first: 0, may_write: true };
    for (at, kind) in [(AT, MapFlags::SHARED), (2 * AT, MapFlags::PRIVATE)] {
        let flags = kind | MapFlags::FIXED;
        space.mmap_object(&cpu, at, 8 * P, RW, flags, backing()).unwrap();
    }
    let meta = vm.frames.meta(file.get(&cpu, 3).unwrap());
    meta.preset_refs(FrameMeta::MAX_MAPPINGS);
    for (at, access) in [(AT, Access::Read), (AT, Access::Write), (2 * AT, Access::Read)] {
        let refused = Err(FaultError::OutOfMemory);
        assert_eq!(space.fault_remote(&cpu, at + 3 * P, access), refused);
        // As a neighbour, the page is skipped.
        assert_eq!(space.fault_remote(&cpu, at + 2 * P, access), Ok(FaultKind::Shared));
        assert!(space.entry_at(&cpu, at + 3 * P).is_none());
        space.madvise(&cpu, at, 8 * P, Advice::DontNeed).unwrap();
    }
    assert_eq!(space.fault_remote(&cpu, 2 * AT + 3 * P, Access::Write), Ok(FaultKind::Copy));
    assert_eq!(load(&cpu, &space, 2 * AT + 3 * P), Ok(5));
    assert_eq!(file.read_page(&cpu, 3, get), Ok(Some(5)));
    file.write_page(&cpu, 3, put).unwrap();
    assert_eq!(meta.refs(), FrameMeta::MAX_MAPPINGS);
    meta.preset_refs(1);
    assert_eq!(load(&cpu, &space, AT + 3 * P), Ok(5));
    space.exit(&cpu);
    Object::release(file, &cpu);
    end(&vm, &[&cpu], vec![]);
}

/// Private memory is accounted when it becomes writable. The accounting is reverted when an unused
/// mapping becomes read-only.
#[test]
fn memory_is_accounted_when_it_becomes_writable() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = Object::try_new(&cpu, 4, 1).unwrap();
    let modes = [Prot::READ, RW, Prot::READ, Prot::empty(), RW];
    let (no, yes) = (false, true);
    let cases = [
        (PRIVATE, false, [no, yes, no, no, yes]),
        (PRIVATE | MapFlags::NORESERVE, false, [no; 5]),
        (MapFlags::SHARED | MapFlags::ANONYMOUS, false, [no; 5]),
        // Linux keeps the accounting of a file mapping.
        (MapFlags::PRIVATE, true, [no, yes, yes, yes, yes]),
        (MapFlags::SHARED, true, [no; 5]),
    ];
    for (flags, of_file, expected) in cases {
        let promised = |prot| {
            space.mprotect(&cpu, AT, 4 * P, prot).unwrap();
            let mut promised = None;
            space.areas(&cpu, |area| promised = Some(area.flags.contains(VmaFlags::ACCOUNT)));
            promised.unwrap()
        };
        let (flags, prot) = (flags | MapFlags::FIXED, Prot::empty());
        let backing = Backing { object: &file, first: 0, may_write: true };
        let mapped = if of_file {
            space.mmap_object(&cpu, AT, 4 * P, prot, flags, backing)
        } else {
            space.mmap(&cpu, AT, 4 * P, prot, flags)
        };
        assert_eq!(mapped, Ok(AT));
        assert_eq!(modes.map(promised), expected, "{flags:?}");
    }
    space.munmap(&cpu, AT, 4 * P).unwrap();
    Object::release(file, &cpu);
    end(&vm, &[&cpu], Vec::from([space]));
}

/// A kernel learns which `ENOMEM` the end of a program remedies.
#[test]
fn a_lack_of_frames_has_a_distinct_error() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, AT, 100 * P);
    let too_much = space.mmap(&cpu, None, GIB, RW, PRIVATE);
    assert_eq!(too_much.unwrap_err().errno, Errno::ENOMEM);
    assert!(!cpu.take_starved());
    let lacks = |page| store(&cpu, &space, AT + page * P, 1).is_err();
    assert!((0..100).any(lacks));
    assert!(cpu.take_starved() && !cpu.take_starved());
    assert_eq!(space.fork(&cpu).unwrap_err().errno, Errno::ENOMEM);
    assert!(cpu.take_starved());
    space.exit(&cpu);
}

/// A move that fails for a lack of frames leaves no table without a VMA, whether or not the target
/// had a table.
#[test]
fn a_failed_move_leaves_no_tables() {
    const F: u64 = crate::table::node::ENTRIES as u64;
    for there in [false, true] {
        let vm = guest::vm(1, 400);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        guest::map(&cpu, &space, 0, 60 * F, RW);
        (0..60).for_each(|at| store(&cpu, &space, AT + at * F * P, at).unwrap());
        let to = AT + 512 * F * P;
        if there {
            guest::map(&cpu, &space, 512 * F, 1, RW);
            store(&cpu, &space, to, 99).unwrap();
        }
        let tables = || {
            cpu.drain();
            vm.frames.census().tables
        };
        let before = tables();
        vm.set(Setting::FrameLimit(vm.total_frames() - vm.free_frames() + 20));
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        let len = 60 * F * P;
        assert!(space.mremap(&cpu, AT, len, len, flags, to).is_err());
        vm.set(Setting::FrameLimit(u64::MAX));
        // A table above the last level may stay.
        assert!(tables() <= before + 1, "{there}: {before} and {}", tables());
        for at in 0..60 {
            assert_eq!(load(&cpu, &space, AT + at * F * P), Ok(at));
        }
        assert!(!there || load(&cpu, &space, to) == Ok(99));
        guest::check(&cpu, &[&space], &[], 0);
        space.exit(&cpu);
    }
}

/// A move needs tables for the pages that there are, and not for the addresses.
#[test]
fn a_sparse_mapping_moves_with_few_tables() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, AT, 2 * P);
    // In the way of the mapping's growth.
    map(&cpu, &space, AT + 2 * P, P);
    store(&cpu, &space, AT + P, 7).unwrap();
    let grown = space.mremap(&cpu, AT, 2 * P, 1024 * GIB, RemapFlags::MAYMOVE, 0).unwrap();
    assert_ne!(grown, AT);
    assert_eq!(load(&cpu, &space, grown + P), Ok(7));
    store(&cpu, &space, grown + 1000 * GIB, 8).unwrap();
    // The target is not aligned to a table, so that the pages of one table need two.
    let to = 4096 * GIB + 7 * P;
    for flags in [RemapFlags::empty(), RemapFlags::DONTUNMAP] {
        let flags = flags | RemapFlags::MAYMOVE | RemapFlags::FIXED;
        map(&cpu, &space, to, 1024 * GIB);
        let before = vm.totals();
        space.mremap(&cpu, grown, 1024 * GIB, 1024 * GIB, flags, to).unwrap();
        assert!(vm.totals().since(&before).get(Counter::TablePublished) <= 16);
        assert_eq!(load(&cpu, &space, to + P), Ok(7));
        assert_eq!(load(&cpu, &space, to + 1000 * GIB), Ok(8));
        space
            .mremap(&cpu, to, 1024 * GIB, 1024 * GIB, flags - RemapFlags::DONTUNMAP, grown)
            .unwrap();
    }
    end(&vm, &[&cpu], vec![space]);
}
