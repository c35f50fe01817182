//! `faultless profile new`: writes a commented profile to be filled in.

use super::find::is_bundled;
use crate::error::CliError;
use faultless_virtual::Profile;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct NewArgs {
    /// Give the profile this name, which results have
    #[arg(value_name = "NAME", default_value = "mine")]
    pub name: String,
    /// Write to this file, which must not exist [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Writes the profile.
///
/// # Errors
/// The name belongs to a bundled profile, or the file exists or cannot be written.
pub fn run(args: &NewArgs) -> Result<(), CliError> {
    let name = args.name.trim();
    if name.is_empty() || is_bundled(name) {
        let why = if name.is_empty() { "empty" } else { "the name of a bundled profile" };
        return Err(CliError::Usage(format!("{name:?}: {why}; use another name, such as `mine`")));
    }
    let text = Profile::template(name);
    let Some(file) = &args.output else {
        io::stdout().lock().write_all(text.as_bytes())?;
        return Ok(());
    };
    let written = File::create_new(file).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => CliError::Usage(format!(
            "--output {}: the file exists; remove it or specify another file",
            file.display()
        )),
        _ => CliError::failed(format_args!("--output {}", file.display()), error),
    })
}
