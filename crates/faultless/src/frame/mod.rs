//! Frames: physical memory, its owners, and its pending flushes.
//!
//! Memory lies in *nodes* (tiers, or sockets), each divided into [arenas](arena) with a buddy
//! allocator (`buddy.rs`) and a [pool of pre-zeroed frames](zeroed) under one lock. Above them,
//! each CPU keeps short lists of frames (`percpu.rs`), so that allocating and freeing a frame
//! usually touches only such a list and the frame's own [line of metadata](meta); and a
//! [reserve](reserve) of batches, so that the CPU seldom takes the lock. Many frames at a time are
//! returned as a [`Bulk`]. A frame outside the allocators is a value, [`Frame`](owned), until it is
//! [published](Frames::publish) to a page-table entry; its type states whether stale translations
//! to it may exist.
//!
//! ```text
//!  pool ⇄ CPU's list of zeroed frames ⇄ Frame<Zeroed> ─┐
//!   ↑ pre-zeroed                           ↑ zeroed     ↓
//! buddy ⇄ CPU's list of others ⇄────── Frame<Clean> → publish → mapped, refs ≥ 1
//!                                          ↑                       | put_ref = 0, reclaim
//!                                          └─ flushed ─ Frame<FlushPending>
//! ```
//!
//! *Exhaustion.* The number of frames outside the buddy allocators and pools is [counted](count)
//! exactly, in batches, and never exceeds the [limit](Frames::set_limit). While fewer frames are
//! outside than the limit, allocating one frame succeeds, even if the last free frames are in a
//! pool. Beyond the limit, a CPU's own lists can serve it, each list in place of the other. Frames
//! in the lists of other CPUs, or being zeroed by them, count as taken and are not available;
//! therefore lists are kept small when memory is short: a batch is at most 1/16 of the available
//! frames, and a list holds at most two of its last batches. All reserves together hold at most
//! 1/32 of memory.
//!
//! Lock order: an arena's lock is a leaf; no lock is taken under it, and no two arenas are locked
//! at a time.

mod arena;
mod buddy;
mod bulk;
mod census;
mod count;
pub mod flush_pending;
pub mod folio;
pub mod isolated;
pub mod meta;
pub mod owned;
mod percpu;
mod put;
mod reserve;
mod tables;
#[cfg(test)]
mod tests;
pub mod zeroed;

pub use bulk::Bulk;
pub use census::{Census, Imbalance};
pub use meta::{FrameMeta, FrameTable, FrameUse, Kind};
pub use owned::{Clean, FlushPending, Flushed, Frame, Zeroed};

use crate::addr::FrameNumber;
use crate::error::OutOfMemory;
use crate::machine::{CpuId, MemoryRegion};
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::percpu::{Local, Padded, PerCpu};
use crate::sync::wait::{Spin, Wait};
use alloc::vec::Vec;
use arena::{Arena, Layout, Lists};
use core::fmt;
use count::Counts;
use percpu::{BATCH, Stock, batch_for};
use reserve::{BATCH_ORDER, BLOCK, Reserve, SHARES};

/// log2 of the frames in the largest block: 1 GiB.
pub const MAX_ORDER: u8 = 18;

/// All physical memory.
pub struct Frames {
    table: FrameTable,
    layout: Layout,
    /// Indexed by the numbers in `layout`.
    arenas: Vec<Arena>,
    stocks: PerCpu<Stock>,
    reserves: PerCpu<Reserve>,
    cpus: u64,
    total: u64,
    /// The maximum number of frames outside the arenas; not more than the total.
    limit: AtomicU64,
    /// The maximum [credit](count) of an arena.
    most_credit: AtomicU64,
    /// Whether memory was short when the count of taken frames last changed. Written only on
    /// changes, for callers that only check whether reading the count is worthwhile.
    short: AtomicBool,
    /// The maximum number of frames in a node's pool. Stored here among read-only fields, like the
    /// next field.
    zeroed_pool: AtomicU64,
    /// 0, or `u64::MAX` if there are pools: then the list of clean frames [seems
    /// empty](Magazine::pop_unless) to an allocation of a zeroed frame.
    pools: AtomicU64,
    counts: Padded<Counts>,
}

impl Frames {
    /// Creates the frames of `regions`, all free, for `cpus` CPUs; the nearest node of CPU `n` is
    /// `nearest(n)`.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted: the metadata takes 64 bytes a frame.
    ///
    /// # Safety
    /// The regions are those of one machine, as [`Machine::regions`](crate::Machine::regions)
    /// promises, and no other code allocates their frames. Every function of this module with a
    /// machine parameter, including [`Frame::zero`], gets this machine. Frames, runs and numbers of
    /// frames are returned only to the `Frames` they came from. So using a frame always requires an
    /// `unsafe` block.
    pub unsafe fn try_new(
        cpus: usize,
        regions: &[MemoryRegion],
        nearest: impl Fn(usize) -> u8,
    ) -> Result<Self, OutOfMemory> {
        let layout = Layout::new(cpus, regions, &nearest);
        let table = FrameTable::try_new(regions, |node, frame| layout.of(node, frame))?;
        let arenas = layout.try_fill(&table, regions)?;
        let total = regions.iter().map(|region| u64::from(region.frames)).sum();
        let home = |cpu: CpuId| layout.home(cpu.index(), &nearest);
        let stock = |cpu| {
            let home = home(cpu);
            Stock::new(home, layout.arenas_of(layout.node(home)))
        };
        let stocks = PerCpu::try_new(cpus, stock)?;
        let reserves = PerCpu::try_new(cpus, |cpu| Reserve::new(home(cpu)))?;
        let frames = Self {
            table,
            layout,
            arenas,
            stocks,
            reserves,
            cpus: cpus as u64,
            total,
            limit: AtomicU64::new(total),
            most_credit: AtomicU64::new(0),
            short: AtomicBool::new(false),
            zeroed_pool: AtomicU64::new(0),
            pools: AtomicU64::new(0),
            counts: Padded(Counts::new()),
        };
        frames.grant_credits();
        Ok(frames)
    }

    /// Allocates one frame, from the CPU's list or, if the list is empty, from the nearest node
    /// with a free frame. `None`: no frame is free, or the limit is reached.
    #[inline(always)]
    pub fn alloc(&self, local: &Local, wait: &impl Wait) -> Option<Frame<Clean>> {
        let number = match self.stocks.get(local).clean.pop() {
            Some(number) => number,
            None => self.refill(local, wait)?,
        };
        Some(Frame::new(number, 0))
    }

    /// Allocates a block of 2^`order` contiguous frames, aligned to its size, directly from the
    /// nearest node with such a block. `None`: no block is free, or the limit is reached.
    pub fn alloc_order(&self, local: &Local, order: u8, wait: &impl Wait) -> Option<Frame<Clean>> {
        let number = self.take_block(local, order, wait).or_else(|| {
            // The frames kept by this CPU may complete a block, or exhaust the limit, as may the
            // credits; and a block may be half zeroed.
            self.collect_credits(wait);
            self.drain(local, wait);
            self.shrink_pools(0, wait);
            self.take_block(local, order, wait)
        })?;
        Some(Frame::new(number, order))
    }

    /// Frees a single frame to the CPU's list of its kind. A block, or a frame of another node than
    /// the CPU's, is freed directly to its arena, so that the CPU's next page is near.
    #[inline]
    pub fn free<S: Flushed>(&self, local: &Local, frame: Frame<S>, wait: &impl Wait) {
        let (number, order) = (frame.number(), frame.order());
        let meta = self.meta(number);
        debug_assert_eq!(meta.kind(), Kind::Pooled, "{number:?} does not belong to the caller");
        debug_assert!(!meta.is_referred_to(), "{number:?} is freed with references");
        for number in number.0..number.0 + (1 << order) {
            self.meta(FrameNumber(number)).end_ownership();
        }
        if order != 0 {
            return self.give_back(&[number], order, S::ZEROED, wait);
        }
        let stock = self.stocks.get(local);
        if !stock.keeps(meta.arena()) {
            return self.give_back(&[number], order, S::ZEROED, wait);
        }
        let zeroed = S::ZEROED && self.zeroed_pool() != 0;
        let list = if zeroed { &stock.zeroed } else { &stock.clean };
        while !list.push(number) {
            self.spill(local, zeroed, wait);
        }
    }

    /// Frees a frame or block directly to its arena, which requires no CPU.
    pub fn free_to_node<S: Flushed>(&self, frame: Frame<S>, wait: &impl Wait) {
        let (number, order) = (frame.number(), frame.order());
        for number in number.0..number.0 + (1 << order) {
            self.meta(FrameNumber(number)).end_ownership();
        }
        self.give_back(&[number], order, S::ZEROED, wait);
    }

    /// Describes `frame` as used for `usage`, with one reference, under the anchor word `anchor` at
    /// page `index`. Returns the number, which the caller then stores into an entry, with release.
    /// Writes only the frame's own line. For a table node or another frame without reverse map,
    /// `anchor` and `index` are 0.
    #[inline(always)]
    pub fn publish<S: Flushed>(
        &self,
        frame: Frame<S>,
        usage: FrameUse,
        anchor: u64,
        index: u64,
    ) -> FrameNumber {
        self.publish_shared(frame, usage, anchor, index, 1)
    }

    /// As [`publish`](Self::publish), with `refs` references.
    pub fn publish_shared<S: Flushed>(
        &self,
        frame: Frame<S>,
        usage: FrameUse,
        anchor: u64,
        index: u64,
        refs: u32,
    ) -> FrameNumber {
        let number = frame.into_number();
        if lost(Mutant::CountIsStoredOnce) {
            self.meta(number).publish(usage, anchor, index, 1);
        }
        self.meta(number).publish(usage, anchor, index, refs);
        number
    }

    /// Returns the memory node of `frame`; meaningless for a frame outside all regions.
    pub fn node(&self, frame: FrameNumber) -> u8 {
        self.layout.node(self.meta(frame).arena())
    }

    /// Takes back a published frame (or block, by its head) without remaining references.
    ///
    /// # Safety
    /// [`put_ref`](FrameMeta::put_ref) returned 0, or [`unpin`](FrameMeta::unpin) true, to the
    /// caller, and no page-table entry contains the number. (Having read a count of 1 is not
    /// enough: a fault that copies from the frame may take a reference at any time before the count
    /// is 0.)
    #[inline]
    pub unsafe fn reclaim(&self, number: FrameNumber) -> Frame<FlushPending> {
        let meta = self.meta(number);
        debug_assert!(matches!(meta.kind(), Kind::Used(_)), "{number:?} was not published");
        debug_assert!(!meta.is_referred_to(), "{number:?} has references");
        meta.set_kind(Kind::Pooled);
        Frame::new(number, meta.order())
    }

    /// [Takes back](Self::reclaim) a published frame or block without remaining references, and
    /// frees it directly to its node, which requires no CPU.
    ///
    /// # Safety
    /// As [`reclaim`](Self::reclaim); and no CPU has a translation to the frame: there never was
    /// one, or each mapping's reference was dropped after a flush.
    pub unsafe fn free_unreferred(&self, number: FrameNumber) {
        // SAFETY: the caller's promise.
        let frame = unsafe { self.reclaim(number).assume_flushed() };
        // An arena's lock is a leaf: its holder does not wait.
        self.free_to_node(frame, &Spin);
    }

    /// Drops a pin, and frees the frame if no other reference remains. Requires no CPU.
    ///
    /// # Safety
    /// The caller owned the pin.
    pub unsafe fn unpin(&self, number: FrameNumber) {
        if self.meta(number).unpin() {
            // SAFETY: the pin was the last reference. References of mappings are dropped only after
            // a flush.
            unsafe { self.free_unreferred(number) };
        }
    }

    /// Returns the metadata of `frame`, which must lie between the first and the last frame of all
    /// regions, like every number returned by this module.
    #[inline(always)]
    pub fn meta(&self, frame: FrameNumber) -> &FrameMeta {
        self.table.meta(frame)
    }

    /// Returns the metadata of all frames.
    #[inline]
    pub const fn table(&self) -> &FrameTable {
        &self.table
    }

    /// Returns the CPU's lists to the buddy allocators and pools, for a CPU that goes idle or
    /// offline.
    pub fn drain(&self, local: &Local, wait: &impl Wait) {
        let stock = self.stocks.get(local);
        for (list, zeroed) in [(&stock.clean, false), (&stock.tables, false), (&stock.zeroed, true)]
        {
            let mut batch = [FrameNumber(0); BATCH];
            while let out @ 1.. = list.spill(&mut batch) {
                self.give_back(&batch[..out], 0, zeroed, wait);
            }
        }
        let mut batch = [FrameNumber(0); BATCH];
        while self.reserves.get(local).take(&self.table, &mut batch) {
            self.give_back(&batch, 0, false, wait);
        }
    }

    /// Returns the number of frames of memory.
    #[inline]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Returns the number of frames in the CPUs' reserves; each reserve is read at a different
    /// time.
    pub fn reserved_count(&self) -> u64 {
        self.reserves.iter().map(Reserve::len).sum()
    }

    /// Fills the CPU's empty list with a batch, and returns its first frame to the caller.
    #[cold]
    #[inline(never)]
    fn refill(&self, local: &Local, wait: &impl Wait) -> Option<FrameNumber> {
        let stock = self.stocks.get(local);
        if self.restock(local, wait) != 0 {
            return stock.clean.pop();
        }
        // Only frames zeroed on this CPU, or kept for tables, are left.
        stock.zeroed.pop().or_else(|| stock.tables.pop())
    }

    /// Fills the CPU's empty list with a batch: from its reserve, or else from the arenas. Returns
    /// the number of frames.
    fn restock(&self, local: &Local, wait: &impl Wait) -> usize {
        let stock = self.stocks.get(local);
        let mut batch = [FrameNumber(0); BATCH];
        let reserve = self.reserves.get(local);
        let take = |batch: &mut _| reserve.take(&self.table, batch);
        if take(&mut batch) || (self.fill_reserve(local, wait) && take(&mut batch)) {
            stock.clean.refill(&batch);
            return BATCH;
        }
        let got = self.take_any(local, &mut batch, wait, |available| batch_for(available) as u64);
        if got != 0 {
            stock.clean.refill(&batch[..got]);
        }
        got
    }

    /// Returns the maximum number of frames in a CPU's reserve, by the size of memory; 0, or at
    /// least two batches.
    fn share(&self) -> u64 {
        let share = self.limit() / (SHARES * self.cpus);
        if share < 2 << BATCH_ORDER { 0 } else { share }
    }

    /// Takes a block for the CPU's empty reserve from its home, if memory is plentiful and no small
    /// blocks should be used up first.
    fn fill_reserve(&self, local: &Local, wait: &impl Wait) -> bool {
        let share = self.share();
        if share == 0 {
            return false;
        }
        let most = 1 << share.ilog2().min(BLOCK.into());
        let home = usize::from(self.stocks.get(local).home);
        // The block is taken before it is reserved, as in `take_block`.
        let taken = self.arenas[home].locked(wait, |lists| {
            let (block, order) = lists.free.alloc_block(&self.table, BATCH, most)?;
            if self.reserve_block(lists, 1 << order, true) {
                return Some((block, order));
            }
            lists.free.free(&self.table, block, order);
            None
        });
        let Some((block, order)) = taken else { return false };
        self.reserves.get(local).put_block(&self.table, block, order);
        true
    }

    /// Iterates over the arenas in the order in which the CPU takes frames from them.
    fn arenas_from(&self, local: &Local) -> impl Iterator<Item = &Arena> {
        let numbers = self.layout.from(self.stocks.get(local).home);
        numbers.map(|number| &self.arenas[number])
    }

    /// Takes single frames of any kind from the arenas, the nearest first: the number returned by
    /// `want` for the available frames, and at most `to.len()`. Returns the number taken; 0 only if
    /// the reservation is refused.
    fn take_any(
        &self,
        local: &Local,
        to: &mut [FrameNumber],
        wait: &impl Wait,
        want: impl Fn(u64) -> u64,
    ) -> usize {
        let most = to.len() as u64;
        let want = |available| want(available).min(most);
        let Some(reserved) = self.reserve_or_collect(1, want, wait) else { return 0 };
        let reserved = reserved as usize;
        let mut got = 0;
        // Reserved frames exist, because the limit is not above the total. They may be moving
        // between arenas during the scan, so an unsuccessful round is repeated.
        for looks in 0.. {
            for arena in self.arenas_from(local) {
                let empty = arena.locked(wait, |lists| {
                    got += lists.alloc_bulk(&self.table, &mut to[got..reserved]);
                    lists.is_empty()
                });
                // Slightly fewer frames are better than frames from a more distant arena.
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
        self.table.each(&to[..got]).for_each(FrameMeta::make_single);
        got
    }

    /// Moves the colder half of a list off the CPU: to its reserve, or back to the frames' arenas.
    #[cold]
    #[inline(never)]
    fn spill(&self, local: &Local, zeroed: bool, wait: &impl Wait) {
        let stock = self.stocks.get(local);
        let mut batch = [FrameNumber(0); BATCH];
        let out = if zeroed { &stock.zeroed } else { &stock.clean }.spill(&mut batch);
        self.shelve(local, &batch[..out], zeroed, wait);
    }

    /// Moves free frames that do not fit a list to the CPU's reserve, or back to the frames'
    /// arenas.
    fn shelve(&self, local: &Local, batch: &[FrameNumber], zeroed: bool, wait: &impl Wait) {
        let reserve = self.reserves.get(local);
        let keep = if self.seems_short() { 0 } else { self.share() };
        if let Ok(batch) = batch.try_into()
            && !zeroed
            && reserve.len() + BATCH as u64 <= keep
        {
            return reserve.put(&self.table, batch);
        }
        self.give_back(batch, 0, zeroed, wait);
        // Memory has become short, or the limit lower. Only one batch is returned at a time, to
        // keep a free short.
        let mut batch = [FrameNumber(0); BATCH];
        if reserve.len() > keep && reserve.take(&self.table, &mut batch) {
            self.give_back(&batch, 0, false, wait);
        }
    }

    /// Takes a block from the nearest arena with such a block. The block is taken before it is
    /// reserved: a reservation without a block would make another CPU's reservation fail
    /// needlessly.
    fn take_block(&self, local: &Local, order: u8, wait: &impl Wait) -> Option<FrameNumber> {
        let take = |lists: &mut Lists| {
            let number = lists.alloc(&self.table, order)?;
            if self.reserve_block(lists, 1 << order, false) {
                return Some(Some(number));
            }
            lists.free.free(&self.table, number, order);
            Some(None)
        };
        self.arenas_from(local).find_map(|arena| arena.locked(wait, take))?
    }

    /// Returns blocks of 2^`order` frames to their arenas, with one lock acquisition for each run
    /// of the same arena; `zeroed` blocks go to the pool, while it has room.
    fn give_back(&self, blocks: &[FrameNumber], order: u8, zeroed: bool, wait: &impl Wait) {
        for run in blocks.chunk_by(|a, b| self.meta(*a).arena() == self.meta(*b).arena()) {
            let arena = self.arena_of(run[0]);
            let pool = if zeroed { arena.part_of(self.zeroed_pool()) } else { 0 };
            arena.locked(wait, |lists| {
                let room = lists.zeroed_room(pool) >> order;
                let (pooled, others) = run.split_at(run.len().min(room as usize));
                for (buddy, blocks) in [(&mut lists.zeroed, pooled), (&mut lists.free, others)] {
                    if order == 0 {
                        buddy.free_run(&self.table, blocks);
                    } else {
                        blocks.iter().for_each(|first| buddy.free(&self.table, *first, order));
                    }
                }
                self.release_to(lists, (run.len() as u64) << order);
            });
        }
    }

    fn arena_of(&self, frame: FrameNumber) -> &Arena {
        &self.arenas[usize::from(self.meta(frame).arena())]
    }

    /// Returns the number of free frames in a node's arenas.
    pub fn free_on(&self, node: u8, wait: &impl Wait) -> u64 {
        let arenas = self.layout.arenas_of(node).map(|number| &self.arenas[number]);
        arenas.map(|arena| arena.locked(wait, |lists| lists.free_count())).sum()
    }

    /// Returns the number of frames of a node in the CPUs' reserves.
    pub fn reserved_on(&self, node: u8) -> u64 {
        let own = |reserve: &&Reserve| self.layout.node(reserve.home()) == node;
        self.reserves.iter().filter(own).map(Reserve::len).sum()
    }

    /// Returns how often frames were freed: the number of ended ownerships of all frames. Computed
    /// in time linear in the memory, so that a free need not count.
    pub fn freed(&self) -> u64 {
        self.table.iter().map(FrameMeta::owner).fold(0, u64::wrapping_add)
    }
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frames")
            .field("total", &self.total)
            .field("free", &self.free_count())
            .field("limit", &self.limit())
            .field("arenas", &self.arenas.len())
            .finish_non_exhaustive()
    }
}
