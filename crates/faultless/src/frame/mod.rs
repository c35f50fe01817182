//! Frames: physical memory, its owners, and its pending flushes.
//!
//! Memory lies in *nodes* (tiers, or sockets), the nearest and fastest first. Each node has a
//! buddy allocator (`buddy.rs`) and a [pool of pre-zeroed frames](zeroed) under one lock; each CPU keeps short
//! lists (`percpu.rs`) of frames above them, so that allocating and freeing a frame usually touches
//! nothing but such a list and the frame's own [line of metadata](meta). Many at a time come as a
//! [`Bulk`]. A frame out of the allocators is a value,
//! [`Frame`](owned), until it is [published](Frames::publish) to a page-table entry; its type says
//! whether stale translations to it may exist.
//!
//! ```text
//!  pool ⇄ CPU's list of zeroed frames ⇄ Frame<Zeroed> ─┐
//!   ↑ pre-zeroed                           ↑ zeroed     ↓
//! buddy ⇄ CPU's list of others ⇄────── Frame<Clean> → publish → mapped, refs ≥ 1
//!                                          ↑                       | put_ref = 0, reclaim
//!                                          └─ settle ─ Frame<Owed> ┘
//! ```
//!
//! *Exhaustion.* How many frames are out of the buddy allocators and pools is counted exactly, in
//! batches, and no frame is handed out that was not reserved in that count first. So what is handed out
//! never exceeds the [limit](Frames::set_limit), and while the count is below it, allocating one frame
//! succeeds, be the last ones in a pool; a CPU's own lists serve it beyond that, either for the other.
//! What other CPUs keep in their lists, or are zeroing, counts as out and cannot be had; therefore lists
//! are kept small when memory is short: a batch is at most 1/16 of what can still be had, and a list
//! holds at most two of the batches it was last filled with.
//!
//! Lock order: a node's lock is a leaf; nothing is taken under it, and no two at a time.

mod buddy;
mod bulk;
mod census;
pub mod folio;
pub mod meta;
pub mod owned;
mod percpu;
#[cfg(test)]
mod tests;
pub mod zeroed;

pub use bulk::Bulk;
pub use census::{Census, Imbalance};
pub use meta::{FrameMeta, FrameTable, Kind, Use};
pub use owned::{Clean, Frame, Owed, Settled, Zeroed};

use crate::addr::FrameNumber;
use crate::error::OutOfMemory;
use crate::machine::MemoryRegion;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::percpu::{Local, Padded, PerCpu};
use crate::sync::wait::{Spin, Wait};
use alloc::vec::Vec;
use core::fmt;
use percpu::{BATCH, Magazine, Stock, batch_for};
use zeroed::Node;

/// log2 of the frames in the largest block: 1 GiB.
pub const MAX_ORDER: u8 = 18;

/// Memory is short when less than one part in so many of the limit can still be had.
const SHORT: u64 = 16;

/// All physical memory.
pub struct Frames {
    table: FrameTable,
    /// By node number, which is the order of preference.
    nodes: Vec<Node>,
    stocks: PerCpu<Stock>,
    total: u64,
    /// Frames that a node's pool may hold. Here, where all else is read only, as is the next.
    zeroed_pool: AtomicU64,
    /// 0, or `u64::MAX` where there are pools: then the list of clean frames
    /// [seems empty](Magazine::pop_unless) to an allocation of a zeroed one.
    pools: AtomicU64,
    counts: Padded<Counts>,
}

/// Written where batches move, not where frames do.
struct Counts {
    /// Frames out of the buddy allocators and pools, or promised to a CPU that is about to take them.
    taken: AtomicU64,
    /// How many may be out; not more than the total.
    limit: AtomicU64,
}

impl Frames {
    /// All frames of `regions`, free, for `cpus` CPUs.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted: it takes 64 bytes a frame.
    ///
    /// # Safety
    /// The regions are those of one machine, as [`Machine::regions`](crate::Machine::regions) promises, and nothing
    /// else hands out their frames. Whatever is given a machine here, [`Frame::zero`] among them, is given that one, and
    /// frames, runs and numbers of frames come back to the `Frames` that they are of. So no frame is of use without an
    /// `unsafe` that answers for it.
    pub unsafe fn try_new(cpus: usize, regions: &[MemoryRegion]) -> Result<Self, OutOfMemory> {
        let table = FrameTable::try_new(regions)?;
        let mut nodes = Vec::new();
        let last = regions.iter().map(|region| region.node).max().unwrap_or(0);
        nodes.try_reserve_exact(usize::from(last) + 1).map_err(|_| OutOfMemory)?;
        for node in 0..=last {
            nodes.push(Node::new(node));
            nodes[usize::from(node)].locked(&Spin, |lists| {
                for region in regions.iter().filter(|region| region.node == node) {
                    lists.free.adopt(&table, region.first, region.frames);
                }
            });
        }
        let total = regions.iter().map(|region| u64::from(region.frames)).sum();
        let counts = Counts { taken: AtomicU64::new(0), limit: AtomicU64::new(total) };
        let stocks = PerCpu::try_new(cpus, |_| Stock::new())?;
        let (zeroed_pool, pools) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { table, nodes, stocks, total, zeroed_pool, pools, counts: Padded(counts) })
    }

    /// Allocates one frame, from the CPU's list or, when that is empty, from the first node that
    /// has one. `None`: there is none left, or the limit is reached.
    #[inline(always)]
    pub fn alloc(&self, local: &Local, wait: &impl Wait) -> Option<Frame<Clean>> {
        let number = match self.stocks.get(local).clean.pop() {
            Some(number) => number,
            None => self.refill(local, wait)?,
        };
        Some(Frame::new(number, 0))
    }

    /// Allocates a block of 2^`order` contiguous frames, aligned to its size, straight from the
    /// first node that has one. `None`: there is none left, or the limit is reached.
    pub fn alloc_order(&self, local: &Local, order: u8, wait: &impl Wait) -> Option<Frame<Clean>> {
        let number = self.take_block(order, wait).or_else(|| {
            // What this CPU keeps may be what is missing from a block, or from the limit; and a block may
            // be half zeroed.
            self.drain(local, wait);
            self.shrink_pools(0, wait);
            self.take_block(order, wait)
        })?;
        Some(Frame::new(number, order))
    }

    /// Frees a frame to the CPU's list of its kind, or a block of several straight to its node.
    #[inline]
    pub fn free<S: Settled>(&self, local: &Local, frame: Frame<S>, wait: &impl Wait) {
        let (number, order) = (frame.number(), frame.order());
        let meta = self.meta(number);
        debug_assert_eq!(meta.kind(), Kind::Pooled, "{number:?} is not its holder's");
        debug_assert!(!meta.is_referred_to(), "{number:?} is freed while referred to");
        for number in number.0..number.0 + (1 << order) {
            self.meta(FrameNumber(number)).end_ownership();
        }
        if order != 0 {
            return self.give_back(&[number], order, S::ZEROED, wait);
        }
        let stock = self.stocks.get(local);
        let zeroed = S::ZEROED && self.zeroed_pool() != 0;
        let list = if zeroed { &stock.zeroed } else { &stock.clean };
        while !list.push(number) {
            self.spill(list, zeroed, wait);
        }
    }

    /// Frees a frame or block straight to its node, which takes no CPU.
    pub fn free_to_node<S: Settled>(&self, frame: Frame<S>, wait: &impl Wait) {
        let (number, order) = (frame.number(), frame.order());
        for number in number.0..number.0 + (1 << order) {
            self.meta(FrameNumber(number)).end_ownership();
        }
        self.give_back(&[number], order, S::ZEROED, wait);
    }

    /// Describes `frame` as used for `usage`, with one reference, under the anon_vma numbered `anon_vma` at
    /// page `index`, and turns it into the number that the caller now stores into an entry, with
    /// release. Writes the frame's own line only. For a table node or another frame without reverse
    /// map, `anon_vma` and `index` are 0.
    #[inline(always)]
    pub fn publish<S: Settled>(
        &self,
        frame: Frame<S>,
        usage: Use,
        anon_vma: u64,
        index: u64,
    ) -> FrameNumber {
        let number = frame.into_number();
        let meta = self.meta(number);
        meta.set_use(usage);
        meta.set_refs(1);
        meta.anon_vma.store(anon_vma, Ordering::Relaxed);
        meta.index.store(index, Ordering::Relaxed);
        number
    }

    /// Takes back a published frame (or block, by its head) when there is no reference to it any more.
    ///
    /// # Safety
    /// [`put_ref`](FrameMeta::put_ref) returned 0, or [`unpin`](FrameMeta::unpin) true, to the caller, and no page-table entry holds the
    /// number. (Having seen a count of 1 is not enough: a fault that copies from the frame may take
    /// a reference at any time before the count is 0.)
    #[inline]
    pub unsafe fn reclaim(&self, number: FrameNumber) -> Frame<Owed> {
        let meta = self.meta(number);
        debug_assert!(matches!(meta.kind(), Kind::Used(_)), "{number:?} was not published");
        debug_assert!(!meta.is_referred_to(), "{number:?} is referred to");
        meta.set_kind(Kind::Pooled);
        Frame::new(number, meta.order())
    }

    /// [Takes back](Self::reclaim) a published frame or block to which there is no reference any more, and frees it straight to its
    /// node, which takes no CPU.
    ///
    /// # Safety
    /// As [`reclaim`](Self::reclaim); and no CPU has a translation to it: there never was one, or each mapping's reference was
    /// dropped after a flush.
    pub unsafe fn free_unreferred(&self, number: FrameNumber) {
        // SAFETY: handed on.
        let frame = unsafe { self.reclaim(number).settle() };
        // A node's lock is a leaf: its holder waits for nothing.
        self.free_to_node(frame, &Spin);
    }

    /// Drops a pin, and frees the frame if nothing else refers to it. Takes no CPU.
    ///
    /// # Safety
    /// The caller had the pin.
    pub unsafe fn unpin(&self, number: FrameNumber) {
        if self.meta(number).unpin() {
            // SAFETY: the pin was the last reference. Those of mappings are dropped only after a flush.
            unsafe { self.free_unreferred(number) };
        }
    }

    /// The metadata of `frame`, which must lie between the first and the last frame of all regions,
    /// as every number does that came from this room.
    #[inline(always)]
    pub fn meta(&self, frame: FrameNumber) -> &FrameMeta {
        self.table.meta(frame)
    }

    /// The metadata of all frames.
    #[inline]
    pub const fn table(&self) -> &FrameTable {
        &self.table
    }

    /// Gives the CPU's lists back to the buddy allocators and pools, as a CPU does that goes idle or away.
    pub fn drain(&self, local: &Local, wait: &impl Wait) {
        let stock = self.stocks.get(local);
        while self.spill(&stock.clean, false, wait) != 0 {}
        while self.spill(&stock.zeroed, true, wait) != 0 {}
    }

    /// Frames of memory.
    #[inline]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Frames on the buddy allocators' lists and in the pools. As in Linux's `nr_free_pages`, those on the CPUs'
    /// lists are not among them.
    #[inline]
    pub fn free_count(&self) -> u64 {
        self.total - self.counts.0.taken.load(Ordering::Relaxed)
    }

    /// How many frames may be out of the buddy allocators and pools at once.
    #[inline]
    pub fn limit(&self) -> u64 {
        self.counts.0.limit.load(Ordering::Relaxed)
    }

    /// Lets at most `frames` frames be out of the buddy allocators and pools at once, those on the CPUs' lists
    /// included. With more than that out already, allocation fails until enough have come back.
    pub fn set_limit(&self, frames: u64) {
        self.counts.0.limit.store(frames.min(self.total), Ordering::Relaxed);
    }

    /// Fills the CPU's empty list with a batch, of which the first frame is the caller's.
    #[cold]
    #[inline(never)]
    fn refill(&self, local: &Local, wait: &impl Wait) -> Option<FrameNumber> {
        let stock = self.stocks.get(local);
        let mut batch = [FrameNumber(0); BATCH];
        match self.take_any(&mut batch, wait, |available| batch_for(available) as u64) {
            // Nothing but what is zeroed on this CPU is left.
            0 => stock.zeroed.pop(),
            got => {
                stock.clean.refill(&batch[..got]);
                stock.clean.pop()
            }
        }
    }

    /// Takes single frames of anything from the nodes, the nearest first: as many as `want` makes of
    /// what can still be had, and at most `to.len()`. Returns how many; 0 only when `want` is refused.
    fn take_any(
        &self,
        to: &mut [FrameNumber],
        wait: &impl Wait,
        want: impl Fn(u64) -> u64,
    ) -> usize {
        let most = to.len() as u64;
        let Some(reserved) = self.reserve(1, |available| want(available).min(most)) else {
            return 0;
        };
        let reserved = reserved as usize;
        let mut got = 0;
        // What is reserved is there: the limit is not above the total. It may be on its way from one
        // node to another while we pass, so an empty-handed round is followed by another.
        for looks in 0.. {
            for node in &self.nodes {
                let empty = node.locked(wait, |lists| {
                    got += lists.alloc_bulk(&self.table, &mut to[got..reserved]);
                    lists.is_empty()
                });
                // A few frames less are better than some from farther away.
                if got == reserved || !empty {
                    break;
                }
            }
            if got != 0 {
                break;
            }
            wait.wait(looks);
        }
        self.release((reserved - got) as u64);
        to[..got].iter().for_each(|number| self.meta(*number).make_single());
        got
    }

    /// Gives the colder half of the list back; returns how many frames that were.
    #[cold]
    #[inline(never)]
    fn spill(&self, list: &Magazine, zeroed: bool, wait: &impl Wait) -> usize {
        let mut batch = [FrameNumber(0); BATCH];
        let out = list.spill(&mut batch);
        self.give_back(&batch[..out], 0, zeroed, wait);
        out
    }

    /// Takes a block from the first node that has one. The block is taken before it is reserved:
    /// a reservation that then found no block would have failed another CPU's for nothing.
    fn take_block(&self, order: u8, wait: &impl Wait) -> Option<FrameNumber> {
        let found = |node: &Node| node.locked(wait, |lists| lists.alloc(&self.table, order));
        let number = self.nodes.iter().find_map(found)?;
        let frames = 1 << order;
        if self.reserve(frames, |_| frames).is_none() {
            let give_back = |lists: &mut zeroed::Lists| lists.free.free(&self.table, number, order);
            self.node_of(number).locked(wait, give_back);
            return None;
        }
        Some(number)
    }

    /// Returns blocks of 2^`order` frames to their nodes, with one locking for each run of the same
    /// node; `zeroed` ones to the pool, while that has room.
    fn give_back(&self, blocks: &[FrameNumber], order: u8, zeroed: bool, wait: &impl Wait) {
        for run in blocks.chunk_by(|a, b| self.meta(*a).node() == self.meta(*b).node()) {
            self.node_of(run[0]).locked(wait, |lists| {
                let room = if zeroed { lists.zeroed_room(self.zeroed_pool()) >> order } else { 0 };
                let (pooled, others) = run.split_at(run.len().min(room as usize));
                for number in pooled {
                    lists.zeroed.free(&self.table, *number, order);
                }
                for number in others {
                    lists.free.free(&self.table, *number, order);
                }
            });
        }
        self.release((blocks.len() as u64) << order);
    }

    fn node_of(&self, frame: FrameNumber) -> &Node {
        &self.nodes[usize::from(self.meta(frame).node())]
    }

    /// Frames that can still be had.
    fn available(&self) -> u64 {
        self.limit().saturating_sub(self.counts.0.taken.load(Ordering::Relaxed))
    }

    /// Whether memory would be short with `frames` frames taken of `available`: then what is not needed
    /// at once is left to the callers that need it.
    fn is_short_at(&self, available: u64, frames: u64) -> bool {
        available < frames + self.limit() / SHORT
    }

    /// Whether so many frames can be had without memory being short.
    pub fn can_spare(&self, frames: u64) -> bool {
        !self.is_short_at(self.available(), frames)
    }

    /// Whether memory is short: less than 1/16 of what may be out can still be had.
    #[cfg(any(test, loom, shuttle))]
    pub fn is_short(&self) -> bool {
        self.is_short_at(self.available(), 0)
    }

    /// Promises the caller as many frames as it `want`s when that many are available, or else those
    /// that are; fewer than `least` are none. `Acquire` pairs with [`release`](Self::release): the
    /// frames that made room are on the free lists.
    fn reserve(&self, least: u64, want: impl Fn(u64) -> u64) -> Option<u64> {
        let Counts { taken, limit } = &self.counts.0;
        let mut old = taken.load(Ordering::Relaxed);
        loop {
            let available = limit.load(Ordering::Relaxed).saturating_sub(old);
            let granted = want(available).min(available);
            if granted < least {
                return None;
            }
            let new = old + granted;
            match taken.compare_exchange_weak(old, new, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(granted),
                Err(now) => old = now,
            }
        }
    }

    /// Ends the promise of `frames` frames, which are back on the free lists.
    fn release(&self, frames: u64) {
        self.counts.0.taken.fetch_sub(frames, Ordering::Release);
    }
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frames")
            .field("total", &self.total)
            .field("free", &self.free_count())
            .field("limit", &self.limit())
            .field("nodes", &self.nodes.len())
            .finish_non_exhaustive()
    }
}
