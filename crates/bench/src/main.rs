//! Runs the benches, prints their figures, and checks the promises.

use clap::{Args, Parser, Subcommand};
use faultless_bench::facts::facts;
use faultless_bench::report::Report;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Measures the subsystem's promises.
#[derive(Debug, Parser)]
#[command(
    name = "bench",
    after_help = "Examples:\n  \
        cargo run --profile measured -p faultless-bench -- all --check --quick\n  \
        cargo run --profile measured -p faultless-bench -- instructions --explain\n  \
        cargo test --profile measured -p faultless-bench --features observe"
)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Args)]
struct Options {
    /// Exit with status 1 if a promise is not met.
    #[arg(long, global = true)]
    check: bool,
    /// Measure less.
    #[arg(long, global = true)]
    quick: bool,
    /// Write the figures to FILE, one JSON object per line.
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the figures to FILE, after a line with a description of the host.
    #[arg(long, global = true, value_name = "FILE")]
    record: Option<PathBuf>,
}

#[derive(Clone, Debug, Subcommand)]
enum Bench {
    /// Count instructions per fault with callgrind.
    #[cfg(not(feature = "observe"))]
    Instructions {
        /// Print the distribution of the instructions of a workload.
        #[arg(long, value_name = "WORKLOAD", num_args = 0..=1,
              default_missing_value = "anonymous_write_fault")]
        explain: Option<String>,
    },
    /// Count shared cache lines written by faults and calls.
    #[cfg(feature = "observe")]
    Lines,
    /// Compare two threads with one.
    #[cfg(not(feature = "observe"))]
    Scaling,
    /// Compare threads in parts of one mapping: faults during discards, and two threads with one.
    #[cfg(not(feature = "observe"))]
    Beside,
    /// Measure the savings of prefault, and its cost for threads with random or sparse accesses.
    #[cfg(not(feature = "observe"))]
    Prefault,
    /// Measure the cost of zeroing a page, in the fault and in advance.
    #[cfg(not(feature = "observe"))]
    Zeroing,
    /// Measure the same work through `memory_set` behind a `RwLock`.
    #[cfg(not(feature = "observe"))]
    Peers,
    /// Run all benches with promises.
    #[cfg(not(feature = "observe"))]
    All,
    /// Run as the program under callgrind.
    #[cfg(not(feature = "observe"))]
    #[command(hide = true, name = faultless_bench::instructions::CHILD)]
    Counted,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let answer = run(cli.bench, &cli.options).and_then(|report| {
        finish(&report, &cli.options).map_err(|error| format!("writing results: {error}"))?;
        Ok(report.met())
    });
    match answer {
        Ok(met) if met || !cli.options.check => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::from(2)
        }
    }
}

#[cfg(feature = "observe")]
fn run(bench: Bench, _: &Options) -> Result<Report, String> {
    match bench {
        Bench::Lines => faultless_bench::lines::run(),
    }
}

#[cfg(not(feature = "observe"))]
fn run(bench: Bench, options: &Options) -> Result<Report, String> {
    use faultless_bench::{beside, instructions, peers, prefault, scaling, zeroing};
    let quick = options.quick;
    match bench {
        Bench::Instructions { explain } => instructions::run(quick, explain.as_deref()),
        Bench::Scaling => scaling::run(quick),
        Bench::Beside => beside::run(quick),
        Bench::Prefault => prefault::run(quick),
        Bench::Zeroing => zeroing::run(quick),
        Bench::Peers => peers::run(quick),
        Bench::All => {
            let mut report = instructions::run(quick, None)?;
            report.absorb(scaling::run(quick)?);
            report.absorb(beside::run(quick)?);
            report.absorb(prefault::run(quick)?);
            report.absorb(zeroing::run(quick)?);
            report.absorb(peers::run(quick)?);
            Ok(report)
        }
        Bench::Counted => {
            instructions::cases::all(quick).iter().try_for_each(instructions::cases::Case::run)?;
            Ok(Report::default())
        }
    }
}

fn finish(report: &Report, options: &Options) -> io::Result<()> {
    report.print(&mut io::stdout().lock())?;
    if let Some(path) = &options.json {
        report.write_json(&mut BufWriter::new(File::create(path)?))?;
    }
    if let Some(path) = &options.record {
        let mut file = BufWriter::new(File::create(path)?);
        writeln!(file, "{}", facts())?;
        report.write_json(&mut file)?;
    }
    Ok(())
}
