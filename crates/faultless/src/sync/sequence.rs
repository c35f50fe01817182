//! A VMA's sequence count, which lets speculative readers detect a writer.
//!
//! Readers never write the sequence, and writers never wait for readers here: the two synchronise
//! at *entries*. Suppose the reader has read an even sequence, and now makes an entry busy, while
//! the writer makes the sequence odd and then visits the entry:
//!
//! ```text
//! reader                                   writer
//!   entry: empty -> busy  (SeqCst RMW)       sequence := odd
//!   ---- full fence (in the RMW) ----        ---- full fence (writer_fence) ----
//!   sequence unchanged?                      entry busy?
//! ```
//!
//! Each stores to one location and then loads the other: the store-buffer pattern. With weaker
//! orders both loads may return old values, and an entry would be installed in a removed mapping.
//! With a full fence on *both* sides at least one load sees the other side's store: either the
//! reader finds the sequence changed and restores the entry, or the writer finds the entry busy,
//! waits for it, and then sees the entry installed by the reader. One fence covers a whole range:
//! the writer makes all sequences odd, issues the fence once, and then visits all entries.
//!
//! The writer's changes while the sequence is odd (to the fields copied by the reader) come after
//! its fence, so a reader that has read any changed field finds the sequence changed. The sequence
//! becomes even again only after the entries have been visited, with a new value. The sequence of a
//! *detached* VMA (*dead* in the code) stays odd until the memory is [reused](crate::space) for
//! another VMA, and then has a new value, too. With one change each nanosecond, 64 bits last for
//! centuries.

use super::atomic::{AtomicU64, Ordering, fence, fence_after_rmw};
use super::mutant::{Mutant, lost};

/// A count of changes: odd while the VMA is write-locked, and from the end of the VMA until its
/// memory is reused.
///
/// *Invariant (one writer):* `begin_write` and `end_write` are called by one CPU at a time, which
/// holds the range lock over the range protected by the sequence.
#[derive(Debug)]
pub struct Sequence(AtomicU64);

impl Sequence {
    /// Returns a sequence that is not being written.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Returns a sequence that is not being written.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Returns the current value, or `None` while the sequence is being written or is detached.
    ///
    /// Acquire synchronises with the Release of [`Self::end_write`]: later reads are at least as
    /// new as the value.
    #[inline(always)]
    pub fn read(&self) -> Option<u64> {
        let value = self.0.load(Ordering::Acquire);
        (value & 1 == 0).then_some(value)
    }

    /// Returns whether the sequence is still `seen`.
    ///
    /// Precondition: the caller has just done a read-modify-write of `SeqCst` order (the
    /// compare-and-swap that made the entry busy), which this function makes a full fence. If the
    /// result is true, no writer that began since has visited the entry before it was busy, and all
    /// reads since [`Self::read`] are consistent.
    #[inline(always)]
    pub fn unchanged(&self, seen: u64) -> bool {
        fence_after_rmw();
        lost(Mutant::SecondLook) || self.0.load(Ordering::Relaxed) == seen
    }

    /// Returns whether the sequence is still `seen`, an earlier result of [`Self::read`], with the
    /// same synchronisation.
    #[inline(always)]
    pub fn is_still(&self, seen: u64) -> bool {
        lost(Mutant::HintLooks) || self.0.load(Ordering::Acquire) == seen
    }

    /// Makes the sequence odd, if it is even: the VMA ends. No fault may be using it.
    #[inline(always)]
    pub fn detach(&self) {
        let value = self.0.load(Ordering::Relaxed);
        if !lost(Mutant::EndCounts) {
            self.0.store(value | 1, Ordering::Relaxed);
        }
    }

    /// Makes the sequence odd. [`Self::writer_fence`] must follow before any entry or field
    /// protected by the sequence is visited or changed.
    #[inline]
    pub fn begin_write(&self) {
        // There is one writer, so a load and a store suffice; relaxed, because the fence orders the
        // store for the whole range.
        let value = self.0.load(Ordering::Relaxed);
        debug_assert!(value & 1 == 0, "written twice, or dead");
        self.0.store(value + 1, Ordering::Relaxed);
    }

    /// The single full fence between making all sequences of a range odd and visiting its entries.
    #[inline]
    pub fn writer_fence() {
        if !lost(Mutant::WriterFence) {
            fence(Ordering::SeqCst);
        }
    }

    /// Makes the sequence even: the change is complete, or the VMA in reused memory is ready.
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
    fn a_write_is_visible_during_and_after_it() {
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

    #[test]
    fn a_value_before_the_end_of_a_vma_never_returns() {
        let sequence = Sequence::new();
        let mut seen = std::vec::Vec::new();
        for write_locked in [false, true, false] {
            seen.push(sequence.read().unwrap());
            if write_locked {
                sequence.begin_write();
            }
            sequence.detach();
            assert_eq!(sequence.read(), None);
            assert!(!seen.iter().any(|seen| sequence.is_still(*seen)));
            sequence.end_write();
            assert!(!seen.iter().any(|seen| sequence.is_still(*seen)));
        }
    }
}
