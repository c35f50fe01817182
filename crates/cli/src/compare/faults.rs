//! The table of the cost of one fault, and its verdict.

use super::words;
use crate::error::CliError;
use crate::report::{Style, filled, table};
use faultless::Locking;
use faultless_analysis::compare::faults::{Cost, Faults, Kind, Row};
use faultless_analysis::number::plural;
use std::io::Write;

/// Returns the name used in the table.
const fn title(kind: Kind) -> &'static str {
    match kind {
        Kind::Write => "first write to a page",
        Kind::Read => "first read of a page",
        Kind::Copy => "write after fork (copy, TLB flush)",
        Kind::File => "first write to a page of a file",
    }
}

/// Prints the table and its verdict.
///
/// # Errors
/// The output is closed.
pub fn print(faults: &Faults, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
    let Some(first) = faults.0.first() else { return Ok(()) };
    let heading = "Faults: instructions (counted with the default knobs, without filling the page), cache lines written that other CPUs use, too";
    writeln!(out, "\n{}", filled(heading, style.width))?;
    let mut head = vec!["one fault".to_owned()];
    head.extend(first.costs.iter().map(|(policy, _)| policy.name().to_owned()));
    let mut table = table::numbers(&head, style);
    for row in &faults.0 {
        let mut cells = vec![title(row.kind).to_owned()];
        let cell = |(_, cost): &(Locking, Cost)| {
            format!("{:.0}, {}", cost.instructions, plural(cost.lines, "line"))
        };
        cells.extend(row.costs.iter().map(cell));
        table::row(&mut table, cells);
    }
    writeln!(out, "{table}")?;
    if let Some(verdict) = verdict(faults) {
        writeln!(out, "{}", filled(&verdict, style.width))?;
    }
    Ok(())
}

/// Compares the last policy with the first.
fn verdict(faults: &Faults) -> Option<String> {
    let ends = |row: &Row| Some((row.costs.first()?.clone(), row.costs.last()?.clone()));
    let pairs: Vec<_> = faults.0.iter().filter_map(ends).collect();
    let ((base, _), (last, _)) = pairs.first()?;
    if base == last {
        return None;
    }
    let of = |cost: fn(&Cost) -> f64| pairs.iter().map(move |((_, a), (_, b))| cost(b) / cost(a));
    Some(format!(
        "Verdict: a fault takes {} and writes {} under {} than under {}.",
        words::fewer(of(|cost| cost.instructions), "instructions"),
        words::fewer(of(|cost| cost.lines as f64), "shared cache lines"),
        last.name(),
        base.name(),
    ))
}
