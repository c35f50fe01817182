//! Wait loops: spin, serve shootdown requests, then park.

use super::atomic::spin_hint;
use super::order::Record;
use crate::machine::CpuId;

/// The behaviour of a waiter between two reads of the awaited state.
///
/// Wait loops serve shootdown requests: a CPU of the subsystem serves them here, so a lock's holder
/// may wait for the flush of a CPU that waits for the lock.
pub trait Wait {
    /// Called after each unsuccessful read; `looks` counts the calls from 0 and saturates.
    fn wait(&self, looks: u32);

    /// Called in place of [`wait`](Self::wait) after [`LOOKS_BEFORE_PARKING`] reads, by a waiter
    /// that has announced the wait for a [wake-up](Self::wake): releases the core until the
    /// wake-up. May return spuriously, and returns at once after an earlier wake-up.
    fn park(&self) {
        self.wait(u32::MAX);
    }

    /// Ends the current or next [`park`](Self::park) of another CPU.
    fn wake(&self, _cpu: CpuId) {}

    /// Returns the record of the resources held by the waiting CPU; see [`order`](super::order).
    /// `None` for a waiter that is no CPU of the subsystem.
    #[inline(always)]
    fn order(&self) -> Option<&Record> {
        None
    }
}

/// The number of reads before a waiter parks. So many reads take about as long as stopping and
/// restarting a core, so a wait costs at most twice the optimum.
pub const LOOKS_BEFORE_PARKING: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 64 };

/// Waits by spinning, without serving requests: for leaves and tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spin;

impl Wait for Spin {
    #[inline]
    fn wait(&self, _looks: u32) {
        spin_hint();
    }
}

/// The maximum number of pauses between two reads: about ten microseconds. One in models, in which
/// reads are the unit of time.
pub(super) const MOST_PAUSES: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 512 };

/// Exponential backoff, between reads of a line for which many CPUs may wait.
///
/// Each read takes the line from the CPU that is about to write it, which then waits for the line.
/// So a waiter reads less and less often: each wait is twice as long as the last, up to
/// [`MOST_PAUSES`]. When waits begin to release the core, which takes longer, the waits restart
/// short. With many CPUs the line then moves a few times, instead of once for each waiting CPU, and
/// no CPU waits for more than twice the necessary time.
#[derive(Debug, Default)]
pub struct Pauses {
    looks: u32,
    pauses: u32,
}

impl Pauses {
    /// Waits before the next read.
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

/// Waits with backoff until `ready` returns true: for state that many CPUs may wait for.
pub fn until_many<W: Wait + ?Sized>(wait: &W, mut ready: impl FnMut() -> bool) {
    let mut pauses = Pauses::default();
    while !ready() {
        pauses.pause(wait);
    }
}

/// Waits until `ready` returns true.
#[inline]
pub fn until<W: Wait + ?Sized>(wait: &W, mut ready: impl FnMut() -> bool) {
    let mut looks = 0u32;
    while !ready() {
        wait.wait(looks);
        looks = looks.saturating_add(1);
    }
}

/// Waits by yielding the core, because threads of a test outnumber the cores.
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
    fn until_counts_unsuccessful_reads() {
        let count = Count(Cell::new(0));
        until(&count, || count.0.get() == 3);
        assert_eq!(count.0.get(), 3);
        until(&count, || true);
        assert_eq!(count.0.get(), 3);
    }
}
