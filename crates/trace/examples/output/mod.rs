//! The standard output and the errors of an example.

use std::error::Error;
use std::io::{self, ErrorKind, StdoutLock, Write};
use std::process::ExitCode;

/// Runs `example` with the locked standard output. If the reader closes the output, as `head` does,
/// the example ends without a message. Other errors are printed with their sources.
pub fn run(example: impl FnOnce(&mut StdoutLock<'_>) -> Result<(), Box<dyn Error>>) -> ExitCode {
    let mut out = io::stdout().lock();
    match example(&mut out).and_then(|()| Ok(out.flush()?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed(&*error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", with_sources(&*error));
            ExitCode::FAILURE
        }
    }
}

fn is_closed(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}
