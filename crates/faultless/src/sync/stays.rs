//! Whether a CPU is in something that others wait for: a number that is odd meanwhile.
//!
//! A CPU that waits reads the number of each other one. Where it is odd, it waits for another number, whichever: so it does not wait for what begins later, and CPUs that
//! begin again and again do not let it wait for ever.
//!
//! How what the CPU does in between is ordered against those who look is for the user of this to say, with fences; or it [comes to look](Stays::begin_looking)
//! at what others [close](await_all).

use super::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use super::mutant::{Mutant, lost};
use super::wait::{Wait, until};

/// How often a CPU has come, and how often it has left. Its CPU alone writes it.
#[derive(Debug, Default)]
pub struct Stays(AtomicU64);

/// A CPU is there until this is dropped.
#[derive(Debug)]
pub struct Stay<'a>(Option<&'a Stays>);

impl Stays {
    /// The number of the stay in which the CPU is. What the CPU did in those before has happened.
    pub fn current(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Acquire)).filter(|number| !number.is_multiple_of(2))
    }

    /// The CPU of this comes. A stay within another is part of that one.
    pub fn begin(&self) -> Stay<'_> {
        let number = self.0.load(Ordering::Relaxed);
        if !number.is_multiple_of(2) {
            return Stay(None);
        }
        // A CPU that waits for the stay before may find this number first.
        self.0.store(number + 1, Ordering::Release);
        Stay(Some(self))
    }

    /// As [`begin`](Self::begin), before the CPU looks whether something is closed. `any` says from now on that a CPU has come to look. A CPU that closes
    /// something and then [waits](await_all) finds this stay, or this CPU finds it closed.
    pub fn begin_looking(&self, any: &AtomicBool) -> Stay<'_> {
        let stay = self.begin();
        if !any.load(Ordering::Relaxed) {
            any.store(true, Ordering::Relaxed);
        }
        if !lost(Mutant::LookFence) {
            fence(Ordering::SeqCst);
        }
        stay
    }

    /// Waits until the stay in which the CPU is now, if it is, has ended, or until there is `enough`.
    pub fn await_end(&self, wait: &(impl Wait + ?Sized), enough: impl Fn() -> bool) {
        if let Some(number) = self.current() {
            until(wait, || self.current() != Some(number) || enough());
        }
    }
}

/// Behind the closing of something: waits for the CPUs that may have found it open. As long as [none has come to look](Stays::begin_looking), nothing else is read.
pub fn await_all<'s>(
    any: &AtomicBool,
    all: impl IntoIterator<Item = &'s Stays>,
    wait: &(impl Wait + ?Sized),
) {
    if !lost(Mutant::CloseFence) {
        fence(Ordering::SeqCst);
    }
    if any.load(Ordering::Relaxed) {
        all.into_iter().for_each(|of| of.await_end(wait, || false));
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        if let Some(Stays(number)) = self.0 {
            number.store(number.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
    }
}
