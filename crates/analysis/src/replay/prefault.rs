//! The effect of prefault on a recorded program, counted without times. Each order is replayed
//! once, on one CPU and in the order of the recording, so the page counts are exact and
//! reproducible.
//!
//! Also computes the upper bound for any policy with windows of the same size.

use super::native::{Gauged, replay_gauged};
use super::source::Source;
use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::run;
use crate::sample::Sample;
use crate::settings::{Regime, Settings};
use crate::stop;
use faultless::Counter;
use faultless_trace::bound::{Took, bound};
use faultless_trace::plan::Plan;

/// The counters of prefault. If an [`Effect`] is known, its counters replace those of a replay at
/// full speed in all output: the windows of concurrent threads depend on their order, so such a
/// replay has slightly different counts each time.
pub const PREFAULT: [Counter; 6] = [
    Counter::PrefaultHit,
    Counter::PrefaultMiss,
    Counter::PrefaultPage,
    Counter::PrefaultWasted,
    Counter::PrefaultUsed,
    Counter::PrefaultUnused,
];

/// The effect, in pages and faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effect {
    /// All faults with order 0.
    pub faults_off: u64,
    /// First touches of private anonymous memory, each a fault with order 0.
    pub touches: u64,
    /// First touches that no longer fault.
    pub saved: u64,
    /// Copies of the zero page that fault with order 0, and not with prefault.
    pub copies: u64,
    /// The maximum number of first touches that windows of the same size could save.
    pub bound: u64,
    /// The counts of [`PREFAULT`].
    pub prefault: [u64; PREFAULT.len()],
    /// The peak pages of each process with order 0, added up.
    pub peak_off: u64,
    /// The same with prefault.
    pub peak: u64,
}

impl Effect {
    /// Returns the prefaulted pages.
    pub fn mapped(&self) -> u64 {
        self.counted(Counter::PrefaultPage)
    }

    /// Returns the prefaulted pages without a use before their unmapping or the end of their
    /// process.
    pub fn unused(&self) -> u64 {
        self.counted(Counter::PrefaultWasted)
    }

    fn counted(&self, counter: Counter) -> u64 {
        let at = PREFAULT.iter().position(|known| *known == counter);
        at.map_or(0, |at| self.prefault[at])
    }

    /// Returns `sample` with the prefault counters of this effect.
    pub fn counted_in(&self, mut sample: Sample) -> Sample {
        for (counter, count) in PREFAULT.into_iter().zip(self.prefault) {
            let own = sample.counters.iter_mut().find(|(name, _)| *name == counter.name());
            own.into_iter().for_each(|(_, value)| *value = count);
        }
        sample
    }

    /// Passes the effect to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures, context: &Context) -> Result<(), Error> {
        let counts = [
            ("first_touches", "faults", self.touches),
            ("faults_saved", "faults", self.saved),
            ("zero_page_copies_saved", "faults", self.copies),
            ("faults_saved_upper_bound", "faults", self.bound),
            ("peak_resident_pages_off", "pages", self.peak_off),
            ("peak_resident_pages", "pages", self.peak),
        ];
        counts.into_iter().try_for_each(|(metric, unit, n)| {
            figures.figure(context, metric, unit, Number::Whole(n))
        })
    }
}

/// Returns the effects of `regimes` under `settings`, compared with [`Regime::OFF`]; `None` if the
/// user interrupted the replays.
///
/// # Errors
/// The recording cannot be planned, or a replay failed.
pub fn effects(
    source: &Source,
    settings: &Settings,
    regimes: &[Regime],
) -> Result<Option<Vec<Effect>>, Error> {
    let plan = in_turn(source)?;
    let gauged = |regime| {
        let gauged = gauged(source, &plan, &settings.with_regime(regime))?;
        // Only peaks are needed, and a long recording has many operations.
        Ok::<_, Error>(Gauged { resident: Vec::new(), ..gauged })
    };
    let off = gauged(Regime::OFF)?;
    let mut effects = Vec::with_capacity(regimes.len());
    for &regime in regimes {
        let with = gauged(regime)?;
        if !off.replayed.complete || !with.replayed.complete {
            return Ok(None);
        }
        effects.push(effect(&plan, regime.order, &off, &with));
    }
    Ok(Some(effects))
}

/// Returns the operations of `source`, in the order of the recording.
///
/// # Errors
/// The recording cannot be planned.
pub fn in_turn(source: &Source) -> Result<Plan, Error> {
    let plan = Plan::in_turn(&source.trace);
    plan.map_err(|error| Error::input(&source.name, error))
}

/// Returns the same operations as [`in_turn`], with their times.
///
/// # Errors
/// The recording cannot be planned.
pub fn in_turn_with_times(source: &Source) -> Result<Plan, Error> {
    let plan = Plan::in_turn_with_times(&source.trace);
    plan.map_err(|error| Error::input(&source.name, error))
}

/// Replays `plan`, created by [`in_turn`], once, with a measurement after each operation.
///
/// # Errors
/// A failed operation.
pub fn gauged(source: &Source, plan: &Plan, settings: &Settings) -> Result<Gauged, Error> {
    // A new machine, so that threads have no stream history.
    let native = run::untimed_machine(source.memory(), 1)?;
    settings.apply(&native);
    replay_gauged(&native, plan, stop::requested).map_err(|error| source.failed(settings, error))
}

/// Returns the effect of windows of `order`: the difference between the replay `off` and the replay
/// `with` of the same operations.
fn effect(plan: &Plan, order: u8, off: &Gauged, with: &Gauged) -> Effect {
    let spared = |what: Took| {
        let pairs = off.done.iter().zip(&with.done);
        pairs.filter(|(off, with)| off.took() == what && with.took() == Took::Nothing).count()
            as u64
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
