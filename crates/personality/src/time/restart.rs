//! The deadline of a call that a signal interrupts.

use super::now;
use crate::errno::Errno;
use crate::task::current;

/// The deadline of a call that may wait for `nanoseconds`, in nanoseconds since boot. A call that was
/// [interrupted](interrupted) and is made again gets the deadline that it had.
pub fn deadline_after(nanoseconds: u64) -> u64 {
    current().signals.resume.take().unwrap_or_else(|| now().saturating_add(nanoseconds))
}

/// What a call that waits until `deadline` returns when a signal interrupts it: unless a handler runs, it
/// is made again, and then waits for the rest of the time.
pub fn interrupted(deadline: u64) -> Errno {
    current().signals.resume.set(Some(deadline));
    Errno::RESTART_UNHANDLED
}
