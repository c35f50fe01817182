//! Signals that are pending for a thread, and how it takes them.

use super::info::Info;
use super::set::{Set, bit};
use crate::task::{Thread, current};
use linux_raw_sys::general as linux;

/// Whether a signal is to be delivered to `thread`, or it is to end.
#[inline]
pub fn pending(thread: &Thread) -> bool {
    let waiting = thread.signals.queue.set() | thread.process.signals.queue.set();
    waiting & !thread.signals.blocked() != 0 || thread.must_end()
}

/// Whether a `SIGKILL` is to be delivered to `thread`.
pub fn killed(thread: &Thread) -> bool {
    let waiting = thread.signals.waiting() | thread.process.signals.waiting();
    waiting & bit(linux::SIGKILL) != 0
}

/// Takes a signal of `set` that waits for the running thread, blocked or not.
pub fn take_waiting(set: Set) -> Option<Info> {
    take(&current(), set)
}

/// Whether `thread` takes `signal` now.
pub(super) fn takes(thread: &Thread, signal: u32) -> bool {
    thread.signals.blocked() & bit(signal) == 0 && !thread.must_end()
}

/// Takes a signal in `wanted` that waits for `thread`, which runs.
pub(super) fn take(thread: &Thread, wanted: Set) -> Option<Info> {
    let process = &thread.process.signals;
    let info = thread.signals.queue.take(wanted).or_else(|| process.queue.take(wanted))?;
    if let Some((number, overrun)) = info.of_timer() {
        thread.process.timers.delivered(number, overrun);
    }
    Some(info)
}
