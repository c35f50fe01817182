//! What can keep a machine from running.

use crate::elf::ElfError;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

/// Why a machine did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootError {
    /// QEMU is not installed.
    #[error("{program} is not installed: apt-get install qemu-system-x86")]
    NoQemu {
        /// The program that was looked for.
        program: &'static str,
    },
    /// Something of ours is not in this build.
    #[error("{what} is not in this build: {why}")]
    NotBuilt {
        /// What is missing.
        what: String,
        /// Why, and what mends it.
        why: &'static str,
    },
    /// A file of the host.
    #[error("{}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What happened.
        error: io::Error,
    },
    /// The program is none that could run.
    #[error("{}: {error}", path.display())]
    Elf {
        /// The program.
        path: PathBuf,
        /// What is wrong with it.
        error: ElfError,
    },
    /// A file that the guest's file system cannot hold.
    #[error("{}: {why}", path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// What is in the way.
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
        "the files take {files} MiB, which {memory} MiB of memory do not hold twice (as archive \
         and as files)"
    )]
    Memory {
        /// What the files take, in MiB.
        files: u64,
        /// What there is, in MiB.
        memory: u64,
    },
    /// The swap disk's tables need more memory than the machine can give.
    #[error(
        "a swap disk of {swap} MiB needs {tables} MiB of memory for its tables, and they get no more than a \
         quarter of the {memory} MiB that there are"
    )]
    Swap {
        /// The disk, in MiB.
        swap: u64,
        /// What it needs, in MiB.
        tables: u64,
        /// What there is, in MiB.
        memory: u64,
    },
    /// An argument or variable that cannot be handed over.
    #[error("{what} {text:?} has a NUL inside")]
    Nul {
        /// What it is.
        what: &'static str,
        /// Its text.
        text: String,
    },
    /// QEMU itself would not.
    #[error("QEMU: {0}")]
    Qemu(String),
    /// A stock kernel cannot be had.
    #[error("{0}")]
    Linux(String),
}

impl BootError {
    /// An error of a file, with its name.
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| Self::File { path, error }
    }
}
