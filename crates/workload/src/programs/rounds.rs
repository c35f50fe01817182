//! Rounds of which a part is measured: what they begin with is made off the clock.
//!
//! What an operation needs, another one made: who unmaps a touched page has mapped it and touched it. Where
//! one of them alone is to be measured, threads work in rounds: one of them prepares for all, each prepares
//! for itself, and when all are ready they do what is measured, side by side. They wait for each other between
//! those parts, so that the clock stops and goes on for all at once.

use crate::program::Passes;
use crate::system::{Failure, Task, Worker};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Where the threads of one run meet.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// How often any of them has come to a meeting.
    arrived: AtomicUsize,
    /// Whether the first of them began no other round.
    over: AtomicBool,
    /// Whether one of them will not come any more, because it failed.
    broken: AtomicBool,
}

/// What a thread does in a round, told how many there have been.
pub(crate) trait Round<T> {
    /// Prepares for all: the first thread alone.
    ///
    /// # Errors
    /// What the system refused, or answered wrongly; so in all of them.
    fn prepare(&mut self, task: &mut T, round: u64) -> Result<(), Failure>;

    /// Prepares for itself, side by side with the others.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    fn ready(&mut self, task: &mut T, round: u64) -> Result<(), Failure>;

    /// Does what is measured.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    fn act(&mut self, task: &mut T, round: u64) -> Result<(), Failure>;
}

impl Rounds {
    /// The rounds of one of the threads: so many as `passes` say. Where another thread fails they end early.
    ///
    /// # Errors
    /// The first of `what`.
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
            // On the clock: it stops for all when the last has done its share.
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
    /// Whether it left as all did.
    left: bool,
}

impl Part<'_> {
    /// Begins a round, and waits until all have. Whether there is one.
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

    /// Waits for the others. Whether all have come.
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
        // Also in a panic, or the others would wait for ever.
        if !self.left {
            self.rounds.broken.store(true, Ordering::Relaxed);
        }
    }
}
