//! Configurations side by side, as a chart and a table.

use super::Style;
use super::bars::{self, Bar};
use super::effect::Share;
use super::table;
use crate::error::CliError;
use faultless_analysis::Sample;
use faultless_analysis::columns::{Column, Measure, Report, Topic};
use faultless_analysis::number::scaled;
use std::io::Write;

/// The mark before a ratio if the repetitions do not show a difference.
pub const ALIKE: &str = "~";
/// The meaning of the mark.
pub const ALIKE_MEANS: &str = "no difference within the noise: 95 % ranges of the medians overlap, or fewer than 6 repetitions.";

/// Returns the [`gain`](Report::gain) as text, with [`ALIKE`] in front if the repetitions do not
/// show a difference.
pub fn shown_gain(report: &Report, column: &Column, base: &Column) -> Option<String> {
    let mark = if report.differ(column, base) { "" } else { ALIKE };
    report.gain(column, base).map(|gain| format!("{mark}{gain:.2}x"))
}

/// Prints the chart, then the table.
pub fn print(report: &Report, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
    let done: Vec<_> =
        report.columns.iter().filter_map(|column| Some((column, column.median()?))).collect();
    let Some((first, _)) = done.first() else { return Ok(()) };
    let measure = report.measure();
    let what = match measure {
        Measure::Faults => "faults".to_owned(),
        Measure::Operations => report.unit.to_owned(),
    };
    let repetitions = done.iter().map(|(column, _)| column.samples.len()).min().unwrap_or(0);
    writeln!(out, "\n{}\n  {what} per second, median of {repetitions}", report.title)?;
    let bar = |(column, sample): &(&Column, &Sample)| Bar {
        name: column.name.clone(),
        value: measure.rate(sample),
        shown: format!("{}/s", scaled(measure.rate(sample))),
        note: shown_gain(report, column, first)
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
        (format!("{}/s", report.unit), Measure::Operations),
    ];
    // If each touched page is a fault, both rates are the same.
    let rates = match report.topic {
        Topic::Prefault => &rates[1..],
        Topic::Locking if report.unit == "pages" => &rates[..1],
        Topic::Locking => &rates[..],
    };
    for (name, measure) in rates {
        let name = name.clone();
        let cells = done.iter().map(|(_, sample)| scaled(measure.rate(sample)).trim().to_owned());
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
    if report.topic == Topic::Prefault {
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
    table::counters(&mut table, report.topic, &samples);
    writeln!(out, "{table}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_analysis::Context;
    use faultless_analysis::rates::LEAST;

    /// Noise may give the ratios within the rounds a different order than the printed rates.
    #[test]
    fn bars_and_rates_agree_with_their_ratio() {
        let context = Context::new("native", "w", 1);
        let sample = |operations| Sample {
            operations,
            faults: operations,
            wall: 1.0,
            user: 0.0,
            system: 0.0,
            counters: Vec::new(),
        };
        let column = |name: &str, rates: [u64; 6]| {
            let mut column = Column::new(name, context.clone(), None);
            rates.into_iter().for_each(|rate| column.push(sample(rate)));
            column
        };
        // Faster in four rounds of six, and slower by the median.
        let columns = vec![
            column("base", [100, 200, 300, 100, 200, 300]),
            column("other", [110, 220, 50, 110, 220, 50]),
        ];
        let report = Report { title: "t".into(), unit: "pages", topic: Topic::Locking, columns };
        let mut out = Vec::new();
        print(&report, &mut out, Style { terminal: false, width: 100 }).unwrap();
        let out = String::from_utf8(out).unwrap();
        let bars: Vec<_> = out.lines().filter(|line| line.contains('#')).collect();
        let length = |at: usize| bars[at].matches('#').count() as f64;
        assert!(bars[0].contains("200") && bars[1].contains("110"), "{out}");
        assert!(bars[1].ends_with(" ~0.55x base"), "{out}");
        assert!(out.contains("  ~ no difference within the noise"), "{out}");
        // Slower or faster, depending on the selected repetitions.
        assert!(!report.differ(&report.columns[1], &report.columns[0]), "{out}");
        let faster = column("faster", [310, 320, 330, 310, 320, 330]);
        assert!(report.differ(&faster, &report.columns[0]));
        let gain = shown_gain(&report, &faster, &report.columns[0]);
        assert_eq!(gain.as_deref(), Some("1.60x"));
        let mut few = faster;
        few.samples.truncate(LEAST - 1);
        assert!(!report.differ(&few, &report.columns[0]), "the range of 5 has less than 95 %");
        let gain = shown_gain(&report, &few, &report.columns[0]);
        assert_eq!(gain.as_deref(), Some("~1.60x"));
        assert!((length(1) / length(0) - 0.55).abs() < 0.03, "{out}");
    }
}
