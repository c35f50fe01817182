//! Parking: a CPU with a long wait releases its core until another CPU wakes it.
//!
//! A [`Permit`] belongs to one CPU; a machine builds [`Machine::park`] and [`Machine::wake`] from
//! it. Protocol, on one word, with one read-modify-write for each step:
//!
//! - The owner, before parking, changes *none* to *parked*. If a permit was given before, the owner
//!   takes the permit and does not park.
//! - A waker stores *given*. A waker that finds *parked* must resume the owner (by an interrupt or
//!   a primitive of the host). The owner may not have stopped yet, so a signal before the stop must
//!   not be lost.
//! - The owner, after resuming for any reason, stores *none*.
//!
//! A waker changes the awaited state before giving the permit, and the owner reads the state after
//! taking the permit. So no wake-up is lost: a waker that finds *given* comes before the step that
//! takes the permit, and the following read sees the waker's change. Several consecutive wakers
//! resume the owner only once.
//!
//! [`Machine::park`]: crate::Machine::park
//! [`Machine::wake`]: crate::Machine::wake

use super::atomic::{AtomicU8, Ordering};
use super::mutant::{Mutant, lost};

const NONE: u8 = 0;
const PARKED: u8 = 1;
const GIVEN: u8 = 2;

/// The wake-up permit of one CPU, from which a machine builds
/// [`Machine::park`](crate::Machine::park) and [`wake`](crate::Machine::wake). A wake-up before the
/// CPU parks is kept, and prevents the parking.
#[derive(Debug)]
pub struct Permit(AtomicU8);

impl Permit {
    /// Returns the permit of a running CPU, without a pending wake-up.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU8::new(NONE))
    }

    /// Returns the permit of a running CPU, without a pending wake-up.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU8::new(NONE))
    }

    /// Called by the owner before parking. `false`: the owner was woken, and must not park.
    pub fn park(&self) -> bool {
        let parked =
            self.0.compare_exchange(NONE, PARKED, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !parked {
            self.resume();
        }
        parked
    }

    /// Returns whether the parked owner may resume. For machines with spurious wake-ups.
    #[inline]
    pub fn is_given(&self) -> bool {
        self.0.load(Ordering::Relaxed) != PARKED
    }

    /// Called by the owner after resuming.
    pub fn resume(&self) {
        // Acquire synchronises with the Release of every earlier `give`.
        self.0.swap(NONE, Ordering::Acquire);
    }

    /// Wakes the owner, now or before its next parking. `true`: the owner has parked, and the
    /// caller must resume the owner.
    #[must_use = "the caller must resume the owner if `true`"]
    pub fn give(&self) -> bool {
        if lost(Mutant::WakeLeavesPermit) && self.0.load(Ordering::Relaxed) != PARKED {
            return false;
        }
        self.0.swap(GIVEN, Ordering::AcqRel) == PARKED
    }
}

impl Default for Permit {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_permit_given_before_parking_is_taken_once() {
        let permit = Permit::new();
        assert!(!permit.give(), "the owner runs");
        assert!(!permit.give(), "the second permit also resumes no owner");
        assert!(!permit.park(), "a permit before parking");
        assert!(permit.park() && !permit.is_given());
        assert!(permit.give() && permit.is_given());
        assert!(!permit.give(), "one permit resumes the owner");
        permit.resume();
        assert!(permit.park(), "both permits count as one");
    }
}
