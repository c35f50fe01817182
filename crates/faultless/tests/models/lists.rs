//! Free frames: the CPUs' lists, the arena's buddy allocator under its spin lock, and the count of
//! allocated frames. The model uses the real [`Frames`].
//!
//! Bounds: two threads, at most three forced switches; three threads, at most two. Memory is small,
//! so lists are filled by one frame at a time, and hold two. (No CPU reads the list of another
//! CPU.)
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom lists::`

use crate::support::{Fair, Guarded, explore, local};
use faultless::FrameNumber;
use faultless::frame::zeroed::Supply;
use faultless::frame::{Clean, Frame, Frames};
use faultless::{CpuId, Invalidate, Machine, MemoryRegion, SpaceId};
use loom::thread;
use std::sync::Arc;

/// Frames, and a counter for each frame that only its holder may use.
struct Memory {
    frames: Frames,
    used: Vec<Guarded>,
}

// SAFETY: there are no bytes, nor translations: zeroing a frame is a use of it.
unsafe impl Machine for Memory {
    type Predictor = faultless::prefault::Streams;

    fn cpus(&self) -> usize {
        2
    }

    fn regions(&self) -> &[MemoryRegion] {
        &[]
    }

    fn frame_bytes(&self, _: FrameNumber) -> *mut u8 {
        unreachable!("no access to the content of frames")
    }

    fn invalidate(&self, _: CpuId, _: SpaceId, _: Invalidate) {}

    fn invalidate_all(&self, _: CpuId) {}

    fn interrupt(&self, _: CpuId) {}

    unsafe fn zero_frame(&self, frame: FrameNumber) {
        self.used[(frame.0 - FIRST) as usize].add();
    }
}

const FIRST: u32 = 4;

impl Memory {
    fn new(cpus: usize, frames: u32) -> Arc<Self> {
        let regions = [MemoryRegion { node: 0, first: FrameNumber(FIRST), frames }];
        let used = (0..frames).map(|_| Guarded::new()).collect();
        // SAFETY: the frames go with this machine alone.
        let frames = unsafe { Frames::try_new(cpus, &regions, |_| 0) }.unwrap();
        Arc::new(Self { frames, used })
    }

    /// Uses a block as its only holder.
    fn use_it(&self, frame: &Frame<Clean>) {
        let first = (frame.number().0 - FIRST) as usize;
        self.used[first..first + (1 << frame.order())].iter().for_each(Guarded::add);
    }

    /// At the end, when all CPUs have drained their lists: all frames are free.
    fn whole(&self) {
        let census = self.frames.checked_census(&Fair).expect("a clean audit");
        assert_eq!(census.free + census.zeroed, self.frames.total(), "a frame is lost");
        assert_eq!(self.frames.free_count(), self.frames.total(), "a frame is lost");
    }
}

/// Each CPU allocates `held` frames at a time, uses the frames, and frees them, `rounds` times.
/// There are enough frames for all CPUs, so every allocation succeeds.
fn churn(bound: Option<usize>, cpus: u16, held: u32, rounds: u32) {
    explore(bound, move || {
        let memory = Memory::new(cpus.into(), u32::from(cpus) * held);
        let run = move |memory: &Memory, id: u16| {
            let here = local(id);
            for _ in 0..rounds {
                let mut mine = Vec::new();
                for _ in 0..held {
                    mine.push(memory.frames.alloc(&here, &Fair));
                }
                for frame in mine.into_iter().flatten() {
                    memory.use_it(&frame);
                    memory.frames.free(&here, frame, &Fair);
                }
            }
            memory.frames.drain(&here, &Fair);
        };
        let others: Vec<_> = (1..cpus)
            .map(|id| {
                let memory = Arc::clone(&memory);
                thread::spawn(move || run(&memory, id))
            })
            .collect();
        run(&memory, 0);
        others.into_iter().for_each(|other| other.join().unwrap());
        memory.whole();
    });
}

#[test]
fn two_cpus_neither_share_nor_lose_frames() {
    churn(Some(3), 2, 1, 2);
}

#[test]
fn lists_that_fill_and_spill() {
    churn(Some(2), 2, 3, 1);
}

#[test]
fn three_cpus_neither_share_nor_lose_frames() {
    churn(Some(2), 3, 1, 1);
}

/// A block of two against single frames: reserved frames are available, and an allocation fails
/// only without a free block.
fn a_block_against_single_frames() {
    explore(Some(3), || {
        let memory = Memory::new(2, 4);
        let other = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                let here = local(1);
                if let Some(block) = memory.frames.alloc_order(&here, 1, &Fair) {
                    memory.use_it(&block);
                    memory.frames.free(&here, block, &Fair);
                }
            })
        };
        let here = local(0);
        for _ in 0..2 {
            let frame =
                memory.frames.alloc(&here, &Fair).expect("two frames remain in every schedule");
            memory.use_it(&frame);
            memory.frames.free(&here, frame, &Fair);
        }
        memory.frames.drain(&here, &Fair);
        other.join().unwrap();
        memory.whole();
    });
}

#[test]
fn blocks_and_single_frames_do_not_overlap() {
    a_block_against_single_frames();
}

/// One CPU zeroes ahead while another CPU allocates zeroed and arbitrary frames, as many as remain
/// whatever the first CPU holds.
fn zeroing_against_taking() {
    explore(Some(3), || {
        let memory = Memory::new(2, 3);
        memory.frames.set_zeroed_pool(2, &Fair);
        let other = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || {
                let there = local(1);
                for _ in 0..2 {
                    memory.frames.zero_run(&there, &*memory, 1, &Fair);
                }
            })
        };
        let here = local(0);
        let taken = |supply| assert!(matches!(supply, Supply::Pool | Supply::Miss | Supply::Now));
        let zeroed = memory.frames.alloc_zeroed(&here, &*memory, &Fair, taken);
        let zeroed = Frame::<Clean>::from(zeroed.expect("one frame remains"));
        memory.use_it(&zeroed);
        let frame = memory.frames.alloc(&here, &Fair).expect("a second frame remains");
        memory.use_it(&frame);
        memory.frames.free(&here, frame, &Fair);
        memory.frames.free(&here, zeroed, &Fair);
        memory.frames.drain(&here, &Fair);
        other.join().unwrap();
        memory.whole();
    });
}

#[test]
fn zeroing_and_allocation_neither_share_nor_lose_frames() {
    zeroing_against_taking();
}

/// Checks whether two CPUs ever hold a frame each at the frame limit `limit`.
fn one_each(limit: u64) {
    explore(None, move || {
        let memory = Memory::new(2, 2);
        memory.frames.set_limit(limit);
        let only = Arc::new(Guarded::new());
        let run = |memory: &Memory, only: &Guarded, id| {
            let here = local(id);
            if let Some(frame) = memory.frames.alloc(&here, &Fair) {
                only.add();
                memory.frames.free(&here, frame, &Fair);
            }
            memory.frames.drain(&here, &Fair);
        };
        let other = {
            let (memory, only) = (Arc::clone(&memory), Arc::clone(&only));
            thread::spawn(move || run(&memory, &only, 1))
        };
        run(&memory, &only, 0);
        other.join().unwrap();
        memory.whole();
    });
}

#[test]
fn two_cpus_never_hold_two_frames_at_a_limit_of_one() {
    one_each(1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn two_cpus_may_hold_two_frames_at_a_limit_of_two() {
    one_each(2);
}

caught! {
    the_node_s_lock_is_held_by_one:
        without SpinExcludes, churn(Some(2), 2, 1, 1), says "Causality violation";
    the_node_s_lock_is_held_by_one_during_zeroing:
        without SpinExcludes, zeroing_against_taking(), says "Causality violation";
    the_node_s_lock_is_held_by_one_during_splits:
        without SpinExcludes, a_block_against_single_frames(), says "Causality violation";
}
