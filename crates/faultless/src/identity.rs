//! The identity of a subsystem.
//!
//! Numbers of frames, of spaces and of CPUs are valid only within the [`Vm`](crate::Vm) that
//! assigned them: walking the tables of a space with the memory of another machine would be
//! undefined behaviour. So each subsystem has an identity, stored in its spaces and memory objects,
//! and every operation compares it with the identity of the CPU passed to the call. A
//! [`Space`](crate::Space) keeps the identity in the word of its locking policy, which every fault
//! and every call compares with the knob anyway.

use core::sync::atomic::{AtomicU64, Ordering};

/// The bits of a word below the identity, free for other data: a locking policy.
const LOW_BITS: u32 = 8;

/// The identity of a subsystem, unique and never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity(u64);

impl Identity {
    /// Returns a new identity.
    pub(crate) fn new() -> Self {
        // The atomic of `core`, also under the model checkers: no code depends on its order.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) << LOW_BITS)
    }

    /// Returns a word of the identity and `low`.
    pub(crate) const fn with(self, low: u8) -> u64 {
        self.0 | low as u64
    }

    /// Returns the identity in a word from [`with`](Self::with).
    #[inline(always)]
    pub(crate) const fn of(word: u64) -> Self {
        Self(word & (!0 << LOW_BITS))
    }

    /// Checks that both identities are equal.
    ///
    /// # Panics
    /// If `other` differs.
    #[inline(always)]
    pub(crate) fn check(self, other: Self) {
        if self != other {
            mismatch();
        }
    }
}

#[cold]
#[inline(never)]
fn mismatch() -> ! {
    panic!("a space or an object is used with a CPU of another Vm");
}
