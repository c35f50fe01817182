//! The deadlines of a CPU, in order.

use super::timers::Key;
use crate::percpu;
use crate::sync::Mutex;
use crate::task::{Process, Thread};
use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::CpuId;

/// What happens at a deadline.
pub(super) enum Due {
    /// A thread has waited long enough.
    Wake(Arc<Thread>),
    /// A timer of a process expires.
    Timer(Weak<Process>, Key),
}

/// Names a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerId {
    cpu: CpuId,
    at: u64,
    number: u64,
}

impl TimerId {
    pub(super) const fn cpu(self) -> CpuId {
        self.cpu
    }
}

/// The deadlines of one CPU.
pub(super) struct Local {
    /// By time; by number where that is the same, so that they come in the order in which they were set.
    queue: Mutex<BTreeMap<(u64, u64), Due>>,
    /// The number of the next.
    next: AtomicU64,
    /// When the CPU's timer is to go off; the CPU's own.
    pub(super) armed: AtomicU64,
    /// When the time of who runs is to be sampled next; the CPU's own.
    pub(super) sample: AtomicU64,
}

/// As many as an affinity has bits.
const CPUS: usize = 64;

static LOCALS: [Local; CPUS] = [const {
    Local {
        queue: Mutex::new(BTreeMap::new()),
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

    pub(super) fn of(cpu: CpuId) -> &'static Self {
        &LOCALS[cpu.index()]
    }

    pub(super) fn insert(&self, cpu: CpuId, at: u64, due: Due) -> TimerId {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.queue.lock().insert((at, number), due);
        TimerId { cpu, at, number }
    }

    pub(super) fn remove(&self, timer: TimerId) {
        // What it holds is dropped without the lock.
        let due = self.queue.lock().remove(&(timer.at, timer.number));
        drop(due);
    }

    /// Takes the first that is due at `now`.
    pub(super) fn pop(&self, now: u64) -> Option<Due> {
        let mut queue = self.queue.lock();
        let first = queue.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    /// When the first is due; the largest number if there is none.
    pub(super) fn first(&self) -> u64 {
        self.queue.lock().first_key_value().map_or(u64::MAX, |(&(at, _), _)| at)
    }
}
