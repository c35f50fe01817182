//! Temporary changes of settings of the system, restored by a separate process.
//!
//! The process restores the settings when the pipe to the process is closed: when the [`Loan`] is
//! dropped, and also when the command is killed. The process also holds the lock of the loan, and
//! writes only with the exclusive lock. With a shared lock, several commands have the same value at
//! a time. The settings are then restored after the last of these commands.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The process that restores the settings. It ignores the signals that end the command, waits for
/// the end of its input and for the exclusive lock, and writes the values back. On a system without
/// `flock`, the process does not wait for other commands.
const KEEPER: &str = "trap '' INT TERM HUP; cat >/dev/null; flock -x 1 2>/dev/null; s=0; \
                      while [ $# -ge 2 ]; do printf %s \"$2\" >\"$1\" || s=1; shift 2; done; exit $s";

/// The longest time for which a dropped loan with a shared lock waits for the restoration.
const PATIENCE: Duration = Duration::from_secs(1);
/// The interval at which a dropped loan checks for the restoration.
const LOOKS: Duration = Duration::from_millis(5);

/// Settings that are changed until this value is dropped or the process ends in any way.
#[derive(Debug)]
pub struct Loan {
    /// `None` if no change was necessary.
    keeper: Option<Child>,
    _lock: File,
    shared: bool,
}

impl Loan {
    /// Writes a value to each of the files. The `lock` is locked exclusively. If a file cannot be
    /// changed, the earlier changes are undone.
    ///
    /// # Errors
    /// The file that cannot be read, written or executed, with the error.
    pub fn exclusive(lock: File, changes: &[(&Path, &str)]) -> Result<Self, (PathBuf, io::Error)> {
        Self::take(lock, changes, false)
    }

    /// Writes `value` to `file`, unless `file` has this value. Other commands can take this loan at
    /// the same time.
    ///
    /// # Errors
    /// As [`exclusive`](Self::exclusive).
    pub fn shared(file: &Path, value: &str) -> Result<Self, (PathBuf, io::Error)> {
        let failed = |error| (file.to_owned(), error);
        // Detects a file that cannot be changed before a process is started.
        drop(File::options().write(true).open(file).map_err(failed)?);
        let lock = File::open(file).map_err(failed)?;
        // Waits only while another command restores the value.
        lock.lock_shared().map_err(failed)?;
        let present = fs::read_to_string(file).map_err(failed)?;
        let change = [(file, value)];
        let changes = if chosen(&present) == value { &[] } else { &change[..] };
        Self::take(lock, changes, true)
    }

    fn take(
        lock: File,
        changes: &[(&Path, &str)],
        shared: bool,
    ) -> Result<Self, (PathBuf, io::Error)> {
        if changes.is_empty() {
            return Ok(Self { keeper: None, _lock: lock, shared });
        }
        let failed = |path: &Path| {
            let path = path.to_owned();
            |error| (path, error)
        };
        let shell = Path::new("/bin/sh");
        let mut keeper = Command::new(shell);
        keeper.args(["-c", KEEPER, "faultless-keeper"]);
        for (path, _) in changes {
            let text = fs::read_to_string(path).map_err(failed(path))?;
            keeper.arg(path).arg(chosen(&text));
        }
        // The process prints no output: its standard output is the lock. A separate process group
        // protects it from signals of the keyboard.
        let copy = lock.try_clone().map_err(failed(shell))?;
        keeper.process_group(0).stdin(Stdio::piped()).stdout(copy);
        let keeper = keeper.spawn().map_err(failed(shell))?;
        let loan = Self { keeper: Some(keeper), _lock: lock, shared };
        for (path, value) in changes {
            fs::write(path, value).map_err(failed(path))?;
        }
        Ok(loan)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let Some(keeper) = &mut self.keeper else { return };
        drop(keeper.stdin.take());
        // A failure cannot be handled here, and the process has reported it.
        if !self.shared {
            let _ = keeper.wait();
            return;
        }
        // Another command may keep its loan for a long time.
        let limit = Instant::now() + PATIENCE;
        while matches!(keeper.try_wait(), Ok(None)) && Instant::now() < limit {
            thread::sleep(LOOKS);
        }
    }
}

/// Returns the chosen word of a settings file, in the form that can be written back.
pub fn chosen(text: &str) -> &str {
    let word = text.split('[').nth(1).and_then(|rest| rest.split(']').next());
    word.unwrap_or(text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locked(dir: &Path) -> File {
        let lock = File::open(dir).unwrap();
        lock.lock().unwrap();
        lock
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap()
    }

    /// Waits until `file` contains `value`.
    fn await_value(file: &Path, value: &str) {
        let limit = Instant::now() + Duration::from_secs(30);
        while read(file) != value {
            assert!(Instant::now() < limit, "{}", read(file));
            thread::sleep(LOOKS);
        }
    }

    #[test]
    fn dropped_loan_restores_the_settings() {
        let dir = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| dir.path().join(name));
        fs::write(&one, "always [never]").unwrap();
        fs::write(&other, "7").unwrap();
        let changes: [(&Path, &str); 2] = [(&one, "always"), (&other, "8")];
        let loan = Loan::exclusive(locked(dir.path()), &changes).unwrap();
        assert_eq!((read(&one), read(&other)), ("always".to_owned(), "8".to_owned()));
        drop(loan);
        assert_eq!((read(&one), read(&other)), ("never".to_owned(), "7".to_owned()));
        // After a failed change the other settings have their earlier values.
        let missing = dir.path().join("missing");
        let changes: [(&Path, &str); 2] = [(&other, "9"), (&missing, "1")];
        assert!(Loan::exclusive(locked(dir.path()), &changes).is_err());
        assert_eq!(read(&other), "7");
    }

    /// A second loan waits until the first has restored its settings, even if the command of the
    /// first has ended and only its restoring process is left.
    #[test]
    fn restoring_process_holds_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "[never]").unwrap();
        let change = [(&*file, "always")];
        let mut first = Loan::exclusive(locked(dir.path()), &change).unwrap();
        // The first command's lock ends before its restoring process, as if the command were
        // killed.
        let mut orphan = first.keeper.take().unwrap();
        drop(first);
        assert!(File::open(dir.path()).unwrap().try_lock().is_err());
        drop(orphan.stdin.take());
        assert!(orphan.wait().unwrap().success());
        assert_eq!(read(&file), "never");
        locked(dir.path());
    }

    #[test]
    fn shared_setting_is_restored_after_the_last_loan() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "65536\n").unwrap();
        let take = || Loan::shared(&file, "4096").unwrap();
        let first = take();
        let second = take();
        drop(first);
        assert_eq!(read(&file), "4096", "the second loan is not over");
        let third = take();
        drop(second);
        assert_eq!(read(&file), "4096", "the third loan is not over");
        drop(third);
        await_value(&file, "65536");
        // A command that is killed closes the pipe, and waits for nothing.
        let mut killed = take();
        let mut orphan = killed.keeper.take().unwrap();
        drop((orphan.stdin.take(), killed));
        await_value(&file, "65536");
        assert!(orphan.wait().unwrap().success());
    }
}
