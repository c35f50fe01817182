//! The option `--set`, which sets knobs.

use faultless_analysis::settings::Assignment;

#[derive(Debug, clap::Args)]
pub struct SetArgs {
    /// Set a knob; repeatable (see `faultless knobs`)
    #[arg(long = "set", value_name = "KNOB=VALUE")]
    pub set: Vec<Assignment>,
}
