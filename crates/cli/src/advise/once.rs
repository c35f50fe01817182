//! One run of the program without a recorder, and what it took.

use super::items::Apply;
use super::preload::Preload;
use super::sysfs::Loan;
use crate::error::CliError;
use crate::interrupt;
use nix::sys::prctl::set_thp_disable;
use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::signal::{Signal, kill};
use nix::sys::time::TimeValLike;
use nix::unistd::Pid;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

/// What a run took, with all processes that it waited for.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Seconds.
    pub wall: f64,
    /// Seconds of processor time, the program's and the kernel's.
    pub processor: f64,
    /// The kernel's part.
    pub system: f64,
    /// Faults that needed no disk.
    pub faults: u64,
    /// How it ended.
    pub status: ExitStatus,
}

/// Runs `command` with `applied` in force. It reads nothing, and what it prints is dropped. `None` where the user interrupted it.
pub fn once(command: &[OsString], applied: &Apply) -> Result<Option<Run>, CliError> {
    let (name, args) = command.split_first().ok_or_else(|| CliError::Usage("no program".into()))?;
    let failed = |error| CliError::failed(name.display(), error);
    let mut program = Command::new(name);
    program.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let (mut _loan, mut _library) = (None, None);
    match applied {
        Apply::Nothing => {}
        Apply::Environment(variables) => {
            program.envs(variables.iter().map(|(name, value)| (*name, joined(name, value))));
        }
        Apply::Sysfs(file, value) => _loan = Some(Loan::take(&[(file.clone(), *value)])?),
        Apply::WithoutThp => {
            // SAFETY: between fork and exec one async-signal-safe call is made, prctl.
            unsafe { program.pre_exec(|| set_thp_disable(true).map_err(std::io::Error::from)) };
        }
        Apply::Populate(bytes) => {
            let library = Preload::new()?;
            program.envs(library.environment(*bytes));
            _library = Some(library);
        }
    }
    let children = || getrusage(UsageWho::RUSAGE_CHILDREN).map_err(|error| failed(error.into()));
    let before = children()?;
    let begin = Instant::now();
    let mut child = program.spawn().map_err(failed)?;
    let pid = i32::try_from(child.id()).map(Pid::from_raw);
    let guard = interrupt::on_request(move || {
        // From the keyboard it comes to the program, too.
        _ = pid.map(|pid| kill(pid, Signal::SIGTERM));
    });
    let status = child.wait().map_err(failed)?;
    let wall = begin.elapsed().as_secs_f64();
    drop(guard);
    let after = children()?;
    if interrupt::requested() {
        return Ok(None);
    }
    let seconds = |time: fn(&Usage) -> nix::sys::time::TimeVal| {
        (time(&after).num_microseconds() - time(&before).num_microseconds()) as f64 / 1e6
    };
    let (user, system) = (seconds(Usage::user_time), seconds(Usage::system_time));
    let faults = (after.minor_page_faults() - before.minor_page_faults()).cast_unsigned();
    Ok(Some(Run { wall, processor: user + system, system, faults, status }))
}

/// The value of a variable that may have one: both take effect where the variable is a list.
fn joined(name: &str, value: &str) -> OsString {
    let separator = match name {
        "GLIBC_TUNABLES" => ":",
        "GODEBUG" => ",",
        "JAVA_TOOL_OPTIONS" => " ",
        _ => return value.into(),
    };
    match std::env::var_os(name).filter(|before| !before.is_empty()) {
        None => value.into(),
        Some(mut before) => {
            before.push(separator);
            before.push(value);
            before
        }
    }
}
