//! What prefault does to a recorded program, counted apart from any time: each order is replayed once, on
//! one CPU and in the order of the recording, so that pages can be counted exactly, and come out the same each
//! time.
//!
//! It also computes the upper bound for any policy with windows of that size.

use super::engine::{Gauged, replay_gauged};
use super::{failed, source::Source};
use crate::error::CliError;
use crate::interrupt;
use crate::report::effect::{Effect, PREFAULT};
use crate::run;
use crate::settings::{Ahead, Settings};
use faultless_trace::bound::{Took, bound};
use faultless_trace::plan::Plan;

/// The effects of `regimes` under `settings`, against [`Ahead::OFF`]; `None` where the user interrupted it.
pub fn effects(
    source: &Source,
    settings: &Settings,
    regimes: &[Ahead],
) -> Result<Option<Vec<Effect>>, CliError> {
    let plan = in_turn(source)?;
    let gauged = |ahead| {
        let gauged = gauged(source, &plan, &settings.with_ahead(ahead))?;
        // Peaks are enough, and a long recording has many operations.
        Ok::<_, CliError>(Gauged { resident: Vec::new(), ..gauged })
    };
    let off = gauged(Ahead::OFF)?;
    let mut effects = Vec::with_capacity(regimes.len());
    for &ahead in regimes {
        let with = gauged(ahead)?;
        if !off.replayed.complete || !with.replayed.complete {
            return Ok(None);
        }
        effects.push(effect(&plan, ahead.order, &off, &with));
    }
    Ok(Some(effects))
}

/// What `source` does, in the order of the recording.
///
/// # Errors
/// It cannot be planned.
pub fn in_turn(source: &Source) -> Result<Plan, CliError> {
    let plan = Plan::in_turn(&source.trace);
    plan.map_err(|error| CliError::Usage(format!("{}: {error}", source.name)))
}

/// One replay of `plan`, which is [`in_turn`], with a look after each operation.
///
/// # Errors
/// What failed.
pub fn gauged(source: &Source, plan: &Plan, settings: &Settings) -> Result<Gauged, CliError> {
    // A new one, on which no thread has learned anything.
    let native = run::machine(source.memory(), 1)?;
    settings.apply(&native);
    replay_gauged(&native, plan, interrupt::requested)
        .map_err(|error| failed(source, settings, error))
}

/// What windows of `order` made of the replay `off`: the replay `with`, which did the same.
fn effect(plan: &Plan, order: u8, off: &Gauged, with: &Gauged) -> Effect {
    let spared = |what: Took| {
        let pairs = off.done.iter().zip(&with.done);
        pairs.filter(|(off, with)| off.took == what && with.took == Took::Nothing).count() as u64
    };
    let bound = bound(plan, &off.done, order);
    Effect {
        faults_off: off.replayed.sample.faults,
        touches: bound.touches,
        saved: spared(Took::First),
        copies: spared(Took::Copy),
        bound: bound.saved,
        prefault: PREFAULT.map(|counter| with.replayed.sample.counter(counter).unwrap_or(0)),
        peak_off: off.peak,
        peak: with.peak,
    }
}

#[cfg(test)]
mod tests;
