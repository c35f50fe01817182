//! Tests of single parts of memory.

use super::*;
use crate::frame::flush_pending::FlushPendingRun;
use crate::machine::{CpuId, MemoryRegion};
use crate::sync::percpu::Local;
use std::vec::Vec;

const ORDER: u8 = 4;

/// Two nodes of 64 frames, side by side, and their CPU.
fn memory() -> (Frames, Local) {
    let regions = [0, 1].map(|node| {
        let first = FrameNumber(16 + 64 * u32::from(node));
        MemoryRegion { node, first, frames: 64 }
    });
    // SAFETY: the tests do not access memory, and there is one CPU.
    unsafe { (Frames::try_new(1, &regions, |_| 0).unwrap(), Local::claim(CpuId(0))) }
}

/// Allocates all frames of the first node except `freed`, which stay free.
fn taken(frames: &Frames, local: &Local, freed: &[u32]) -> Vec<Frame<Clean>> {
    let mut numbers = [FrameNumber(0); 64];
    let mut all = frames.alloc_on(local, 0, &mut numbers, &Spin);
    let all: Vec<_> = core::iter::from_fn(|| all.pop()).collect();
    let (gone, kept): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|frame| freed.contains(&frame.number().0));
    gone.into_iter().for_each(|frame| frames.free_to_node(frame, &Spin));
    kept
}

fn give_back(frames: &Frames, kept: Vec<Frame<Clean>>) {
    kept.into_iter().for_each(|frame| frames.free_to_node(frame, &Spin));
    assert_eq!(frames.free_count(), frames.total());
}

#[test]
fn a_survey_counts_the_obstacles() {
    let (frames, local) = memory();
    let mut kept = taken(&frames, &local, &[17, 18, 19]);
    kept.sort_unstable_by_key(|frame| frame.number().0);
    let survey = || frames.survey(0, FrameNumber(16), ORDER).unwrap();
    assert_eq!(survey(), Survey { free: 3, movable: 0, fixed: 13 });
    let page = frames.publish(kept.remove(0), FrameUse::Anon, 0, 0);
    assert_eq!(survey(), Survey { free: 3, movable: 1, fixed: 12 });
    // Frames waiting for a flush become free soon.
    assert_eq!(frames.meta(page).put_ref(), 0);
    // SAFETY: the last reference is dropped.
    let flush_pending = unsafe { frames.reclaim(page) };
    let mut run = FlushPendingRun::new();
    frames.add_flush_pending(&mut run, flush_pending, 1, &Spin);
    frames.keep_flush_pending(&mut run, &Spin);
    assert_eq!(survey(), Survey { free: 3, movable: 0, fixed: 12 });
    // SAFETY: there are no translations.
    assert_eq!(unsafe { frames.release_flushed(1, &Spin) }, 1);
    assert_eq!(survey(), Survey { free: 4, movable: 0, fixed: 12 });
    give_back(&frames, kept);
}

#[test]
fn a_part_of_another_node_is_rejected() {
    let (frames, _) = memory();
    let survey = |node, first| frames.survey(node, FrameNumber(first), ORDER);
    let free = Some(Survey { free: 16, movable: 0, fixed: 0 });
    assert_eq!(
        [survey(0, 64), survey(1, 80), survey(0, 80), survey(1, 64)],
        [free, free, None, None]
    );
    assert_eq!(
        [survey(0, 72), survey(0, 8), survey(1, 136)],
        [None; 3],
        "half of the block is isolated"
    );
}

#[test]
fn free_frames_of_a_part_are_isolated_singly_and_returned() {
    let (frames, local) = memory();
    let kept = taken(&frames, &local, &[20, 21, 22, 23, 30]);
    let free = frames.free_count();
    let mut part = frames.isolated(FrameNumber(16), ORDER);
    part.gather(&Spin);
    assert_eq!((part.len(), frames.free_count()), (5, free - 5));
    assert_eq!(part.next_missing(FrameNumber(20)), Some(FrameNumber(24)));
    assert!(!part.join());
    let mut numbers = [FrameNumber(0); 3];
    let mut had = part.take(&mut numbers);
    let had: Vec<_> = core::iter::from_fn(|| had.pop()).collect();
    assert_eq!((part.len(), had.len()), (2, 3));
    assert!(had.iter().map(|frame| frame.number().0).eq(20..23));
    had.into_iter().for_each(|frame| part.put(frame));
    assert_eq!(part.len(), 5);
    drop(part);
    assert_eq!(frames.free_count(), free);
    give_back(&frames, kept);
}

#[test]
fn a_completely_free_part_is_skipped() {
    let (frames, _) = memory();
    // On the list of just such blocks.
    let mut part = frames.isolated(FrameNumber(16), ORDER);
    part.gather(&Spin);
    assert_eq!(part.len(), 0);
}

#[test]
fn no_frame_is_isolated_beyond_the_limit() {
    let (frames, local) = memory();
    let kept = taken(&frames, &local, &[20, 21, 22, 23, 30]);
    frames.set_limit(frames.total() - frames.free_count() + 15);
    let mut part = frames.isolated(FrameNumber(16), ORDER);
    part.gather(&Spin);
    assert_eq!(part.len(), 0, "all 16 might be free by now");
    frames.set_limit(u64::MAX);
    part.gather(&Spin);
    assert_eq!(part.len(), 5);
    drop(part);
    give_back(&frames, kept);
}
