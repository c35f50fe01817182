//! Ctrl-C, SIGTERM and SIGHUP: the first signal makes the command print its results so far, the
//! second ends it.
//!
//! A signal [requests](faultless_analysis::stop) the measurements to stop.

use crate::report::say;
use faultless_analysis::stop;
pub use faultless_analysis::stop::{Guard, on_request, requested, unless_requested};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::thread;

/// The last line of the output of an interrupted command.
pub const NOT_COMPLETE: &str = "Interrupted: the results are not complete.";

/// The number that a shell adds to the number of the signal that ended a program.
pub const SIGNALLED: i32 = 128;

/// Starts to listen for signals.
pub fn install() {
    let listening = Signals::new([SIGINT, SIGTERM, SIGHUP]).and_then(|mut signals| {
        let listen = move || signals.forever().for_each(request);
        thread::Builder::new().name("signals".into()).spawn(listen)
    });
    if let Err(error) = listening {
        say!("faultless: Ctrl-C will print no results: {error}");
    }
}

/// Handles the arrival of a `signal`.
fn request(signal: i32) {
    if !stop::request(signal) {
        std::process::exit(SIGNALLED + signal);
    }
}

/// Returns the exit status of a command stopped by the user: the status with which a shell reports
/// a program ended by this signal.
pub fn status() -> i32 {
    SIGNALLED + stop::signal()
}

/// Ends the command when the user requests a stop, until the guard is dropped. For times without
/// results to print.
pub fn ends_at_once() -> Guard {
    on_request(|| std::process::exit(status()))
}
