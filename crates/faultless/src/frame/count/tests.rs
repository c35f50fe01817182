use super::super::owned::{Clean, Frame};
use super::super::{FrameNumber, MAX_ORDER};
use super::*;
use crate::machine::{CpuId, MemoryRegion};
use crate::sync::percpu::Local;
use crate::sync::wait::Yield;
use std::vec::Vec;

/// Frames of memory, half of them in each of two arenas.
const FRAMES: u32 = 1 << 17;
/// Frames of a block.
const FULL: u64 = 1 << BLOCK;

/// Memory with two arenas.
fn memory() -> Frames {
    let first = FrameNumber((1 << MAX_ORDER) - FRAMES / 2);
    let region = MemoryRegion { node: 0, first, frames: FRAMES };
    // SAFETY: these tests do not access memory.
    unsafe { Frames::try_new(16, &[region], |_| 0) }.unwrap()
}

/// A CPU whose home is this arena.
fn cpu(arena: u16) -> Local {
    // SAFETY: each test claims each CPU once for its `Frames`.
    unsafe { Local::claim(CpuId(8 * arena)) }
}

fn block(frames: &Frames, local: &Local) -> Option<Frame<Clean>> {
    frames.alloc_order(local, BLOCK, &Yield)
}

fn free(frames: &Frames, local: &Local, all: Vec<Frame<Clean>>) {
    all.into_iter().for_each(|frame| frames.free(local, frame, &Yield));
}

fn credits(frames: &Frames) -> Vec<u64> {
    frames.arenas.iter().map(|arena| arena.seen.credit.load(Ordering::Relaxed)).collect()
}

/// All frames are free, and the audit passes.
fn all_is_free(frames: &Frames) {
    assert_eq!(frames.checked_census(&Yield).unwrap().free, frames.total());
    assert_eq!(frames.free_count(), frames.total());
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn blocks_are_reserved_in_the_credit_of_their_arena() {
    let (frames, one, other) = (memory(), cpu(0), cpu(1));
    let most = u64::from(FRAMES) / CREDITS / 2;
    assert_eq!((credits(&frames), most), ([most, most].into(), 4 * FULL));
    all_is_free(&frames);
    let available = frames.available();
    assert_eq!(available, u64::from(FRAMES) - 2 * most);

    let mut held: Vec<_> = (0..4).map(|_| block(&frames, &one).unwrap()).collect();
    let single = frames.alloc(&other, &Yield).unwrap();
    // The share of one of 16 CPUs.
    let reserve = frames.reserved_count() + 64;
    assert_eq!(reserve, FULL / 2);
    assert_eq!(credits(&frames), [0, most - reserve]);
    assert_eq!(frames.available(), available, "the count did not change");
    assert_eq!(frames.free_count(), u64::from(FRAMES) - 4 * FULL - reserve);

    held.extend(block(&frames, &one));
    assert_eq!(credits(&frames), [most / 2, most - reserve], "a new credit");
    assert_eq!(frames.available(), available - FULL - most / 2);
    // A block above the maximum is reserved in the count.
    let large = frames.alloc_order(&one, BLOCK + 3, &Yield).unwrap();
    assert_eq!(credits(&frames), [most / 2, most - reserve]);
    assert_eq!(frames.available(), available - 9 * FULL - most / 2);
    held.extend([single, large]);
    free(&frames, &one, held);
    [one, other].iter().for_each(|local| frames.drain(local, &Yield));
    all_is_free(&frames);
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn returned_frames_increase_the_credit_to_its_maximum() {
    let (frames, local) = (memory(), cpu(0));
    let held: Vec<_> = (0..6).map(|_| block(&frames, &local).unwrap()).collect();
    assert_eq!(credits(&frames), [FULL, 4 * FULL]);
    let mut seen = Vec::new();
    for frame in held {
        let before = frames.available();
        frames.free(&local, frame, &Yield);
        seen.push((credits(&frames)[0] / FULL, (frames.available() - before) / FULL));
    }
    assert_eq!(seen, [(2, 0), (3, 0), (4, 0), (2, 3), (3, 0), (4, 0)]);
    all_is_free(&frames);
}

/// All frames are allocated by CPUs of the first arena, although the credits of an arena exceed its
/// free frames.
#[track_caller]
fn exhausts(alloc: impl Fn(&Frames, &Local) -> Vec<Frame<Clean>>) {
    let (frames, local) = (memory(), cpu(0));
    let mut held = Vec::new();
    loop {
        let got = alloc(&frames, &local);
        if got.is_empty() {
            break;
        }
        held.extend(got);
    }
    let count: u64 = held.iter().map(|frame| 1 << frame.order()).sum();
    assert_eq!((count, frames.free_count()), (FRAMES.into(), 0));
    assert_eq!(credits(&frames), [0, 0]);
    free(&frames, &local, held);
    frames.drain(&local, &Yield);
    all_is_free(&frames);
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn credits_make_no_allocation_fail() {
    exhausts(|frames, local| block(frames, local).into_iter().collect());
    exhausts(|frames, local| frames.alloc(local, &Yield).into_iter().collect());
    exhausts(|frames, local| {
        // The frames of the first arena are taken as blocks, which leaves a credit.
        if frames.free_count() > u64::from(FRAMES) / 2 {
            return block(frames, local).into_iter().collect();
        }
        assert!(credits(frames)[0] != 0 || frames.free_count() <= 6 * FULL);
        let mut buffer = [FrameNumber(0); 64];
        let mut bulk = frames.take_from(0, &mut buffer, &Yield);
        core::iter::from_fn(|| bulk.pop()).collect()
    });
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn two_cpus_exhaust_memory_exactly() {
    for _ in 0..10 {
        let frames = memory();
        let work = |arena| {
            let local = cpu(arena);
            let next = || frames.alloc_order(&local, 4, &Yield);
            let all: Vec<_> = core::iter::from_fn(next).collect();
            (local, all)
        };
        let both = std::thread::scope(|scope| {
            let other = scope.spawn(|| work(1).1);
            let (local, mine) = work(0);
            (local, mine, other.join().unwrap())
        });
        let (local, mine, others) = both;
        assert_eq!((mine.len() + others.len(), frames.free_count()), (FRAMES as usize / 16, 0));
        free(&frames, &local, mine);
        free(&frames, &local, others);
        all_is_free(&frames);
    }
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn credits_are_granted_only_while_memory_is_plentiful() {
    let (frames, local) = (memory(), cpu(0));
    let plenty = u64::from(FRAMES) / PLENTY;
    let mut held = Vec::new();
    while frames.free_count() >= plenty {
        held.extend(block(&frames, &local));
    }
    // The first arena has no free frames.
    while credits(&frames)[1] != 0 {
        held.extend(block(&frames, &local));
        assert!(frames.free_count() > plenty / 2, "a credit was granted");
    }
    let before = (frames.available(), frames.free_count());
    free(&frames, &local, held.split_off(held.len() - 2));
    assert_eq!(credits(&frames)[1], 0);
    assert_eq!(
        (frames.available() - before.0, frames.free_count() - before.1),
        (2 * FULL, 2 * FULL)
    );
    free(&frames, &local, held);
    assert!(credits(&frames).iter().all(|credit| *credit != 0));
    all_is_free(&frames);
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes hours for this number of frames")]
fn a_new_limit_collects_all_credits() {
    let (frames, local) = (memory(), cpu(0));
    frames.set_limit(u64::from(FRAMES) / 2);
    assert_eq!((credits(&frames), frames.available()), ([0, 0].into(), u64::from(FRAMES) / 2));
    let held = block(&frames, &local);
    assert_eq!(credits(&frames), [FULL, 0], "half of the maximum");
    free(&frames, &local, held.into_iter().collect());
    // Too low for a credit of two blocks.
    frames.set_limit(u64::from(FRAMES) / 2 - 1);
    let held = block(&frames, &local);
    assert_eq!(frames.available(), u64::from(FRAMES) / 2 - 1 - FULL);
    free(&frames, &local, held.into_iter().collect());
    assert_eq!((credits(&frames), frames.available()), ([0, 0].into(), frames.limit()));
    all_is_free(&frames);
}
