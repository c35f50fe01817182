//! The entry protocol: each page-table entry is its own lock.
//!
//! No other lock guards an entry. Three parties change entries:
//!
//! **A fault** holds no lock on the address space. The fault has found a VMA, read its sequence
//! (even), read the entry, and prepared a frame. Then:
//!
//! 1. The fault *takes* the entry: a compare-and-swap from the value read to *busy* ([`take`]), or,
//!    if the translation may stay usable, to the same value with the lock bit ([`pin`]).
//! 2. The fault reads the VMA's sequence again. If the sequence is unchanged, it *commits* the
//!    final value. Otherwise it *reverts*, which restores the old value.
//!
//! **A writer** (munmap, mprotect, mremap, fork) holds the range lock. The writer makes the
//! sequences of the VMAs odd, issues one full fence, and then *replaces* each entry: it waits until
//! no CPU holds the entry, and swaps in the new value ([`wait_and_replace`]).
//!
//! No fault installs a translation unseen by a writer. There is a full barrier between the fault's
//! compare-and-swap and its second read of the sequence, and another between the writer's odd
//! sequence and its read of the entry. At least one of the two reads sees the other side's store.
//! If the fault sees the odd sequence it reverts; if the writer sees the busy entry it waits, and
//! then finds the value committed by the fault. A fault that takes an entry after the writer has
//! processed it reverts for the same reason: the sequence of its VMA has changed or is permanently
//! odd (detached).
//!
//! **Hardware** sets accessed and dirty bits of present entries at any moment. So a present entry
//! changes only by compare-and-swap, and a failed swap is retried.
//!
//! **A discard** (`MADV_DONTNEED`, a truncation) changes entries but no VMA. No sequence changes,
//! so faults on other pages proceed, and a fault on the same page takes effect before or after the
//! discard. The discard *holds* each entry, busy, from its removal to the end of the flush
//! ([`hold`], [`release`]). So a fault that finds the entry empty comes after the flush, and no CPU
//! uses the old page while another CPU uses a new page. If two discards overlap on a page, neither
//! returns before the page is flushed.
//!
//! A CPU may hold several entries at once, but must not wait for a further entry meanwhile: the CPU
//! skips an entry if the first try fails ([`take_some`]), or first releases the held entries.
//!
//! A CPU that holds a *pinned* (present) entry never waits for another CPU. A CPU that holds a
//! *busy* entry may wait for a flush: wait loops serve shootdown requests, and the MMU cannot use
//! the entry.

use super::format::Entry;
use super::node;
use crate::machine::CpuId;
use crate::sync::atomic::{AtomicU64, Ordering, fence_after_rmw};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, BusyEntry, Mark, PinnedEntry};
use crate::sync::wait::Wait;
use core::ops::Range;

/// A *busy* entry that this CPU holds. Dropping the value would leave the entry busy permanently;
/// call [`commit`](Taken::commit) or [`revert`](Taken::revert).
#[must_use = "a taken entry must be committed or reverted"]
#[derive(Debug)]
pub struct Taken<'a> {
    slot: &'a AtomicU64,
    before: Entry,
    #[expect(dead_code, reason = "the drop removes the mark")]
    mark: Mark<'a>,
}

/// A present entry held by this CPU and usable by the MMU. To be committed or reverted, like
/// [`Taken`].
#[must_use = "a pinned entry must be committed or reverted"]
#[derive(Debug)]
pub struct Pinned<'a> {
    slot: &'a AtomicU64,
    before: Entry,
    #[expect(dead_code, reason = "the drop removes the mark")]
    mark: Mark<'a>,
}

/// Takes an entry by compare-and-swap, followed by the full barrier before the later read of a
/// sequence.
#[inline(always)]
fn swap(slot: &AtomicU64, seen: Entry, held: Entry) -> Result<(), Entry> {
    slot.compare_exchange(seen.0, held.0, Ordering::SeqCst, Ordering::Acquire).map_err(Entry)?;
    fence_after_rmw();
    Ok(())
}

/// Takes the entry for the CPU that waits as `by` does: makes the entry *busy*, if the value is
/// still `seen` (which is not locked).
///
/// # Errors
/// The current value of the entry, if different from `seen`.
#[inline(always)]
pub fn take<'a>(slot: &'a AtomicU64, seen: Entry, by: &'a impl Wait) -> Result<Taken<'a>, Entry> {
    swap(slot, seen, Entry::BUSY)?;
    Ok(Taken { slot, before: seen, mark: order::hold::<BusyEntry>(by) })
}

/// Takes a present entry for the CPU that waits as `by` does, and keeps the entry usable for the
/// MMU: `seen` with the lock bit.
///
/// # Errors
/// The current value of the entry, if different from `seen`.
#[inline(always)]
pub fn pin<'a>(slot: &'a AtomicU64, seen: Entry, by: &'a impl Wait) -> Result<Pinned<'a>, Entry> {
    swap(slot, seen, seen.locked())?;
    Ok(Pinned { slot, before: seen, mark: order::hold::<PinnedEntry>(by) })
}

/// The maximum number of entries held at once.
pub const MOST_TAKEN: usize = 64;

/// Entries of one table at equal distances. Place n is the nth.
#[derive(Clone, Copy, Debug)]
pub struct Slots<'a> {
    slots: &'a [AtomicU64],
    stride: usize,
}

impl<'a> Slots<'a> {
    /// Returns all of `slots`.
    #[inline]
    pub const fn all(slots: &'a [AtomicU64]) -> Self {
        Self::every(1, slots)
    }

    /// Returns each `stride`th of `slots`, beginning with the first.
    #[inline]
    pub const fn every(stride: usize, slots: &'a [AtomicU64]) -> Self {
        Self { slots, stride }
    }

    /// Returns the slot at place `at`.
    #[inline]
    pub fn get(self, at: usize) -> Option<&'a AtomicU64> {
        self.slots.get(at * self.stride)
    }

    /// Returns the places of `mask` whose entries are empty or map the same page as `page`,
    /// accessed or not. Each entry is read once, because CPUs change entries concurrently.
    #[inline(always)]
    pub fn fitting(self, page: Entry, mask: u64) -> u64 {
        if self.stride == 1 && node::are_none(self.slots) {
            return mask & self.places();
        }
        let fits = |at: &usize| self.get(*at).is_some_and(|slot| node::load(slot).fits(page));
        places(mask).filter(fits).fold(0, |fitting, at| fitting | 1 << at)
    }

    /// Returns the mask of all places.
    #[inline(always)]
    fn places(self) -> u64 {
        let places = if self.stride == 1 {
            self.slots.len()
        } else {
            self.slots.len().div_ceil(self.stride)
        };
        lowest(places)
    }

    /// Returns the slots at the places of `mask`, upwards, in runs of contiguous entries, each with
    /// the place of its first.
    #[inline(always)]
    fn runs(self, mut mask: u64) -> impl Iterator<Item = (usize, &'a [AtomicU64])> {
        core::iter::from_fn(move || {
            let first = (mask != 0).then(|| mask.trailing_zeros())?;
            let lowest = mask & mask.wrapping_neg();
            let end = if self.stride == 1 {
                // The carry moves to the place after the run.
                let behind = mask.wrapping_add(lowest);
                mask &= behind;
                behind.trailing_zeros()
            } else {
                mask ^= lowest;
                first + 1
            };
            let start = first as usize * self.stride;
            let run = self.slots.get(start..start + (end - first) as usize)?;
            Some((first as usize, run))
        })
    }
}

/// Some entries of [`Slots`], all *busy* and held by this CPU. They are released together, by
/// [`commit`](TakenSome::commit) or [`revert`](TakenSome::revert).
#[must_use = "taken entries must be committed or reverted"]
#[derive(Debug)]
pub struct TakenSome<'a> {
    slots: Slots<'a>,
    held: u64,
    /// The places of held entries that mapped `page`, and the places among them that had been
    /// accessed.
    present: u64,
    accessed: u64,
    page: Entry,
    /// One mark for all entries.
    mark: Mark<'a>,
}

/// Takes the entries of `slots` which are `wanted` (bit n is place n, so at most [`MOST_TAKEN`])
/// and empty or map the same page as `page`, accessed or not ([`Entry::NONE`] for empty entries
/// only), for the CPU that waits as `by` does. Skips entries that other CPUs change first, and
/// waits for no entry.
#[inline(always)]
pub fn take_some<'a>(
    slots: Slots<'a>,
    page: Entry,
    wanted: u64,
    by: &'a impl Wait,
) -> TakenSome<'a> {
    let each = places(wanted).map_while(|at| Some((at, core::slice::from_ref(slots.get(at)?))));
    take_each(slots, page, each, by)
}

/// As [`take_some`], but cheaper if many of the entries are contiguous.
#[inline(always)]
pub fn take_runs<'a>(
    slots: Slots<'a>,
    page: Entry,
    wanted: u64,
    by: &'a impl Wait,
) -> TakenSome<'a> {
    take_each(slots, page, slots.runs(wanted & slots.places()), by)
}

/// Takes the entries of `runs`, each with the place of its first.
#[inline(always)]
fn take_each<'a>(
    slots: Slots<'a>,
    page: Entry,
    runs: impl Iterator<Item = (usize, &'a [AtomicU64])>,
    by: &'a impl Wait,
) -> TakenSome<'a> {
    let take = |slot: &AtomicU64, seen| {
        lost(Mutant::BatchTakesEach) || swap(slot, seen, Entry::BUSY).is_ok()
    };
    let (mut held, mut present, mut accessed) = (0, 0, 0);
    for (first, run) in runs {
        // Start with all entries of the run, and clear the bit of each failure.
        held |= lowest(run.len()) << first;
        for (n, slot) in run.iter().enumerate() {
            let seen = Entry(slot.load(Ordering::Relaxed));
            if seen.is_none() && take(slot, seen) {
                continue;
            }
            let bit = 1 << (first + n);
            if !seen.is_none() && seen.fits(page) && take(slot, seen) {
                present |= bit;
                accessed |= if seen.is_accessed() { bit } else { 0 };
            } else {
                held &= !bit;
            }
        }
    }
    let mark = if held != 0 { order::hold::<BusyEntry>(by) } else { Mark::none() };
    TakenSome { slots, held, present, accessed, page, mark }
}

/// Returns the places of the bits in `mask`, upwards.
#[inline(always)]
pub fn places(mut mask: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let at = (mask != 0).then(|| mask.trailing_zeros() as usize)?;
        mask &= mask - 1;
        Some(at)
    })
}

/// Returns a mask of the lowest `n` bits.
#[inline(always)]
pub(crate) const fn lowest(n: usize) -> u64 {
    if n < 64 { (1 << n) - 1 } else { !0 }
}

impl TakenSome<'_> {
    /// Returns whether the entry at place `at` was taken.
    #[inline]
    pub const fn holds(&self, at: usize) -> bool {
        self.held >> at & 1 != 0
    }

    /// Returns the places of the entries taken: bit n is place n.
    #[inline]
    pub const fn held(&self) -> u64 {
        self.held
    }

    /// Returns the range that covers the places of the taken entries that were present.
    #[inline]
    pub const fn present(&self) -> Option<Range<usize>> {
        if self.present == 0 {
            return None;
        }
        let behind = u64::BITS - self.present.leading_zeros();
        Some(self.present.trailing_zeros() as usize..behind as usize)
    }

    /// Installs `entry` at place `at`, which was taken, and releases this entry before the others.
    #[inline(always)]
    pub fn commit_one(&mut self, at: usize, entry: Entry) {
        debug_assert!(self.holds(at));
        self.held &= !(1 << at);
        if let Some(slot) = self.slots.get(at) {
            Taken { slot, before: Entry::NONE, mark: Mark::none() }.commit(entry);
        }
    }

    /// Installs in each entry the value that `entry` returns for its place, and releases it.
    #[inline]
    pub fn commit(self, mut entry: impl FnMut(usize) -> Entry) {
        let Self { slots, held, mark: _mark, .. } = self;
        for at in places(held) {
            if let Some(slot) = slots.get(at) {
                Taken { slot, before: Entry::NONE, mark: Mark::none() }.commit(entry(at));
            }
        }
    }

    /// As [`commit`](Self::commit), by runs of contiguous entries: `entries` receives the place of
    /// the first entry of a run and the length of the run. If it returns too few values, the last
    /// entries become empty again.
    #[inline(always)]
    pub fn commit_runs<E>(self, mut entries: impl FnMut(usize, usize) -> E)
    where
        E: ExactSizeIterator<Item = Entry>,
    {
        let Self { slots, held, mark: _mark, .. } = self;
        let commit = |slot, entry| {
            Taken { slot, before: Entry::NONE, mark: Mark::none() }.commit(entry);
        };
        for (first, run) in slots.runs(held) {
            let entries = entries(first, run.len());
            let (told, others) = run.split_at(entries.len().min(run.len()));
            told.iter().zip(entries).for_each(|(slot, entry)| commit(slot, entry));
            others.iter().for_each(|slot| commit(slot, Entry::NONE));
        }
    }

    /// Restores the old values of all entries.
    pub fn revert(self) {
        let Self { present, accessed, page, .. } = self;
        self.commit(|at| match (present >> at & 1, accessed >> at & 1) {
            (0, _) => Entry::NONE,
            (_, 0) => page.unused(),
            _ => page,
        });
    }
}

/// Takes the entry for `by`, together with other entries that [`release`] empties: makes the entry
/// *busy*, if the value is still `seen` (which is not locked).
///
/// # Errors
/// The current value of the entry, if different from `seen`.
#[inline(always)]
pub fn hold(slot: &AtomicU64, seen: Entry, by: CpuId) -> Result<(), Entry> {
    let (order, failed) = (Ordering::AcqRel, Ordering::Acquire);
    let swapped = slot.compare_exchange(seen.0, Entry::busy_of(by).0, order, failed);
    swapped.map(|_| ()).map_err(Entry)
}

/// Empties the entries of `slots` that `by` [holds](hold).
#[inline]
pub fn release(slots: &[AtomicU64], by: CpuId) {
    for slot in slots {
        if slot.load(Ordering::Relaxed) == Entry::busy_of(by).0 {
            slot.store(Entry::NONE.0, Ordering::Release);
        }
    }
}

impl Taken<'_> {
    /// Installs `entry` and releases the slot. No other CPU changes a busy entry, nor does
    /// hardware, so a store is sufficient.
    #[inline(always)]
    pub fn commit(self, entry: Entry) {
        debug_assert_eq!(self.slot.load(Ordering::Relaxed), Entry::BUSY.0);
        self.slot.store(entry.0, Ordering::Release);
    }

    /// Restores the old value and releases the entry.
    #[inline(always)]
    pub fn revert(self) {
        let before = self.before;
        self.commit(before);
    }
}

impl Pinned<'_> {
    /// Installs `entry`, of the same frame, and releases the entry. Accessed and dirty bits set by
    /// hardware before the swap are kept.
    #[inline]
    pub fn commit(self, entry: Entry) {
        let mut now = self.slot.load(Ordering::Relaxed);
        loop {
            let marked = entry.with_marks_of(Entry(now), self.before);
            let last = if lost(Mutant::KeepGained) { entry } else { marked };
            match self.slot.compare_exchange_weak(now, last.0, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(changed) => now = changed,
            }
        }
    }

    /// Restores the old value, with the bits added by hardware, and releases the entry.
    #[inline]
    pub fn revert(self) {
        let before = self.before;
        self.commit(before);
    }
}

/// Changes one entry on behalf of a writer: waits until no CPU holds the entry, then replaces its
/// value `e` by `change(e)`. Returns the old and the new value. `change` is called again if
/// hardware or a late fault changes the entry in between.
#[inline]
pub fn wait_and_replace(
    slot: &AtomicU64,
    wait: &impl Wait,
    change: impl FnMut(Entry) -> Entry,
) -> (Entry, Entry) {
    wait_and_replace_from(slot, Entry(slot.load(Ordering::Acquire)), wait, change)
}

/// [`wait_and_replace`] of an entry whose last known value is `now`, loaded with acquire after the
/// writer's fence.
#[inline(always)]
pub fn wait_and_replace_from(
    slot: &AtomicU64,
    mut now: Entry,
    wait: &impl Wait,
    mut change: impl FnMut(Entry) -> Entry,
) -> (Entry, Entry) {
    order::before::<BusyEntry>(wait);
    loop {
        if now.is_locked() && !lost(Mutant::ReplaceWaits) {
            now = await_holder(slot, wait);
            continue;
        }
        let next = change(now);
        if next == now {
            return (now, next);
        }
        match slot.compare_exchange(now.0, next.0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return (now, next),
            Err(changed) => now = Entry(changed),
        }
    }
}

/// Tries [`wait_and_replace`] once: replaces the entry's value `seen`, which is not locked, by
/// `next`. If the two are equal, only checks that the value is still `seen`.
///
/// # Errors
/// The current value of the entry, if different from `seen`.
#[inline(always)]
pub fn try_replace(slot: &AtomicU64, seen: Entry, next: Entry) -> Result<(), Entry> {
    if next == seen {
        let now = Entry(slot.load(Ordering::Acquire));
        return if now == seen || lost(Mutant::ForkLooksAgain) { Ok(()) } else { Err(now) };
    }
    let swapped = slot.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Acquire);
    swapped.map(|_| ()).map_err(Entry)
}

/// Waits until no CPU holds the entry, and returns its value.
#[inline(always)]
pub fn wait_and_load(slot: &AtomicU64, wait: &impl Wait) -> Entry {
    order::before::<BusyEntry>(wait);
    let now = Entry(slot.load(Ordering::Acquire));
    if now.is_locked() { await_holder(slot, wait) } else { now }
}

/// The wait loop, out of line.
#[cold]
#[inline(never)]
fn await_holder(slot: &AtomicU64, wait: &impl Wait) -> Entry {
    let mut looks = 0;
    loop {
        wait.wait(looks);
        looks += 1;
        let now = Entry(slot.load(Ordering::Acquire));
        if !now.is_locked() {
            return now;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::FrameNumber;
    use crate::sync::wait::Spin;

    #[test]
    fn a_revert_restores_the_old_value() {
        let slot = AtomicU64::new(Entry::leaf(FrameNumber(7)).0);
        let seen = Entry(slot.load(Ordering::Relaxed));
        let held = take(&slot, seen, &Spin).unwrap();
        assert_eq!(slot.load(Ordering::Relaxed), Entry::BUSY.0);
        assert_eq!(take(&slot, seen, &Spin).unwrap_err(), Entry::BUSY);
        held.revert();
        assert_eq!(slot.load(Ordering::Relaxed), seen.0);
    }

    #[test]
    fn bits_that_hardware_sets_on_a_pinned_entry_survive() {
        let seen = Entry::leaf(FrameNumber(7)).clean();
        let slot = AtomicU64::new(seen.0);
        let held = pin(&slot, seen, &Spin).unwrap();
        let accessed = Entry::leaf(FrameNumber(7)).0 & !seen.0;
        slot.fetch_or(accessed, Ordering::Relaxed);
        held.commit(seen.writable_dirty());
        let now = Entry(slot.load(Ordering::Relaxed));
        assert!(now.is_accessed() && now.is_writable() && !now.is_locked());
    }

    #[test]
    fn a_run_takes_only_wanted_fitting_entries() {
        let there = Entry::leaf(FrameNumber(9)).0;
        let slots = [0, there, 0, Entry::BUSY.0, 0].map(AtomicU64::new);
        let now = || slots.each_ref().map(|slot| slot.load(Ordering::Relaxed));
        let before = now();
        let held = take_some(Slots::all(&slots), Entry::NONE, !(1 << 2), &Spin);
        assert_eq!([0, 1, 2, 3, 4].map(|at| held.holds(at)), [true, false, false, false, true]);
        let busy = Entry::BUSY.0;
        assert_eq!(now(), [busy, there, 0, busy, busy]);
        held.revert();
        assert_eq!(now(), before);
        let leaf = Entry::leaf(FrameNumber(7));
        take_some(Slots::all(&slots), Entry::NONE, !0, &Spin)
            .commit(|at| if at == 0 { leaf } else { Entry::NONE });
        assert_eq!(now(), [leaf.0, there, 0, busy, 0]);
        // Entries that map the page may be taken, too, and are restored, accessed or not.
        for pages in [[leaf, leaf.unused()], [leaf.unused(), leaf]] {
            let [first, second] = pages.map(|page| page.0);
            slots.iter().zip([0, there, first, busy, second]).for_each(|(slot, value)| {
                slot.store(value, Ordering::Relaxed);
            });
            let before = now();
            let held = take_some(Slots::all(&slots), leaf, !0, &Spin);
            assert_eq!((held.held(), held.present()), (0b10101, Some(2..5)));
            assert_eq!(now(), [busy, there, busy, busy, busy]);
            held.revert();
            assert_eq!(now(), before);
        }
    }

    #[test]
    fn runs_are_taken_and_committed_like_single_entries() {
        let there = Entry::leaf(FrameNumber(9)).0;
        let page = Entry::leaf(FrameNumber(7));
        // Runs at both ends of a full mask, of one entry, and next to entries that are not taken.
        let wanted = 0xc000_0000_0003_7a01_u64 | 1 << 40;
        let entries: [_; MOST_TAKEN] = core::array::from_fn(|at| match at {
            9 | 40 => there,
            12 => page.unused().0,
            62 => page.0,
            13 => Entry::BUSY.0,
            _ => 0,
        });
        let held = wanted & !(1 << 9 | 1 << 40 | 1 << 13);
        for length in [MOST_TAKEN, 63, 17] {
            let slots = entries.map(AtomicU64::new);
            let now = || slots.each_ref().map(|slot| slot.load(Ordering::Relaxed));
            let some = Slots::all(&slots[..length]);
            let held = held & lowest(length);
            let taken = take_runs(some, page, wanted, &Spin);
            assert_eq!(taken.held(), held, "{held:#x}");
            let last = if length > 62 { 62 } else { 12 };
            assert_eq!(taken.present(), Some(12..last + 1));
            let is_held = |at: usize| held >> at & 1 == 1;
            let busy = |at: usize| if is_held(at) { Entry::BUSY.0 } else { entries[at] };
            assert_eq!(now(), core::array::from_fn(busy));
            taken.revert();
            assert_eq!(now(), entries);
            let mut taken = take_runs(some, page, wanted, &Spin);
            let leaf = |at: usize| Entry::leaf(FrameNumber(100 + at as u32));
            taken.commit_one(0, leaf(0));
            // The last entry of each run gets no value, except in runs of one entry.
            let mut ends = 0u64;
            taken.commit_runs(|first, count| {
                let told = count.max(2) - 1;
                ends |= if count > 1 { 1 << (first + told) } else { 0 };
                (first..first + told.min(count)).map(leaf).collect::<std::vec::Vec<_>>().into_iter()
            });
            assert_eq!(ends.count_ones(), (held & !1 & held << 1 & !(held >> 1)).count_ones());
            let after = |at: usize| match (is_held(at), ends >> at & 1) {
                (false, _) => entries[at],
                (_, 0) => leaf(at).0,
                _ => 0,
            };
            assert_eq!(now(), core::array::from_fn(after));
        }
    }

    #[test]
    fn replacing_an_entry_returns_its_old_value() {
        let slot = AtomicU64::new(Entry::leaf(FrameNumber(9)).0);
        let (old, new) = wait_and_replace(&slot, &Spin, |_| Entry::NONE);
        assert_eq!(old.frame(), FrameNumber(9));
        assert!(new.is_none() && wait_and_load(&slot, &Spin).is_none());
    }
}
