//! The results of a comparison, as a page.

use super::tiers;
use crate::error::CliError;
use crate::html::Page;
use crate::html::plot::{Bar, Frame, Show, bars};
use crate::report::Style;
use faultless_analysis::columns::{Column, Measure, Report};
use faultless_analysis::compare::faults::Faults;
use faultless_analysis::compare::many::Many;
use faultless_analysis::compare::tiers::Rows;

/// Creates the page.
///
/// # Errors
/// The library failed.
pub fn page(
    (faults, many): (&Faults, &Many),
    programs: &[(&str, &Report)],
    (all, style): (&[Rows], Style),
    text: &str,
) -> Result<Page, CliError> {
    let mut page = Page::new("Page faults with and without a lock");
    let (names, groups) = faults.places();
    if !groups.is_empty() {
        let groups = parts(groups);
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let frame = frame("Instructions of a first write to a page, by module", "instructions", "");
        page.plot(
            "Instructions of a fault by module",
            "The total is counted. The modules of the subsystem share the total in proportion to their accesses to shared memory in the fault.",
            &bars(&frame, &names, &groups, true)?,
        );
    }
    let (policies, rows) = many.ratios();
    if !rows.is_empty() {
        let frame = frame("Simulated operations per second", "to the best lock", "");
        page.plot(
            "Many CPUs",
            "Operations per second of each policy, relative to the best locking policy.",
            &bars(&frame, &policies, &parts(rows), false)?,
        );
    }
    let program = |(name, report): &(&str, &Report)| {
        let base = report.columns.first()?.median()?.wall;
        Some(((*name).to_owned(), report.columns.iter().map(|it| relative(it, base)).collect()))
    };
    let groups: Vec<(String, Vec<Bar>)> = programs.iter().filter_map(program).collect();
    if let Some((_, first)) = programs.first().filter(|_| !groups.is_empty()) {
        let names: Vec<_> = first.columns.iter().map(|column| column.name.as_str()).collect();
        let frame = frame("Time of a replay on this machine", "to the first policy", "");
        page.plot(
            "Real programs",
            "The median time of a program's faults and calls under each policy; the line on a \
             bar is the 95 % interval. If the intervals of two bars overlap, the difference is \
             within the noise. Fewer than 6 repetitions have no interval.",
            &bars(&frame, &names, &groups, false)?,
        );
    }
    add_tiers(&mut page, all, style)?;
    page.text("In figures", text);
    Ok(page)
}

/// Creates the page for a run of only workloads in tiers; `None` if no workload ran.
///
/// # Errors
/// The library failed.
pub fn of_tiers(all: &[Rows], style: Style) -> Result<Option<Page>, CliError> {
    if all.is_empty() {
        return Ok(None);
    }
    let mut page = Page::new("Effect of deferred flushes on tiered memory");
    add_tiers(&mut page, all, style)?;
    Ok(Some(page))
}

/// Adds a plot of each of `all`, and their tables.
fn add_tiers(page: &mut Page, all: &[Rows], style: Style) -> Result<(), CliError> {
    let mut text = Vec::new();
    for rows in all {
        tiers::plot(rows, page)?;
        tiers::print(rows, &mut text, style)?;
    }
    if !all.is_empty() {
        page.text("Tiers in figures", &String::from_utf8_lossy(&text));
    }
    Ok(())
}

/// Returns the time of a replay, relative to `base`.
fn relative(column: &Column, base: f64) -> Bar {
    let Some(median) = column.median() else { return Bar::from(0.0) };
    let rates = column.rates(Measure::Operations);
    let time = |rate: f64| median.operations as f64 / rate / base;
    let range = rates.range().map(|(low, high)| (time(high), time(low)));
    Bar { height: median.wall / base, range }
}

fn parts(groups: Vec<(String, Vec<f64>)>) -> Vec<(String, Vec<Bar>)> {
    let bars = |parts: Vec<f64>| parts.into_iter().map(Bar::from).collect();
    groups.into_iter().map(|(name, parts)| (name, bars(parts))).collect()
}

fn frame<'a>(title: &'a str, y: &'a str, x: &'a str) -> Frame<'a> {
    let show_y: Show<'_> =
        &|value: f64| if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    Frame { title, x, y, show_x: &|_| String::new(), show_y, y_chars: 5, white: false }
}
