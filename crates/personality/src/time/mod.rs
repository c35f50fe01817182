//! Time: clocks, deadlines, and the timers of programs.
//!
//! Each CPU has a [queue](queue) of deadlines of its own, and its APIC timer is set for one shot: at the
//! first of them or, while a thread runs, at the end of a [turn](TURN), whichever comes first. So an idle
//! CPU sleeps exactly until somebody's deadline, and where nobody waits, nothing ticks but the turns.
//! A deadline stays with the CPU that it was set on, wherever the thread goes. Turns end on a grid, which
//! [samples](usage) whose time it is.

pub mod clock;
mod queue;
mod tick;
pub mod timers;
pub mod usage;

pub use clock::Clock;
pub use queue::{Alarm, TimerId};
pub use tick::tick;
pub use timers::ProcessTimers;
pub use usage::{CpuTime, Times};

use crate::errno::Errno;
use crate::task::{Thread, current};
use core::sync::atomic::Ordering;
use faultless_bare::arch::apic;
use faultless_bare::percpu;
use faultless_collections::Arc;
use queue::{Due, Local};

/// How long a thread may run while another waits, in nanoseconds.
pub const TURN: u64 = 4_000_000;
/// The shortest time that the APIC timer is set for, in nanoseconds: what it takes to serve it.
const SHORTEST: u64 = 1_000;

/// Nanoseconds since boot.
#[inline]
pub fn now() -> u64 {
    faultless_bare::arch::clock::now()
}

/// When the turn of who runs at `now` ends.
const fn end_of_turn(now: u64) -> u64 {
    now - now % TURN + TURN
}

/// Whether the time is come for a sample; if so, the next is due a turn later.
fn sample_is_due(local: &Local, now: u64) -> bool {
    let due = now >= local.sample.load(Ordering::Relaxed);
    if due {
        local.sample.store(end_of_turn(now), Ordering::Relaxed);
    }
    due
}

/// The kernel takes the CPU from a thread at `now`: whether its time is to be sampled, since the interrupt that
/// would have done so finds another.
pub fn samples_switch(now: u64) -> bool {
    sample_is_due(Local::this(), now)
}

/// Before the CPU halts with nothing to run: nothing ticks until the first deadline.
pub fn before_idle() {
    let local = Local::this();
    arm(local, local.first());
}

/// After the CPU was idle: sees to it that the timer goes off when the turn of whoever runs now ends.
pub fn begin_turn() {
    let local = Local::this();
    let end = end_of_turn(now());
    local.sample.store(end, Ordering::Relaxed);
    if end < local.armed.load(Ordering::Relaxed) {
        arm(local, end);
    }
}

/// Sets this CPU's timer to `at`, or stops it where that is never.
fn arm(local: &Local, at: u64) {
    if local.armed.swap(at, Ordering::Relaxed) == at {
        return;
    }
    if at == u64::MAX {
        apic::stop_timer();
    } else {
        apic::start_timer(at.saturating_sub(now()).max(SHORTEST));
    }
}

fn add(deadline: u64, due: Due, alarm: &Arc<Alarm>) -> TimerId {
    let local = Local::this();
    let id = local.insert(percpu::id(), deadline, due, alarm);
    if deadline < local.armed.load(Ordering::Relaxed) {
        arm(local, deadline);
    }
    id
}

/// Wakes the running thread, `thread`, at `deadline`, in nanoseconds since boot, unless that is
/// [cancelled](cancel). Called once before that.
#[must_use = "a deadline that is not needed any more is cancelled"]
pub fn wake_at(deadline: u64, thread: &Arc<Thread>) -> TimerId {
    add(deadline, Due::Wake(thread.clone()), thread.alarm())
}

/// Forgets a deadline; one that has passed is forgotten already.
pub fn cancel(timer: TimerId) {
    Local::of(timer.cpu()).remove(timer);
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
