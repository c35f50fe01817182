use super::super::{Clean, Frame, Use};
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
    frames.publish_shared(frame, Use::Anon, 0, 0, refs)
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
                assert_eq!(meta.kind() == Kind::Used(Use::Anon), kept);
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
