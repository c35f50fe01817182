//! Where threads of a replay wait for each other's operations.
//!
//! A thread publishes its progress, but only at operations that another thread waits for: most are not,
//! and publishing would add a shared line to what is measured. A waiting thread holds no CPU, so
//! some thread can always proceed, however few CPUs there are: a thread waits only for operations
//! earlier in the recording.

use faultless_trace::plan::Plan;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How often a waiter looks whether the replay was stopped.
const LOOK: Duration = Duration::from_millis(20);

/// One thread's progress, as others see it. On lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Gate {
    /// Operations completed, as of the last one that another thread waits for.
    done: AtomicU32,
    sleepers: Mutex<u32>,
    moved: Condvar,
    /// The operations that somebody waits for, in order.
    awaited: Vec<u32>,
}

impl Gate {
    /// The gates of all threads of `plan`.
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

    /// The operations that somebody waits for, in order.
    pub fn awaited(&self) -> &[u32] {
        &self.awaited
    }

    /// Publishes that operation `op` has completed.
    pub fn publish(&self, op: u32) {
        self.done.store(op + 1, Ordering::Release);
        // A sleeper counts itself under this lock before it reads `done`: either it has read this
        // store, or this thread reads its count.
        let sleepers = *self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        if sleepers > 0 {
            self.moved.notify_all();
        }
    }

    /// Whether operation `op` has completed; if so, what it did is visible.
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
    fn a_waiter_is_let_through_or_called_off() {
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
