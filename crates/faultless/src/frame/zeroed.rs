//! Pre-zeroed frames.
//!
//! Each [arena](super::arena) keeps a *pool* of zeroed frames beside its other free ones, under the same lock: a second
//! [buddy allocator](super::buddy), whose blocks merge only with each other. Background zeroing takes blocks
//! from the one, zeroes them, and puts them into the other, a [run](RUN) at a time
//! ([`Frames::zero_run`]). A CPU that needs zeroed frames moves a batch of them to its own list
//! ([`Frames::alloc_zeroed`]).
//!
//! *A pool makes no allocation fail.* Frames in a pool are free: they are not counted as taken, a refill of a
//! CPU's list takes them when the node has no others, blocks are split from the pool, and the pool is merged
//! back into the rest if no block is found otherwise. Only the run that a CPU is zeroing
//! counts as taken meanwhile, as do the frames on a CPU's list. No run begins while memory is
//! [short](Frames::is_short).
//!
//! *Pre-zeroed frames are not in the caches.* They were zeroed by non-temporal stores, or long ago. So the beginning of a frame
//! that is taken from a pool is prefetched at once, while its entry is made.
//!
//! *The nearest node first.* A fault zeroes a frame of the nearest node that has any rather than take
//! a pre-zeroed one from farther away: that would save the zeroing once, but cost the distance as long as
//! the page is mapped.

use super::arena::{Arena, Lists};
use super::percpu::{BATCH, batch_for};
use super::{Clean, Frame, FrameMeta, Frames, MAX_ORDER, Zeroed};
use crate::addr::FrameNumber;
use crate::machine::Machine;
use crate::sync::atomic::Ordering;
use crate::sync::percpu::Local;
use crate::sync::wait::Wait;

/// The most frames that are zeroed between two looks at what else there is to do: 64 KiB, which takes
/// some ten microseconds. The locks before and after cost a hundredth of that.
pub const RUN: usize = 16;
/// Blocks that go from the pool back to the other frames under one hold of the lock.
const MOVED: usize = 64;

/// Where a zeroed frame comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supply {
    /// It was zeroed before.
    Pool,
    /// There are pools, and it was not; what is zeroed now instead is told as [`Now`](Self::Now).
    Miss,
    /// It is zeroed now.
    Now,
}

impl Frames {
    /// Allocates a zeroed frame: from the CPU's list of them; when that is empty, from the pool of the
    /// nearest node that has any frame; and else one of anything, zeroed now. `count` hears which.
    /// `None`: no frame is left, or the limit is reached.
    #[inline(always)]
    pub fn alloc_zeroed(
        &self,
        local: &Local,
        machine: &impl Machine,
        wait: &impl Wait,
        count: impl Fn(Supply),
    ) -> Option<Frame<Zeroed>> {
        let pools = self.pools.load(Ordering::Relaxed) as usize;
        match self.stocks.get(local).clean.pop_unless(pools) {
            Some(number) => {
                count(Supply::Now);
                Some(Frame::<Clean>::new(number, 0).zero(machine))
            }
            None => {
                let number = self.alloc_zeroed_at_length(local, machine, wait, count)?;
                Some(Frame::new(number, 0))
            }
        }
    }

    /// The number of a zeroed frame, where there are pools or the CPU's list of others is empty.
    #[inline(never)]
    fn alloc_zeroed_at_length(
        &self,
        local: &Local,
        machine: &impl Machine,
        wait: &impl Wait,
        count: impl Fn(Supply),
    ) -> Option<FrameNumber> {
        if self.zeroed_pool() != 0 {
            if let Some(frame) = self.alloc_pooled(local, wait) {
                count(Supply::Pool);
                let number = frame.into_number();
                machine.prefetch_frame(number);
                return Some(number);
            }
            count(Supply::Miss);
        }
        let frame = self.alloc(local, wait)?;
        count(Supply::Now);
        Some(frame.zero(machine).into_number())
    }

    /// A frame that was zeroed before, if one is near.
    fn alloc_pooled(&self, local: &Local, wait: &impl Wait) -> Option<Frame<Zeroed>> {
        let zeroed = &self.stocks.get(local).zeroed;
        let number = match zeroed.pop() {
            Some(number) => number,
            None => {
                let mut batch = [FrameNumber(0); BATCH];
                let want = |available| batch_for(available) as u64;
                let got = self.take_zeroed(local, &mut batch, wait, want);
                zeroed.refill(&batch[..got]);
                zeroed.pop()?
            }
        };
        Some(Frame::new(number, 0))
    }

    /// Takes up to `to.len()` single frames from a pool of the nearest node that has any frame, as
    /// many as it has and as `want` makes of what can still be had. Returns how many.
    pub(super) fn take_zeroed(
        &self,
        local: &Local,
        to: &mut [FrameNumber],
        wait: &impl Wait,
        want: impl Fn(u64) -> u64,
    ) -> usize {
        for arena in self.arenas_from(local) {
            if arena.seen.zeroed.load(Ordering::Relaxed) != 0 {
                let (reserved, got) = arena.locked(wait, |lists| {
                    let most = lists.zeroed.free_count().min(to.len() as u64);
                    // Under the lock: as many as are there, so that no other CPU fails needlessly.
                    let reserved = self.reserve(1, |available| want(available).min(most));
                    let run = &mut to[..reserved.unwrap_or(0) as usize];
                    (reserved.unwrap_or(0), lists.zeroed.alloc_bulk(&self.table, run))
                });
                self.release(reserved - got as u64);
                self.table.each(&to[..got]).for_each(FrameMeta::make_single);
                return got;
            }
            if arena.seen.others.load(Ordering::Relaxed) {
                break;
            }
        }
        0
    }

    /// Zeroes a block of free frames, of at most `most` and at most [`RUN`], into the pool of
    /// the nearest arena whose pool has room. Returns how many frames that were; 0 when the pools are
    /// full or off, there is nothing to zero, or memory is short.
    pub fn zero_run(
        &self,
        local: &Local,
        machine: &impl Machine,
        most: usize,
        wait: &impl Wait,
    ) -> usize {
        let limit = if most == 0 { 0 } else { self.zeroed_pool() };
        for arena in self.arenas_from(local) {
            let room =
                arena.part_of(limit).saturating_sub(arena.seen.zeroed.load(Ordering::Relaxed));
            if room == 0 || !arena.seen.others.load(Ordering::Relaxed) {
                continue;
            }
            let most = room.min(most.min(RUN) as u64);
            let Some(block) = self.take_to_zero(arena, most as usize, wait) else { continue };
            let block = block.zero_ahead(machine);
            let order = block.order();
            arena.locked(wait, |lists| lists.zeroed.free(&self.table, block.into_number(), order));
            self.release(1 << order);
            return 1 << order;
        }
        0
    }

    /// Takes a block of at most `most` frames out of an arena's free ones, unless memory is short.
    fn take_to_zero(&self, arena: &Arena, most: usize, wait: &impl Wait) -> Option<Frame<Clean>> {
        // What is out meanwhile cannot be had, as what is on CPUs' lists.
        let most = most.min(batch_for(self.available()));
        arena.locked(wait, |lists| {
            let (number, order) = lists.free.alloc_at_most(&self.table, most)?;
            let frames = 1 << order;
            let want = |available| if self.is_short_at(available, frames) { 0 } else { frames };
            if self.reserve(frames, want).is_none() {
                lists.free.free(&self.table, number, order);
                return None;
            }
            Some(Frame::new(number, order))
        })
    }

    /// How many frames a node's pool may hold; 0: there are no pools.
    #[inline(always)]
    pub fn zeroed_pool(&self) -> u64 {
        self.zeroed_pool.load(Ordering::Relaxed)
    }

    /// Lets each node's pools hold `frames` frames, or as many more as CPUs put there at the same time.
    /// What is above that is no longer zeroed.
    pub fn set_zeroed_pool(&self, frames: u64, wait: &impl Wait) {
        self.zeroed_pool.store(frames, Ordering::Relaxed);
        self.pools.store(if frames == 0 { 0 } else { u64::MAX }, Ordering::Relaxed);
        self.shrink_pools(frames, wait);
    }

    /// Frames in the pools.
    pub fn zeroed_count(&self) -> u64 {
        self.arenas.iter().map(|arena| arena.seen.zeroed.load(Ordering::Relaxed)).sum()
    }

    /// Merges what the pools of a node hold above `limit` frames with the other free frames.
    pub(super) fn shrink_pools(&self, limit: u64, wait: &impl Wait) {
        for arena in &self.arenas {
            let limit = arena.part_of(limit);
            let some = |Lists { free, zeroed }: &mut Lists| {
                for _ in 0..MOVED {
                    let above = zeroed.free_count().saturating_sub(limit).min(1 << MAX_ORDER);
                    if above == 0 {
                        return false;
                    }
                    if let Some((number, order)) = zeroed.alloc_at_most(&self.table, above as usize)
                    {
                        free.free(&self.table, number, order);
                    }
                }
                true
            };
            while arena.locked(wait, some) {}
        }
    }
}

#[cfg(test)]
mod tests;
