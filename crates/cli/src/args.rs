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

/// Measure the effect of memory mechanisms on your program: page faults without a lock, prefault,
/// pre-zeroed frames and late reverse-map anchors (anon_vma), compared with the locking of Linux.
#[derive(Debug, Parser)]
#[command(
    name = "faultless",
    version,
    after_help = "\
Examples:
  faultless compare                         the main comparison, about a minute
  faultless stat pft threads=2              one workload, like perf stat
  faultless record -o app.fltrace -- ./app  record a program's memory use
  faultless replay app.fltrace --policies   compare the policies for it
  faultless advise -- ./app                 Linux settings with fewer faults
  faultless boot ./app                      a static program on the bare machine
  faultless versus                          cost of faults there and on Linux
  faultless scale pft                       on 1 to 192 simulated CPUs
  faultless calibrate --check               costs of this machine; predictions

Exit status: 0; 2 for wrong arguments, or an input file or program that is
missing or unusable; 1 for other failures; 128 plus its number for a signal.
`record`, `advise` and `boot` return the exit status of their program, and
`boot --timeout` returns 124."
)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

// clap fills the paragraphs of a command to the width of the terminal. It does not wrap lines of
// examples, so example lines are short.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compare the locking policies, prefault and the other mechanisms, on one screen
    ///
    /// Prints the machine and its noise, then four tables with a verdict each: the cost of one
    /// fault (instructions, and shared cache lines written), workloads on many simulated CPUs,
    /// recorded programs whose faults and calls are replayed on this machine, and each mechanism
    /// off and on. The policies are locking=mmap_lock (Linux up to 6.3), per_vma (Linux 6.4 to
    /// 6.14) and speculative (no lock), with prefault off (prefault_max_order=0). Repetitions of
    /// the policies alternate, so noise affects all policies alike. The tables show medians. A
    /// difference within the noise is reported as no difference.
    ///
    /// `xsbench` and `llm` are compared only if named, in separate tables: shootdowns, flushes, TLB
    /// misses, run time, frames in use and allocation latencies at several ratios of fast to slow
    /// memory, with deferred flushes off and on; `xsbench` also with stores instead of loads. Each
    /// runs with several seeds, and the means are compared. This takes tens of minutes; --quick
    /// uses less memory, fewer CPUs and one seed.
    ///
    /// With --details each workload also runs on this machine under every policy, and on the Linux
    /// kernel of this host. Workloads and recordings then run with prefault off, up to order 3, up
    /// to order 5, and up to order 5 on frames zeroed before the run. This takes about two minutes
    /// more.
    ///
    /// In --set, locking=POLICY selects a policy to compare and prefault_max_order=N an order; both
    /// can be repeated. zeroed_pool=N is the number of frames zeroed before a run. All other knobs
    /// apply to every run.
    Compare(CompareArgs),
    /// Run one workload and print its counters like `perf stat`
    ///
    /// `faultless workloads` lists the workloads with their parameters, and `faultless counters`
    /// describes the counters. The native machine is idle before the run, until the pools of zeroed
    /// frames (zeroed_pool) are full.
    Stat(StatArgs),
    /// Compare a large program's code in pages of 4 KiB and of 2 MiB
    ///
    /// The workload `text` runs with huge_text=never and huge_text=always. Reports page faults,
    /// misses of the (simulated) instruction TLB, page walks, the code in memory, and the frames
    /// shared with a second process, beside published figures.
    Text(TextArgs),
    /// Replay a recorded program on the subsystem, or a trace of addresses on simulated TLBs
    ///
    /// FILE is a perf.data file of `perf record` (see `faultless record`), a .fltrace file, a
    /// trace of addresses, or the name of a bundled recording or trace. A recording runs thread by
    /// thread. A trace of addresses, as written by `valgrind --tool=lackey --trace-mem=yes`, runs
    /// through simulated TLBs; the output shows TLB misses, and the effect of code in pages of 2
    /// MiB. With prefault (prefault_max_order above 0) a recording is replayed twice more, in its
    /// recorded order, to count the faults saved, the prefaulted pages, the unused prefaulted
    /// pages, and the growth of resident memory.
    Replay(ReplayArgs),
    /// Record the memory operations of a program with `perf record`
    ///
    /// Huge pages are off for the program during the recording, and fault-around too if permitted,
    /// so the recording contains the first touch of every page. Faults that stay hidden are
    /// reported before the program starts. SIGINT, SIGTERM, SIGHUP and SIGQUIT sent to `record` are
    /// forwarded to the program. The exit status is the program's, or 128 plus the number of the
    /// signal that ended the program. It is 2 if the program does not exist or cannot be executed.
    Record(RecordArgs),
    /// Measure the cost of a program's page faults, and find Linux settings that reduce it
    ///
    /// The program is recorded, as by `record`, and run once more without a recorder. The cost of a
    /// fault is measured on this host. From the recording follows the number of faults saved by
    /// each setting: larger folios (mTHP, THP), populated mappings, and settings of glibc's malloc,
    /// of Go and of Java. Prints the predicted saving of each setting in seconds of processor time,
    /// and the resident memory that would be unused. A recording of an earlier run can replace the
    /// program.
    ///
    /// With --try each setting is applied to runs of the program, each beside a run without the
    /// setting, and the measured saving is printed beside the prediction. These runs read no input,
    /// and their output is dropped. The exit status is that of the recorded run.
    Advise(AdviseArgs),
    /// Run a static Linux program on the bare machine, in QEMU
    ///
    /// PROGRAM is a statically linked x86-64 program (cc -static; musl; Rust with -C
    /// target-feature=+crt-static), a dynamically linked program with its interpreter and libraries
    /// in --files, or the name of a bundled program, such as `rows` or `workload`. A wrong name
    /// prints the list of bundled programs. Input, output and exit status pass through. At the end
    /// the kernel's counters are printed on standard error, with the accelerator: KVM or QEMU's
    /// emulation. Requires QEMU, but not KVM.
    Boot(BootArgs),
    /// Compare the cost of faults and calls on the bare machine and on Linux, in instructions
    ///
    /// The same program files run on the bare machine and on a stock Linux 6.12, in the same QEMU,
    /// with a clock that counts instructions. Every figure is reproducible to the last digit,
    /// except rows of disks, which show the median of --runs boots and a range. A second column
    /// shows Linux booted with mitigations=off and cgroup_disable=memory, and a table lists the
    /// additional work of Linux. Prefault is off (prefault_max_order=0). The rows of anonymous
    /// memory are repeated with prefault up to order 3 and 5 (or each prefault_max_order=N of
    /// --set), and on frames zeroed by the idle machine. Linux is Debian's package, downloaded once
    /// into $XDG_CACHE_HOME/faultless and not installed. Takes two to eight minutes.
    Versus(VersusArgs),
    /// Run a workload or a recording on increasing numbers of simulated CPUs
    ///
    /// Each run uses a virtual machine with the CPU, cache and interrupt costs of --profile. The
    /// subsystem itself runs, and each access to another CPU's cache line costs simulated time. The
    /// output of a command is the same on any host. Prints throughput under each locking policy,
    /// cache line transfers, the distribution of CPU time, and the places in the source at which
    /// CPUs wait for cache lines. Prefault is off (prefault_max_order=0) unless --set gives an
    /// order.
    ///
    /// The work of each CPU is the same for each number of CPUs, and small (some hundred pages or
    /// calls), so all runs together take less than a minute; parameters of the workload change it.
    /// Large machines take longer: `pft` takes about 9 s of processor time and 1.3 GiB of memory
    /// for each policy on 512 CPUs, and 27 s and 2.5 GiB on 1,024 CPUs. The tables `ebizzy` and
    /// `vma` take 10 to 20 minutes.
    Scale(ScaleArgs),
    /// Measure the costs of this machine as a profile for `scale`, and check the predictions
    ///
    /// Measures the hardware with two threads (frequency, cache lines, zeroing), and paths of the
    /// subsystem on the native machine, such as a fault or a pair of mmap and munmap. The numbers
    /// of the profile are fitted to these results. Also measures the cost of a page fault under the
    /// host's kernel, and prints the prefault orders that reduce it.
    ///
    /// With --check each workload is predicted with one thread and with two, and so are the bundled
    /// recordings. The table shows predictions beside measured values, the largest error first.
    /// Load on the host disturbs all results. Takes one to three minutes.
    Calibrate(CalibrateArgs),
    /// List the bundled machine profiles and explain their format, or print one profile
    ///
    /// A profile holds the hardware costs of one machine for the simulated CPUs of `scale`. With
    /// NAME the profile is printed as a file, to be changed and given to `scale --profile`.
    Profiles(ProfilesArgs),
    /// List the workloads and their parameters
    Workloads,
    /// List the knobs of --set
    Knobs,
    /// List the counters and their meaning
    Counters,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless compare --quick
  faultless compare --only pft --only small_allocs
  faultless compare --set locking=per_vma --set locking=speculative
  faultless compare --only python --set prefault_max_order=9
  faultless compare app.fltrace              a recording of yours
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
    /// Run in a quarter of the time, with more noise and fewer simulated CPUs
    #[arg(long)]
    pub quick: bool,
    /// Run every workload on this machine too, and print all counters
    #[arg(long)]
    pub details: bool,
    #[command(flatten)]
    pub set: SetArgs,
    /// Set the threads of each workload of --details, and of `xsbench` and `llm` on this machine
    /// [default: the host's CPUs, at most 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    #[command(flatten)]
    pub tiers: TierArgs,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
    /// Run only these workloads and recordings, by name, or a recording of your own; the same as
    /// --only
    #[arg(value_name = "NAME|FILE")]
    pub subjects: Vec<String>,
    /// Run only these workloads and recordings, by name, or a recording of yours
    #[arg(long, value_name = "NAME|FILE")]
    pub only: Vec<String>,
}

/// The seeds, ratios and CPU counts of the comparison of `xsbench` and `llm`.
#[derive(Debug, clap::Args)]
pub struct TierArgs {
    /// Set the number of seeds of `xsbench` and `llm`, whose means are compared [default: 3, or 1
    /// with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub seeds: Option<u16>,
    /// Set the ratios of fast to slow memory of `xsbench` and `llm` [default:
    /// 1:1,1:2.3,1:4,1:8,1:99]
    #[arg(long, value_name = "1:N,...", value_delimiter = ',', value_parser = PossibleValuesParser::new(tiers::RATIOS))]
    pub ratios: Vec<String>,
    /// Run `xsbench` and `llm` on these numbers of simulated CPUs, and not on this machine; with
    /// more than 16 CPUs the fast memory per CPU stays the same [default: 16 and, for xsbench, 64;
    /// and this machine]
    #[arg(long, value_name = "N,N..N")]
    pub cpus: Option<Counts>,
}

impl CompareArgs {
    /// Returns all named subjects, positional and of `--only`. Empty means everything.
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
    /// Run this workload
    #[arg(value_parser = PossibleValuesParser::new(workloads()))]
    pub workload: String,
    /// Set parameters of the workload, such as `threads=2`; `faultless workloads` lists them
    #[arg(value_name = "KEY=VALUE")]
    pub params: Vec<String>,
    #[command(flatten)]
    pub set: SetArgs,
    /// Select the machine that runs the workload
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
    /// Set the size of the program's code, such as 64M or 471816K
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub size: String,
    /// Call a function of each page N times
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub passes: u64,
    /// Set the number of processes that run the program, to measure shared frames
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=64))]
    pub processes: u16,
    #[command(flatten)]
    pub set: SetArgs,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// The workloads: clap lists them, and suggests a similar name for a wrong one.
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
  faultless replay app.lackey       TLB misses of a trace of addresses")]
pub struct ReplayArgs {
    /// Replay this recording or trace of addresses: a file, or the name of a bundled one
    #[arg(value_name = "FILE|NAME")]
    pub recording: PathBuf,
    #[command(flatten)]
    pub set: SetArgs,
    /// Compare the locking policies instead of running a single policy; prefault is off
    /// (prefault_max_order=0) unless --set gives an order
    #[arg(long)]
    pub policies: bool,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
    /// Draw the faults with prefault off and on, as SVG
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
    /// Write the recording to FILE; an existing file is kept as FILE.old [default: perf.data, or
    /// recording.fltrace with --compact]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the small portable form (also selected by a name ending in .fltrace)
    #[arg(long)]
    pub compact: bool,
    /// Accept an incomplete recording if permission for all events is missing
    #[arg(long)]
    pub lesser: bool,
    /// Run this program, with its arguments
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
    /// Analyse this recording: a file, or the name of a bundled one
    #[arg(value_name = "FILE|NAME")]
    pub recording: Option<PathBuf>,
    /// Apply each setting to runs of the program, and measure the saving
    #[arg(long = "try", conflicts_with = "recording")]
    pub trial: bool,
    /// With --try, run N pairs for each setting, one run of each pair without the setting
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u16).range(2..=1000))]
    pub rounds: u16,
    /// Permit changes of system-wide settings (sizes of huge pages) during measurements. They are
    /// restored afterwards, also if the command is killed
    #[arg(long)]
    pub sysfs: bool,
    /// Accept an incomplete recording if permission for all events is missing
    #[arg(long)]
    pub lesser: bool,
    #[command(flatten)]
    pub json: JsonArgs,
    /// Run this program, with its arguments
    #[arg(last = true, value_name = "CMD")]
    pub program: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless boot ./hello
  faultless boot --cpus 4 --set locking=per_vma ./stress --threads 4
  faultless boot --files ./root ./root/bin/busybox sh -c 'ls -l / | sort'
  faultless boot --memory 256M --swap 1G ./app   use more than the memory
  faultless boot --accel tcg ./app               do not try KVM
  faultless boot --clock deterministic ./app     reproducible runs")]
pub struct BootArgs {
    /// Set the number of CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub cpus: u16,
    /// Set the memory size, from 32M to less than 1T, such as 512M or 2G
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = memory)]
    pub memory: u64,
    /// Divide the memory left to programs into one to eight nodes, by shares: 1:4 gives the second
    /// node four fifths. CPUs are in the first node, and allocation takes its pages first. Used
    /// pages are promoted to the first node and cold pages demoted; `move_pages` moves pages, too
    #[arg(long, value_name = "A:B", default_value_t)]
    pub nodes: Nodes,
    /// Show DIR to the program as its file system
    #[arg(long, value_name = "DIR")]
    pub files: Option<PathBuf>,
    /// Put the files on a disk instead of in memory, and read pages on demand. Pages that programs
    /// store to stay in memory. Holes of files take space in the disk's image, which is a temporary
    /// file
    #[arg(long)]
    pub disk: bool,
    /// Add a swap disk of SIZE, in whole MiB from 1M to less than 1T. When memory is short, private
    /// pages of the program are written to this disk, and read back on demand. Its image is a
    /// temporary file that grows with the data written
    #[arg(long, value_name = "SIZE", value_parser = swap)]
    pub swap: Option<u64>,
    /// Start the program in this directory, as seen by the program [default: /]
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<OsString>,
    /// Set an environment variable; repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<String>,
    /// Select the clock: `deterministic` counts an instruction as a nanosecond, and CPUs take turns
    #[arg(long, value_enum, default_value_t = ClockArg::Real)]
    pub clock: ClockArg,
    /// Select the accelerator that executes the program's instructions
    #[arg(long, value_enum, default_value_t = AccelArg::Auto)]
    pub accel: AccelArg,
    #[command(flatten)]
    pub set: SetArgs,
    /// Account for every frame of memory at the end; a missing frame is an error
    #[arg(long)]
    pub check: bool,
    /// Break the kernel on purpose, for tests
    #[arg(long, value_name = "NAME", hide = true)]
    pub plant: Vec<String>,
    /// Boot this kernel instead of the bundled one
    #[arg(long, value_name = "FILE", hide = true)]
    pub kernel: Option<PathBuf>,
    /// Stop the program after this number of seconds; the exit status is then 124
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
    #[command(flatten)]
    pub json: JsonArgs,
    /// Run this program. All words after its name are its arguments, options included
    #[arg(value_names = ["PROGRAM", "ARGS"], required = true, num_args = 1.., trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

impl BootArgs {
    /// Returns the program.
    pub fn program(&self) -> &Path {
        Path::new(self.command.first().map_or("".as_ref(), OsString::as_os_str))
    }

    /// Returns the arguments of the program.
    pub fn args(&self) -> &[OsString] {
        self.command.get(1..).unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AccelArg {
    /// KVM if a machine runs under KVM (probed for up to one second), otherwise QEMU
    Auto,
    /// The host's processor
    Kvm,
    /// QEMU, by translation
    Tcg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClockArg {
    /// The host's time; CPUs run in parallel
    Real,
    /// Instructions; CPUs take turns, and runs are reproducible, except for the time of a disk
    Deterministic,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless versus
  faultless versus --set locking=mmap_lock --cpus 4
  faultless versus --kernel /boot/vmlinuz-6.12.43-amd64 --json versus.jsonl
  faultless versus --check     fail if a row misses a third of Linux")]
pub struct VersusArgs {
    /// Compare with this Linux kernel, a bzImage [default: Debian's newest 6.12]
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Count faults and shootdowns with these numbers of CPUs
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [2, 4],
          value_parser = clap::value_parser!(u16).range(2..=64))]
    pub cpus: Vec<u16>,
    #[command(flatten)]
    pub set: SetArgs,
    /// Boot N times for each row that varies, as rows of disks do, and show the median
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub runs: u16,
    #[command(flatten)]
    pub json: JsonArgs,
    /// Fail if a row costs more than a third of its cost on Linux
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
    /// Check this profile instead of measuring a new profile
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "output")]
    pub profile: Option<String>,
    /// Run fewer rounds, and check two workloads only, as a demonstration
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    pub set: SetArgs,
    #[command(flatten)]
    pub json: JsonArgs,
}

#[derive(Debug, clap::Args)]
pub struct ProfilesArgs {
    /// Print this bundled profile
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
    /// Run this workload or recording: a file, or the name of a bundled one
    #[arg(value_name = "WORKLOAD|RECORDING")]
    pub subject: Option<PathBuf>,
    /// Print a published table, with simulated figures beside the published figures
    #[arg(long, value_name = "NAME", value_enum,
          conflicts_with_all = ["params", "policies", "set", "plot", "html", "profile"])]
    pub table: Option<TableArg>,
    /// Set parameters of the workload, such as `size=4M`; `faultless workloads` lists them
    #[arg(value_name = "KEY=VALUE")]
    pub params: Vec<String>,
    /// Run on these numbers of CPUs; 4..512 is 4, 8, 16 and so on [default: 1, 2, 4 and so on to
    /// the CPUs of the profile]. With --table, print only the rows with these numbers of CPUs
    /// [default: all rows]
    #[arg(long, value_name = "N,N..N")]
    pub cpus: Option<Counts>,
    /// Select the locking policies [default: all]
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',')]
    pub policies: Vec<Policy>,
    /// Take hardware costs from this profile: the name of a bundled profile (`faultless profiles`
    /// lists them), or a file. A bundled name takes precedence over a file of the same name; ./NAME
    /// is always the file
    #[arg(long, value_name = "NAME|FILE", default_value = subject::PROFILE)]
    pub profile: String,
    /// Select a schedule: 0 delays no CPU. Any other number delays one access in 16 by up to 1 µs,
    /// at random. Use this to find wrong schedules, not for figures, which are several times lower
    /// with delays
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Print the hottest lines for each number of CPUs, not only for the largest. With --table,
    /// print the CPU time, faults and cache lines of each row
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
    /// All tables
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

/// The longest permitted timeout of a program.
const LONGEST: Duration = Duration::from_secs(1000 * 86_400);

/// Parses a size of memory, in bytes.
fn memory(text: &str) -> Result<u64, String> {
    let bytes = Kind::Size.parse(text).filter(|bytes| (32 << 20..1 << 40).contains(bytes));
    bytes.ok_or_else(|| "a size from 32M to less than 1T, as 512M or 2G".to_owned())
}

/// Parses a size of a swap disk, in bytes.
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
    /// Write a page with plots to FILE, which is replaced when the results are complete. The page
    /// is a single file without external resources
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct JsonArgs {
    /// Write results to FILE too, one JSON object per line, each with the parameters and knobs in
    /// force. `-` is standard output, and moves the tables to standard error. FILE is replaced when
    /// the results are complete; the results of a failed or interrupted run go to FILE.partial
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
