//! The presentation of results.

pub mod bars;
pub mod columns;
pub mod effect;
pub mod json;
pub mod perf_stat;
pub mod processes;
pub mod progress;
pub mod table;

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct JsonArgs {
    /// Write results to FILE too, one JSON object per line, each with the parameters and knobs in
    /// force. `-` is standard output, and moves the tables to standard error. FILE is replaced when
    /// the results are complete; the results of a failed or interrupted run go to FILE.partial
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Returns the output for text, and its style: standard output, unless JSON goes there.
pub fn output(json: &JsonArgs) -> (Box<dyn Write + Send>, Style) {
    if json.json.as_deref() == Some(Path::new("-")) {
        (Box::new(io::stderr()), Style::new(io::stderr().is_terminal()))
    } else {
        (Box::new(io::stdout()), Style::new(io::stdout().is_terminal()))
    }
}

/// Prints a line on standard error. Unlike `eprintln`, does not panic if the write fails.
macro_rules! say {
    ($($word:tt)*) => { $crate::report::say_line(format_args!($($word)*)) };
}
pub(crate) use say;

/// Implements [`say`].
pub fn say_line(line: fmt::Arguments<'_>) {
    // One write, so that lines of several threads do not mix.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Fills a paragraph into lines of `width` columns, indented except for the first.
pub fn filled(text: &str, width: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column == 0 {
            column = length;
        } else if column + 1 + length > width {
            out.push_str("\n  ");
            column = 2 + length;
        } else {
            out.push(' ');
            column += 1 + length;
        }
        out.push_str(word);
    }
    out
}

/// Returns `label` with at most `columns` characters, shortened in its middle: the beginning has
/// the name, and the end the source line.
pub fn shortened(label: &str, columns: usize) -> String {
    let count = label.chars().count();
    if count <= columns {
        return label.to_owned();
    }
    let end = columns / 2;
    let start = columns.saturating_sub(end + 1);
    label.chars().take(start).chain(['…']).chain(label.chars().skip(count - end)).collect()
}

/// Returns the columns of the terminal of standard output; `None` without a terminal.
fn terminal_columns() -> Option<u16> {
    let (width, _) = terminal_size::terminal_size_of(io::stdout())?;
    Some(width.0)
}

/// The capabilities of the output.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Block characters and lines.
    pub terminal: bool,
    /// Columns.
    pub width: usize,
}

impl Style {
    /// Creates the style of an output, which may be a `terminal`.
    pub fn new(terminal: bool) -> Self {
        Self { terminal, width: terminal_columns().map_or(100, usize::from).clamp(60, 160) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_filled() {
        assert_eq!(filled("one  two\nthree four", 9), "one two\n  three\n  four");
        assert_eq!(filled("", 9), "");
    }

    #[test]
    fn long_label_keeps_its_beginning_and_its_end() {
        assert_eq!(shortened("load a.c:7", 10), "load a.c:7");
        let long = format!("begin{}end.rs:7", "x".repeat(100));
        let got = shortened(&long, 56);
        assert_eq!(got.chars().count(), 56);
        assert!(got.starts_with("beginx") && got.contains('…') && got.ends_with("end.rs:7"));
        assert_eq!(shortened("abc", 1), "…");
    }
}
