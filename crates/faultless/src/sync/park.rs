//! Parking: a CPU that waits for long gives its core away until another CPU wakes it.
//!
//! A [`Permit`] belongs to one CPU, and is what a machine builds [`Machine::park`] and [`Machine::wake`]
//! from. Protocol, on one word, each step one read-modify-write:
//!
//! - the owner, about to park, makes *none* into *parked*. If a permit was given before, it takes it and
//!   does not park;
//! - a waker stores *given*. If it finds *parked*, it must rouse the owner (by an interrupt or the host's
//!   means), which may not have stopped yet: what rouses must not be lost if it comes before the owner stops;
//! - the owner, running again for whatever reason, stores *none*.
//!
//! A waker changes what the owner waits for before it gives the permit, and the owner looks after it has
//! taken it. So no wake-up is lost: a waker that finds *given* comes before the step that takes it, and the
//! look that follows sees its change. Wakers that come one after another rouse the owner once.
//!
//! [`Machine::park`]: crate::Machine::park
//! [`Machine::wake`]: crate::Machine::wake

use super::atomic::{AtomicU8, Ordering};
use super::mutant::{Mutant, lost};

const NONE: u8 = 0;
const PARKED: u8 = 1;
const GIVEN: u8 = 2;

/// Whether one CPU may run on: what a machine builds [`Machine::park`](crate::Machine::park) and [`wake`](crate::Machine::wake) from. A
/// wake-up that comes before the CPU parks is kept, and lets it run on.
#[derive(Debug)]
pub struct Permit(AtomicU8);

impl Permit {
    /// The permit of a CPU that runs, without a pending wake-up.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU8::new(NONE))
    }

    /// The permit of a CPU that runs, without a pending wake-up.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU8::new(NONE))
    }

    /// The owner is about to park. `false`: it was woken, and runs on.
    pub fn park(&self) -> bool {
        let parked =
            self.0.compare_exchange(NONE, PARKED, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !parked {
            self.resume();
        }
        parked
    }

    /// Whether the owner, parked, may run on. For machines that can stop for no reason.
    #[inline]
    pub fn is_given(&self) -> bool {
        self.0.load(Ordering::Relaxed) != PARKED
    }

    /// The owner runs again.
    pub fn resume(&self) {
        // Acquire meets the Release of every `give` before.
        self.0.swap(NONE, Ordering::Acquire);
    }

    /// Wakes the owner, now or when it is about to park. `true`: it has parked, and the caller must
    /// rouse it.
    #[must_use = "the owner sleeps until it is roused"]
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
    fn a_permit_given_before_is_taken_once() {
        let permit = Permit::new();
        assert!(!permit.give(), "it runs");
        assert!(!permit.give(), "nor does the second rouse it");
        assert!(!permit.park(), "woken before it parked");
        assert!(permit.park() && !permit.is_given());
        assert!(permit.give() && permit.is_given());
        assert!(!permit.give(), "one rouses it");
        permit.resume();
        assert!(permit.park(), "both were one permit");
    }
}
