//! The effect of prefault on a recorded program, counted without times. Each order is replayed
//! once, on one CPU and in the order of the recording, so the page counts are exact and
//! reproducible.
//!
//! Also computes the upper bound for any policy with windows of the same size.

use super::engine::{Gauged, replay_gauged};
use super::{failed, source::Source};
use crate::error::CliError;
use crate::interrupt;
use crate::report::effect::{Effect, PREFAULT};
use crate::run;
use crate::settings::{Ahead, Settings};
use faultless_trace::bound::{Took, bound};
use faultless_trace::plan::Plan;

/// Returns the effects of `regimes` under `settings`, compared with [`Ahead::OFF`]; `None` if the
/// user interrupted the replays.
pub fn effects(
    source: &Source,
    settings: &Settings,
    regimes: &[Ahead],
) -> Result<Option<Vec<Effect>>, CliError> {
    let plan = in_turn(source)?;
    let gauged = |ahead| {
        let gauged = gauged(source, &plan, &settings.with_ahead(ahead))?;
        // Only peaks are needed, and a long recording has many operations.
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

/// Returns the operations of `source`, in the order of the recording.
///
/// # Errors
/// The recording cannot be planned.
pub fn in_turn(source: &Source) -> Result<Plan, CliError> {
    let plan = Plan::in_turn(&source.trace);
    plan.map_err(|error| CliError::Usage(format!("{}: {error}", source.name)))
}

/// Replays `plan`, created by [`in_turn`], once, with a measurement after each operation.
///
/// # Errors
/// A failed operation.
pub fn gauged(source: &Source, plan: &Plan, settings: &Settings) -> Result<Gauged, CliError> {
    // A new machine, so that threads have no stream history.
    let native = run::machine(source.memory(), 1)?;
    settings.apply(&native);
    replay_gauged(&native, plan, interrupt::requested)
        .map_err(|error| failed(source, settings, error))
}

/// Returns the effect of windows of `order`: the difference between the replay `off` and the replay
/// `with` of the same operations.
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
