//! The signals blocked or awaited by a thread, and ignored or handled by its process.

use super::action::{Action, Disposition};
use super::info::Info;
use super::pending::{pending, take};
use super::send::tell_others;
use super::set::{Set, UNBLOCKABLE, bit};
use crate::errno::{Errno, Result};
use crate::task::wait::{Stop, wait_until};
use crate::task::{Process, current};
use core::sync::atomic::Ordering;

/// Sets the action of `process` for `signal`, and returns the old action.
///
/// # Errors
/// `EINVAL` if the action cannot be changed.
pub fn set_action(process: &Process, signal: u32, new: Option<Action>) -> Result<Action> {
    if new.is_some() && bit(signal) & UNBLOCKABLE != 0 {
        return Err(Errno::EINVAL);
    }
    let old = {
        let mut actions = process.signals.actions.lock();
        let action = &mut actions[(signal - 1) as usize];
        let old = *action;
        if let Some(new) = new {
            *action = new.sanitized();
        }
        old
    };
    if new.is_some_and(|new| new.disposition(signal) == Disposition::Ignore) {
        // Pending signals are ignored, too.
        process.signals.queue.forget(bit(signal));
        process.threads.lock().iter().for_each(|it| it.signals.queue.forget(bit(signal)));
    }
    Ok(old)
}

/// Sets the mask of the running thread to `set`.
pub fn block(set: Set) {
    let thread = current();
    let set = set & !UNBLOCKABLE;
    let before = thread.signals.blocked.swap(set, Ordering::SeqCst);
    if set & !before != 0 {
        // A sender may have notified only this thread of a signal to the process that is blocked
        // from now on.
        tell_others(&thread.process, &thread, set & !before);
    }
    if pending(&thread) {
        faultless_bare::percpu::this().attention.store(true, Ordering::Relaxed);
    }
}

/// Makes a system call with the mask `set`, as `sigsuspend`, `ppoll` and `pselect` do. If a signal
/// interrupts the call, its handler runs with this mask.
///
/// # Errors
/// The errors of the call.
pub fn with_blocked<R>(set: Set, call: impl FnOnce() -> Result<R>) -> Result<R> {
    let before = current().signals.blocked();
    block(set);
    let result = call();
    match result {
        Err(Errno::RESTART | Errno::RESTART_UNHANDLED | Errno::EINTR) => {
            // Delivery restores the mask.
            current().signals.saved.set(Some(before));
            faultless_bare::percpu::this().attention.store(true, Ordering::Relaxed);
        }
        _ => block(before),
    }
    result
}

/// Waits for a signal of `set`, which the running thread blocks, and takes the signal.
///
/// # Errors
/// `EAGAIN` at the deadline; `EINTR` for a signal that is not in the set.
pub fn wait_for(set: Set, deadline: Option<u64>) -> Result<Info> {
    let thread = current();
    let signals = &thread.signals;
    let taken = || take(&thread, set);
    if let Some(info) = taken() {
        return Ok(info);
    }
    // Unblocked during the wait, so that a sender notifies this thread.
    let before = signals.blocked();
    signals.awaited.store(before & set, Ordering::SeqCst);
    signals.blocked.store(before & !set, Ordering::SeqCst);
    let result = wait_until(&[], deadline, taken);
    block(before);
    signals.awaited.store(0, Ordering::SeqCst);
    result.map_err(|stop| match stop {
        Stop::Timeout => Errno::EAGAIN,
        Stop::Signal => Errno::EINTR,
    })
}
