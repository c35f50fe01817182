//! Memory policies of VMAs: merging, inheritance, and the nodes of new pages.

use crate::addr::VirtRange;
use crate::error::Errno::{self, EFAULT, EINVAL, ENOENT};
use crate::fault::{Access, FaultKind};
use crate::file::Object;
use crate::knob::{Locking, Setting};
use crate::reclaim::tests::swap::{is_swapped, page_out, swap_on};
use crate::reclaim::tests::tiers::tiers;
use crate::space::MemPolicy::{self, Default, Interleave, Local, Preferred};
use crate::space::{MemoryLock, NodeSet, Prot, RemapFlags, Space};
use crate::testing::guest::{
    AT, P, PRIVATE, RW, TestCpu, TestSpace, check, cpu, load, map, map_object, store, two_nodes,
};
use crate::testing::store::{Memory, file};
use std::vec;
use std::vec::Vec;

const SLOW: MemPolicy = Preferred(NodeSet::only(1));
const BOTH: NodeSet = NodeSet::of_bits(0b11);

/// Returns the nodes of the first four pages of a space.
fn nodes_of(cpu: &TestCpu<'_>, space: &TestSpace) -> [Result<u8, Errno>; 4] {
    let addrs = [0, 1, 2, 3].map(|page| AT + page * P);
    let mut nodes = [Err(Errno::EINVAL); 4];
    space.page_nodes(cpu, &addrs, &mut nodes);
    nodes
}

/// Returns the number of pages and the policy of each VMA.
fn policies(cpu: &TestCpu<'_>, space: &TestSpace) -> Vec<(u64, MemPolicy)> {
    let mut policies = Vec::new();
    space.each_area(cpu, VirtRange::USER, |area| {
        policies.push((area.range.pages(), area.mem_policy()));
        true
    });
    policies
}

fn bind(
    cpu: &TestCpu<'_>,
    space: &TestSpace,
    (page, pages): (u64, u64),
    policy: MemPolicy,
) -> Result<(), Errno> {
    space.mbind(cpu, AT + page * P, pages * P, policy).map_err(|error| error.errno)
}

/// Returns the nodes of the pages from `first` on.
fn nodes(
    cpu: &TestCpu<'_>,
    space: &TestSpace,
    (first, pages): (u64, u64),
) -> Vec<Result<u8, Errno>> {
    let addrs: Vec<_> = (first..first + pages).map(|page| AT + page * P).collect();
    let mut nodes = vec![Err(Errno::EIO); addrs.len()];
    space.page_nodes(cpu, &addrs, &mut nodes);
    nodes
}

/// Stores to pages, and checks that the nodes of the pages are `expected`.
fn touch(cpu: &TestCpu<'_>, space: &TestSpace, first: u64, expected: &[u8]) {
    let pages = expected.len() as u64;
    (first..first + pages).for_each(|page| store(cpu, space, AT + page * P, page + 1).unwrap());
    let expected: Vec<_> = expected.iter().copied().map(Ok).collect();
    assert_eq!(nodes(cpu, space, (first, pages)), expected);
}

#[test]
fn policies_split_and_merge() {
    for locking in Locking::ALL {
        let vm = two_nodes(256);
        vm.set(Setting::Locking(locking));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, 0, 8, RW);
        assert_eq!(bind(&cpu, &space, (1, 3), SLOW), Ok(()));
        assert_eq!(bind(&cpu, &space, (6, 1), Interleave(BOTH)), Ok(()));
        let split = [(1, Default), (3, SLOW), (2, Default), (1, Interleave(BOTH)), (1, Default)];
        assert_eq!(policies(&cpu, &space), split);
        assert_eq!(bind(&cpu, &space, (3, 5), SLOW), Ok(()));
        assert_eq!(policies(&cpu, &space), [(1, Default), (7, SLOW)]);
        // The same policy again, within a VMA.
        assert_eq!(bind(&cpu, &space, (2, 3), SLOW), Ok(()));
        assert_eq!(policies(&cpu, &space), [(1, Default), (7, SLOW)]);
        assert_eq!(bind(&cpu, &space, (0, 1), Local), Ok(()));
        assert_eq!(policies(&cpu, &space), [(1, Local), (7, SLOW)], "a separate policy");
        // Other flags stay, and a lock keeps the policy.
        space.mlock(&cpu, AT, 8 * P, MemoryLock::Now).unwrap();
        assert_eq!(policies(&cpu, &space), [(1, Local), (7, SLOW)]);
        assert_eq!(bind(&cpu, &space, (0, 8), Default), Ok(()));
        assert_eq!((policies(&cpu, &space), space.locked_pages(&cpu)), ([(8, Default)].into(), 8));
        check(&cpu, &[&space], &[], 0);
        space.exit(&cpu);
    }
}

#[test]
fn errors_match_linux_and_change_no_state() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 4, RW);
    map(&cpu, &space, 6, 2, RW);
    let before = policies(&cpu, &space);
    for policy in [SLOW, Local, Interleave(BOTH)] {
        assert_eq!(bind(&cpu, &space, (0, 8), policy), Err(EFAULT), "a hole in the middle");
        assert_eq!(bind(&cpu, &space, (6, 3), policy), Err(EFAULT), "a hole at the end");
    }
    assert_eq!(bind(&cpu, &space, (4, 2), Default), Err(EFAULT), "no mapping");
    assert_eq!(policies(&cpu, &space), before);
    for policy in [Preferred(NodeSet::default()), Interleave(NodeSet::of_bits(0b100))] {
        assert_eq!(bind(&cpu, &space, (0, 4), policy), Err(EINVAL), "{policy:?}");
    }
    // Nodes without memory are left out.
    assert_eq!(bind(&cpu, &space, (6, 2), Preferred(NodeSet::of_bits(0b110))), Ok(()));
    assert_eq!(policies(&cpu, &space)[1], (2, SLOW));
    assert_eq!(bind(&cpu, &space, (6, 2), Default), Ok(()));
    let refused = |addr, len| space.mbind(&cpu, addr, len, SLOW).map_err(|error| error.errno);
    assert_eq!(refused(AT + 1, P), Err(EINVAL));
    assert_eq!(refused(AT, u64::MAX - AT), Err(EINVAL), "the range wraps");
    assert_eq!(refused(AT, u64::MAX), Ok(()), "as on Linux, no pages");
    assert_eq!(refused(AT, 0), Ok(()));
    let error = space.mbind(&cpu, AT + 5 * P, P, SLOW).unwrap_err();
    assert_eq!((error.operation, error.range), ("mbind", VirtRange::page(AT + 5 * P)));
    // A range with a hole is valid for these policies, which then apply to the mapped part.
    assert_eq!(bind(&cpu, &space, (6, 2), SLOW), Ok(()));
    assert_eq!(bind(&cpu, &space, (0, 9), Default), Ok(()));
    assert_eq!(policies(&cpu, &space), before);
    space.exit(&cpu);
}

#[test]
fn new_pages_come_from_the_nodes_of_the_policy() {
    for (locking, order) in Locking::ALL.into_iter().zip([0, 5, 3]) {
        let vm = two_nodes(256);
        vm.set(Setting::Locking(locking));
        vm.set(Setting::PrefaultMaxOrder(order));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, 0, 192, RW);
        touch(&cpu, &space, 0, &[0; 8]);
        bind(&cpu, &space, (0, 96), SLOW).unwrap();
        bind(&cpu, &space, (96, 24), Interleave(BOTH)).unwrap();
        bind(&cpu, &space, (120, 72), Local).unwrap();
        // Behind the pages prefaulted without a policy.
        touch(&cpu, &space, 64, &[1; 32]);
        touch(&cpu, &space, 96, &[0, 1, 0, 1, 0, 1, 0, 1]);
        touch(&cpu, &space, 160, &[0; 8]);
        // Present pages stay on their nodes. Pages that were only read map the zero page, which has
        // no node.
        assert_eq!(nodes(&cpu, &space, (0, 8)), vec![Ok(0); 8]);
        assert_eq!(load(&cpu, &space, AT + 105 * P), Ok(0));
        assert_eq!(nodes(&cpu, &space, (105, 1)), [Err(EFAULT)]);
        touch(&cpu, &space, 105, &[1, 0]);
        assert_eq!(nodes(&cpu, &space, (116, 1)), [Err(ENOENT)], "no prefault");
        check(&cpu, &[&space], &[], 0);
        space.exit(&cpu);
    }
}

#[test]
fn children_and_moved_vmas_have_the_policy() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 8, RW);
    touch(&cpu, &space, 0, &[0; 4]);
    bind(&cpu, &space, (0, 8), SLOW).unwrap();
    let child = space.fork(&cpu).unwrap();
    assert_eq!(policies(&cpu, &child), [(8, SLOW)]);
    // The child's copies are new pages.
    touch(&cpu, &child, 0, &[1; 6]);
    assert_eq!(load(&cpu, &space, AT + 4 * P), Ok(0));
    child.exit(&cpu);
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    space.mremap(&cpu, AT, 8 * P, 8 * P, flags, AT + 64 * P).unwrap();
    assert_eq!(policies(&cpu, &space), [(8, SLOW)]);
    touch(&cpu, &space, 64 + 4, &[1; 4]);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn a_full_node_falls_back_to_other_nodes() {
    let vm = two_nodes(64);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 96, RW);
    bind(&cpu, &space, (0, 96), SLOW).unwrap();
    (0..96).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
    let there = nodes(&cpu, &space, (0, 96));
    // All frames of the second node, and the missing frames from the first.
    assert_eq!(there[..64], vec![Ok(1); 64]);
    assert_eq!(there[64..], vec![Ok(0); 32]);
    assert!((0..96).all(|page| load(&cpu, &space, AT + page * P) == Ok(page)));
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
    cpu.drain();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

#[test]
fn interleaving_uses_each_node_in_turn() {
    let policy = Interleave(NodeSet::of_bits(0b1011));
    for (page, node) in (0..9).zip([0, 1, 3].into_iter().cycle()) {
        assert_eq!(policy.nodes_for(page * P), NodeSet::only(node), "page {page}");
    }
    let vm = tiers(1, &[128; 3]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 32, RW);
    bind(&cpu, &space, (0, 16), Interleave(NodeSet::of_bits(0b111))).unwrap();
    bind(&cpu, &space, (16, 16), Interleave(NodeSet::of_bits(0b101))).unwrap();
    // The number of the first page is one more than a multiple of three.
    touch(&cpu, &space, 0, &[1, 2, 0, 1, 2, 0, 1]);
    touch(&cpu, &space, 16, &[0, 2, 0, 2]);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

#[test]
fn the_cheapest_node_with_a_free_frame_is_preferred() {
    let vm = tiers(1, &[128, 32, 32]);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 96, RW);
    bind(&cpu, &space, (0, 96), Preferred(NodeSet::of_bits(0b110))).unwrap();
    touch(&cpu, &space, 0, &[1; 32]);
    touch(&cpu, &space, 32, &[2; 32]);
    touch(&cpu, &space, 64, &[0; 32]);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// A swapped-in page is read into any frame, and then moves to a node of the policy.
#[test]
fn a_swapped_in_page_follows_the_policy() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    swap_on(&cpu, 64);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 4, RW);
    let bind = |policy| bind(&cpu, &space, (0, 4), policy).unwrap();
    let nodes = || nodes_of(&cpu, &space).map(Result::unwrap);
    let comes_back = || {
        page_out(&cpu, &space, 0, 4);
        assert!((0..4).all(|page| is_swapped(&cpu, &space, page)));
        (0..4).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
        nodes()
    };
    bind(SLOW);
    (0..4).for_each(|page| store(&cpu, &space, AT + page * P, page + 1).unwrap());
    assert_eq!(comes_back(), [1; 4]);
    // Shared with a child: copies.
    page_out(&cpu, &space, 0, 4);
    let child = space.fork(&cpu).unwrap();
    (0..4).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
    assert_eq!(nodes(), [1; 4]);
    child.exit(&cpu);
    bind(Local);
    assert_eq!(comes_back(), [0; 4]);
    check(&cpu, &[&space], &[], 0);
    space.exit(&cpu);
}

/// A pin of read-only memory creates private pages, whether the pages were swapped out, untouched,
/// or file pages.
#[test]
fn pages_created_by_a_pin_follow_the_policy() {
    for kind in ["swapped", "untouched", "file"] {
        let vm = two_nodes(256);
        let cpu = cpu(&vm, 0);
        swap_on(&cpu, 64);
        let space = Space::new(&cpu).unwrap();
        let object = file(&cpu, &Memory::new(8, 0));
        if kind == "file" {
            map_object(&cpu, &space, (0, 4), RW, PRIVATE, (&object, 0));
        } else {
            map(&cpu, &space, 0, 4, RW);
        }
        space.mbind(&cpu, AT, 4 * P, SLOW).unwrap();
        if kind == "swapped" {
            (0..4).for_each(|page| store(&cpu, &space, AT + page * P, page + 1).unwrap());
            page_out(&cpu, &space, 0, 4);
            assert!((0..4).all(|page| is_swapped(&cpu, &space, page)));
        }
        space.mprotect(&cpu, AT, 4 * P, Prot::READ).unwrap();
        let pins = space.pin(&cpu, AT, 4 * P, false).unwrap();
        assert_eq!(nodes_of(&cpu, &space), [Ok(1); 4], "{kind}");
        drop(pins);
        space.exit(&cpu);
        Object::release(object, &cpu);
    }
}

#[test]
fn a_childs_copies_of_pinned_pages_follow_the_policy() {
    let vm = two_nodes(256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 4, RW);
    space.mbind(&cpu, AT, 4 * P, SLOW).unwrap();
    let pins = space.pin(&cpu, AT, 4 * P, true).unwrap();
    let child = space.fork(&cpu).unwrap();
    assert_eq!([&space, &child].map(|of| nodes_of(&cpu, of)), [[Ok(1); 4]; 2]);
    drop(pins);
    child.exit(&cpu);
    space.exit(&cpu);
}

/// If the policy's nodes have no free frame, a swapped-in page stays in its frame.
#[test]
fn a_swapped_in_page_is_not_copied_within_other_nodes() {
    let vm = two_nodes(64);
    let cpu = cpu(&vm, 0);
    swap_on(&cpu, 64);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 200, RW);
    space.mbind(&cpu, AT, P, SLOW).unwrap();
    store(&cpu, &space, AT, 7).unwrap();
    page_out(&cpu, &space, 0, 1);
    let mut full = Vec::new();
    let mut one = [crate::addr::FrameNumber(0)];
    while let Some(frame) = vm.frames.take_from(1, &mut one, &cpu).pop() {
        full.push(frame);
    }
    assert!(!full.is_empty());
    assert_eq!(space.fault_remote(&cpu, AT, Access::Read), Ok(FaultKind::Swapped));
    assert_eq!((load(&cpu, &space, AT), nodes_of(&cpu, &space)[0]), (Ok(7), Ok(0)));
    full.into_iter().for_each(|frame| cpu.free(frame));
    space.exit(&cpu);
}
