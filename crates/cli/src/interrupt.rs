//! Ctrl-C, SIGTERM and SIGHUP: the first asks the command to print what it has, the second ends it.
//!
//! Commands look at [`requested`] between runs; whoever runs for long without looking gives
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

/// What the output of a command ends with that the user interrupted.
pub const NOT_COMPLETE: &str = "Interrupted: the results are not complete.";

/// What a shell adds to the number of the signal that ended a program.
pub const SIGNALLED: i32 = 128;

/// How often [`unless_requested`] looks.
const LOOKS: Duration = Duration::from_millis(20);

/// The first signal that asked to stop, or 0.
static REQUEST: AtomicI32 = AtomicI32::new(0);
static ACTION: Mutex<Option<Action>> = Mutex::new(None);

/// Begins to listen.
pub fn install() {
    let listening = Signals::new([SIGINT, SIGTERM, SIGHUP]).and_then(|mut signals| {
        let listen = move || signals.forever().for_each(request);
        thread::Builder::new().name("signals".into()).spawn(listen)
    });
    if let Err(error) = listening {
        say!("faultless: Ctrl-C will print no results: {error}");
    }
}

/// A `signal` came.
fn request(signal: i32) {
    let first = REQUEST.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
    if let Some(action) = take() {
        action();
    }
    if first.is_err() {
        std::process::exit(SIGNALLED + signal);
    }
}

/// Whether the user asked to stop.
pub fn requested() -> bool {
    REQUEST.load(Ordering::Relaxed) != 0
}

/// The exit status of a command that the user asked to stop: as a shell reports a program that the signal ended.
pub fn status() -> i32 {
    SIGNALLED + REQUEST.load(Ordering::Relaxed)
}

/// Does `action` when the user asks to stop, or has asked, once, until the guard is dropped.
pub fn on_request(action: impl FnOnce() + Send + 'static) -> Guard {
    *ACTION.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(action));
    // The handler may have looked before there was an action.
    if requested()
        && let Some(action) = take()
    {
        action();
    }
    Guard
}

/// Ends the command when the user asks to stop, until the guard is dropped: for as long as there is nothing to print.
pub fn ends_at_once() -> Guard {
    on_request(|| std::process::exit(status()))
}

/// What `work` returns, or nothing as soon as the user asks to stop, or has asked. What cannot be stopped in the middle then goes on in a thread of
/// its own, which ends with the command.
///
/// # Panics
/// If `work` does.
pub fn unless_requested<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Option<R> {
    if requested() {
        return None;
    }
    let (working, ended) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        // Dropped when the work ends, however it does.
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

/// While it lives, the action of [`on_request`] stands.
#[derive(Debug)]
pub struct Guard;

impl Drop for Guard {
    fn drop(&mut self) {
        take();
    }
}
