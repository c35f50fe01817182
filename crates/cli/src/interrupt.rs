//! Ctrl-C: the first asks the command to print what it has, the second ends it.
//!
//! Commands look at [`requested`] between runs; whoever runs for long without looking gives
//! [`on_request`] something to print.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

type Action = Box<dyn FnOnce() + Send>;

/// As a shell reports a program that SIGINT ended.
const INTERRUPTED: i32 = 130;

static REQUESTS: AtomicU32 = AtomicU32::new(0);
static ACTION: Mutex<Option<Action>> = Mutex::new(None);

/// Begins to listen.
pub fn install() {
    let handler = || {
        let before = REQUESTS.fetch_add(1, Ordering::Relaxed);
        if let Some(action) = take() {
            action();
        }
        if before > 0 {
            std::process::exit(INTERRUPTED);
        }
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        eprintln!("faultless: Ctrl-C will print no results: {error}");
    }
}

/// Whether the user asked to stop.
pub fn requested() -> bool {
    REQUESTS.load(Ordering::Relaxed) > 0
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
    on_request(|| std::process::exit(INTERRUPTED))
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
