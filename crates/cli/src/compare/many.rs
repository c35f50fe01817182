//! The table of workloads on many simulated CPUs, and its verdict.

use super::words;
use crate::error::CliError;
use crate::report::{Style, filled, table};
use faultless_analysis::compare::many::{Many, Row};
use faultless_analysis::number::scaled;
use std::io::Write;

/// Prints the table and its verdict.
///
/// # Errors
/// The output is closed.
pub fn print(many: &Many, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
    let has_rate = |row: &&Row| row.rates.iter().any(|(_, rate)| rate.is_some());
    let Some(first) = many.rows.iter().find(has_rate) else { return Ok(()) };
    writeln!(
        out,
        "\nMany CPUs: simulated (profile {}), a second, prefault off; the same figures on every run",
        many.profile
    )?;
    let mut head = ["workload", "CPUs", "of"].map(str::to_owned).to_vec();
    head.extend(first.rates.iter().map(|(policy, _)| policy.name().to_owned()));
    let compared = many.rows.iter().find_map(Row::beside_best);
    head.extend(compared.map(|(last, _)| format!("{} to the best lock", last.name())));
    let mut table = table::numbers(&head, style);
    for row in &many.rows {
        let mut cells = vec![row.name.clone(), row.cpus.to_string(), row.unit.to_owned()];
        let rate = |rate: Option<f64>| {
            rate.map_or("failed".to_owned(), |rate| scaled(rate).trim().to_owned())
        };
        cells.extend(row.rates.iter().map(|(_, it)| rate(*it)));
        let ratio = row.beside_best().map_or("-".to_owned(), |(_, ratio)| words::rate(ratio));
        cells.extend(compared.map(|_| ratio));
        table::row(&mut table, cells);
    }
    writeln!(out, "{table}")?;
    if let Some(verdict) = verdict(many) {
        writeln!(out, "{}", filled(&verdict, style.width))?;
    }
    Ok(())
}

fn verdict(many: &Many) -> Option<String> {
    let ratios: Vec<_> = many.rows.iter().filter_map(Row::beside_best).collect();
    let (last, _) = *ratios.first()?;
    let count = |is: fn(f64) -> bool| ratios.iter().filter(|(_, ratio)| is(*ratio)).count();
    let more = count(|ratio| ratio > 1.0 && !words::is_same(ratio));
    let same = count(words::is_same);
    let less = ratios.len() - more - same;
    let (least, most) = words::ends(ratios.iter().map(|(_, ratio)| *ratio));
    let parts = [(more, "more"), (same, "the same"), (less, "less")];
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    let parts: Vec<_> = parts.map(|(count, what)| format!("{what} in {count}")).collect();
    Some(format!(
        "Verdict: {} does {} times as much as the best lock: {}.",
        last.name(),
        words::range(words::times(least), words::times(most)),
        parts.join(", "),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless::Locking;

    #[test]
    fn last_policy_is_compared_with_the_best_other() {
        let row = |rates: [Option<f64>; 3]| Row {
            name: "w".into(),
            unit: "pages",
            cpus: 64,
            rates: Locking::ALL.into_iter().zip(rates).collect(),
        };
        let rows = vec![
            row([Some(10.0), Some(20.0), Some(60.0)]),
            row([Some(30.0), Some(10.0), Some(30.0)]),
            row([Some(2.0), Some(1.0), Some(1.0)]),
            row([Some(5.0), None, Some(7.0)]),
        ];
        let many = Many { profile: "p".into(), rows };
        let mut out = Vec::new();
        print(&many, &mut out, Style { terminal: false, width: 100 }).expect("writes to a vector");
        let out = String::from_utf8(out).expect("text").replace("\n  ", " ");
        for expected in [
            "3.0 times as much",
            "the same",
            "50 % less",
            "as the best lock: more in 1, the same in 1, less in 1",
        ] {
            assert!(out.contains(expected), "no {expected:?} in {out}");
        }
        let failed = out.lines().find(|line| line.contains("failed")).expect("a row");
        let cells: Vec<_> = failed.split('|').map(str::trim).collect();
        assert_eq!(cells[4..8], ["5.00", "failed", "7.00", "-"], "{out}");
    }
}
