//! The figures of results, one after the other, in a form for programs.

use crate::context::Context;
use crate::error::Error;
use crate::sample::Sample;
use faultless_workload::{Outcome, Pft};
use serde::Serialize;

/// The value of a figure. Counts stay whole.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Number {
    /// A count.
    Whole(u64),
    /// A rate or a time.
    Real(f64),
}

/// Takes the figures of results. Each figure has the conditions of its measurement, a name, and a
/// unit.
pub trait Figures {
    /// Takes one figure.
    ///
    /// # Errors
    /// The figure cannot be written.
    fn figure(
        &mut self,
        context: &Context,
        metric: &str,
        unit: &str,
        value: Number,
    ) -> Result<(), Error>;

    /// Takes a run: its rates (1/s), times (s) and counts.
    ///
    /// # Errors
    /// A figure cannot be written.
    fn sample(&mut self, context: &Context, sample: &Sample) -> Result<(), Error> {
        let Sample { operations, faults, wall, user, system, counters } = sample;
        let rates = [
            ("faults_per_second", "1/s", sample.fault_rate()),
            ("operations_per_second", "1/s", sample.operation_rate()),
            ("wall_seconds", "s", *wall),
            ("user_seconds", "s", *user),
            ("system_seconds", "s", *system),
        ];
        for (metric, unit, value) in rates {
            self.figure(context, metric, unit, Number::Real(value))?;
        }
        self.figure(context, "operations", "count", Number::Whole(*operations))?;
        if counters.is_empty() {
            self.figure(context, "faults", "count", Number::Whole(*faults))?;
        }
        self.counts(context, counters)
    }

    /// Takes the counts in `seconds` of an interrupted run.
    ///
    /// # Errors
    /// A figure cannot be written.
    fn interrupted(
        &mut self,
        context: &Context,
        counters: &[(&'static str, u64)],
        seconds: f64,
    ) -> Result<(), Error> {
        self.figure(context, "wall_seconds", "s", Number::Real(seconds))?;
        self.counts(context, counters)
    }

    /// Takes counters by name.
    ///
    /// # Errors
    /// A figure cannot be written.
    fn counts(&mut self, context: &Context, counters: &[(&'static str, u64)]) -> Result<(), Error> {
        counters.iter().try_for_each(|(name, count)| {
            self.figure(context, name, "count", Number::Whole(*count))
        })
    }

    /// Takes the results of a run of a workload.
    ///
    /// # Errors
    /// A figure cannot be written.
    fn outcome(
        &mut self,
        context: &Context,
        outcome: &Outcome,
        sample: &Sample,
    ) -> Result<(), Error> {
        self.sample(context, sample)?;
        for (name, value) in &outcome.extras {
            let unit = if *name == Pft::GIGABYTES { "GiB" } else { "count" };
            self.figure(context, name, unit, Number::Real(*value))?;
        }
        for (name, count) in &outcome.left {
            self.figure(context, name, "count", Number::Whole(*count))?;
        }
        if !outcome.allocations.is_empty() {
            let count = Number::Whole(outcome.allocations.len() as u64);
            self.figure(context, "allocations", "count", count)?;
        }
        for (of_thousand, name) in
            [(500, "allocation_p50"), (990, "allocation_p99"), (999, "allocation_p99_9")]
        {
            if let Some(took) = outcome.allocation(of_thousand) {
                self.figure(context, name, "ns", Number::Real(took))?;
            }
        }
        if let Some(mean) = outcome.footprint.mean() {
            self.figure(context, "frames_in_use_mean", "count", Number::Real(mean))?;
            let most = Number::Whole(outcome.footprint.most);
            self.figure(context, "frames_in_use_most", "count", most)?;
        }
        Ok(())
    }
}

/// Keeps the names, the units and the values of figures.
#[cfg(test)]
#[derive(Debug, Default)]
pub struct Kept(pub Vec<(String, String, Number)>);

#[cfg(test)]
impl Figures for Kept {
    fn figure(
        &mut self,
        _: &Context,
        metric: &str,
        unit: &str,
        value: Number,
    ) -> Result<(), Error> {
        self.0.push((metric.to_owned(), unit.to_owned(), value));
        Ok(())
    }
}

/// Ignores all figures.
impl Figures for () {
    fn figure(&mut self, _: &Context, _: &str, _: &str, _: Number) -> Result<(), Error> {
        Ok(())
    }
}
