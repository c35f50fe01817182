//! Frames of page tables.
//!
//! A page table cannot be moved to another frame, so a 2 MiB block with a page table in it cannot
//! be [emptied](crate::reclaim::compact). A program that touches its memory in order makes a table
//! with every 512 pages: if tables came from the list for pages, each block would contain one. So
//! each CPU has a separate list for tables, which is filled with a block of contiguous frames and
//! to which tables return. Its operations cost the same as for the other lists.
//!
//! If there are [pools](super::zeroed) of zeroed frames, tables come from the pools.

use super::percpu::BATCH;
use super::reserve::BATCH_ORDER;
use super::{Clean, Frame, FrameNumber, Frames};
use crate::sync::atomic::Ordering;
use crate::sync::percpu::Local;
use crate::sync::wait::Wait;

/// A CPU's list is filled only if the lists of all CPUs would hold at most this part of the free
/// frames, because other CPUs cannot use frames in a list.
const PART: u64 = 16;

impl Frames {
    /// Allocates a frame for a page table from the CPU's list for tables. `None`: the caller must
    /// use the general allocation.
    pub fn alloc_for_table(&self, local: &Local, wait: &impl Wait) -> Option<Frame<Clean>> {
        let pools = self.pools.load(Ordering::Relaxed) as usize;
        let listed = self.stocks.get(local).tables.pop_unless(pools);
        listed.or_else(|| self.refill_tables(local, wait)).map(|number| Frame::new(number, 0))
    }

    /// Fills the CPU's empty list with a block, and takes the first frame. `None`: there are pools,
    /// no such block is free in the CPU's node, or too few frames are free.
    #[cold]
    #[inline(never)]
    fn refill_tables(&self, local: &Local, wait: &impl Wait) -> Option<FrameNumber> {
        let all = (self.stocks.len() * BATCH) as u64;
        if self.zeroed_pool() != 0 || self.seems_short() || self.available() < all * PART {
            return None;
        }
        let first = self.take_block(local, BATCH_ORDER, wait)?;
        if !self.stocks.get(local).keeps(self.meta(first).arena()) {
            self.give_back(&[first], BATCH_ORDER, false, wait);
            return None;
        }
        let mut batch = [FrameNumber(0); BATCH];
        for (slot, number) in batch.iter_mut().zip(first.0..) {
            *slot = FrameNumber(number);
            self.meta(*slot).make_single();
        }
        let tables = &self.stocks.get(local).tables;
        tables.refill(&batch);
        tables.pop()
    }

    /// Frees the frame of a table: to the CPU's list for tables, if the list is in use and memory
    /// is not short.
    pub fn free_table(&self, local: &Local, frame: Frame<Clean>, wait: &impl Wait) {
        let stock = self.stocks.get(local);
        let number = frame.number();
        let is_near = || stock.keeps(self.meta(number).arena());
        if !stock.tables.is_open() || self.seems_short() || self.zeroed_pool() != 0 || !is_near() {
            return self.free(local, frame, wait);
        }
        self.meta(number).end_ownership();
        while !stock.tables.push(number) {
            let mut batch = [FrameNumber(0); BATCH];
            let out = stock.tables.spill(&mut batch);
            self.give_back(&batch[..out], 0, false, wait);
        }
    }
}
