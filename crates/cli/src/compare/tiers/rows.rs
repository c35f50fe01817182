//! A workload on one machine at each ratio: the table, its verdict, and the plot.

use super::figures::{Change, FIGURES, FRAMES, Figure, INTERRUPTS, P99, P999, Runs, TIME};
use super::{On, words};
use crate::error::CliError;
use crate::html::Page;
use crate::html::plot::{Bar, Frame, bars};
use crate::report::{Style, filled, table};
use std::io::Write;

/// The plotted figures.
const PLOTTED: [(&str, Figure); 4] = [
    ("shootdown interrupts", INTERRUPTS),
    ("run time", TIME),
    ("frames in use", FRAMES),
    ("allocation, 99th percentile", P99),
];

const ONE_SEED: &str = "With one seed, a change cannot be distinguished from chance.";

const PERCENTILES: &str = "p50, p99, p99.9: of the allocations of all seeds.";

/// One workload on one machine, at each ratio without deferral and with deferral.
pub struct Rows {
    pub title: String,
    pub(super) on: On,
    /// The runs of each ratio.
    pub runs: Vec<(String, Runs)>,
}

impl Rows {
    /// Prints the table and its verdict.
    ///
    /// # Errors
    /// The output is closed.
    pub fn print(&self, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
        let title =
            format!("{}: figures without deferred flushes, and the change with them", self.title);
        writeln!(out, "\n{}", filled(&title, style.width))?;
        let head =
            std::iter::once("fast:slow").chain(self.runs.iter().map(|(ratio, _)| ratio.as_str()));
        let mut rows = table::numbers(&head.map(str::to_owned).collect::<Vec<_>>(), style);
        for figure in &FIGURES {
            let cells = self.runs.iter().map(|(_, runs)| figure.cell(runs));
            table::row(&mut rows, std::iter::once(figure.title.to_owned()).chain(cells));
        }
        writeln!(out, "{rows}")?;
        let all =
            || FIGURES.iter().flat_map(|it| self.runs.iter().map(move |(_, runs)| (it, runs)));
        if self.is_of_one_seed() {
            writeln!(out, "{}", filled(ONE_SEED, style.width))?;
        } else if all().any(|(figure, runs)| figure.is_marked(runs)) {
            let mark = "~: may be chance, as seeds differ by more (Student's t, 95 %).";
            writeln!(out, "{}", filled(mark, style.width))?;
        }
        if !self.is_of_one_seed() && !all().all(|(figure, runs)| figure.is_unknown(runs)) {
            writeln!(out, "{}", filled(PERCENTILES, style.width))?;
        }
        if all().any(|(figure, runs)| figure.is_unknown(runs)) {
            let none = "-: too few allocations for this percentile.";
            writeln!(out, "{}", filled(none, style.width))?;
        }
        writeln!(out, "{}", filled(&self.verdict(), style.width))?;
        Ok(())
    }

    /// Returns the changes of `figure` at each ratio with a comparable value.
    fn changes(&self, figure: &Figure) -> Vec<Change> {
        self.runs.iter().filter_map(|(_, runs)| figure.change(runs)).collect()
    }

    fn is_of_one_seed(&self) -> bool {
        self.runs.iter().all(|(_, runs)| runs.on.len() < 2)
    }

    /// Returns the verdict, which includes regressions. A few runs on this machine do not support a
    /// conclusion about times.
    fn verdict(&self) -> String {
        let interrupts = self.changes(&INTERRUPTS);
        let noise = "Times are of few runs, and other programs are in them.";
        if interrupts.is_empty() {
            let few = "CPUs were interrupted fewer than ten times.";
            return match self.on {
                On::Native(_) => format!("{few} {noise}"),
                On::Simulated(_) => few.into(),
            };
        }
        let chance = if interrupts.iter().any(|it| it.by_chance) { "~" } else { "" };
        let ratios = interrupts.into_iter().map(|it| it.ratio);
        let few = if ratios.len() < self.runs.len() { " where there were ten or more" } else { "" };
        let interrupts = format!("{chance}{}{few}", words::fewer(ratios, INTERRUPTS.title));
        let of = |name: &str, figure: &Figure| {
            let changes = self.changes(figure);
            let by_ratio = |one: &&Change, other: &&Change| one.ratio.total_cmp(&other.ratio);
            match (changes.iter().min_by(by_ratio), changes.iter().max_by(by_ratio)) {
                (Some(least), Some(most)) => {
                    format!("; {name} {}", words::range(least.told(), most.told()))
                }
                // No count was large enough.
                _ => String::new(),
            }
        };
        let frames = of("frames in use", &FRAMES);
        match self.on {
            On::Native(_) => format!("Counted: {interrupts}{frames}. {noise}"),
            On::Simulated(_) => {
                let [time, p99, p999] =
                    [("run time", TIME), ("allocation p99", P99), ("p99.9", P999)]
                        .map(|(name, figure)| of(name, &figure));
                // Single runs may vary more.
                let hedge = if self.is_of_one_seed() { ", as one seed has it" } else { "" };
                format!("Simulated{hedge}: {interrupts}{time}{frames}{p99}{p999}.")
            }
        }
    }

    /// Adds a plot to `page`.
    ///
    /// # Errors
    /// The library failed.
    pub fn plot(&self, page: &mut Page) -> Result<(), CliError> {
        let bar = |(name, figure): &(&str, Figure)| {
            let bar = |(_, runs): &(String, Runs)| match figure.change(runs) {
                Some(Change { ratio, range, .. }) => Bar { height: ratio, range: Some(range) },
                None => Bar::from(0.0),
            };
            ((*name).to_owned(), self.runs.iter().map(bar).collect())
        };
        let groups: Vec<(String, Vec<Bar>)> = PLOTTED.iter().map(bar).collect();
        let names: Vec<_> = self.runs.iter().map(|(ratio, _)| ratio.as_str()).collect();
        let frame = Frame {
            title: "Deferred flushes, relative to no deferral",
            x: "",
            y: "ratio to no deferral",
            show_x: &|_| String::new(),
            show_y: &|value| format!("{value:.1}"),
            y_chars: 4,
            white: false,
        };
        let seeds = if self.is_of_one_seed() {
            ONE_SEED
        } else {
            "A bar is the mean of all seeds, or the percentile of all their allocations. Its line is the range from the lowest to the highest seed."
        };
        page.plot(
            &self.title,
            &format!(
                "Each figure with deferred flushes, relative to no deferral, at each ratio of fast to slow memory; 1 is no change. {seeds} \
                 A bar is missing if the figure without deferral was too small."
            ),
            &bars(&frame, &names, &groups, false)?,
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::runs;
    use super::*;

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
        let rows = |on, runs| Rows { title: String::new(), on, runs }.verdict();
        let interrupts = "90 % fewer shootdown interrupts where there were ten or more";
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
        assert!(native.contains("fewer than ten times. Times are of few runs"), "{native}");
    }
}
