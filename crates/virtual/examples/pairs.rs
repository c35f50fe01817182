//! Pairs of operations on many simulated CPUs in one address space. Each seed has another schedule.
//! Each pair is checked against the sequential orders of its operations, followed by the audit.
//!
//! `cargo run --release -p faultless-virtual --example pairs [-- SEEDS] [--seed NUMBER] [--cpus NUMBER] [--cases NUMBER] [--policy speculative|per_vma|mmap_lock|all] [--case NUMBER]`:
//! 100 seeds of 64 CPUs under all policies. `SEEDS` is the number of seeds, and `--seed` a single
//! seed, as named by a failure. With the failure's `--case`, the CPU that led this case leads no
//! other.

// The checks are written for the subsystem; here they use the virtual machine's copy.
extern crate faultless_observed as faultless;

#[path = "../tests/crowd/mod.rs"]
mod crowd;

use crowd::{Crowd, Ran};
use faultless_virtual::Profile;
use std::io::{IsTerminal, Write};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

/// The number of failures of a seed shown in full.
const SHOWN: usize = 2;

struct Arguments {
    seeds: Range<u64>,
    cpus: usize,
    cases: u64,
    policies: Vec<String>,
    case: Option<u64>,
}

fn arguments() -> Result<Arguments, String> {
    let policies = ["speculative", "per_vma", "mmap_lock"].map(str::to_owned);
    let mut all =
        Arguments { seeds: 1..101, cpus: 64, cases: 2, policies: policies.into(), case: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let number = |text: &str| text.parse::<u64>().map_err(|_| format!("{text}: not a number"));
        if let Ok(seeds) = number(&name) {
            all.seeds = 1..seeds + 1;
            continue;
        }
        let value = arguments.next().ok_or_else(|| format!("{name} requires a value"))?;
        match name.as_str() {
            "--seed" => {
                let seed = number(&value)?;
                all.seeds = seed..seed + 1;
            }
            "--cpus" => all.cpus = number(&value)? as usize,
            "--cases" => all.cases = number(&value)?,
            "--case" => all.case = Some(number(&value)?),
            "--policy" if value == "all" => {}
            "--policy" if all.policies.contains(&value) => all.policies = vec![value],
            _ => return Err(format!("{name} {value}: unknown option")),
        }
    }
    match all.cpus {
        cpus if cpus % 2 == 0 && (2..1024).contains(&cpus) => Ok(all),
        cpus => Err(format!("--cpus {cpus}: an even number, below 1024")),
    }
}

/// Runs one seed. Returns `None` after a panic, which was printed.
fn run(crowd: &Crowd<'_>, done: u64) -> Option<Ran> {
    let watched = std::io::stderr().is_terminal();
    let progress = |rounds| {
        if watched {
            eprint!("\r{}, seed {}: {} rounds   ", crowd.locking, crowd.seed, done + rounds);
            let _ = std::io::stderr().flush();
        }
    };
    catch_unwind(AssertUnwindSafe(|| crowd.run(progress))).ok()
}

fn main() -> ExitCode {
    let Arguments { seeds, cpus, cases, policies, case } = match arguments() {
        Ok(arguments) => arguments,
        Err(wrong) => {
            eprintln!("{wrong}");
            return ExitCode::from(2);
        }
    };
    let profile = Profile::bundled("two-socket").expect("a bundled profile");
    let mut code = ExitCode::SUCCESS;
    for locking in &policies {
        let (start, mut rounds, mut bad) = (Instant::now(), 0, 0);
        for seed in seeds.clone() {
            let crowd = Crowd { profile: &profile, cpus, seed, locking, cases, only: case };
            let ran = run(&crowd, rounds);
            rounds += ran.as_ref().map_or(0, |ran| ran.rounds);
            let wrong = ran.map_or_else(|| vec!["a panic".to_owned()], |ran| ran.bad);
            bad += u64::from(!wrong.is_empty());
            for wrong in wrong.iter().take(SHOWN) {
                // The exit code holds the result if the reader has closed the output.
                let _ = writeln!(
                    std::io::stdout(),
                    "\n--policy {locking} --cpus {cpus} --cases {cases} --seed {seed} {wrong}"
                );
                code = ExitCode::FAILURE;
            }
        }
        if std::io::stderr().is_terminal() {
            eprintln!();
        }
        let _ = writeln!(
            std::io::stdout(),
            "{locking}: {} seeds of {cpus} CPUs, {rounds} pairs, {bad} bad seeds, {:.0} s",
            seeds.end - seeds.start,
            start.elapsed().as_secs_f64()
        );
    }
    code
}
