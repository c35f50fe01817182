//! How results are shown.

pub mod bars;
pub mod columns;
pub mod effect;
pub mod json;
pub mod number;
pub mod perf_stat;
pub mod progress;
pub mod table;

use crate::args::JsonArgs;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

/// Where text for people goes, and what can be shown there: standard output, unless JSON goes there.
pub fn output(json: &JsonArgs) -> (Box<dyn Write + Send>, Style) {
    if json.json.as_deref() == Some(Path::new("-")) {
        (Box::new(io::stderr()), Style::new(io::stderr().is_terminal()))
    } else {
        (Box::new(io::stdout()), Style::new(io::stdout().is_terminal()))
    }
}

/// Prints a line on standard error. An error that cannot be told is no reason to panic, as `eprintln` does.
macro_rules! say {
    ($($word:tt)*) => { $crate::report::say_line(format_args!($($word)*)) };
}
pub(crate) use say;

/// Does what [`say`] says.
pub fn say_line(line: fmt::Arguments<'_>) {
    // One write: lines of several threads do not mix.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// The columns of the terminal that shows standard output, if one does.
fn terminal_columns() -> Option<u16> {
    let (width, _) = terminal_size::terminal_size_of(io::stdout())?;
    Some(width.0)
}

/// What the output can show.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Block characters and lines.
    pub terminal: bool,
    /// Columns.
    pub width: usize,
}

impl Style {
    fn new(terminal: bool) -> Self {
        Self { terminal, width: terminal_columns().map_or(100, usize::from).clamp(60, 160) }
    }
}
