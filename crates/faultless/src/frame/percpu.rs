//! The CPU's own lists of free frames: a list of frames with any contents, a list of zeroed frames,
//! which is empty if there are no pools, and a list for page tables.
//!
//! Frames of order 0 are allocated from and freed to the CPU's own lists, which no other CPU
//! accesses: in the steady state neither operation touches a shared line. An empty list takes a
//! batch from the buddy allocators; a full list returns its coldest batch.
//!
//! Frames in a list are not available to other CPUs, so lists are kept small when memory is short:
//! a batch is at most 1/16 of the available frames, and the list holds at most two of its last
//! batches.

use crate::addr::FrameNumber;
use core::cell::Cell;
use core::ops::Range;

/// The maximum number of frames moved between a list and the buddy allocators at once: large enough
/// that the lock costs less than an instruction a frame, small enough that the lock is held for
/// well under a microsecond.
///
/// By instructions of an anonymous write fault and of unmapping a page, each with its share of the
/// batch (`bench instructions`, with this constant changed):
///
/// | batch | write fault | munmap |
/// |---|---|---|
/// | 16 | 258.6 | 280.2 |
/// | 32 | 245.8 | 273.5 |
/// | 64 | 239.4 | 267.8 |
/// | 128 | 235.3 | 262.3 |
///
/// So from here on twice the batch saves less than 1/50, and would withhold 512 KiB more on each
/// CPU.
pub(super) const BATCH: usize = 64;
/// Two batches, so that alternating allocations and frees at the end of a batch do not move batches
/// back and forth.
const CAPACITY: usize = 2 * BATCH;

/// Returns how many frames to take if `available` frames are available: all batches except the last
/// frame leave some for other CPUs.
pub(super) fn batch_for(available: u64) -> usize {
    (available / 16).clamp(1, BATCH as u64) as usize
}

/// One CPU's frames.
#[derive(Debug)]
pub(super) struct Stock {
    pub(super) clean: Magazine,
    pub(super) zeroed: Magazine,
    /// For page [tables](super::tables).
    pub(super) tables: Magazine,
    /// The CPU's [home](super::arena).
    pub(super) home: u8,
    /// The arenas of the home's node: the first, and their number.
    near: (u8, u8),
}

impl Stock {
    pub(super) fn new(home: u8, near: Range<usize>) -> Self {
        let [clean, zeroed] = [const { Magazine::new() }; 2];
        let tables = Magazine::closed();
        // Below `arena::MOST`.
        let near = (near.start as u8, near.len() as u8);
        Self { clean, zeroed, tables, home, near }
    }

    /// Returns whether frames of an arena are kept here: frames of the nearest node.
    #[inline(always)]
    pub(super) const fn keeps(&self, arena: u8) -> bool {
        arena.wrapping_sub(self.near.0) < self.near.1
    }
}

/// A list of free frames, last in first out.
#[derive(Debug)]
pub(super) struct Magazine {
    len: Cell<usize>,
    /// The number of frames at which the list is full, `1..=CAPACITY`.
    full: Cell<usize>,
    frames: [Cell<FrameNumber>; CAPACITY],
}

impl Magazine {
    pub(super) const fn new() -> Self {
        Self {
            len: Cell::new(0),
            full: Cell::new(CAPACITY),
            frames: [const { Cell::new(FrameNumber(0)) }; CAPACITY],
        }
    }

    /// Returns a list that accepts no frame before it is [filled](Self::refill).
    pub(super) const fn closed() -> Self {
        Self { full: Cell::new(0), ..Self::new() }
    }

    /// Returns whether the list was ever filled.
    #[inline]
    pub(super) const fn is_open(&self) -> bool {
        self.full.get() != 0
    }

    /// Returns the number of frames.
    #[inline]
    pub(super) const fn len(&self) -> usize {
        self.len.get()
    }

    /// Takes the frame that was added last.
    #[inline(always)]
    pub(super) fn pop(&self) -> Option<FrameNumber> {
        self.pop_unless(0)
    }

    /// As [`pop`](Self::pop), but returns `None` if `never` is `usize::MAX` instead of 0, with the
    /// same comparison.
    #[inline(always)]
    pub(super) fn pop_unless(&self, never: usize) -> Option<FrameNumber> {
        // Wraps around if the list is empty, to an index beyond the array.
        let top = self.len.get().wrapping_sub(1) | never;
        let frame = self.frames.get(top)?.get();
        self.len.set(top);
        Some(frame)
    }

    /// Adds `frame`, or returns false if the list is full.
    #[inline(always)]
    pub(super) fn push(&self, frame: FrameNumber) -> bool {
        let len = self.len.get();
        if len >= self.full.get() {
            return false;
        }
        self.frames[len].set(frame);
        self.len.set(len + 1);
        true
    }

    /// Adds all of `frames`, or returns false if there is no room for all.
    pub(super) fn push_all(&self, frames: &[FrameNumber]) -> bool {
        let len = self.len.get();
        let end = len + frames.len();
        let Some(places) = self.frames.get(len..end).filter(|_| end <= self.full.get()) else {
            return false;
        };
        places.iter().zip(frames).for_each(|(place, frame)| place.set(*frame));
        self.len.set(end);
        true
    }

    /// Takes up to `to.len()` frames, in the order of [`pop`](Self::pop), and returns their number.
    pub(super) fn take(&self, to: &mut [FrameNumber]) -> usize {
        let len = self.len.get();
        let kept = len.saturating_sub(to.len());
        for (slot, frame) in to.iter_mut().zip(self.frames[kept..len].iter().rev()) {
            *slot = frame.get();
        }
        self.len.set(kept);
        len - kept
    }

    /// Puts a batch into the empty list, to be taken in the given order. From now on the list is
    /// full at twice the size of this batch.
    #[inline]
    pub(super) fn refill(&self, batch: &[FrameNumber]) {
        self.refill_after(batch, 0);
    }

    /// [`refill`](Self::refill) with a batch whose first `taken` frames were already used.
    pub(super) fn refill_after(&self, batch: &[FrameNumber], taken: usize) {
        debug_assert_eq!(self.len.get(), 0);
        let rest = &batch[taken..];
        for (slot, frame) in self.frames.iter().zip(rest.iter().rev()) {
            slot.set(*frame);
        }
        self.len.set(rest.len());
        self.full.set((2 * batch.len()).clamp(1, CAPACITY));
    }

    /// Takes out up to half of a full list (at most [`BATCH`]): the frames that were added first,
    /// whose bytes are the least likely to be in the caches. Returns the number of frames written
    /// to `batch`.
    pub(super) fn spill(&self, batch: &mut [FrameNumber; BATCH]) -> usize {
        let len = self.len.get();
        let out = len.div_ceil(2).min(BATCH);
        for (slot, frame) in batch.iter_mut().zip(&self.frames[..out]) {
            *slot = frame.get();
        }
        for at in out..len {
            self.frames[at - out].set(self.frames[at].get());
        }
        self.len.set(len - out);
        out
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;
