//! The `faultless` command: the effect of each memory mechanism on a program.
//!
//! Measurements and predictions are in the library [`faultless_analysis`]. The command reads
//! arguments, and prints results.
//!
//! - [`args`]: the commands;
//! - [`compare`], [`stat`], [`text`], [`replay`], [`record`], [`advise`], [`run`], [`boot`],
//!   [`versus`], [`scale`], [`calibrate`], [`profile`], [`list`]: the commands, each with its
//!   arguments;
//! - [`generate`]: manual pages, and completions for shells;
//! - [`html`]: a page with plots;
//! - [`report`]: tables, bars, the form of `perf stat`, JSON lines, progress;
//! - [`set`]: the option `--set`;
//! - [`interrupt`]: Ctrl-C makes a command print its results so far;
//! - [`output`]: result files, which must not overwrite input files.

mod advise;
mod args;
#[cfg(feature = "machine")]
mod boot;
mod calibrate;
mod compare;
mod error;
mod export;
mod generate;
mod html;
mod interrupt;
mod list;
mod number;
mod output;
mod profile;
mod record;
mod replay;
mod report;
mod run;
mod scale;
mod set;
mod stat;
mod text;
#[cfg(feature = "machine")]
mod versus;

use args::{Args, Command};
use clap::Parser;
use error::CliError;
use report::say;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = Args::try_parse().unwrap_or_else(|error| {
        let words: Vec<_> = std::env::args_os().collect();
        if let Some(why) = record::without_dashes(&error, &words) {
            say!("faultless: {why}\n");
        }
        error.exit()
    });
    // Signals sent to `record` are forwarded to the program, and so are signals sent to `advise`
    // while it records. `run` becomes the program.
    if !matches!(args.command, Command::Record(_) | Command::Advise(_) | Command::Run(_)) {
        interrupt::install();
    }
    match command(args.command) {
        done if interrupt::requested() => {
            if let Err(error) = done {
                say!("faultless: {error}");
            }
            u8::try_from(interrupt::status()).map_or(ExitCode::FAILURE, ExitCode::from)
        }
        Ok(code) => code,
        Err(error) => {
            if !matches!(error, CliError::Closed) {
                say!("faultless: {error}");
            }
            ExitCode::from(error.code())
        }
    }
}

/// Runs the command. `boot`, `record`, `advise` and `run` return the exit status of their program.
fn command(command: Command) -> Result<ExitCode, CliError> {
    match command {
        Command::Compare(args) => compare::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Text(args) => text::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Record(args) => return record::run(&args),
        Command::Advise(args) => return advise::run(&args),
        Command::Run(args) => return run::run(&args),
        #[cfg(feature = "machine")]
        Command::Boot(args) => return boot::run(&args),
        #[cfg(feature = "machine")]
        Command::Versus(args) => versus::run(&args),
        Command::Scale(args) => scale::run(&args),
        Command::Calibrate(args) => calibrate::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Workloads => list::workloads(),
        Command::Profile(args) => profile::run(&args),
        Command::Profiles(args) => profile::run_old(&args),
        Command::Knobs => list::knobs(),
        Command::Counters => list::counters(),
    }?;
    Ok(ExitCode::SUCCESS)
}
