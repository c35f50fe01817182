//! The count of taken frames, its limit, and the arenas' credits.
//!
//! The number of frames outside the buddy allocators and pools is counted exactly, and every
//! allocated frame is first *reserved* in this count. So the number of allocated frames never
//! exceeds the [limit](Frames::set_limit), and a CPU with a reservation finds frames on the lists.
//!
//! All CPUs share the word of this count. If each CPU wrote the word for each of its blocks, the
//! first blocks of some hundred CPUs would take longer than the zeroing of their frames. So each
//! arena has a *credit*: a number of frames that the count includes although they are on the free
//! lists. A block that a CPU takes from an arena reduces the arena's credit, and frames that return
//! to the arena increase it. Both happen under the arena's lock, which the CPU holds for the lists
//! anyway. The count changes only if the credit is used up or reaches its maximum, by thousands of
//! frames at once.
//!
//! *Credits make no allocation fail.* A CPU whose reservation is refused
//! [collects](Frames::collect_credits) the credits of all arenas, and tries again. Collecting
//! changes a credit and the count under the arena's lock, so a CPU that collects after another CPU
//! finds the frames in the count. Credits are granted only if memory is plentiful afterwards: at
//! least 1/`PLENTY` of the limit is available. All credits together are at most 1/`CREDITS` of the
//! limit, and small memory has none. Frames in a credit count as not
//! [available](Frames::available).

use super::Frames;
use super::arena::{Arena, Lists};
use super::reserve::BLOCK;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::wait::{Spin, Wait};

/// Memory is short if less than 1/`SHORT` of the limit is available.
pub(super) const SHORT: u64 = 16;
/// Memory is plentiful if at least 1/`PLENTY` of the limit is available.
const PLENTY: u64 = 4;
/// All arenas' credits together are at most 1/`CREDITS` of the limit.
const CREDITS: u64 = 32;
/// The maximum credit of an arena, in frames: two blocks for each of eight CPUs.
const MOST_CREDIT: u64 = 16 << BLOCK;
/// With less than two blocks, in frames, there are no credits.
const LEAST_CREDIT: u64 = 2 << BLOCK;

/// Written when credits and batches move, not when single frames do.
pub(super) struct Counts {
    /// Frames outside the buddy allocators and pools, reserved for a CPU that is about to take
    /// them, or in an arena's credit.
    taken: AtomicU64,
}

impl Counts {
    pub(super) fn new() -> Self {
        Self { taken: AtomicU64::new(0) }
    }
}

impl Frames {
    /// Grants each arena the maximum credit. Memory is unused.
    pub(super) fn grant_credits(&self) {
        let most = self.set_most_credit();
        for arena in &self.arenas {
            arena.locked(&Spin, |lists| lists.credit = most);
        }
        self.counts.0.taken.fetch_add(most * self.arenas.len() as u64, Ordering::Relaxed);
    }

    /// Computes the maximum credit of an arena from the limit, and returns it.
    fn set_most_credit(&self) -> u64 {
        let part = self.limit() / (CREDITS * self.arenas.len().max(1) as u64);
        let most = if part < LEAST_CREDIT { 0 } else { part.min(MOST_CREDIT) };
        self.most_credit.store(most, Ordering::Relaxed);
        most
    }

    /// Returns the number of frames on the buddy allocators' lists and in the pools. As in Linux's
    /// `nr_free_pages`, frames on the CPUs' lists are not included; frames in the reserves are not
    /// included either. The count and the credits are each read at a different time.
    pub fn free_count(&self) -> u64 {
        let counted = self.total - self.counts.0.taken.load(Ordering::Relaxed);
        let credits = self.arenas.iter().map(|arena| arena.seen.credit.load(Ordering::Relaxed));
        (counted + credits.sum::<u64>()).min(self.total)
    }

    /// Returns the maximum number of frames outside the buddy allocators and pools.
    #[inline]
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets the maximum number of frames outside the buddy allocators and pools, including frames
    /// on the CPUs' lists, to `frames`. If more are already outside, allocation fails until enough
    /// have been freed.
    pub fn set_limit(&self, frames: u64) {
        self.limit.store(frames.min(self.total), Ordering::Relaxed);
        self.set_most_credit();
        // Also from an arena in which a CPU is granting a credit under the old limit. An arena's
        // lock is a leaf: its holder does not wait.
        for arena in &self.arenas {
            self.collect_credit(arena, &Spin);
        }
        self.note_short(self.available());
    }

    /// Returns the number of available frames.
    pub fn available(&self) -> u64 {
        self.limit().saturating_sub(self.counts.0.taken.load(Ordering::Relaxed))
    }

    /// Returns whether memory would be short with `frames` of the `available` frames taken: if so,
    /// optional allocations fail, in favour of urgent ones.
    pub(super) fn is_short_at(&self, available: u64, frames: u64) -> bool {
        available < frames + self.limit() / SHORT
    }

    /// Returns whether memory with `available` available frames is plentiful.
    fn is_plentiful(&self, available: u64) -> bool {
        available >= self.limit() / PLENTY
    }

    /// Returns whether `frames` frames can be taken without making memory short.
    pub fn can_spare(&self, frames: u64) -> bool {
        !self.is_short_at(self.available(), frames)
    }

    /// Returns the number of frames that background reclaim keeps available: 1/8 of the limit.
    pub fn goal(&self) -> u64 {
        2 * self.limit() / SHORT
    }

    /// Returns how many frames are missing to twice the threshold at which memory is short.
    pub fn missing(&self) -> u64 {
        self.goal().saturating_sub(self.available())
    }

    /// Returns whether memory is short: less than 1/16 of the limit is available.
    pub fn is_short(&self) -> bool {
        self.is_short_at(self.available(), 0)
    }

    /// Returns whether memory is so short that background reclaim is late: half of the threshold of
    /// [`is_short`](Self::is_short).
    pub fn is_scarce(&self) -> bool {
        self.available() < self.limit() / (2 * SHORT)
    }

    /// Reserves as many frames as `want` returns, limited to the available frames; `None` if fewer
    /// than `least` can be reserved. `Acquire` pairs with [`release`](Self::release): the released
    /// frames are on the free lists.
    pub(super) fn reserve(&self, least: u64, want: impl Fn(u64) -> u64) -> Option<u64> {
        let Counts { taken } = &self.counts.0;
        let mut old = taken.load(Ordering::Relaxed);
        loop {
            let available = self.limit().saturating_sub(old);
            let granted = want(available).min(available);
            if granted < least {
                return None;
            }
            let new = old + granted;
            match taken.compare_exchange_weak(old, new, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    self.note_short(available - granted);
                    return Some(granted);
                }
                Err(now) => old = now,
            }
        }
    }

    /// Reserves like [`reserve`](Self::reserve). If the reservation is refused, collects the
    /// credits, and tries again. The caller holds no arena's lock.
    pub(super) fn reserve_or_collect(
        &self,
        least: u64,
        want: impl Fn(u64) -> u64,
        wait: &impl Wait,
    ) -> Option<u64> {
        let mut reserved = self.reserve(least, &want);
        let mut collected = self.most_credit.load(Ordering::Relaxed) != 0;
        while reserved.is_none() && collected {
            collected = self.collect_credits(wait);
            // Also if another CPU has collected the credits meanwhile.
            reserved = self.reserve(least, &want);
        }
        reserved
    }

    /// Reserves a block of `frames` frames, which the caller has taken from the arena with these
    /// lists: in the arena's credit, or else in the count, together with a new credit. An
    /// `optional` block is refused if memory is short, or would become short.
    pub(super) fn reserve_block(&self, lists: &mut Lists, frames: u64, optional: bool) -> bool {
        if lists.credit >= frames && !(optional && self.seems_short()) {
            lists.credit -= frames;
            return true;
        }
        let half = self.most_credit.load(Ordering::Relaxed) / 2;
        // The old credit is smaller than the block, so the sum does not exceed the maximum.
        let credit = if frames <= half { half } else { 0 };
        let want = |available: u64| {
            let spare = available / 16 >= frames && !self.is_short_at(available, frames);
            if credit != 0 && self.is_plentiful(available.saturating_sub(frames + credit)) {
                frames + credit
            } else if spare || !optional {
                frames
            } else {
                0
            }
        };
        let Some(reserved) = self.reserve(frames, want) else { return false };
        lists.credit += reserved - frames;
        true
    }

    /// Ends the reservation of `frames` frames, which are back on the free lists.
    pub(super) fn release(&self, frames: u64) {
        if frames == 0 {
            return;
        }
        let old = self.counts.0.taken.fetch_sub(frames, Ordering::Release);
        self.note_short(self.limit().saturating_sub(old - frames));
    }

    /// Ends the reservation of `frames` frames, which are back on these lists of an arena: adds the
    /// frames to the arena's credit. Half of a full credit returns to the count, and all of the
    /// credit if memory is not plentiful.
    pub(super) fn release_to(&self, lists: &mut Lists, frames: u64) {
        let most = self.most_credit.load(Ordering::Relaxed);
        let credit = lists.credit + frames;
        let plentiful = most != 0 && self.is_plentiful(self.available());
        lists.credit = match plentiful {
            true if credit <= most => credit,
            true => most / 2,
            false => 0,
        };
        self.release(credit - lists.credit);
    }

    /// Returns the credits of all arenas to the count. Returns whether an arena had a credit. The
    /// caller holds no arena's lock.
    pub(super) fn collect_credits(&self, wait: &impl Wait) -> bool {
        // Acquire synchronises with the Release of a CPU that has collected the credit: the frames
        // are in the count.
        let seems_full = |arena: &&Arena| arena.seen.credit.load(Ordering::Acquire) != 0;
        let mut found = false;
        for arena in self.arenas.iter().filter(seems_full) {
            found |= self.collect_credit(arena, wait);
        }
        found
    }

    /// Returns the credit of an arena to the count. Returns whether there was one.
    fn collect_credit(&self, arena: &Arena, wait: &impl Wait) -> bool {
        arena.locked(wait, |lists| {
            let credit = core::mem::take(&mut lists.credit);
            self.release(credit);
            credit != 0
        })
    }

    /// Records whether memory is short with `available` frames available.
    #[inline]
    fn note_short(&self, available: u64) {
        let short = self.is_short_at(available, 0);
        if self.short.load(Ordering::Relaxed) != short {
            self.short.store(short, Ordering::Relaxed);
        }
    }

    /// Returns whether memory is short, as far as this CPU knows without reading lines written by
    /// all CPUs.
    #[inline]
    pub(crate) fn seems_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
