//! `faultless scale --table`: published tables, with simulated figures beside the published
//! figures.

use super::ScaleArgs;
use super::counts::Counts;
use super::print::{START_UP, column, start_up};
use crate::error::CliError;
use crate::interrupt;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{self, Style, table};
use clap::ValueEnum;
use faultless_analysis::number::grouped;
use faultless_analysis::scale::Ran;
use faultless_analysis::scale::published::{self, Name, Ratio, Table, rate, tables};
use faultless_virtual::Spent;
use std::collections::BTreeSet;
use std::io::Write;

/// A published table, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum TableArg {
    /// Prefault, 32 GB, on 1 to 512 CPUs (2004)
    Prefault,
    /// ebizzy on 24 and 1,024 CPUs (2019)
    Ebizzy,
    /// page_fault1, 2 and 3 on 72 CPUs (2019)
    PageFault,
    /// small_allocs on 224 CPUs (2024)
    SmallAllocs,
    /// mmap, munmap and faults, private and shuffled, on 384 CPUs (2025)
    Vma,
    /// All tables
    All,
}

impl TableArg {
    /// Returns the table; `None` for all tables.
    const fn name(self) -> Option<Name> {
        match self {
            Self::Prefault => Some(Name::Prefault),
            Self::Ebizzy => Some(Name::Ebizzy),
            Self::PageFault => Some(Name::PageFault),
            Self::SmallAllocs => Some(Name::SmallAllocs),
            Self::Vma => Some(Name::Vma),
            Self::All => None,
        }
    }
}

/// Returns the tables selected by `which`, with the rows for the given numbers of CPUs.
///
/// # Errors
/// No row has any of these numbers of CPUs.
fn chosen(which: TableArg, cpus: Option<&Counts>) -> Result<Vec<Table>, CliError> {
    let mut tables = tables(which.name());
    let Some(Counts(wanted)) = cpus else { return Ok(tables) };
    let known: BTreeSet<_> =
        tables.iter().flat_map(|table| table.rows.iter().map(|row| row.cpus)).collect();
    for table in &mut tables {
        // A row and its base have the same number of CPUs, so the base of a row stays.
        table.rows.retain(|row| wanted.contains(&row.cpus));
    }
    tables.retain(|table| !table.rows.is_empty());
    if tables.is_empty() {
        let known: Vec<_> = known.iter().map(usize::to_string).collect();
        let why = format!("--cpus: the table has rows for {} CPUs only", known.join(", "));
        return Err(CliError::Usage(why));
    }
    Ok(tables)
}

/// Formats a published ratio.
fn show(ratio: Ratio) -> String {
    match ratio {
        Ratio::Exactly(ratio) => times(ratio),
        Ratio::AtLeast(least) => format!("at least {}", times(least)),
        Ratio::Between(least, most) => format!("{} to {}", times(least), times(most)),
    }
}

/// Formats a ratio.
fn times(ratio: f64) -> String {
    let places = if ratio < 10.0 { 2 } else { 0 };
    format!("{ratio:.places$}x")
}

/// Runs the tables.
pub fn run(args: &ScaleArgs, which: TableArg) -> Result<(), CliError> {
    let tables = chosen(which, args.cpus.as_ref())?;
    let mut json = Json::open(&args.json, &[])?;
    let (mut out, style) = report::output(&args.json);
    let progress = Progress::new(tables.iter().map(|table| table.rows.len() as u64).sum());
    let mut failures = Vec::new();
    for table in &tables {
        let runs = published::run(table, args.seed, &mut json, &progress, &mut failures)?;
        if !runs.is_empty() {
            progress.print(|| {
                print(&mut *out, table, &runs, style)?;
                if args.details { details(&mut *out, table, &runs, style) } else { Ok(()) }
            })?;
        }
    }
    drop(progress);
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    if failures.is_empty() { json.complete() } else { Err(CliError::Failed(failures.join("\n"))) }
}

/// Prints the completed rows of a table.
fn print(
    out: &mut dyn Write,
    of: &Table,
    runs: &[Option<Ran>],
    style: Style,
) -> Result<(), CliError> {
    writeln!(out, "\n{}, simulated", of.title)?;
    writeln!(out, "Differences: {}\n", of.differs)?;
    let steady = of.rows.iter().any(|row| row.warm_up.is_some());
    let mut head = vec!["", "CPUs", "", "simulated,\na second", "to base"];
    head.extend(steady.then_some("start-up,\ncalls"));
    head.extend(["published", "to base"]);
    let head: Vec<_> = head.into_iter().map(str::to_owned).collect();
    let mut table = table::numbers(&head, style);
    for (at, row) in of.rows.iter().enumerate().take(runs.len()) {
        let number = |it: Option<f64>| it.map_or("-".to_owned(), |it| grouped(it.round() as u64));
        let mut cells = vec![
            row.label.clone(),
            row.cpus.to_string(),
            row.subject.unit().to_owned(),
            number(rate(&runs[at])),
            of.simulated(at, runs).map(times).unwrap_or_default(),
        ];
        if steady {
            let steady = runs[at].as_ref().and_then(|ran| ran.steady);
            cells.push(steady.map_or_else(|| "-".to_owned(), start_up));
        }
        cells.push(number(row.published));
        cells.push(of.published(at).map(show).unwrap_or_default());
        table::row(&mut table, cells);
    }
    writeln!(out, "{table}")?;
    if steady {
        let whole = "With `-`, the figures are those of the whole run: CPUs end their work before others make two calls.";
        writeln!(out, "{START_UP} {whole}")?;
    }
    let profiles: BTreeSet<_> = of.rows.iter().map(|row| row.profile).collect();
    let profiles = profiles.into_iter().collect::<Vec<_>>().join(", ");
    writeln!(out, "The figures of faultless are simulated (profile {profiles}). Published by:")?;
    let sources: BTreeSet<_> = of.rows.iter().filter_map(|row| row.source.as_deref()).collect();
    for source in sources {
        writeln!(out, "  {source}")?;
    }
    Ok(())
}

/// Prints the CPU time of each row by purpose, its faults and its cache lines, per unit.
fn details(
    out: &mut dyn Write,
    of: &Table,
    runs: &[Option<Ran>],
    style: Style,
) -> Result<(), CliError> {
    writeln!(
        out,
        "\nFor each unit: CPU time in ns by purpose, as the columns of `scale` without --table; faults; lines from other CPUs and from \
         memory\n"
    )?;
    let mut head = ["", "CPUs", "time"].map(str::to_owned).to_vec();
    head.extend(Spent::ALL.map(|on| column(on).to_owned()));
    head.extend(["faults", "lines from\nCPUs", "lines from\nmemory"].map(str::to_owned));
    let mut table = table::numbers(&head, style);
    for (row, ran) in of.rows.iter().zip(runs) {
        let Some(ran) = ran else { continue };
        let units = ran.sample.operations.max(1) as f64;
        let nanoseconds = |spent: u64| format!("{:.0}", spent as f64 / 1000.0 / units);
        let each = |count: u64| format!("{:.2}", count as f64 / units);
        let mut cells = vec![row.label.clone(), row.cpus.to_string()];
        cells.push(nanoseconds(ran.accounts.spent.iter().sum()));
        cells.extend(ran.accounts.spent.map(nanoseconds));
        cells.extend([ran.sample.faults, ran.accounts.transfers, ran.accounts.fetches].map(each));
        table::row(&mut table, cells);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_analysis::Sample;
    use faultless_virtual::Accounts;

    /// Returns a run of `operations` in a second.
    fn ran(operations: u64) -> Option<Ran> {
        let counters = Vec::new();
        let (faults, wall, user, system) = (operations, 1.0, 0.0, 0.0);
        Some(Ran {
            sample: Sample { operations, faults, wall, user, system, counters },
            steady: None,
            accounts: Accounts::default(),
            hottest: Vec::new(),
            latencies: Default::default(),
        })
    }

    #[test]
    fn rows_are_compared_with_their_base() {
        let table = tables(Some(Name::Prefault)).remove(0);
        let runs = [ran(1000), None, ran(3500), ran(10), ran(25)];
        let mut out = Vec::new();
        print(&mut out, &table, &runs, Style { terminal: false, width: 100 })
            .expect("writes to a vector");
        let out = String::from_utf8(out).expect("text");
        let cells = |at: usize| {
            let row = out.lines().filter(|line| line.contains("| pages")).nth(at).expect("a row");
            row.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(cells(0)[4..8], ["1,000", "", "45,097", ""], "{out}");
        assert_eq!(cells(1)[4..8], ["-", "", "45,058", "1.00x"], "{out}");
        assert_eq!(cells(2)[4..8], ["3,500", "3.50x", "45,544", "1.01x"], "{out}");
        assert_eq!(cells(4)[4..8], ["25", "2.50x", "342,934", "2.89x"], "{out}");
        assert!(out.contains("C. Lameter"), "{out}");
    }

    #[test]
    fn selected_cpus_keep_rows_with_their_bases() {
        let chosen = |which, cpus: &str| chosen(which, Some(&cpus.parse().expect("numbers")));
        let prefault = chosen(TableArg::Prefault, "1,64..128").expect("rows for these CPUs");
        let cpus: Vec<_> = prefault[0].rows.iter().map(|row| row.cpus).collect();
        assert_eq!(cpus, [1, 1, 1, 64, 64, 64, 128, 128, 128]);
        let all = chosen(TableArg::All, "24,72").expect("two tables have such rows");
        assert_eq!(
            all.iter().map(|table| table.name).collect::<Vec<_>>(),
            ["ebizzy", "page_fault"]
        );
        for table in &all {
            let runs: Vec<_> = table.rows.iter().map(|_| ran(7)).collect();
            let ratios = (0..runs.len()).filter_map(|at| table.simulated(at, &runs)).count();
            assert_eq!(ratios * 2, table.rows.len(), "each second row has a base");
        }
        let error = chosen(TableArg::Prefault, "2").expect_err("no row has 2 CPUs").to_string();
        assert!(error.contains("1, 8, 16, 64, 128, 512 CPUs"), "{error}");
    }
}
