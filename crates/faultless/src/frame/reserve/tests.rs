use super::super::{Clean, Frame, Frames};
use super::*;
use crate::machine::{CpuId, MemoryRegion};
use crate::sync::percpu::Local;
use crate::sync::wait::Yield;
use std::collections::BTreeSet;
use std::vec::Vec;

/// Enough frames that the shares of two CPUs exceed a block.
const FRAMES: u32 = 1 << 17;

fn memory(cpus: usize) -> Frames {
    let region = MemoryRegion { node: 0, first: FrameNumber(0), frames: FRAMES };
    // SAFETY: these tests do not access memory.
    unsafe { Frames::try_new(cpus, &[region], |_| 0) }.unwrap()
}

fn cpu(id: u16) -> Local {
    // SAFETY: each test claims each CPU once for its `Frames`.
    unsafe { Local::claim(CpuId(id)) }
}

fn take(frames: &Frames, local: &Local, count: usize) -> Vec<Frame<Clean>> {
    (0..count).map(|_| frames.alloc(local, &Yield).unwrap()).collect()
}

fn taken(frames: &Frames) -> u64 {
    frames.total() - frames.free_count()
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn a_block_serves_hundreds_of_allocations() {
    let (frames, local) = (memory(1), cpu(0));
    let first = take(&frames, &local, 1);
    let block = taken(&frames);
    assert_eq!(block, 1 << BLOCK);
    assert_eq!(frames.checked_census(&Yield).unwrap().pooled, block);
    let mut all = take(&frames, &local, (1 << BLOCK) - 1);
    assert_eq!(taken(&frames), block, "no lock for the rest of the block");
    all.extend(first);
    let numbers: BTreeSet<u32> = all.iter().map(|frame| frame.number().0).collect();
    assert_eq!(numbers.len(), all.len());
    assert_eq!(*numbers.last().unwrap() - *numbers.first().unwrap(), (1 << BLOCK) - 1);
    for frame in &all {
        let meta = frames.meta(frame.number());
        assert_eq!((meta.kind(), meta.order()), (Kind::Pooled, 0));
        assert_eq!(meta.next.load(Ordering::Relaxed), 0, "a frame in use has no huge leaves");
    }
    assert_eq!(frames.checked_census(&Yield).unwrap().pooled, block);
    all.into_iter().for_each(|frame| frames.free(&local, frame, &Yield));
    frames.drain(&local, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().free, FRAMES.into());
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn freed_frames_are_kept_up_to_the_share() {
    let (frames, local) = (memory(2), cpu(0));
    let share = frames.share();
    assert_eq!(share, u64::from(FRAMES) / SHARES / 2);
    // Four times the share, which is freed again.
    let all = take(&frames, &local, 4 * share as usize);
    let out = taken(&frames);
    all.into_iter().for_each(|frame| frames.free(&local, frame, &Yield));
    let kept = taken(&frames);
    assert!(kept <= share + 2 * BATCH as u64, "{kept} of {out}");
    assert!(kept >= share, "{kept} of {out}");
    // The kept frames are allocated again, without the arena.
    let again = take(&frames, &local, share as usize);
    assert_eq!(taken(&frames), kept);
    assert_eq!(frames.checked_census(&Yield).unwrap().taken(), kept);
    let leaves = |frame: &Frame<_>| frames.meta(frame.number()).next.load(Ordering::Relaxed);
    assert!(again.iter().all(|frame| leaves(frame) == 0), "a frame in use has no huge leaves");
    again.into_iter().for_each(|frame| frames.free(&local, frame, &Yield));
    frames.drain(&local, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().free, FRAMES.into());
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn there_are_no_reserves_if_memory_is_short() {
    let (frames, local) = (memory(2), cpu(0));
    frames.set_limit(4096);
    let all = take(&frames, &local, 1000);
    all.into_iter().for_each(|frame| frames.free(&local, frame, &Yield));
    assert!(taken(&frames) <= 2 * BATCH as u64);
    frames.set_limit(u64::MAX);
    let rest = frames.free_count() - 1000;
    let held: Vec<_> =
        core::iter::from_fn(|| frames.alloc_order(&local, 0, &Yield)).take(rest as usize).collect();
    // Or the frame would come from the list.
    frames.drain(&local, &Yield);
    let before = taken(&frames);
    let one = take(&frames, &local, 1);
    assert!(
        taken(&frames) - before <= BATCH as u64,
        "other CPUs can allocate all but part of a block"
    );
    held.into_iter().chain(one).for_each(|frame| frames.free(&local, frame, &Yield));
    frames.drain(&local, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().free, FRAMES.into());
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn small_blocks_are_used_before_a_large_block_is_split() {
    let (frames, local) = (memory(1), cpu(0));
    let blocks = (0..1 << 9).map(|_| frames.alloc_order(&local, 8, &Yield).unwrap());
    let (large, mut held): (Vec<_>, Vec<_>) =
        blocks.partition(|block| block.number().0 < FRAMES / 2);
    assert_eq!(frames.free_count(), 0);
    frames.free(&local, held.pop().unwrap(), &Yield);
    let singles = take(&frames, &local, 256);
    // Every second frame of a mebibyte is free, and a large block.
    let (even, odd): (Vec<_>, Vec<_>) =
        singles.into_iter().partition(|frame| frame.number().0 % 2 == 0);
    let mut small: BTreeSet<_> = even.iter().map(Frame::number).collect();
    even.into_iter().for_each(|frame| frames.free_to_node(frame, &Yield));
    large.into_iter().for_each(|block| frames.free(&local, block, &Yield));
    let all = take(&frames, &local, small.len());
    assert!(all.iter().all(|frame| small.remove(&frame.number())));
    let next = take(&frames, &local, 1);
    assert!(next[0].number().0 < FRAMES / 2);
    let singles = all.into_iter().chain(next).chain(odd);
    singles.chain(held).for_each(|frame| frames.free(&local, frame, &Yield));
    frames.drain(&local, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().free, FRAMES.into());
}

/// Allocates all remaining frames, in large blocks.
fn rest(frames: &Frames, local: &Local) -> Vec<Frame<Clean>> {
    let orders = (0..=BLOCK).rev();
    orders
        .flat_map(|order| core::iter::from_fn(move || frames.alloc_order(local, order, &Yield)))
        .collect()
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn frames_freed_while_memory_is_short_are_available_to_others() {
    let (frames, one, other) = (memory(2), cpu(0), cpu(1));
    let share = frames.share() as usize;
    let mut mine = take(&frames, &one, 4 * share);
    // The CPU's reserve is full when memory becomes short.
    mine.drain(..2 * share).for_each(|frame| frames.free(&one, frame, &Yield));
    let held = rest(&frames, &other);
    assert!(frames.is_short());
    let kept = frames.reserves.get(&one).len();
    assert!(kept > 0);
    let mut buffer = [FrameNumber(0); BATCH];
    assert!(
        frames.alloc_bulk(&one, &mut buffer, &Yield).is_empty(),
        "other CPUs may need these frames"
    );
    mine.into_iter().for_each(|frame| frames.free(&one, frame, &Yield));
    assert!(frames.is_short());
    let free = frames.free_count();
    assert!(free >= kept + 2 * (share - BATCH) as u64, "{free} of {} and {kept}", 2 * share);
    held.into_iter().for_each(|frame| frames.free(&other, frame, &Yield));
    // When memory is plentiful again, the CPU keeps as much as before, and under a lower limit no
    // frames.
    let fill = || {
        let all = take(&frames, &one, 4 * share);
        all.into_iter().for_each(|frame| frames.free(&one, frame, &Yield));
        frames.reserves.get(&one).len()
    };
    assert!(fill() + 2 * BATCH as u64 >= share as u64);
    frames.set_limit(taken(&frames));
    assert!(frames.alloc_bulk(&one, &mut buffer, &Yield).is_empty());
    frames.set_limit(u64::MAX);
    [one, other].iter().for_each(|local| frames.drain(local, &Yield));
    assert_eq!(frames.checked_census(&Yield).unwrap().free, FRAMES.into());
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn a_block_is_not_kept_if_memory_would_become_short() {
    // More than 16 times the memory for which a block is a small part.
    let region = MemoryRegion { node: 0, first: FrameNumber(0), frames: 2 * FRAMES };
    // SAFETY: these tests do not access memory.
    let (frames, local) = (unsafe { Frames::try_new(1, &[region], |_| 0) }.unwrap(), cpu(0));
    let short = u64::from(2 * FRAMES) / 16;
    let free_but = |left| (frames.free_count() - left) >> BLOCK;
    let blocks = free_but(short + (1 << BLOCK) - 1);
    let held: Vec<_> =
        (0..blocks).map(|_| frames.alloc_order(&local, BLOCK, &Yield).unwrap()).collect();
    let one = take(&frames, &local, 1);
    assert_eq!(frames.free_count(), 2 * u64::from(FRAMES) - (blocks << BLOCK) - (1 << BLOCK));
    assert!(!frames.is_short());
    frames.drain(&local, &Yield);
    let next = frames.alloc_order(&local, BLOCK, &Yield).unwrap();
    let before = frames.free_count();
    let another = take(&frames, &local, 1);
    let kept = before - frames.free_count();
    assert!(kept <= BATCH as u64, "at most the capacity of a list, not {kept}");
    held.into_iter().chain(one).chain([next]).chain(another).for_each(|frame| {
        frames.free(&local, frame, &Yield);
    });
    frames.drain(&local, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().free, u64::from(2 * FRAMES));
}
