//! The figures of the benches, and the checked promises.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use std::io::{self, Write};

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The measured machine: always `native`, because all figures are measured.
    pub machine: &'static str,
    /// The workload.
    pub workload: String,
    /// The CPUs used.
    pub cpus: usize,
    /// The settings of the run.
    pub setting: String,
    /// The measured quantity.
    pub metric: String,
    /// The unit of `value`.
    pub unit: &'static str,
    /// The figure.
    pub value: f64,
    /// The sample whose median is the figure.
    #[serde(skip)]
    pub spread: Option<Spread>,
}

/// A promise, and the result of its check.
#[derive(Clone, Debug)]
pub struct Gate {
    /// The promise in words.
    pub promise: String,
    /// The measured result in words.
    pub found: String,
    /// Whether the promise is kept.
    pub met: bool,
}

/// The figures, notes and gates of a run.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<Row>,
    notes: Vec<String>,
    gates: Vec<Gate>,
}

impl Report {
    /// Adds a figure of `cpus` CPUs.
    pub fn row(
        &mut self,
        (workload, cpus, setting): (&str, usize, &str),
        (metric, unit): (&str, &'static str),
        value: f64,
    ) {
        self.rows.push(Row {
            machine: "native",
            workload: workload.into(),
            cpus,
            setting: setting.into(),
            metric: metric.into(),
            unit,
            value,
            spread: None,
        });
    }

    /// Adds the median of a sample as a figure.
    pub fn median(
        &mut self,
        at: (&str, usize, &str),
        (metric, unit): (&str, &'static str),
        spread: Spread,
    ) {
        self.row(at, (metric, unit), spread.median);
        if let Some(row) = self.rows.last_mut() {
            row.spread = Some(spread);
        }
    }

    /// Adds a promise.
    pub fn gate(&mut self, promise: impl Into<String>, found: impl Into<String>, met: bool) {
        self.gates.push(Gate { promise: promise.into(), found: found.into(), met });
    }

    /// Adds a text or table that is printed below the figures.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Adds the contents of another report.
    pub fn absorb(&mut self, other: Self) {
        self.rows.extend(other.rows);
        self.notes.extend(other.notes);
        self.gates.extend(other.gates);
    }

    /// Returns the gates.
    pub fn gates(&self) -> &[Gate] {
        &self.gates
    }

    /// Returns whether every promise is kept.
    pub fn met(&self) -> bool {
        self.gates.iter().all(|gate| gate.met)
    }

    /// Prints figures, notes and gates.
    ///
    /// # Errors
    /// The errors of `to`.
    pub fn print(&self, to: &mut impl Write) -> io::Result<()> {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "workload", "cpus", "setting", "metric", "value", "tenths", "sample", "unit",
        ]);
        for row in &self.rows {
            table.add_row([
                row.workload.clone(),
                row.cpus.to_string(),
                row.setting.clone(),
                row.metric.clone(),
                show(row.value),
                row.spread
                    .map_or(String::new(), |s| format!("{} to {}", show(s.low), show(s.high))),
                row.spread.map_or(String::new(), |spread| spread.size.to_string()),
                row.unit.into(),
            ]);
        }
        for right in [1, 4, 5, 6] {
            if let Some(column) = table.column_mut(right) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        writeln!(to, "{table}")?;
        for note in &self.notes {
            writeln!(to, "\n{note}")?;
        }
        for gate in &self.gates {
            let verdict = if gate.met { "met   " } else { "NOT MET" };
            writeln!(to, "{verdict} {}: {}", gate.promise, gate.found)?;
        }
        Ok(())
    }

    /// Writes the figures, one JSON object per line.
    ///
    /// # Errors
    /// The errors of `to`.
    pub fn write_json(&self, to: &mut impl Write) -> io::Result<()> {
        for row in &self.rows {
            serde_json::to_writer(&mut *to, row)?;
            writeln!(to)?;
            let Some(Spread { low, high, size, .. }) = row.spread else { continue };
            // Samples are small.
            for (name, value) in [("p10", low), ("p90", high), ("sample", size as f64)] {
                let metric = format!("{}_{name}", row.metric);
                let row = Row { metric, value, spread: None, ..row.clone() };
                serde_json::to_writer(&mut *to, &row)?;
                writeln!(to)?;
            }
        }
        Ok(())
    }
}

/// Formats a figure with an appropriate number of digits.
pub fn show(value: f64) -> String {
    if value.abs() >= 10_000.0 {
        let digits = format!("{value:.0}");
        let (sign, digits) = digits.strip_prefix('-').map_or(("", &digits[..]), |d| ("-", d));
        let mut grouped = String::new();
        for (at, digit) in digits.chars().enumerate() {
            if at != 0 && (digits.len() - at).is_multiple_of(3) {
                grouped.push(',');
            }
            grouped.push(digit);
        }
        format!("{sign}{grouped}")
    } else if value.abs() >= 100.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.3}")
    }
}

/// Middle and spread of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// A tenth of the sample is below.
    pub low: f64,
    /// A tenth of the sample is above.
    pub high: f64,
    /// The size of the sample.
    pub size: usize,
}

impl Spread {
    /// Computes the spread of `sample`; zeros without values.
    pub fn of(sample: &[f64]) -> Self {
        let mut sorted = sample.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let last = sorted.len().saturating_sub(1);
            // Samples are small, so the index is exact and in range.
            sorted.get((last as f64 * part).round() as usize).copied().unwrap_or(0.0)
        };
        Self { median: at(0.5), low: at(0.1), high: at(0.9), size: sorted.len() }
    }

    /// Describes the median of ratios found in rounds, and the number of rounds.
    pub fn words(&self) -> String {
        match self.size {
            0 => "no round counts".into(),
            1 => format!("{:.3} in one round", self.median),
            size => format!("{:.3} in {size} rounds", self.median),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_readable() {
        assert_eq!(show(1_234_567.8), "1,234,568");
        assert_eq!(show(-12_345.0), "-12,345");
        assert_eq!(show(249.96), "250.0");
        assert_eq!(show(1.9), "1.900");
    }

    #[test]
    fn spread_of_a_sample() {
        let sample: Vec<f64> = (0..=10).rev().map(f64::from).collect();
        let spread = Spread { median: 5.0, low: 1.0, high: 9.0, size: 11 };
        assert_eq!(Spread::of(&sample), spread);
        assert_eq!(Spread::of(&[]).median, 0.0);
        assert_eq!(spread.words(), "5.000 in 11 rounds");
        assert_eq!(Spread::of(&[]).words(), "no round counts");
    }

    #[test]
    fn one_broken_promise_fails_the_report() {
        let mut report = Report::default();
        report.gate("a", "1", true);
        assert!(report.met());
        let mut other = Report::default();
        other.row(("w", 2, "s"), ("m", "u"), 1.5);
        other.gate("b", "2", false);
        report.absorb(other);
        assert!(!report.met());
        let mut json = Vec::new();
        report.write_json(&mut json).unwrap();
        let line = r#"{"machine":"native","workload":"w","cpus":2,"setting":"s","metric":"m","unit":"u","value":1.5}"#;
        assert_eq!(String::from_utf8(json).unwrap(), format!("{line}\n"));
    }

    #[test]
    fn sample_is_written_as_four_figures() {
        let mut report = Report::default();
        report.median(("w", 1, ""), ("m", "u"), Spread::of(&[1.0, 2.0, 3.0]));
        let mut json = Vec::new();
        report.write_json(&mut json).unwrap();
        let json = String::from_utf8(json).unwrap();
        let metrics: Vec<_> = ["\"m\"", "\"m_p10\"", "\"m_p90\"", "\"m_sample\""].into();
        assert_eq!(json.lines().count(), 4);
        assert!(json.lines().zip(metrics).all(|(line, metric)| line.contains(metric)));
    }
}
