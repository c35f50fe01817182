//! The ways in which a measurement or a prediction can fail.

use crate::number::size;
use crate::replay::native::ReplayError;
use crate::suggest;
use faultless_virtual::profile::ProfileError;
use faultless_workload::ParamError;
use std::fmt;
use std::io;

/// A failure: the input or the operation, the reason, and the remedy if one is known.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An input cannot be used.
    #[error("{what}: {why}")]
    Input {
        /// The name of the input.
        what: String,
        /// The reason, and the remedy.
        why: String,
    },
    /// A recording or a trace cannot be read. The error names the file.
    #[error(transparent)]
    Trace(faultless_trace::Error),
    /// A bundled recording is damaged.
    #[error(transparent)]
    Bundled(faultless_trace::Error),
    /// A workload does not accept its parameters.
    #[error("{}", explained(.0))]
    Parameter(ParamError),
    /// The parameters of a comparison do not fit its number of threads.
    #[error(transparent)]
    Sizes(ParamError),
    /// A bundled profile is invalid.
    #[error(transparent)]
    Profile(ProfileError),
    /// A knob does not accept a value.
    #[error("{what}: {why}")]
    Setting {
        /// The knob, with its value or with the run that has this value.
        what: String,
        /// The reason.
        why: String,
    },
    /// The host has too little memory.
    #[error(
        "{what}: needs {} of memory; {} are available {limit}, and {} of them are reserved for other programs: use a smaller \
         size or fewer CPUs, or end other programs",
        size(*needed), size(*available), size(*spare)
    )]
    Memory {
        /// The purpose of the memory.
        what: String,
        /// Bytes that are required.
        needed: u64,
        /// Bytes that are available.
        available: u64,
        /// The limit that determines the available memory, as the end of a sentence.
        limit: &'static str,
        /// Bytes of the available memory that stay with other processes.
        spare: u64,
    },
    /// A call of the host's kernel failed.
    #[error("{what}: {source}")]
    Host {
        /// The operation or the file.
        what: String,
        /// The error of the call.
        source: io::Error,
    },
    /// A machine cannot be created.
    #[error("{what}: {why}")]
    Machine {
        /// The kind of the machine, with its size.
        what: String,
        /// The reason.
        why: String,
    },
    /// A run failed.
    #[error("{what}: {why}")]
    Run {
        /// The run: the workload or the program, the machine and the setting.
        what: String,
        /// The reason, and the remedy.
        why: String,
    },
    /// An operation of a replay failed.
    #[error("replay of {recording} under {settings}: {source}")]
    Replay {
        /// The name of the recording.
        recording: String,
        /// The knobs in force.
        settings: String,
        /// The failed operation.
        source: ReplayError,
    },
    /// The output of figures failed.
    #[error("{to}: {source}")]
    Output {
        /// The name of the output.
        to: String,
        /// The error of the write.
        source: io::Error,
    },
    /// The reader of the figures has closed its input.
    #[error("the reader of the figures has closed its input")]
    Closed,
}

impl Error {
    /// Creates the error of an input that cannot be used.
    pub fn input(what: impl fmt::Display, why: impl fmt::Display) -> Self {
        Self::Input { what: what.to_string(), why: why.to_string() }
    }

    /// Creates the error of a failed run.
    pub fn run(what: impl fmt::Display, why: impl fmt::Display) -> Self {
        Self::Run { what: what.to_string(), why: why.to_string() }
    }

    /// Creates the error of a value that a knob does not accept.
    pub fn setting(what: impl fmt::Display, why: impl fmt::Display) -> Self {
        Self::Setting { what: what.to_string(), why: why.to_string() }
    }

    /// Creates the error of a machine that cannot be created.
    pub fn machine(what: impl fmt::Display, why: impl fmt::Display) -> Self {
        Self::Machine { what: what.to_string(), why: why.to_string() }
    }

    /// Creates the error of a failed call of the host's kernel.
    pub fn host(what: impl fmt::Display, source: impl Into<io::Error>) -> Self {
        Self::Host { what: what.to_string(), source: source.into() }
    }

    /// Returns whether the results cannot be written, so that further runs are useless.
    pub fn is_output(&self) -> bool {
        matches!(self, Self::Output { .. } | Self::Closed)
    }

    /// Returns whether the input of the caller is wrong, so that no run has started.
    pub fn is_input(&self) -> bool {
        matches!(self, Self::Input { .. } | Self::Trace(_) | Self::Parameter(_))
    }
}

/// Returns the description of the error, with a suggestion for an unknown parameter.
fn explained(error: &ParamError) -> String {
    match error {
        ParamError::UnknownParam { name, known, .. } => {
            format!("{error}{}", suggest::hint(name, known.split(", ")))
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_workload::Workload;

    #[test]
    fn error_names_the_input_the_reason_and_the_remedy() {
        let error = Workload::parse("pft", ["sice=4M"]).map(drop).map_err(Error::Parameter);
        let error = error.expect_err("no such parameter");
        assert!(error.is_input());
        let text = error.to_string();
        assert!(text.contains("pft") && text.ends_with("; did you mean size?"), "{text}");
        let failed = Error::run("pft on native", "out of memory");
        assert!(!failed.is_input());
        assert_eq!(failed.to_string(), "pft on native: out of memory");
    }
}
