//! The reasons for which a recording fails, with remedies.

use super::program;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

/// A requirement of a recording that this system does not meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// The missing part.
    pub what: String,
    /// The remedy.
    pub remedy: String,
}

impl Shortfall {
    pub(super) fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { what: what.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  remedy: {}", self.what, self.remedy)
    }
}

/// The reason for a failed recording.
#[derive(Debug)]
pub enum RecordError {
    /// This system does not meet the requirements of a recording.
    Missing(Vec<Shortfall>),
    /// The program or perf could not be run.
    Run(String, io::Error),
    /// perf ended without a recording that can be read back, and the reason.
    Perf(ExitStatus, String),
    /// The recording has no fault, which is impossible for a program that ran.
    NoFaults(PathBuf),
    /// The running processes cannot be recorded: the subject, the reason and the remedy.
    Subject(String, String),
    /// A signal ended the reading of the recording.
    Stopped,
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(shortfalls) => {
                f.write_str("this system cannot make a recording yet:")?;
                shortfalls.iter().try_for_each(|shortfall| write!(f, "\n- {shortfall}"))
            }
            Self::Run(what, error) => write!(f, "cannot run {what}: {error}"),
            Self::Perf(status, why) => {
                write!(f, "perf record ended with {status} and no recording: {why}")
            }
            Self::Subject(subject, why) => write!(f, "{subject}: {why}"),
            Self::Stopped => {
                f.write_str("interrupted while the recording was read back: nothing is written")
            }
            Self::NoFaults(program) if program::changes_user(program) => write!(
                f,
                "{} runs as another user (setuid, setgid or capabilities), and the kernel stops \
                 the recording of such a program at its start\n  remedy: record as root",
                program.display()
            ),
            Self::NoFaults(program) => write!(
                f,
                "no fault of {} was recorded: the kernel does not permit the recording, or the \
                 program executed another program that runs as another user (setuid)\n  remedy: \
                 record as root",
                program.display()
            ),
        }
    }
}

impl std::error::Error for RecordError {}
