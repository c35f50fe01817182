//! perf as a child process, which receives commands through a pipe.

use super::signals::{self, Signals};
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// The most bytes of a message of perf.
const MESSAGE: u64 = 1000;
/// The times after which perf is ended by SIGTERM, and then by SIGKILL. perf completes its file
/// before it ends.
const PATIENCE: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(60)];
/// The interval at which the end of perf is checked.
const LOOK: Duration = Duration::from_millis(5);

/// A running perf, ended when this is dropped.
pub(super) struct Perf {
    pub(super) child: Child,
    control: Control,
    /// Its standard error.
    messages: File,
}

impl Perf {
    /// Starts perf by `command` with more arguments, with its events disabled.
    pub(super) fn start(mut command: Command, arguments: Vec<OsString>) -> io::Result<Self> {
        let (control, messages) = (Control::new()?, tempfile::tempfile()?);
        command.args(control.arguments()).args(arguments).stderr(messages.try_clone()?);
        // The keyboard's signals reach this process alone, which then ends perf.
        command.process_group(0);
        follow(&mut command);
        Ok(Self { child: command.spawn()?, control, messages })
    }

    /// Enables the events. Returns `false` if perf has ended.
    pub(super) fn enable(&mut self) -> io::Result<bool> {
        self.control.enable(&mut self.child)
    }

    /// Ends perf, which completes its file.
    pub(super) fn end(&mut self) -> io::Result<ExitStatus> {
        end(&mut self.child, PATIENCE)
    }

    /// Returns the beginning of its messages, and a remedy.
    pub(super) fn message(&mut self) -> String {
        let mut text = Vec::new();
        // Without messages, the remedy is the best explanation.
        let _ = self.messages.rewind();
        let _ = (&self.messages).take(MESSAGE).read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        format!("{}\n  remedy: {}", text.trim(), remedy(&text))
    }
}

impl Drop for Perf {
    fn drop(&mut self) {
        // The status is of interest only after a success.
        let _ = self.end();
    }
}

/// Ends `child` by SIGINT, and after the times by SIGTERM and SIGKILL.
fn end(child: &mut Child, patience: [Duration; 2]) -> io::Result<ExitStatus> {
    for (signal, patience) in [libc::SIGINT, libc::SIGTERM].into_iter().zip(patience) {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        // SAFETY: the call touches no memory, and the process is a child that was not reaped.
        unsafe { libc::kill(child.id().cast_signed(), signal) };
        let limit = Instant::now() + patience;
        while child.try_wait()?.is_none() && Instant::now() < limit {
            std::thread::sleep(LOOK);
        }
    }
    if child.try_wait()?.is_none() {
        child.kill()?;
    }
    child.wait()
}

/// The pipes through which perf receives commands and acknowledges them.
struct Control {
    dir: tempfile::TempDir,
    commands: File,
    answers: File,
}

impl Control {
    fn new() -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("faultless-record.").tempdir()?;
        let open = |name: &str| {
            let path = dir.path().join(name);
            let text = CString::new(path.as_os_str().as_bytes())?;
            // SAFETY: the path ends with a zero.
            if unsafe { libc::mkfifo(text.as_ptr(), 0o600) } != 0 {
                return Err(io::Error::last_os_error());
            }
            // An end for both directions opens at once, also without perf.
            File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
        };
        let (commands, answers) = (open("commands")?, open("answers")?);
        Ok(Self { dir, commands, answers })
    }

    fn arguments(&self) -> Vec<OsString> {
        let mut pipes = OsString::from("fifo:");
        pipes.push(self.dir.path().join("commands"));
        pipes.push(",");
        pipes.push(self.dir.path().join("answers"));
        let fixed = ["-k", "monotonic", "-D", "-1", "--control"].map(OsString::from);
        fixed.into_iter().chain([pipes]).collect()
    }

    /// Enables the events of `perf`. Returns `false` if perf has ended.
    fn enable(&self, perf: &mut Child) -> io::Result<bool> {
        (&self.commands).write_all(b"enable\n")?;
        loop {
            match (&self.answers).read(&mut [0; 16]) {
                Ok(1..) => return Ok(true),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ if perf.try_wait()?.is_some() => return Ok(false),
                _ if signals::next().is_some() => {
                    return Err(io::Error::other("interrupted before the recording began"));
                }
                _ => {}
            }
        }
    }
}

/// Prepares `command` to end by SIGINT, and with the calling thread, also if this process is
/// killed.
fn follow(command: &mut Command) {
    let own = std::process::id().cast_signed();
    // SAFETY: between fork and exec the closure makes only calls that are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            Signals::let_through();
            // A shell starts a command behind `&` with SIGINT ignored.
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            if libc::getppid() == own {
                Ok(())
            } else {
                Err(io::Error::from_raw_os_error(libc::ESRCH))
            }
        });
    }
}

/// Returns the remedy for a failure of perf with the message `text`.
fn remedy(text: &str) -> &'static str {
    // The option --control.
    if text.to_lowercase().contains("unknown option") {
        "perf of Linux 5.10 or later, which can start with its events disabled"
    } else {
        "the processes must run, and belong to this user; or record as root"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn perf_ends_by_an_interrupt_that_this_process_ignores() {
        let _alone = super::super::survivors::alone();
        let mut command = Command::new("cat");
        command.arg("/proc/self/status");
        // SAFETY: the closure makes one call, which is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_IGN);
                Ok(())
            });
        }
        follow(&mut command);
        let status = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        assert_eq!(ignored & 1 << (libc::SIGINT - 1), 0, "{status}");
    }

    #[test]
    fn perf_ends_with_its_recorder() {
        let _alone = super::super::survivors::alone();
        let start = || {
            let mut command = Command::new("sleep");
            follow(command.arg("600"));
            command.spawn().unwrap()
        };
        // The signal is sent at the end of the thread that has started the process.
        let mut child = std::thread::spawn(start).join().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
    }

    #[test]
    fn perf_that_ignores_signals_is_killed() {
        let _alone = super::super::survivors::alone();
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' INT TERM; echo; while :; do sleep 0.1; done"]);
        let mut child = shell.stdout(std::process::Stdio::piped()).spawn().unwrap();
        // The shell ignores the signals from here on.
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let status = end(&mut child, [Duration::from_millis(50); 2]).unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn old_perf_has_its_own_remedy() {
        let old =
            "  Error: unknown option `control'\n\n Usage: perf record [<options>] [<command>]";
        assert!(remedy(old).contains("Linux 5.10"));
        assert!(remedy("Permission error").contains("as root"));
    }
}
