//! Ctrl-C, SIGTERM and SIGHUP: the first signal makes the command print its results so far, the
//! second ends it.
//!
//! Commands check [`requested`] between runs. Code that runs for long without a check gives
//! [`on_request`] something to print, or runs [`unless_requested`].

use crate::report::say;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

type Action = Box<dyn FnOnce() + Send>;

/// The last line of the output of an interrupted command.
pub const NOT_COMPLETE: &str = "Interrupted: the results are not complete.";

/// The number that a shell adds to the number of the signal that ended a program.
pub const SIGNALLED: i32 = 128;

/// The interval at which [`unless_requested`] checks for a request.
const LOOKS: Duration = Duration::from_millis(20);

/// The first signal that requested a stop, or 0.
static REQUEST: AtomicI32 = AtomicI32::new(0);
static ACTION: Mutex<Option<Action>> = Mutex::new(None);

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
    let first = REQUEST.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
    if let Some(action) = take() {
        action();
    }
    if first.is_err() {
        std::process::exit(SIGNALLED + signal);
    }
}

/// Returns whether the user has requested a stop.
pub fn requested() -> bool {
    REQUEST.load(Ordering::Relaxed) != 0
}

/// Returns the exit status of a command stopped by the user: the status with which a shell reports
/// a program ended by this signal.
pub fn status() -> i32 {
    SIGNALLED + REQUEST.load(Ordering::Relaxed)
}

/// Runs `action` once when the user requests a stop, or at once if a stop was requested earlier,
/// until the guard is dropped.
pub fn on_request(action: impl FnOnce() + Send + 'static) -> Guard {
    *ACTION.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(action));
    // The handler may have checked before the action was registered.
    if requested()
        && let Some(action) = take()
    {
        action();
    }
    Guard
}

/// Ends the command when the user requests a stop, until the guard is dropped. For times without
/// results to print.
pub fn ends_at_once() -> Guard {
    on_request(|| std::process::exit(status()))
}

/// Returns the result of `work`, or `None` as soon as the user requests a stop, or if a stop was
/// requested earlier. Work that cannot be stopped in the middle then continues in a separate
/// thread, which ends with the command.
///
/// # Panics
/// If `work` panics.
pub fn unless_requested<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Option<R> {
    if requested() {
        return None;
    }
    let (working, ended) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        // Dropped at the end of the work, also on a panic.
        let _working = working;
        work()
    });
    while ended.recv_timeout(LOOKS) == Err(RecvTimeoutError::Timeout) {
        if requested() {
            return None;
        }
    }
    Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

fn take() -> Option<Action> {
    ACTION.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// A guard that keeps the action of [`on_request`] registered.
#[derive(Debug)]
pub struct Guard;

impl Drop for Guard {
    fn drop(&mut self) {
        take();
    }
}
