//! `--try`: pairs of runs with and without each advice, and predictions beside measurements.
//!
//! Costs are measured between the runs, so that predictions are made under the load of the runs.
//! The comparison uses processor time, which other programs affect less than elapsed time. The two
//! runs of a pair follow each other directly, in random order, because load changes within seconds.
//! If the host takes free memory back, memory is used and freed before each run, so that all runs
//! start with the same memory state. The effect of memory taken back is therefore only predicted.

use super::costs::{Meter, median};
use super::findings::Findings;
use super::interval::{FEWEST, Saving};
use super::items::{Apply, Item, Open};
use super::once::{Run, once};
use super::print::{Answer, WORTH};
use crate::args::AdviseArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::report::json::{Context, Json, Number};
use crate::report::progress::Progress;
use crate::report::{Style, table};
use std::io::Write;

/// An advice to try, with or without a prediction.
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

/// Tries each advice that can be applied.
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
    // For each advice: the runs without it, and the runs with it.
    let mut runs: Vec<[Vec<Run>; 2]> = vec![Default::default(); tried.len()];
    let progress = Progress::new(u64::from(args.rounds) * 2 * tried.len() as u64);
    let reporting = meter.costs().reporting();
    // A random order prevents that an advice always follows the same other advice.
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
            // An incomplete pair is discarded.
            for (all, run) in runs[at].iter_mut().zip(pair) {
                all.extend(run);
            }
        }
    }
    drop(progress);
    let predicted = answer.predict(&meter.costs());
    let head =
        ["tried", "predicted", "measured", "95 % interval", "elapsed", "faults"].map(str::to_owned);
    let mut rows = table::numbers(&head, style);
    let change = |[before, with]: &[Vec<Run>; 2], of: fn(&Run) -> f64| {
        let middle = |runs: &[Run]| median(&runs.iter().map(of).collect::<Vec<_>>());
        middle(with).unwrap_or(0.0) - middle(before).unwrap_or(0.0)
    };
    let (mut off, mut right, mut unmoved) = (Vec::new(), 0, Vec::new());
    for (item, runs) in tried.iter().zip(&runs) {
        let times = |runs: &[Run]| runs.iter().map(|run| run.processor).collect::<Vec<_>>();
        let [before, with] = runs.each_ref().map(|runs| times(runs));
        let Some(saving) = Saving::of(&before, &with) else { continue };
        let saved = saving.middle;
        let elapsed = change(runs, |run| run.wall);
        let faults = change(runs, |run| run.faults as f64);
        // Uses the costs measured between the runs.
        let told = item.item.map(|before| {
            let now = predicted.iter().find(|now| now.name == before.name).unwrap_or(before);
            now.at_best / 1e9
        });
        // The count of `getrusage` includes populated pages, so it does not show their effect.
        let counted = !runs.iter().flatten().any(|run| run.counts_populated)
            || !matches!(item.apply, Apply::Populate(_));
        let moved = !counted || item.item.is_none_or(|item| item.moved(-faults));
        unmoved.extend((!moved).then_some(item.name));
        let sure = saving.is_sure() && moved;
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
                saving.interval.map_or("too few rounds".into(), |[low, high]| {
                    format!("{low:.3} to {high:.3} s")
                }),
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
            ("processor_seconds", median(&with).unwrap_or(0.0)),
            ("processor_seconds_before", median(&before).unwrap_or(0.0)),
            ("elapsed_saving_seconds", -elapsed),
        ] {
            json.write(&context, metric, "s", Number::Real(value))?;
        }
        if let Some([low, high]) = saving.interval {
            json.write(&context, "interval_from_seconds", "s", Number::Real(low))?;
            json.write(&context, "interval_to_seconds", "s", Number::Real(high))?;
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
    let populated = |run: &Run| run.counts_populated;
    if runs.iter().flatten().flatten().any(populated) {
        writeln!(
            out,
            " The faults include populated pages: there is no permission for the kernel's counter of page faults."
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
