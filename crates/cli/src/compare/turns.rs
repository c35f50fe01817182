//! Repetitions: the configurations of a report take turns, so that other load of the host affects all of them alike.

use crate::error::CliError;
use crate::interrupt;
use crate::report::columns::{Column, Report};
use crate::run::Sample;
use std::time::{Duration, Instant};

/// How often each configuration runs.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// At least.
    pub least: usize,
    /// At most.
    pub most: usize,
    /// No round begins after so long, but the first ones.
    pub time: Duration,
}

impl Turns {
    /// Those of a recorded program.
    pub const PROGRAMS: Self = Self { least: 9, most: 91, time: Duration::from_secs(5) };

    /// `rounds` of them, however long they take.
    pub const fn exactly(rounds: usize) -> Self {
        Self { least: rounds, most: rounds, time: Duration::MAX }
    }

    /// Fills the columns of `report` with what `sample` returns, until the user interrupts it; after each run, `advance`. What failed
    /// is not tried again.
    pub fn run(
        self,
        report: &mut Report,
        mut sample: impl FnMut(&Column) -> Result<Option<Sample>, CliError>,
        mut advance: impl FnMut(u64),
    ) -> Vec<CliError> {
        let width = report.columns.len();
        let mut failed: Vec<Option<CliError>> = (0..width).map(|_| None).collect();
        let begun = Instant::now();
        'rounds: for round in 0..self.most {
            if round >= self.least && begun.elapsed() > self.time {
                advance(((self.most - round) * width) as u64);
                break;
            }
            for turn in 0..width {
                if interrupt::requested() {
                    break 'rounds;
                }
                // Each round begins with another configuration.
                let at = (round + turn) % width;
                if failed[at].is_none() {
                    let column = &mut report.columns[at];
                    match sample(column) {
                        Ok(sample) => sample.into_iter().for_each(|sample| column.push(sample)),
                        Err(error) => failed[at] = Some(error),
                    }
                }
                advance(1);
            }
        }
        failed.into_iter().flatten().collect()
    }
}
