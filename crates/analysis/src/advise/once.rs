//! One run of the program without a recorder, and its usage.

use super::counter::FaultCounter;
use super::effect::Effect;
use super::item::Apply;
use super::preload::Preload;
use super::supervise::{Supervised, Usage, end_descendants};
use super::sysfs::Loan;
use super::thp_flag::ThpFlags;
use crate::error::Error;
use crate::observer::Observer;
use crate::stop;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

/// The usage of a run, with all processes started by the program.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Elapsed seconds.
    pub wall: f64,
    /// Seconds of processor time, the program's and the kernel's.
    pub processor: f64,
    /// The kernel's part.
    pub system: f64,
    /// Page faults. Excludes pages populated by a call, unless `counts_populated`.
    pub faults: u64,
    /// Faults that read from a disk.
    pub major: u64,
    /// Bytes read from disks.
    pub read: u64,
    /// Whether `faults` is the count of `getrusage`, which includes populated pages. It is used
    /// without permission for the kernel's counter of exceptions.
    pub counts_populated: bool,
    /// Whether the program switched huge pages off for itself.
    pub thp_off: bool,
    /// The exit status.
    pub status: ExitStatus,
    /// The number of processes that were still running after the program, and were killed.
    pub ended: u32,
}

/// Runs `command` with `applied` in force. The program reads no input, and its output is dropped.
/// Returns `None` after a request to stop.
///
/// # Errors
/// The program cannot be started, or the setting cannot be changed.
pub fn once(
    command: &[OsString],
    applied: &Apply,
    observer: &dyn Observer,
) -> Result<Option<Run>, Error> {
    watched(command, applied, observer, |_| {})
}

/// The same as [`once`]. Calls `look` with the first process repeatedly.
///
/// # Errors
/// The program cannot be started, or the setting cannot be changed.
pub fn watched(
    command: &[OsString],
    applied: &Apply,
    observer: &dyn Observer,
    mut look: impl FnMut(i32),
) -> Result<Option<Run>, Error> {
    let mut program = silent(command)?;
    let effect = Effect::of([("", applied)])?;
    // Both are in force until the end of the run.
    let _loan = match &effect.system[..] {
        [] => None,
        settings => match Loan::take(settings, observer)? {
            Some(loan) => Some(loan),
            None => return Ok(None),
        },
    };
    let library = effect.preload.any().then(Preload::new).transpose()?;
    effect.put(&mut program, library.as_ref().map(Preload::path));
    let mut counter = FaultCounter::new();
    let mut flags = ThpFlags::default();
    let looked = supervised(&mut program, |pid| {
        flags.look(pid);
        look(pid);
    })?;
    let Some((usage, wall)) = looked else {
        return Ok(None);
    };
    let counted = counter.count();
    Ok(Some(Run {
        wall,
        processor: usage.user + usage.system,
        system: usage.system,
        faults: counted.unwrap_or(usage.minor_faults),
        major: usage.major_faults,
        read: usage.read,
        counts_populated: counted.is_none(),
        thp_off: flags.mostly_off(),
        status: usage.status,
        ended: usage.ended,
    }))
}

/// Runs `program` with all processes that it starts. Calls `look` with its identifier repeatedly.
/// Returns the usage and the elapsed seconds, or `None` after a request to stop, which ends the
/// program.
///
/// # Errors
/// The program cannot be started, or a process cannot be killed.
pub fn supervised(
    program: &mut Command,
    mut look: impl FnMut(i32),
) -> Result<Option<(Usage, f64)>, Error> {
    let name = program.get_program().to_owned();
    let failed = |error| Error::host(name.display(), error);
    let begin = Instant::now();
    let supervised = Supervised::spawn(program).map_err(failed)?;
    let (pid, supervisor) = (supervised.pid(), supervised.supervisor());
    let _end = stop::on_request(move || {
        // A signal from the keyboard reaches the program, too.
        _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    });
    // The command ends at once then.
    let _kill = stop::on_repeat(move || end_descendants(supervisor));
    let usage = supervised.wait(stop::requested, || look(pid)).map_err(failed)?;
    let wall = begin.elapsed().as_secs_f64();
    Ok((!stop::requested()).then_some((usage, wall)))
}

/// Returns the command of the program, with empty input and dropped output.
///
/// # Errors
/// `command` is empty.
pub fn silent(command: &[OsString]) -> Result<Command, Error> {
    let (name, args) =
        command.split_first().ok_or_else(|| Error::input("the command", "no program"))?;
    let mut program = Command::new(name);
    program.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(program)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a run with this kernel time, in seconds.
    pub fn run(system: f64, faults: u64) -> Run {
        Run {
            wall: 1.2,
            processor: 1.1,
            system,
            faults,
            major: 0,
            read: 0,
            counts_populated: false,
            thp_off: false,
            status: ExitStatus::default(),
            ended: 0,
        }
    }

    fn faults(command: &[&str], applied: &Apply) -> u64 {
        let command: Vec<_> = command.iter().map(OsString::from).collect();
        let run =
            once(&command, applied, &()).expect("a program that starts").expect("not interrupted");
        assert!(run.status.success(), "{command:?}: {}", run.status);
        run.faults
    }

    /// `dd` allocates a block of 64 MiB, and does not touch the block because there is no data to
    /// copy.
    #[test]
    fn large_blocks_are_populated() {
        let dd = ["dd", "if=/dev/null", "of=/dev/null", "bs=64M"];
        let populated = |bytes| faults(&dd, &Apply::Populate(bytes));
        let counts_populated = FaultCounter::new().count().is_none();
        // A populated page takes no exception.
        assert_eq!(populated(64 << 20) > 16_384, counts_populated);
        assert!(populated(65 << 20) < 8_192, "smaller than the limit");
        assert!(faults(&dd, &Apply::Nothing) < 8_192);
    }

    #[test]
    fn run_detects_that_the_program_disables_huge_pages() {
        let thp_off = |applied: &Apply| {
            let command = ["sleep", "0.2"].map(OsString::from);
            once(&command, applied, &())
                .expect("a program that starts")
                .expect("not interrupted")
                .thp_off
        };
        assert!(thp_off(&Apply::WithoutThp));
        assert!(!thp_off(&Apply::Nothing));
    }

    /// A second test process has input, which the run must not read.
    #[test]
    fn run_reads_no_input() {
        const INNER: &str = "FAULTLESS_TEST_INPUT";
        if std::env::var_os(INNER).is_some() {
            faults(&["sh", "-c", "! read line"], &Apply::Nothing);
            return;
        }
        let mut test = Command::new(std::env::current_exe().expect("a test"));
        test.args(["--exact", "advise::once::tests::run_reads_no_input"]).env(INNER, "1");
        let test = test.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut test = test.expect("a test that starts");
        let mut input = test.stdin.take().expect("piped");
        std::io::Write::write_all(&mut input, b"a line\n").expect("a small input");
        let ended = test.wait_with_output().expect("it ends");
        let output = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success() && output.contains("1 passed"), "{output}");
    }

    #[test]
    fn applied_settings_reach_the_program() {
        let variable = Apply::environment([("MALLOC_MMAP_MAX_", "0".into())]);
        faults(&["sh", "-c", "test \"$MALLOC_MMAP_MAX_\" = 0"], &variable);
        faults(&["sh", "-c", "test -z \"$MALLOC_MMAP_MAX_\""], &Apply::Nothing);
        faults(&["sh", "-c", "grep -q 'THP_enabled:.0' /proc/self/status"], &Apply::WithoutThp);
        let failed =
            once(&["/no/such/program".into()], &Apply::Nothing, &()).expect_err("no such program");
        assert!(failed.to_string().starts_with("/no/such/program: "), "{failed}");
    }
}
