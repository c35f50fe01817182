//! The effect of each mechanism, off and on, on the virtual machine, whose figures have no noise.
//! For prefault also the time of recorded programs, and the additional pages.

use crate::error::Error;
use crate::figures::Figures;
use crate::number::plural;
use crate::observer::Observer;
use crate::replay::prefault::effects;
use crate::replay::{Effect, Source};
use crate::scale::Subject;
use crate::settings::{Assignment, Regime, Settings};
use crate::stop;
use faultless_virtual::Profile;
use std::sync::Arc;

/// The number of CPUs on which a mechanism is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cpus {
    One,
    Many,
}

/// The compared figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// Operations per second.
    Rate,
    /// The number of faults.
    Faults,
    /// Seconds.
    Time,
}

/// A knob, and a workload that shows its effect.
#[derive(Debug)]
struct Mechanism {
    knob: &'static str,
    off: &'static str,
    /// The default, unless another value is given here.
    on: Option<&'static str>,
    workload: &'static str,
    cpus: Cpus,
    of: Of,
    /// Other knobs, for both runs.
    with: &'static [&'static str],
}

/// A knob that is on by default, compared by the rate of a workload.
const fn knob(
    knob: &'static str,
    off: &'static str,
    workload: &'static str,
    cpus: Cpus,
) -> Mechanism {
    Mechanism { knob, off, on: None, workload, cpus, of: Of::Rate, with: &[] }
}

static MECHANISMS: [Mechanism; 8] = [
    knob("anon_vma_check", "early", "small_allocs", Cpus::Many),
    knob("edit_in_place", "0", "mmap1", Cpus::One),
    knob("map_apart", "0", "mmap1", Cpus::Many),
    knob("shard_after", "0", "vma_unmap_untouched", Cpus::Many),
    // A huge leaf would replace the surrounding pages.
    Mechanism { with: &["huge_text=never"], ..knob("fault_around_pages", "1", "text", Cpus::One) },
    // Translations of 2 MiB are not simulated; faults are counted.
    Mechanism { of: Of::Faults, ..knob("huge_text", "never", "text", Cpus::One) },
    Mechanism { on: Some("16384"), ..knob("zeroed_pool", "0", "pft", Cpus::One) },
    Mechanism {
        on: Some("1"),
        with: &["zeroed_pool=4096"],
        ..knob("zero_on_free", "0", "discard", Cpus::One)
    },
];

/// The effect of a mechanism.
#[derive(Debug)]
pub struct Row {
    /// The knob, with its values for off and on.
    pub knob: String,
    /// The default value of the knob: `on` or `off`; empty if neither.
    pub default: &'static str,
    /// The subject that shows the effect.
    pub of: String,
    /// The compared figure.
    pub figure: Of,
    /// The figure with the mechanism off.
    pub off: f64,
    /// The figure with the mechanism on.
    pub on: f64,
}

/// The effects of the mechanisms.
#[derive(Debug, Default)]
pub struct Defaults {
    /// The rows, in order.
    pub rows: Vec<Row>,
    /// The effects of prefault on recordings, by order.
    pub effects: Vec<(u8, Vec<Effect>)>,
}

/// The inputs of the comparison of mechanisms.
#[derive(Clone, Copy, Debug)]
pub struct Needs<'a> {
    /// The profile of the simulated CPUs.
    pub profile: &'a Profile,
    /// The number of CPUs for mechanisms of many CPUs.
    pub cpus: usize,
    /// The knobs of the user.
    pub given: &'a [Assignment],
    /// Whether the mechanisms are compared, or only prefault on the recordings.
    pub mechanisms: bool,
    /// The recordings.
    pub recordings: &'a [Arc<Source>],
    /// Orders of prefault for the recordings.
    pub orders: &'a [u8],
}

impl Needs<'_> {
    /// Returns the steps of progress.
    pub fn steps(&self) -> usize {
        let mechanisms = if self.mechanisms { 2 * MECHANISMS.len() } else { 0 };
        mechanisms + self.recordings.len() * (self.orders.len() + 1)
    }
}

impl Defaults {
    /// Runs the comparison. Failures are added to `failures`.
    ///
    /// # Errors
    /// Results cannot be written.
    pub fn run(
        needs: &Needs<'_>,
        figures: &mut dyn Figures,
        observer: &dyn Observer,
        failures: &mut Vec<String>,
    ) -> Result<Self, Error> {
        let mut all = Self::default();
        for mechanism in MECHANISMS.iter().filter(|_| needs.mechanisms) {
            if stop::requested() {
                return Ok(all);
            }
            observer.begin(&format!("{} on and off, simulated", mechanism.knob));
            match mechanism.row(needs, figures, observer) {
                Ok(row) => all.rows.extend(row),
                Err(error) if error.is_output() => return Err(error),
                Err(error) => failures.push(error.to_string()),
            }
        }
        match all.prefault(needs, figures, observer) {
            Ok(()) => {}
            Err(error) if error.is_output() => return Err(error),
            Err(error) => failures.push(error.to_string()),
        }
        Ok(all)
    }

    /// Adds the effect of prefault of each order on all recordings together.
    fn prefault(
        &mut self,
        needs: &Needs<'_>,
        figures: &mut dyn Figures,
        observer: &dyn Observer,
    ) -> Result<(), Error> {
        let settings = Settings::new(needs.given);
        let regimes: Vec<_> = needs.orders.iter().map(|&order| Regime { order, pool: 0 }).collect();
        let mut counted: Vec<Vec<Effect>> = regimes.iter().map(|_| Vec::new()).collect();
        let mut times = vec![0.0; regimes.len() + 1];
        for source in needs.recordings {
            observer.begin(&format!("replay:{}, prefault, simulated", source.name));
            let Some(of) = effects(source, &settings, &regimes)? else { return Ok(()) };
            let subject = Arc::new(Subject::Recording(Arc::clone(source)));
            for (at, regime) in std::iter::once(&Regime::OFF).chain(&regimes).enumerate() {
                let settings = settings.with_regime(*regime);
                let Some((mut ran, context)) =
                    subject.run(needs.profile, source.simulated_cpus()?, 0, &settings)?
                else {
                    return Ok(());
                };
                // Counts of prefault are reported once, in the order of the recording.
                if let Some(effect) = at.checked_sub(1).and_then(|at| of.get(at)) {
                    ran.sample = effect.counted_in(ran.sample);
                }
                ran.figures(figures, &context)?;
                times[at] += ran.sample.wall;
                observer.advance(1);
            }
            for ((effect, counted), regime) in of.into_iter().zip(&mut counted).zip(&regimes) {
                let context = source.context(&settings.with_regime(*regime));
                effect.figures(figures, &context)?;
                counted.push(effect);
            }
        }
        let of = match needs.recordings {
            [] => return Ok(()),
            [one] => one.name.clone(),
            several => plural(several.len() as u64, "recording"),
        };
        let default = Settings::new(&[]).regime.order;
        for (at, (order, effects)) in needs.orders.iter().copied().zip(counted).enumerate() {
            self.rows.push(Row {
                knob: format!("prefault_max_order=0, {order}"),
                default: if order == default { "on" } else { "" },
                of: of.clone(),
                figure: Of::Time,
                off: times[0],
                on: times[at + 1],
            });
            self.effects.push((order, effects));
        }
        Ok(())
    }
}

impl Mechanism {
    /// Returns the row of the mechanism; `None` if the user interrupted the runs.
    fn row(
        &self,
        needs: &Needs<'_>,
        figures: &mut dyn Figures,
        observer: &dyn Observer,
    ) -> Result<Option<Row>, Error> {
        let default = default(self.knob);
        let on = self.on.unwrap_or(&default);
        let cpus = if self.cpus == Cpus::Many { needs.cpus } else { 1 };
        let subject = Arc::new(Subject::Workload(self.workload.into(), Vec::new()));
        let mut values = [0.0; 2];
        for (figure, value) in values.iter_mut().zip([self.off, on]) {
            let own = [format!("{}={value}", self.knob)];
            let settings = settings(needs.given, self.with.iter().copied().chain([&*own[0]]))?;
            let Some((ran, context)) = subject.run(needs.profile, cpus, 0, &settings)? else {
                return Ok(None);
            };
            ran.figures(figures, &context)?;
            *figure = match self.of {
                Of::Rate => ran.sample.operation_rate(),
                Of::Faults => ran.sample.faults as f64,
                Of::Time => ran.sample.wall,
            };
            observer.advance(1);
        }
        let [off, on_value] = values;
        Ok(Some(Row {
            knob: format!("{}={}, {on}", self.knob, self.off),
            default: if on == default { "on" } else { "off" },
            of: format!("{}, {}", self.workload, plural(cpus as u64, "CPU")),
            figure: self.of,
            off,
            on: on_value,
        }))
    }
}

/// Returns the default value of a knob.
fn default(knob: &str) -> String {
    let knobs = Settings::new(&[]).knobs();
    match &knobs[knob] {
        serde_json::Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// Returns the settings `given` with prefault off, followed by `more`.
fn settings<'a>(
    given: &[Assignment],
    more: impl Iterator<Item = &'a str>,
) -> Result<Settings, Error> {
    let mut settings = Settings::new(given).with_regime(Regime::OFF);
    for text in more {
        let assignment: Result<Assignment, _> = text.parse();
        settings.set(&assignment.map_err(|error| Error::setting(text, error))?);
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::Context;
    use crate::figures::Number;
    use std::io;

    #[test]
    fn each_mechanism_is_a_knob_and_differs_from_off() {
        for mechanism in &MECHANISMS {
            let default = default(mechanism.knob);
            let on = mechanism.on.unwrap_or(&default);
            assert_ne!(mechanism.off, on, "{mechanism:?}");
            for value in [mechanism.off, on] {
                let own = format!("{}={value}", mechanism.knob);
                assert!(settings(&[], mechanism.with.iter().copied().chain([&*own])).is_ok());
            }
            // Either the `on` value or the `off` value is the default.
            assert!(mechanism.on.is_none() || mechanism.off == default, "{mechanism:?}");
        }
        let set = settings(&[], ["prefault_max_order=3"].into_iter()).expect("valid");
        assert_eq!(set.regime.order, 3);
        assert_eq!(settings(&[], std::iter::empty()).expect("valid").regime.order, 0);
    }

    /// An output that takes no figure.
    struct Broken(fn() -> Error);

    impl Figures for Broken {
        fn figure(&mut self, _: &Context, _: &str, _: &str, _: Number) -> Result<(), Error> {
            Err(self.0())
        }
    }

    #[test]
    fn error_of_the_output_ends_the_comparison() {
        let profile = Profile::bundled("two-socket").expect("it is bundled");
        let needs = Needs {
            profile: &profile,
            cpus: 1,
            given: &[],
            mechanisms: true,
            recordings: &[],
            orders: &[],
        };
        let full =
            || Error::Output { to: "file".into(), source: io::ErrorKind::StorageFull.into() };
        for error in [full, || Error::Closed] {
            let mut failures = Vec::new();
            let run = Defaults::run(&needs, &mut Broken(error), &(), &mut failures);
            assert!(run.is_err_and(|error| error.is_output()), "{failures:?}");
        }
    }
}
