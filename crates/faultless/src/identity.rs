//! Which subsystem something belongs to.
//!
//! Numbers of frames, of spaces and of CPUs mean nothing outside the [`Vm`](crate::Vm) that gave them out: a space
//! whose tables were walked with the memory of another machine would be undefined behaviour. So each
//! subsystem has an identity, its spaces and memory objects carry it, and every operation compares it with that of
//! the CPU that it is called with. A [`Space`](crate::Space) keeps it in the word of its locking policy, which every fault
//! and every call compares with the knob anyway.

use core::sync::atomic::{AtomicU64, Ordering};

/// The bits of a word below the identity, which are free for something else: a locking policy.
const LOW_BITS: u32 = 8;

/// The identity of a subsystem, which no other has, nor will have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity(u64);

impl Identity {
    /// A new one.
    pub(crate) fn new() -> Self {
        // Core's, under the model checkers too: nothing depends on its order.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) << LOW_BITS)
    }

    /// A word of the identity and `low`.
    pub(crate) const fn with(self, low: u8) -> u64 {
        self.0 | low as u64
    }

    /// The identity in such a word.
    #[inline(always)]
    pub(crate) const fn of(word: u64) -> Self {
        Self(word >> LOW_BITS << LOW_BITS)
    }

    /// # Panics
    /// Unless `other` is the same.
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
