//! `compare xsbench llm`: the table of the effect of deferred flushes in tiered memory, its
//! verdict, and the plot.

use super::words;
use crate::error::CliError;
use crate::html::Page;
use crate::html::plot::{Bar, Frame, named_bars};
use crate::report::{Style, filled, shortened, table};
use faultless_analysis::compare::tiers::figures::{
    Change, FIGURES, FRAMES, Figure, INTERRUPTS, P99, P999, Runs, TIME,
};
use faultless_analysis::compare::tiers::{On, Rows};
use faultless_analysis::number::grouped;
use std::io::Write;

/// The plotted figures.
const PLOTTED: [(&str, Figure); 4] = [
    ("shootdown interrupts", INTERRUPTS),
    ("run time", TIME),
    ("frames in use", FRAMES),
    ("allocation, 99th percentile", P99),
];

/// The most characters of the title of a plot.
const TITLE: usize = 100;

const ONE_SEED: &str = "With one seed, a change cannot be distinguished from chance.";

const PERCENTILES: &str = "p50, p99, p99.9: of the allocations of all seeds.";

/// Prints the table and its verdict.
///
/// # Errors
/// The output is closed.
pub fn print(rows: &Rows, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
    let title =
        format!("{}: figures without deferred flushes, and the change with them", rows.title);
    writeln!(out, "\n{}", filled(&title, style.width))?;
    let head =
        std::iter::once("fast:slow").chain(rows.runs.iter().map(|(ratio, _)| ratio.as_str()));
    let mut table = table::numbers(&head.map(str::to_owned).collect::<Vec<_>>(), style);
    for figure in &FIGURES {
        let cells = rows.runs.iter().map(|(_, runs)| cell(figure, runs));
        table::row(&mut table, std::iter::once(figure.title.to_owned()).chain(cells));
    }
    writeln!(out, "{table}")?;
    let all = || FIGURES.iter().flat_map(|it| rows.runs.iter().map(move |(_, runs)| (it, runs)));
    if is_of_one_seed(rows) {
        writeln!(out, "{}", filled(ONE_SEED, style.width))?;
    } else if all().any(|(figure, runs)| figure.is_marked(runs)) {
        let mark = "~: may be chance, as seeds differ by more (Student's t, 95 %).";
        writeln!(out, "{}", filled(mark, style.width))?;
    }
    if !is_of_one_seed(rows) && !all().all(|(figure, runs)| figure.is_unknown(runs)) {
        writeln!(out, "{}", filled(PERCENTILES, style.width))?;
    }
    if all().any(|(figure, runs)| figure.is_unknown(runs)) {
        let none = "-: too few allocations for this percentile.";
        writeln!(out, "{}", filled(none, style.width))?;
    }
    writeln!(out, "{}", filled(&verdict(rows), style.width))?;
    Ok(())
}

/// Returns the changes of `figure` at each ratio with a comparable value.
fn changes(rows: &Rows, figure: &Figure) -> Vec<Change> {
    rows.runs.iter().filter_map(|(_, runs)| figure.change(runs)).collect()
}

fn is_of_one_seed(rows: &Rows) -> bool {
    rows.runs.iter().all(|(_, runs)| runs.on.len() < 2)
}

/// Returns the verdict, which includes regressions. A few runs on this machine do not support a
/// conclusion about times.
fn verdict(rows: &Rows) -> String {
    let interrupts = changes(rows, &INTERRUPTS);
    let noise = "Times are from few runs, and include the effect of other programs.";
    if interrupts.is_empty() {
        let few = "CPUs were interrupted fewer than ten times.";
        return match rows.on {
            On::Native(_) => format!("{few} {noise}"),
            On::Simulated(_) => few.into(),
        };
    }
    let chance = if interrupts.iter().any(|it| it.by_chance) { "~" } else { "" };
    let ratios = interrupts.into_iter().map(|it| it.ratio);
    let few = if ratios.len() < rows.runs.len() { " in columns with ten or more" } else { "" };
    let interrupts = format!("{chance}{}{few}", words::fewer(ratios, INTERRUPTS.title));
    let of = |name: &str, figure: &Figure| {
        let changes = changes(rows, figure);
        let by_ratio = |one: &&Change, other: &&Change| one.ratio.total_cmp(&other.ratio);
        match (changes.iter().min_by(by_ratio), changes.iter().max_by(by_ratio)) {
            (Some(least), Some(most)) => {
                format!("; {name} {}", words::range(percentage(least), percentage(most)))
            }
            // No count was large enough.
            _ => String::new(),
        }
    };
    let frames = of("frames in use", &FRAMES);
    match rows.on {
        On::Native(_) => format!("Counted: {interrupts}{frames}. {noise}"),
        On::Simulated(_) => {
            let [time, p99, p999] = [("run time", TIME), ("allocation p99", P99), ("p99.9", P999)]
                .map(|(name, figure)| of(name, &figure));
            // Single runs may vary more.
            let hedge = if is_of_one_seed(rows) { ", with one seed" } else { "" };
            format!("Simulated{hedge}: {interrupts}{time}{frames}{p99}{p999}.")
        }
    }
}

/// Adds a plot to `page`.
///
/// # Errors
/// The library failed.
pub fn plot(rows: &Rows, page: &mut Page) -> Result<(), CliError> {
    let bar = |(name, figure): &(&str, Figure)| {
        let bar = |(_, runs): &(String, Runs)| match figure.change(runs) {
            Some(Change { ratio, range, .. }) => Bar { height: ratio, range: Some(range) },
            None => Bar::from(0.0),
        };
        ((*name).to_owned(), rows.runs.iter().map(bar).collect())
    };
    let groups: Vec<(String, Vec<Bar>)> = PLOTTED.iter().map(bar).collect();
    let names: Vec<_> = rows.runs.iter().map(|(ratio, _)| ratio.as_str()).collect();
    // The title distinguishes the plots of a page.
    let title = shortened(&format!("{}, relative to no deferral", rows.title), TITLE);
    let frame = Frame {
        title: &title,
        x: "ratio to no deferral",
        y: "",
        show_x: &|value| format!("{value:.1}"),
        show_y: &|_| String::new(),
        y_chars: 0,
        white: false,
    };
    let seeds = if is_of_one_seed(rows) {
        ONE_SEED
    } else {
        "A bar is the mean of all seeds, or the percentile of all their allocations. Its line is the range from the lowest to the highest seed."
    };
    page.plot(
        &rows.title,
        &format!(
            "Each figure with deferred flushes, relative to no deferral, at each ratio of fast to slow memory; 1 is no change. {seeds} \
             A bar is missing if the figure without deferral was too small."
        ),
        &named_bars(&frame, &names, &groups)?,
    );
    Ok(())
}

/// Returns the text in a table.
fn percentage(change: &Change) -> String {
    let mark = if change.by_chance { "~" } else { "" };
    format!("{mark}{:+.1} %", 100.0 * (change.ratio - 1.0))
}

/// Returns the figure without deferral, and its change with deferral, as text for a table.
fn cell(figure: &Figure, runs: &Runs) -> String {
    let Some((off, on)) = figure.values(runs, None) else { return "-".into() };
    let [off, on] = [off, on].map(|value| value * figure.scale);
    let text = |value: f64| match value {
        value if value >= 100.0 || value.fract() == 0.0 => grouped(value.round() as u64),
        value => format!("{value:.1}"),
    };
    match figure.change(runs) {
        Some(change) => format!("{} {}", text(off), percentage(&change)),
        None if on == off => text(off),
        None => format!("{} -> {}", text(off), text(on)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_workload::{Outcome, Workload};

    /// Returns runs with these run times, in seconds.
    fn runs(off: &[f64], on: &[f64]) -> Runs {
        let workload = Workload::parse("pft", ["size=64K".to_owned()]).expect("a workload");
        let native = faultless_analysis::run::machine_for(&workload).expect("a machine");
        let outcome = workload.run(&native).expect("a run of the workload");
        let of = |times: &[f64]| {
            times.iter().map(|wall| Outcome { wall: *wall, ..outcome.clone() }).collect()
        };
        Runs { off: of(off), on: of(on) }
    }

    #[test]
    fn changes_of_means_mark_possible_chance() {
        let same = runs(&[1.0, 3.0], &[0.5, 2.5]);
        assert_eq!(cell(&TIME, &same), "2,000 -25.0 %");
        assert!(!TIME.is_marked(&same));
        let mixed = runs(&[1.0, 3.0], &[1.5, 2.0]);
        assert_eq!(TIME.change(&mixed).map(|it| it.range), Some((2.0 / 3.0, 1.5)));
        assert_eq!(cell(&TIME, &mixed), "2,000 ~-12.5 %");
        // All seeds increase, but vary too much for a conclusion.
        let apart = runs(&[1.0, 1.0, 1.0], &[1.01, 1.02, 1.2]);
        assert_eq!(cell(&TIME, &apart), "1,000 ~+7.7 %");
        let close = runs(&[1.0, 1.0, 1.0], &[1.06, 1.07, 1.1]);
        assert_eq!(cell(&TIME, &close), "1,000 +7.7 %");
        // A seed without a value without deferral contributes no ratio.
        let one = TIME.change(&runs(&[0.0, 30.0], &[5.0, 3.0])).expect("a change");
        assert_eq!(one.range, (0.1, 8.0 / 30.0));
        // There are no allocations to compare.
        assert_eq!((cell(&P99, &mixed), P99.change(&mixed)), ("-".to_owned(), None));
        assert_eq!([P99, TIME].map(|it| it.is_unknown(&mixed)), [true, false]);
    }

    /// One seed with slow allocations does not determine the percentile, although it would
    /// determine a mean.
    #[test]
    fn percentiles_are_of_the_allocations_of_all_seeds() {
        let with = |slow: [[usize; 4]; 2]| {
            let mut runs = runs(&[1.0; 4], &[1.0; 4]);
            for (side, slow) in [&mut runs.off, &mut runs.on].into_iter().zip(slow) {
                for (outcome, slow) in side.iter_mut().zip(slow) {
                    let took = |at| if at < 200 - slow { 100.0 } else { 1000.0 };
                    outcome.allocations = (0..200).map(took).collect();
                }
            }
            runs
        };
        // The eighth largest of 800 allocations. Only the first seed has slow allocations.
        let one = with([[0; 4], [7, 0, 0, 0]]);
        assert_eq!(cell(&P99, &one), "100 ~+0.0 %");
        let by_chance = with([[0; 4], [8, 0, 0, 0]]);
        assert_eq!(cell(&P99, &by_chance), "100 ~+900.0 %");
        let all = with([[0; 4], [20; 4]]);
        assert_eq!(cell(&P99, &all), "100 +900.0 %");
        // Too few allocations without one of the seeds.
        assert_eq!(cell(&P999, &all), "-");
    }

    #[test]
    fn verdict_names_changes_and_marks_possible_chance() {
        let counted = |times: [&[f64]; 2], counts: [u64; 2]| {
            let mut runs = runs(times[0], times[1]);
            for (side, count) in [&mut runs.off, &mut runs.on].into_iter().zip(counts) {
                side.iter_mut().for_each(|it| it.counters = vec![(INTERRUPTS.metric, count)]);
            }
            runs
        };
        let many = counted([&[1.0, 1.0], &[0.5, 1.1]], [100, 10]);
        let few = counted([&[1.0], &[1.3]], [4, 0]);
        let runs = vec![("1:1".to_owned(), many), ("1:4".to_owned(), few.clone())];
        let rows = |on, runs| verdict(&Rows { title: String::new(), on, runs });
        let interrupts = "90 % fewer shootdown interrupts in columns with ten or more";
        let simulated = rows(On::Simulated(4), runs.clone());
        assert_eq!(simulated, format!("Simulated: {interrupts}; run time ~-20.0 % to +30.0 %."));
        let differ = |counts: [[u64; 2]; 2]| {
            let mut runs = counted([&[1.0; 2], &[1.0; 2]], [0; 2]);
            for (side, counts) in [&mut runs.off, &mut runs.on].into_iter().zip(counts) {
                for (outcome, count) in side.iter_mut().zip(counts) {
                    outcome.counters = vec![(INTERRUPTS.metric, count)];
                }
            }
            rows(On::Simulated(4), vec![("1:1".to_owned(), runs)])
        };
        let by_chance = differ([[100, 100], [99, 41]]);
        assert!(by_chance.starts_with("Simulated: ~30 % fewer shootdown"), "{by_chance}");
        let native = rows(On::Native(4), runs);
        assert!(native.starts_with(&format!("Counted: {interrupts}. ")), "{native}");
        let native = rows(On::Native(4), vec![("1:4".to_owned(), few)]);
        assert!(native.contains("fewer than ten times. Times are from few runs"), "{native}");
    }
}
