//! The reserve of a CPU beyond its lists: batches of [`BATCH`] frames.
//!
//! If memory is plentiful, a CPU with an empty list takes a block of up to [`BLOCK`] frames from
//! its arena, and fills the list from the block; a CPU with a full list keeps the spilled frames.
//! So the lock of an arena is written once for hundreds of frames, and the [count](super::count) of
//! taken frames once for thousands, for any number of CPUs.
//!
//! The size of a CPU's reserve is its [share](super::Frames::share) of memory. All CPUs' shares
//! together are 1/[`SHARES`] of memory, so they never make memory short. (Frames in a reserve are
//! outside the arenas, and not available to other CPUs.) No block is taken if this would make
//! memory short. While memory is short, or after the limit was lowered, a CPU that frees frames
//! returns a batch of its reserve with each batch spilled by its list.
//!
//! A batch is either a block, or single frames linked by `next` in their metadata. The first frame
//! of a batch links to the next batch by `prev`. These frames belong to the CPU, so plain stores
//! suffice.

use super::FrameNumber;
use super::meta::{FrameTable, Kind, NO_FRAME};
use super::percpu::BATCH;
use crate::sync::atomic::{AtomicU32, Ordering};

/// All CPUs' reserves together hold at most 1/`SHARES` of memory.
pub(super) const SHARES: u64 = 32;
/// log2 of the maximum number of frames taken at once: 2 MiB. Larger blocks would withhold huge
/// folios from other CPUs.
pub(super) const BLOCK: u8 = 9;
/// log2 of the frames in a batch.
pub(super) const BATCH_ORDER: u8 = BATCH.ilog2() as u8;

/// A CPU's batches, last in first out. Written by this CPU alone; other CPUs only read their
/// number.
#[derive(Debug)]
pub(super) struct Reserve {
    first: AtomicU32,
    batches: AtomicU32,
    /// The arena of the batches, or another arena of its node.
    home: u8,
}

impl Reserve {
    pub(super) fn new(home: u8) -> Self {
        Self { first: AtomicU32::new(NO_FRAME), batches: AtomicU32::new(0), home }
    }

    pub(super) fn home(&self) -> u8 {
        self.home
    }

    fn batches(&self) -> u32 {
        self.batches.load(Ordering::Relaxed)
    }

    /// Returns the number of frames.
    pub(super) fn len(&self) -> u64 {
        u64::from(self.batches()) << BATCH_ORDER
    }

    fn push(&self, table: &FrameTable, head: FrameNumber) {
        table.meta(head).prev.store(self.first.load(Ordering::Relaxed), Ordering::Relaxed);
        self.first.store(head.0, Ordering::Relaxed);
        self.batches.store(self.batches() + 1, Ordering::Relaxed);
    }

    fn pop(&self, table: &FrameTable) -> Option<FrameNumber> {
        let head = self.first.load(Ordering::Relaxed);
        if head == NO_FRAME {
            return None;
        }
        let next = table.meta(FrameNumber(head)).prev.load(Ordering::Relaxed);
        self.first.store(next, Ordering::Relaxed);
        self.batches.store(self.batches() - 1, Ordering::Relaxed);
        Some(FrameNumber(head))
    }

    /// Adds a block of 2^`order` frames, at least a batch, owned by the caller: as batches, the
    /// first of which is taken first.
    pub(super) fn put_block(&self, table: &FrameTable, block: FrameNumber, order: u8) {
        for head in (block.0..block.0 + (1 << order)).step_by(BATCH).rev() {
            let meta = table.meta(FrameNumber(head));
            meta.set_order(BATCH_ORDER);
            meta.set_kind(Kind::Pooled);
            self.push(table, FrameNumber(head));
        }
    }

    /// Adds a batch of single frames, to be taken in the given order.
    pub(super) fn put(&self, table: &FrameTable, batch: &[FrameNumber; BATCH]) {
        let mut next = NO_FRAME;
        for number in batch.iter().rev() {
            table.meta(*number).next.store(next, Ordering::Relaxed);
            next = number.0;
        }
        self.push(table, batch[0]);
    }

    /// Takes a batch of single frames.
    pub(super) fn take(&self, table: &FrameTable, to: &mut [FrameNumber; BATCH]) -> bool {
        let Some(head) = self.pop(table) else { return false };
        if table.meta(head).order() == BATCH_ORDER {
            for (slot, number) in to.iter_mut().zip(head.0..) {
                *slot = FrameNumber(number);
                table.meta(*slot).make_single();
            }
        } else {
            let mut at = head.0;
            for slot in to {
                *slot = FrameNumber(at);
                let next = &table.meta(*slot).next;
                at = next.load(Ordering::Relaxed);
                // The field counts huge leaves while the frame is in use.
                next.store(0, Ordering::Relaxed);
            }
            debug_assert_eq!(at, NO_FRAME);
        }
        true
    }
}

#[cfg(test)]
mod tests;
