//! Rounds with a measured part, whose preparation is off the clock.
//!
//! Some operations need the result of another operation: unmapping a touched page requires a
//! mapping and a touch. To measure such an operation alone, threads work in rounds. The first
//! thread prepares for all, then each thread prepares for itself, and when all are ready, they do
//! the measured part concurrently. The threads wait for each other between these parts, so the
//! clock stops and continues for all at the same time.

use crate::program::Passes;
use crate::system::{Failure, Task, Worker};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The meetings of the threads of one run.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// The number of arrivals of all threads at meetings.
    arrived: AtomicUsize,
    /// Whether the first thread ended the rounds.
    over: AtomicBool,
    /// Whether a thread has failed and will not arrive any more.
    broken: AtomicBool,
}

/// The parts of a thread in a round. `round` is the number of earlier rounds.
pub(crate) trait Round<T> {
    /// Prepares for all threads; called on the first thread only.
    ///
    /// # Errors
    /// A refused call or a wrong result of the system; the same applies to all methods.
    fn prepare(&mut self, task: &mut T, round: u64) -> Result<(), Failure>;

    /// Prepares for this thread, concurrently with the others.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    fn ready(&mut self, task: &mut T, round: u64) -> Result<(), Failure>;

    /// Does the measured part.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    fn act(&mut self, task: &mut T, round: u64) -> Result<(), Failure>;
}

impl Rounds {
    /// Runs the rounds of one thread, `passes` in number. If another thread fails, the rounds end
    /// early.
    ///
    /// # Errors
    /// The first error of `what`.
    pub(crate) fn run<T: Task>(
        &self,
        task: &mut T,
        worker: Worker,
        passes: Passes,
        what: &mut impl Round<T>,
    ) -> Result<(), Failure> {
        let mut part = Part { rounds: self, worker, met: 0, left: false };
        for round in 0.. {
            if !task.aside(|task| part.begin(task, passes, what, round))? {
                break;
            }
            what.act(task, round)?;
            // On the clock, which stops for all when the last thread has done its part.
            if !part.meet(task) {
                break;
            }
        }
        part.left = true;
        Ok(())
    }
}

/// One thread's part in the meetings.
struct Part<'a> {
    rounds: &'a Rounds,
    worker: Worker,
    met: usize,
    /// Whether the thread left together with all others.
    left: bool,
}

impl Part<'_> {
    /// Begins a round, and waits until all threads have. Returns whether there is another round.
    fn begin<T: Task>(
        &mut self,
        task: &mut T,
        passes: Passes,
        what: &mut impl Round<T>,
        round: u64,
    ) -> Result<bool, Failure> {
        if self.worker.index == 0 {
            if passes.more(task, round) {
                what.prepare(task, round)?;
            } else {
                self.rounds.over.store(true, Ordering::Relaxed);
            }
        }
        if !self.meet(task) || self.rounds.over.load(Ordering::Relaxed) {
            return Ok(false);
        }
        what.ready(task, round)?;
        Ok(self.meet(task))
    }

    /// Waits for the other threads. Returns whether all have arrived.
    fn meet<T: Task>(&mut self, task: &mut T) -> bool {
        self.met += 1;
        let all = self.met * self.worker.count;
        self.rounds.arrived.fetch_add(1, Ordering::AcqRel);
        let mut looks = 0u32;
        while self.rounds.arrived.load(Ordering::Acquire) < all {
            if self.rounds.broken.load(Ordering::Relaxed) {
                return false;
            }
            looks = looks.wrapping_add(1);
            task.rest(looks);
        }
        true
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        // Also in a panic, or the others would wait without end.
        if !self.left {
            self.rounds.broken.store(true, Ordering::Relaxed);
        }
    }
}
