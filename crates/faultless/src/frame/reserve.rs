//! What a CPU has beyond its lists: batches of [`BATCH`] frames.
//!
//! Where memory is plenty, a CPU whose list is empty takes a block of up to [`BLOCK`] frames from its arena, and fills the list from that; and a
//! CPU whose list is full keeps what it spills. So the lock of an arena, and the count of the frames taken, are written once for hundreds of frames,
//! however many CPUs there are.
//!
//! How much a CPU keeps is its [share](super::Frames::share) of memory. All CPUs' shares together are one part in [`SHARES`], so they never make memory
//! short. (What is there is out of the arenas, and cannot be had by others.) No block is taken where that would make memory short. While it
//! is, or when the limit was lowered, a CPU that frees gives a batch of its reserve back with each batch that its list spills.
//!
//! A batch is either a block, or single frames chained by `next` in their metadata. The first frame of a batch leads to the next batch by
//! `prev`. These frames are the CPU's, so plain stores suffice.

use super::FrameNumber;
use super::meta::{FrameTable, Kind, NO_FRAME};
use super::percpu::BATCH;
use crate::sync::atomic::{AtomicU32, Ordering};

/// One part of memory in so many is for all CPUs' reserves.
pub(super) const SHARES: u64 = 32;
/// log2 of the frames that are taken at once: 2 MiB. A CPU that takes larger blocks would keep others from huge folios.
pub(super) const BLOCK: u8 = 9;
/// log2 of the frames in a batch.
pub(super) const BATCH_ORDER: u8 = BATCH.ilog2() as u8;

/// A CPU's batches, last in first out. Written by that CPU alone; others only ask how many there are.
#[derive(Debug)]
pub(super) struct Reserve {
    first: AtomicU32,
    batches: AtomicU32,
    /// The arena that they are from, or one of the same node.
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

    /// How many frames there are.
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

    /// Puts in a block of 2^`order` frames, at least a batch, which nobody else has: as batches, of which the first is taken first.
    pub(super) fn put_block(&self, table: &FrameTable, block: FrameNumber, order: u8) {
        for head in (block.0..block.0 + (1 << order)).step_by(BATCH).rev() {
            let meta = table.meta(FrameNumber(head));
            meta.set_order(BATCH_ORDER);
            meta.set_kind(Kind::Pooled);
            self.push(table, FrameNumber(head));
        }
    }

    /// Puts in a batch of single frames, to be taken in the order given.
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
                // Of a frame in use it counts the huge leaves.
                next.store(0, Ordering::Relaxed);
            }
            debug_assert_eq!(at, NO_FRAME);
        }
        true
    }
}

#[cfg(test)]
mod tests;
