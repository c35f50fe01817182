//! The cost of pages of anonymous memory with prefault, and on pre-zeroed frames.

use super::figures::{Figure, show};
use super::{Done, Side, of};
use crate::error::CliError;
use crate::report::{Style, table};
use faultless_analysis::settings::Regime;
use faultless_boot::linux::Stock;
use std::io::Write;

/// The figures that prefault changes.
pub const ROWS: [&str; 3] = ["anon_write_fault", "anon_munmap_page", "anon_mmap_touch_munmap_page"];

/// Prints the figures, with a column for each regime and its ratio to the first.
pub fn print(
    out: &mut dyn Write,
    done: &[Done],
    regimes: &[Regime],
    stock: &Stock,
    style: Style,
) -> Result<(), CliError> {
    let linux = of(done, Side::LINUX, "rows", 1, Regime::OFF);
    let ours = |regime: &Regime| of(done, Side::Ours, "rows", 1, *regime);
    let columns: Vec<_> = regimes.iter().map(ours).collect();
    let known = |name: &str| columns.iter().skip(1).any(|figures| value(figures, name).is_some());
    // Without a figure with prefault, the rows contain all results.
    if !ROWS.into_iter().any(known) {
        return Ok(());
    }
    let mut head = vec!["instructions per page".to_owned()];
    head.extend(regimes.iter().map(|regime| regime.name()));
    head.push(stock.name.clone());
    let mut table = table::numbers(&head, style);
    for name in ROWS {
        let off = columns.first().and_then(|figures| value(figures, name));
        let cell = |(at, figures): (usize, &&[Figure])| {
            let cost = value(figures, name);
            match cost.zip(off).filter(|_| at > 0) {
                Some((cost, off)) => format!("{} ({:.2}x)", show(Some(cost)), cost / off),
                None => show(cost),
            }
        };
        let cells = columns.iter().enumerate().map(cell);
        let name_cell = std::iter::once(name.replace('_', " "));
        table::row(&mut table, name_cell.chain(cells).chain([show(value(linux, name))]));
    }
    writeln!(out, "Prefaulted pages, on the same machine")?;
    writeln!(out, "{table}")?;
    writeln!(
        out,
        "Zeroed: the machine was idle before each pass, and filled a pool of {} frames. Prefault saves exceptions; their hardware \
         cost is\nnot counted as instructions, so these figures do not show it.\n",
        regimes.last().map_or(0, |regime| regime.pool)
    )?;
    Ok(())
}

fn value(figures: &[Figure], name: &str) -> Option<f64> {
    figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
}
