use super::super::{Clean, Frame, FrameUse};
use super::*;
use crate::machine::{CpuId, MemoryRegion};
use crate::sync::wait::Yield;
use std::vec::Vec;

const MANY: u32 = if cfg!(miri) { 1 } else { 8 };

fn region(node: u8, first: u32, frames: u32) -> MemoryRegion {
    MemoryRegion { node, first: FrameNumber(first), frames }
}

fn publish(frames: &Frames, frame: Frame<Clean>) -> FrameNumber {
    let refs = 1 + frame.number().0 % 5 / 4;
    frames.publish_shared(frame, FrameUse::Anon, 0, 0, refs)
}

/// Drops one reference of each frame in batches of each size, in ascending order, in descending
/// order and scattered. Afterwards, each frame with one reference is free, and each frame with two
/// references is in use.
#[test]
fn frames_without_references_are_freed_in_batches_of_any_size_and_order() {
    let regions = [region(0, 3, 256 * MANY), region(1, 300 * MANY, 40 * MANY)];
    // An interpreter takes half a minute for each.
    let sizes: &[usize] =
        if cfg!(miri) { &[BATCH] } else { &[1, FEW - 1, FEW, BATCH - 1, BATCH, 100, 512] };
    for size in sizes.iter().copied() {
        for order in if cfg!(miri) { 2..3_usize } else { 0..3 } {
            // SAFETY: the test does not access memory.
            let frames = unsafe { Frames::try_new(1, &regions, |_| 0) }.unwrap();
            // SAFETY: the only `Local` of the CPU.
            let local = unsafe { Local::claim(CpuId(0)) };
            let all = core::iter::from_fn(|| frames.alloc(&local, &Yield));
            let mut numbers: Vec<_> = all.map(|frame| publish(&frames, frame).0).collect();
            assert_eq!(numbers.len() as u64, frames.total());
            numbers.sort_unstable_by_key(|number| match order {
                0 => *number,
                1 => u32::MAX - number,
                _ => number.wrapping_mul(0x9e37_79b1),
            });
            let owners = |number: u32| frames.meta(FrameNumber(number)).owner();
            let before: Vec<_> = numbers.iter().map(|number| owners(*number)).collect();
            for some in numbers.chunks(size) {
                let some: Vec<_> = some.iter().map(|number| Cell::new(*number)).collect();
                // SAFETY: there are no tables and no TLBs.
                unsafe { frames.put_all(&local, &some, &Yield) };
            }
            let kept: Vec<_> = numbers.iter().filter(|number| *number % 5 == 4).collect();
            for (number, before) in numbers.iter().zip(before) {
                let (meta, kept) = (frames.meta(FrameNumber(*number)), number % 5 == 4);
                assert_eq!((meta.refs() == 1, owners(*number) == before), (kept, kept), "{number}");
                assert_eq!(meta.kind() == Kind::Used(FrameUse::Anon), kept);
            }
            let census = frames.checked_census(&Yield).unwrap();
            assert_eq!(census.anon, kept.len() as u64);
            let most = 2 * BATCH as u64 + frames.reserved_count();
            assert!(census.pooled <= most, "{census:?}");
            let kept: Vec<_> = kept.into_iter().map(|number| Cell::new(*number)).collect();
            // SAFETY: as above.
            unsafe { frames.put_all(&local, &kept, &Yield) };
            frames.drain(&local, &Yield);
            let census = frames.checked_census(&Yield).unwrap();
            assert_eq!(census.free, frames.total(), "all blocks merge: {census:?}");
        }
    }
}

/// A list with room accepts a whole batch. A full list is unchanged, and the batch is returned to
/// the arena.
#[test]
fn a_full_list_accepts_no_batch() {
    // SAFETY: as above.
    let frames = unsafe { Frames::try_new(1, &[region(0, 0, 4096)], |_| 0) }.unwrap();
    // SAFETY: the only `Local` of the CPU.
    let local = unsafe { Local::claim(CpuId(0)) };
    let all: Vec<_> = core::iter::from_fn(|| frames.alloc(&local, &Yield)).collect();
    let numbers: Vec<_> = all.into_iter().map(|frame| publish(&frames, frame).0).collect();
    let sole = numbers.into_iter().filter(|number| number % 5 != 4);
    let sole: Vec<_> = sole.map(Cell::new).collect();
    // SAFETY: as above.
    unsafe { frames.put_all(&local, &sole, &Yield) };
    let list = &frames.stocks.get(&local).clean;
    assert!(list.len() <= 2 * BATCH, "{}", list.len());
    let kept = list.len() as u64 + frames.reserved_count();
    assert_eq!(frames.free_count() + kept, sole.len() as u64);
}

/// Returns the frames of two nodes with one arena each, and the numbers of published frames with
/// one reference: half of the frames of each node. The other frames are free in their arenas. The
/// only CPU is on node `home`. Its list is empty, and has room for several batches.
fn two_nodes(home: u8) -> (Frames, Local, [Vec<u32>; 2]) {
    let count = if cfg!(miri) { 512 } else { 4096 };
    let regions = [region(0, 0, count), region(1, 2 * count, count)];
    // SAFETY: the tests do not access memory.
    let frames = unsafe { Frames::try_new(1, &regions, |_| home) }.unwrap();
    // SAFETY: the only `Local`.
    let local = unsafe { Local::claim(CpuId(0)) };
    let all: Vec<_> = core::iter::from_fn(|| frames.alloc(&local, &Yield)).collect();
    let numbers = all.into_iter().map(|frame| frames.publish(frame, FrameUse::Anon, 0, 0).0);
    let mut nodes = [Vec::new(), Vec::new()];
    numbers.for_each(|n| nodes[usize::from(frames.node(FrameNumber(n)))].push(n));
    for numbers in &mut nodes {
        numbers.sort_unstable();
        put(&frames, &local, numbers.drain(count as usize / 2..));
    }
    frames.drain(&local, &Yield);
    // A refill raises the limit of the list.
    let frame = frames.alloc(&local, &Yield).unwrap();
    frames.free(&local, frame, &Yield);
    frames.drain(&local, &Yield);
    let half = u64::from(count / 2);
    assert_eq!([0, 1].map(|node| frames.census_on(node).free), [half; 2]);
    (frames, local, nodes)
}

/// Drops the last references of `numbers` in one call.
fn put(frames: &Frames, local: &Local, numbers: impl Iterator<Item = u32>) {
    let numbers: Vec<_> = numbers.map(Cell::new).collect();
    // SAFETY: there are no tables and no TLBs.
    unsafe { frames.put_all(local, &numbers, &Yield) };
}

/// A CPU's lists and its reserve keep frames of the CPU's node only. Frames of the other node
/// return to their arena at once, also from a batch with frames of both nodes.
#[test]
fn cpu_lists_keep_no_frame_of_a_remote_node() {
    for home in [0, 1] {
        let remote = 1 - home;
        for size in [FEW - 1, FEW, BATCH - 1, BATCH, 2 * BATCH] {
            // The position of the first frame of the home node in the batch, and the distance to
            // the next frame of the home node. A batch with a distance of 0 has only remote frames.
            for (first, step) in [(0, 0), (0, 2), (1, 2), (0, size), (size - 1, size)] {
                let (frames, local, nodes) = two_nodes(home);
                let [mut near, mut far] =
                    [home, remote].map(|node| nodes[usize::from(node)].iter().copied());
                let is_near = |at: usize| step != 0 && at % step == first % step;
                let free = [home, remote].map(|node| frames.census_on(node).free);
                let batch: Vec<_> = (0..size)
                    .filter_map(|at| if is_near(at) { near.next() } else { far.next() })
                    .collect();
                put(&frames, &local, batch.iter().copied());
                let case = std::format!("home {home}, {size} frames, {first} and each {step}");
                let (near, far) = (frames.census_on(home), frames.census_on(remote));
                let remotes = batch.iter().filter(|n| frames.node(FrameNumber(**n)) == remote);
                let remotes = remotes.count() as u64;
                assert_eq!((far.pooled, far.free), (0, free[1] + remotes), "{case}: {far:?}");
                assert_eq!(frames.free_on(remote, &Yield), far.free, "{case}");
                let nears = size as u64 - remotes;
                assert_eq!(near.pooled + near.free, free[0] + nears, "{case}: {near:?}");
                frames.checked_census(&Yield).unwrap();
            }
        }
    }
}

/// Batches of the CPU's node fill the CPU's list. So the test of remote frames can fail.
#[test]
fn cpu_lists_keep_frames_of_their_node() {
    let (frames, local, [near, _]) = two_nodes(0);
    put(&frames, &local, near[..2].iter().copied());
    put(&frames, &local, near[2..2 + FEW].iter().copied());
    let kept = frames.census_on(0).pooled;
    let full = frames.stocks.get(&local).clean.len() as u64;
    assert!(kept != 0 && kept == full, "{kept} frames, {full} in the list");
}

/// After a refill of a single frame, the list is full at two frames. A batch of any size leaves at
/// most two frames in the list.
#[test]
fn batches_keep_a_list_small_when_memory_is_short() {
    for size in [FEW, BATCH - 1, BATCH] {
        // SAFETY: this test does not access memory.
        let frames = unsafe { Frames::try_new(1, &[region(0, 0, 256)], |_| 0) }.unwrap();
        // SAFETY: the only `Local`.
        let local = unsafe { Local::claim(CpuId(0)) };
        let all: Vec<_> = core::iter::from_fn(|| frames.alloc(&local, &Yield)).collect();
        let numbers: Vec<_> =
            all.into_iter().map(|frame| frames.publish(frame, FrameUse::Anon, 0, 0).0).collect();
        let list = &frames.stocks.get(&local).clean;
        for batch in numbers.chunks(size) {
            put(&frames, &local, batch.iter().copied());
            assert!(list.len() <= 2, "{} frames after a batch of {size}", list.len());
        }
        let census = frames.checked_census(&Yield).unwrap();
        assert_eq!((census.free, census.pooled), (256 - list.len() as u64, list.len() as u64));
    }
}
