//! What a CPU does between two looks at something that another CPU must change.

use super::atomic::spin_hint;
use super::order::Record;
use crate::machine::CpuId;

/// How a waiter spends the time between two looks.
///
/// Wait loops service shootdown requests: a CPU of the subsystem serves them here, so that a lock's
/// holder may wait for the flush of a CPU that waits for the lock.
pub trait Wait {
    /// Called after each look that found nothing; `looks` counts them from 0 and stops at its
    /// largest value.
    fn wait(&self, looks: u32);

    /// Called in place of [`wait`](Self::wait) after [`LOOKS_BEFORE_PARKING`] looks, by a waiter that has said where
    /// others see it that it wants to be [woken](Self::wake): gives the core away until then. May return
    /// for no reason, and returns at once after a wake-up that came before.
    fn park(&self) {
        self.wait(u32::MAX);
    }

    /// Ends the [`park`](Self::park) of another CPU, or its next one.
    fn wake(&self, _cpu: CpuId) {}

    /// Where the waiting CPU writes down what it holds; see [`order`](super::order). A waiter that is no CPU
    /// of the subsystem writes nothing down.
    #[inline(always)]
    fn order(&self) -> Option<&Record> {
        None
    }
}

/// How often a waiter looks before it parks: about as long as it takes to stop a core's work and start it
/// again, so that a wait costs at most twice what it would if its length were known.
pub const LOOKS_BEFORE_PARKING: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 64 };

/// Waits by spinning, and services no requests: for leaves and tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spin;

impl Wait for Spin {
    #[inline]
    fn wait(&self, _looks: u32) {
        spin_hint();
    }
}

/// How often a waiter pauses between two looks, at most: for some ten microseconds. Once in models, where time is looks.
pub(super) const MOST_PAUSES: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 512 };

/// Waits that get longer, between the looks at a line for which many CPUs may wait.
///
/// Each look takes the line from the CPU that is about to write it, which then waits for it. So a waiter looks less and less often: it waits
/// twice as long before each look as before the last, up to [`MOST_PAUSES`]. From where waits give the core away, which takes longer, it begins
/// again with short ones. With many CPUs the line then moves a few times meanwhile, and
/// not once for each CPU that waits; and nobody waits for more than twice as long as it must.
#[derive(Debug, Default)]
pub struct Pauses {
    looks: u32,
    pauses: u32,
}

impl Pauses {
    /// Waits before the next look.
    pub fn pause<W: Wait + ?Sized>(&mut self, wait: &W) {
        self.pauses = (2 * self.pauses).clamp(1, MOST_PAUSES);
        if self.looks < LOOKS_BEFORE_PARKING {
            self.pauses = self.pauses.min((LOOKS_BEFORE_PARKING - self.looks).max(1));
        }
        for _ in 0..self.pauses {
            wait.wait(self.looks);
            self.looks = self.looks.saturating_add(1);
        }
    }
}

/// Looks less and less often until `ready` says yes: for what many CPUs may wait for at once.
pub fn until_many<W: Wait + ?Sized>(wait: &W, mut ready: impl FnMut() -> bool) {
    let mut pauses = Pauses::default();
    while !ready() {
        pauses.pause(wait);
    }
}

/// Looks until `ready` says yes.
#[inline]
pub fn until<W: Wait + ?Sized>(wait: &W, mut ready: impl FnMut() -> bool) {
    let mut looks = 0u32;
    while !ready() {
        wait.wait(looks);
        looks = looks.saturating_add(1);
    }
}

/// Waits by giving the core away: threads of a test outnumber the cores.
#[cfg(all(test, not(loom)))]
pub(crate) struct Yield;

#[cfg(all(test, not(loom)))]
impl Wait for Yield {
    fn wait(&self, _looks: u32) {
        std::thread::yield_now();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::cell::Cell;

    struct Count(Cell<u32>);

    impl Wait for Count {
        fn wait(&self, looks: u32) {
            assert_eq!(looks, self.0.get());
            self.0.set(looks + 1);
        }
    }

    #[test]
    fn a_waiter_hears_how_often_it_looked_in_vain() {
        let count = Count(Cell::new(0));
        until(&count, || count.0.get() == 3);
        assert_eq!(count.0.get(), 3);
        until(&count, || true);
        assert_eq!(count.0.get(), 3);
    }
}
