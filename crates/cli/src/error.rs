//! The ways in which a command can fail, and their exit codes.

use std::fmt;
use std::io;

/// The reason for the failure of a command.
#[derive(Debug)]
pub enum CliError {
    /// The arguments are wrong, or an input file is missing or unusable. No run has started.
    Usage(String),
    /// The requested operation has failed.
    Failed(String),
    /// Standard output was closed by its reader.
    Closed,
}

impl CliError {
    /// Returns the exit code. A closed output is a success: its reader, such as `head`, has read
    /// enough.
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) => 1,
            Self::Closed => 0,
        }
    }

    /// Creates a failure with the operation (`doing`) and the reason (`why`).
    pub fn failed(doing: impl fmt::Display, why: impl fmt::Display) -> Self {
        Self::Failed(format!("{doing}: {why}"))
    }

    /// Returns the errors of `results`, such as those of files that are written one after the
    /// other, as one error.
    pub fn together(results: impl IntoIterator<Item = Result<(), Self>>) -> Result<(), Self> {
        let mut errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
        match errors.len() {
            0 => Ok(()),
            1 => Err(errors.remove(0)),
            _ => {
                let texts: Vec<_> = errors.iter().map(Self::to_string).collect();
                Err(Self::Failed(texts.join("\n")))
            }
        }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(what) | Self::Failed(what) => f.write_str(what),
            Self::Closed => f.write_str("standard output was closed"),
        }
    }
}

/// Errors of writing to standard output.
impl From<io::Error> for CliError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::failed("standard output", error),
        }
    }
}

/// Errors of measurements and predictions; wrong inputs are bad arguments.
impl From<faultless_analysis::Error> for CliError {
    fn from(error: faultless_analysis::Error) -> Self {
        match error {
            faultless_analysis::Error::Closed => Self::Closed,
            error if error.is_input() => Self::Usage(error.to_string()),
            error => Self::Failed(error.to_string()),
        }
    }
}
