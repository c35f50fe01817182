//! Calls refused by Linux return Linux's errors and change no state; valid calls succeed.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::audit::audit;
use crate::error::Errno::{self, EEXIST, EFAULT, EINVAL, ENOMEM, EPERM};
use crate::fault::FaultError;
use crate::file::Object;
use crate::knob::Setting;
use crate::machine::LOWEST_ADDRESS;
use crate::machine::Machine;
use crate::space::{Advice, Backing, MMAP_BASE, MapFlags, MemoryLock, Prot, RemapFlags, Space};
use crate::table::format::{ENTRIES, USER_END, USER_ROOT_ENTRIES};
use crate::testing::TestMachine;
use crate::testing::guest::{self, cpu, load, store};
use crate::vm::Cpu;
use std::format;
use std::string::{String, ToString};
use std::vec::Vec;

const AT: u64 = 1 << 30;
const P: u64 = PAGE_SIZE;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);
const FIXED: MapFlags = PRIVATE.union(MapFlags::FIXED);

type TestSpace = Space<TestMachine>;
type TestCpu<'v> = Cpu<'v, TestMachine>;

fn map(cpu: &TestCpu<'_>, space: &TestSpace, first: u64, pages: u64, prot: Prot) {
    assert_eq!(space.mmap(cpu, AT + first * P, pages * P, prot, FIXED), Ok(AT + first * P));
}

/// The VMAs, as page numbers from `AT` on and permissions.
fn areas(cpu: &TestCpu<'_>, space: &TestSpace) -> Vec<(i64, i64, u32)> {
    let mut areas = Vec::new();
    let page = |addr: u64| (addr as i64 - AT as i64) / P as i64;
    space.areas(cpu, |area| {
        areas.push((page(area.range.start), page(area.range.end), area.prot.bits()));
    });
    areas
}

/// A space with pages 0..4 and 6..8 mapped read-write, and page 0 written.
fn with_space(test: impl FnOnce(&TestCpu<'_>, &TestSpace)) {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 4, RW);
    map(&cpu, &space, 6, 2, RW);
    store(&cpu, &space, AT, 42).unwrap();
    test(&cpu, &space);
    cpu.drain();
    audit(&cpu, &[&space]).unwrap();
    space.exit(&cpu);
    cpu.drain();
    assert_eq!(audit(&cpu, &[]).unwrap().taken(), 1);
}

/// A call with an expected error.
type Call<'a, R> = &'a dyn Fn(&TestCpu<'_>, &TestSpace) -> Result<R, crate::Error>;

/// Checks that each call returns its error and changes no state.
fn refused<R>(calls: &[(Errno, Call<'_, R>)], operation: &str) {
    with_space(|cpu, space| {
        let before = areas(cpu, space);
        for (at, (errno, call)) in calls.iter().enumerate() {
            let error = call(cpu, space).err().unwrap_or_else(|| panic!("call {at} is granted"));
            assert_eq!((error.errno, error.operation), (*errno, operation), "call {at}");
            assert_eq!(areas(cpu, space), before, "call {at} changed something");
            assert_eq!(load(cpu, space, AT), Ok(42));
        }
    });
}

#[test]
fn mmap_refuses() {
    let call = |addr: u64, len: u64, flags: MapFlags| {
        move |cpu: &TestCpu<'_>, space: &TestSpace| space.mmap(cpu, addr, len, RW, flags)
    };
    let both = PRIVATE | MapFlags::SHARED;
    let shared_grows = MapFlags::SHARED | MapFlags::ANONYMOUS | MapFlags::GROWSDOWN;
    refused(
        &[
            (EINVAL, &call(0, 0, PRIVATE)),
            (EINVAL, &call(AT + 1, P, FIXED)),
            (EINVAL, &call(0, P, MapFlags::ANONYMOUS)),
            (EINVAL, &call(0, P, both)),
            (EINVAL, &call(0, P, shared_grows)),
            (ENOMEM, &call(0, u64::MAX, PRIVATE)),
            (ENOMEM, &call(0, u64::MAX - P, PRIVATE)),
            (ENOMEM, &call(0, USER_END + P, PRIVATE | MapFlags::NORESERVE)),
            (ENOMEM, &call(USER_END, P, FIXED)),
            (ENOMEM, &call(u64::MAX - P + 1, P, FIXED)),
            (ENOMEM, &call(0, 1 << 40, PRIVATE)),
            (EPERM, &call(0, P, FIXED)),
            (EPERM, &call(P, P, FIXED)),
            (EEXIST, &call(AT + 3 * P, 2 * P, PRIVATE | MapFlags::FIXED_NOREPLACE)),
        ],
        "mmap",
    );
}

#[test]
fn mmap_chooses_the_addresses_of_linux() {
    with_space(|cpu, space| {
        let near = |hint: u64, pages: u64| space.mmap(cpu, hint, pages * P, RW, PRIVATE).unwrap();
        let map = |pages: u64| space.mmap(cpu, None, pages * P, RW, PRIVATE).unwrap();
        assert_eq!(map(3), MMAP_BASE - 3 * P);
        assert_eq!(map(1), MMAP_BASE - 4 * P);
        assert_eq!(near(0, 1), LOWEST_ADDRESS, "0 is a hint");
        assert_eq!(near(P, 1), MMAP_BASE - 5 * P, "the lowest address is mapped");
        assert_eq!(near(AT + 20 * P + 1, 1), AT + 20 * P);
        assert_eq!(near(AT + 19 * P, 2), MMAP_BASE - 7 * P, "one page of the hint is mapped");
        assert_eq!(near(USER_END - P, 2), MMAP_BASE - 9 * P, "the hint leads beyond the end");
        assert_eq!(near(USER_END - P, 1), USER_END - P);
        // If everything below the base is in use, the search continues above.
        let rest = MMAP_BASE - 9 * P - (1 << 32);
        let flags = FIXED | MapFlags::NORESERVE;
        space.mmap(cpu, 1 << 32, rest, Prot::empty(), flags).unwrap();
        space.mmap(cpu, LOWEST_ADDRESS, (1 << 32) - LOWEST_ADDRESS, Prot::empty(), flags).unwrap();
        assert_eq!([map(1), map(2)], [MMAP_BASE, MMAP_BASE + P]);
        space.munmap(cpu, 1 << 33, P).unwrap();
        assert_eq!([map(1), map(1)], [1 << 33, MMAP_BASE + 3 * P]);
        // The address is not in the guard gap of a stack, but above the stack.
        let stack = MMAP_BASE + 99 * P;
        space.mmap(cpu, stack, P, RW, FIXED | MapFlags::GROWSDOWN).unwrap();
        assert_eq!(map(1), stack + P);
    });
}

#[test]
fn munmap_refuses() {
    let call = |addr: u64, len: u64| {
        move |cpu: &TestCpu<'_>, space: &TestSpace| space.munmap(cpu, addr, len)
    };
    refused(
        &[
            (EINVAL, &call(AT + 1, P)),
            (EINVAL, &call(AT, 0)),
            (EINVAL, &call(AT, u64::MAX)),
            (EINVAL, &call(AT, USER_END)),
            (EINVAL, &call(USER_END, P)),
            (EINVAL, &call(u64::MAX - P + 1, P)),
        ],
        "munmap",
    );
}

#[test]
fn mprotect_refuses() {
    let call = |addr: u64, len: u64, prot: u32| {
        move |cpu: &TestCpu<'_>, space: &TestSpace| {
            space.mprotect(cpu, addr, len, Prot::from_bits_retain(prot))
        }
    };
    let (down, up) = (Prot::GROWSDOWN.bits(), Prot::GROWSUP.bits());
    refused(
        &[
            (EINVAL, &call(AT + 1, P, 1)),
            (EINVAL, &call(AT, P, 0x40)),
            (EINVAL, &call(AT, P, 1 | down)),
            (EINVAL, &call(AT, P, 1 | up)),
            (EINVAL, &call(AT, P, 1 | down | up)),
            (ENOMEM, &call(AT + 4 * P, P, 1)),
            (ENOMEM, &call(AT, u64::MAX - AT - P + 2, 3)),
            (ENOMEM, &call(USER_END, P, 1)),
        ],
        "mprotect",
    );
}

#[test]
fn madvise_refuses() {
    let call = |addr: u64, len: u64, advice: Advice| {
        move |cpu: &TestCpu<'_>, space: &TestSpace| space.madvise(cpu, addr, len, advice)
    };
    refused(
        &[
            (EINVAL, &call(AT + 1, P, Advice::DontNeed)),
            (EINVAL, &call(AT, u64::MAX, Advice::DontNeed)),
            (EINVAL, &call(AT, u64::MAX - P, Advice::DontNeed)),
            (ENOMEM, &call(AT + 4 * P, P, Advice::DontNeed)),
            (ENOMEM, &call(AT + 4 * P, P, Advice::PopulateRead)),
        ],
        "madvise",
    );
    assert_eq!(Advice::from_number(4), Some(Advice::DontNeed));
    assert_eq!(Advice::from_number(5), None);
}

#[test]
fn mremap_refuses() {
    let call = |addr: u64, old: u64, new: u64, flags: u32, to: u64| {
        move |cpu: &TestCpu<'_>, space: &TestSpace| {
            space.mremap(cpu, addr, old, new, RemapFlags::from_bits_retain(flags), to)
        }
    };
    refused(
        &[
            (EINVAL, &call(AT + 1, P, P, 0, 0)),
            (EINVAL, &call(AT, P, 0, 0, 0)),
            (EINVAL, &call(AT, P, P, 8, 0)),
            (EINVAL, &call(AT, P, P, 2, AT + 32 * P)),
            (EINVAL, &call(AT, P, 2 * P, 1 | 4, 0)),
            (EINVAL, &call(AT, P, P, 4, 0)),
            (EINVAL, &call(AT, P, P, 1 | 2, AT + 32 * P + 1)),
            (EINVAL, &call(AT, P, P, 1 | 2, AT)),
            (EINVAL, &call(AT, 2 * P, P, 1 | 2, AT + P)),
            (EINVAL, &call(AT, P, P, 1 | 2, USER_END)),
            (EINVAL, &call(AT, 0, P, 1, 0)),
            (EFAULT, &call(AT + 4 * P, P, P, 1, 0)),
            (EFAULT, &call(AT + 3 * P, 2 * P, 4 * P, 1, 0)),
            (EFAULT, &call(USER_END, P, P, 1, 0)),
            // Beyond the end of user space, where a kernel's half of the tables begins.
            (EINVAL, &call(AT, USER_END, P, 0, 0)),
            (EINVAL, &call(AT, 1 << 63, P, 1, 0)),
            (EINVAL, &call(AT, u64::MAX - P, P, 1 | 2, AT + 32 * P)),
            (EFAULT, &call(AT + 4 * P, USER_END, P, 0, 0)),
            (EFAULT, &call(AT, USER_END, USER_END, 1, 0)),
            (ENOMEM, &call(AT, P, 2 * P, 0, 0)),
            (EINVAL, &call(AT, P, USER_END + P, 1, 0)),
            // The target address counts even if the mapping need not move.
            (EINVAL, &call(AT, 2 * P, 2 * P, 1 | 4, AT + P)),
            (EFAULT, &call(AT + 4 * P, 2 * P, 2 * P - 9, 1 | 4, AT + 32 * P)),
            (EINVAL, &call(AT, u64::MAX, P, 1, 0)),
            (EINVAL, &call(AT + P, 0, 2 * P, 1 | 2, AT)),
            (EFAULT, &call(AT + 4 * P, P, P, 1 | 2, AT + 32 * P)),
            // Below the lowest address, as with `mmap`. Other errors take precedence.
            (EPERM, &call(AT, P, P, 1 | 2, 0)),
            (EPERM, &call(AT, P, 2 * P, 1 | 2, LOWEST_ADDRESS - P)),
            (EPERM, &call(AT, 2 * P, 2 * P, 1 | 2 | 4, LOWEST_ADDRESS - P)),
            (EFAULT, &call(AT + 4 * P, P, P, 1 | 2, 0)),
            (EINVAL, &call(AT, P, P, 1 | 2, 1)),
        ],
        "mremap",
    );
    with_space(|cpu, space| {
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        assert_eq!(space.mremap(cpu, AT, P, P, flags, LOWEST_ADDRESS), Ok(LOWEST_ADDRESS));
    });
}

#[test]
fn mincore_refuses_bad_ranges_and_reports_pages() {
    with_space(|cpu, space| {
        let errno = |addr, len| space.mincore(cpu, addr, len, |_| {}).map_err(|error| error.errno);
        assert_eq!(errno(AT + 1, P), Err(EINVAL));
        assert_eq!(errno(AT + 3 * P, 2 * P), Err(ENOMEM));
        assert_eq!(errno(USER_END, P), Err(ENOMEM));
        assert_eq!(errno(AT, u64::MAX), Err(ENOMEM));
        assert_eq!(errno(AT + 4 * P, 0), Ok(()));
        let mut there = Vec::new();
        load(cpu, space, AT + 2 * P).unwrap();
        space.mincore(cpu, AT, 3 * P + 1, |present| there.push(present)).unwrap();
        assert_eq!(there, [true, false, true, false]);
    });
}

#[test]
fn is_mapped_finds_holes() {
    with_space(|cpu, space| {
        let is_mapped =
            |first, end| space.is_mapped(cpu, VirtRange::new(AT + first * P, AT + end * P));
        assert!(is_mapped(0, 4) && is_mapped(1, 3) && is_mapped(6, 8));
        assert!(is_mapped(5, 5), "an empty range is always mapped");
        space.mprotect(cpu, AT + P, P, Prot::READ).unwrap();
        assert!(is_mapped(0, 4), "mapped by three VMAs");
        assert!(!is_mapped(0, 5) && !is_mapped(3, 7) && !is_mapped(4, 8) && !is_mapped(7, 9));
    });
}

#[test]
fn neighbours_merge_and_split_as_linux_does() {
    with_space(|cpu, space| {
        map(cpu, space, 4, 2, RW);
        assert_eq!(areas(cpu, space), [(0, 8, 3)], "the hole is filled");
        space.mprotect(cpu, AT + 2 * P, P, Prot::READ).unwrap();
        assert_eq!(areas(cpu, space), [(0, 2, 3), (2, 3, 1), (3, 8, 3)]);
        space.mprotect(cpu, AT + 2 * P, P, RW).unwrap();
        assert_eq!(areas(cpu, space), [(0, 8, 3)]);
        space.munmap(cpu, AT + 3 * P, P).unwrap();
        assert_eq!(areas(cpu, space), [(0, 3, 3), (4, 8, 3)]);
        // A moved part keeps its page offsets, and therefore does not merge if the offsets do not
        // match.
        store(cpu, space, AT + 7 * P, 7).unwrap();
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        space.mremap(cpu, AT + 7 * P, P, P, flags, AT + 3 * P).unwrap();
        assert_eq!(areas(cpu, space), [(0, 3, 3), (3, 4, 3), (4, 7, 3)]);
        assert_eq!(load(cpu, space, AT + 3 * P), Ok(7));
    });
}

/// Pages written apart have different roots, and a VMA has only one root.
#[test]
fn a_mapping_between_two_written_vmas_merges_with_the_lower() {
    with_space(|cpu, space| {
        store(cpu, space, AT + 6 * P, 1).unwrap();
        map(cpu, space, 4, 2, RW);
        assert_eq!(areas(cpu, space), [(0, 6, 3), (6, 8, 3)]);
        space.munmap(cpu, AT, 6 * P).unwrap();
        map(cpu, space, 0, 6, RW);
        assert_eq!(areas(cpu, space), [(0, 8, 3)], "new pages are unwritten");
        store(cpu, space, AT, 42).unwrap();
    });
}

#[test]
fn the_map_matches_proc_maps() {
    with_space(|cpu, space| {
        space.munmap(cpu, AT + 6 * P, 2 * P).unwrap();
        let heap = space.heap_range().start;
        assert_eq!(space.brk(cpu, heap + 100), heap + 100);
        let shown = space.maps(cpu).to_string();
        let lines: Vec<_> = shown.lines().map(String::from).collect();
        assert_eq!(lines[0], "40000000-40004000 rw-p 00000000 00:00 0 ");
        let expected = format!("{heap:08x}-{:08x} rw-p 00000000 00:00 0 {:25}[heap]", heap + P, "");
        assert_eq!(lines[1], expected);
        assert_eq!(expected.find('['), Some(73));
        space.mmap(cpu, AT + 8 * P, P, RW, FIXED | MapFlags::GROWSDOWN).unwrap();
        let shown = space.maps(cpu).to_string();
        let stack = shown.lines().nth(1).unwrap();
        assert!(stack.starts_with("40008000-40009000 rw-p "), "{stack}");
        assert_eq!(stack.find("[stack]"), Some(73));
    });
}

#[test]
fn brk_moves_only_into_free_space() {
    with_space(|cpu, space| {
        let start = space.heap_range().start;
        assert_eq!(space.brk(cpu, 0), start);
        assert_eq!(space.brk(cpu, start + 3 * P), start + 3 * P);
        store(cpu, space, start + 2 * P, 9).unwrap();
        assert_eq!(space.brk(cpu, start + P), start + P);
        assert_eq!(space.brk(cpu, start + 3 * P), start + 3 * P);
        assert_eq!(load(cpu, space, start + 2 * P), Ok(0), "fresh after shrinking");
        let above = space.mmap(cpu, start + 8 * P, P, RW, FIXED).unwrap();
        assert_eq!(space.brk(cpu, start + 8 * P), start + 3 * P, "a page must stay free");
        assert_eq!(space.brk(cpu, start + 7 * P), start + 7 * P);
        assert_eq!(space.brk(cpu, start - 1), start + 7 * P);
        assert_eq!(space.brk(cpu, u64::MAX), start + 7 * P);
        space.munmap(cpu, above, P).unwrap();
    });
}

#[test]
fn mremap_moves_all_vmas_of_a_range() {
    with_space(|cpu, space| {
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        map(cpu, space, 31, 8, Prot::READ);
        let moved = space.mremap(cpu, AT + P, 8 * P, 8 * P, flags, AT + 32 * P);
        assert_eq!(moved, Ok(AT + 32 * P));
        // The hole moved as well, and the mapping below its new address stayed.
        assert_eq!(
            areas(cpu, space),
            [(0, 1, 3), (31, 32, 1), (32, 35, 3), (35, 37, 1), (37, 39, 3)]
        );
        assert_eq!(load(cpu, space, AT), Ok(42));
        // The range begins in a hole.
        let refused = space.mremap(cpu, AT + P, 40 * P, 40 * P, flags, AT + 64 * P);
        assert_eq!(refused.map_err(|error| error.errno), Err(EFAULT));
    });
}

#[test]
fn populate_needs_the_exact_permission() {
    with_space(|cpu, space| {
        map(cpu, space, 8, 1, Prot::WRITE);
        let errno = |advice| space.madvise(cpu, AT + 8 * P, P, advice).map_err(|error| error.errno);
        assert_eq!(errno(Advice::PopulateRead), Err(EINVAL));
        assert_eq!(errno(Advice::PopulateWrite), Ok(()));
        // Populate does not grow a stack either.
        let flags = FIXED | MapFlags::GROWSDOWN;
        space.mmap(cpu, AT + 900 * P, P, RW, flags).unwrap();
        let below = space.madvise(cpu, AT + 899 * P, P, Advice::PopulateRead);
        assert_eq!(below.map_err(|error| error.errno), Err(ENOMEM));
    });
}

#[test]
fn only_private_anonymous_memory_grows_down() {
    with_space(|cpu, space| {
        let object = Object::try_new(cpu, 1, 1).unwrap();
        let map = |flags: MapFlags, prot, first| {
            let backing = Backing { object: &object, first, may_write: false };
            let got = space.mmap_object(cpu, AT + 32 * P, P, prot, flags, backing);
            got.map_err(|error| error.errno)
        };
        let grows = MapFlags::FIXED | MapFlags::GROWSDOWN;
        assert_eq!(map(grows | MapFlags::PRIVATE, Prot::READ, 0), Err(EINVAL));
        assert_eq!(map(grows | MapFlags::SHARED, Prot::READ, 0), Err(EINVAL));
        // The refusals, in the order of their checks.
        let anew = MapFlags::FIXED_NOREPLACE | MapFlags::SHARED;
        assert_eq!(map(anew, RW, 0), Err(Errno::EACCES));
        assert_eq!(map(anew, RW, 1 << 51), Err(Errno::EOVERFLOW));
        assert_eq!(map(anew, Prot::READ, (1 << 51) - 1), Err(Errno::EOVERFLOW));
        space.mmap(cpu, AT + 32 * P, P, RW, FIXED).unwrap();
        assert_eq!(map(anew, RW, 1 << 51), Err(EEXIST));
        space.munmap(cpu, AT + 32 * P, P).unwrap();
        Object::release(object, cpu);
    });
}

#[test]
fn a_private_object_mapping_keeps_its_charge() {
    with_space(|cpu, space| {
        let object = Object::try_new(cpu, 2, 1).unwrap();
        let flags = MapFlags::FIXED | MapFlags::PRIVATE;
        let backing = Backing { object: &object, first: 0, may_write: true };
        let at = AT + 32 * P;
        space.mmap_object(cpu, at, 2 * P, Prot::READ, flags, backing).unwrap();
        space.mprotect(cpu, at, P, RW).unwrap();
        space.mprotect(cpu, at, P, Prot::READ).unwrap();
        // As on Linux, the VMA therefore does not merge again.
        assert_eq!(areas(cpu, space)[2..], [(32, 33, 1), (33, 34, 1)]);
        space.munmap(cpu, at, 2 * P).unwrap();
        Object::release(object, cpu);
    });
}

#[test]
fn a_stack_mapping_does_not_merge_with_its_neighbours() {
    with_space(|cpu, space| {
        space.mmap(cpu, AT + 8 * P, P, RW, FIXED | MapFlags::STACK).unwrap();
        // The mapping refuses huge pages, and the two VMAs therefore differ.
        assert_eq!(areas(cpu, space), [(0, 4, 3), (6, 8, 3), (8, 9, 3)]);
        space.madvise(cpu, AT + 6 * P, 2 * P, Advice::NoHugePage).unwrap();
        assert_eq!(areas(cpu, space), [(0, 4, 3), (6, 9, 3)]);
    });
}

#[test]
fn stack_growth_merges_no_vmas() {
    with_space(|cpu, space| {
        let flags = FIXED | MapFlags::GROWSDOWN;
        space.mmap(cpu, AT + 900 * P, 6 * P, Prot::READ, flags).unwrap();
        space.munmap(cpu, AT + 902 * P, P).unwrap();
        load(cpu, space, AT + 902 * P).unwrap();
        let parts = [(900, 902, 1), (902, 906, 1)];
        assert_eq!(areas(cpu, space)[2..], parts);
        // The grown part has a root, and keeps its page offsets at the new address.
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        space.mremap(cpu, AT + 903 * P, P, P, flags, AT + 904 * P).unwrap();
        assert_eq!(areas(cpu, space)[3..], [(902, 903, 1), (904, 905, 1), (905, 906, 1)]);
    });
}

#[test]
fn stack_growth_stops_at_the_limit_and_the_guard_gap() {
    with_space(|cpu, space| {
        let flags = FIXED | MapFlags::GROWSDOWN;
        let top = AT + 4096 * P;
        space.mmap(cpu, top - P, P, RW, flags).unwrap();
        cpu.vm().set(Setting::StackLimit(600 * P));
        store(cpu, space, top - 500 * P, 1).unwrap();
        let unmapped = Err(FaultError::Segv { mapped: false });
        assert_eq!(store(cpu, space, top - 601 * P, 1), unmapped);
        assert_eq!(store(cpu, space, top - 600 * P, 1), Ok(()));
        cpu.vm().set(Setting::StackLimit(8 << 20));
        space.mmap(cpu, top - 1000 * P, P, RW, FIXED).unwrap();
        // The guard of 256 pages stays free.
        assert_eq!(store(cpu, space, top - 743 * P, 1), Ok(()));
        assert_eq!(store(cpu, space, top - 744 * P, 1), unmapped);
        assert_eq!(areas(cpu, space).len(), 4);
        assert_eq!(space.mmap(cpu, top - 800 * P, P, RW, PRIVATE).map(|at| at < top), Ok(false));
    });
}

/// Each space has a stack limit, which a fork inherits.
#[test]
fn each_space_has_a_stack_limit() {
    with_space(|cpu, space| {
        let top = AT + 5000 * P;
        space.mmap(cpu, top - P, P, RW, FIXED | MapFlags::GROWSDOWN).unwrap();
        let unmapped = Err(FaultError::Segv { mapped: false });
        space.set_stack_limit(3 * P);
        assert_eq!(store(cpu, space, top - 4 * P, 1), unmapped);
        assert_eq!(store(cpu, space, top - 3 * P, 1), Ok(()));
        let other = Space::new(cpu).unwrap();
        other.mmap(cpu, top - P, P, RW, FIXED | MapFlags::GROWSDOWN).unwrap();
        assert_eq!(store(cpu, &other, top - 5 * P, 1), Ok(()));
        other.exit(cpu);
        let child = space.fork(cpu).unwrap();
        assert_eq!(store(cpu, &child, top - 4 * P, 1), unmapped);
        child.set_stack_limit(4 * P);
        assert_eq!(store(cpu, &child, top - 4 * P, 1), Ok(()));
        assert_eq!(store(cpu, space, top - 4 * P, 1), unmapped);
        child.exit(cpu);
    });
}

#[test]
fn too_many_vmas_are_refused_without_a_change() {
    with_space(|cpu, space| {
        cpu.vm().set(Setting::MaxMapCount(2));
        let error = space.munmap(cpu, AT + P, P).unwrap_err();
        assert_eq!(error.errno, ENOMEM);
        assert_eq!(error.range, VirtRange::new(AT + P, AT + 2 * P));
        assert_eq!(space.mmap(cpu, None, P, Prot::READ, PRIVATE).unwrap_err().errno, ENOMEM);
        let advised = space.madvise(cpu, AT + P, P, Advice::DontFork);
        assert_eq!(advised.unwrap_err().errno, Errno::EAGAIN);
        let holes = space.madvise(cpu, AT, 8 * P, Advice::DontFork);
        assert_eq!(
            holes.unwrap_err().errno,
            ENOMEM,
            "a range with a hole that needs no more areas"
        );
        assert_eq!(areas(cpu, space), [(0, 4, 3), (6, 8, 3)]);
        cpu.vm().set(Setting::MaxMapCount(65530));
    });
}

/// Out of frames at every possible moment: for each number of frames left, each operation either
/// succeeds or fails cleanly, and every frame is accounted for.
#[test]
fn out_of_memory_leaks_no_frames() {
    for left in 0..24 {
        let vm = guest::vm(1, 512);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, 0, 16, RW);
        for page in 0..8 {
            store(&cpu, &space, AT + page * P, page).unwrap();
        }
        cpu.drain();
        vm.set(Setting::FrameLimit(vm.total_frames() - vm.free_frames() + left));
        let check = |spaces: &[&TestSpace]| {
            cpu.drain();
            audit(&cpu, spaces).unwrap();
        };
        // A child, if there is enough memory, and stores in both spaces.
        let child = space.fork(&cpu);
        match &child {
            Ok(child) => check(&[&space, child]),
            Err(error) => {
                assert_eq!(error.errno, ENOMEM);
                check(&[&space]);
            }
        }
        let mut written = 0;
        for page in 0..16 {
            match store(&cpu, &space, AT + page * P, 100 + page) {
                Ok(()) => written += 1,
                Err(error) => assert_eq!(error, FaultError::OutOfMemory),
            }
        }
        if let Ok(child) = &child {
            for page in 0..8 {
                assert_eq!(load(&cpu, child, AT + page * P), Ok(page), "the child's copy");
            }
        }
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        let moved = space.mremap(&cpu, AT, 4 * P, 4 * P, flags, 3 << 30);
        let at = moved.unwrap_or(AT);
        if written == 16 {
            assert_eq!(load(&cpu, &space, at), Ok(100));
        }
        let shared = MapFlags::SHARED | MapFlags::ANONYMOUS;
        if let Ok(at) = space.mmap(&cpu, None, 4 * P, RW, shared) {
            let _ = store(&cpu, &space, at, 1);
        }
        space.munmap(&cpu, AT, 64 * P).unwrap();
        let spaces: Vec<&TestSpace> = child.as_ref().into_iter().chain([&space]).collect();
        check(&spaces);
        space.exit(&cpu);
        if let Ok(child) = child {
            child.exit(&cpu);
        }
        cpu.drain();
        assert_eq!(audit(&cpu, &[]).unwrap().taken(), 1, "with {left} free frames");
    }
}

/// The upper half of a root table belongs to the kernel. Its contents are still present when the
/// space ends, and the subsystem interprets no entry there as a table or a page.
#[test]
fn the_kernel_half_of_a_root_table_is_untouched() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let root = vm.machine().frame_bytes(space.root()).cast::<u64>();
    // Foreign tables, huge pages, non-present entries and locked entries: all belong to the kernel.
    let theirs = |at: usize| match at % 4 {
        0 => 0x1_0000_0003 + (at as u64) * P,
        1 => 0x1_0000_0083,
        2 => 1 << 9,
        _ => u64::MAX << 1,
    };
    let all = USER_ROOT_ENTRIES..ENTRIES;
    // SAFETY: entries of a table that no other CPU uses.
    all.clone().for_each(|at| unsafe { root.add(at).write(theirs(at)) });
    // SAFETY: as above.
    let untouched = |at: usize| unsafe { root.add(at).read() } == theirs(at);
    map(&cpu, &space, 0, 4, RW);
    store(&cpu, &space, AT, 1).unwrap();
    store(&cpu, &space, space.mmap(&cpu, None, P, RW, PRIVATE).unwrap(), 2).unwrap();
    let child = space.fork(&cpu).unwrap();
    for (addr, len) in [(USER_END, 1 << 40), (AT, USER_END), (u64::MAX << 47, 1 << 40)] {
        for advice in (0..32).filter_map(Advice::from_number) {
            let _ = space.madvise(&cpu, addr, len, advice);
        }
        for lock in [MemoryLock::OnFault, MemoryLock::No] {
            space.mlock(&cpu, addr, len, lock).unwrap_err();
        }
        space.mprotect(&cpu, addr, len, RW).unwrap_err();
        space.munmap(&cpu, addr, len).unwrap_err();
    }
    space.munmap(&cpu, 0, USER_END).unwrap();
    cpu.drain();
    audit(&cpu, &[&space, &child]).unwrap();
    assert!(all.clone().all(untouched));
    let number = space.root();
    space.exit(&cpu);
    // No other owner has used the frame since.
    assert!(all.clone().all(untouched), "of {number:?}");
}

#[test]
fn a_hidden_page_is_found_again() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 4, RW);
    store(&cpu, &space, AT, 42).unwrap();
    assert_eq!(load(&cpu, &space, AT + P), Ok(0), "the zero page");
    let frame = space.entry_at(&cpu, AT).frame();

    space.mprotect(&cpu, AT, 2 * P, Prot::empty()).unwrap();
    let hidden = |of: &TestSpace, page: u64| of.entry_at(&cpu, AT + page * P);
    for page in [0, 1] {
        let entry = hidden(&space, page);
        assert!(entry.is_mapped() && !entry.is_present(), "{entry:?}");
        assert_eq!(load(&cpu, &space, AT + page * P), Err(FaultError::Segv { mapped: true }));
    }
    assert_eq!(hidden(&space, 0).frame(), frame);
    assert_eq!(space.resident_pages(&cpu), 1);
    let mut core = Vec::new();
    space.mincore(&cpu, AT, 4 * P, |there| core.push(there)).unwrap();
    assert_eq!(core, [true, true, false, false]);

    let child = space.fork(&cpu).unwrap();
    assert_eq!(hidden(&child, 0).frame(), frame);
    assert!(!hidden(&child, 0).is_present());
    cpu.drain();
    audit(&cpu, &[&space, &child]).unwrap();

    vm.machine().invalidated.lock().unwrap().clear();
    space.activate(&cpu);
    space.mprotect(&cpu, AT, 2 * P, RW).unwrap();
    let flushes = vm.machine().invalidated.lock().unwrap().len();
    assert_eq!(flushes, 0, "a hidden page is in no TLB");
    assert_eq!(hidden(&space, 0).frame(), frame);
    assert_eq!(load(&cpu, &space, AT), Ok(42));
    store(&cpu, &space, AT, 43).unwrap();
    assert_ne!(hidden(&space, 0).frame(), frame, "the child has the old frame");
    child.mprotect(&cpu, AT, P, Prot::READ).unwrap();
    assert_eq!(load(&cpu, &child, AT), Ok(42));

    // A move, advice and an unmapping of hidden pages lose and leak no page.
    space.mprotect(&cpu, AT, 4 * P, Prot::empty()).unwrap();
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    space.mremap(&cpu, AT, 2 * P, 2 * P, flags, 3 << 30).unwrap();
    assert!(space.entry_at(&cpu, 3 << 30).is_hidden());
    space.madvise(&cpu, (3 << 30) + P, P, Advice::DontNeed).unwrap();
    space.mprotect(&cpu, 3 << 30, 2 * P, RW).unwrap();
    assert_eq!(load(&cpu, &space, 3 << 30), Ok(43));
    child.mprotect(&cpu, AT, P, Prot::empty()).unwrap();
    child.munmap(&cpu, AT, P).unwrap();
    cpu.drain();
    audit(&cpu, &[&space, &child]).unwrap();
    // SAFETY: the machine has no MMU.
    unsafe { space.deactivate(&cpu) };
    space.exit(&cpu);
    child.exit(&cpu);
    cpu.drain();
    assert_eq!(audit(&cpu, &[]).unwrap().taken(), 1);
}

#[test]
fn populate_skips_present_pages() {
    use crate::stat::Counter;
    with_space(|cpu, space| {
        let faults = |advice: Advice| {
            let before = cpu.vm().totals().get(Counter::Faults);
            space.madvise(cpu, AT, 4 * P, advice).unwrap();
            cpu.vm().totals().get(Counter::Faults) - before
        };
        assert_eq!(faults(Advice::PopulateRead), 3, "page 0 is resident");
        assert_eq!(faults(Advice::PopulateRead), 0);
        assert_eq!(faults(Advice::PopulateWrite), 3, "pages of zeros are read-only");
        assert_eq!(faults(Advice::PopulateWrite), 0);
        space.mprotect(cpu, AT, P, Prot::empty()).unwrap();
        let hidden = space.madvise(cpu, AT, P, Advice::PopulateRead).unwrap_err().errno;
        assert_eq!(hidden, EINVAL, "resident but inaccessible");
        assert_eq!(cpu.vm().totals().get(Counter::Spurious), 0);
    });
}
