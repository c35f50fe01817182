//! `faultless-oracle`: many random cases, or cases from files.

use clap::Parser;
use faultless_oracle::differences::DIFFERENCES;
use faultless_oracle::shrink::shrink;
use faultless_oracle::{Agreement, Case, Failure, Generator, Oracle};
use indicatif::{ProgressBar, ProgressStyle};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Compares the subsystem with this machine's Linux, call by call.
#[derive(Debug, Parser)]
#[command(name = "faultless-oracle")]
struct Args {
    /// The minimum number of operations to try
    #[arg(long, default_value_t = 1_000_000)]
    operations: u64,
    /// The first seed; the same seed tries the same operations
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The most operations of a case
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u16).range(4..=1000))]
    longest: u16,
    /// The folder for failed cases
    #[arg(long, default_value = ".")]
    out: PathBuf,
    /// The number of failed cases after which to stop
    #[arg(long, default_value_t = 1)]
    failures: u32,
    /// Cases to run instead of random ones
    files: Vec<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let ran = if args.files.is_empty() { random(&args) } else { replay(&args.files) };
    match ran {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("faultless-oracle: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the cases of files. Returns whether all passed.
fn replay(files: &[PathBuf]) -> Result<bool, Box<dyn Error>> {
    let mut oracle = Oracle::new()?;
    let mut passed = true;
    for file in files {
        let named = |error: &dyn Error| format!("{}: {error}", file.display());
        let text = std::fs::read_to_string(file).map_err(|error| named(&error))?;
        let case: Case = text.parse().map_err(|error| named(&error))?;
        match oracle.run(&case)? {
            Ok(agreement) => {
                let Agreement { compared, known } = agreement;
                let known = known.iter().sum::<usize>();
                println!("{}: {compared} equal steps, {known} known differences", file.display());
            }
            Err(failure) => {
                passed = false;
                print!("{}: {failure}", file.display());
            }
        }
    }
    Ok(passed)
}

/// Runs random cases. Returns whether all passed.
fn random(args: &Args) -> Result<bool, Box<dyn Error>> {
    let mut oracle = Oracle::new()?;
    let style = "{bar:30} {pos}/{len} operations, {per_sec}, {eta} left";
    let bar = ProgressBar::new(args.operations).with_style(ProgressStyle::with_template(style)?);
    let mut known = [0; DIFFERENCES.len()];
    let (mut failed, mut seed) = (0, args.seed);
    while bar.position() < args.operations && failed < args.failures {
        let case = Generator::new(seed).case(args.longest.into());
        match oracle.run(&case)? {
            Ok(agreement) => {
                for (sum, count) in known.iter_mut().zip(agreement.known) {
                    *sum += count;
                }
            }
            Err(first) => {
                failed += 1;
                let text = bar.suspend(|| report(&mut oracle, (&case, &first), seed, &args.out))?;
                bar.suspend(|| println!("{text}"));
            }
        }
        bar.inc(case.ops.len() as u64);
        seed += 1;
    }
    let done = bar.position();
    bar.finish_and_clear();
    println!("{done} operations in {} cases, {failed} failed", seed - args.seed);
    for (difference, count) in DIFFERENCES.iter().zip(known) {
        println!("{count:8}  {}: {}", difference.name, difference.reason);
    }
    Ok(failed == 0)
}

/// Writes a failed case to a file, shrinks the case, and writes the result to another file. Returns
/// the message.
///
/// The whole case is written first: an intermittent failure may disappear after any change of the
/// case.
fn report(
    oracle: &mut Oracle,
    (case, first): (&Case, &Failure),
    seed: u64,
    out: &Path,
) -> Result<String, Box<dyn Error>> {
    let first = first.to_string();
    let whole = keep(out, seed, "whole.case", &with_reason(case, &first))?;
    eprintln!("seed {seed} fails: {}", whole.display());
    let mut fails = |case: &Case| matches!(oracle.run(case), Ok(Err(_)));
    let again = (0..RUNS_AGAIN).filter(|_| fails(case)).count();
    let least = shrink(case, fails);
    let (why, now) = match oracle.run(&least)? {
        Err(failure) => (failure.to_string(), ""),
        Ok(_) => (first, "The case passes now; the first failure:\n"),
    };
    let file = keep(out, seed, "case", &with_reason(&least, &why))?;
    Ok(format!(
        "seed {seed} fails, in {again} of {RUNS_AGAIN} repetitions; the smallest case, in {}:\n{least}{now}{why}",
        file.display()
    ))
}

/// The number of repetitions of a failed case, to measure the failure rate.
const RUNS_AGAIN: u32 = 20;

/// Returns the text of a case, below the observed failure.
fn with_reason(case: &Case, why: &str) -> String {
    let why: String = why.lines().map(|line| format!("# {line}\n")).collect();
    format!("{why}{case}")
}

fn keep(out: &Path, seed: u64, kind: &str, text: &str) -> Result<PathBuf, String> {
    let file = out.join(format!("seed-{seed}.{kind}"));
    std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(file)
}
