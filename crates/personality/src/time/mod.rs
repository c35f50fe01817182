//! Time: clocks, deadlines, and the timers of programs.
//!
//! Each CPU has a [queue](queue) of deadlines of its own, and its APIC timer is set for one shot: at the
//! first of them or, while a thread runs, at the end of a [turn](TURN), whichever comes first. So an idle
//! CPU sleeps exactly until somebody's deadline, and where nobody waits, nothing ticks but the turns.
//! A deadline stays with the CPU that it was set on, wherever the thread goes. Turns end on a grid, which
//! [samples](usage) whose time it is.

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
