//! Threads: kernel stack, saved registers, and the state for signals and futexes.

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

/// The thread runs, or is in a run queue.
pub(super) const RUNNABLE: u8 = 0;
/// The thread waits, or is about to wait.
pub(super) const BLOCKED: u8 = 1;
/// The thread has ended and will not run again.
pub(super) const ENDED: u8 = 2;

/// A queue of waiting threads.
pub type WaitQueue = wait_queue::WaitQueue<Thread>;

/// A thread.
pub struct Thread {
    /// The thread number (TID); for the first thread, the number of the process.
    pub tid: u32,
    /// The process.
    pub process: Arc<Process>,
    /// The signal state.
    pub signals: ThreadSignals,
    /// The address that receives the thread number when the thread first runs; 0: no store.
    pub(super) set_tid: Cell<u64>,
    /// The address that receives a zero, with a futex wake-up, when the thread ends; 0: no store.
    pub clear_tid: AtomicU64,
    /// The head of the list of robust futexes; 0: no list.
    pub robust_list: AtomicU64,
    /// The number of page faults that waited for a page to be read.
    pub(super) major_faults: AtomicU64,
    /// The allowed CPUs, as bits.
    pub affinity: AtomicU64,
    /// The memory policy: the nodes for memory mapped by the thread.
    pub mem_policy: Cell<MemPolicy>,
    /// The scheduling policy and nice value.
    pub schedule: Mutex<Schedule>,
    /// The CPU time.
    pub cpu_time: CpuTime,
    /// The numbers of voluntary and involuntary context switches.
    pub switches: [AtomicU64; 2],
    /// The state of a wait for a futex.
    pub(super) futex: Waiter,
    /// The link in the bucket of this futex.
    pub(super) futex_link: Link<Self>,
    /// The link in a run queue.
    pub(super) ready: Link<Self>,
    /// The link in the process's chain of threads.
    sibling: Link<Self>,
    /// The memory for the deadline of a wait.
    alarm: Arc<Alarm>,
    /// [`RUNNABLE`], [`BLOCKED`] or [`ENDED`].
    pub(super) state: AtomicU8,
    /// Set while a CPU still uses the stack: the thread may be in a run queue, but no other CPU may
    /// run it yet.
    pub(super) on_cpu: AtomicBool,
    /// The CPU that runs the thread or ran it last.
    pub(super) last_cpu: AtomicU16,
    /// The index of the allocation that fails next (`fail-nth`); valid while the thread does not
    /// run.
    pub(super) fail_nth: Cell<FailNth>,
    /// The remainder of the previous `fail-nth` when the setting last changed: 0 if the selected
    /// allocation has failed.
    pub fail_left: Cell<u64>,
    /// Set if the thread must end at the next opportunity: its process ends, or another thread of
    /// the process calls `execve`.
    pub(super) must_end: AtomicBool,
    /// The number of memories freed before this thread last found no free memory.
    pub(super) freed_seen: Cell<u64>,
    /// The machine part of the thread: stack, registers, predictor state.
    pub task: Task,
}

// SAFETY: the cells are accessed by the creator before the thread is queued, and then by the CPU
// that runs the thread or is switching to it; `on_cpu` admits one CPU at a time.
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
    /// Makes a thread of `process` that starts in user mode with the registers `frame`. The new
    /// thread is in neither the process's list nor a run queue.
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

    /// Returns the address of the thread's task; the inverse of [`around`](Self::around).
    pub(super) fn task_of(this: &Arc<Self>) -> *const Task {
        Arc::as_ptr(this).wrapping_byte_add(offset_of!(Self, task)).cast()
    }

    /// Returns the thread that contains this task.
    #[inline(always)]
    pub(super) const fn around(task: *const Task) -> *const Self {
        task.wrapping_byte_sub(offset_of!(Self, task)).cast()
    }

    /// Returns the memory for the deadline of a wait.
    pub const fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }

    /// Returns the CPU that runs the thread or ran it last.
    pub fn last_cpu(&self) -> CpuId {
        CpuId(self.last_cpu.load(Ordering::Relaxed))
    }

    /// Returns whether this is the first thread of its process.
    pub fn is_leader(&self) -> bool {
        self.tid == self.process.pid
    }

    /// Returns the usage so far.
    pub fn usage(&self) -> Usage {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let major_faults = load(&self.major_faults);
        Usage {
            times: self.cpu_time.times(),
            // A major fault waits, and the repeated access then faults again and is served: the
            // second fault is not minor.
            minor_faults: self.task.faults().saturating_sub(major_faults),
            major_faults,
            switches: self.switches.each_ref().map(load),
            most_resident: 0,
        }
    }

    /// Returns the CPU time so far, in nanoseconds.
    pub fn run_time(&self) -> u64 {
        self.cpu_time.ran()
    }

    /// Returns whether the thread waits or has ended.
    pub fn waits(&self) -> bool {
        self.state.load(Ordering::Relaxed) != RUNNABLE
    }

    /// Returns whether the thread must end instead of continuing.
    pub fn must_end(&self) -> bool {
        self.must_end.load(Ordering::SeqCst)
    }
}

/// The running thread. The value cannot leave the thread, which exists while its code runs.
pub struct Current(*const Thread, PhantomData<*const ()>);

/// Returns the running thread. Must not be called without a running thread: at boot, in idle, in
/// interrupts of idle.
#[inline]
pub fn current() -> Current {
    let task = faultless_bare::task::current(percpu::this());
    debug_assert!(!task.is_null(), "no current thread");
    Current(Thread::around(task), PhantomData)
}

/// Returns the running thread, if any.
#[inline]
pub fn try_current() -> Option<Current> {
    let task = faultless_bare::task::current(percpu::this());
    (!task.is_null()).then(|| Current(Thread::around(task), PhantomData))
}

impl Current {
    /// Returns whether `thread` is the running thread.
    pub fn is(&self, thread: &Arc<Thread>) -> bool {
        ptr::eq(self.0, Arc::as_ptr(thread))
    }

    /// Returns a reference to the running thread.
    pub fn arc(&self) -> Arc<Thread> {
        // SAFETY: the scheduler holds a reference to the running thread.
        unsafe { Arc::another(self.0) }
    }
}

impl Deref for Current {
    type Target = Thread;

    #[inline]
    fn deref(&self) -> &Thread {
        // SAFETY: the scheduler holds a reference to the thread while its code runs, and this value
        // cannot leave its thread.
        unsafe { &*self.0 }
    }
}
