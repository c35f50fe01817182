//! Repetitions: the configurations of a report alternate, so that other load of the host affects
//! all configurations alike.

use crate::columns::{Column, Report};
use crate::error::Error;
use crate::sample::Sample;
use crate::stop;
use std::time::{Duration, Instant};

/// The number of repetitions of each configuration.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// The smallest number.
    pub least: usize,
    /// The largest number.
    pub most: usize,
    /// The time after which no further round begins, apart from the first `least` rounds.
    pub time: Duration,
}

impl Turns {
    /// The repetitions of a recorded program.
    pub const PROGRAMS: Self = Self { least: 9, most: 91, time: Duration::from_secs(5) };

    /// Creates exactly `rounds` repetitions, without a time limit.
    pub const fn exactly(rounds: usize) -> Self {
        Self { least: rounds, most: rounds, time: Duration::MAX }
    }

    /// Fills the columns of `report` with the results of `sample`, until the user interrupts the
    /// runs. Calls `advance` after each run. A failed configuration is not run again.
    pub fn run(
        self,
        report: &mut Report,
        mut sample: impl FnMut(&Column) -> Result<Option<Sample>, Error>,
        mut advance: impl FnMut(u64),
    ) -> Vec<Error> {
        let width = report.columns.len();
        let mut failed: Vec<Option<Error>> = (0..width).map(|_| None).collect();
        let begun = Instant::now();
        'rounds: for round in 0..self.most {
            if round >= self.least && begun.elapsed() > self.time {
                advance(((self.most - round) * width) as u64);
                break;
            }
            for turn in 0..width {
                if stop::requested() {
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
