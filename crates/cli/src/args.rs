//! The command line: the commands. Each command has its arguments in its own file.

use crate::advise::AdviseArgs;
#[cfg(feature = "machine")]
use crate::boot::BootArgs;
use crate::calibrate::CalibrateArgs;
use crate::compare::CompareArgs;
use crate::generate::GenerateArgs;
use crate::profile::{ProfileArgs, ProfilesArgs};
use crate::record::RecordArgs;
use crate::replay::ReplayArgs;
use crate::run::RunArgs;
use crate::scale::ScaleArgs;
use crate::stat::StatArgs;
use crate::text::TextArgs;
#[cfg(feature = "machine")]
use crate::versus::VersusArgs;
use clap::{Parser, Subcommand};

/// Measure the page faults of a Linux program (record), find the settings that reduce their cost
/// (advise), and run the program with these settings (run). The other commands study a memory
/// subsystem with page faults without a lock, prefault and pre-zeroed frames, beside the locking of
/// Linux.
#[derive(Debug, Parser)]
#[command(
    name = "faultless",
    version,
    help_template = template(),
    after_help = help()
)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

/// The lines of examples about the bare machine, if the command contains it.
const MACHINE: &str = if cfg!(feature = "machine") {
    "
  faultless boot ./app                      a static program on the bare machine
  faultless versus                          cost of faults there and on Linux"
} else {
    ""
};

/// The commands for Linux programs. The other commands study the subsystem.
const LINUX: [&str; 3] = ["record", "advise", "run"];
/// The columns of the list of commands.
const COLUMNS: usize = 80;

/// Returns the template of the help, with the commands in two groups.
fn template() -> String {
    let commands = Command::augment_subcommands(clap::Command::new("faultless"));
    let (mut linux, mut study) = (String::new(), String::new());
    for command in commands.get_subcommands().filter(|command| !command.is_hide_set()) {
        let group = if LINUX.contains(&command.get_name()) { &mut linux } else { &mut study };
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        group.push_str(&entry(command.get_name(), &about));
    }
    format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\nTune a Linux program:\n{linux}\n\
         Study the memory subsystem:\n{study}\nOptions:\n{{options}}{{after-help}}"
    )
}

/// Returns the lines of a command in the list.
fn entry(name: &str, about: &str) -> String {
    let mut lines = vec![format!("  {name:<9}")];
    for word in about.split_whitespace() {
        let last = lines.len() - 1;
        if lines[last].len() + 1 + word.len() > COLUMNS {
            lines.push(format!("{:11}", ""));
        }
        let last = lines.len() - 1;
        lines[last] = format!("{} {word}", lines[last]);
    }
    lines.join("\n") + "\n"
}

/// Returns the text below the list of commands.
fn help() -> String {
    let (and_boot, timeout) = if cfg!(feature = "machine") {
        ("`run` and `boot`", ",\nand `boot --timeout` returns 124")
    } else {
        ("and `run`", "")
    };
    format!(
        "\
Examples:
  faultless record -o app.fltrace -- ./app  record a program's memory use
  faultless advise -- ./app                 Linux settings with fewer faults
  faultless run --apply no-thp -- ./app     run it with such a setting
  faultless compare                         the main comparison, about a minute
  faultless stat pft threads=2              one workload, like perf stat
  faultless replay app.fltrace --policies   compare the policies for it{MACHINE}
  faultless scale pft                       on 1 to 192 simulated CPUs
  faultless calibrate --check               costs of this machine; predictions

Exit status: 0; 2 for wrong arguments, or an input file or program that is
missing or unusable; 1 for other failures; 128 plus its number for a signal.
`record`, `advise`, {and_boot} return the exit status of their program{timeout}."
    )
}

// clap fills the paragraphs of a command to the width of the terminal. It does not wrap lines of
// examples, so example lines are short.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Record the memory operations of a program, or of running processes, with `perf record`
    ///
    /// Huge pages are off for a program during the recording, and fault-around too if permitted,
    /// so the recording contains the first touch of every page. Faults that stay hidden are
    /// reported before the program starts. SIGINT, SIGTERM, SIGHUP and SIGQUIT sent to `record` are
    /// forwarded to the program. The exit status is the program's, or 128 plus the number of the
    /// signal that ended the program. It is 2 if the program does not exist or cannot be executed.
    ///
    /// With --pid, --cgroup or --all, processes that already run are recorded, with the pages that
    /// are resident at the start, until Ctrl-C, for --seconds, or until the recording has 1.25 GiB.
    /// Huge pages and fault-around stay as they are. The recording has the portable form.
    Record(RecordArgs),
    /// Measure the cost of a program's page faults, and find Linux settings that reduce it
    ///
    /// The program is recorded, as by `record`, and run once more without a recorder, with empty
    /// standard input and dropped output. A Go program is run a third time, for the trace of its
    /// garbage collector. The cost of a fault is measured on this host. From the recording follows
    /// the number of faults saved by each setting: larger folios (mTHP, THP), populated mappings,
    /// and settings of glibc's malloc, of Go and of Java. Prints the predicted saving of each
    /// setting in seconds of processor time, and the resident memory that would be unused. A
    /// recording of an earlier run, or running processes (--pid, --cgroup, --all), can replace the
    /// program.
    ///
    /// With --try each setting is applied to runs of the program, each beside a run without the
    /// setting, and the measured saving is printed beside the prediction. These runs read no input,
    /// and their output is dropped. The exit status is that of the recorded run.
    Advise(AdviseArgs),
    /// Start a program with advice in force, for this process and its children alone
    ///
    /// The advice is named by --apply, or comes from a file of `advise --save`; both combine.
    /// Environment variables are set, lists such as GLIBC_TUNABLES are joined with their present
    /// values, huge pages are switched off by prctl, and a preloaded library populates memory early
    /// and moves program text to huge pages.
    /// The command becomes the program (exec), so its process, signals, terminal and exit status
    /// are the program's. The exit status is 2 if the program does not exist or cannot be executed.
    ///
    /// If the library cannot do an operation, such as huge pages for text, a warning with the
    /// reason and the remedy is printed before the program starts. With --report the command is the
    /// parent of the program, and prints the operations of each process at the end.
    ///
    /// Settings of the whole system are never changed: their commands are printed on standard
    /// error. A setting that needs the library is refused for static, setuid and foreign programs,
    /// and a warning is printed for other settings without an effect. The library is kept in
    /// $XDG_CACHE_HOME/faultless.
    Run(RunArgs),
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
    #[cfg(feature = "machine")]
    /// Run a static Linux program on the bare machine, in QEMU
    ///
    /// PROGRAM is a statically linked x86-64 program (cc -static; musl; Rust with -C
    /// target-feature=+crt-static), a dynamically linked program with its interpreter and libraries
    /// in --files, or the name of a bundled program, such as `rows` or `workload`. A wrong name
    /// prints the list of bundled programs. Input, output and exit status pass through. At the end
    /// the kernel's counters are printed on standard error, with the accelerator: KVM or QEMU's
    /// emulation. Requires QEMU, but not KVM.
    Boot(BootArgs),
    #[cfg(feature = "machine")]
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
    /// List, show, check and create profiles of machines for `scale`
    ///
    /// A profile holds the hardware costs of one machine for the simulated CPUs of `scale`, each
    /// number with its source. It is a TOML file; some profiles are bundled.
    Profile(ProfileArgs),
    /// The former name of `profile list` and `profile show`
    #[command(hide = true)]
    Profiles(ProfilesArgs),
    /// Write manual pages, and completions for shells
    ///
    /// DIR gets the directories `man` and `completions`. The Debian package contains these files.
    #[command(hide = true)]
    Generate(GenerateArgs),
    /// List the workloads and their parameters
    Workloads,
    /// List the knobs of --set
    Knobs,
    /// List the counters and their meaning
    Counters,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn help_begins_with_the_commands_for_a_linux_program() {
        let text = Args::command().render_long_help().to_string();
        assert!(text.starts_with("Measure the page faults of a Linux program (record)"), "{text}");
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
        let order = [
            "Tune a Linux program:\n  record ",
            "\n  advise ",
            "\n  run ",
            "Study the memory subsystem:\n  compare ",
            "\n  counters ",
            "Options:\n  -h",
            "Examples:\n  faultless record",
            "Exit status",
        ];
        let places = order.map(at);
        assert!(places.is_sorted(), "{text}");
        assert!(!text.contains("generate"), "a hidden command: {text}");
        let list = &text[places[0]..places[5]];
        assert!(list.lines().all(|line| line.len() <= COLUMNS), "{list}");
    }
}
