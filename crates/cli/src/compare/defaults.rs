//! The table of the effect of each mechanism, and its verdict.

use super::words;
use crate::error::CliError;
use crate::report::effect::Share;
use crate::report::{Style, filled, table};
use faultless_analysis::compare::defaults::{Defaults, Of, Row};
use faultless_analysis::number::{grouped, scaled};
use std::io::Write;

/// Formats a figure.
fn show(figure: Of, value: f64) -> String {
    match figure {
        Of::Rate => format!("{}/s", scaled(value)),
        Of::Faults => format!("{} faults", grouped(value as u64)),
        Of::Time => format!("{:.1} ms", 1e3 * value),
    }
}

/// Describes the figure with the mechanism on, relative to off.
fn verdict(row: &Row) -> String {
    let ratio = row.on / row.off;
    match row.figure {
        Of::Rate => words::rate(ratio),
        Of::Faults => words::fewer(std::iter::once(ratio), "faults"),
        Of::Time => words::amount(ratio, "time"),
    }
}

/// Prints the table and its verdict.
///
/// # Errors
/// The output is closed.
pub fn print(defaults: &Defaults, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
    if defaults.rows.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nDefaults: each mechanism off and on, simulated")?;
    let head = ["knob", "default", "of", "off", "on", "on beside off"].map(str::to_owned);
    let mut table = table::numbers(&head, style);
    for row in &defaults.rows {
        let Row { knob, default, of, figure, off, on } = row;
        let [off, on] = [off, on].map(|value| show(*figure, *value));
        let cells = [knob.clone(), (*default).to_owned(), of.clone(), off, on, verdict(row)];
        table::row(&mut table, cells);
    }
    writeln!(out, "{table}")?;
    for (order, effects) in &defaults.effects {
        let effects: Vec<_> = effects.iter().collect();
        let [saved, bound, unused, growth] = Share::ALL.map(|share| share.mean(&effects));
        let text = format!(
            "Verdict: prefault up to order {order} saves {saved} of the faults on first touches \
             of the recordings (a perfect predictor: {bound}); {unused} of the prefaulted pages \
             remain unused, and resident memory grows by {growth}."
        );
        writeln!(out, "{}", filled(&text, style.width))?;
    }
    Ok(())
}
