//! `faultless generate`: manual pages, and completions for shells, from the definitions of the
//! arguments. The Debian package contains them.

use crate::args::Args;
use crate::error::CliError;
use clap::CommandFactory;
use clap_complete::Shell;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct GenerateArgs {
    /// Write the files below this directory
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

/// Each shell, with the file of its completions.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "completions/faultless.bash"),
    (Shell::Zsh, "completions/_faultless"),
    (Shell::Fish, "completions/faultless.fish"),
];

/// Writes the manual pages to `man` and the completions to `completions`, below the directory.
///
/// # Errors
/// A file cannot be written.
pub fn run(args: &GenerateArgs) -> Result<(), CliError> {
    let mut command = Args::command();
    for (shell, file) in SHELLS {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command, "faultless", &mut text);
        write(&args.directory.join(file), &text)?;
    }
    // Clap generates a command with a list of the other commands, which would get a page of its
    // own.
    let command = Args::command().disable_help_subcommand(true);
    let pages = args.directory.join("man");
    fs::create_dir_all(&pages)
        .and_then(|()| clap_mangen::generate_to(command, &pages))
        .map_err(|error| CliError::failed(pages.display(), error))
}

/// Writes a file and its directory.
fn write(file: &Path, text: &[u8]) -> Result<(), CliError> {
    let written =
        fs::create_dir_all(file.parent().unwrap_or(file)).and_then(|()| fs::write(file, text));
    written.map_err(|error| CliError::failed(file.display(), error))
}
