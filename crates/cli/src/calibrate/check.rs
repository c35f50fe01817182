//! Predictions of a profile beside measurements.

use crate::error::CliError;
use crate::interrupt;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{Style, table};
use faultless_analysis::calibrate::Scope;
use faultless_analysis::calibrate::check::{self, NEAR, Row};
use faultless_analysis::number::grouped;
use faultless_analysis::settings::Settings;
use faultless_virtual::Profile;
use std::io::Write;

/// Predicts and measures, and prints both.
///
/// # Errors
/// A run failed.
pub fn run(
    out: &mut dyn Write,
    json: &mut Json,
    profile: &Profile,
    settings: &Settings,
    (scope, style): (Scope, Style),
) -> Result<(), CliError> {
    let progress = Progress::new(check::steps(scope));
    let rows = check::run(profile, settings, scope, json, &progress)?;
    drop(progress);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    print(out, rows, cpus, style)?;
    if interrupt::requested() {
        return Ok(());
    }
    if let Some(now) = check::placement(profile, scope)? {
        let then = profile.line.complex_ns.value;
        writeln!(
            out,
            "A transfer of a line to the other CPU takes {now:.0} ns now and {then:.0} ns in the profile: for rows of several threads the CPUs are placed differently."
        )?;
    }
    Ok(())
}

/// Sorts the rows, the largest error first.
fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    rows.sort_by(|one, other| other.error().abs().total_cmp(&one.error().abs()));
    rows
}

/// Prints the rows, with a mark at those with more threads than the host's `cpus`.
fn print(out: &mut dyn Write, rows: Vec<Row>, cpus: usize, style: Style) -> Result<(), CliError> {
    let rows = sorted(rows);
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\nPredictions of the profile, simulated, and measurements of the native machine, the fastest of several runs; operations a second, the worst row first:\n"
    )?;
    let head = ["", "threads", "native", "simulated", "off by"].map(str::to_owned);
    let mut table = table::numbers(&head, style);
    for row in &rows {
        let over = if row.threads > cpus { " *" } else { "" };
        table::row(
            &mut table,
            [
                row.name.clone(),
                format!("{}{over}", row.threads),
                grouped(row.native.round() as u64),
                grouped(row.simulated.round() as u64),
                format!("{:+.1} %", row.error()),
            ],
        );
    }
    writeln!(out, "{table}")?;
    let near = rows.iter().filter(|row| row.error().abs() <= NEAR).count();
    writeln!(out, "\n{near} of {} rows are within {NEAR} %.", rows.len())?;
    if rows.iter().any(|row| row.threads > cpus) {
        writeln!(
            out,
            "* More threads than CPUs of the host; in simulation each thread has a CPU."
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_analysis::Context;

    fn row(name: &str, native: f64, simulated: f64) -> Row {
        let context = Context::new("native", name, 1);
        Row { name: name.into(), threads: 1, native, simulated, context }
    }

    #[test]
    fn largest_error_is_first() {
        let rows =
            vec![row("near", 100.0, 110.0), row("low", 100.0, 60.0), row("high", 100.0, 130.0)];
        let mut out = Vec::new();
        print(&mut out, rows, 2, Style { terminal: false, width: 100 })
            .expect("writes to a vector");
        let out = String::from_utf8(out).expect("text");
        let at = |name: &str| out.find(name).unwrap_or(usize::MAX);
        assert!(at("low") < at("high") && at("high") < at("near"), "{out}");
        assert!(out.contains("-40.0 %") && out.contains("1 of 3 rows"), "{out}");
    }

    #[test]
    fn rows_with_more_threads_than_cpus_are_marked() {
        let marked = |cpus| {
            let rows = [1, 2, 20].map(|threads| Row { threads, ..row("w", 100.0, 100.0) });
            let mut out = Vec::new();
            let style = Style { terminal: false, width: 100 };
            print(&mut out, rows.into(), cpus, style).expect("it is a vector");
            let out = String::from_utf8(out).expect("text");
            assert_eq!(out.contains("* More threads"), out.contains(" * "), "{out}");
            [1, 2, 20].map(|threads| out.contains(&format!("{threads} * ")))
        };
        assert_eq!(marked(1), [false, true, true]);
        assert_eq!(marked(2), [false, false, true]);
        assert_eq!(marked(64), [false; 3]);
    }
}
