//! Progress, on standard error: a bar on a terminal, otherwise a line for each step.

use super::say;
use faultless_analysis::Observer;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::cell::Cell;
use std::io::IsTerminal;
use std::time::Duration;

/// The progress of a command.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    plain: bool,
}

impl Progress {
    /// Creates the progress of `steps` steps.
    pub fn new(steps: u64) -> Self {
        Self::with(steps, true)
    }

    /// Creates the same as [`new`](Self::new), but silent if standard error is no terminal: for
    /// work that takes seconds only with a large recording.
    pub fn on_terminal(steps: u64) -> Self {
        Self::with(steps, false)
    }

    /// Creates a progress. `lines` permits a line for each part.
    fn with(steps: u64, lines: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let plain = lines && !terminal;
        let target = if !terminal {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr_with_hz(10)
        };
        let bar = ProgressBar::with_draw_target(Some(steps), target);
        let template = "{bar:32} {percent:>3}%  {elapsed_precise}, {eta} left  {msg}";
        let style = ProgressStyle::with_template(template);
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, plain }
    }

    /// Prints permanent output without disturbing the bar.
    pub fn print<E>(&self, print: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        self.bar.suspend(print)
    }
}

impl Observer for Progress {
    fn begin(&self, what: &str) {
        if self.plain {
            say!("{what} ...");
        }
        self.bar.set_message(what.to_owned());
    }

    fn advance(&self, steps: u64) {
        self.bar.inc(steps);
    }

    fn note(&self, note: &str) {
        self.bar.suspend(|| say!("faultless: {note}"));
    }
}

/// The progress of the reading of a recording, on a terminal.
#[derive(Debug)]
pub struct Reading {
    progress: Progress,
    percent: Cell<u64>,
}

impl Reading {
    /// Creates the progress.
    pub fn new() -> Self {
        let progress = Progress::on_terminal(100);
        progress.begin("reads the recording");
        Self { progress, percent: Cell::new(0) }
    }

    /// Shows that `share` of the recording has been read, from 0 to 1.
    pub fn read(&self, share: f64) {
        let percent = (share * 100.0) as u64;
        self.progress.advance(percent.saturating_sub(self.percent.replace(percent)));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
