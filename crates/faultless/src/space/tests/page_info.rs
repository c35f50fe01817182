//! Information on single pages: the number of mappings, and whether they are used, dirty and lazily
//! freed.

use crate::addr::VirtRange;
use crate::fault::tests::huge::{F, PAGES, RWX, RX, Setup, each_policy};
use crate::frame::FrameUse;
use crate::reclaim::tests::swap::{page_out, with_swap};
use crate::space::huge::split_leaf;
use crate::space::{Advice, MapFlags, PageInfo, PagePlace, Prot};
use crate::table::walk::{Reached, descend};
use crate::testing::guest::{self, AT, P, PRIVATE, RW, SHARED, TestCpu, TestSpace, load, store};
use std::vec::Vec;

/// Returns the information on `pages` pages from `AT` on, with the number of each page in the
/// range.
fn pages(cpu: &TestCpu<'_>, space: &TestSpace, pages: u64) -> Vec<(u64, PagePlace)> {
    let mut reported = Vec::new();
    let range = VirtRange::new(AT, AT + pages * P);
    space.pages(cpu, range, |addr, place| reported.push(((addr - AT) / P, place)));
    for (at, place) in &reported {
        let alone = space.page_at(cpu, AT + at * P);
        let same = match place {
            PagePlace::Mapped(page) => alone == Some(*page),
            PagePlace::Swapped { slot, .. } => {
                let entry = space.entry_at(cpu, AT + at * P);
                entry.is_swapped() && entry.slot() == *slot
            }
        };
        assert!(same, "{at}: {place:?}, and for one page {alone:?}");
    }
    reported
}

/// Returns number, mappings, and the used and dirty bits of the pages in memory.
fn mapped(reported: &[(u64, PagePlace)]) -> Vec<(u64, u32, bool, bool)> {
    let of = |(at, place): &(u64, PagePlace)| match place {
        PagePlace::Mapped(PageInfo { mappings, accessed, dirty, .. }) => {
            Some((*at, *mappings, *accessed, *dirty))
        }
        PagePlace::Swapped { .. } => None,
    };
    reported.iter().filter_map(of).collect()
}

#[test]
fn private_pages_are_counted_for_all_programs() {
    with_swap((64, 16, 8), |cpu, space, _| {
        (0..6).for_each(|page| store(cpu, space, AT + page * P, 5 + page).unwrap());
        load(cpu, space, AT + 7 * P).unwrap();
        page_out(cpu, space, 4, 2);
        space.madvise(cpu, AT + P, 2 * P, Advice::Cold).unwrap();
        let child = space.fork(cpu).unwrap();
        store(cpu, &child, AT, 9).unwrap();
        space.madvise(cpu, AT, P, Advice::Free).unwrap();
        assert_eq!(load(cpu, &child, AT + 4 * P), Ok(9));
        let reported = pages(cpu, space, 8);
        let expected = [
            (0, 1, false, false),
            (1, 2, false, true),
            (2, 2, false, true),
            (3, 2, true, true),
            (7, 1, true, false),
        ];
        assert_eq!(mapped(&reported), expected);
        let usage = |at: usize| match reported[at].1 {
            PagePlace::Mapped(page) => Some((page.usage, page.exclusive)),
            PagePlace::Swapped { .. } => None,
        };
        assert_eq!(usage(0), Some((FrameUse::Anon, true)));
        assert_eq!(usage(1), Some((FrameUse::Anon, false)));
        assert_eq!(usage(6), Some((FrameUse::Zero, false)));
        let swapped = |at: usize| match reported[at] {
            (at, PagePlace::Swapped { mappings, .. }) => (at, mappings),
            _ => (0, 0),
        };
        // The child has a copy of page 4.
        assert_eq!([swapped(4), swapped(5)], [(4, 1), (5, 2)]);
        child.exit(cpu);
    });
}

/// A huge leaf counts as a mapping of each of its pages.
#[test]
fn file_pages_are_counted_with_huge_leaves_and_base_entries() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RX, PRIVATE);
        let (cpu, space) = (&setup.cpu, &setup.space);
        setup.fetch(7).unwrap();
        setup.fetch(2 * F + 1).unwrap();
        let expect = |leaf: u32, tail: u32| {
            let reported = mapped(&pages(cpu, space, PAGES));
            let (huge, small): (Vec<_>, Vec<_>) = reported.into_iter().partition(|page| page.0 < F);
            assert_eq!(huge.len() as u64, F);
            let other = huge.iter().find(|page| (page.1, page.3) != (leaf, false));
            assert_eq!(other, None, "not mapped {leaf} times, or dirty");
            assert!(small.iter().any(|page| (page.0, page.1) == (2 * F + 1, tail)), "{small:?}");
        };
        expect(1, 1);
        assert_eq!(mapped(&pages(cpu, space, 9)).len(), 9, "at most the requested number");
        let child = space.fork(cpu).unwrap();
        for page in [0, 2 * F + 1] {
            load(cpu, &child, AT + page * P).unwrap();
        }
        expect(2, 2);
        // Small entries of a part of the folio.
        child.mprotect(cpu, AT, P, RWX).unwrap();
        let reported = mapped(&pages(cpu, space, F));
        assert_eq!(reported.iter().find(|page| page.1 != 2), None);
        child.exit(cpu);
        expect(1, 1);
        setup.finish();
    });
}

/// Another CPU may split a leaf between the lookup of the leaf and the read of one of its pages.
#[test]
fn a_leaf_split_concurrently_is_read_again() {
    each_policy(|vm| {
        let setup = Setup::mapped(vm, RX, PRIVATE);
        let (cpu, space) = (&setup.cpu, &setup.space);
        setup.fetch(7).unwrap();
        let before = space.page_at(cpu, AT + 5 * P).map(|page| page.frame);
        let section = space.section(cpu);
        // SAFETY: inside a grace section.
        let Reached::Above { slot, .. } = (unsafe { descend(vm.machine(), space.root(), AT) })
        else {
            panic!("a leaf")
        };
        let mut looks = 0;
        let entry = space.entry_by(cpu, &section, AT + 5 * P, |found| {
            looks += 1;
            if looks == 1 {
                split_leaf(cpu, &space.core, AT, slot);
            }
            found.wait_and_load(cpu)
        });
        assert_eq!((looks, entry.map(|entry| entry.frame())), (2, before));
        drop(section);
        setup.finish();
    });
}

/// A writable entry of an object's page means a dirty page.
#[test]
fn pages_stored_to_by_a_mapping_are_dirty() {
    each_policy(|vm| {
        let setup = Setup::new(vm);
        setup.map(0, RW, SHARED);
        setup.load(0).unwrap();
        store(&setup.cpu, &setup.space, AT + P, 1).unwrap();
        let dirty = || {
            let reported = mapped(&pages(&setup.cpu, &setup.space, 2));
            reported.iter().map(|page| page.3).collect::<Vec<_>>()
        };
        assert_eq!(dirty(), [false, true]);
        // The page was stored to through this mapping.
        setup.space.mprotect(&setup.cpu, AT, 2 * P, Prot::READ).unwrap();
        assert_eq!(dirty(), [false, true]);
        setup.finish();
    });
}

/// Stores to pages of shared anonymous memory need no record, so their entries allow stores from
/// the first load on. Any store may be unnoticed.
#[test]
fn pages_of_shared_memory_are_dirty_once_writable() {
    each_policy(|vm| {
        let cpu = guest::cpu(vm, 0);
        let space = TestSpace::new(&cpu).unwrap();
        let flags = SHARED | MapFlags::ANONYMOUS | MapFlags::FIXED;
        space.mmap(&cpu, AT, 2 * P, RW, flags).unwrap();
        space.mmap(&cpu, AT + 2 * P, P, Prot::READ, flags).unwrap();
        load(&cpu, &space, AT).unwrap();
        load(&cpu, &space, AT + 2 * P).unwrap();
        let reported = mapped(&pages(&cpu, &space, 3));
        assert_eq!(
            reported.iter().map(|page| (page.0, page.3)).collect::<Vec<_>>(),
            [(0, true), (2, false)]
        );
        space.exit(&cpu);
        cpu.drain();
    });
}
