//! Storms of calls and accesses on many simulated CPUs, each under another schedule, with checks of
//! all results, and the audit.
//!
//! `cargo run --release -p faultless-virtual --example storm [-- SEEDS [CPUS [POLICY]]]`:
//! 100 seeds of 64 CPUs, `speculative`. Seeds as `FIRST..END`.

#[path = "../../trace/examples/output/mod.rs"]
mod output;
#[path = "../tests/storm/mod.rs"]
mod storm;

use faultless_virtual::Profile;
use std::error::Error;
use std::io::Write;
use std::ops::Range;
use std::process::ExitCode;
use storm::Storm;

fn seeds(text: &str) -> Result<Range<u64>, Box<dyn Error>> {
    let (first, end) = text.split_once("..").unwrap_or(("1", text));
    let end: u64 = end.parse().map_err(|error| format!("seeds {text}: {error}"))?;
    let first = first.parse().map_err(|error| format!("seeds {text}: {error}"))?;
    // The number of seeds, or a range.
    Ok(first..if text.contains("..") { end } else { end + 1 })
}

fn main() -> ExitCode {
    output::run(|out| storms(out))
}

fn storms(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seeds = seeds(arguments.first().map_or("100", String::as_str))?;
    let cpus = arguments.get(1).map_or("64", String::as_str);
    let cpus = cpus.parse().map_err(|error| format!("CPUS {cpus}: {error}"))?;
    let policy = arguments.get(2).map_or("speculative", String::as_str);
    let profile = Profile::bundled("two-socket")?;
    for seed in seeds {
        let (took, _) =
            Storm { profile: &profile, cpus, seed, steps: 60 }.run(&[&format!("locking={policy}")]);
        let took = took as f64 / 1e9;
        writeln!(out, "seed {seed}: {cpus} CPUs, {took:.1} ms simulated, no failure")?;
    }
    Ok(())
}
