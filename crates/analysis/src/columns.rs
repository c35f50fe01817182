//! Configurations side by side: their samples, the median, and the variation of the repetitions.

use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::rates::Rates;
use crate::replay::Effect;
use crate::sample::Sample;
use crate::settings::Settings;

/// One configuration and its results.
#[derive(Clone, Debug)]
pub struct Column {
    /// The name in the table.
    pub name: String,
    /// The name in JSON.
    pub context: Context,
    /// The knobs; `None` for Linux.
    settings: Option<Settings>,
    /// The effect of prefault, if counted in a separate replay.
    pub effect: Option<Effect>,
    /// Each repetition.
    pub samples: Vec<Sample>,
}

impl Column {
    /// Creates a column without samples.
    pub fn new(name: impl Into<String>, context: Context, settings: Option<Settings>) -> Self {
        Self { name: name.into(), context, settings, effect: None, samples: Vec::new() }
    }

    /// Returns the knobs; `None` for Linux.
    pub fn settings(&self) -> Option<&Settings> {
        self.settings.as_ref()
    }

    /// Adds a repetition.
    pub fn push(&mut self, sample: Sample) {
        self.samples.push(match &self.effect {
            Some(effect) => effect.counted_in(sample),
            None => sample,
        });
    }

    /// Returns the median repetition by operations per second, or the faster of the two middle
    /// repetitions. This is a single run, so its rates and counters are consistent.
    pub fn median(&self) -> Option<&Sample> {
        let mut samples: Vec<_> = self.samples.iter().collect();
        samples.sort_by(|a, b| a.operation_rate().total_cmp(&b.operation_rate()));
        samples.get(samples.len() / 2).copied()
    }

    /// Returns the rates of the repetitions.
    pub fn rates(&self, measure: Measure) -> Rates {
        Rates::new(self.samples.iter().map(|sample| measure.rate(sample)).collect())
    }
}

/// The quantity of the bars.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Faults per second.
    Faults,
    /// Operations per second, for subjects with few faults.
    Operations,
}

impl Measure {
    /// Returns the name in results.
    const fn name(self) -> &'static str {
        match self {
            Self::Faults => "faults",
            Self::Operations => "operations",
        }
    }

    /// Returns the rate of `sample`.
    pub fn rate(self, sample: &Sample) -> f64 {
        match self {
            Self::Faults => sample.fault_rate(),
            Self::Operations => sample.operation_rate(),
        }
    }
}

/// The difference between the configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topic {
    /// The locking of faults and writers.
    Locking,
    /// The prefault settings.
    Prefault,
}

/// A workload or recording under several configurations.
#[derive(Clone, Debug)]
pub struct Report {
    /// The subject.
    pub title: String,
    /// The unit of its operations.
    pub unit: &'static str,
    /// The difference between its configurations.
    pub topic: Topic,
    /// The configurations.
    pub columns: Vec<Column>,
}

impl Report {
    /// Returns faults per second, unless the workload has few faults, or the configurations differ
    /// in the number of faults.
    pub fn measure(&self) -> Measure {
        if self.topic == Topic::Prefault {
            return Measure::Operations;
        }
        let few = |sample: &Sample| sample.faults * 2 < sample.operations;
        let first = self.columns.iter().find_map(Column::median);
        // The operations of a recording include faults and calls.
        if self.unit != "operations" && first.is_some_and(few) {
            Measure::Operations
        } else {
            Measure::Faults
        }
    }

    /// Returns the ratio of the medians of `column` and `base`, which equals the ratio of the
    /// printed rates, and of the lengths of the bars.
    pub fn gain(&self, column: &Column, base: &Column) -> Option<f64> {
        let measure = self.measure();
        let ratio = measure.rate(column.median()?) / measure.rate(base.median()?);
        ratio.is_finite().then_some(ratio)
    }

    /// Returns whether the repetitions of `column` and `base` show a difference: the ranges of
    /// their medians do not overlap. If they overlap, the range of the ratio includes 1.
    pub fn differ(&self, column: &Column, base: &Column) -> bool {
        let of = |column: &Column| column.rates(self.measure()).range();
        of(column).zip(of(base)).is_some_and(|(a, b)| a.0 > b.1 || b.0 > a.1)
    }

    /// Returns the possible effect of noise on the ratio of `column` to `base`, as a fraction of
    /// the ratio.
    pub fn noise(&self, column: &Column, base: &Column) -> Option<f64> {
        let of = |column: &Column| column.rates(self.measure()).uncertainty();
        Some(of(column)? + of(base)?)
    }

    /// Returns the rates of configurations with more than a few runs.
    pub fn repeated(&self) -> impl Iterator<Item = Rates> {
        let rates = self.columns.iter().map(|column| column.rates(self.measure()));
        rates.filter(|rates| rates.range().is_some())
    }

    /// Returns whether no configuration has run.
    pub fn is_empty(&self) -> bool {
        self.columns.iter().all(|column| column.samples.is_empty())
    }

    /// Passes the medians, and the variation of the repetitions, to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures) -> Result<(), Error> {
        for column in &self.columns {
            let Some(median) = column.median() else { continue };
            figures.sample(&column.context, median)?;
            if let Some(effect) = column.effect {
                effect.figures(figures, &column.context)?;
            }
            let rates = || column.samples.iter().map(Sample::fault_rate);
            let slowest = rates().fold(f64::INFINITY, f64::min);
            let fastest = rates().fold(0.0, f64::max);
            for (metric, value) in
                [("faults_per_second_min", slowest), ("faults_per_second_max", fastest)]
            {
                figures.figure(&column.context, metric, "1/s", Number::Real(value))?;
            }
            // The range of the median, according to the repetitions.
            let measure = self.measure();
            if let Some((low, high)) = column.rates(measure).range() {
                for (end, value) in [("low", low), ("high", high)] {
                    let metric = format!("{}_per_second_{end}", measure.name());
                    figures.figure(&column.context, &metric, "1/s", Number::Real(value))?;
                }
            }
            let repetitions = Number::Whole(column.samples.len() as u64);
            figures.figure(&column.context, "repetitions", "count", repetitions)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_a_single_run() {
        let mut column = Column::new("c", Context::new("native", "w", 1), None);
        assert!(column.median().is_none());
        let sample = |operations| Sample {
            operations,
            faults: 1,
            wall: 1.0,
            user: 0.0,
            system: 0.0,
            counters: Vec::new(),
        };
        column.samples = [30, 10, 20].map(sample).to_vec();
        assert_eq!(column.median().map(|sample| sample.operations), Some(20));
        let report = Report {
            title: "t".into(),
            unit: "pages",
            topic: Topic::Locking,
            columns: vec![column.clone()],
        };
        assert_eq!(report.measure(), Measure::Operations);
        column.samples.iter_mut().for_each(|sample| sample.faults = sample.operations);
        let mut report = Report { columns: vec![column], ..report };
        assert_eq!(report.measure(), Measure::Faults);
        report.topic = Topic::Prefault;
        assert_eq!(report.measure(), Measure::Operations);
    }
}
