//! The report about a recording with one in several faults.

use crate::error::CliError;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{Style, processes};
use faultless_analysis::advise::sampled::Sampled;
use faultless_analysis::number::{fixed, grouped};
use faultless_trace::Trace;
use std::io::Write;

/// Measures the cost of the faults of `trace`, called `name`, and prints the report.
pub fn run(
    name: &str,
    trace: &Trace,
    (out, style): (&mut dyn Write, Style),
    json: &mut Json,
) -> Result<(), CliError> {
    let progress = Progress::on_terminal(Sampled::STEPS);
    let sampled = Sampled::of(name, trace, &progress)?;
    drop(progress);
    print(&sampled, trace, out, style)?;
    Ok(sampled.figures(json)?)
}

fn print(
    sampled: &Sampled,
    trace: &Trace,
    out: &mut dyn Write,
    style: Style,
) -> Result<(), CliError> {
    let Sampled { name, period, seconds, costs, .. } = sampled;
    let all = sampled.all();
    let time = sampled.time(&all) / 1e9;
    writeln!(
        out,
        "\n {name}: about {} s of processor time in {} s are spent in about {} faults;\n one in \
         {period} faults was recorded, and each stands for {period}.",
        fixed(time, 2),
        fixed(*seconds, 2),
        grouped(all.faults)
    )?;
    if sampled.exceeds() {
        writeln!(out, " At most: the measured cost of a fault was more than the threads spent.")?;
    }
    for note in &trace.header.notes {
        writeln!(out, " note: {note}")?;
    }
    writeln!(out, " A zeroed page costs {:.2} µs here.", costs.page / 1e3)?;
    if let Some(table) = processes::table(&sampled.processes, Some(time * 1e9), style) {
        writeln!(out, "\n{table}")?;
        writeln!(
            out,
            " The pages are those of the recorded faults; the program has touched more."
        )?;
    }
    writeln!(
        out,
        "\n No setting has a prediction: a prediction requires every fault. Remedy: record a \
         shorter time with a\n higher limit, such as --seconds 5 --max-rate 10000000."
    )?;
    Ok(())
}
