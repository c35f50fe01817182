//! `faultless calibrate`: a profile of this machine for the virtual machine, and its predictions.
//!
//! The calibrated machine is the native machine: threads with a software MMU. Hardware costs
//! (frequency, cache lines, zeroing) are measured directly ([`hardware`], and faults of the host in
//! [`faults`]). The cost of a path of the subsystem is measured on the native machine, and the
//! number of the profile is [fitted](fit) so that the simulated path takes as long. A
//! [check](check) predicts workloads and measures them. No number is fitted to a workload.

mod check;
pub mod faults;
mod fit;
pub mod hardware;
mod prefault;
mod probe;
mod profile;

use crate::args::CalibrateArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::output::{self, Replacing};
use crate::profiles;
use crate::report::json::{Context, Json, Number};
use crate::report::progress::Progress;
use crate::report::{self, Style, filled, table};
use crate::settings::{Settings, ahead_of_policies};
use faultless_virtual::Profile;
use faults::Faults;
use fit::{Fitted, STEPS};
use hardware::Effort;
use serde_json::Map;
use std::io::Write;
use std::path::Path;

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
    const fn rounds(self) -> usize {
        match self {
            Self::Quick => 2,
            Self::All => 15,
        }
    }
}

/// Measures, fits, writes and checks.
pub fn run(args: &CalibrateArgs) -> Result<(), CliError> {
    let scope = if args.quick { Scope::Quick } else { Scope::All };
    let inputs: Vec<_> = args.profile.iter().map(Path::new).collect();
    let given = args.profile.as_deref().map(profiles::find).transpose()?;
    let output = match &args.output {
        Some(file) => {
            output::spare("--output", file, &inputs)?;
            let opened = Replacing::new(file);
            Some(opened.map_err(|error| CliError::Failed(format!("--output {error}")))?)
        }
        None => None,
    };
    let mut json = Json::open(&args.json, &inputs)?;
    let (mut out, style) = report::output(&args.json);
    let settings = Settings::new(&args.set.set).with_ahead(ahead_of_policies(&args.set.set));

    let checked = given.is_some() || args.check;
    let profile = match given {
        Some(profile) => Some(profile),
        None => match measure(scope)? {
            Some((profile, fitted, faults)) => {
                print(&mut *out, &profile, &fitted, style)?;
                let fits = fitted.iter().all(fit::Fitted::fits);
                prefault::print(&mut *out, &faults, (&profile, fits), style)?;
                write_json(&mut json, &profile, &faults)?;
                if let Some(output) = output {
                    output.write(profile.to_toml(&profile::REMARKS).as_bytes())?;
                }
                Some(profile)
            }
            None => None,
        },
    };
    if let Some(profile) = profile.filter(|_| checked) {
        check::run(&mut *out, &mut json, &profile, &settings, (scope, style))?;
    }
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    json.complete()
}

/// The measurements: the profile, the quality of its fit, and the cost of the host's own faults.
type Measurements = (Profile, Vec<Fitted>, Faults);

/// Measures and fits; `None` if the user interrupted the command.
fn measure(scope: Scope) -> Result<Option<Measurements>, CliError> {
    let effort = Effort { rounds: scope.rounds() };
    let cpus = hardware::two_cpus()?;
    let mut profile = profile::base()?;
    let progress = Progress::new((profile::FIGURES.len() + 2 * STEPS.len() + 1) as u64);
    for (what, figure) in profile::FIGURES {
        progress.begin(what);
        let mut with = profile.clone();
        // Some of the measurements take seconds.
        let measured = interrupt::unless_requested(move || {
            figure(&mut with, effort, cpus)?;
            Ok::<_, CliError>(with)
        });
        let Some(with) = measured.transpose()? else { return Ok(None) };
        profile = with;
        progress.advance(1);
    }
    progress.begin("page faults of the host");
    let faults = faults::host_faults(effort)?;
    progress.advance(1);

    let machine = probe::machine()?;
    let mut native = [0.0; STEPS.len()];
    for (step, native) in STEPS.iter().zip(&mut native) {
        if interrupt::requested() {
            return Ok(None);
        }
        progress.begin(step.probe.name());
        let rounds: Result<Vec<_>, _> =
            (0..effort.rounds).map(|_| step.probe.natively(&machine)).collect();
        let mut rounds = rounds?.into_iter();
        *native = effort.smallest(|| rounds.next().unwrap_or(f64::INFINITY));
        progress.advance(1);
    }
    progress.begin("the fit");
    let fitted = fit::fit(&mut profile, &native, |_| progress.advance(1))?;
    Ok(fitted.filter(|_| !interrupt::requested()).map(|fitted| {
        profile::explain(&mut profile, &fitted);
        (profile, fitted, faults)
    }))
}

fn print(
    out: &mut dyn Write,
    profile: &Profile,
    fitted: &[Fitted],
    style: Style,
) -> Result<(), CliError> {
    writeln!(out, "\n{profile}\n")?;
    let mut numbers = table::plain();
    for (name, number) in profile.numbers() {
        numbers.add_row([name, number.value.to_string(), number.source.clone()]);
    }
    writeln!(out, "{numbers}")?;
    writeln!(
        out,
        "\nThe paths that were fitted, nanoseconds each, the fastest of several runs:\n"
    )?;
    let head = ["path", "native", "simulated", "fitted", "to"].map(str::to_owned);
    let mut paths = table::numbers(&head, style);
    for path in fitted {
        let Fitted { step, native, simulated } = path;
        let number = profile.numbers().into_iter().find(|(name, _)| name == step.key);
        let mark = if path.fits() { "" } else { " *" };
        let row = [
            format!("{}{mark}", step.probe.name()),
            format!("{native:.1}"),
            format!("{simulated:.1}"),
            step.key.to_owned(),
            number.map_or(String::new(), |(_, number)| number.value.to_string()),
        ];
        table::row(&mut paths, row);
    }
    writeln!(out, "{paths}")?;
    if fitted.iter().any(|path| !path.fits()) {
        let apart = "* Not fitted: no number within the bounds gives the measured time in simulation. Other programs may have run during the measurement. \
                     Simulations with this profile are inaccurate for such paths.";
        writeln!(out, "{}", filled(apart, style.width))?;
    }
    Ok(())
}

fn write_json(json: &mut Json, profile: &Profile, faults: &Faults) -> Result<(), CliError> {
    let context = Context {
        machine: "native".into(),
        workload: "calibrate".into(),
        cpus: profile.cpus(),
        setting: "default".into(),
        params: Map::from_iter([("profile".to_owned(), profile.summary.as_str().into())]),
        knobs: Map::new(),
    };
    let unit = |name: &str| match name {
        _ if name.ends_with("_ns") => "ns",
        "cpu.ghz" => "GHz",
        "memory.gigabytes_per_second" => "GB/s",
        _ if name.ends_with("ipc") || name.ends_with("per_cycle") => "1/cycle",
        "line.occupancy" => "1",
        _ => "count",
    };
    for (name, number) in profile.numbers() {
        json.write(&context, &name, unit(&name), Number::Real(number.value))?;
    }
    for (metric, value) in faults.figures() {
        json.write(&context, metric, "ns", Number::Real(value))?;
    }
    Ok(())
}
