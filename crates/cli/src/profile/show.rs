//! `faultless profile show`: prints a bundled profile as a file.

use super::find::hint;
use crate::error::CliError;
use faultless_virtual::profile::BUNDLED;
use std::io::{self, Write};

#[derive(Debug, clap::Args)]
pub struct ShowArgs {
    /// Print this bundled profile
    #[arg(value_name = "NAME")]
    pub name: String,
}

/// Prints the bundled profile `name`.
///
/// # Errors
/// No bundled profile has this name.
pub fn run(name: &str) -> Result<(), CliError> {
    let found = BUNDLED.iter().find(|(known, _)| *known == name);
    let Some((_, text)) = found else {
        let names = BUNDLED.map(|(name, _)| name).join(", ");
        let error = format!("{name}: no such bundled profile; there are {names}{}", hint(name));
        return Err(CliError::Usage(error));
    };
    io::stdout().lock().write_all(text.as_bytes())?;
    Ok(())
}
