//! The host's settings of huge pages, and temporary changes to them.
//!
//! A setting affects the whole system. A [`Loan`] changes it, with a separate [process](lent) that
//! restores the setting when the loan is dropped, and also when the command is killed. Only one
//! command at a time has a loan, and another command waits. Otherwise one command would restore
//! values set by another. The restoring process also holds the lock, so the lock is held until the
//! settings are restored.

use crate::error::Error;
use crate::observer::Observer;
use crate::stop;
use faultless::PAGE_SIZE;
use faultless_trace::anticipate::folio;
use faultless_trace::loan::{self as lent, chosen};
use faultless_trace::resident::host_page_size;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// The directory of the kernel's settings.
pub const THP: &str = "/sys/kernel/mm/transparent_hugepage";
/// The memory that gets folios of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All memory.
    Always,
    /// Memory for which the program requests them.
    Madvise,
    /// No memory.
    Never,
}

impl Mode {
    /// Parses the word in brackets.
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

/// Returns the size of a folio of `order` in KiB, as in the names in sysfs.
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
    /// The setting of all sizes together, which a size may inherit; `None` if the kernel has no
    /// huge pages.
    pub all: Option<Mode>,
    /// The order and the setting of each size, the smallest first. Empty if the kernel has only one
    /// size.
    pub sizes: Vec<(u8, Mode)>,
    /// The order of THP, in pages of 4 KiB: 9, 13 or 17, by the size of a base page.
    pub thp: u8,
}

/// Returns the pages of 4 KiB in a base page of this host.
fn host_small_pages() -> u64 {
    (host_page_size() / PAGE_SIZE).max(1)
}

/// Returns the order of THP on this host.
pub fn host_thp() -> u8 {
    folio::thp(host_small_pages())
}

impl Sizes {
    /// Returns the settings of a host without huge pages, on which THP would have the order `thp`.
    pub const fn none(thp: u8) -> Self {
        Self { all: None, sizes: Vec::new(), thp }
    }

    /// Reads the settings of this host.
    pub fn read() -> Self {
        let all = fs::read_to_string(Path::new(THP).join("enabled")).ok();
        let all = all.map(|text| Mode::of(&text, Mode::Never));
        let size = |order| {
            let text = fs::read_to_string(size_file(order)).ok()?;
            Some((order, Mode::of(&text, all.unwrap_or(Mode::Never))))
        };
        let (smallest, thp) = (folio::smallest(host_small_pages()), host_thp());
        Self { all, sizes: (smallest..=thp).filter_map(size).collect(), thp }
    }

    /// Returns the setting of THP.
    pub fn thp_mode(&self) -> Mode {
        self.mode(self.thp)
    }

    /// Returns the pages of 4 KiB of THP.
    pub const fn thp_pages(&self) -> u64 {
        1 << self.thp
    }

    /// Returns the setting of folios of `order`.
    pub fn mode(&self, order: u8) -> Mode {
        match self.sizes.iter().find(|(size, _)| *size == order) {
            Some((_, mode)) => *mode,
            None if order == self.thp => self.all.unwrap_or(Mode::Never),
            None => Mode::Never,
        }
    }

    /// Returns the orders for memory with a request of the program (`MADV_HUGEPAGE`).
    pub fn asked(&self) -> Vec<u8> {
        (1..=self.thp).filter(|order| self.mode(*order) != Mode::Never).collect()
    }

    /// Returns the orders for all memory.
    pub fn always(&self) -> Vec<u8> {
        (1..=self.thp).filter(|order| self.mode(*order) == Mode::Always).collect()
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
        Self::below(Path::new(THP), host_thp())
    }

    /// Reads the setting below the directory `dir`, with THP of the order `thp`. Since Linux 6.11
    /// each size has a separate file, which inherits the setting of all sizes by default.
    fn below(dir: &Path, thp: u8) -> Self {
        let all = dir.join("shmem_enabled");
        let own = dir.join(format!("hugepages-{}kB/shmem_enabled", kib(thp)));
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

/// The interval at which a command checks for the end of another command's loan.
const LOOKS: Duration = Duration::from_millis(20);

/// Waits for the lock of a directory of settings. Returns `None` if the user interrupted the wait.
fn turn(settings: &Path, observer: &dyn Observer) -> Result<Option<File>, Error> {
    let failed = |error| Error::host(settings.display(), error);
    let turn = File::open(settings).map_err(failed)?;
    let mut noted = false;
    loop {
        match turn.try_lock() {
            Ok(()) => return Ok(Some(turn)),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
            Err(TryLockError::WouldBlock) if stop::requested() => return Ok(None),
            Err(TryLockError::WouldBlock) => {}
        }
        if !noted {
            let place = settings.display();
            observer
                .note(&format!("waits for another command that has changed settings in {place}"));
            noted = true;
        }
        thread::sleep(LOOKS);
    }
}

/// Settings that are changed until this value is dropped. Other commands cannot change them in this
/// time.
#[derive(Debug)]
pub struct Loan {
    _lent: lent::Loan,
}

impl Loan {
    /// Writes a value to each file of `settings`. The earlier values are restored when the loan is
    /// dropped or the process ends in any way. Returns `None` if the user interrupted the wait for
    /// another command's loan.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn take(
        settings: &[(PathBuf, String)],
        observer: &dyn Observer,
    ) -> Result<Option<Self>, Error> {
        let Some(turn) = turn(Path::new(THP), observer)? else { return Ok(None) };
        let changes: Vec<_> = settings.iter().map(|(file, value)| (&**file, &**value)).collect();
        Self::keep(turn, &changes).map(Some)
    }

    /// Permits programs to request folios of `order`. Changes no setting if such requests are
    /// permitted already.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn permit(order: u8, observer: &dyn Observer) -> Result<Option<Self>, Error> {
        let Some(turn) = turn(Path::new(THP), observer)? else { return Ok(None) };
        // Read under the lock, because the earlier value may have been set by another command.
        let file = size_file(order);
        let change = permission(Sizes::read().mode(order)).map(|value| (&*file, value));
        Self::keep(turn, change.as_slice()).map(Some)
    }

    /// Permits programs to request huge pages in shared memory, unless such requests are permitted
    /// already.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn permit_shared(observer: &dyn Observer) -> Result<Option<Self>, Error> {
        let Some(turn) = turn(Path::new(THP), observer)? else { return Ok(None) };
        let shmem = Shmem::read();
        let file = shmem.file.as_deref().filter(|_| shmem.mode == Mode::Never);
        let changes: Vec<_> = file.map(|file| (file, "advise")).into_iter().collect();
        Self::keep(turn, &changes).map(Some)
    }

    /// Writes a value to each of the files. If a file cannot be changed, the earlier changes are
    /// undone.
    fn keep(turn: File, changes: &[(&Path, &str)]) -> Result<Self, Error> {
        let lent = lent::Loan::exclusive(turn, changes).map_err(|(path, error)| {
            let path = path.display();
            match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    let why = "changes of system-wide settings need root: run the command as root, or without --sysfs";
                    Error::run(path, format_args!("{error}; {why}"))
                }
                _ => Error::host(path, error),
            }
        })?;
        Ok(Self { _lent: lent })
    }
}

/// Returns the value that permits requests; `None` if `mode` permits requests already.
fn permission(mode: Mode) -> Option<&'static str> {
    (mode == Mode::Never).then_some("madvise")
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
        let sizes = Sizes { all: Some(Mode::Always), sizes: vec![(4, Mode::Never)], thp: 9 };
        assert_eq!((sizes.mode(4), sizes.mode(5)), (Mode::Never, Mode::Never));
        // Linux before 6.8 has one size.
        assert_eq!(sizes.always(), [9]);
        assert_eq!((sizes.thp_mode(), sizes.thp_pages()), (Mode::Always, 512));
    }

    #[test]
    fn setting_without_a_size_is_of_thp_of_the_base_page() {
        for (small, thp, name) in [(4, 13, "32768kB"), (16, 17, "524288kB")] {
            let all = Some(Mode::Madvise);
            let listed = vec![(9, Mode::Always), (folio::smallest(small), Mode::Never)];
            let sizes = Sizes { all, sizes: listed, thp: folio::thp(small) };
            // Here 2 MiB are a size of mTHP.
            assert_eq!((sizes.asked(), sizes.always()), (vec![9, thp], vec![9]));
            assert_eq!(sizes.thp_mode(), Mode::Madvise);
            assert!(size_file(thp).ends_with(format!("hugepages-{name}/enabled")));
        }
    }

    #[test]
    fn setting_of_shared_memory_follows_its_size() {
        let dir = tempfile::tempdir().expect("a directory");
        let shmem = || Shmem::below(dir.path(), 9);
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
        // Base pages of 64 KiB: the setting of 2 MiB is not of THP.
        write("advise");
        let large = Shmem::below(dir.path(), 17);
        assert_eq!((large.mode, large.file), (Madvise, Some(all.clone())));
    }

    #[test]
    fn permission_changes_only_a_setting_without_requests() {
        let values = [Mode::Always, Mode::Madvise, Mode::Never].map(permission);
        assert_eq!(values, [None, None, Some("madvise")]);
    }

    #[test]
    fn second_loan_waits_for_the_first() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        fs::write(&file, "[never]").expect("written");
        let take = |value| {
            let turn = turn(dir.path(), &()).expect("a directory").expect("not interrupted");
            Loan::keep(turn, &[(&file, value)]).expect("a file")
        };
        let first = take("always");
        let waited = thread::scope(|scope| {
            let second = scope.spawn(|| drop(take("madvise")));
            thread::sleep(5 * LOOKS);
            let waits = !second.is_finished();
            drop(first);
            waits
        });
        assert!(waited);
        assert_eq!(fs::read_to_string(&file).expect("there"), "never");
        let turn = turn(dir.path(), &()).expect("a directory").expect("not interrupted");
        let error = Loan::keep(turn, &[(&dir.path().join("missing"), "1")]);
        assert!(error.expect_err("no file").to_string().contains("missing"));
    }
}
