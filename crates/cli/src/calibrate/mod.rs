//! `faultless calibrate`: a profile of this machine for the virtual machine, and its predictions.

mod check;
mod prefault;

use crate::error::CliError;
use crate::interrupt;
use crate::output::{self, Replacing};
use crate::profile;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{self, JsonArgs, Style, filled, table};
use crate::set::SetArgs;
use faultless_analysis::calibrate::fit::Fitted;
use faultless_analysis::calibrate::profile::REMARKS;
use faultless_analysis::calibrate::{MEASURE_STEPS, Measurements, Scope, measure};
use faultless_analysis::settings::{Settings, regime_of_policies};
use faultless_virtual::Profile;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless calibrate
  faultless calibrate --output mine.toml --check
  faultless calibrate --profile mine.toml     check a profile again
  faultless scale pft --profile ./mine.toml   use it
  faultless profile list                      the format of a profile")]
pub struct CalibrateArgs {
    /// Write the profile to FILE, which is replaced when the profile is complete
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Predict workloads and recordings with the profile, and measure them
    #[arg(long)]
    pub check: bool,
    /// Check this profile instead of measuring a new profile
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "output")]
    pub profile: Option<String>,
    /// Run fewer rounds, and check two workloads only, as a demonstration
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    pub set: SetArgs,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Measures, fits, writes and checks.
pub fn run(args: &CalibrateArgs) -> Result<(), CliError> {
    let scope = if args.quick { Scope::Quick } else { Scope::All };
    if let Some(set) = args.set.set.first().filter(|_| !args.check && args.profile.is_none()) {
        let why = "knobs apply to the predicted runs, so --set needs --check or --profile";
        return Err(CliError::Usage(format!("--set {}: {why}", set.text())));
    }
    let inputs: Vec<_> = args.profile.iter().map(Path::new).collect();
    let given = args.profile.as_deref().map(profile::find).transpose()?;
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
    args.set.one_value_each(&[])?;
    let settings = Settings::new(&args.set.set).with_regime(regime_of_policies(&args.set.set));

    let checked = given.is_some() || args.check;
    let profile = match given {
        Some(profile) => Some(profile),
        None => match measured(scope)? {
            Some(measured) => {
                let Measurements { profile, fitted, faults } = &measured;
                print(&mut *out, profile, fitted, style)?;
                let fits = fitted.iter().all(Fitted::fits);
                prefault::print(&mut *out, faults, (profile, fits), style)?;
                measured.figures(&mut json)?;
                if let Some(output) = output {
                    output.write(profile.to_toml(&REMARKS).as_bytes())?;
                }
                Some(measured.profile)
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

/// Measures and fits; `None` if the user interrupted the command.
fn measured(scope: Scope) -> Result<Option<Measurements>, CliError> {
    let progress = Progress::new(MEASURE_STEPS);
    Ok(measure(scope, &progress)?)
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
