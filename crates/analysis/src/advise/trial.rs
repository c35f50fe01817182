//! Pairs of runs with and without each advice, and predictions beside measurements.
//!
//! Costs are measured between the runs, so that predictions are made under the load of the runs.
//! The comparison uses processor time, which other programs affect less than elapsed time. The two
//! runs of a pair follow each other directly, in random order, because load changes within seconds.
//! If the host takes free memory back, memory is used and freed before each run, so that all runs
//! start with the same memory state. The effect of memory taken back is therefore only predicted.

use super::answer::Answer;
use super::costs::Meter;
use super::interval::Saving;
use super::item::{Apply, Item, Open};
use super::once::{Run, once};
use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::observer::Observer;
use crate::rates::median;
use std::ffi::OsString;

/// An advice to try, with or without a prediction.
#[derive(Clone, Copy, Debug)]
pub struct Tried<'a> {
    /// The name of the advice.
    pub name: &'a str,
    /// The way to apply the advice.
    pub apply: &'a Apply,
    /// The prediction.
    pub item: Option<&'a Item>,
}

impl<'a> Tried<'a> {
    fn of_item(item: &'a Item) -> Self {
        Self { name: &item.name, apply: &item.apply, item: Some(item) }
    }

    fn of_open(open: &'a Open) -> Self {
        Self { name: &open.name, apply: &open.apply, item: None }
    }
}

/// Returns the advice of `answer` to try, and the items that require a change of system-wide
/// settings, which `consent` permits.
pub fn candidates<'a>(answer: &'a Answer<'_>, consent: bool) -> (Vec<Tried<'a>>, Vec<&'a Item>) {
    let claimed = answer
        .shown()
        .into_iter()
        .filter(|item| answer.worth(item.saving) || answer.worth(item.at_best));
    let (able, mut left): (Vec<&Item>, Vec<&Item>) = claimed.partition(|item| match item.apply {
        Apply::Nothing => false,
        Apply::Sysfs(..) => consent,
        _ => true,
    });
    left.retain(|item| matches!(item.apply, Apply::Sysfs(..)));
    let open = answer.open.iter().map(Tried::of_open);
    (able.into_iter().map(Tried::of_item).chain(open).collect(), left)
}

/// The runs of one advice.
#[derive(Debug)]
pub struct Trial<'a> {
    /// The advice.
    pub tried: Tried<'a>,
    /// The runs without the advice.
    pub before: Vec<Run>,
    /// The runs with the advice, in the same order.
    pub with: Vec<Run>,
}

/// Runs `command` in `rounds` pairs for each of `tried`, with a measurement of costs by `meter`
/// before each round. After a request to stop the result has the complete pairs.
///
/// # Errors
/// The program cannot be started, a setting cannot be changed, or the host has too little memory.
pub fn run<'a>(
    command: &[OsString],
    tried: &[Tried<'a>],
    rounds: u16,
    (meter, memory): (&mut Meter, u64),
    observer: &dyn Observer,
) -> Result<Vec<Trial<'a>>, Error> {
    let trial = |tried: &Tried<'a>| Trial { tried: *tried, before: Vec::new(), with: Vec::new() };
    let mut trials: Vec<_> = tried.iter().map(trial).collect();
    // A random order prevents that an advice always follows the same other advice.
    let mut random = fastrand::Rng::with_seed(1);
    let mut order: Vec<usize> = (0..trials.len()).collect();
    for round in 1..=rounds {
        meter.round(observer)?;
        random.shuffle(&mut order);
        for &at in &order {
            let trial = &mut trials[at];
            let first = random.usize(..2);
            let mut pair = [None, None];
            for with in [first, 1 - first] {
                let (name, apply) = match with {
                    0 => ("unchanged", &Apply::Nothing),
                    _ => (trial.tried.name, trial.tried.apply),
                };
                observer.begin(&format!("run {round} of {rounds}, {name}"));
                meter.prepare(memory, observer)?;
                pair[with] = once(command, apply, observer)?;
                // An incomplete pair is discarded.
                if pair[with].is_none() {
                    return Ok(trials);
                }
                observer.advance(1);
            }
            let [before, with] = pair;
            trial.before.extend(before);
            trial.with.extend(with);
        }
    }
    Ok(trials)
}

/// The measured effect of an advice, beside its prediction.
#[derive(Clone, Debug)]
pub struct Compared<'a> {
    /// The name of the advice.
    pub name: &'a str,
    /// The predicted saving, in seconds; `None` without a prediction.
    pub predicted: Option<f64>,
    /// The measured saving, in seconds of processor time.
    pub saving: Saving,
    /// The change of the median elapsed time, in seconds.
    pub elapsed: f64,
    /// The change of the median number of faults.
    pub faults: f64,
    /// Whether the number of faults changed as predicted.
    pub moved: bool,
    /// Seconds of processor time of each run, without the advice and with the advice.
    pub times: [Vec<f64>; 2],
}

impl Trial<'_> {
    /// Returns all runs.
    pub fn runs(&self) -> impl Iterator<Item = &Run> {
        self.before.iter().chain(&self.with)
    }

    /// Returns the effect of the advice beside its prediction in `predicted`, which uses the costs
    /// measured between the runs. Returns `None` without a pair.
    pub fn compared(&self, predicted: &[Item]) -> Option<Compared<'_>> {
        let times = [&self.before, &self.with]
            .map(|runs| runs.iter().map(|run| run.processor).collect::<Vec<_>>());
        let saving = Saving::of(&times[0], &times[1])?;
        let faults = self.change(|run| run.faults as f64);
        let item = self.tried.item;
        let now = item.map(|before| {
            let now = predicted.iter().find(|now| now.name == before.name).unwrap_or(before);
            now.at_best / 1e9
        });
        // The count of `getrusage` includes populated pages, so it does not show their effect.
        let counted = !self.runs().any(|run| run.counts_populated)
            || !matches!(self.tried.apply, Apply::Populate(_));
        Some(Compared {
            name: self.tried.name,
            predicted: now,
            saving,
            elapsed: self.change(|run| run.wall),
            faults,
            moved: !counted || item.is_none_or(|item| item.moved(-faults)),
            times,
        })
    }

    /// Returns the change of the median.
    fn change(&self, of: fn(&Run) -> f64) -> f64 {
        let middle = |runs: &[Run]| median(&runs.iter().map(of).collect::<Vec<_>>());
        middle(&self.with).unwrap_or(0.0) - middle(&self.before).unwrap_or(0.0)
    }
}

impl Compared<'_> {
    /// Returns whether the saving is beyond the noise, and the number of faults confirms it.
    pub fn is_sure(&self) -> bool {
        self.saving.is_sure() && self.moved
    }

    /// Passes the figures of the advice to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures, context: &Context) -> Result<(), Error> {
        let context = Context { setting: self.name.to_owned(), ..context.clone() };
        let mut seconds =
            |metric: &str, value: f64| figures.figure(&context, metric, "s", Number::Real(value));
        if let Some(predicted) = self.predicted {
            seconds("predicted_seconds", predicted)?;
        }
        let [before, with] = &self.times;
        for (metric, value) in [
            ("measured_seconds", self.saving.middle),
            ("processor_seconds", median(with).unwrap_or(0.0)),
            ("processor_seconds_before", median(before).unwrap_or(0.0)),
            ("elapsed_saving_seconds", -self.elapsed),
        ] {
            seconds(metric, value)?;
        }
        if let Some([low, high]) = self.saving.interval {
            seconds("interval_from_seconds", low)?;
            seconds("interval_to_seconds", high)?;
        }
        for (metric, runs) in [("run_seconds", with), ("run_seconds_before", before)] {
            runs.iter().try_for_each(|value| seconds(metric, *value))?;
        }
        figures.figure(&context, "faults_change", "count", Number::Real(self.faults))
    }
}
