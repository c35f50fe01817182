//! Requests to stop: a request makes each measurement end early, with its results so far.
//!
//! Requests concern the whole process, like the signals that cause them. Measurements check
//! [`requested`] between runs. Code that runs for long without a check gives [`on_request`] an
//! action, or runs [`unless_requested`].

use std::mem;
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
static ACTIONS: Mutex<Actions> =
    Mutex::new(Actions { next: 0, first: Vec::new(), again: Vec::new() });

/// The registered actions with their numbers, the latest last.
struct Actions {
    /// The number of the next action.
    next: u64,
    /// For the first request.
    first: Vec<(u64, Action)>,
    /// For a further request.
    again: Vec<(u64, Action)>,
}

/// Requests a stop, because of the arrival of a `signal`. Runs the actions of [`on_request`], the
/// latest first, and at a further request the actions of [`on_repeat`]. Returns whether this is the
/// first request.
pub fn request(signal: i32) -> bool {
    let first = REQUEST.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    run_actions(|actions| mem::take(&mut actions.first));
    if !first {
        run_actions(|actions| mem::take(&mut actions.again));
    }
    first
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
    let guard = register(|actions| &mut actions.first, Box::new(action));
    // The handler may have checked before the action was registered.
    if requested() {
        run_actions(|actions| mem::take(&mut actions.first));
    }
    guard
}

/// Registers `action` until the guard is dropped. A second request to stop runs `action` once, and
/// ends the command.
pub fn on_repeat(action: impl FnOnce() + Send + 'static) -> Guard {
    register(|actions| &mut actions.again, Box::new(action))
}

fn register(list: fn(&mut Actions) -> &mut Vec<(u64, Action)>, action: Action) -> Guard {
    let mut actions = ACTIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let number = actions.next;
    actions.next += 1;
    list(&mut actions).push((number, action));
    Guard(number)
}

/// Runs the actions that `take` removes, the latest first. The lock is free meanwhile, because an
/// action may take long.
fn run_actions(take: fn(&mut Actions) -> Vec<(u64, Action)>) {
    let taken = take(&mut ACTIONS.lock().unwrap_or_else(PoisonError::into_inner));
    taken.into_iter().rev().for_each(|(_, action)| action());
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

/// A guard that keeps an action of [`on_request`] or [`on_repeat`] registered.
#[derive(Debug)]
#[must_use = "the action is removed when the guard is dropped"]
pub struct Guard(u64);

impl Drop for Guard {
    fn drop(&mut self) {
        let mut actions = ACTIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let Actions { first, again, .. } = &mut *actions;
        first.retain(|(number, _)| *number != self.0);
        again.retain(|(number, _)| *number != self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Requests concern the whole process, so the test requests no stop.
    #[test]
    fn inner_guard_keeps_the_outer_action() {
        let token = Arc::new(());
        let keep = |token: &Arc<()>| {
            let token = Arc::clone(token);
            move || drop(token)
        };
        let outer = on_request(keep(&token));
        let inner = on_request(keep(&token));
        let repeat = on_repeat(keep(&token));
        assert_eq!(Arc::strong_count(&token), 4);
        drop(inner);
        assert_eq!(Arc::strong_count(&token), 3, "the outer action is registered");
        drop(outer);
        drop(repeat);
        assert_eq!(Arc::strong_count(&token), 1);
    }
}
