//! Bars and tables of simulated runs.

use crate::error::CliError;
use crate::report::bars::{self, Bar};
use crate::report::{Style, table};
use faultless_analysis::number::{grouped, plural, scaled as short};
use faultless_analysis::scale::{Point, Scaled, SteadyState};
use faultless_virtual::Spent;
use std::io::Write;

/// Prints all runs, and the hottest lines of each run, or only of the runs with the most CPUs.
pub fn print(
    out: &mut dyn Write,
    scaled: &Scaled,
    remark: &str,
    details: bool,
    style: Style,
) -> Result<(), CliError> {
    if scaled.points.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{}, simulated: {}", scaled.name, scaled.profile)?;
    if !remark.is_empty() {
        writeln!(out, "{remark}")?;
    }
    if !scaled.parameters.is_empty() {
        let most = scaled.points.iter().map(|point| point.cpus).max().unwrap_or(1);
        writeln!(out, "With {}: {}", plural(most as u64, "CPU"), scaled.parameters)?;
    }
    if scaled.seed != 0 {
        writeln!(
            out,
            "Seed {}: CPUs are delayed at random, which counts as waiting. Compare with other seeds, not with seed 0.",
            scaled.seed
        )?;
    }
    if let Some(calls) = scaled.warm_up {
        writeln!(
            out,
            "Steady state: without the first {} calls and faults of each CPU, and only while all CPUs work",
            grouped(calls)
        )?;
    }
    let linear = if scaled.scales() { ", and percent of linear" } else { "" };
    writeln!(out, "\n{} a second{linear}:\n", scaled.unit)?;
    let longest = scaled.points.iter().map(|point| point.policy.name().len()).max().unwrap_or(0);
    let bar = |point: &Point| Bar {
        name: format!("{:longest$} {:>4}", point.policy.name(), point.cpus),
        value: point.ran.sample.operation_rate(),
        shown: short(point.ran.sample.operation_rate()),
        note: percent(scaled, point),
    };
    let bars: Vec<_> = scaled.points.iter().map(bar).collect();
    writeln!(out, "{}", bars::draw(&bars, style))?;
    writeln!(out, "{}", figures(scaled, style))?;
    writeln!(
        out,
        "\nAll figures are simulated. Linear: throughput per CPU, relative to the policy's first row. Line transfers: cache lines received from another CPU."
    )?;
    if scaled.warm_up.is_some() {
        writeln!(out, "{START_UP} Use a larger --warm-up then.")?;
    }
    writeln!(
        out,
        "The last columns divide the time of the CPUs until each ends its part, in percent: execute instructions of the subsystem (instr.), wait for cache \
         lines (lines), zero and copy pages (pages), enter and leave the kernel (entry), send and receive interrupts and invalidate translations \
         (flushes), wait for another CPU, for example until it releases a lock or a range (waits, including the delays of --seed), and run the program (program)."
    )?;
    for points in scaled.policies() {
        let last = points.len() - 1;
        for point in &points[if details { 0 } else { last }..] {
            hot(out, point, scaled.unit, style)?;
        }
    }
    Ok(())
}

fn percent(scaled: &Scaled, point: &Point) -> String {
    if scaled.scales() { format!("{:.0} %", 100.0 * point.linear) } else { String::new() }
}

/// Returns the short name of an account, for a column.
pub const fn column(on: Spent) -> &'static str {
    match on {
        Spent::Instructions => "instr.",
        Spent::Lines => "lines",
        Spent::Pages => "pages",
        Spent::Entry => "entry",
        Spent::Flushes => "flushes",
        Spent::Waiting => "waits",
        Spent::Program => "program",
    }
}

fn figures(scaled: &Scaled, style: Style) -> comfy_table::Table {
    let by_faults = scaled.by_faults();
    let each = if by_faults { "a fault" } else { "an operation" };
    let mut head = ["policy", "CPUs", "a second", "of linear"].map(str::to_owned).to_vec();
    head.extend(scaled.warm_up.map(|_| "start-up,\ncalls".to_owned()));
    head.push(format!("line transfers\n{each}"));
    head.extend(Spent::ALL.map(|on| column(on).to_owned()));
    let mut table = table::numbers(&head, style);
    for point in &scaled.points {
        let mut cells = vec![
            point.policy.name().to_owned(),
            point.cpus.to_string(),
            grouped(point.ran.sample.operation_rate().round() as u64),
            percent(scaled, point),
        ];
        cells.extend(point.ran.steady.map(start_up));
        cells.push(format!("{:.2}", point.ran.transfers_each(by_faults)));
        cells.extend(point.ran.shares().iter().map(|share| format!("{share:.0}")));
        table::row(&mut table, cells);
    }
    table
}

/// The explanation of the column of start-ups.
pub const START_UP: &str = "Start-up: calls and faults of each CPU until the CPUs run at 90 % of the steady rate. With \
                            `>`, the start-up lasts longer than the warm-up.";

/// Formats the length of the start-up.
pub fn start_up(steady: SteadyState) -> String {
    steady.start_up.map_or_else(|| format!("> {}", grouped(steady.warm_up)), grouped)
}

/// Prints the places at which CPUs waited for lines of other CPUs.
fn hot(out: &mut dyn Write, point: &Point, unit: &str, style: Style) -> Result<(), CliError> {
    let cpus = plural(point.cpus as u64, "CPU");
    if point.ran.hottest.is_empty() {
        writeln!(
            out,
            "\n{}, {cpus}: no CPU waited for a line of another CPU.",
            point.policy.name()
        )?;
        return Ok(());
    }
    writeln!(
        out,
        "\n{}, {cpus}: the lines that CPUs waited for longest, transfers and waiting for each of the {unit}\n",
        point.policy.name()
    )?;
    let head = ["line, and place", "transfers", "wait, ns"].map(str::to_owned);
    let mut table = table::numbers(&head, style);
    let operations = point.ran.sample.operations.max(1) as f64;
    for place in &point.ran.hottest {
        let (moved, waited) = (place.transfers as f64, place.waited as f64 / 1000.0);
        table::row(
            &mut table,
            [
                format!("{} at {}:{}", place.of, place.file, place.line),
                format!("{:.3}", moved / operations),
                format!("{:.1}", waited / operations),
            ],
        );
    }
    writeln!(out, "{table}")?;
    Ok(())
}
