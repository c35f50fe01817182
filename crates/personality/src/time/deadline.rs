//! The deadlines of each CPU, and the CPU's timer.

use crate::errno::Result;
use crate::task::{Process, Thread};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::CpuId;
use faultless_bare::arch::apic;
use faultless_bare::arch::clock::now;
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Slot, Weak};

/// The time slice: the maximum time that a thread runs while another thread waits, in nanoseconds.
pub const TURN: u64 = 4_000_000;
/// The shortest setting of the APIC timer, in nanoseconds: about the cost of its interrupt.
const SHORTEST: u64 = 1_000;

/// Names a timer of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// `ITIMER_REAL`.
    Real,
    /// `ITIMER_VIRTUAL`.
    Virtual,
    /// `ITIMER_PROF`.
    Profile,
    /// A timer of `timer_create`.
    Created(i32),
}

/// The action at a deadline.
pub(super) enum Due {
    /// The thread is woken.
    Wake(Arc<Thread>),
    /// A timer of a process expires.
    Timer(Weak<Process>, Key),
}

/// The memory for one deadline, kept here while no deadline is set. So setting an alarm cannot
/// fail.
#[derive(Debug)]
pub struct Alarm(Mutex<Option<Slot<Moment, Set>>>);

/// The time and the number of a deadline.
type Moment = (u64, u64);

/// A pending deadline, and the alarm that owns its memory.
struct Set {
    due: Due,
    alarm: Arc<Alarm>,
}

impl Alarm {
    /// Returns an alarm without a deadline.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Arc<Self>> {
        Ok(Arc::try_new(Self(Mutex::new(Some(Slot::try_new()?))))?)
    }
}

/// Names a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerId {
    cpu: CpuId,
    at: u64,
    number: u64,
}

impl TimerId {
    const fn cpu(self) -> CpuId {
        self.cpu
    }
}

/// The deadlines of one CPU.
pub(super) struct Local {
    /// By time, and for equal times by number, in the order of insertion.
    queue: Mutex<Map<Moment, Set>>,
    /// The number of the next deadline.
    next: AtomicU64,
    /// The expiry of the CPU's timer; only the CPU itself uses this field.
    pub(super) armed: AtomicU64,
    /// The time of the next sample; only the CPU itself uses this field.
    sample: AtomicU64,
}

/// The number of bits of an affinity mask.
const CPUS: usize = 64;

static LOCALS: [Local; CPUS] = [const {
    Local {
        queue: Mutex::new(Map::new()),
        next: AtomicU64::new(0),
        armed: AtomicU64::new(u64::MAX),
        sample: AtomicU64::new(0),
    }
}; CPUS];

impl Local {
    /// The deadlines of this CPU.
    pub(super) fn this() -> &'static Self {
        Self::of(percpu::id())
    }

    fn of(cpu: CpuId) -> &'static Self {
        &LOCALS[cpu.index()]
    }

    /// Sets an alarm that has no deadline.
    fn insert(&self, cpu: CpuId, at: u64, due: Due, alarm: &Arc<Alarm>) -> TimerId {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let slot = alarm.0.lock().take();
        let Some(slot) = slot else { unreachable!("the alarm is set already") };
        let set = Set { due, alarm: alarm.clone() };
        self.queue.lock().insert(slot, (at, number), set);
        TimerId { cpu, at, number }
    }

    fn remove(&self, timer: TimerId) {
        // The references of the deadline are dropped without the lock.
        let removed = {
            let mut queue = self.queue.lock();
            let removed = queue.take(&(timer.at, timer.number));
            // Inside the queue's lock: the memory of a deadline that is not in the queue is in the
            // alarm.
            removed.map(|(set, slot)| {
                *set.alarm.0.lock() = Some(slot);
                set
            })
        };
        drop(removed);
    }

    /// Takes the first deadline that is due at `now`.
    pub(super) fn pop(&self, now: u64) -> Option<Due> {
        let set = {
            let mut queue = self.queue.lock();
            queue.first().filter(|(moment, _)| moment.0 <= now)?;
            let (_, set, slot) = queue.take_first()?;
            *set.alarm.0.lock() = Some(slot);
            set
        };
        Some(set.due)
    }

    /// Returns the time of the first deadline; `u64::MAX` without a deadline.
    pub(super) fn first(&self) -> u64 {
        self.queue.lock().first().map_or(u64::MAX, |(&(at, _), _)| at)
    }
}

/// The end of the time slice at `now`.
pub(super) const fn end_of_turn(now: u64) -> u64 {
    now - now % TURN + TURN
}

/// Returns whether a sample is due; if so, sets the next sample one time slice later.
pub(super) fn sample_is_due(local: &Local, now: u64) -> bool {
    let due = now >= local.sample.load(Ordering::Relaxed);
    if due {
        local.sample.store(end_of_turn(now), Ordering::Relaxed);
    }
    due
}

/// Returns whether the switch from a thread at `now` must sample its time, because the interrupt
/// that is due will find another thread.
pub fn samples_switch(now: u64) -> bool {
    sample_is_due(Local::this(), now)
}

/// Sets the timer for the first deadline only, before the CPU idles.
pub fn before_idle() {
    let local = Local::this();
    arm(local, local.first());
}

/// Sets the timer also for the end of the time slice, after the CPU was idle.
pub fn begin_turn() {
    let local = Local::this();
    let end = end_of_turn(now());
    local.sample.store(end, Ordering::Relaxed);
    if end < local.armed.load(Ordering::Relaxed) {
        arm(local, end);
    }
}

/// Sets this CPU's timer to `at`, or stops the timer for `u64::MAX`.
pub(super) fn arm(local: &Local, at: u64) {
    if local.armed.swap(at, Ordering::Relaxed) == at {
        return;
    }
    if at == u64::MAX {
        apic::stop_timer();
    } else {
        apic::start_timer(at.saturating_sub(now()).max(SHORTEST));
    }
}

pub(super) fn add(deadline: u64, due: Due, alarm: &Arc<Alarm>) -> TimerId {
    let local = Local::this();
    let id = local.insert(percpu::id(), deadline, due, alarm);
    if deadline < local.armed.load(Ordering::Relaxed) {
        arm(local, deadline);
    }
    id
}

/// Wakes the running thread, `thread`, at `deadline`, in nanoseconds since boot, unless the
/// deadline is [cancelled](cancel). Only one deadline may be set at a time.
#[must_use = "the caller must cancel an unused deadline"]
pub fn wake_at(deadline: u64, thread: &Arc<Thread>) -> TimerId {
    add(deadline, Due::Wake(thread.clone()), thread.alarm())
}

/// Removes a deadline that has not passed.
pub fn cancel(timer: TimerId) {
    Local::of(timer.cpu()).remove(timer);
}
