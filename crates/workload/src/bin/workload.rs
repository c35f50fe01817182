//! `workload NAME [PARAMETER=VALUE…]`: runs one workload on the kernel of this process and prints
//! the results, one figure per line: `NAME VALUE`. Built as a static program it runs on any kernel
//! with Linux's calls.

use faultless_workload::{Linux, Outcome, PFT_HEADER, Workload, all};
use std::process::ExitCode;

/// Returns the text printed without the name of a workload.
fn usage() -> String {
    let mut text = String::from("usage: workload NAME [PARAMETER=VALUE…]\n");
    for info in all() {
        text += &format!("\n{}: {}\n", info.name, info.summary);
        for param in info.params() {
            let default = param.kind.show(param.default);
            text += &format!("  {}={default}  {}: {}\n", param.name, param.help, param.kind);
        }
    }
    text
}

fn run(name: &str, arguments: &[String]) -> Result<Outcome, String> {
    let workload = Workload::parse(name, arguments).map_err(|error| error.to_string())?;
    workload.run(&Linux::new()).map_err(|failure| format!("{name}: {failure}"))
}

fn print(outcome: &Outcome) {
    println!("workload {}", outcome.workload);
    println!("machine {}", outcome.machine);
    println!("mode {}", outcome.mode.name());
    println!("workers {}", outcome.threads);
    println!("operations {} {}", outcome.operations, outcome.unit);
    println!("operations_per_second {:.0}", outcome.operations_per_second());
    println!("faults {}", outcome.faults);
    println!("faults_per_second {:.0}", outcome.faults_per_second());
    println!("wall_seconds {:.6}", outcome.wall);
    println!("user_seconds {:.6}", outcome.user);
    println!("system_seconds {:.6}", outcome.system);
    for (name, value) in &outcome.extras {
        println!("{name} {value}");
    }
    for (name, value) in &outcome.counters {
        println!("{name} {value}");
    }
    if let Some(row) = outcome.pft_row() {
        println!("{PFT_HEADER}\n{row}");
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, rest)) = arguments.split_first() else {
        eprint!("{}", usage());
        return ExitCode::FAILURE;
    };
    match run(name, rest) {
        Ok(outcome) => {
            print(&outcome);
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("workload: {why}");
            ExitCode::FAILURE
        }
    }
}
