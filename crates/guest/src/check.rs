//! Named checks, each in its own process.
//!
//! If a signal ends a check, or the check ends its process, only this check fails, and not the
//! whole program. A passing check prints `ok NAME`, and a failing check prints `FAIL NAME: why`.

use crate::args::Args;
use crate::proc::{Status, fork};
use std::io::Write;

/// The result of a check, with the reason for a failure.
pub type Verdict = Result<(), String>;

/// A check: its name and its function.
pub type Check = (&'static str, fn() -> Verdict);

/// Fails the check with a message unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

/// Fails the check with a message if two values differ.
#[macro_export]
macro_rules! same {
    ($found:expr, $expected:expr, $($message:tt)+) => {{
        let (found, expected) = (&$found, &$expected);
        if found != expected {
            return Err(format!("{}: {found:?}, expected {expected:?}", format!($($message)+)));
        }
    }};
}

/// The exit status of a check's process after an ordinary failure.
const FAILED: i32 = 99;

/// Runs the checks selected by the words of `args`, or all checks, and returns the program's exit
/// status. With the word `here` the checks run in this process.
pub fn run(args: &Args, checks: &[Check]) -> i32 {
    let words: Vec<&str> =
        args.words().iter().map(String::as_str).filter(|word| *word != "here").collect();
    let here = args.words().len() > words.len();
    if let Some(word) = words.iter().find(|word| checks.iter().all(|(name, _)| name != *word)) {
        let names: Vec<_> = checks.iter().map(|(name, _)| *name).collect();
        args.refuse(&format!("unknown check {word:?}; the checks are: {}", names.join(", ")));
    }
    let mut failed = 0;
    for (name, check) in checks {
        if !words.is_empty() && !words.contains(name) {
            continue;
        }
        let passed = if here { report(name, check()) } else { apart(name, *check) };
        failed += i32::from(!passed);
    }
    i32::from(failed > 0)
}

/// Runs a check in its own process.
fn apart(name: &str, check: fn() -> Verdict) -> bool {
    let child = fork(|| if report(name, check()) { 0 } else { FAILED });
    match child.and_then(|child| child.wait()) {
        Ok(Status::Exited(0)) => true,
        Ok(Status::Exited(FAILED)) => false,
        Ok(Status::Exited(status)) => {
            report(name, Err(format!("the process exited with {status}")))
        }
        Ok(Status::Killed(signal)) => {
            report(name, Err(format!("the process was killed by signal {signal}")))
        }
        Err(errno) => {
            report(name, Err(format!("cannot run the check in a separate process: {errno}")))
        }
    }
}

fn report(name: &str, verdict: Verdict) -> bool {
    match &verdict {
        Ok(()) => println!("ok {name}"),
        Err(why) => println!("FAIL {name}: {why}"),
    }
    // The process may end without the runtime's clean-up.
    let _ = std::io::stdout().flush();
    verdict.is_ok()
}
