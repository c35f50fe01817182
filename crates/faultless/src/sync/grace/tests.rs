use super::*;
use crate::machine::CpuId;
use crate::sync::wait::{Spin, Yield};
use core::sync::atomic::{AtomicBool, AtomicPtr};
use std::boxed::Box;
use std::vec::Vec;

fn local(cpu: usize) -> Local {
    // SAFETY: each test claims a CPU of its own `Grace` once at a time.
    unsafe { Local::claim(CpuId(cpu as u16)) }
}

fn object(kind: u8) -> NonNull<RetireLink> {
    NonNull::from(Box::leak(Box::new(RetireLink::new(kind))))
}

fn retire(grace: &Grace, local: &Local, kind: u8) {
    // SAFETY: only the bag refers to the object.
    unsafe { grace.retire(local, object(kind)) };
}

fn free(objects: impl Iterator<Item = NonNull<RetireLink>>) -> Vec<u8> {
    // SAFETY: each object given out came from `object` and is ours again.
    objects.map(|object| unsafe { Box::from_raw(object.as_ptr()) }.kind()).collect()
}

/// Collects until no further objects become due without other CPUs.
fn free_all(grace: &Grace, local: &Local) -> Vec<u8> {
    let mut kinds: Vec<u8> = (0..4).flat_map(|_| free(grace.collect(local))).collect();
    kinds.sort_unstable();
    kinds
}

#[test]
fn no_object_is_due_while_an_older_section_is_open() {
    let (grace, reader, writer) = (Grace::try_new(3).unwrap(), local(0), local(1));
    let outer = grace.enter(&reader);
    let inner = grace.enter(&reader);
    retire(&grace, &writer, 1);
    retire(&grace, &writer, 2);
    assert_eq!(free_all(&grace, &writer), []);
    drop(outer);
    assert_eq!(free_all(&grace, &writer), []);
    assert_eq!(grace.pending(&writer), 2);
    drop(inner);
    assert_eq!(free_all(&grace, &writer), [1, 2]);
    assert_eq!(grace.pending(&writer), 0);
}

#[test]
fn a_younger_section_delays_only_younger_objects() {
    let (grace, reader, writer) = (Grace::try_new(2).unwrap(), local(0), local(1));
    retire(&grace, &writer, 1);
    assert_eq!(free(grace.collect(&writer)), []);
    assert_eq!(free(grace.collect(&writer)), [1]);
    // The section was entered in epoch 2: objects retired in epoch 1 or earlier become due, and
    // objects retired now wait.
    retire(&grace, &writer, 2);
    assert_eq!(free(grace.collect(&writer)), []);
    let _section = grace.enter(&reader);
    retire(&grace, &writer, 3);
    assert_eq!(free_all(&grace, &writer), [2]);
    assert_eq!(grace.pending(&writer), 1);
    drop(_section);
    assert_eq!(free_all(&grace, &writer), [3]);
}

#[test]
fn a_reused_bag_loses_no_objects() {
    let (grace, here, other) = (Grace::try_new(2).unwrap(), local(0), local(1));
    for kind in 0..10 {
        retire(&grace, &here, kind);
        grace.synchronize(&other, &Spin);
    }
    assert_eq!(grace.pending(&here), 10);
    assert_eq!(free_all(&grace, &here), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn untaken_objects_stay_due() {
    let (grace, here) = (Grace::try_new(1).unwrap(), local(0));
    retire(&grace, &here, 1);
    retire(&grace, &here, 2);
    grace.synchronize(&here, &Spin);
    let first = grace.collect(&here).next().unwrap();
    retire(&grace, &here, 3);
    assert_eq!(grace.pending(&here), 2);
    assert_eq!(free([first].into_iter()).len(), 1);
    assert_eq!(free_all(&grace, &here).len(), 2);
}

#[test]
fn objects_retired_by_one_cpu_are_collected_by_another() {
    let (grace, here, there) = (Grace::try_new(3).unwrap(), local(0), local(1));
    (0..3).for_each(|kind| retire(&grace, &here, kind));
    assert_eq!((grace.pending(&there), grace.pending_anywhere()), (0, 3));
    assert_eq!(free(grace.collect_from(&there, CpuId(0))), [], "before its grace period is over");
    grace.synchronize(&there, &Spin);
    retire(&grace, &here, 3);
    let first = grace.collect_from(&there, CpuId(0)).next().unwrap();
    assert_eq!(grace.pending(&here), 3, "objects that were not taken remain pending");
    assert_eq!(free([first].into_iter()).len(), 1);
    assert_eq!(free(grace.collect_from(&there, CpuId(0))).len(), 2);
    assert_eq!(free_all(&grace, &here), [3]);
    assert_eq!(grace.pending_anywhere(), 0);
}

#[test]
fn draining_empties_every_bag_of_every_cpu() {
    let mut grace = Grace::try_new(3).unwrap();
    for kind in 0..9 {
        let here = local(usize::from(kind % 3));
        retire(&grace, &here, kind);
        if kind % 2 == 0 {
            grace.try_advance();
        }
    }
    let mut kinds = free(grace.drain());
    kinds.sort_unstable();
    assert_eq!(kinds, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(free(grace.drain()), []);
}

#[repr(C)]
struct Node {
    link: RetireLink,
    freed: AtomicBool,
}

/// Readers follow a pointer that writers replace. Freed nodes are marked and reused, so a section
/// that outlives its grace period sees the mark.
#[test]
fn a_section_never_sees_a_freed_object() {
    const WRITERS: usize = 2;
    const SWAPS: usize = if cfg!(miri) { 30 } else { 5_000 };
    let mut grace = Grace::try_new(4).unwrap();
    let node = || {
        Box::into_raw(Box::new(Node { link: RetireLink::new(0), freed: AtomicBool::new(false) }))
    };
    let shared = AtomicPtr::new(node());
    let writing = AtomicU64::new(WRITERS as u64);
    // Pointers that may be moved to another thread.
    let spare: Vec<AtomicPtr<Node>> = std::thread::scope(|scope| {
        let (grace, shared, writing) = (&grace, &shared, &writing);
        for cpu in WRITERS..4 {
            scope.spawn(move || {
                let here = local(cpu);
                while writing.load(Ordering::Relaxed) > 0 {
                    let _section = grace.enter(&here);
                    // SAFETY: nodes are never given back to the heap while threads run.
                    let node = unsafe { &*shared.load(Ordering::Acquire) };
                    for look in 0..20 {
                        assert!(!node.freed.load(Ordering::Relaxed), "freed while being read");
                        if look == 10 {
                            std::thread::yield_now();
                        }
                    }
                }
            });
        }
        let writers: Vec<_> = (0..WRITERS)
            .map(|cpu| {
                scope.spawn(move || {
                    let here = local(cpu);
                    let mut spare: Vec<*mut Node> = (0..64).map(|_| node()).collect();
                    for turn in 0..SWAPS {
                        while spare.is_empty() {
                            grace.synchronize(&here, &Yield);
                            spare.extend(grace.collect(&here).map(mark_freed));
                        }
                        let new = spare.pop().unwrap();
                        // SAFETY: as above.
                        unsafe { &*new }.freed.store(false, Ordering::Relaxed);
                        let old = shared.swap(new, Ordering::AcqRel);
                        // SAFETY: unlinked by the swap, once.
                        unsafe { grace.retire(&here, NonNull::new(old).unwrap().cast()) };
                        if turn % 8 == 0 {
                            spare.extend(grace.collect(&here).map(mark_freed));
                        }
                    }
                    writing.fetch_sub(1, Ordering::Relaxed);
                    spare.into_iter().map(AtomicPtr::new).collect::<Vec<_>>()
                })
            })
            .collect();
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    let mut nodes: Vec<*mut Node> = spare.into_iter().map(AtomicPtr::into_inner).collect();
    nodes.extend(grace.drain().map(mark_freed));
    nodes.push(shared.into_inner());
    assert_eq!(nodes.len(), WRITERS * 64 + 1, "each node exists exactly once");
    for node in nodes {
        // SAFETY: the threads are gone, and each node is in the list once.
        drop(unsafe { Box::from_raw(node) });
    }
}

fn mark_freed(object: NonNull<RetireLink>) -> *mut Node {
    let node: *mut Node = object.as_ptr().cast();
    // SAFETY: all retired objects of this test are nodes that begin with their link.
    unsafe { &*node }.freed.store(true, Ordering::Relaxed);
    node
}

/// Objects that became due by one CPU's advances of the epoch are given out by another CPU without
/// a check of all marks.
#[test]
fn due_objects_are_given_out_before_the_epoch_advances() {
    let (grace, one, other) = (Grace::try_new(2).unwrap(), local(0), local(1));
    let epoch = || grace.epoch.load(Ordering::Relaxed);
    retire(&grace, &one, 1);
    retire(&grace, &other, 2);
    assert_eq!(free_all(&grace, &one), [1]);
    let now = epoch();
    retire(&grace, &other, 3);
    assert_eq!(free(grace.collect(&other)), [2]);
    assert_eq!(epoch(), now, "an object was ready");
    assert_eq!(free_all(&grace, &other), [3]);
    assert_ne!(epoch(), now, "no object was ready");
    let now = epoch();
    assert_eq!(free(grace.collect(&other)), []);
    assert_eq!(epoch(), now, "no object is pending");
}
