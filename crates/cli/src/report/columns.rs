//! Configurations side by side: their samples, the median, a picture and a table.

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

/// One configuration and what it came to.
#[derive(Clone, Debug)]
pub struct Column {
    /// Its name in the table.
    pub name: String,
    /// Its name in JSON.
    pub context: Context,
    /// The knobs; `None` for Linux.
    settings: Option<Settings>,
    /// The effect of prefault, where that is counted apart.
    pub effect: Option<Effect>,
    /// Each repetition.
    pub samples: Vec<Sample>,
}

impl Column {
    /// Without samples yet.
    pub fn new(name: impl Into<String>, context: Context, settings: Option<Settings>) -> Self {
        Self { name: name.into(), context, settings, effect: None, samples: Vec::new() }
    }

    /// The knobs; `None` for Linux.
    pub fn settings(&self) -> Option<&Settings> {
        self.settings.as_ref()
    }

    /// One repetition more.
    pub fn push(&mut self, sample: Sample) {
        self.samples.push(match &self.effect {
            Some(effect) => effect.told(sample),
            None => sample,
        });
    }

    /// The repetition in the middle by operations per second: one run, whose rates and counters
    /// belong together.
    pub fn median(&self) -> Option<&Sample> {
        let mut samples: Vec<_> = self.samples.iter().collect();
        samples.sort_by(|a, b| a.operation_rate().total_cmp(&b.operation_rate()));
        samples.get(samples.len() / 2).copied()
    }

    /// What its repetitions came to.
    pub fn rates(&self, measure: Measure) -> Rates {
        Rates::new(self.samples.iter().map(|sample| measure.rate(sample)).collect())
    }
}

/// Stands before a ratio where the repetitions do not tell the two apart.
pub const ALIKE: &str = "~";
/// What it means.
pub const ALIKE_MEANS: &str =
    "no difference within the noise: the ranges in which the two medians lie (95 %) overlap.";

/// What the bars are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Faults per second.
    Faults,
    /// Operations per second, where hardly anything faults.
    Operations,
}

impl Measure {
    /// As results name it.
    const fn name(self) -> &'static str {
        match self {
            Self::Faults => "faults",
            Self::Operations => "operations",
        }
    }

    /// The rate of `sample`.
    pub fn rate(self, sample: &Sample) -> f64 {
        match self {
            Self::Faults => sample.fault_rate(),
            Self::Operations => sample.operation_rate(),
        }
    }
}

/// What the configurations differ in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topic {
    /// How faults and writers are synchronised.
    Locking,
    /// How faults prefault.
    Ahead,
}

/// A workload or recording under several configurations.
#[derive(Clone, Debug)]
pub struct Report {
    /// What ran.
    pub title: String,
    /// What its operations are.
    pub unit: &'static str,
    /// What its configurations differ in.
    pub topic: Topic,
    /// The configurations.
    pub columns: Vec<Column>,
}

impl Report {
    /// Faults per second, unless the workload is not about faults, or the configurations differ in how many
    /// there are.
    pub fn measure(&self) -> Measure {
        if self.topic == Topic::Ahead {
            return Measure::Operations;
        }
        let few = |sample: &Sample| sample.faults * 2 < sample.operations;
        let first = self.columns.iter().find_map(Column::median);
        // A recording's operations are faults and calls together.
        if self.unit != "operations" && first.is_some_and(few) {
            Measure::Operations
        } else {
            Measure::Faults
        }
    }

    /// [`gain`](Self::gain) as it is written: with [`ALIKE`] before it where the repetitions do not tell the two apart.
    pub fn shown_gain(&self, column: &Column, base: &Column) -> Option<String> {
        let mark = if self.differ(column, base) { "" } else { ALIKE };
        self.gain(column, base).map(|gain| format!("{mark}{gain:.2}x"))
    }

    /// What `column` makes of `base`: the ratio of the two medians, so that it equals the ratio of the rates
    /// shown, and of the lengths of the bars.
    pub fn gain(&self, column: &Column, base: &Column) -> Option<f64> {
        let measure = self.measure();
        let ratio = measure.rate(column.median()?) / measure.rate(base.median()?);
        ratio.is_finite().then_some(ratio)
    }

    /// Whether the repetitions of `column` and `base` tell them apart: the ranges in which their medians lie do not overlap. If
    /// they overlap, the range of the ratio includes 1.
    pub fn differ(&self, column: &Column, base: &Column) -> bool {
        let of = |column: &Column| column.rates(self.measure()).range();
        of(column).zip(of(base)).is_some_and(|(a, b)| a.0 > b.1 || b.0 > a.1)
    }

    /// How far noise may move the ratio of `column` to `base`, as a part of it.
    pub fn noise(&self, column: &Column, base: &Column) -> Option<f64> {
        let of = |column: &Column| column.rates(self.measure()).uncertainty();
        Some(of(column)? + of(base)?)
    }

    /// The rates of those configurations that ran more than a few times.
    pub fn repeated(&self) -> impl Iterator<Item = Rates> {
        let rates = self.columns.iter().map(|column| column.rates(self.measure()));
        rates.filter(|rates| rates.range().is_some())
    }

    /// Whether anything ran.
    pub fn is_empty(&self) -> bool {
        self.columns.iter().all(|column| column.samples.is_empty())
    }

    /// The picture, then the table.
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
        // Where a page touched is a fault, both rates are one.
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

    /// The medians, and how far the repetitions were apart.
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
            // Where the median lies, as far as the repetitions tell.
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

    /// Noise may make the ratios within the rounds say otherwise than the rates that are shown.
    #[test]
    fn bars_and_rates_are_as_the_ratio_beside_them_says() {
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
        // Slower or faster: that depends on which repetitions are looked at.
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
    fn the_median_is_a_run() {
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
