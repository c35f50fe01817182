//! Gates: threads of a replay wait for operations of other threads.
//!
//! A thread publishes its progress, but only at operations for which another thread waits. Most
//! operations have no waiter, and publication would add a shared line to the measurement. A waiting
//! thread holds no CPU, so some thread can always proceed, with any number of CPUs: a thread waits
//! only for operations earlier in the recording.

use faultless_trace::plan::Plan;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The interval at which a waiter checks for a stop of the replay.
const LOOK: Duration = Duration::from_millis(20);

/// One thread's progress, as visible to other threads. On separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Gate {
    /// Completed operations, as of the last awaited operation.
    done: AtomicU32,
    sleepers: Mutex<u32>,
    moved: Condvar,
    /// The awaited operations, in order.
    awaited: Vec<u32>,
}

impl Gate {
    /// Creates the gates of all threads of `plan`.
    pub fn all(plan: &Plan) -> Vec<Self> {
        let mut gates: Vec<_> = plan.threads().iter().map(|_| Self::default()).collect();
        for thread in plan.threads() {
            for (_, waits) in thread.steps() {
                waits.for_each(|on| gates[on.thread as usize].awaited.push(on.op));
            }
        }
        for gate in &mut gates {
            gate.awaited.sort_unstable();
            gate.awaited.dedup();
        }
        gates
    }

    /// Returns the awaited operations, in order.
    pub fn awaited(&self) -> &[u32] {
        &self.awaited
    }

    /// Publishes the completion of operation `op`.
    pub fn publish(&self, op: u32) {
        self.done.store(op + 1, Ordering::Release);
        // A sleeper counts itself under this lock before it reads `done`. Either the sleeper has
        // read this store, or this thread reads the sleeper's count.
        let sleepers = *self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        if sleepers > 0 {
            self.moved.notify_all();
        }
    }

    /// Returns whether operation `op` has completed. If true, its effects are visible.
    #[inline]
    pub fn passed(&self, op: u32) -> bool {
        self.done.load(Ordering::Acquire) > op
    }

    /// Waits until operation `op` has completed or `stopped` holds.
    pub fn wait(&self, op: u32, stopped: impl Fn() -> bool) {
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        *sleepers += 1;
        while !self.passed(op) && !stopped() {
            let woken = self.moved.wait_timeout(sleepers, LOOK);
            sleepers = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        *sleepers -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn gate_releases_a_waiter_on_publish_or_stop() {
        let gate = Gate::default();
        std::thread::scope(|scope| {
            scope.spawn(|| gate.wait(7, || false));
            gate.publish(6);
            assert!(!gate.passed(7));
            gate.publish(7);
        });
        assert!(gate.passed(7) && !gate.passed(8));
        let stopped = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| gate.wait(9, || stopped.load(Ordering::Relaxed)));
            stopped.store(true, Ordering::Relaxed);
        });
        assert!(!gate.passed(9));
    }
}
