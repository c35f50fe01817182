//! The option `--set`, which sets knobs.

use crate::error::CliError;
use faultless_analysis::settings::Assignment;

#[derive(Debug, clap::Args)]
pub struct SetArgs {
    /// Set a knob; repeatable (see `faultless knobs`)
    #[arg(long = "set", value_name = "KNOB=VALUE")]
    pub set: Vec<Assignment>,
}

impl SetArgs {
    /// Returns an error if a knob has two values, unless the command compares the values of the
    /// knob, as one of `compared`.
    pub fn one_value_each(&self, compared: &[&str]) -> Result<(), CliError> {
        let twice = self.set.iter().enumerate().find(|(at, set)| {
            !compared.contains(&set.knob()) && self.set[..*at].iter().any(|one| one.is_same(set))
        });
        match twice {
            None => Ok(()),
            Some((_, set)) => {
                let (text, knob) = (set.text(), set.knob());
                let why =
                    format!("--set {text}: {knob} has another value, too: use one of the two");
                Err(CliError::Usage(why))
            }
        }
    }
}
