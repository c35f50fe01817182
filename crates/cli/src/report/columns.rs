//! Configurations side by side: their samples, the median, a chart and a table.

use super::Style;
use super::bars::{self, Bar};
use super::effect::{Effect, Share};
use super::json::{Context, Json, Number};
use super::number::scaled;
use super::rates::Rates;
use super::table;
use crate::error::CliError;
use crate::run::Sample;
use crate::settings::Settings;
use std::io::Write;

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
            Some(effect) => effect.told(sample),
            None => sample,
        });
    }

    /// Returns the median repetition by operations per second. This is a single run, so its rates
    /// and counters are consistent.
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

/// The mark before a ratio if the repetitions do not show a difference.
pub const ALIKE: &str = "~";
/// The meaning of the mark.
pub const ALIKE_MEANS: &str =
    "no difference within the noise: the ranges in which the two medians lie (95 %) overlap.";

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
    Ahead,
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
        if self.topic == Topic::Ahead {
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

    /// Returns the [`gain`](Self::gain) as text, with [`ALIKE`] in front if the repetitions do not
    /// show a difference.
    pub fn shown_gain(&self, column: &Column, base: &Column) -> Option<String> {
        let mark = if self.differ(column, base) { "" } else { ALIKE };
        self.gain(column, base).map(|gain| format!("{mark}{gain:.2}x"))
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

    /// Prints the chart, then the table.
    pub fn print(&self, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
        let done: Vec<_> =
            self.columns.iter().filter_map(|column| Some((column, column.median()?))).collect();
        let Some((first, _)) = done.first() else { return Ok(()) };
        let measure = self.measure();
        let what = match measure {
            Measure::Faults => "faults".to_owned(),
            Measure::Operations => self.unit.to_owned(),
        };
        let repetitions = done.iter().map(|(column, _)| column.samples.len()).min().unwrap_or(0);
        writeln!(out, "\n{}\n  {what} per second, median of {repetitions}", self.title)?;
        let bar = |(column, sample): &(&Column, &Sample)| Bar {
            name: column.name.clone(),
            value: measure.rate(sample),
            shown: format!("{}/s", scaled(measure.rate(sample))),
            note: self
                .shown_gain(column, first)
                .map_or(String::new(), |gain| format!("{gain} {}", first.name)),
        };
        let mut bars: Vec<_> = done.iter().map(bar).collect();
        bars[0].note.clear();
        writeln!(out, "{}", bars::draw(&bars, style))?;
        if bars.iter().any(|bar| bar.note.starts_with(ALIKE)) {
            writeln!(out, "  {ALIKE} {ALIKE_MEANS}")?;
        }

        let head: Vec<_> = std::iter::once(String::new())
            .chain(done.iter().map(|(column, _)| column.name.replace(", ", "\n")))
            .collect();
        let mut table = table::numbers(&head, style);
        let rates = [
            ("faults/s".to_owned(), Measure::Faults),
            (format!("{}/s", self.unit), Measure::Operations),
        ];
        // If each touched page is a fault, both rates are the same.
        let rates = match self.topic {
            Topic::Ahead => &rates[1..],
            Topic::Locking if self.unit == "pages" => &rates[..1],
            Topic::Locking => &rates[..],
        };
        for (name, measure) in rates {
            let name = name.clone();
            let cells =
                done.iter().map(|(_, sample)| scaled(measure.rate(sample)).trim().to_owned());
            table::row(&mut table, std::iter::once(name).chain(cells));
        }
        if repetitions > 1 {
            let spread = |(column, _): &(&Column, &Sample)| {
                format!("{:.0} %", 100.0 * column.rates(measure).spread())
            };
            let name = "half the interquartile range".to_owned();
            table::row(&mut table, std::iter::once(name).chain(done.iter().map(spread)));
        }
        let samples: Vec<_> = done.iter().map(|(_, sample)| *sample).collect();
        if self.topic == Topic::Ahead {
            let fewer = |sample: &&Sample| {
                let fewer = samples[0].faults_each() / sample.faults_each();
                if fewer.is_finite() { format!("{fewer:.1}x") } else { "-".to_owned() }
            };
            let name = std::iter::once("times fewer faults".to_owned());
            table::row(&mut table, name.chain(samples.iter().map(fewer)));
        }
        let known = done.iter().any(|(column, _)| column.effect.is_some());
        for share in Share::ALL.iter().filter(|_| known) {
            let cell = |(column, _): &(&Column, &Sample)| {
                column.effect.map_or("-".to_owned(), |effect| share.show(&effect))
            };
            let name = std::iter::once(share.name.to_owned());
            table::row(&mut table, name.chain(done.iter().map(cell)));
        }
        table::counters(&mut table, self.topic, &samples);
        writeln!(out, "{table}")?;
        Ok(())
    }

    /// Writes the medians, and the variation of the repetitions.
    pub fn json(&self, json: &mut Json) -> Result<(), CliError> {
        for column in &self.columns {
            let Some(median) = column.median() else { continue };
            json.sample(&column.context, median)?;
            if let Some(effect) = column.effect {
                effect.json(json, &column.context)?;
            }
            let rates = || column.samples.iter().map(Sample::fault_rate);
            let slowest = rates().fold(f64::INFINITY, f64::min);
            let fastest = rates().fold(0.0, f64::max);
            for (metric, value) in
                [("faults_per_second_min", slowest), ("faults_per_second_max", fastest)]
            {
                json.write(&column.context, metric, "1/s", Number::Real(value))?;
            }
            // The range of the median, according to the repetitions.
            let measure = self.measure();
            if let Some((low, high)) = column.rates(measure).range() {
                for (end, value) in [("low", low), ("high", high)] {
                    let metric = format!("{}_per_second_{end}", measure.name());
                    json.write(&column.context, &metric, "1/s", Number::Real(value))?;
                }
            }
            let repetitions = Number::Whole(column.samples.len() as u64);
            json.write(&column.context, "repetitions", "count", repetitions)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    fn context() -> Context {
        Context {
            machine: "native".into(),
            workload: "w".into(),
            cpus: 1,
            setting: "default".into(),
            params: Map::new(),
            knobs: Map::new(),
        }
    }

    /// Noise may give the ratios within the rounds a different order than the printed rates.
    #[test]
    fn bars_and_rates_agree_with_their_ratio() {
        let context = context();
        let sample = |operations| Sample {
            operations,
            faults: operations,
            wall: 1.0,
            user: 0.0,
            system: 0.0,
            counters: Vec::new(),
        };
        let column = |name: &str, rates: [u64; 3]| {
            let mut column = Column::new(name, context.clone(), None);
            rates.into_iter().for_each(|rate| column.push(sample(rate)));
            column
        };
        // Faster in two rounds of three, and slower by the median.
        let columns = vec![column("base", [100, 200, 300]), column("other", [110, 220, 50])];
        let report = Report { title: "t".into(), unit: "pages", topic: Topic::Locking, columns };
        let mut out = Vec::new();
        report.print(&mut out, Style { terminal: false, width: 100 }).unwrap();
        let out = String::from_utf8(out).unwrap();
        let bars: Vec<_> = out.lines().filter(|line| line.contains('#')).collect();
        let length = |at: usize| bars[at].matches('#').count() as f64;
        assert!(bars[0].contains("200") && bars[1].contains("110"), "{out}");
        assert!(bars[1].ends_with(" ~0.55x base"), "{out}");
        assert!(out.contains("  ~ no difference within the noise"), "{out}");
        // Slower or faster, depending on the selected repetitions.
        assert!(!report.differ(&report.columns[1], &report.columns[0]), "{out}");
        let faster = column("faster", [310, 320, 330]);
        assert!(report.differ(&faster, &report.columns[0]));
        let told = report.shown_gain(&faster, &report.columns[0]);
        assert_eq!(told.as_deref(), Some("1.60x"));
        let once = Column { samples: faster.samples[..1].to_vec(), ..faster };
        assert!(!report.differ(&once, &report.columns[0]), "one repetition tells nothing");
        assert!((length(1) / length(0) - 0.55).abs() < 0.03, "{out}");
    }

    #[test]
    fn median_is_a_single_run() {
        let context = context();
        let mut column = Column::new("c", context, None);
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
        report.topic = Topic::Ahead;
        assert_eq!(report.measure(), Measure::Operations);
    }
}
