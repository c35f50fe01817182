//! Signals pending for a thread, and their removal by the thread.

use super::info::Info;
use super::set::{Set, bit};
use crate::task::{Thread, current};
use linux_raw_sys::general as linux;

/// Returns whether `thread` has a signal to deliver, or must end.
#[inline]
pub fn pending(thread: &Thread) -> bool {
    let waiting = thread.signals.queue.set() | thread.process.signals.queue.set();
    waiting & !thread.signals.blocked() != 0 || thread.must_end()
}

/// Returns whether `thread` has a pending `SIGKILL`.
pub fn killed(thread: &Thread) -> bool {
    let waiting = thread.signals.waiting() | thread.process.signals.waiting();
    waiting & bit(linux::SIGKILL) != 0
}

/// Takes a pending signal of `set` of the running thread, blocked or not.
pub fn take_waiting(set: Set) -> Option<Info> {
    take(&current(), set)
}

/// Returns whether `thread` accepts `signal` now.
pub(super) fn takes(thread: &Thread, signal: u32) -> bool {
    thread.signals.blocked() & bit(signal) == 0 && !thread.must_end()
}

/// Takes a pending signal of `wanted` of `thread`, which runs.
pub(super) fn take(thread: &Thread, wanted: Set) -> Option<Info> {
    let process = &thread.process.signals;
    let info = thread.signals.queue.take(wanted).or_else(|| process.queue.take(wanted))?;
    if let Some((number, overrun)) = info.of_timer() {
        thread.process.timers.delivered(number, overrun);
    }
    Some(info)
}
