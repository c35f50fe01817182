//! Calls at a boundary between the shards of a tree: equal neighbours on both sides form one VMA,
//! as without the boundary.

use crate::addr::VirtRange;
use crate::space::{Prot, RemapFlags, Space};
use crate::testing::guest::{self, AT, FIXED, P, RW, TestCpu, TestSpace, cpu};
use std::vec::Vec;

/// The page at the bound.
const NEXT: u64 = 512;

const fn page(number: u64) -> u64 {
    AT + number * P
}

fn map(cpu: &TestCpu<'_>, space: &TestSpace, first: u64, pages: u64, prot: Prot) {
    space.mmap(cpu, page(first), pages * P, prot, FIXED).unwrap();
}

/// Splits the tree into shards after `prepare`. After `call` there must be one VMA, of `pages`
/// pages from `first` on.
fn is_one(
    prepare: impl Fn(&TestCpu<'_>, &TestSpace),
    call: impl Fn(&TestCpu<'_>, &TestSpace),
    (first, pages): (u64, u64),
) {
    let vm = guest::vm(2, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    prepare(&cpu, &space);
    space.part_tree(&cpu, page(NEXT));
    assert_eq!(space.shards(&cpu), 2);
    call(&cpu, &space);
    let mut areas = Vec::new();
    space.areas(&cpu, |area| areas.push(area.range));
    assert_eq!(areas, [VirtRange::new(page(first), page(first + pages))]);
    space.exit(&cpu);
}

#[test]
fn mprotect_merges_across_a_boundary() {
    let all = [Prot::READ, RW];
    for (at, like) in [(NEXT, 0), (NEXT - 4, 1)] {
        is_one(
            |cpu, space| {
                map(cpu, space, NEXT - 4, 4, all[0]);
                map(cpu, space, NEXT, 4, all[1]);
            },
            |cpu, space| space.mprotect(cpu, page(at), 4 * P, all[like]).unwrap(),
            (NEXT - 4, 8),
        );
    }
}

#[test]
fn growth_merges_across_a_boundary() {
    is_one(
        |cpu, space| {
            map(cpu, space, NEXT - 8, 4, RW);
            map(cpu, space, NEXT, 4, RW);
        },
        |cpu, space| {
            let grown = space.mremap(cpu, page(NEXT - 8), 4 * P, 8 * P, RemapFlags::empty(), 0);
            assert_eq!(grown.unwrap(), page(NEXT - 8));
        },
        (NEXT - 8, 12),
    );
}

#[test]
fn mremap_merges_across_a_boundary() {
    for (from, to, there) in [(0, NEXT - 4, NEXT), (2 * NEXT, NEXT, NEXT - 4)] {
        is_one(
            |cpu, space| {
                map(cpu, space, from, 4, RW);
                map(cpu, space, there, 4, RW);
            },
            |cpu, space| {
                let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                space.mremap(cpu, page(from), 4 * P, 4 * P, flags, page(to)).unwrap();
            },
            (NEXT - 4, 8),
        );
    }
}

#[test]
fn a_heap_grows_across_a_boundary() {
    is_one(
        |cpu, space| {
            space.set_heap_start(cpu, page(NEXT - 4)).unwrap();
            space.brk(cpu, page(NEXT));
        },
        |cpu, space| assert_eq!(space.brk(cpu, page(NEXT + 4)), page(NEXT + 4)),
        (NEXT - 4, 8),
    );
}

#[test]
fn the_vma_limit_applies_to_all_shards_together() {
    const MOST: u64 = 600;
    let vm = guest::vm(2, 256);
    vm.set(crate::Setting::MaxMapCount(MOST));
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 1, RW);
    map(&cpu, &space, NEXT, 1, RW);
    space.part_tree(&cpu, page(NEXT));
    assert_eq!(space.shards(&cpu), 2);
    // The mappings are not adjacent, so that they do not merge, and lie on both sides of the
    // boundary.
    let mut made = 2;
    for i in 1..MOST {
        for first in [0, NEXT] {
            let at = if first == 0 { 2 * i } else { NEXT + 2 * i };
            if first == 0 && at >= NEXT {
                continue;
            }
            let done = space.mmap(&cpu, page(at), P, RW, FIXED);
            assert_eq!(done.is_ok(), made < MOST, "{made} areas, {done:?}");
            made += u64::from(done.is_ok());
        }
    }
    assert_eq!(made, MOST);
    let mut areas = 0;
    space.areas(&cpu, |_| areas += 1);
    assert_eq!(areas, MOST);
    // A mapping that merges or replaces others adds no VMA.
    map(&cpu, &space, 1, 1, RW);
    space.exit(&cpu);
}
