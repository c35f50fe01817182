//! A thread: its kernel stack, its registers while it does not run, and its state for signals and futexes.

use super::Process;
use super::futex::Waiter;
use super::schedule::Schedule;
use super::usage::Usage;
use super::wait_queue;
use crate::errno::{Errno, Result};
use crate::signal::ThreadSignals;
use crate::time::{Alarm, CpuTime};
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::mem::offset_of;
use core::ops::Deref;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};
use faultless::{CpuId, MemPolicy};
use faultless_bare::arch::TrapFrame;
use faultless_bare::arch::fpu::FpuState;
use faultless_bare::heap::FailNth;
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use faultless_bare::task::Task;
use faultless_collections::{Arc, Link, Linked};

/// It runs, or is in a queue of the scheduler.
pub(super) const RUNNABLE: u8 = 0;
/// It waits, or is about to.
pub(super) const BLOCKED: u8 = 1;
/// It will not run again.
pub(super) const ENDED: u8 = 2;

/// A queue of waiting threads.
pub type WaitQueue = wait_queue::WaitQueue<Thread>;

/// A thread.
pub struct Thread {
    /// Its thread number (TID); that of the process for the first one.
    pub tid: u32,
    /// Its process.
    pub process: Arc<Process>,
    /// Its signal state.
    pub signals: ThreadSignals,
    /// Where its number is stored when it first runs; 0: nowhere.
    pub(super) set_tid: Cell<u64>,
    /// Where a zero is stored, and a futex woken, when it ends; 0: nowhere.
    pub clear_tid: AtomicU64,
    /// The head of its list of robust futexes; 0: none.
    pub robust_list: AtomicU64,
    /// Its page faults that waited for a page to be read.
    pub(super) major_faults: AtomicU64,
    /// The CPUs it may run on, as bits.
    pub affinity: AtomicU64,
    /// From which nodes the memory comes that it maps.
    pub mem_policy: Cell<MemPolicy>,
    /// Its scheduling policy and nice value.
    pub schedule: Mutex<Schedule>,
    /// How long it ran.
    pub cpu_time: CpuTime,
    /// Its voluntary and involuntary context switches.
    pub switches: [AtomicU64; 2],
    /// The futex that it waits for.
    pub(super) futex: Waiter,
    /// Its place in the bucket of that futex.
    pub(super) futex_link: Link<Self>,
    /// Its place in a run queue.
    pub(super) ready: Link<Self>,
    /// Its place among the threads of its process.
    sibling: Link<Self>,
    /// The memory for its deadline while it waits.
    alarm: Arc<Alarm>,
    /// [`RUNNABLE`], [`BLOCKED`] or [`ENDED`].
    pub(super) state: AtomicU8,
    /// Whether a CPU still uses its stack: it may be in a run queue, but no other CPU may run it yet.
    pub(super) on_cpu: AtomicBool,
    /// The CPU that it runs on or ran on last.
    pub(super) last_cpu: AtomicU16,
    /// Which of its next allocations fails (`fail-nth`); valid while it does not run.
    pub(super) fail_nth: Cell<FailNth>,
    /// The rest of the previous `fail-nth` when it was last set: 0 if that allocation has failed.
    pub fail_left: Cell<u64>,
    /// Whether it must end at the next opportunity: its process ends, or another thread of it calls
    /// `execve`.
    pub(super) must_end: AtomicBool,
    /// How many memories had been freed when it last found no free memory.
    pub(super) freed_seen: Cell<u64>,
    /// Its part in the machine: stack, registers, predictor state.
    pub task: Task,
}

// SAFETY: the cells are accessed by the creator before the thread is queued, and then by
// the CPU that runs it or is switching to it; by `on_cpu` that is one at a time.
unsafe impl Sync for Thread {}
// SAFETY: as above.
unsafe impl Send for Thread {}

/// The threads of a process, as a kind of [chains](faultless_collections::Chain).
#[derive(Debug)]
pub struct Siblings;

// SAFETY: the field has no other use.
unsafe impl Linked<Siblings> for Thread {
    fn link(&self) -> &Link<Self> {
        &self.sibling
    }
}

impl fmt::Debug for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread {} of {}", self.tid, self.process.pid)
    }
}

impl Thread {
    /// A thread of `process` that starts in user mode with the registers `frame`. It is neither
    /// in the process's list nor in a run queue.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(
        tid: u32,
        process: Arc<Process>,
        frame: TrapFrame,
        fpu: FpuState,
        signals: ThreadSignals,
        affinity: u64,
    ) -> Result<Arc<Self>> {
        if faultless_bare::heap::low() {
            return Err(Errno::ENOMEM);
        }
        let task = Task::try_new(frame, fpu).ok_or(Errno::ENOMEM)?;
        let alarm = Alarm::try_new()?;
        Ok(Arc::try_new(Self {
            tid,
            process,
            signals,
            set_tid: Cell::new(0),
            clear_tid: AtomicU64::new(0),
            robust_list: AtomicU64::new(0),
            major_faults: AtomicU64::new(0),
            affinity: AtomicU64::new(affinity),
            mem_policy: Cell::default(),
            schedule: Mutex::default(),
            cpu_time: CpuTime::default(),
            switches: [AtomicU64::new(0), AtomicU64::new(0)],
            futex: Waiter::default(),
            futex_link: Link::new(),
            ready: Link::new(),
            sibling: Link::new(),
            alarm,
            state: AtomicU8::new(RUNNABLE),
            on_cpu: AtomicBool::new(false),
            last_cpu: AtomicU16::new(percpu::id().0),
            fail_nth: Cell::default(),
            fail_left: Cell::new(0),
            must_end: AtomicBool::new(false),
            freed_seen: Cell::new(0),
            task,
        })?)
    }

    /// The address of its task, from which [`around`](Self::around) finds it again.
    pub(super) fn task_of(this: &Arc<Self>) -> *const Task {
        Arc::as_ptr(this).wrapping_byte_add(offset_of!(Self, task)).cast()
    }

    /// The thread whose task this is.
    #[inline(always)]
    pub(super) const fn around(task: *const Task) -> *const Self {
        task.wrapping_byte_sub(offset_of!(Self, task)).cast()
    }

    /// The memory for its deadline while it waits.
    pub const fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }

    /// The CPU that it runs on or ran on last.
    pub fn last_cpu(&self) -> CpuId {
        CpuId(self.last_cpu.load(Ordering::Relaxed))
    }

    /// Whether it is the first thread of its process.
    pub fn is_leader(&self) -> bool {
        self.tid == self.process.pid
    }

    /// Its usage so far.
    pub fn usage(&self) -> Usage {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let major_faults = load(&self.major_faults);
        Usage {
            times: self.cpu_time.times(),
            // After it has waited, the access is made again, and its fault served.
            minor_faults: self.task.faults().saturating_sub(major_faults),
            major_faults,
            switches: self.switches.each_ref().map(load),
            most_resident: 0,
        }
    }

    /// Nanoseconds that it ran so far.
    pub fn run_time(&self) -> u64 {
        self.cpu_time.ran()
    }

    /// Whether it waits, or has ended.
    pub fn waits(&self) -> bool {
        self.state.load(Ordering::Relaxed) != RUNNABLE
    }

    /// Whether it must end instead of continuing.
    pub fn must_end(&self) -> bool {
        self.must_end.load(Ordering::SeqCst)
    }
}

/// The running thread. The value cannot leave the thread, which exists while its code runs.
pub struct Current(*const Thread, PhantomData<*const ()>);

/// The running thread. Must not be called where none runs: at boot, in idle, in interrupts of idle.
#[inline]
pub fn current() -> Current {
    let task = faultless_bare::task::current(percpu::this());
    debug_assert!(!task.is_null(), "no thread runs here");
    Current(Thread::around(task), PhantomData)
}

/// The running thread, if one runs.
#[inline]
pub fn try_current() -> Option<Current> {
    let task = faultless_bare::task::current(percpu::this());
    (!task.is_null()).then(|| Current(Thread::around(task), PhantomData))
}

impl Current {
    /// Whether it is this one.
    pub fn is(&self, thread: &Arc<Thread>) -> bool {
        ptr::eq(self.0, Arc::as_ptr(thread))
    }

    /// A reference to it.
    pub fn arc(&self) -> Arc<Thread> {
        // SAFETY: the scheduler holds a reference to the running thread.
        unsafe { Arc::another(self.0) }
    }
}

impl Deref for Current {
    type Target = Thread;

    #[inline]
    fn deref(&self) -> &Thread {
        // SAFETY: the scheduler holds a reference to the thread while its code runs, and this value cannot
        // leave that code.
        unsafe { &*self.0 }
    }
}
