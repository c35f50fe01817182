//! The command line.

use crate::settings::Assignment;
use clap::{Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

/// What each memory mechanism would do for your program: page faults without a lock, late
/// reverse-map roots, against the locking of Linux.
#[derive(Debug, Parser)]
#[command(
    name = "faultless",
    version,
    after_help = "\
Examples:
  faultless compare                              the main job, about a minute on two cores
  faultless stat pft threads=2                   one workload, as perf stat prints
  faultless record -o app.fltrace -- ./app       what a program of yours does to memory
  faultless replay app.fltrace --policies        what would change for it"
)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Every workload and recording under every locking policy, side by side
    Compare(CompareArgs),
    /// Run one workload and print its counters as `perf stat` does
    Stat(StatArgs),
    /// Run what a recorded program did through the subsystem, thread by thread
    Replay(ReplayArgs),
    /// Record what a program does to its memory, with `perf record`
    Record(RecordArgs),
    /// List the workloads and their parameters
    Workloads,
    /// List the knobs that --set changes
    Knobs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Each workload runs under locking=mmap_lock (Linux up to 6.3), per_vma (Linux 6.4 to 6.14) and
speculative (no lock), and on this host's own Linux. Repetitions take turns, so that noise hits all
alike; the median is shown.

Examples:
  faultless compare --quick
  faultless compare --only pft --only small_allocs
  faultless compare --set locking=per_vma --set locking=speculative
  faultless compare --json results.jsonl")]
pub struct CompareArgs {
    /// A quarter of the time, and noisier
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    pub set: SetArgs,
    /// Threads of each workload [default: the host's CPUs, at most 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    #[command(flatten)]
    pub json: JsonArgs,
    /// Only these workloads or recordings
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
`faultless workloads` lists the workloads with their parameters.

Examples:
  faultless stat pft size=256M threads=2
  faultless stat page_fault1 seconds=2 --set locking=mmap_lock
  faultless stat ebizzy threads=4 --machine linux")]
pub struct StatArgs {
    /// The workload
    pub workload: String,
    /// Its parameters
    #[arg(value_name = "KEY=VALUE")]
    pub params: Vec<String>,
    #[command(flatten)]
    pub set: SetArgs,
    /// Where it runs
    #[arg(long, value_enum, default_value_t = MachineArg::Native)]
    pub machine: MachineArg,
    #[command(flatten)]
    pub json: JsonArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MachineArg {
    /// The subsystem, on threads with a software MMU and TLB each
    Native,
    /// The host's own kernel
    Linux,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
FILE is a perf.data file of `perf record` (see `faultless record`), a .fltrace file, or the name of
a recording that comes with faultless.

Examples:
  faultless replay python
  faultless replay perf.data --set locking=per_vma
  faultless replay app.fltrace --policies --json app.jsonl")]
pub struct ReplayArgs {
    /// The recording: a file, or the name of a shipped one
    #[arg(value_name = "FILE|NAME")]
    pub recording: PathBuf,
    #[command(flatten)]
    pub set: SetArgs,
    /// Compare the locking policies instead of running one
    #[arg(long)]
    pub policies: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Huge pages are off for the program while it is recorded, and fault-around too where that is
permitted, so that each first touch of a page is seen.

Examples:
  faultless record -- python3 -c 'print(sum(range(10**6)))'
  faultless record -o build.fltrace --compact -- make -j2
  faultless record --lesser -- ./app             without the permission for tracepoints")]
pub struct RecordArgs {
    /// Where to [default: perf.data, or recording.fltrace with --compact]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the small portable form (also chosen by a name ending in .fltrace)
    #[arg(long)]
    pub compact: bool,
    /// Accept a recording that leaves events out, where permission for all is missing
    #[arg(long)]
    pub lesser: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub program: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
pub struct SetArgs {
    /// Set a knob; repeatable (see `faultless knobs`)
    #[arg(long = "set", value_name = "KNOB=VALUE")]
    pub set: Vec<Assignment>,
}

#[derive(Debug, clap::Args)]
pub struct JsonArgs {
    /// Write results to FILE too, one JSON object a line; `-` is standard output, and sends the
    /// tables to standard error
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
