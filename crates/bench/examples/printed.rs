//! `printed FILE`: checks whether `faultless compare` prints the currently counted instructions,
//! and whether `faultless calibrate` uses them. FILE is written by
//! `bench instructions --json FILE`.
//!
//! This is a separate program, because more code in `bench` would be compiled together with the
//! subsystem, and change the counts.

#[path = "../../analysis/src/calibrate/counted.rs"]
mod counted;

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
    let mut expected = Vec::new();
    for (fault, policies) in printed {
        for (policy, printed) in policies {
            expected.push((fault.clone(), format!("locking={policy}"), printed));
        }
    }
    for (order, printed) in counted::SEQUENTIAL {
        let setting = format!("prefault_max_order={order}");
        expected.push(("sequential_write_per_page".to_owned(), setting, printed));
    }
    let (mut all, mut out) = (true, std::io::stdout().lock());
    for (workload, setting, printed) in expected {
        let is = |line: &&Value| {
            line["metric"] == "instructions_besides_filling"
                && line["workload"] == workload
                && line["setting"] == setting
        };
        let counted = lines.iter().find(is).and_then(|line| line["value"].as_f64());
        let counted = counted.ok_or_else(|| format!("{file} has no {workload} with {setting}"))?;
        let met = (counted - printed).abs() <= CURRENT * printed;
        let verdict = if met { "met    " } else { "NOT MET" };
        // The exit code holds the result if the reader has closed the output.
        let _ = writeln!(
            out,
            "{verdict} {workload}, {setting}: printed as {printed:.2} instructions: {counted:.2}"
        );
        all &= met;
    }
    Ok(all)
}
