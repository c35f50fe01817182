//! `faultless run`: starts a program with advice in force, for this process alone.
//!
//! The command becomes the program (exec), so that process identifier, signals, terminal and exit
//! status are the program's own. With `--report` the command is the parent of the program.

mod pipe;
mod print;
mod report;

use crate::error::CliError;
use crate::record::not_found;
use crate::report::say;
use clap::ArgGroup;
use faultless_analysis::advise::effect::{Effect, separator};
use faultless_analysis::advise::file::{Advice, decode};
use faultless_analysis::advise::item::Apply;
use faultless_analysis::advise::library;
use faultless_analysis::advise::named::{Named, names};
use faultless_analysis::advise::preload::REPORT;
use faultless_analysis::advise::program::Program;
use faultless_trace::record::find_program;
use print::Form;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitCode};

/// The examples at the end of the help.
const EXAMPLES: &str = "\
Examples:
  faultless run --apply no-thp -- ./app
  faultless run --apply malloc-arenas=2,populate=1M -- ./app
  faultless run --advice app.toml -- ./app --its-option
  faultless run --apply huge-text --report -- ./app
  faultless run --advice app.toml --print env > app.sh";

#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("given").args(["apply", "advice"]).required(true).multiple(true))]
#[command(override_usage = "\
faultless run [OPTIONS] <--apply ADVICE,...|--advice FILE> -- <CMD>...
       faultless run [OPTIONS] <--apply ADVICE,...|--advice FILE> --print <FORM>")]
#[command(after_help = help())]
pub struct RunArgs {
    /// Apply these settings, named as in the list below; repeatable
    #[arg(long, value_name = "ADVICE", value_delimiter = ',')]
    pub apply: Vec<Named>,
    /// Apply the advice in FILE, written by `faultless advise --save FILE`
    #[arg(long, value_name = "FILE")]
    pub advice: Option<PathBuf>,
    /// Print the advice as a systemd drop-in, as options of `docker run`, or as commands of a
    /// shell. Starts no program
    #[arg(long, value_name = "FORM", value_enum)]
    pub print: Option<Form>,
    /// Keep the preloaded library in FILE, not in the user's cache directory. Services and
    /// containers need a file that they can read
    #[arg(long, value_name = "FILE")]
    pub library: Option<PathBuf>,
    /// Wait for the end of the program, and print the operations of the preloaded library in each
    /// process on standard error. SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2,
    /// SIGWINCH and SIGCONT are forwarded to the program
    #[arg(long, conflicts_with = "print")]
    pub report: bool,
    /// Write the counts of --report to FILE, one JSON object per line
    #[arg(long, value_name = "FILE", conflicts_with = "print")]
    pub json: Option<PathBuf>,
    /// Run this program, with its arguments
    #[arg(last = true, value_name = "CMD", required_unless_present = "print")]
    pub program: Vec<OsString>,
}

/// Returns the list of names, and the examples.
fn help() -> String {
    let mut text = String::from("Names for --apply, with the default in brackets:\n");
    for (form, meaning) in names() {
        let _ = writeln!(text, "  {form:<22} {meaning}");
    }
    text + "\n" + EXAMPLES
}

/// A setting with the name by which the user knows it.
#[derive(Debug)]
struct Given {
    name: String,
    apply: Apply,
}

/// Applies the advice, and becomes the program. Returns only after `--print`, `--report` or a
/// failure.
pub fn run(args: &RunArgs) -> Result<ExitCode, CliError> {
    let given = given(args)?;
    let effect = Effect::of(given.iter().map(|one| (&*one.name, &one.apply)))?;
    let program = args.program.first().map(OsString::as_os_str);
    // A missing program is reported before anything is written or printed. With `--print` the
    // program can be in a container.
    if let Some(program) = program.filter(|_| args.print.is_none()) {
        find_program(program).map_err(|error| not_found(program, error))?;
    }
    if let Some(program) = program {
        let mut kind = Program::named(program);
        if given.iter().any(|given| Program::depends_on_libraries(&given.apply)) {
            kind.add_libraries(program);
        }
        if args.print.is_none() {
            without_library(program, &kind, &given)?;
        }
        warn(program, &kind, &given);
    }
    let library = effect.preload.any().then(|| placed(args.library.as_deref())).transpose()?;
    if let Some(form) = args.print {
        print::print(form, &effect, &given, library.as_deref(), &args.program)?;
        return Ok(ExitCode::SUCCESS);
    }
    print_system(&effect);
    let Some((name, words)) = args.program.split_first() else {
        return Err(CliError::Usage("no program: add -- and the program".into()));
    };
    let mut command = Command::new(name);
    effect.put(command.args(words), library.as_deref());
    pipe::restore(&mut command);
    if args.report || args.json.is_some() {
        if effect.preload.any() {
            return report::run(&mut command, name, &effect.preload, args.json.as_deref());
        }
        say!("faultless: no report: the advice does not use the preloaded library");
    }
    if effect.preload.any() {
        // The library prints refused operations before the program starts, and at its end.
        command.env(REPORT, process::id().to_string());
    }
    Err(not_found(name, command.exec()))
}

/// Returns the advice of all options.
fn given(args: &RunArgs) -> Result<Vec<Given>, CliError> {
    let named = args.apply.iter();
    let mut all: Vec<_> = named
        .map(|named| Given { name: named.text().to_owned(), apply: named.apply().clone() })
        .collect();
    if let Some(file) = &args.advice {
        let place = file.display();
        let text = fs::read_to_string(file).map_err(|error| {
            let why = "`faultless advise --save FILE` writes such a file";
            CliError::Usage(format!("--advice {place}: {error}; {why}"))
        })?;
        let advice = decode(file, &text)?;
        if advice.is_empty() {
            say!("faultless: {place} contains no advice");
        }
        let of = |Advice { name, apply, .. }| Given { name: format!("{name} ({place})"), apply };
        all.extend(advice.into_iter().map(of));
    }
    Ok(all)
}

/// Checks that the library can be preloaded into `program`, if a setting needs the library.
///
/// # Errors
/// The library cannot be preloaded. The error names the advice that applies without the library.
fn without_library(program: &OsStr, kind: &Program, given: &[Given]) -> Result<(), CliError> {
    let names =
        |all: Vec<&Given>| all.into_iter().map(|given| &*given.name).collect::<Vec<_>>().join(", ");
    let (with, without): (Vec<_>, Vec<_>) =
        given.iter().partition(|given| given.apply.needs_library());
    let Some(why) = kind.not_preloaded().filter(|_| !with.is_empty()) else { return Ok(()) };
    let rest: Vec<_> =
        without.into_iter().filter(|given| kind.obstacle(&given.apply).is_none()).collect();
    let rest = if rest.is_empty() {
        "the given advice has no part that applies without the library".to_owned()
    } else {
        format!("this advice applies without the library: {}", names(rest))
    };
    Err(CliError::Usage(format!(
        "{} cannot be applied to {}: {why}; {rest}",
        names(with),
        program.display()
    )))
}

/// Prints a warning for each advice without an effect on `program`, and for each variable of the
/// user that is replaced.
fn warn(program: &OsStr, kind: &Program, given: &[Given]) {
    for Given { name, apply } in given {
        if let Some(why) = kind.obstacle(apply) {
            say!("faultless: warning: {name} on {}: {why}", program.display());
        }
        let Apply::Environment(variables) = apply else { continue };
        for (variable, value) in variables {
            let before = std::env::var_os(variable).filter(|before| before != OsStr::new(value));
            if let Some(before) = before.filter(|_| separator(variable).is_none()) {
                say!(
                    "faultless: warning: {name} replaces {variable}={} of the environment",
                    before.display()
                );
            }
        }
    }
}

/// Writes the preloaded library, and returns its path.
fn placed(place: Option<&Path>) -> Result<PathBuf, CliError> {
    match place {
        Some(file) => library::at(file).map_err(|error| match CliError::from(error) {
            CliError::Usage(why) => CliError::Usage(format!("--library {why}")),
            CliError::Failed(why) => CliError::Failed(format!("--library {why}")),
            CliError::Closed => CliError::Closed,
        }),
        None => Ok(library::cached()?),
    }
}

/// Prints the commands for settings of the whole system.
fn print_system(effect: &Effect) {
    if effect.system.is_empty() {
        return;
    }
    say!("faultless: settings of the whole system are not changed; root can apply them:");
    for (file, value) in &effect.system {
        say!("  {}", print::echo(file, value));
    }
}
