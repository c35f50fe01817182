//! The costs of this machine, and a profile with these costs for the virtual machine.
//!
//! The calibrated machine is the native machine: threads with a software MMU. Hardware costs
//! (frequency, cache lines, zeroing) are measured directly ([`hardware`], and faults of the host in
//! [`faults`]). The cost of a path of the subsystem is measured on the native machine
//! ([`probe`]), and the number of the profile is [fitted](fit) so that the simulated path takes as
//! long. A [`check`] predicts workloads and measures them. No number is fitted to a workload.

pub mod check;
mod counted;
pub mod faults;
pub mod fit;
pub mod hardware;
pub mod prefault;
pub mod probe;
pub mod profile;
pub mod walks;

use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::observer::Observer;
use crate::stop;
use faultless_virtual::Profile;
use faults::Faults;
use fit::{Fitted, STEPS};
use hardware::Effort;
use serde_json::Map;

/// The extent of the calibration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Few rounds, two workloads, and no recording.
    Quick,
    /// Everything.
    All,
}

impl Scope {
    /// Returns the rounds of a measurement, of which the quietest counts. Workloads have twice as
    /// many.
    pub const fn rounds(self) -> usize {
        match self {
            Self::Quick => 2,
            Self::All => 15,
        }
    }
}

/// The results of a calibration.
#[derive(Debug)]
pub struct Measurements {
    /// The profile of this machine.
    pub profile: Profile,
    /// The quality of the fit of each path.
    pub fitted: Vec<Fitted>,
    /// The cost of the host's own faults.
    pub faults: Faults,
}

impl Measurements {
    /// Passes the numbers of the profile and the costs of the host's faults to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures) -> Result<(), Error> {
        let context = Context {
            machine: "native".into(),
            workload: "calibrate".into(),
            cpus: self.profile.cpus(),
            setting: "default".into(),
            params: Map::from_iter([("profile".to_owned(), self.profile.summary.as_str().into())]),
            knobs: Map::new(),
            basis: None,
        };
        let unit = |name: &str| match name {
            _ if name.ends_with("_ns") => "ns",
            "cpu.ghz" => "GHz",
            "memory.gigabytes_per_second" => "GB/s",
            _ if name.ends_with("ipc") || name.ends_with("per_cycle") => "1/cycle",
            "line.occupancy" => "1",
            _ => "count",
        };
        for (name, number) in self.profile.numbers() {
            figures.figure(&context, &name, unit(&name), Number::Real(number.value))?;
        }
        for (metric, value) in self.faults.figures() {
            figures.figure(&context, metric, "ns", Number::Real(value))?;
        }
        Ok(())
    }
}

/// The steps of progress of [`measure`].
pub const MEASURE_STEPS: u64 = (profile::FIGURES.len() + 2 * STEPS.len() + 1) as u64;

/// Measures and fits; `None` after a request to stop.
///
/// # Errors
/// The host has too little memory or too few CPUs, or a run failed.
pub fn measure(scope: Scope, observer: &dyn Observer) -> Result<Option<Measurements>, Error> {
    let effort = Effort { rounds: scope.rounds() };
    let cpus = hardware::two_cpus()?;
    let mut profile = profile::base()?;
    for (what, figure) in profile::FIGURES {
        observer.begin(what);
        let mut with = profile.clone();
        // Some of the measurements take seconds.
        let measured = stop::unless_requested(move || {
            figure(&mut with, effort, cpus)?;
            Ok::<_, Error>(with)
        });
        let Some(with) = measured.transpose()? else { return Ok(None) };
        profile = with;
        observer.advance(1);
    }
    observer.begin("page faults of the host");
    let faults = faults::host_faults(effort)?;
    observer.advance(1);

    let machine = probe::machine()?;
    let mut native = [0.0; STEPS.len()];
    for (step, native) in STEPS.iter().zip(&mut native) {
        if stop::requested() {
            return Ok(None);
        }
        observer.begin(step.probe.name());
        let rounds: Result<Vec<_>, _> =
            (0..effort.rounds).map(|_| step.probe.natively(&machine)).collect();
        let mut rounds = rounds?.into_iter();
        *native = effort.smallest(|| rounds.next().unwrap_or(f64::INFINITY));
        observer.advance(1);
    }
    observer.begin("the fit");
    let fitted = fit::fit(&mut profile, &native, |_| observer.advance(1))?;
    Ok(fitted.filter(|_| !stop::requested()).map(|fitted| {
        profile::explain(&mut profile, &fitted);
        Measurements { profile, fitted, faults }
    }))
}
