//! Whether a CPU is in something that others wait for: a number that is odd meanwhile.
//!
//! A CPU that waits reads the number of each other one. Where it is odd, it waits for another number, whichever: so it does not wait for what begins later, and CPUs that
//! begin again and again do not let it wait for ever.
//!
//! How what the CPU does in between is ordered against those who look is for the user of this to say, with fences.

use super::atomic::{AtomicU64, Ordering};
use super::wait::{Wait, until};

/// How often a CPU has come, and how often it has left. Its CPU alone writes it.
#[derive(Debug, Default)]
pub(crate) struct Stays(AtomicU64);

/// A CPU is there until this is dropped.
#[derive(Debug)]
pub(crate) struct Stay<'a>(Option<&'a Stays>);

impl Stays {
    /// The number of the stay in which the CPU is. What the CPU did in those before has happened.
    pub(crate) fn current(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Acquire)).filter(|number| !number.is_multiple_of(2))
    }

    /// The CPU of this comes. A stay within another is part of that one.
    pub(crate) fn begin(&self) -> Stay<'_> {
        let number = self.0.load(Ordering::Relaxed);
        if !number.is_multiple_of(2) {
            return Stay(None);
        }
        self.0.store(number + 1, Ordering::Relaxed);
        Stay(Some(self))
    }

    /// Waits until the stay in which the CPU is now, if it is, has ended, or until there is `enough`.
    pub(crate) fn await_end(&self, wait: &(impl Wait + ?Sized), enough: impl Fn() -> bool) {
        if let Some(number) = self.current() {
            until(wait, || self.current() != Some(number) || enough());
        }
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        if let Some(Stays(number)) = self.0 {
            number.store(number.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
    }
}
