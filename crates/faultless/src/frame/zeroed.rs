//! Pre-zeroed frames.
//!
//! In addition to its other free frames, each [arena](super::arena) keeps a *pool* of zeroed
//! frames, under the same lock: a second [buddy allocator](super::buddy), whose blocks merge only
//! with each other. Background zeroing takes blocks from the first allocator, zeroes them, and puts
//! them into the second, a [run](RUN) at a time ([`Frames::zero_run`]). A CPU that needs zeroed
//! frames moves a batch of them to its own list ([`Frames::alloc_zeroed`]).
//!
//! *A pool makes no allocation fail.* Frames in a pool are free: they are not counted as taken, a
//! refill of a CPU's list takes them if the node has no others, blocks are split from the pool, and
//! the pool is merged back into the other free frames if no block is found otherwise. Only the run
//! that a CPU is zeroing counts as taken, like the frames on a CPU's list. No run begins while
//! memory is [short](Frames::is_short).
//!
//! *Pre-zeroed frames are not in the caches.* They were zeroed by non-temporal stores, or long ago.
//! So the beginning of a frame taken from a pool is prefetched at once, while its entry is made.
//!
//! *The nearest node first.* If the nearest node with free frames has no pre-zeroed frame, a fault
//! zeroes one of its frames instead of taking a pre-zeroed frame of a more distant node: this would
//! save the zeroing once, but cost the distance while the page is mapped.

use super::arena::{Arena, Lists};
use super::percpu::{BATCH, batch_for};
use super::{Clean, Frame, FrameMeta, Frames, MAX_ORDER, Zeroed};
use crate::addr::FrameNumber;
use crate::machine::Machine;
use crate::sync::atomic::Ordering;
use crate::sync::percpu::Local;
use crate::sync::wait::Wait;

/// The maximum number of frames zeroed between two checks for other work: 64 KiB, which takes about
/// ten microseconds. The locks before and after cost 1/100 of this time.
pub const RUN: usize = 16;
/// Blocks moved from the pool to the other free frames under one acquisition of the lock.
const MOVED: usize = 64;

/// The source of a zeroed frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supply {
    /// The frame was pre-zeroed.
    Pool,
    /// There are pools, but no pre-zeroed frame was found; the zeroing is then counted as
    /// [`Now`](Self::Now).
    Miss,
    /// The frame is zeroed now.
    Now,
}

impl Frames {
    /// Allocates a zeroed frame: from the CPU's list of zeroed frames; if it is empty, from the
    /// pool of the nearest node with any free frame; else any frame, zeroed now. `count` is called
    /// with the source. `None`: no frame is free, or the limit is reached.
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

    /// Returns the number of a zeroed frame, if there are pools or the CPU's list of other frames
    /// is empty.
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

    /// Returns a pre-zeroed frame, if one is near.
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

    /// Takes up to `to.len()` single frames from a pool of the nearest node with any free frame,
    /// limited by the pool and by `want` of the available frames. Returns their number.
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
                    // Reserved under the lock, and not more than the pool contains, so that no
                    // other CPU's reservation fails needlessly.
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

    /// Zeroes a block of at most `most` and at most [`RUN`] free frames into the pool of the
    /// nearest arena whose pool has room. Returns the number of frames; 0 if the pools are full or
    /// off, no frame can be zeroed, or memory is short.
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

    /// Takes a block of at most `most` frames from an arena's free frames, unless memory is short.
    fn take_to_zero(&self, arena: &Arena, most: usize, wait: &impl Wait) -> Option<Frame<Clean>> {
        // Frames being zeroed are not available to other CPUs, like frames on CPUs' lists.
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

    /// Returns the maximum number of frames of a node's pool; 0: there are no pools.
    #[inline(always)]
    pub fn zeroed_pool(&self) -> u64 {
        self.zeroed_pool.load(Ordering::Relaxed)
    }

    /// Sets the maximum of each node's pools to `frames`; concurrent additions by CPUs may exceed
    /// it. Frames above the maximum are no longer treated as zeroed.
    pub fn set_zeroed_pool(&self, frames: u64, wait: &impl Wait) {
        self.zeroed_pool.store(frames, Ordering::Relaxed);
        self.pools.store(if frames == 0 { 0 } else { u64::MAX }, Ordering::Relaxed);
        self.shrink_pools(frames, wait);
    }

    /// Returns the number of frames in the pools.
    pub fn zeroed_count(&self) -> u64 {
        self.arenas.iter().map(|arena| arena.seen.zeroed.load(Ordering::Relaxed)).sum()
    }

    /// Merges the frames of a node's pools above `limit` with the other free frames.
    pub(super) fn shrink_pools(&self, limit: u64, wait: &impl Wait) {
        for arena in &self.arenas {
            let limit = arena.part_of(limit);
            let some = |Lists { free, zeroed, .. }: &mut Lists| {
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
