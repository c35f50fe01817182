//! The errors that prevent a machine from running.

use crate::elf::ElfError;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

/// The reason why a machine did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootError {
    /// QEMU is not installed.
    #[error("{program} is not installed: apt-get install qemu-system-x86")]
    NoQemu {
        /// The missing program.
        program: &'static str,
    },
    /// An embedded file is missing in this build.
    #[error("{what} is not in this build: {why}")]
    NotBuilt {
        /// The missing file.
        what: String,
        /// The reason, and a fix.
        why: &'static str,
    },
    /// A file of the host.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The file is no valid program.
    #[error("{}: {error}", path.display())]
    Elf {
        /// The program.
        path: PathBuf,
        /// The error in the program.
        error: ElfError,
    },
    /// A file that the guest's file system cannot hold.
    #[error("{}: {why}", path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: &'static str,
    },
    /// The directory to start in is not there.
    #[error("no directory {directory:?} is in the program's file system")]
    NoDirectory {
        /// The directory.
        directory: OsString,
    },
    /// The files need more memory than the machine has.
    #[error(
        "the files take {files} MiB, and {memory} MiB of memory cannot hold the files twice (as \
         archive and as files)"
    )]
    Memory {
        /// The size of the files, in MiB.
        files: u64,
        /// The size of memory, in MiB.
        memory: u64,
    },
    /// The swap disk's tables need more memory than the machine can give.
    #[error(
        "a swap disk of {swap} MiB needs {tables} MiB of memory for its tables, but the limit is \
         a quarter of the available {memory} MiB"
    )]
    Swap {
        /// The disk, in MiB.
        swap: u64,
        /// The size of the tables, in MiB.
        tables: u64,
        /// The available memory, in MiB.
        memory: u64,
    },
    /// An argument or variable that cannot be passed, because it contains a NUL.
    #[error("{what} {text:?} contains a NUL")]
    Nul {
        /// The kind of the string.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// QEMU itself failed.
    #[error("QEMU: {0}")]
    Qemu(String),
    /// No stock kernel is available.
    #[error("{0}")]
    Linux(String),
}

impl BootError {
    /// Returns a function that makes an error of a file, with its name.
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| Self::File { path, error }
    }
}
