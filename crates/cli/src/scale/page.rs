//! The results of a scale, as a page.

use super::plot;
use crate::error::CliError;
use crate::html::Page;
use crate::html::plot::{
    Bar, Frame, Picture, Series, SeriesLabelPosition, bars, distribution, extent, linear, lines,
    log_axis,
};
use faultless_analysis::number::{label, plural};
use faultless_analysis::scale::{Ran, Scaled};
use faultless_virtual::Spent;
use faultless_virtual::rates::Operation;

/// Picoseconds in a nanosecond.
const NANOSECOND: f64 = 1000.0;

/// Creates the page.
///
/// # Errors
/// There are no results to draw.
pub fn page(scaled: &Scaled, text: &str) -> Result<Page, CliError> {
    let mut page = Page::new(format!("{}, simulated", scaled.name));
    let meaning =
        "Operations per second over CPUs, both axes logarithmic. All figures are simulated.";
    page.plot("Throughput over CPUs", meaning, &plot::draw(scaled, false)?);
    let most = scaled.points.iter().map(|point| point.cpus).max().unwrap_or(1);
    let last: Vec<_> = scaled.points.iter().filter(|point| point.cpus == most).collect();
    let runs: Vec<_> =
        last.iter().map(|point| (point.policy.name().to_owned(), &point.ran)).collect();
    let on = plural(most as u64, "CPU");
    page.plot(
        "Time by activity",
        &format!("Time of each operation on {on}, divided by the activity of the CPU."),
        &time(&runs, scaled.unit, &on)?,
    );
    for (operation, name) in [(Operation::Fault, "faults"), (Operation::Map, "mmap and munmap")] {
        if let Some(picture) = latencies(&runs, operation, &format!("Latency of {name} on {on}"))? {
            let meaning = "Share of operations that take at most the time on the axis, including the entry into the kernel.";
            page.plot(&format!("Latencies: {name}"), meaning, &picture);
        }
    }
    page.text("In figures", text);
    Ok(page)
}

/// Draws the nanoseconds of each operation by purpose: a bar for each of `runs`.
///
/// # Errors
/// The library failed.
pub fn time(runs: &[(String, &Ran)], unit: &str, on: &str) -> Result<Picture, CliError> {
    let group = |(name, ran): &(String, &Ran)| {
        let operations = ran.sample.operations.max(1) as f64;
        let each = |spent: &u64| Bar::from(*spent as f64 / operations / NANOSECOND);
        (name.clone(), ran.accounts.spent.iter().map(each).collect())
    };
    let frame = Frame {
        title: &format!("CPU time of {unit}, {on}, simulated"),
        x: "",
        y: &format!("ns for each of the {unit}"),
        show_x: &|_| String::new(),
        show_y: &label,
        y_chars: 6,
        white: false,
    };
    let groups: Vec<_> = runs.iter().map(group).collect();
    bars(&frame, &Spent::ALL.map(Spent::name), &groups, true)
}

/// Draws the distribution of the times of operations of a kind, a line for each of `runs`; `None`
/// without such operations.
///
/// # Errors
/// The library failed.
pub fn latencies(
    runs: &[(String, &Ran)],
    operation: Operation,
    title: &str,
) -> Result<Option<Picture>, CliError> {
    let series: Vec<_> = runs
        .iter()
        .map(|(name, ran)| {
            let took = &ran.latencies[operation as usize];
            let took = took.iter().map(|picoseconds| *picoseconds as f64 / NANOSECOND).collect();
            Series { name: name.clone(), points: distribution(took) }
        })
        .filter(|series| !series.points.is_empty())
        .collect();
    if series.is_empty() {
        return Ok(None);
    }
    let x = extent(series.iter().flat_map(|series| series.points.iter().map(|(x, _)| *x)));
    let frame = Frame {
        title: &format!("{title}, simulated"),
        x: "ns",
        y: "percent",
        show_x: &label,
        show_y: &|percent| format!("{percent:.0}"),
        y_chars: 3,
        white: false,
    };
    let axes = || (log_axis(x.clone()), linear(0.0..105.0));
    lines(&frame, axes, &series, (0, SeriesLabelPosition::LowerRight)).map(Some)
}
