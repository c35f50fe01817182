//! The deadlines of each CPU, and the timer that is set for the first of them or the end of a turn.

use crate::errno::Result;
use crate::task::{Process, Thread};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::CpuId;
use faultless_bare::arch::apic;
use faultless_bare::arch::clock::now;
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Slot, Weak};

/// How long a thread may run while another waits, in nanoseconds.
pub const TURN: u64 = 4_000_000;
/// The shortest time that the APIC timer is set for, in nanoseconds: what it takes to serve it.
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
    /// One of `timer_create`.
    Created(i32),
}

/// What happens at a deadline.
pub(super) enum Due {
    /// A thread has waited long enough.
    Wake(Arc<Thread>),
    /// A timer of a process expires.
    Timer(Weak<Process>, Key),
}

/// The memory of one deadline, which waits here while it is not set. So whoever has an alarm can set it at any time.
#[derive(Debug)]
pub struct Alarm(Mutex<Option<Slot<Moment, Set>>>);

/// When a deadline is due, and its number.
type Moment = (u64, u64);

/// A deadline that is set, and whose memory it has.
struct Set {
    due: Due,
    alarm: Arc<Alarm>,
}

impl Alarm {
    /// One that is not set.
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
    /// By time; by number where that is the same, so that they come in the order in which they were set.
    queue: Mutex<Map<Moment, Set>>,
    /// The number of the next.
    next: AtomicU64,
    /// When the CPU's timer is to go off; the CPU's own.
    pub(super) armed: AtomicU64,
    /// When the time of who runs is to be sampled next; the CPU's own.
    sample: AtomicU64,
}

/// As many as an affinity has bits.
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
    /// Those of this CPU.
    pub(super) fn this() -> &'static Self {
        Self::of(percpu::id())
    }

    fn of(cpu: CpuId) -> &'static Self {
        &LOCALS[cpu.index()]
    }

    /// Sets an alarm that is not set.
    fn insert(&self, cpu: CpuId, at: u64, due: Due, alarm: &Arc<Alarm>) -> TimerId {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let slot = alarm.0.lock().take();
        let Some(slot) = slot else { unreachable!("the alarm is set already") };
        let set = Set { due, alarm: alarm.clone() };
        self.queue.lock().insert(slot, (at, number), set);
        TimerId { cpu, at, number }
    }

    fn remove(&self, timer: TimerId) {
        // What it holds is dropped without the lock.
        let removed = {
            let mut queue = self.queue.lock();
            let removed = queue.take(&(timer.at, timer.number));
            // Who sees that it is not in the queue sees its memory in the alarm.
            removed.map(|(set, slot)| {
                *set.alarm.0.lock() = Some(slot);
                set
            })
        };
        drop(removed);
    }

    /// Takes the first that is due at `now`.
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

    /// When the first is due; the largest number if there is none.
    pub(super) fn first(&self) -> u64 {
        self.queue.lock().first().map_or(u64::MAX, |(&(at, _), _)| at)
    }
}

/// When the turn of who runs at `now` ends.
pub(super) const fn end_of_turn(now: u64) -> u64 {
    now - now % TURN + TURN
}

/// Whether the time is come for a sample; if so, the next is due a turn later.
pub(super) fn sample_is_due(local: &Local, now: u64) -> bool {
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
