//! The command line.

use crate::compare::tiers;
use crate::scale::counts::Counts;
use crate::scale::subject;
use crate::settings::Assignment;
use crate::suggest;
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{ArgGroup, Parser, Subcommand, ValueEnum};
use faultless::Locking;
use faultless_boot::Nodes;
use faultless_workload::Kind;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// What each memory mechanism would do for your program: page faults without a lock, prefault,
/// pre-zeroed frames, late reverse-map anchors (anon_vma), against the locking of Linux.
#[derive(Debug, Parser)]
#[command(
    name = "faultless",
    version,
    after_help = "\
Examples:
  faultless compare                         the main job, about a minute
  faultless stat pft threads=2              one workload, as perf stat prints
  faultless record -o app.fltrace -- ./app  what a program of yours does
  faultless replay app.fltrace --policies   what would change for it
  faultless advise -- ./app                 what today's Linux can do for it
  faultless boot ./app                      a static program on the bare machine
  faultless versus                          what faults cost there, and on Linux
  faultless scale pft                       on 1 to 128 CPUs, simulated
  faultless calibrate --check               what this machine costs, predicted

Exit status: 0; 2 for wrong arguments and for an input file or a program that
is missing or of no use; 1 for whatever else failed; 128 and its number for a
signal. `record`, `advise` and `boot` end as their program does; `boot
--timeout` with 124."
)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

// The paragraphs of a command are filled to the width of the terminal; lines of examples are not, so these are short.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// What page faults without a lock, prefault and the other mechanisms change, on one screen
    ///
    /// First the machine and its noise, then four tables, each with a verdict: what one fault takes (instructions, and
    /// shared cache lines written), what workloads do on many simulated CPUs, what recorded programs take when their faults
    /// and calls are replayed on this machine, and what each mechanism changes, off and on. Policies are
    /// locking=mmap_lock (Linux up to 6.3), per_vma (Linux 6.4 to 6.14) and speculative (no lock), with prefault off
    /// (prefault_max_order=0). Repetitions take turns, so that noise hits all alike; the median is shown, and what the noise may
    /// explain is told as no difference.
    ///
    /// `xsbench` and `llm` are compared only where they are named, in tables of their own: shootdowns, flushes, TLB misses, run time, frames in use and
    /// latencies of allocations at several ratios of fast to slow memory, without deferred flushes and with them; `xsbench` also with stores in place of loads. Each runs with several seeds, whose
    /// means are compared. That takes tens of minutes; --quick has less memory, fewer CPUs and one seed.
    ///
    /// With --details each workload also runs on this machine under every policy, and on this host's own Linux; then workloads and
    /// recordings run with prefault: off, up to order 3, up to order 5, and up to order 5 on frames that were zeroed
    /// before the run. That takes about two minutes more.
    ///
    /// Of --set, locking=POLICY names a policy to compare, prefault_max_order=N an order; each may be there several
    /// times. zeroed_pool=N is how many frames are zeroed before. Other knobs hold for all.
    Compare(CompareArgs),
    /// Run one workload and print its counters as `perf stat` does
    ///
    /// `faultless workloads` lists the workloads with their parameters, `faultless counters` says what the counters
    /// count. The native machine is idle before the run: pools of zeroed frames (zeroed_pool) are as full then as they
    /// are to be.
    Stat(StatArgs),
    /// What it changes that a large program's code is mapped in pages of 2 MiB
    ///
    /// The workload `text` runs with huge_text=never and huge_text=always: page faults, misses of the (simulated) instruction
    /// TLB, page walks and the code in memory, and the frames that a second process shares, beside published figures.
    Text(TextArgs),
    /// Run what a recorded program did through the subsystem, or its addresses through TLBs
    ///
    /// FILE is a perf.data file of `perf record` (see `faultless record`), a .fltrace file, a trace of addresses, or the name of a
    /// bundled recording or trace. A recording runs thread by thread. A trace of addresses, as `valgrind --tool=lackey
    /// --trace-mem=yes` writes it, runs through simulated TLBs: what
    /// they miss, and what code in pages of 2 MiB would change. With prefault (prefault_max_order above 0) a recording is replayed twice more, in the order of the recording,
    /// to count the faults saved, the prefaulted pages, those of them that were not used, and the resident growth.
    Replay(ReplayArgs),
    /// Record what a program does to its memory, with `perf record`
    ///
    /// Huge pages are off for the program while it is recorded, and fault-around too where that is permitted, so that
    /// each first touch of a page is seen; what hides faults nevertheless is said before the program begins. SIGINT, SIGTERM, SIGHUP and
    /// SIGQUIT that are sent to `record` go on to the program. `record` ends as the program did: with its exit status, or 128 and the
    /// number of the signal that ended it; with 2 where there is no such program, or it cannot be executed.
    Record(RecordArgs),
    /// What a program's page faults cost here, and what today's Linux can do about it
    ///
    /// The program is recorded, as `record` does, and run once more without a recorder. What a fault costs on this host is measured,
    /// and the recording tells how many faults each setting would spare: larger folios (mTHP, THP), mappings that are populated,
    /// settings of glibc's malloc, of Go and of Java. The answer has the predicted saving of each in seconds of processor time, and the
    /// memory that would be resident and unused. A recording of an earlier run does instead of a program.
    ///
    /// With --try each of these is applied to runs of the program, each beside a run without it, and what is measured
    /// stands beside what was predicted. These runs read nothing, and their output is dropped. `advise` ends as the recorded run did.
    Advise(AdviseArgs),
    /// Run a static Linux program on the bare machine, in QEMU
    ///
    /// PROGRAM is a statically linked x86-64 program (cc -static; musl; Rust with -C target-feature=+crt-static), a
    /// dynamically linked one whose interpreter and libraries are in --files, or the name of a bundled one, such as `rows`
    /// or `workload`; a wrong name lists them. Its input, output and exit status pass through; the kernel's counters are
    /// printed at the end, on standard error, and whether KVM ran it or QEMU's emulation. It needs QEMU, and no KVM.
    Boot(BootArgs),
    /// What faults and calls cost on the bare machine and on Linux, in instructions
    ///
    /// The same program files run on the bare machine and on a stock Linux 6.12, in the same QEMU,
    /// on a clock that counts instructions: every figure repeats to the last digit, except rows of
    /// disks, which have the median of --runs boots and a range. A second column of Linux is booted
    /// with mitigations=off and cgroup_disable=memory, and a table lists the work that Linux does
    /// besides. Prefault is off (prefault_max_order=0); the rows of anonymous memory come again
    /// with prefault up to order 3 and 5 (or each prefault_max_order=N of --set), and on frames
    /// that the idle machine has zeroed. Linux is Debian's package, downloaded once into
    /// $XDG_CACHE_HOME/faultless and not installed. Takes two to eight minutes.
    Versus(VersusArgs),
    /// What a workload or a recording does on more and more CPUs, simulated
    ///
    /// Each run is on a virtual machine whose CPUs, caches and interrupts cost what --profile says: the subsystem itself runs,
    /// and each access to a line of another CPU takes its time. The same command prints the same figures, on any host. It
    /// prints throughput under each locking policy, line transfers, where the CPUs' time goes, and the places in the source
    /// where they wait for each other's lines. Prefault is off (prefault_max_order=0) unless --set gives an order.
    ///
    /// What each CPU does is the same at each number of CPUs, and little (some hundred pages or
    /// calls), so that all runs together take less than a minute; parameters of the workload change
    /// it. Large machines take longer: `pft` on 512 CPUs takes about 9 s of processor time and 1.3
    /// GiB of memory for each policy, on 1,024 CPUs 27 s and 2.5 GiB; the tables `ebizzy` and `vma`
    /// take 10 to 20 minutes.
    Scale(ScaleArgs),
    /// What this machine costs, as a profile for `scale`, and how well it predicts
    ///
    /// It measures with two threads what the hardware tells (frequency, cache lines, zeroing), and on the native machine what paths
    /// of the subsystem take, such as a fault or a pair of mmap and munmap; the profile's numbers are fitted to that. It also
    /// measures what a page fault costs under the host's own kernel, and prints which order of prefault pays there.
    ///
    /// With --check it predicts each workload with one thread and two, and the bundled recordings, beside what is measured, the
    /// worst row first. Other load of the host disturbs all of it. Takes one to three minutes.
    Calibrate(CalibrateArgs),
    /// List the bundled profiles of machines and explain their format, or print one of them
    ///
    /// A profile holds the costs of one machine's hardware for the simulated CPUs of `scale`. With
    /// NAME the profile is printed as a file, which can be changed and given to `scale --profile`.
    Profiles(ProfilesArgs),
    /// List the workloads and their parameters
    Workloads,
    /// List the knobs that --set changes
    Knobs,
    /// List the counters and what they count
    Counters,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless compare --quick
  faultless compare --only pft --only small_allocs
  faultless compare --set locking=per_vma --set locking=speculative
  faultless compare --only python --set prefault_max_order=9
  faultless compare app.fltrace              a recording of your own
  faultless compare --details                every workload on this machine
  faultless compare xsbench --ratios 1:4 --cpus 16 --seeds 10
  faultless compare --html compare.html      a page with plots
  faultless compare --json results.jsonl

Rows of xsbench and llm, and their counters (see `faultless counters`):
  shootdown interrupts   tlb_shootdown_sent
  flushes at once        tlb_flush
  flushes deferred       flush_deferred
  pages without a flush  flush_needless
  settlements            deferred_settled
  pages moved            pgmigrate_success
  pages evicted          pgsteal")]
pub struct CompareArgs {
    /// A quarter of the time: noisier, and fewer simulated CPUs
    #[arg(long)]
    pub quick: bool,
    /// Run every workload on this machine too, and print all counters
    #[arg(long)]
    pub details: bool,
    #[command(flatten)]
    pub set: SetArgs,
    /// Threads of each workload of --details, and of `xsbench` and `llm` on this machine [default: the host's CPUs, at most 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    #[command(flatten)]
    pub tiers: TierArgs,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
    /// Only these workloads and recordings, by name, or a recording of your own; the same as --only
    #[arg(value_name = "NAME|FILE")]
    pub subjects: Vec<String>,
    /// Only these workloads and recordings, by name, or a recording of your own
    #[arg(long, value_name = "NAME|FILE")]
    pub only: Vec<String>,
}

/// What `xsbench` and `llm` are compared at.
#[derive(Debug, clap::Args)]
pub struct TierArgs {
    /// How many seeds `xsbench` and `llm` run with; means are compared [default: 3, or 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub seeds: Option<u16>,
    /// Ratios of fast to slow memory that `xsbench` and `llm` run at [default: 1:1,1:2.3,1:4,1:8,1:99]
    #[arg(long, value_name = "1:N,...", value_delimiter = ',', value_parser = PossibleValuesParser::new(tiers::RATIOS))]
    pub ratios: Vec<String>,
    /// Numbers of simulated CPUs that `xsbench` and `llm` run on, and not on this machine; more than 16 have as much fast memory each [default: 16 and, for xsbench, 64; and this machine]
    #[arg(long, value_name = "N,N..N")]
    pub cpus: Option<Counts>,
}

impl CompareArgs {
    /// All that was named, either way; none for everything.
    pub fn chosen(&self) -> Vec<String> {
        [&self.subjects[..], &self.only].concat()
    }
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless stat pft size=256M threads=2
  faultless stat page_fault1 seconds=2 --set locking=mmap_lock
  faultless stat pft --set prefault_max_order=5 --set zeroed_pool=40000
  faultless stat ebizzy threads=4 --machine linux")]
pub struct StatArgs {
    /// The workload
    #[arg(value_parser = PossibleValuesParser::new(workloads()))]
    pub workload: String,
    /// Its parameters, as `threads=2`; `faultless workloads` lists them
    #[arg(value_name = "KEY=VALUE")]
    pub params: Vec<String>,
    #[command(flatten)]
    pub set: SetArgs,
    /// Where it runs
    #[arg(long, value_enum, default_value_t = MachineArg::Native)]
    pub machine: MachineArg,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless text
  faultless text --size 471816K     as large as the published program
  faultless text --passes 1 --set fault_around_pages=1")]
pub struct TextArgs {
    /// Code of the program: 64M, 471816K
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub size: String,
    /// How often a function of each page is called
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub passes: u64,
    /// Processes that run the program, for the frames that they share
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=64))]
    pub processes: u16,
    #[command(flatten)]
    pub set: SetArgs,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// The workloads, for clap to list, and to name one that is like a wrong one.
fn workloads() -> Vec<PossibleValue> {
    let all = faultless_workload::all().iter();
    all.map(|info| PossibleValue::new(info.name).help(info.summary)).collect()
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
Examples:
  faultless replay python
  faultless replay perf.data --set locking=per_vma
  faultless replay python --set prefault_max_order=5
  faultless replay app.fltrace --policies --json app.jsonl
  faultless replay app.fltrace --html app.html
  faultless replay app.fltrace --plot app.svg
  faultless replay app.lackey       its TLB misses, from a trace of addresses")]
pub struct ReplayArgs {
    /// The recording or trace of addresses: a file, or the name of a bundled one
    #[arg(value_name = "FILE|NAME")]
    pub recording: PathBuf,
    #[command(flatten)]
    pub set: SetArgs,
    /// Compare the locking policies instead of running one; prefault is off (prefault_max_order=0) unless
    /// --set gives an order
    #[arg(long)]
    pub policies: bool,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
    /// Draw the faults with prefault off and with it as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless record -- python3 -c 'print(sum(range(10**6)))'
  faultless record -o build.fltrace --compact -- make -j2
  faultless record --lesser -- ./app     without permission for tracepoints")]
pub struct RecordArgs {
    /// Where to; a file that is there already is kept as FILE.old [default: perf.data, or recording.fltrace with
    /// --compact]
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
#[command(group = ArgGroup::new("subject").args(["recording", "program"]).required(true))]
#[command(override_usage = "\
faultless advise [OPTIONS] -- <CMD>...
       faultless advise [OPTIONS] <FILE|NAME>")]
#[command(after_help = "\
Examples:
  faultless advise -- python3 -c 'print(len({str(i) for i in range(10**6)}))'
  faultless advise app.fltrace
  faultless advise --try -- ./app
  faultless advise --try --sysfs --rounds 15 --json app.jsonl -- ./app")]
pub struct AdviseArgs {
    /// A recording: a file, or the name of a bundled one
    #[arg(value_name = "FILE|NAME")]
    pub recording: Option<PathBuf>,
    /// Apply each advice to runs of the program, and measure what it saves
    #[arg(long = "try", conflicts_with = "recording")]
    pub trial: bool,
    /// With --try: pairs of runs of each kind, one with the advice and one without
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u16).range(2..=1000))]
    pub rounds: u16,
    /// Permit settings of the whole system (sizes of huge pages) to be changed while something is measured. They are put back
    /// afterwards, also if the command is killed
    #[arg(long)]
    pub sysfs: bool,
    /// Accept a recording that leaves events out, where permission for all is missing
    #[arg(long)]
    pub lesser: bool,
    #[command(flatten)]
    pub json: JsonArgs,
    /// The program and its arguments
    #[arg(last = true, value_name = "CMD")]
    pub program: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless boot ./hello
  faultless boot --cpus 4 --set locking=per_vma ./stress --threads 4
  faultless boot --files ./root ./root/bin/busybox sh -c 'ls -l / | sort'
  faultless boot --memory 256M --swap 1G ./app   more memory than there is
  faultless boot --accel tcg ./app               do not try KVM
  faultless boot --clock deterministic ./app     every run is the same")]
pub struct BootArgs {
    /// CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub cpus: u16,
    /// Memory, from 32M to less than 1T: 512M, 2G
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = memory)]
    pub memory: u64,
    /// Nodes of memory, as shares of what the kernel leaves to programs: 1:4 gives the second node four fifths. CPUs are in the first,
    /// whose pages are taken first. Pages that are used come to it, and others leave it; `move_pages` moves pages, too. One to eight nodes
    #[arg(long, value_name = "A:B", default_value_t)]
    pub nodes: Nodes,
    /// A directory that the program sees as its file system
    #[arg(long, value_name = "DIR")]
    pub files: Option<PathBuf>,
    /// Put the files on a disk, from which their pages are read when they are needed, and not in memory. Pages that
    /// programs store to stay in memory. Holes of files take room in the disk's image, a temporary file, as other bytes do
    #[arg(long)]
    pub disk: bool,
    /// A swap disk of this size, in whole MiB from 1M to less than 1T: where memory is short, private pages of the program are written there, and read again when they are needed.
    /// Its image is a temporary file that grows with what is written
    #[arg(long, value_name = "SIZE", value_parser = swap)]
    pub swap: Option<u64>,
    /// The directory inside that the program starts in [default: /]
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<OsString>,
    /// An environment variable; repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<String>,
    /// What time is: `deterministic` counts an instruction as a nanosecond, and lets CPUs take turns
    #[arg(long, value_enum, default_value_t = ClockArg::Real)]
    pub clock: ClockArg,
    /// Who executes the program's instructions
    #[arg(long, value_enum, default_value_t = AccelArg::Auto)]
    pub accel: AccelArg,
    #[command(flatten)]
    pub set: SetArgs,
    /// At the end account for every frame of memory; one that is missing is an error
    #[arg(long)]
    pub check: bool,
    /// Break the kernel on purpose, for tests
    #[arg(long, value_name = "NAME", hide = true)]
    pub plant: Vec<String>,
    /// Boot this kernel and not the bundled one
    #[arg(long, value_name = "FILE", hide = true)]
    pub kernel: Option<PathBuf>,
    /// Stop it after so many seconds; the exit status is then 124
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
    #[command(flatten)]
    pub json: JsonArgs,
    /// The program, and its arguments: what follows its name is its own, whatever it looks like
    #[arg(value_names = ["PROGRAM", "ARGS"], required = true, num_args = 1.., trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

impl BootArgs {
    /// The program.
    pub fn program(&self) -> &Path {
        Path::new(self.command.first().map_or("".as_ref(), OsString::as_os_str))
    }

    /// Its arguments.
    pub fn args(&self) -> &[OsString] {
        self.command.get(1..).unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AccelArg {
    /// KVM if a machine runs under it, which is tried for a second at most, and else QEMU
    Auto,
    /// The host's processor
    Kvm,
    /// QEMU, which translates them
    Tcg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClockArg {
    /// The host's time; CPUs run side by side
    Real,
    /// Instructions; CPUs take turns, and runs repeat, but for the time that a disk takes
    Deterministic,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless versus
  faultless versus --set locking=mmap_lock --cpus 4
  faultless versus --kernel /boot/vmlinuz-6.12.43-amd64 --json versus.jsonl
  faultless versus --check     fail where a row misses a third of Linux")]
pub struct VersusArgs {
    /// The Linux kernel to compare with, a bzImage [default: Debian's newest 6.12]
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Count faults and shootdowns with so many CPUs
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [2, 4],
          value_parser = clap::value_parser!(u16).range(2..=64))]
    pub cpus: Vec<u16>,
    #[command(flatten)]
    pub set: SetArgs,
    /// Boots for each row that varies, as rows of disks do; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub runs: u16,
    #[command(flatten)]
    pub json: JsonArgs,
    /// Fail where a row costs more than a third of what it costs on Linux
    #[arg(long)]
    pub check: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless calibrate
  faultless calibrate --output mine.toml --check
  faultless calibrate --profile mine.toml     check a profile again
  faultless scale pft --profile ./mine.toml   use it
  faultless profiles                          the format of a profile")]
pub struct CalibrateArgs {
    /// Write the profile to FILE, which is replaced when the profile is complete
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Predict workloads and recordings with the profile, and measure them
    #[arg(long)]
    pub check: bool,
    /// Measure no profile, and check this one
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "output")]
    pub profile: Option<String>,
    /// Fewer rounds, and a check of two workloads: to see how it works
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    pub set: SetArgs,
    #[command(flatten)]
    pub json: JsonArgs,
}

#[derive(Debug, clap::Args)]
pub struct ProfilesArgs {
    /// The name of a bundled profile, to print it
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
}

#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("what").args(["subject", "table"]).required(true))]
#[command(after_help = "\
Examples:
  faultless scale pft
  faultless scale page_fault1 mode=processes --cpus 1,2,4..512
  faultless scale ebizzy --profile eight-socket --plot ebizzy.svg
  faultless scale vma_mmap --policies speculative --details
  faultless scale mmap1 --profile ./mine.toml --json mmap1.jsonl
  faultless scale --table prefault          beside the published figures
  faultless scale --table prefault --cpus 1,8 --details
  faultless profiles                        bundled profiles and their format")]
pub struct ScaleArgs {
    /// The workload, or a recording: a file, or the name of a bundled one
    #[arg(value_name = "WORKLOAD|RECORDING")]
    pub subject: Option<PathBuf>,
    /// A table that others published, with simulated figures beside theirs
    #[arg(long, value_name = "NAME", value_enum,
          conflicts_with_all = ["params", "policies", "set", "plot", "html", "profile"])]
    pub table: Option<TableArg>,
    /// The workload's parameters, as `size=4M`; `faultless workloads` lists them
    #[arg(value_name = "KEY=VALUE")]
    pub params: Vec<String>,
    /// Numbers of CPUs; 4..512 is 4, 8, 16 and so on [default: 1, 2, 4 and so on to the CPUs of the
    /// profile]. With --table, only the rows with these numbers of CPUs [default: all rows]
    #[arg(long, value_name = "N,N..N")]
    pub cpus: Option<Counts>,
    /// The locking policies [default: all]
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',')]
    pub policies: Vec<Policy>,
    /// The costs of the hardware: the name of a bundled profile (`faultless profiles` lists them), or
    /// a file. A bundled name goes before a file of that name; ./NAME names the file
    #[arg(long, value_name = "NAME|FILE", default_value = subject::PROFILE)]
    pub profile: String,
    /// Which schedule: 0 delays no CPU. With each other number one access in 16 takes up to 1 µs longer, at random: for finding
    /// schedules that go wrong, not for figures, which are several times smaller then
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// The hottest lines for each number of CPUs, not for the largest alone. With --table, the CPU
    /// time, faults and cache lines of each row
    #[arg(long)]
    pub details: bool,
    #[command(flatten)]
    pub set: SetArgs,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
    /// Draw throughput over CPUs as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// A published table, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum TableArg {
    /// Prefault, 32 GB, on 1 to 512 CPUs (2004)
    Prefault,
    /// ebizzy on 24 and 1,024 CPUs (2019)
    Ebizzy,
    /// page_fault1, 2 and 3 on 72 CPUs (2019)
    PageFault,
    /// small_allocs on 224 CPUs (2024)
    SmallAllocs,
    /// mmap, munmap and faults, private and shuffled, on 384 CPUs (2025)
    Vma,
    /// All of them
    All,
}

/// A locking policy, by its name.
#[derive(Clone, Copy, Debug)]
pub struct Policy(pub Locking);

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Locking::ALL.into_iter().find(|policy| policy.name() == text);
        found.map(Self).ok_or_else(|| {
            let names = Locking::ALL.map(Locking::name);
            format!("one of {}{}", names.join(", "), suggest::hint(text, names))
        })
    }
}

/// The longest time that a program may be given.
const LONGEST: Duration = Duration::from_secs(1000 * 86_400);

/// A size of memory in bytes.
fn memory(text: &str) -> Result<u64, String> {
    let bytes = Kind::Size.parse(text).filter(|bytes| (32 << 20..1 << 40).contains(bytes));
    bytes.ok_or_else(|| "a size from 32M to less than 1T, as 512M or 2G".to_owned())
}

/// A size of a swap disk in bytes.
fn swap(text: &str) -> Result<u64, String> {
    let is_fit = |bytes: &u64| (1 << 20..1 << 40).contains(bytes) && bytes.is_multiple_of(1 << 20);
    let bytes = Kind::Size.parse(text).filter(is_fit);
    bytes.ok_or_else(|| "a size in whole MiB, from 1M to less than 1T, as 256M or 2G".to_owned())
}

fn variable(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((name, _)) if !name.is_empty() => Ok(text.to_owned()),
        _ => Err("it has the form NAME=VALUE".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let seconds = seconds.filter(|time| !time.is_zero() && *time <= LONGEST);
    let days = LONGEST.as_secs() / 86_400;
    seconds.ok_or_else(|| format!("a number of seconds above 0, {days} days at most"))
}

#[derive(Debug, clap::Args)]
pub struct SetArgs {
    /// Set a knob; repeatable (see `faultless knobs`)
    #[arg(long = "set", value_name = "KNOB=VALUE")]
    pub set: Vec<Assignment>,
}

#[derive(Debug, clap::Args)]
pub struct HtmlArgs {
    /// Write a page with plots to FILE, which is replaced when the results are complete. It is in one piece, and loads nothing
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct JsonArgs {
    /// Write results to FILE too, one JSON object a line, each with the parameters and knobs in force; `-` is
    /// standard output, and sends the tables to standard error. FILE is replaced when the results are complete; those of a
    /// run that fails or is interrupted go to FILE.partial
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
