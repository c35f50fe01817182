//! What mapping ahead does to a recorded program, counted apart from any time: each order is replayed once, on
//! one CPU and in the order of the recording, so that pages can be counted exactly, and come out the same each
//! time.
//!
//! Beside it stands a bound: what a predictor that knows the rest of the recording saves with windows of the
//! same size.

use super::engine::{Replayed, replay_gauged};
use super::{failed, source::Source};
use crate::error::CliError;
use crate::interrupt;
use crate::report::effect::Effect;
use crate::run;
use crate::settings::{Ahead, Settings};
use faultless::Counter;
use faultless_trace::anticipate;
use faultless_trace::plan::Plan;

/// The effects of `regimes` under `settings`, against [`Ahead::OFF`]; `None` where the user interrupted it.
pub fn effects(
    source: &Source,
    settings: &Settings,
    regimes: &[Ahead],
) -> Result<Option<Vec<Effect>>, CliError> {
    let plan =
        Plan::in_turn(&source.trace).map_err(|error| CliError::failed(&source.name, error))?;
    let gauged = |ahead: Ahead| -> Result<(Replayed, u64), CliError> {
        let settings = settings.with_ahead(ahead);
        // A new one, on which no thread has learned anything.
        let native = run::machine(source.memory(), 1)?;
        settings.apply(&native);
        replay_gauged(&native, &plan, interrupt::requested)
            .map_err(|error| failed(source, &settings, error))
    };
    let count = |replayed: &Replayed, counter| replayed.sample.counter(counter).unwrap_or(0);
    let firsts = |of: &Replayed| count(of, Counter::AnonPage) + count(of, Counter::ZeroPage);
    let (off, peak_off) = gauged(Ahead::OFF)?;
    let mut effects = Vec::with_capacity(regimes.len());
    for &ahead in regimes {
        let (with, peak) = gauged(ahead)?;
        if !off.complete || !with.complete {
            return Ok(None);
        }
        let bound = anticipate::perfect(&source.trace, ahead.order)
            .map_err(|error| CliError::failed(&source.name, error))?;
        effects.push(Effect {
            touches: bound.faults,
            saved: firsts(&off).saturating_sub(firsts(&with)),
            copies: count(&off, Counter::CowCopy).saturating_sub(count(&with, Counter::CowCopy)),
            bound: bound.faults - bound.left,
            ahead: count(&with, Counter::PrefaultPage),
            wasted: count(&with, Counter::PrefaultWasted),
            peak_off,
            peak,
        });
    }
    Ok(Some(effects))
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_trace::recordings;

    #[test]
    fn a_recording_is_spared_faults_and_no_more_than_can_be() {
        let source = Source::shipped(recordings::find("sort").unwrap()).unwrap();
        let regimes = [3, 5].map(|order| Ahead { order, pool: 0 });
        let effects = effects(&source, &Settings::new(&[]), &regimes).unwrap().unwrap();
        for effect in &effects {
            assert!(effect.saved * 2 > effect.touches, "{effect:?}");
            // The replay has some first touches that the recording cannot show.
            assert!(effect.saved <= effect.bound + effect.touches / 50, "{effect:?}");
            // Each page mapped ahead spared a fault, or nobody touched it.
            let spared = effect.ahead - effect.wasted;
            assert!(effect.saved.abs_diff(spared) <= effect.touches / 100, "{effect:?}");
            assert!(
                effect.peak >= effect.peak_off && effect.peak <= effect.peak_off + effect.ahead
            );
        }
        assert!(effects[0].saved < effects[1].saved && effects[0].bound < effects[1].bound);
    }

    #[test]
    fn what_threads_of_many_processes_do_comes_out_the_same_each_time() {
        let source = Source::shipped(recordings::find("redis").unwrap()).unwrap();
        let regimes = [Ahead { order: 5, pool: 0 }];
        let [first, again] =
            [(); 2].map(|()| effects(&source, &Settings::new(&[]), &regimes).unwrap().unwrap());
        assert_eq!(first, again);
    }
}
