//! The results of a run.

use faultless::{Counter, Totals};
use faultless_workload::Outcome;

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The number of operations, in the unit of the workload.
    pub operations: u64,
    /// Page faults during the run.
    pub faults: u64,
    /// The run time in seconds.
    pub wall: f64,
    /// Seconds of processor time in the program.
    pub user: f64,
    /// Seconds of processor time in the system.
    pub system: f64,
    /// The machine's counters by name. On Linux only the faults are counted, so the list is empty.
    pub counters: Vec<(&'static str, u64)>,
}

impl Sample {
    /// Creates a sample from the outcome of a workload.
    pub fn of(outcome: &Outcome) -> Self {
        Self {
            operations: outcome.operations,
            faults: outcome.faults,
            wall: outcome.wall,
            user: outcome.user,
            system: outcome.system,
            counters: outcome.counters.clone(),
        }
    }

    /// Returns the counters of `totals` in the form of a sample.
    pub fn counters(totals: &Totals) -> Vec<(&'static str, u64)> {
        totals.iter().map(|(counter, count)| (counter.name(), count)).collect()
    }

    /// Returns a counter, or `None` if the machine does not have it.
    pub fn counter(&self, counter: Counter) -> Option<u64> {
        let known = self.counters.iter().find(|(name, _)| *name == counter.name());
        known.map(|(_, count)| *count)
    }

    /// Returns the faults per second.
    pub fn fault_rate(&self) -> f64 {
        rate(self.faults, self.wall)
    }

    /// Returns the faults per operation.
    pub fn faults_each(&self) -> f64 {
        self.faults as f64 / self.operations as f64
    }

    /// Returns the operations per second.
    pub fn operation_rate(&self) -> f64 {
        rate(self.operations, self.wall)
    }
}

fn rate(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}
