//! Tests of the frame allocator as a whole; the tests of each structure are next to the structure.

use super::*;
use crate::machine::{CpuId, Machine};
use crate::sync::wait::Yield;
use crate::testing::TestMachine;
use std::collections::BTreeSet;
use std::string::ToString;
use std::vec::Vec;

/// The factor by which the number of frames is reduced for the interpreter.
const MANY: u32 = if cfg!(miri) { 1 } else { 20 };

fn region(node: u8, first: u32, frames: u32) -> MemoryRegion {
    MemoryRegion { node, first: FrameNumber(first), frames }
}

fn cpu(id: u16) -> Local {
    // SAFETY: each test claims each CPU once for its `Frames`.
    unsafe { Local::claim(CpuId(id)) }
}

/// The frames of `regions`, for `cpus` CPUs.
fn memory(cpus: usize, regions: &[MemoryRegion]) -> Frames {
    // SAFETY: tests with a machine use only its regions; the other tests do not access memory.
    unsafe { Frames::try_new(cpus, regions, |_| 0) }.unwrap()
}

/// Allocates frames until memory is exhausted.
fn exhaust(frames: &Frames, local: &Local) -> Vec<Frame<Clean>> {
    core::iter::from_fn(|| frames.alloc(local, &Yield)).collect()
}

fn free_all(frames: &Frames, local: &Local, all: Vec<Frame<Clean>>) {
    for frame in all {
        frames.free(local, frame, &Yield);
    }
}

/// The audit passes, and everything but the CPUs' lists is free.
fn all_is_back(frames: &Frames) {
    let census = frames.checked_census(&Yield).unwrap();
    assert_eq!(census.free + census.pooled, frames.total(), "{census:?}");
}

/// Takes a published frame back, as its last owner does.
fn unpublish(frames: &Frames, number: FrameNumber) -> Frame<Clean> {
    assert_eq!(frames.meta(number).put_ref(), 0);
    // SAFETY: the last reference is dropped, and these tests have neither tables nor TLBs.
    unsafe { frames.reclaim(number).assume_flushed() }
}

#[test]
fn nodes_are_counted_separately_and_frees_are_counted() {
    let frames = memory(1, &[region(0, 3, 50), region(1, 60, 17), region(0, 80, 8)]);
    let local = cpu(0);
    let counts = |node| (frames.census_on(node).free, frames.free_on(node, &Yield));
    assert_eq!((counts(0), counts(1), counts(2)), ((58, 58), (17, 17), (0, 0)));
    let all = exhaust(&frames, &local);
    let taken = [0, 1, 2].map(|node| frames.census_on(node).taken());
    assert_eq!((taken, frames.freed()), ([58, 17, 0], 0));
    free_all(&frames, &local, all);
    frames.drain(&local, &Yield);
    assert_eq!((counts(0), counts(1), frames.freed()), ((58, 58), (17, 17), 75));
    assert_eq!(frames.reserved_on(0), 0);
}

/// A CPU keeps frames of the node that serves it: its own node, or another node if its own has no
/// memory.
#[test]
fn a_cpu_keeps_frames_of_its_serving_node() {
    for (regions, expected) in [(&[0][..], 0), (&[0, 1], 1)] {
        let regions: Vec<_> =
            regions.iter().map(|&node| region(node, 16 + 8192 * u32::from(node), 8192)).collect();
        // SAFETY: as in `memory`.
        let frames = unsafe { Frames::try_new(1, &regions, |_| 1) }.unwrap();
        let local = cpu(0);
        let frame = frames.alloc(&local, &Yield).unwrap();
        let mut kept = [0; 2];
        kept[expected] = frames.reserved_count();
        assert_ne!(kept, [0; 2]);
        assert_eq!([0, 1].map(|node| frames.reserved_on(node)), kept);
        frames.free(&local, frame, &Yield);
    }
}

#[test]
fn every_frame_is_allocated_once_and_returned() {
    let frames = memory(1, &[region(0, 3, 50 * MANY), region(0, 55 * MANY, 17)]);
    let local = cpu(0);
    let all = exhaust(&frames, &local);
    let numbers: BTreeSet<u32> = all.iter().map(|frame| frame.number().0).collect();
    let total = 50 * MANY + 17;
    assert_eq!(numbers, (3..50 * MANY + 3).chain(55 * MANY..55 * MANY + 17).collect());
    assert_eq!(frames.checked_census(&Yield).unwrap().pooled, u64::from(total));
    assert_eq!(frames.free_count(), 0);
    free_all(&frames, &local, all);
    all_is_back(&frames);
    frames.drain(&local, &Yield);
    let census = frames.checked_census(&Yield).unwrap();
    let (free, reserved) = (total.into(), u64::from(5 * MANY - 3));
    assert_eq!(census, Census { free, reserved, ..Census::default() });
    assert_eq!(frames.free_count(), free);
}

#[test]
fn nearer_nodes_are_used_first() {
    let frames = memory(1, &[region(2, 0, 20), region(0, 40, 70), region(2, 120, 1)]);
    let local = cpu(0);
    let all = exhaust(&frames, &local);
    assert_eq!(all.len(), 91);
    let node = |frame: &Frame<Clean>| frames.layout.node(frames.meta(frame.number()).arena());
    assert!(all[..64].iter().all(|frame| node(frame) == 0));
    assert_eq!(all.iter().filter(|frame| node(frame) == 2).count(), 21);
    free_all(&frames, &local, all);
    frames.drain(&local, &Yield);
    // Each frame went back to its own node, or the blocks would not have merged again.
    all_is_back(&frames);
    let block = frames.alloc_order(&local, 5, &Yield).unwrap();
    assert_eq!(node(&block), 0);
    frames.free(&local, block, &Yield);
}

#[test]
fn a_node_s_arenas_are_one_memory() {
    const GIB: u32 = 1 << MAX_ORDER;
    // The node's first and second gibibyte, for sixteen CPUs; the regions are unordered, and one
    // region has no frames.
    let regions = [region(1, GIB + 40, 5), region(0, GIB - 8, 24), region(0, 7, 0)];
    // SAFETY: this test does not access memory.
    let frames = unsafe { Frames::try_new(16, &regions, |_| 0) }.unwrap();
    let (first, last) = (cpu(0), cpu(15));
    let one = frames.alloc_order(&first, 0, &Yield).unwrap();
    let other = frames.alloc_order(&last, 0, &Yield).unwrap();
    assert!(one.number().0 < GIB && (GIB..GIB + 16).contains(&other.number().0));
    free_all(&frames, &first, std::vec![one, other]);
    frames.drain(&first, &Yield);
    for local in [&first, &last] {
        let all = exhaust(&frames, local);
        let numbers: BTreeSet<u32> = all.iter().map(|frame| frame.number().0).collect();
        assert_eq!(numbers, (GIB - 8..GIB + 16).chain(GIB + 40..GIB + 45).collect());
        // The frames of the CPU's own arena come first, and the frames of the other node last.
        let home = if core::ptr::eq(local, &first) { GIB - 8..GIB } else { GIB..GIB + 16 };
        assert!(all[..home.len()].iter().all(|frame| home.contains(&frame.number().0)));
        assert!(all[24..].iter().all(|frame| frame.number().0 >= GIB + 40));
        free_all(&frames, local, all);
        frames.drain(local, &Yield);
        assert_eq!(frames.checked_census(&Yield).unwrap().free, 29);
    }
    // Blocks have merged, each in its arena.
    for order in [3, 4] {
        let block = frames.alloc_order(&first, order, &Yield).unwrap();
        assert_eq!(block.number().0, if order == 3 { GIB - 8 } else { GIB });
        frames.free(&first, block, &Yield);
    }
    all_is_back(&frames);
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes long for this number of frames")]
fn the_last_frame_numbers_are_usable() {
    let (count, cpus) = (1 << 14, 2);
    let first = u32::MAX - count;
    for nearest in [0, 3, u8::MAX] {
        let regions = [region(3, first, count)];
        // SAFETY: this test does not access memory.
        let frames = unsafe { Frames::try_new(cpus, &regions, |_| nearest) }.unwrap();
        let local = cpu(1);
        let all = exhaust(&frames, &local);
        let numbers: BTreeSet<u32> = all.iter().map(|frame| frame.number().0).collect();
        assert_eq!(numbers, (first..u32::MAX).collect());
        free_all(&frames, &local, all);
        frames.drain(&local, &Yield);
        assert_eq!(frames.checked_census(&Yield).unwrap().free, count.into());
    }
}

#[test]
fn memory_without_regions_is_empty() {
    let frames = memory(1, &[]);
    assert!(frames.alloc(&cpu(0), &Yield).is_none());
    assert_eq!(frames.checked_census(&Yield).unwrap(), Census::default());
}

#[test]
fn the_limit_is_exact_and_adjustable() {
    let frames = memory(1, &[region(0, 0, 128)]);
    let local = cpu(0);
    frames.set_limit(101);
    let mut all = exhaust(&frames, &local);
    assert_eq!(all.len(), 101);
    assert!(frames.alloc_order(&local, 3, &Yield).is_none());
    frames.set_limit(50);
    let last = all.split_off(70);
    free_all(&frames, &local, last);
    frames.drain(&local, &Yield);
    assert!(frames.alloc(&local, &Yield).is_none(), "70 are out of 50");
    frames.set_limit(78);
    assert!(frames.alloc_order(&local, 4, &Yield).is_none());
    let block = frames.alloc_order(&local, 3, &Yield).unwrap();
    assert!(frames.alloc(&local, &Yield).is_none());
    frames.set_limit(u64::MAX);
    assert_eq!(frames.limit(), frames.total());
    frames.free(&local, block, &Yield);
    free_all(&frames, &local, all);
    frames.drain(&local, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().free, 128);
}

#[test]
fn a_block_is_found_in_the_cpu_list() {
    let frames = memory(1, &[region(0, 0, 16)]);
    let local = cpu(0);
    let all = exhaust(&frames, &local);
    free_all(&frames, &local, all);
    assert_ne!(frames.checked_census(&Yield).unwrap().pooled, 0);
    let block = frames.alloc_order(&local, 4, &Yield).expect("all 16 frames are free");
    frames.free(&local, block, &Yield);
    all_is_back(&frames);
}

#[test]
fn lists_are_small_if_memory_is_short() {
    let frames = memory(2, &[region(0, 0, 160)]);
    let (one, other) = (cpu(0), cpu(1));
    let first = frames.alloc(&one, &Yield).unwrap();
    let all = exhaust(&frames, &other);
    // A batch was 10 frames, including `first`.
    assert_eq!(all.len(), 150);
    free_all(&frames, &other, all);
    frames.free(&other, first, &Yield);
    // The other CPU's last batch was one frame, so the CPU keeps at most two frames.
    let census = frames.checked_census(&Yield).unwrap();
    assert!(census.pooled <= 9 + 2, "{census:?}");
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes long for this number of frames")]
fn a_bulk_allocation_is_limited_to_spare_frames() {
    let frames = memory(1, &[region(0, 0, 1600)]);
    let local = cpu(0);
    let held: Vec<_> = (0..1490).map(|_| frames.alloc_order(&local, 0, &Yield).unwrap()).collect();
    let mut buffer = [FrameNumber(0); BATCH];
    let bulk = frames.alloc_bulk(&local, &mut buffer, &Yield);
    assert_eq!(bulk.len(), 10, "below a sixteenth memory is short");
    frames.free_bulk(&local, bulk, &Yield);
    free_all(&frames, &local, held);
    all_is_back(&frames);
}

#[test]
fn the_census_knows_every_use() {
    let frames = memory(1, &[region(0, 10, 150)]);
    let local = cpu(0);
    let uses = [
        FrameUse::Table,
        FrameUse::Anon,
        FrameUse::Shared,
        FrameUse::Zero,
        FrameUse::Retired,
        FrameUse::Kernel,
    ];
    let mut published = Vec::new();
    for (count, usage) in uses.into_iter().enumerate() {
        for index in 0..=count as u64 {
            let frame = frames.alloc(&local, &Yield).unwrap();
            published.push(frames.publish(frame, usage, 77, index));
        }
    }
    let large = frames.alloc_order(&local, 6, &Yield).unwrap();
    published.push(frames.publish(large, FrameUse::Anon, 0, 0));
    let held = frames.alloc(&local, &Yield).unwrap();

    let census = frames.checked_census(&Yield).unwrap();
    let (free, pooled) = (frames.free_count(), census.pooled);
    assert_eq!(
        census,
        Census {
            flush_pending: 0,
            reserved: 0,
            free,
            zeroed: 0,
            pooled,
            tables: 1,
            anon: 2 + 64,
            shared: 3,
            zero: 4,
            retired: 5,
            kernel: 6,
            mapped: 0,
            pinned: 0,
            torn: 0,
        }
    );
    assert_eq!(census.total(), frames.total());

    for number in published {
        frames.free(&local, unpublish(&frames, number), &Yield);
    }
    frames.free(&local, held, &Yield);
    all_is_back(&frames);
}

#[test]
fn the_audit_detects_a_stray_frame() {
    let frames = memory(1, &[region(0, 0, 64)]);
    // A frame marked free that is on no list.
    let stray = frames.alloc(&cpu(0), &Yield).unwrap().into_number();
    frames.meta(stray).set_kind(Kind::Free);
    let found = frames.checked_census(&Yield).unwrap_err();
    assert_eq!(found, Imbalance { frame: None, what: "a free frame is on no free list" });
    // A tail frame without a block.
    frames.meta(stray).set_kind(Kind::Tail);
    let found = frames.checked_census(&Yield).unwrap_err();
    assert_eq!(found, Imbalance { frame: None, what: "a frame belongs to no block" });
    assert_eq!(found.to_string(), "a frame belongs to no block");
    assert_eq!(Imbalance::new(7, "a frame is lost").to_string(), "frame 0x7: a frame is lost");
}

#[test]
fn each_allocation_is_a_new_ownership() {
    let frames = memory(1, &[region(0, 0, 64)]);
    let local = cpu(0);
    let frame = frames.alloc(&local, &Yield).unwrap();
    let (number, before) = (frame.number(), frames.meta(frame.number()).owner());
    frames.free(&local, frame, &Yield);
    let again = frames.alloc(&local, &Yield).unwrap();
    assert_eq!((again.number(), frames.meta(number).owner()), (number, before + 1));
    frames.free(&local, again, &Yield);
    // This holds for every frame of a block: a stale translation may point to any of them.
    let block = frames.alloc_order(&local, 6, &Yield).unwrap();
    assert_eq!(frames.meta(number).owner(), before + 2);
    frames.free(&local, block, &Yield);
}

#[test]
fn references_are_counted_and_the_last_one_is_final() {
    let frames = memory(1, &[region(0, 0, 8)]);
    let local = cpu(0);
    let frame = frames.alloc(&local, &Yield).unwrap();
    assert!(!frames.meta(frame.number()).get_ref_unless_zero(), "not published yet");
    let number = frames.publish(frame, FrameUse::Anon, 5, 6);
    let meta = frames.meta(number);
    assert!(meta.get_ref_unless_zero());
    assert!(meta.get_mapping());
    assert_eq!(meta.refs(), 3);
    assert_eq!((meta.put_ref(), meta.put_ref(), meta.put_ref()), (2, 1, 0));
    assert!(!meta.get_ref_unless_zero(), "gone");
    meta.set_refs(FrameMeta::MAX_MAPPINGS - 1);
    assert!(!meta.is_full() && meta.get_mapping());
    assert!(meta.is_full() && !meta.get_mapping() && !meta.get_mapping_unless_zero());
    assert_eq!(meta.refs(), FrameMeta::MAX_MAPPINGS);
    assert!(meta.get_ref_unless_zero(), "a transient reference always fits");
    meta.set_refs(FrameMeta::MAX_REFS);
    assert!(!meta.get_ref_unless_zero(), "full");
    meta.set_refs(0);
    // SAFETY: the frame has no references any more.
    let frame = unsafe { frames.reclaim(number).assume_flushed() };
    frames.free(&local, frame, &Yield);
    all_is_back(&frames);
}

#[test]
fn a_retire_link_leads_back_to_its_frame() {
    let frames = memory(1, &[region(0, 1000, 10)]);
    for number in (1000..1010).map(FrameNumber) {
        let link = frames.meta(number).retire_link();
        assert_eq!(frames.table().of_link(link), number);
    }
}

#[test]
fn zeroing_fills_exactly_the_block() {
    let machine = TestMachine::new(1, 17);
    let frames = memory(machine.cpus(), machine.regions());
    let local = cpu(0);
    // SAFETY: no memory is mapped or allocated yet, so all memory belongs to the test.
    let fill = |number| unsafe { machine.frame_bytes(FrameNumber(number)).write_bytes(0xa5, 4096) };
    (1..17).for_each(fill);
    let block = frames.alloc_order(&local, 2, &Yield).unwrap().zero(&machine);
    let zeroed = block.number().0..block.number().0 + 4;
    for number in 1..17 {
        let expected = if zeroed.contains(&number) { 0 } else { 0xa5 };
        for at in [0, 1, 2047, 4095] {
            // SAFETY: within the frame, which has no other user.
            let byte = unsafe { machine.frame_bytes(FrameNumber(number)).add(at).read() };
            assert_eq!(byte, expected, "frame {number} byte {at}");
        }
    }
    frames.free(&local, block, &Yield);
    assert!(machine.invalidated.lock().unwrap().is_empty());
}

/// Two CPUs concurrently allocate, pass frames to each other, free and exhaust memory; at the end
/// every frame is at its place.
#[test]
fn two_cpus_end_in_exact_accounting() {
    const ROUNDS: u32 = if cfg!(miri) { 10 } else { 3000 };
    let frames = memory(2, &[region(0, 0, 35 * MANY), region(1, 40 * MANY, 15 * MANY)]);
    let (to_zero, from_one) = std::sync::mpsc::channel::<Frame<Clean>>();
    let (to_one, from_zero) = std::sync::mpsc::channel::<Frame<Clean>>();
    let work =
        |id: u16, send: std::sync::mpsc::Sender<_>, receive: std::sync::mpsc::Receiver<_>| {
            let local = cpu(id);
            let mut mine: Vec<Frame<Clean>> = Vec::new();
            let (mut failures, mut random) = (0u32, u32::from(id) + 1);
            for _ in 0..ROUNDS {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let amount = random >> 24;
                match random >> 16 & 7 {
                    0..4 => {
                        for _ in 0..amount {
                            match frames.alloc(&local, &Yield) {
                                Some(frame) => mine.push(frame),
                                None => failures += 1,
                            }
                        }
                    }
                    4 => mine.extend(frames.alloc_order(&local, (amount % 5) as u8, &Yield)),
                    5 => mine.drain(..mine.len() / 2).for_each(|frame| send.send(frame).unwrap()),
                    _ => {
                        let keep = mine.len().saturating_sub(amount as usize);
                        mine.drain(keep..).for_each(|frame| frames.free(&local, frame, &Yield));
                    }
                }
                receive.try_iter().for_each(|frame| frames.free(&local, frame, &Yield));
            }
            free_all(&frames, &local, mine);
            drop(send);
            receive.iter().for_each(|frame| frames.free(&local, frame, &Yield));
            failures
        };
    let failures: u32 = std::thread::scope(|scope| {
        let one = scope.spawn(|| work(0, to_zero, from_zero));
        let two = scope.spawn(|| work(1, to_one, from_one));
        one.join().unwrap() + two.join().unwrap()
    });
    assert_ne!(failures, 0, "memory was never exhausted, so the test is weak");
    all_is_back(&frames);
    frames.drain(&cpu(0), &Yield);
    frames.drain(&cpu(1), &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().free, frames.total());
    // Exhaustion was sharp to the last frame.
    let local = cpu(0);
    let all = exhaust(&frames, &local);
    assert_eq!(all.len() as u64, frames.total());
    free_all(&frames, &local, all);
}
