//! The host's settings of huge pages, and their change for a while.
//!
//! A setting is the whole system's. It is changed by a [`Loan`], behind which a process stands that puts it back when the pipe to it
//! ends: when the loan is dropped, and also when the command is killed. One command at a time has a loan: another waits, or one of them would
//! put back what the other had set. The lock is that process's too, so it is held until the settings are back.

use crate::error::CliError;
use crate::interrupt;
use crate::report::say;
use faultless_trace::anticipate::folio::LARGEST;
use std::fs::{self, File, TryLockError};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

/// Where the kernel has them.
pub const THP: &str = "/sys/kernel/mm/transparent_hugepage";
/// The smallest folio of anonymous memory: 16 KiB.
pub const SMALLEST: u8 = 2;

/// Who gets folios of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All memory.
    Always,
    /// Memory for which the program asks.
    Madvise,
    /// Nobody.
    Never,
}

impl Mode {
    /// The word in brackets.
    fn of(text: &str, inherited: Self) -> Self {
        let word = text.split('[').nth(1).and_then(|rest| rest.split(']').next());
        match word {
            Some("always") => Self::Always,
            Some("madvise") => Self::Madvise,
            Some("inherit") => inherited,
            _ => Self::Never,
        }
    }
}

/// Bytes of a folio of `order` in KiB, as sysfs names sizes.
pub fn kib(order: u8) -> u64 {
    4 << order
}

/// The file with the setting of folios of `order`.
pub fn size_file(order: u8) -> PathBuf {
    Path::new(THP).join(format!("hugepages-{}kB/enabled", kib(order)))
}

/// The settings of huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Those of all sizes together, which a size may inherit; `None` where the kernel has no huge pages.
    pub all: Option<Mode>,
    /// By size, the smallest first: its order and its setting. None where the kernel has one size alone.
    pub sizes: Vec<(u8, Mode)>,
}

impl Sizes {
    /// Of this host.
    pub fn read() -> Self {
        let all = fs::read_to_string(Path::new(THP).join("enabled")).ok();
        let all = all.map(|text| Mode::of(&text, Mode::Never));
        let size = |order| {
            let text = fs::read_to_string(size_file(order)).ok()?;
            Some((order, Mode::of(&text, all.unwrap_or(Mode::Never))))
        };
        let sizes = (SMALLEST..=LARGEST).filter_map(size).collect();
        Self { all, sizes }
    }

    /// What folios of `order` are set to.
    pub fn mode(&self, order: u8) -> Mode {
        match self.sizes.iter().find(|(size, _)| *size == order) {
            Some((_, mode)) => *mode,
            None if order == LARGEST => self.all.unwrap_or(Mode::Never),
            None => Mode::Never,
        }
    }

    /// The orders that memory gets for which the program asks (`MADV_HUGEPAGE`).
    pub fn asked(&self) -> Vec<u8> {
        (SMALLEST..=LARGEST).filter(|order| self.mode(*order) != Mode::Never).collect()
    }

    /// The orders that all memory gets.
    pub fn always(&self) -> Vec<u8> {
        (SMALLEST..=LARGEST).filter(|order| self.mode(*order) == Mode::Always).collect()
    }
}

/// The setting of huge pages for shared anonymous memory, System V's segments and memfd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shmem {
    /// Memory that gets huge pages.
    pub mode: Mode,
    /// The word of the setting, for the user.
    pub word: String,
    /// The file to change; `None` if the kernel has no huge pages for shared memory.
    pub file: Option<PathBuf>,
}

impl Shmem {
    /// A kernel without huge pages for shared memory.
    pub const NONE: Self = Self { mode: Mode::Never, word: String::new(), file: None };

    /// Reads the setting of this host.
    pub fn read() -> Self {
        Self::below(Path::new(THP))
    }

    /// Reads the setting below the directory `dir`. Since Linux 6.11 each size has a file of its own,
    /// which inherits the setting of all sizes by default.
    fn below(dir: &Path) -> Self {
        let all = dir.join("shmem_enabled");
        let own = dir.join(format!("hugepages-{}kB/shmem_enabled", kib(LARGEST)));
        let Ok(text) = fs::read_to_string(&all) else { return Self::NONE };
        let word = chosen(&text).to_owned();
        let of_size = fs::read_to_string(&own).map(|text| chosen(&text).to_owned());
        // `deny` and `force` of all sizes take effect before the setting of a size.
        let (word, file) = match of_size {
            Ok(of_size) if of_size != "inherit" && word != "deny" && word != "force" => {
                (of_size, own)
            }
            _ => (word, all),
        };
        let mode = match &*word {
            "always" | "within_size" | "force" => Mode::Always,
            "advise" => Mode::Madvise,
            _ => Mode::Never,
        };
        Self { mode, word, file: Some(file) }
    }
}

/// The keeper of a loan: it ignores what ends the command, waits for the end of its input, and writes the values back.
const KEEPER: &str = "trap '' INT TERM HUP; cat >/dev/null; s=0; while [ $# -ge 2 ]; do printf %s \"$2\" >\"$1\" || s=1; shift 2; \
                      done; exit $s";

/// How often a command looks whether another one's loan has ended.
const LOOKS: Duration = Duration::from_millis(20);

/// The lock of a directory of settings, once no other command has it. `None` where the user interrupted the wait.
fn turn(settings: &Path) -> Result<Option<File>, CliError> {
    let failed = |error| CliError::failed(settings.display(), error);
    let turn = File::open(settings).map_err(failed)?;
    let mut told = false;
    loop {
        match turn.try_lock() {
            Ok(()) => return Ok(Some(turn)),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
            Err(TryLockError::WouldBlock) if interrupt::requested() => return Ok(None),
            Err(TryLockError::WouldBlock) => {}
        }
        if !told {
            let place = settings.display();
            say!("faultless: waits for another command that has changed settings in {place}");
            told = true;
        }
        thread::sleep(LOOKS);
    }
}

/// Settings that are changed until this is dropped, and that no other command changes meanwhile.
#[derive(Debug)]
pub struct Loan {
    /// None where nothing had to be changed.
    keeper: Option<Child>,
    _turn: File,
}

impl Loan {
    /// Gives a setting of huge pages a value. What was there is put back when the loan is dropped or the process ends, however it does.
    /// `None` where the user interrupted the wait for another command's loan.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn take(file: &Path, value: &str) -> Result<Option<Self>, CliError> {
        let Some(turn) = turn(Path::new(THP))? else { return Ok(None) };
        Self::keep(turn, &[(file, value)]).map(Some)
    }

    /// Lets programs ask for folios of `order`, if they may not by now; the same otherwise.
    pub fn permit(order: u8) -> Result<Option<Self>, CliError> {
        let Some(turn) = turn(Path::new(THP))? else { return Ok(None) };
        // Read under the lock: before, it may have been another command's.
        let changes = [(&*size_file(order), "madvise")];
        let changes = if Sizes::read().mode(order) == Mode::Never { &changes[..] } else { &[] };
        Self::keep(turn, changes).map(Some)
    }

    /// Lets programs ask for huge pages in shared memory, if they may not by now.
    pub fn permit_shared() -> Result<Option<Self>, CliError> {
        let Some(turn) = turn(Path::new(THP))? else { return Ok(None) };
        let shmem = Shmem::read();
        let file = shmem.file.as_deref().filter(|_| shmem.mode == Mode::Never);
        let changes: Vec<_> = file.map(|file| (file, "advise")).into_iter().collect();
        Self::keep(turn, &changes).map(Some)
    }

    /// Gives each of the files a value. If one cannot be changed, what was changed already is put back.
    fn keep(turn: File, changes: &[(&Path, &str)]) -> Result<Self, CliError> {
        if changes.is_empty() {
            return Ok(Self { keeper: None, _turn: turn });
        }
        let failed = |path: &Path| {
            let path = path.display().to_string();
            move |error| CliError::failed(path, error)
        };
        let shell = Path::new("/bin/sh");
        let mut keeper = Command::new(shell);
        keeper.args(["-c", KEEPER, "faultless-keeper"]);
        for (path, _) in changes {
            let text = fs::read_to_string(path).map_err(failed(path))?;
            keeper.arg(path).arg(chosen(&text));
        }
        // It prints nothing: its output is the lock. In a group of its own the keyboard does not end it.
        let lock = turn.try_clone().map_err(failed(shell))?;
        keeper.process_group(0).stdin(Stdio::piped()).stdout(lock);
        let keeper = keeper.spawn().map_err(failed(shell))?;
        let loan = Self { keeper: Some(keeper), _turn: turn };
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
        // If it fails there is nothing left to do; it has said why.
        let _ = keeper.wait();
    }
}

/// What a file of settings says that is chosen, as it is to be written back.
fn chosen(text: &str) -> &str {
    let word = text.split('[').nth(1).and_then(|rest| rest.split(']').next());
    word.unwrap_or(text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_the_kernel_writes_them() {
        assert_eq!(Mode::of("always [madvise] never", Mode::Never), Mode::Madvise);
        assert_eq!(Mode::of("always [inherit] madvise never", Mode::Always), Mode::Always);
        assert_eq!(Mode::of("", Mode::Always), Mode::Never);
        assert_eq!((chosen("always inherit [never]\n"), chosen("4096\n")), ("never", "4096"));
        assert!(size_file(4).ends_with("hugepages-64kB/enabled"));
        let sizes = Sizes { all: Some(Mode::Always), sizes: vec![(4, Mode::Never)] };
        assert_eq!((sizes.mode(4), sizes.mode(5)), (Mode::Never, Mode::Never));
        // Linux before 6.8 has one size.
        assert_eq!(sizes.always(), [9]);
    }

    #[test]
    fn the_setting_of_shared_memory_is_that_of_its_size() {
        let dir = tempfile::tempdir().expect("a directory");
        let shmem = || Shmem::below(dir.path());
        assert_eq!(shmem(), Shmem::NONE);
        let all = dir.path().join("shmem_enabled");
        let write = |word: &str| fs::write(&all, format!("x [{word}] y")).expect("written");
        let mut modes = Vec::new();
        for word in ["always", "within_size", "force", "advise", "never", "deny"] {
            write(word);
            modes.push(shmem().mode);
            assert_eq!((shmem().word.as_str(), shmem().file), (word, Some(all.clone())));
        }
        use Mode::{Always, Madvise, Never};
        assert_eq!(modes, [Always, Always, Always, Madvise, Never, Never]);
        let own = dir.path().join("hugepages-2048kB/shmem_enabled");
        fs::create_dir(own.parent().expect("below")).expect("a directory");
        fs::write(&own, "always [inherit] never").expect("written");
        write("advise");
        assert_eq!((shmem().mode, shmem().file), (Madvise, Some(all.clone())));
        fs::write(&own, "always inherit [never]").expect("written");
        assert_eq!((shmem().mode, shmem().file), (Never, Some(own)));
        write("force");
        assert_eq!((shmem().mode, shmem().file), (Always, Some(all.clone())));
    }

    #[test]
    fn a_loan_is_given_back() {
        let dir = tempfile::tempdir().expect("a directory");
        let [one, other] = ["one", "other"].map(|name| dir.path().join(name));
        fs::write(&one, "always [never]").expect("written");
        fs::write(&other, "7").expect("written");
        let turn = || turn(dir.path()).expect("a directory").expect("nobody interrupts it");
        let changes: [(&Path, &str); 2] = [(&one, "always"), (&other, "8")];
        let loan = Loan::keep(turn(), &changes).expect("files");
        let read = |path: &Path| fs::read_to_string(path).expect("there");
        assert_eq!((read(&one), read(&other)), ("always".to_owned(), "8".to_owned()));
        drop(loan);
        assert_eq!((read(&one), read(&other)), ("never".to_owned(), "7".to_owned()));
        // What cannot be changed leaves the rest as it was.
        let missing = dir.path().join("missing");
        let changes: [(&Path, &str); 2] = [(&other, "9"), (&missing, "1")];
        assert!(Loan::keep(turn(), &changes).is_err());
        assert_eq!(read(&other), "7");
    }

    /// A second loan waits until the first has put back what it found, also when its command is gone and the keeper alone is left.
    #[test]
    fn loans_follow_each_other() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        fs::write(&file, "[never]").expect("written");
        let take = |value| {
            let turn = turn(dir.path()).expect("a directory").expect("nobody interrupts it");
            Loan::keep(turn, &[(&file, value)]).expect("a file")
        };
        let mut first = take("always");
        // The first command's own lock ends before its keeper, as if it were killed.
        let orphan = first.keeper.take().expect("it was changed");
        drop(first);
        let waited = thread::scope(|scope| {
            let second = scope.spawn(|| {
                drop(take("madvise"));
            });
            thread::sleep(5 * LOOKS);
            let waits = !second.is_finished();
            let mut orphan = orphan;
            drop(orphan.stdin.take());
            orphan.wait().expect("it ends");
            waits
        });
        assert!(waited);
        assert_eq!(fs::read_to_string(&file).expect("there"), "never");
    }
}
