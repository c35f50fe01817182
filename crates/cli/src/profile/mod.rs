//! `faultless profile`: profiles of machines. `list` and `show` print the bundled profiles, `check`
//! checks a file, and `new` writes a file to be filled in.

mod check;
mod find;
mod list;
mod new;
mod show;

use crate::error::CliError;

pub use find::{bundled, find};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless profile list                         bundled profiles, and the format
  faultless profile show two-socket              one of them, with its sources
  faultless profile new mine --output mine.toml  a commented file to be filled in
  faultless profile check mine.toml              all problems of the file
  faultless scale pft --profile mine.toml        simulate the machine")]
pub struct ProfileArgs {
    #[command(subcommand)]
    pub command: ProfileCommand,
}

#[derive(Debug, clap::Subcommand)]
pub enum ProfileCommand {
    /// List the bundled profiles, and the fields of a profile with their units
    List,
    /// Print a bundled profile as a file
    ///
    /// The output can be saved under another name, changed, and given to `scale --profile`.
    Show(show::ShowArgs),
    /// Check a profile file
    ///
    /// Prints every problem: the field, its value, the requirement and an example. For a valid file
    /// prints the machine, the numbers that are marked as assumed, and remarks about unusual
    /// numbers. The exit status is 2 if the file has a problem.
    Check(check::CheckArgs),
    /// Write a commented profile to be filled in
    ///
    /// Each section and number has a comment with its meaning and unit. The numbers are those of
    /// two-socket, and marked as assumed.
    New(new::NewArgs),
}

/// The arguments of `faultless profiles`, the former name of `profile list` and `profile show`.
#[derive(Debug, clap::Args)]
pub struct ProfilesArgs {
    /// Print this bundled profile
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
}

/// Runs the command of `args`.
///
/// # Errors
/// A profile does not exist or is not valid, or a file cannot be written.
pub fn run(args: &ProfileArgs) -> Result<(), CliError> {
    match &args.command {
        ProfileCommand::List => list::run(),
        ProfileCommand::Show(args) => show::run(&args.name),
        ProfileCommand::Check(args) => check::run(args),
        ProfileCommand::New(args) => new::run(args),
    }
}

/// Runs `faultless profiles`.
///
/// # Errors
/// No bundled profile has the name.
pub fn run_old(args: &ProfilesArgs) -> Result<(), CliError> {
    args.name.as_deref().map_or_else(list::run, show::run)
}
