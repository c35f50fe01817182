//! How results are shown.

pub mod bars;
pub mod columns;
pub mod json;
pub mod number;
pub mod perf_stat;
pub mod progress;
pub mod table;

use std::io::IsTerminal;

/// What standard output can show.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Block characters and lines.
    pub terminal: bool,
    /// Columns.
    pub width: usize,
}

impl Style {
    /// That of standard output.
    pub fn detect() -> Self {
        let terminal = std::io::stdout().is_terminal();
        // The table crate asks the terminal.
        let width = comfy_table::Table::new().width().map_or(100, usize::from);
        Self { terminal, width: width.clamp(60, 160) }
    }
}
