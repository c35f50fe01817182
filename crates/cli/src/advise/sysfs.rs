//! The host's settings of huge pages, and their change for a while.
//!
//! A setting is the whole system's. It is changed by a [`Loan`], behind which a process stands that puts it back when the pipe to it
//! ends: when the loan is dropped, and also when the command is killed.

use crate::error::CliError;
use faultless_trace::anticipate::folio::LARGEST;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

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

    /// The orders that all memory gets.
    pub fn always(&self) -> Vec<u8> {
        (SMALLEST..=LARGEST).filter(|order| self.mode(*order) == Mode::Always).collect()
    }
}

/// The keeper of a loan: it ignores what ends the command, waits for the end of its input, and writes the values back.
const KEEPER: &str = "trap '' INT TERM HUP; cat >/dev/null; s=0; while [ $# -ge 2 ]; do printf %s \"$2\" >\"$1\" || s=1; shift 2; \
                      done; exit $s";

/// Settings that are changed until this is dropped.
#[derive(Debug)]
pub struct Loan {
    keeper: Child,
}

impl Loan {
    /// Gives each of the files a value. What was there is put back when the loan is dropped or the process ends, however it does.
    ///
    /// # Errors
    /// A file cannot be read or written; what was changed already is put back.
    pub fn take(changes: &[(PathBuf, &str)]) -> Result<Self, CliError> {
        let failed = |path: &Path| {
            let path = path.display().to_string();
            move |error| CliError::failed(path, error)
        };
        let mut keeper = Command::new("/bin/sh");
        keeper.args(["-c", KEEPER, "faultless-keeper"]);
        for (path, _) in changes {
            let text = fs::read_to_string(path).map_err(failed(path))?;
            keeper.arg(path).arg(chosen(&text));
        }
        // In a group of its own the keyboard does not end it.
        keeper.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let keeper = keeper.spawn().map_err(failed(Path::new("/bin/sh")))?;
        let loan = Self { keeper };
        for (path, value) in changes {
            fs::write(path, value).map_err(failed(path))?;
        }
        Ok(loan)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        // If it fails there is nothing left to do; it has said why.
        let _ = self.keeper.wait();
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
    fn a_loan_is_given_back() {
        let dir = tempfile::tempdir().expect("a directory");
        let [one, other] = ["one", "other"].map(|name| dir.path().join(name));
        fs::write(&one, "always [never]").expect("written");
        fs::write(&other, "7").expect("written");
        let loan = Loan::take(&[(one.clone(), "always"), (other.clone(), "8")]).expect("files");
        let read = |path: &Path| fs::read_to_string(path).expect("there");
        assert_eq!((read(&one), read(&other)), ("always".to_owned(), "8".to_owned()));
        drop(loan);
        assert_eq!((read(&one), read(&other)), ("never".to_owned(), "7".to_owned()));
        // What cannot be changed leaves the rest as it was.
        let missing = dir.path().join("missing");
        assert!(Loan::take(&[(other.clone(), "9"), (missing, "1")]).is_err());
        assert_eq!(read(&other), "7");
    }
}
