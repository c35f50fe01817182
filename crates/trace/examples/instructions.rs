//! Evaluates the faulting instruction as a context of prefault: `instructions [ORDER]`.
//!
//! Prints the faults saved and the unused pages on the bundled recordings, with and without
//! instructions, for some thresholds.

mod output;

use faultless_trace::anticipate::{self, Outcome, instruction};
use faultless_trace::recordings;
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    output::run(|out| instructions(out))
}

fn instructions(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let order = std::env::args().nth(1).unwrap_or_else(|| "5".to_owned());
    let order = order.parse().map_err(|error| format!("ORDER {order}: {error}"))?;
    let mut traces = Vec::new();
    for recording in recordings::all() {
        traces.push((recording.name, recording.trace()?));
    }
    let names: Vec<_> = traces.iter().map(|(name, _)| *name).collect();
    writeln!(
        out,
        "Saved / unused, in percent.\n| context, threshold | {} | mean / all |",
        names.join(" | ")
    )?;
    writeln!(out, "|---|{}", "---|".repeat(names.len() + 1))?;
    let mut row = |name: String, outcomes: Vec<Outcome>| {
        let of = |saved, unused| format!("{:.1} / {:.1}", 100.0 * saved, 100.0 * unused);
        let cells: Vec<_> = outcomes.iter().map(|got| of(got.avoided(), got.waste())).collect();
        let mean = outcomes.iter().map(Outcome::avoided).sum::<f64>() / outcomes.len() as f64;
        let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum::<u64>() as f64;
        let all = of(mean, sum(|got| got.wasted) / sum(|got| got.ahead).max(1.0));
        writeln!(out, "| {name} | {} | {all} |", cells.join(" | "))
    };
    let mut outcomes = Vec::new();
    for (_, trace) in &traces {
        outcomes.push(anticipate::predicted::<faultless::prefault::Streams>(trace, order)?);
    }
    row("the subsystem's predictor".into(), outcomes)?;
    for (what, instructions) in [("run, thread", false), ("and instruction", true)] {
        for threshold in [0.75, 0.8, 0.85, 0.9, 0.95] {
            let mut outcomes = Vec::new();
            for (_, trace) in &traces {
                outcomes.push(instruction::predicted(trace, order, threshold, instructions)?);
            }
            row(format!("{what}, {threshold}"), outcomes)?;
        }
    }
    Ok(())
}
