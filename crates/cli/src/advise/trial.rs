//! `--try`: pairs of runs with and without each advice, and predictions beside measurements.

use super::AdviseArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{Style, table};
use faultless_analysis::Context;
use faultless_analysis::advise::answer::{Answer, WORTH};
use faultless_analysis::advise::costs::Meter;
use faultless_analysis::advise::interval::FEWEST;
use faultless_analysis::advise::trial::{self, Compared, Trial, Tried, candidates};
use faultless_analysis::rates::median;
use std::io::Write;

/// Tries each advice that can be applied.
pub fn run(
    args: &AdviseArgs,
    meter: &mut Meter,
    answer: &Answer<'_>,
    (out, style): (&mut dyn Write, Style),
    (json, context): (&mut Json, &Context),
) -> Result<(), CliError> {
    let (tried, left) = candidates(answer, args.sysfs);
    for item in left {
        writeln!(out, " {} is a setting of the whole system: --sysfs permits a trial", item.name)?;
    }
    if tried.is_empty() {
        writeln!(
            out,
            " No setting to try is predicted to change the run by {:.0} %.",
            100.0 * WORTH
        )?;
        return Ok(());
    }
    let reporting = meter.costs().reporting();
    let trials = measured(args, &tried, meter, answer)?;
    let predicted = answer.predict(&meter.costs());
    let results: Vec<_> = trials.iter().filter_map(|trial| trial.compared(&predicted)).collect();
    let mut rows = table::numbers(&HEAD.map(str::to_owned), style);
    for result in &results {
        table::row(&mut rows, cells(result));
        result.figures(json, context)?;
    }
    writeln!(out, "\n{rows}\n")?;
    print_remarks(out, &trials, &results, meter.costs().page)?;
    print_runs(out, &trials, reporting)
}

/// The heads of the table of results.
const HEAD: [&str; 6] = ["tried", "predicted", "measured", "95 % interval", "elapsed", "faults"];

/// Runs the pairs.
fn measured<'a>(
    args: &AdviseArgs,
    tried: &[Tried<'a>],
    meter: &mut Meter,
    answer: &Answer<'_>,
) -> Result<Vec<Trial<'a>>, CliError> {
    let progress = Progress::new(u64::from(args.rounds) * 2 * tried.len() as u64);
    let memory = answer.findings.most_bytes();
    Ok(trial::run(&args.program, tried, args.rounds, (meter, memory), &progress)?)
}

/// Returns the cells of a row.
fn cells(result: &Compared<'_>) -> [String; 6] {
    let Compared { name, predicted, saving, elapsed, faults, .. } = result;
    let saved = saving.middle;
    [
        (*name).to_owned(),
        predicted.map_or("-".into(), |predicted| format!("{predicted:.3} s")),
        format!("{}{saved:.3} s", if result.is_sure() { "" } else { "~" }),
        saving
            .interval
            .map_or("too few rounds".into(), |[low, high]| format!("{low:.3} to {high:.3} s")),
        format!("{elapsed:+.3} s"),
        format!("{faults:.0}"),
    ]
}

/// Prints the meaning of the table, and the quality of the predictions.
fn print_remarks(
    out: &mut dyn Write,
    trials: &[Trial<'_>],
    results: &[Compared<'_>],
    page: f64,
) -> Result<(), CliError> {
    let pairs = trials.iter().map(|trial| trial.with.len()).min().unwrap_or(0);
    writeln!(
        out,
        " Seconds of processor time that are saved in {pairs} pairs of runs, with the setting and without; elapsed and faults: the change of the medians."
    )?;
    writeln!(
        out,
        " ~: within the noise. Predictions use the cost of a page between these runs: {:.2} µs.",
        page / 1e3
    )?;
    let unmoved: Vec<_> =
        results.iter().filter(|result| !result.moved).map(|result| result.name).collect();
    if !unmoved.is_empty() {
        writeln!(
            out,
            " Not confirmed, as the number of faults did not change as predicted: {}.",
            unmoved.join(", ")
        )?;
    }
    if pairs < FEWEST {
        writeln!(out, " An interval of 95 % needs {FEWEST} rounds: --rounds {FEWEST} or more.")?;
    }
    // The predicted and the measured saving of each sure result.
    let sure = results.iter().filter(|result| result.is_sure());
    let sure: Vec<(f64, f64)> =
        sure.filter_map(|result| Some((result.predicted?, result.saving.middle))).collect();
    let off: Vec<f64> =
        sure.iter().map(|(predicted, saved)| (predicted - saved).abs() / saved.abs()).collect();
    if let Some(median) = median(&off) {
        let right =
            sure.iter().filter(|(predicted, saved)| (*predicted < 0.0) == (*saved < 0.0)).count();
        let (beyond, error) = (off.len(), 100.0 * median);
        writeln!(
            out,
            " Beyond the noise the sign is right in {right} of {beyond} predictions, and their median error {error:.0} %."
        )?;
    }
    Ok(())
}

/// Prints the conditions of the runs.
fn print_runs(out: &mut dyn Write, trials: &[Trial<'_>], reporting: bool) -> Result<(), CliError> {
    if reporting {
        writeln!(
            out,
            " Memory was used and freed before each run, as the host takes back free memory; the cost of memory that the host has taken is only predicted, above."
        )?;
    }
    if trials.iter().flat_map(Trial::runs).any(|run| run.counts_populated) {
        writeln!(
            out,
            " The faults include populated pages, as the kernel's counter of page faults is not permitted."
        )?;
    }
    let failed = trials.iter().flat_map(Trial::runs).filter(|run| !run.status.success()).count();
    if failed > 0 {
        writeln!(out, " {failed} of the runs did not end with status 0.")?;
    }
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    Ok(())
}
