//! `--try`: pairs of runs with and without each advice, and predictions beside measurements.

use super::AdviseArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{Style, table};
use faultless_analysis::advise::answer::{Answer, WORTH};
use faultless_analysis::advise::cold::{ColdStart, DataFiles};
use faultless_analysis::advise::costs::Meter;
use faultless_analysis::advise::file::Advice;
use faultless_analysis::advise::interval::{FEWEST, Saving};
use faultless_analysis::advise::item::size;
use faultless_analysis::advise::once::Run;
use faultless_analysis::advise::trial::{self, Compared, Trial, candidates, cold_candidates};
use faultless_analysis::number::{fixed, plural};
use faultless_analysis::rates::median;
use faultless_analysis::{Context, Error};
use std::io::Write;

/// A setting that was tried.
#[derive(Clone, Debug)]
pub struct Tried {
    /// The name of the advice.
    pub name: String,
    /// Seconds of each run, without the advice and with the advice: processor time, or elapsed time
    /// with a cold page cache.
    pub times: [Vec<f64>; 2],
}

/// Tries each advice that can be applied. Returns the confirmed advice, and the runs of each tried
/// setting.
///
/// # Errors
/// The output is closed, or a run failed. The results of the complete pairs are printed before.
pub fn run(
    args: &AdviseArgs,
    meter: &mut Meter,
    (answer, data): (&Answer<'_>, &DataFiles),
    (out, style): (&mut dyn Write, Style),
    (json, context): (&mut Json, &Context),
) -> Result<(Vec<Advice>, Vec<Tried>), CliError> {
    let cold_start = answer.cold_start();
    let (tried, left): (_, Vec<&str>) = match (args.cold, &cold_start) {
        (false, _) => {
            let (tried, left) = candidates(answer, args.sysfs);
            (tried, left.into_iter().map(|item| &*item.name).collect())
        }
        (true, Some(start)) => {
            let (tried, left) = cold_candidates(start, args.sysfs);
            (tried, left.into_iter().map(|open| &*open.name).collect())
        }
        (true, None) => {
            writeln!(out, " {NO_FILES}")?;
            return Ok((Vec::new(), Vec::new()));
        }
    };
    for name in left {
        writeln!(out, " {name} is a setting of the whole system: --sysfs permits a trial")?;
    }
    if tried.is_empty() {
        writeln!(
            out,
            " No setting to try is predicted to change the run by {:.0} %.",
            100.0 * WORTH
        )?;
        return Ok((Vec::new(), Vec::new()));
    }
    // Without a plain run the user has interrupted the command.
    let plain = answer.plain.filter(|_| !interrupt::requested());
    let Some(plain) = plain else {
        writeln!(out, "{NOT_TRIED}")?;
        return Ok((Vec::new(), Vec::new()));
    };
    let reporting = meter.costs().reporting();
    let cold = args.cold.then_some(data);
    let (trials, failure) = measured((args, plain), &tried, meter, (answer, cold));
    let unchanged = trials.iter().flat_map(Trial::unchanged);
    let predicted = answer.predict_beside(&meter.costs(), unchanged);
    let results: Vec<_> = trials.iter().filter_map(|trial| trial.compared(&predicted)).collect();
    let mut rows = table::numbers(&HEAD.map(str::to_owned), style);
    for result in &results {
        table::row(&mut rows, cells(result));
        result.figures(json, context)?;
    }
    if !results.is_empty() {
        writeln!(out, "\n{rows}\n")?;
        print_remarks(out, &trials, &results, meter.costs().page)?;
        if let (Some(start), Some(data)) = (&cold_start, cold) {
            print_cold(out, &trials, &results, (start, data, plain))?;
        }
        print_runs(out, &trials, reporting)?;
    } else if interrupt::requested() {
        writeln!(out, "{NOT_TRIED}")?;
    }
    let confirmed = results.iter().filter_map(Compared::confirmed).collect();
    let succeeded = results.iter().filter(|result| !result.times[0].is_empty());
    let tried = succeeded
        .map(|result| Tried {
            name: result.name.to_owned(),
            times: if args.cold { &result.walls } else { &result.times }.clone(),
        })
        .collect();
    failure.map_or(Ok((confirmed, tried)), |failure| Err(failure.into()))
}

/// The end of an interrupted command without results of pairs.
const NOT_TRIED: &str = "Interrupted before the first pair of runs: no setting was tried.";

/// The heads of the table of results.
const HEAD: [&str; 6] = ["tried", "predicted", "measured", "95 % interval", "elapsed", "faults"];

/// Runs the pairs.
fn measured<'a>(
    (args, plain): (&AdviseArgs, Run),
    tried: &[trial::Tried<'a>],
    meter: &mut Meter,
    (answer, cold): (&Answer<'_>, Option<&DataFiles>),
) -> (Vec<Trial<'a>>, Option<Error>) {
    let progress = Progress::new(u64::from(args.rounds) * 2 * tried.len() as u64);
    let memory = answer.findings.most_bytes();
    let program = (&args.program[..], plain.status);
    trial::run(program, tried, args.rounds, (meter, memory), cold, &progress)
}

/// The end of `--cold` without a large mapping of a file on a disk.
const NO_FILES: &str = "\
No setting was tried: the program maps no file of 8 MiB or more on a disk. Without --cold the settings are tried with a warm page cache.";

/// Prints the conditions of runs with a cold page cache, and the predictions of elapsed time.
fn print_cold(
    out: &mut dyn Write,
    trials: &[Trial<'_>],
    results: &[Compared<'_>],
    (start, data, warm): (&ColdStart, &DataFiles, Run),
) -> Result<(), CliError> {
    let of = |value: fn(&Run) -> f64| {
        let values: Vec<_> = trials.iter().flat_map(|trial| &trial.before).map(value).collect();
        median(&values).unwrap_or(0.0)
    };
    writeln!(
        out,
        " Cold page cache: the program maps {} of {}, which left the page cache before each run.",
        plural(data.count(), "data file"),
        size(data.bytes())
    )?;
    let (elapsed, major) = (of(|run| run.wall), of(|run| run.major as f64));
    writeln!(
        out,
        " A run without a setting takes {} s of elapsed time, with {} and {} read; the first run without the recorder took {} s, with {} and {} read.",
        fixed(elapsed, 3),
        plural(major as u64, "major fault"),
        size(of(|run| run.read as f64) as u64),
        fixed(warm.wall, 3),
        plural(warm.major, "major fault"),
        size(warm.read)
    )?;
    writeln!(out, " Predicted for the reads: {}.", start.describe())?;
    let compared = results
        .iter()
        .filter_map(|result| Some((result.name, result.predicted_elapsed?, result.elapsed?)));
    let compared: Vec<_> = compared.collect();
    for (name, predicted, measured) in &compared {
        writeln!(
            out,
            " Elapsed, {name}: predicted to save {}, measured {}; {}.",
            with_interval(predicted),
            with_interval(measured),
            verdict(predicted, measured, elapsed)
        )?;
    }
    let sure = compared
        .iter()
        .filter(|(_, predicted, measured)| predicted.is_sure() && measured.is_sure());
    let (right, all) = sure.fold((0, 0), |(right, all), (_, predicted, measured)| {
        let same = (predicted.middle < 0.0) == (measured.middle < 0.0);
        (right + u32::from(same), all + 1)
    });
    if all > 0 {
        writeln!(
            out,
            " Elapsed time beyond the noise of prediction and measurement: the sign is right in {right} of {all}."
        )?;
    }
    Ok(())
}

/// Formats a saving with its interval.
fn with_interval(saving: &Saving) -> String {
    let middle = fixed(saving.middle, 3);
    match saving.interval {
        Some([low, high]) => format!("{middle} s ({} to {} s)", fixed(low, 3), fixed(high, 3)),
        None => format!("{middle} s"),
    }
}

/// Returns the relation of a predicted saving to a measured saving of runs that take `elapsed`
/// seconds.
fn verdict(predicted: &Saving, measured: &Saving, elapsed: f64) -> String {
    // A slow disk has too few rounds for an interval of the prediction.
    let known = predicted.interval.is_none() || predicted.is_sure();
    match (measured.interval, measured.is_sure(), known) {
        (None, ..) => "too few rounds to judge".into(),
        (_, false, _) => "the measured saving is within the noise".into(),
        (_, _, false) => "the predicted saving is within the noise of the measured reads".into(),
        _ => {
            let error = (predicted.middle - measured.middle).abs() / elapsed.max(1e-9);
            format!("the difference is {:.0} % of a run", 100.0 * error)
        }
    }
}

/// Returns the cells of a row.
fn cells(result: &Compared<'_>) -> [String; 6] {
    let Compared { name, predicted, saving, elapsed, faults, failed, .. } = result;
    let name = match failed {
        0 => (*name).to_owned(),
        failed => format!("{name}, {failed} failed"),
    };
    let predicted = predicted.map_or("-".into(), |predicted| format!("{} s", fixed(predicted, 3)));
    let Some(saving) = saving else {
        let none = || "-".to_owned();
        return [name, predicted, "failed".into(), none(), none(), none()];
    };
    let mark = |sure| if sure { "" } else { "~" };
    [
        name,
        predicted,
        format!("{}{} s", mark(result.is_sure()), fixed(saving.middle, 3)),
        saving.interval.map_or("too few rounds".into(), |[low, high]| {
            format!("{} to {} s", fixed(low, 3), fixed(high, 3))
        }),
        elapsed.map_or("-".into(), |elapsed| {
            format!("{}{} s", mark(elapsed.is_sure()), fixed(elapsed.middle, 3))
        }),
        fixed(*faults, 0),
    ]
}

/// Prints the meaning of the table, and the quality of the predictions.
fn print_remarks(
    out: &mut dyn Write,
    trials: &[Trial<'_>],
    results: &[Compared<'_>],
    page: f64,
) -> Result<(), CliError> {
    let failed = results.iter().any(|result| result.failed > 0);
    let succeeded = trials.iter().filter(|trial| trial.failed == 0);
    let pairs = succeeded.map(|trial| trial.with.len()).min().unwrap_or(0);
    writeln!(
        out,
        " Savings in {} of runs, with the setting and without: seconds of processor time, and of elapsed time; faults of the medians. Negative: the setting costs more.",
        plural(pairs as u64, "pair")
    )?;
    writeln!(
        out,
        " ~: within the noise. Predictions use the cost of a page between these runs: {:.2} µs.",
        page / 1e3
    )?;
    if failed {
        writeln!(
            out,
            " failed: runs with another exit status than the run without the recorder; their pairs are not measured."
        )?;
    }
    let unmoved: Vec<_> =
        results.iter().filter(|result| !result.moved).map(|result| result.name).collect();
    if !unmoved.is_empty() {
        writeln!(
            out,
            " Not confirmed, as the number of faults did not change as predicted: {}.",
            unmoved.join(", ")
        )?;
    }
    let few = |trial: &Trial<'_>| (1..FEWEST).contains(&trial.with.len());
    if trials.iter().any(few) {
        writeln!(out, " An interval of 95 % needs {FEWEST} rounds: --rounds {FEWEST} or more.")?;
    }
    // The predicted and the measured saving of each sure result.
    let sure = results.iter().filter(|result| result.is_sure());
    let sure: Vec<(f64, f64)> =
        sure.filter_map(|result| Some((result.predicted?, result.saving?.middle))).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_analysis::advise::item::Apply;

    #[test]
    fn advice_with_failed_runs_is_marked() {
        let compared = |saving, failed| Compared {
            name: "malloc on THP",
            apply: &Apply::Nothing,
            predicted: Some(0.5),
            saving,
            predicted_elapsed: None,
            elapsed: Some(Saving { middle: -0.0001, interval: None }),
            faults: 3.0,
            moved: true,
            times: [Vec::new(), Vec::new()],
            kernel: [Vec::new(), Vec::new()],
            walls: [Vec::new(), Vec::new()],
            reads: [Vec::new(), Vec::new()],
            failed,
        };
        let [name, predicted, measured, rest @ ..] = cells(&compared(None, 14));
        assert_eq!((&*name, &*predicted), ("malloc on THP, 14 failed", "0.500 s"));
        assert_eq!((&*measured, rest), ("failed", ["-", "-", "-"].map(str::to_owned)));
        let saving = Saving { middle: 0.4, interval: Some([0.3, 0.5]) };
        let some = cells(&compared(Some(saving), 1));
        assert_eq!(some[3..], ["0.300 to 0.500 s", "~0.000 s", "3"].map(str::to_owned));
        assert_eq!([&*some[0], &*some[2]], ["malloc on THP, 1 failed", "0.400 s"]);
        assert_eq!(cells(&compared(Some(saving), 0))[0], "malloc on THP");
    }

    #[test]
    fn savings_within_the_noise_have_no_error() {
        let saving = |middle: f64, noise: f64| Saving {
            middle,
            interval: Some([middle - noise, middle + noise]),
        };
        let (sure, unsure) = (saving(0.2, 0.1), saving(0.02, 0.1));
        assert_eq!(with_interval(&sure), "0.200 s (0.100 to 0.300 s)");
        assert_eq!(verdict(&sure, &saving(0.3, 0.1), 2.0), "the difference is 5 % of a run");
        assert!(
            verdict(&sure, &unsure, 2.0).starts_with("the measured saving is within the noise")
        );
        assert!(
            verdict(&unsure, &sure, 2.0).starts_with("the predicted saving is within the noise")
        );
        let few = Saving { interval: None, ..sure };
        assert_eq!(with_interval(&few), "0.200 s");
        assert_eq!(verdict(&sure, &few, 2.0), "too few rounds to judge");
    }
}
