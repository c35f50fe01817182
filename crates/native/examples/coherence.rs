//! Loads and stores on a machine that checks each access against the tables and the owners of
//! frames, while threads concurrently map, unmap, protect, move, advise and fork the same memory.
//!
//! `cargo run --release -p faultless-native --example coherence -- --accesses 1000000000`

#[path = "../tests/common/coherence.rs"]
mod coherence;

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "coherence [--accesses NUMBER] [--cpus NUMBER]";

fn main() -> ExitCode {
    let (mut accesses, mut cpus) = (1_000_000_000, 4);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().and_then(|value| value.replace('_', "").parse().ok());
        match (name.as_str(), value) {
            ("--accesses", Some(number)) => accesses = number,
            ("--cpus", Some(number @ 1..=64)) => cpus = number as usize,
            _ => {
                eprintln!(
                    "{name}: an unknown option, or not a valid number (1 to 64 CPUs)\n{USAGE}"
                );
                return ExitCode::from(2);
            }
        }
    }
    let start = Instant::now();
    let done = coherence::run(cpus, accesses, |done| {
        let part = done.accesses as f64 / accesses as f64;
        let seconds = start.elapsed().as_secs_f64();
        let left = seconds / part.max(1e-9) - seconds;
        eprint!("\r{:5.1} %, {seconds:.0} s, {:.0} s left: {done}   ", part * 100.0, left.max(0.0));
        let _ = std::io::stderr().flush();
    });
    eprintln!();
    let seconds = start.elapsed().as_secs_f64();
    // The exit code holds the result if the reader has closed the output.
    let _ = writeln!(std::io::stdout(), "{done} on {cpus} CPUs in {seconds:.0} s");
    if done.violations == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
