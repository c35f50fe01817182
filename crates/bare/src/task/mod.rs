//! A task: what can run on a CPU. Each thread of a kernel contains one.
//!
//! A CPU that runs a task has it as [`current`], has its registers in the processor, and enters the kernel on its
//! stack. A kernel switches in this order: it [saves](Registers::save) the registers of the old task,
//! [loads](Registers::load) those of the next, sets [its stack](context::set_kernel_stack)
//! and [its space](crate::machine::run), and [switches](context::switch) the contexts. The kernel decides
//! which task is next, and when.

pub mod context;
pub(crate) mod exit;
pub mod stack;

use crate::arch::fpu::{self, FpuState};
use crate::arch::{self, Selectors, TrapFrame};
use crate::percpu::PerCpu;
use crate::reserve::Lack;
use context::Context;
use core::cell::{Cell, UnsafeCell};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::ThreadStreams;
use stack::KernelStack;

/// What can run on a CPU.
pub struct Task {
    /// The predictor's state of its page faults; only the task accesses it.
    pub streams: ThreadStreams,
    /// Its page faults in user mode that were served.
    faults: AtomicU64,
    /// Whether a copy from or to its user memory found no free frame. Its CPU's
    /// [attention](crate::percpu::PerCpu::attention) is set then. Only the task accesses it.
    pub lack: Cell<Lack>,
    /// Its kernel stack.
    pub stack: KernelStack,
    /// Its registers while it does not run.
    pub registers: Registers,
}

// SAFETY: the cells are accessed by the creator, and then by the CPU that runs the task or is
// switching to it; callers of `switch` ensure that this is one at a time.
unsafe impl Sync for Task {}
// SAFETY: as above.
unsafe impl Send for Task {}

impl Task {
    /// A task that starts in user mode with the registers `frame`; `None` when the heap is exhausted.
    pub fn try_new(frame: TrapFrame, fpu: FpuState) -> Option<Self> {
        let stack = KernelStack::try_new()?;
        let context = context::prepare(&stack, frame);
        Some(Self {
            streams: ThreadStreams::new(),
            faults: AtomicU64::new(0),
            lack: Cell::default(),
            stack,
            registers: Registers {
                context: UnsafeCell::new(context),
                fpu: UnsafeCell::new(fpu),
                selectors: Cell::default(),
                fs_base: Cell::new(0),
                gs_base: Cell::new(0),
            },
        })
    }

    /// How many of its page faults in user mode were served.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// Counts one more.
    #[inline(always)]
    pub(crate) fn count_fault(&self) {
        // Only the task itself writes it.
        self.faults.store(self.faults() + 1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Task({:?})", self.stack)
    }
}

/// The task that runs on this CPU; null if none does.
#[inline(always)]
pub fn current(here: &PerCpu) -> *const Task {
    here.current.get().cast()
}

/// Makes `task` the task that runs on this CPU; null for none.
///
/// # Safety
/// It exists until another takes its place.
#[inline(always)]
pub unsafe fn set_current(here: &PerCpu, task: *const Task) {
    here.current.set(task.cast());
}

/// The task that runs on this CPU, if one does.
#[inline(always)]
pub fn running(here: &PerCpu) -> Option<&Task> {
    // SAFETY: by the contract of `set_current`; the reference is used on this CPU only, by the task's code
    // or by a handler that interrupted it.
    unsafe { current(here).as_ref() }
}

/// The registers of a task that the kernel does not use, while the task does not run. (The others
/// are in the frame on its stack.)
pub struct Registers {
    /// Where its kernel code continues.
    pub context: UnsafeCell<Context>,
    fpu: UnsafeCell<FpuState>,
    /// The user's data segment selectors.
    pub selectors: Cell<Selectors>,
    /// The user's FS base, that of its thread-local storage.
    pub fs_base: Cell<u64>,
    /// The user's GS base.
    pub gs_base: Cell<u64>,
}

impl Registers {
    /// Stores the processor's registers in it.
    ///
    /// # Safety
    /// `self` belongs to the task that this CPU runs.
    #[inline]
    pub unsafe fn save(&self) {
        // SAFETY: by the contract no other code accesses it.
        unsafe { fpu::save(&mut *self.fpu.get()) };
        self.selectors.set(Selectors::current());
        self.fs_base.set(arch::fs_base());
        self.gs_base.set(arch::gs_base());
    }

    /// Loads the processor's registers from it.
    ///
    /// # Safety
    /// `self` belongs to the task that this CPU is about to run; no other CPU runs it.
    #[inline]
    pub unsafe fn load(&self) {
        // SAFETY: by the contract no other code accesses it.
        unsafe { fpu::restore(&*self.fpu.get()) };
        // Before the bases, which they change.
        self.selectors.get().load();
        arch::set_fs_base(self.fs_base.get());
        arch::set_gs_base(self.gs_base.get());
    }
}

impl fmt::Debug for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registers")
    }
}
