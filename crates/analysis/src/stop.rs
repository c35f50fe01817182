//! Requests to stop: a request makes each measurement end early, with its results so far.
//!
//! Requests concern the whole process, like the signals that cause them. Measurements check
//! [`requested`] between runs. Code that runs for long without a check gives [`on_request`] an
//! action, or runs [`unless_requested`].

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

type Action = Box<dyn FnOnce() + Send>;

/// The interval at which [`unless_requested`] checks for a request.
const LOOKS: Duration = Duration::from_millis(20);

/// The first signal that requested a stop, or 0.
static REQUEST: AtomicI32 = AtomicI32::new(0);
static ACTION: Mutex<Option<Action>> = Mutex::new(None);

/// Requests a stop, because of the arrival of a `signal`, and runs the action of [`on_request`].
/// Returns whether this is the first request.
pub fn request(signal: i32) -> bool {
    let first = REQUEST.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
    if let Some(action) = take() {
        action();
    }
    first.is_ok()
}

/// Returns whether a stop has been requested.
pub fn requested() -> bool {
    signal() != 0
}

/// Returns the signal of the first request; 0 without a request.
pub fn signal() -> i32 {
    REQUEST.load(Ordering::Relaxed)
}

/// Runs `action` once when a stop is requested, or at once if a stop was requested earlier, until
/// the guard is dropped.
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

/// Returns the result of `work`, or `None` as soon as a stop is requested, or if a stop was
/// requested earlier. Work that cannot be stopped in the middle then continues in a separate
/// thread, which ends with the process.
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
