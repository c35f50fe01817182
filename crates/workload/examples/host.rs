//! Every workload with its defaults on the host's kernel, one and two workers.
//!
//! `cargo run --release -p faultless-workload --example host [WORKLOAD [NAME=VALUE]...]`
use faultless_workload::{Linux, PFT_HEADER, Workload, all};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let only = arguments.next();
    let arguments: Vec<_> = arguments.collect();
    let names = all().iter().map(|info| info.name);
    let names: Vec<_> = match &only {
        Some(only) => vec![only.as_str()],
        None => names.collect(),
    };
    for name in names {
        for threads in ["threads=1", "threads=2"] {
            let arguments = std::iter::once(threads).chain(arguments.iter().map(String::as_str));
            let outcome = Workload::parse(name, arguments)?.run(&Linux::new())?;
            println!(
                "{name:17} {threads} {:11.0} {}/s {:9.0} faults/s  wall {:.3} user {:.3} system {:.3}",
                outcome.operations_per_second(),
                outcome.unit,
                outcome.faults_per_second(),
                outcome.wall,
                outcome.user,
                outcome.system,
            );
            if let Some(row) = outcome.pft_row() {
                println!("{PFT_HEADER}\n{row}");
            }
        }
    }
    Ok(())
}
