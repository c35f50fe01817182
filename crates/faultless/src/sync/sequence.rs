//! A VMA's sequence count, by which speculative readers detect a writer.
//!
//! Readers never write it, and writers never wait for readers here: the two synchronise at *entries*. Let the
//! reader have read an even sequence, and now make an entry busy, while the writer makes the
//! sequence odd and then visits the entry:
//!
//! ```text
//! reader                                   writer
//!   entry: empty -> busy  (SeqCst RMW)       sequence := odd
//!   ---- full fence (in the RMW) ----        ---- full fence (writer_fence) ----
//!   sequence unchanged?                      entry busy?
//! ```
//!
//! Each stores to one location and then loads the other: the store-buffer pattern. With only weaker
//! orders both loads may return old values, and an entry would be installed under a mapping that is
//! gone. With a full fence on *both* sides at least one load sees the other side's store: either
//! the reader finds the sequence changed and puts the entry back, or the writer finds the entry
//! busy, waits for it, and then sees what the reader installed. One fence serves a whole range: the
//! writer makes all its sequences odd, fences once, and then visits all entries.
//!
//! What the writer changes while odd (the fields that the reader copied) comes after its fence, so
//! a reader that has read any of it reads the sequence as changed. A sequence is even again only
//! after the entries have been visited, with another value than before. The sequence of a *detached* VMA (*dead* in the code)
//! stays odd. With a change each nanosecond, 64 bits last for centuries.

use super::atomic::{AtomicU64, Ordering, fence, fence_after_rmw};
use super::mutant::{Mutant, lost};

/// A count of changes: odd while its VMA is write-locked, and always once the VMA is detached.
///
/// *Invariant (one writer):* `begin_write` and `end_write` are called by one CPU at a time, which
/// holds the range lock over what the sequence guards.
#[derive(Debug)]
pub struct Sequence(AtomicU64);

impl Sequence {
    /// A sequence that is not being written.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// A sequence that is not being written.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// The current value, or `None` while it is being written or detached.
    ///
    /// Acquire meets the Release of [`Self::end_write`]: what is read later is at least as new as
    /// the value.
    #[inline(always)]
    pub fn read(&self) -> Option<u64> {
        let value = self.0.load(Ordering::Acquire);
        (value & 1 == 0).then_some(value)
    }

    /// Whether the sequence is still `seen`.
    ///
    /// Precondition: the caller has just done a read-modify-write of `SeqCst` order (the compare-and-swap that
    /// made the entry busy), which this makes a full fence. If the result is true, no writer that began since
    /// has visited the entry before it was busy, and all that was read since [`Self::read`] is
    /// consistent.
    #[inline(always)]
    pub fn unchanged(&self, seen: u64) -> bool {
        fence_after_rmw();
        lost(Mutant::SecondLook) || self.0.load(Ordering::Relaxed) == seen
    }

    /// Makes the sequence odd. [`Self::writer_fence`] must follow before anything that the sequence
    /// guards is visited or changed.
    #[inline]
    pub fn begin_write(&self) {
        // One writer, so load and store; relaxed, because the fence orders it for the whole range.
        let value = self.0.load(Ordering::Relaxed);
        debug_assert!(value & 1 == 0, "written twice, or dead");
        self.0.store(value + 1, Ordering::Relaxed);
    }

    /// The one full fence between making all sequences of a range odd and visiting its entries.
    #[inline]
    pub fn writer_fence() {
        if !lost(Mutant::WriterFence) {
            fence(Ordering::SeqCst);
        }
    }

    /// Makes the sequence even: the change is complete. Must not be called for a detached VMA.
    #[inline]
    pub fn end_write(&self) {
        let value = self.0.load(Ordering::Relaxed);
        debug_assert!(value & 1 == 1, "not being written");
        self.0.store(value + 1, Ordering::Release);
    }
}

impl Default for Sequence {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_write_shows_while_and_after_it_runs() {
        let sequence = Sequence::new();
        let seen = sequence.read().unwrap();
        assert!(sequence.unchanged(seen));
        sequence.begin_write();
        Sequence::writer_fence();
        assert_eq!(sequence.read(), None);
        assert!(!sequence.unchanged(seen));
        sequence.end_write();
        assert!(!sequence.unchanged(seen));
        assert!(sequence.read().is_some_and(|now| now != seen && sequence.unchanged(now)));
    }
}
