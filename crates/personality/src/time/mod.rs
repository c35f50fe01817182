//! Time: clocks, deadlines, and the timers of programs.
//!
//! Each CPU has its own [queue](deadline) of deadlines. Its APIC timer is one-shot, set for the
//! first deadline or, while a thread runs, for the end of its [time slice](TURN), whichever is
//! earlier. So an idle CPU sleeps exactly until the first deadline, and the only periodic ticks are
//! the ends of time slices. A deadline stays with the CPU on which it was set, even if the thread
//! migrates. Time slices end on a grid, on which user and system time are [sampled](usage).

pub mod clock;
mod deadline;
mod expire;
mod tick;
pub mod timers;
pub mod usage;

pub use clock::Clock;
pub use deadline::{Alarm, TURN, before_idle, begin_turn, cancel, samples_switch, wake_at};
pub use expire::set_timer;
pub use tick::tick;
pub use timers::ProcessTimers;
pub use usage::{CpuTime, Times};

use crate::errno::Errno;
use crate::task::current;

/// Nanoseconds since boot.
#[inline]
pub fn now() -> u64 {
    faultless_bare::arch::clock::now()
}

/// Returns the deadline of a call that may wait for `nanoseconds`, in nanoseconds since boot. A
/// call restarted after it was [interrupted] keeps its deadline.
pub fn deadline_after(nanoseconds: u64) -> u64 {
    current().signals.resume.take().unwrap_or_else(|| now().saturating_add(nanoseconds))
}

/// Returns the result of a call that waits until `deadline` when a signal interrupts the call.
/// Unless a handler runs, the call is restarted and waits for the rest of the time.
pub fn interrupted(deadline: u64) -> Errno {
    current().signals.resume.set(Some(deadline));
    Errno::RESTART_UNHANDLED
}
