//! Recorded programs under each locking policy, replayed on this machine: one row for each program,
//! with its verdict.

use super::words;
use crate::error::CliError;
use crate::report::{Style, filled, table};
use faultless_analysis::columns::{Column, Report};
use faultless_analysis::number::grouped;
use std::io::Write;

/// The verdict on a difference that the repetitions do not confirm.
pub const NO_DIFFERENCE: &str = "no difference within the noise";

/// The last configuration beside another.
struct Pair {
    /// The time of the last configuration relative to the other.
    time: f64,
    /// The possible effect of noise on `time`, as a fraction.
    noise: f64,
    differ: bool,
}

impl Pair {
    fn of(report: &Report, base: &Column) -> Option<Self> {
        let last = report.columns.last()?;
        let time = 1.0 / report.gain(last, base)?;
        let noise = report.noise(last, base)?;
        Some(Self { time, noise, differ: report.differ(last, base) })
    }

    fn words(&self) -> String {
        if self.differ { words::amount(self.time, "time") } else { NO_DIFFERENCE.into() }
    }
}

/// Prints a table of named `reports`, each of a recording under the same policies, and its verdict.
///
/// # Errors
/// The output is closed.
pub fn print(
    out: &mut dyn Write,
    reports: &[(&str, &Report)],
    style: Style,
) -> Result<(), CliError> {
    let Some((_, first)) = reports.iter().find(|(_, report)| !report.is_empty()) else {
        return Ok(());
    };
    let policy = |column: &Column| column.settings().map_or("", |settings| settings.locking.name());
    let repetitions = reports.iter().flat_map(|(_, report)| &report.columns);
    let repetitions = repetitions.map(|column| column.samples.len());
    let (least, most) = (repetitions.clone().min().unwrap_or(0), repetitions.max().unwrap_or(0));
    let repetitions = if least == most { most.to_string() } else { format!("{least} to {most}") };
    writeln!(
        out,
        "\nReal programs: faults and calls replayed on this machine, prefault {}, ms, median of {repetitions}",
        first.columns[0].settings().map_or_else(String::new, |settings| settings.regime.name()),
    )?;
    let mut head = ["program", "faults"].map(str::to_owned).to_vec();
    head.extend(first.columns.iter().map(|column| policy(column).to_owned()));
    if let [base, .., last] = &first.columns[..] {
        head.extend(["noise".to_owned(), format!("{} beside {}", policy(last), policy(base))]);
    }
    let mut table = table::numbers(&head, style);
    for (name, report) in reports.iter().filter(|(_, report)| !report.is_empty()) {
        let faults =
            report.columns.iter().find_map(Column::median).map_or(0, |sample| sample.faults);
        let mut cells = vec![(*name).to_owned(), grouped(faults)];
        let time = |column: &Column| {
            column.median().map_or("-".to_owned(), |sample| format!("{:.2}", 1e3 * sample.wall))
        };
        cells.extend(report.columns.iter().map(time));
        if report.columns.len() > 1 {
            let pair = Pair::of(report, &report.columns[0]);
            let noise = pair.as_ref().map(|pair| format!("±{}", words::percent(pair.noise)));
            cells.push(noise.unwrap_or("-".into()));
            cells.push(pair.map_or("too few repetitions".into(), |pair| pair.words()));
        }
        table::row(&mut table, cells);
    }
    writeln!(out, "{table}")?;
    let mut verdict = String::new();
    for (at, column) in first.columns.iter().enumerate().rev().skip(1) {
        let pairs =
            reports.iter().filter_map(|(_, report)| Pair::of(report, report.columns.get(at)?));
        let pairs: Vec<_> = pairs.collect();
        if pairs.is_empty() {
            continue;
        }
        let begin = if verdict.is_empty() { "Verdict, of programs:" } else { ";" };
        verdict += &format!("{begin} beside {}, {}", policy(column), tally(pairs));
    }
    if !verdict.is_empty() {
        writeln!(out, "{}", filled(&format!("{verdict}."), style.width))?;
    }
    Ok(())
}

/// Returns the number of programs that take less time, and the difference.
fn tally(pairs: Vec<Pair>) -> String {
    let (differ, alike): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|pair| pair.differ);
    let (less, more): (Vec<_>, Vec<_>) = differ.into_iter().partition(|pair| pair.time < 1.0);
    let mut parts = Vec::new();
    for (pairs, way) in [(less, "less"), (more, "more")] {
        if !pairs.is_empty() {
            let (least, most) = words::ends(pairs.iter().map(|pair| (pair.time - 1.0).abs()));
            let span = words::range(words::percent(least), words::percent(most));
            parts.push(format!("{} with {span} {way} time", pairs.len()));
        }
    }
    if !alike.is_empty() {
        parts.push(format!("{} with {NO_DIFFERENCE}", alike.len()));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless::Locking;
    use faultless_analysis::columns::Topic;
    use faultless_analysis::settings::Settings;
    use faultless_analysis::{Context, Sample};

    fn report(times: [&[f64]; 2]) -> Report {
        let context = Context::new("native", "w", 1);
        let columns = [Locking::MmapLock, Locking::Speculative].into_iter().zip(times);
        let columns = columns.map(|(locking, times)| {
            let settings = Settings::new(&[]).with_locking(locking);
            let mut column = Column::new(locking.name(), context.clone(), Some(settings));
            for &wall in times {
                let (operations, faults) = (1000, 500);
                let (user, system, counters) = (0.0, 0.0, Vec::new());
                column.push(Sample { operations, faults, wall, user, system, counters });
            }
            column
        });
        let columns = columns.collect();
        Report { title: "t".into(), unit: "operations", topic: Topic::Locking, columns }
    }

    /// Times whose ranges do not overlap.
    const APART: [f64; 6] = [1.0, 1.01, 1.02, 1.0, 1.01, 1.02];
    const LESS: [f64; 6] = [0.8, 0.81, 0.82, 0.8, 0.81, 0.82];

    #[test]
    fn interrupted_comparison_has_no_verdict_on_missing_runs() {
        let mut interrupted = report([&APART, &[]]);
        let printed = |report: &Report| {
            let mut out = Vec::new();
            let style = Style { terminal: false, width: 100 };
            print(&mut out, &[("it", report)], style).expect("writes to a vector");
            String::from_utf8(out).expect("text")
        };
        assert!(!printed(&interrupted).contains("Verdict"), "{}", printed(&interrupted));
        let last = report([&APART, &LESS]);
        let before = report([&[], &[]]).columns.remove(0);
        interrupted.columns = last.columns;
        interrupted.columns.insert(1, before);
        let text = printed(&interrupted);
        assert!(text.contains("beside mmap_lock, 1 with 20 % less time."), "{text}");
        assert!(!text.contains(", ;"), "{text}");
    }

    #[test]
    fn difference_within_the_noise_is_printed_in_words() {
        let apart = report([&APART, &LESS]);
        let alike =
            report([&[1.0, 1.1, 1.2, 1.05, 1.15, 1.12], &[0.9, 1.05, 1.1, 0.95, 1.08, 1.02]]);
        // The range of 5 repetitions has a confidence below 95 %.
        let few = report([&APART[..5], &LESS[..5]]);
        let all = [("apart", &apart), ("alike", &alike), ("few", &few)];
        let mut out = Vec::new();
        print(&mut out, &all, Style { terminal: false, width: 100 }).expect("writes to a vector");
        let out = String::from_utf8(out).expect("text");
        let row = |name: &str| out.lines().find(|line| line.contains(name)).expect("a row");
        assert!(row("| apart").contains("20 % less time"), "{out}");
        assert!(
            row("| alike").contains(NO_DIFFERENCE) && !row("| alike").contains("less"),
            "{out}"
        );
        assert!(row("| few").contains("too few repetitions"), "{out}");
        let verdict =
            "beside mmap_lock, 1 with 20 % less time, 1 with no difference within the noise.";
        assert!(out.replace("\n  ", " ").contains(verdict), "{out}");
    }
}
