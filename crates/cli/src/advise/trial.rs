//! `--try`: runs with each advice in force, each beside a run without it, and what was predicted beside what was measured.
//!
//! Costs are measured between the runs, so that predictions meet the load that the runs meet. Processor time is compared, of which other
//! programs take less than of elapsed time. Both runs of a pair follow each other at once, in either order: load comes and goes in seconds. Where the host takes free memory back, memory is used and freed before each run, so that all runs
//! find the same: what the host has taken back is predicted only.

use super::costs::{Meter, median};
use super::findings::Findings;
use super::items::{Apply, Item, Open, predict};
use super::once::{Run, once};
use super::print::{Answer, WORTH};
use crate::args::AdviseArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::report::json::{Context, Json, Number};
use crate::report::progress::Progress;
use crate::report::{Style, table};
use std::io::Write;

/// Samples that are drawn again for an interval, which holds so much of them.
const DRAWN: usize = 4000;
const WITHIN: f64 = 0.95;

/// What is tried: an advice with a prediction or without one.
#[derive(Debug)]
struct Tried<'a> {
    name: &'a str,
    apply: &'a Apply,
    item: Option<&'a Item>,
}

impl<'a> Tried<'a> {
    fn of_item(item: &'a Item) -> Self {
        Self { name: &item.name, apply: &item.apply, item: Some(item) }
    }

    fn of_open(open: &'a Open) -> Self {
        Self { name: &open.name, apply: &open.apply, item: None }
    }
}

/// Tries what can be tried.
pub fn run(
    args: &AdviseArgs,
    findings: &Findings,
    meter: &mut Meter,
    answer: &Answer<'_>,
    (out, style): (&mut dyn Write, Style),
    (json, context): (&mut Json, &Context),
) -> Result<(), CliError> {
    let claimed = answer
        .shown()
        .into_iter()
        .filter(|item| answer.worth(item.saving) || answer.worth(item.at_best));
    let (able, left): (Vec<&Item>, Vec<&Item>) = claimed.partition(|item| match item.apply {
        Apply::Nothing => false,
        Apply::Sysfs(..) => args.sysfs,
        _ => true,
    });
    let open = answer.open.iter().map(Tried::of_open);
    let tried: Vec<Tried<'_>> = able.into_iter().map(Tried::of_item).chain(open).collect();
    for item in left.iter().filter(|item| matches!(item.apply, Apply::Sysfs(..))) {
        writeln!(
            out,
            " {} is a setting of the whole system: --sysfs permits to try it",
            item.name
        )?;
    }
    if tried.is_empty() {
        writeln!(
            out,
            " There is nothing to try that is predicted to change the run by {:.0} %.",
            100.0 * WORTH
        )?;
        return Ok(());
    }
    // Of each: the runs without it, and those with it.
    let mut runs: Vec<[Vec<Run>; 2]> = vec![Default::default(); tried.len()];
    let progress = Progress::new(u64::from(args.rounds) * 2 * tried.len() as u64);
    let reporting = meter.costs().reporting();
    // None has always the same before it.
    let mut random = fastrand::Rng::with_seed(1);
    let mut order: Vec<usize> = (0..tried.len()).collect();
    'rounds: for round in 0..usize::from(args.rounds) {
        meter.round()?;
        random.shuffle(&mut order);
        for &at in &order {
            let first = random.usize(..2);
            let mut pair = [None, None];
            for with in [first, 1 - first] {
                let (name, apply) = match with {
                    0 => ("as it is", &Apply::Nothing),
                    _ => (tried[at].name, tried[at].apply),
                };
                progress.begin(&format!("run {} of {}, {name}", round + 1, args.rounds));
                meter.prepare(findings.most_bytes())?;
                pair[with] = once(&args.program, apply)?;
                if pair[with].is_none() {
                    break 'rounds;
                }
                progress.advance(1);
            }
            // A pair that is not complete counts for nothing.
            for (all, run) in runs[at].iter_mut().zip(pair) {
                all.extend(run);
            }
        }
    }
    drop(progress);
    let predicted = predict(findings, &meter.costs());
    let head = ["tried", "predicted", "measured", "95 % of samples", "elapsed", "faults"]
        .map(str::to_owned);
    let mut rows = table::numbers(&head, style);
    let change = |[before, with]: &[Vec<Run>; 2], of: fn(&Run) -> f64| {
        let middle = |runs: &[Run]| median(&runs.iter().map(of).collect::<Vec<_>>());
        middle(with).unwrap_or(0.0) - middle(before).unwrap_or(0.0)
    };
    let (mut off, mut right) = (Vec::new(), 0);
    for (item, runs) in tried.iter().zip(&runs) {
        let times = |runs: &[Run]| runs.iter().map(|run| run.processor).collect::<Vec<_>>();
        let [before, with] = runs.each_ref().map(|runs| times(runs));
        let Some((saved, interval)) = difference(&before, &with) else { continue };
        let elapsed = change(runs, |run| run.wall);
        let faults = change(runs, |run| run.faults as f64);
        // With what was measured meanwhile.
        let told = item.item.map(|before| {
            let now = predicted.iter().find(|now| now.name == before.name).unwrap_or(before);
            now.at_best / 1e9
        });
        // One pair, of a trial that was interrupted, tells nothing of the noise.
        let sure = with.len() > 1 && (interval[0] > 0.0 || interval[1] < 0.0);
        if let Some(told) = told.filter(|_| sure) {
            off.push((told - saved).abs() / saved.abs());
            right += u32::from((told < 0.0) == (saved < 0.0));
        }
        table::row(
            &mut rows,
            [
                item.name.to_owned(),
                told.map_or("-".into(), |told| format!("{told:.3} s")),
                format!("{}{saved:.3} s", if sure { "" } else { "~" }),
                format!("{:.3} to {:.3} s", interval[0], interval[1]),
                format!("{elapsed:+.3} s"),
                format!("{faults:.0}"),
            ],
        );
        let context = Context { setting: item.name.to_owned(), ..context.clone() };
        if let Some(told) = told {
            json.write(&context, "predicted_seconds", "s", Number::Real(told))?;
        }
        for (metric, value) in [
            ("measured_seconds", saved),
            ("interval_from_seconds", interval[0]),
            ("interval_to_seconds", interval[1]),
            ("processor_seconds", median(&with).unwrap_or(0.0)),
            ("processor_seconds_before", median(&before).unwrap_or(0.0)),
            ("elapsed_saving_seconds", -elapsed),
        ] {
            json.write(&context, metric, "s", Number::Real(value))?;
        }
        for (metric, runs) in [("run_seconds", &with), ("run_seconds_before", &before)] {
            for value in runs {
                json.write(&context, metric, "s", Number::Real(*value))?;
            }
        }
        json.write(&context, "faults_change", "count", Number::Real(faults))?;
    }
    let pairs = runs.iter().map(|[_, with]| with.len()).min().unwrap_or(0);
    writeln!(out, "\n{rows}\n")?;
    writeln!(
        out,
        " Seconds of processor time that are saved in {pairs} pairs of runs, one with it and one without; elapsed and faults: the change of the medians."
    )?;
    writeln!(
        out,
        " ~: within the noise. Predictions use what pages cost between these runs: {:.2} µs each.",
        meter.costs().page / 1e3
    )?;
    if let Some(median) = median(&off) {
        let (beyond, error) = (off.len(), 100.0 * median);
        writeln!(
            out,
            " Beyond the noise the sign is right in {right} of {beyond} predictions, and their median error {error:.0} %."
        )?;
    }
    if reporting {
        writeln!(
            out,
            " Memory was used and freed before each run: the host takes free memory back, and what it has taken is only predicted, above."
        )?;
    }
    let failed = runs.iter().flatten().flatten().filter(|run| !run.status.success()).count();
    if failed > 0 {
        writeln!(out, " {failed} of the runs did not end with status 0.")?;
    }
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    Ok(())
}

/// What `with` takes less than `before`, of which each pair of runs is of one round and met about the same load: the median of the averages of
/// any two differences (Hodges and Lehmann), and the interval of it, percentiles of the bootstrap. None of nothing.
fn difference(before: &[f64], with: &[f64]) -> Option<(f64, [f64; 2])> {
    let saved: Vec<f64> = before.iter().zip(with).map(|(before, with)| before - with).collect();
    let middle = |saved: &[f64]| {
        let averages = |at: usize| saved[at..].iter().map(move |other| (saved[at] + other) / 2.0);
        median(&(0..saved.len()).flat_map(averages).collect::<Vec<_>>())
    };
    // The same samples give the same interval.
    let mut random = fastrand::Rng::with_seed(1);
    let mut again =
        || -> Vec<f64> { saved.iter().map(|_| saved[random.usize(..saved.len())]).collect() };
    let mut drawn: Vec<f64> = (0..DRAWN).filter_map(|_| middle(&again())).collect();
    drawn.sort_by(f64::total_cmp);
    let tail = (DRAWN as f64 * (1.0 - WITHIN) / 2.0) as usize;
    Some((middle(&saved)?, [drawn[tail], drawn[DRAWN - 1 - tail]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_beyond_the_noise_has_an_interval_without_zero() {
        let before = [2.0, 2.1, 2.05, 1.95, 2.0];
        let (saved, [low, high]) =
            difference(&before, &[1.5, 1.52, 1.49, 1.6, 1.48]).expect("runs");
        assert!((saved - 0.51).abs() < 0.02 && low > 0.3 && high < 0.7, "{saved}");
        assert!(low <= saved && saved <= high);
        let (_, [low, high]) = difference(&before, &[2.2, 1.8, 2.02, 1.9, 2.1]).expect("runs");
        assert!(low < 0.0 && high > 0.0);
        // Load that comes and goes is in both runs of a round.
        let loaded = [2.0, 3.0, 4.0, 3.0, 2.0];
        let (saved, [low, high]) = difference(&loaded, &loaded.map(|run| run - 0.1)).expect("runs");
        assert!((saved - 0.1).abs() < 1e-9 && (high - low) < 1e-9, "{low} to {high}");
        assert!(difference(&[], &[1.0]).is_none());
    }
}
