//! `printed FILE`: checks whether `faultless compare` prints the currently counted instructions.
//! FILE is written by `bench instructions --json FILE`.
//!
//! This is a separate program, because more code in `bench` would be compiled together with the
//! subsystem, and change the counts.

use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

/// The largest accepted relative difference of a printed figure from the count.
const CURRENT: f64 = 0.02;

fn main() -> ExitCode {
    let Some(file) = std::env::args().nth(1) else {
        eprintln!("usage: printed FILE, which `bench instructions --json FILE` writes");
        return ExitCode::from(2);
    };
    match judge(&file) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("printed: {error}");
            ExitCode::from(2)
        }
    }
}

/// Compares the figures, and returns whether all are current.
fn judge(file: &str) -> Result<bool, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    let lines: Result<Vec<Value>, _> = text.lines().map(serde_json::from_str).collect();
    let lines = lines.map_err(|error| format!("{file}: {error}"))?;
    let printed: BTreeMap<String, BTreeMap<String, f64>> =
        toml::from_str(include_str!("../../analysis/faults.toml"))
            .map_err(|error| format!("faults.toml: {error}"))?;
    let (mut all, mut out) = (true, std::io::stdout().lock());
    for (fault, policies) in printed {
        for (policy, printed) in policies {
            let setting = format!("locking={policy}");
            let is = |line: &&Value| {
                line["metric"] == "instructions_besides_filling"
                    && line["workload"] == fault
                    && line["setting"] == setting
            };
            let counted = lines.iter().find(is).and_then(|line| line["value"].as_f64());
            let counted = counted.ok_or_else(|| format!("{file} has no {fault} under {policy}"))?;
            let met = (counted - printed).abs() <= CURRENT * printed;
            let verdict = if met { "met    " } else { "NOT MET" };
            // The exit code holds the result if the reader has closed the output.
            let _ = writeln!(
                out,
                "{verdict} {fault}, {policy}: printed as {printed:.2} instructions: {counted:.2}"
            );
            all &= met;
        }
    }
    Ok(all)
}
