//! A per-CPU counter that is odd while the CPU is in a critical region.
//!
//! A waiting CPU reads the counter of each other CPU. If a counter is odd, the waiter waits until
//! the value changes. So the waiter does not wait for later regions, and CPUs that repeatedly enter
//! regions cannot delay a waiter indefinitely.
//!
//! The user of this type must order the accesses in the region against the waiters, with fences; or
//! the CPU [enters with a check](RegionCounter::begin_checked) of a flag that waiters
//! [close](await_all).

use super::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use super::mutant::{Mutant, lost};
use super::wait::{Wait, until};

/// The number of entries plus the number of exits of a CPU. Only this CPU writes the counter.
#[derive(Debug, Default)]
pub struct RegionCounter(AtomicU64);

/// A critical region of a CPU, which ends with the drop.
#[derive(Debug)]
pub struct Region<'a>(Option<&'a RegionCounter>);

impl RegionCounter {
    /// Returns the number of the current region of the CPU, if the CPU is in a region. All accesses
    /// in earlier regions happened before.
    pub fn current(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Acquire)).filter(|number| !number.is_multiple_of(2))
    }

    /// Enters a region on the CPU of this counter. A nested region is part of the outer one.
    pub fn begin(&self) -> Region<'_> {
        let number = self.0.load(Ordering::Relaxed);
        if !number.is_multiple_of(2) {
            return Region(None);
        }
        // A CPU that waits for the previous region may read this number first.
        self.0.store(number + 1, Ordering::Release);
        Region(Some(self))
    }

    /// As [`begin`](Self::begin), for a CPU that then checks whether some object is closed. Sets
    /// `any`, which records that any CPU has entered this way. A CPU that closes the object and
    /// then [waits](await_all) finds this region, or this CPU finds the object closed.
    pub fn begin_checked(&self, any: &AtomicBool) -> Region<'_> {
        let region = self.begin();
        if !any.load(Ordering::Relaxed) {
            any.store(true, Ordering::Relaxed);
        }
        if !lost(Mutant::LookFence) {
            fence(Ordering::SeqCst);
        }
        region
    }

    /// Waits until the CPU's current region, if any, has ended, or until `enough` returns true.
    pub fn await_end(&self, wait: &(impl Wait + ?Sized), enough: impl Fn() -> bool) {
        if let Some(number) = self.current() {
            until(wait, || self.current() != Some(number) || enough());
        }
    }
}

/// Called after closing an object: waits for the CPUs that may have found the object open. Until
/// the first [entry with a check](RegionCounter::begin_checked), reads only `any`.
pub fn await_all<'s>(
    any: &AtomicBool,
    all: impl IntoIterator<Item = &'s RegionCounter>,
    wait: &(impl Wait + ?Sized),
) {
    if !lost(Mutant::CloseFence) {
        fence(Ordering::SeqCst);
    }
    if any.load(Ordering::Relaxed) {
        all.into_iter().for_each(|of| of.await_end(wait, || false));
    }
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        if let Some(RegionCounter(number)) = self.0 {
            number.store(number.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
    }
}
