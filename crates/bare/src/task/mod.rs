//! A task: the unit of execution on a CPU. Each thread of a kernel contains a task.
//!
//! A CPU that runs a task has the task in [`current`] and its registers in the processor, and
//! enters the kernel on its stack. A kernel switches in this order: it [saves](Registers::save) the
//! registers of the old task, [loads](Registers::load) the registers of the next task, sets [its
//! stack](context::set_kernel_stack) and [its space](crate::machine::run), and
//! [switches](context::switch) the contexts. The kernel chooses the next task and the time of a
//! switch.

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

/// A unit of execution on a CPU.
pub struct Task {
    /// The predictor's state of the task's page faults; only the task accesses this field.
    pub streams: ThreadStreams,
    /// The number of served page faults in user mode.
    faults: AtomicU64,
    /// The lack of frames found by a copy from or to user memory. If there is one, the CPU's
    /// [attention](crate::percpu::PerCpu::attention) is set. Only the task accesses this field.
    pub lack: Cell<Lack>,
    /// The kernel stack.
    pub stack: KernelStack,
    /// The registers while the task does not run.
    pub registers: Registers,
}

// SAFETY: the cells are accessed by the creator, and then by the CPU that runs the task or is
// switching to it; callers of `switch` ensure that only one CPU does this at a time.
unsafe impl Sync for Task {}
// SAFETY: as above.
unsafe impl Send for Task {}

impl Task {
    /// Returns a task that starts in user mode with the registers `frame`; `None` if the heap is
    /// exhausted.
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

    /// Returns the number of served page faults in user mode.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// Counts a served page fault.
    #[inline(always)]
    pub(crate) fn count_fault(&self) {
        // Only the task itself writes the count.
        self.faults.store(self.faults() + 1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Task({:?})", self.stack)
    }
}

/// Returns the task that runs on this CPU; null if no task runs.
#[inline(always)]
pub fn current(here: &PerCpu) -> *const Task {
    here.current.get().cast()
}

/// Makes `task` the task that runs on this CPU; null for no task.
///
/// # Safety
/// The task exists until the next call of this function on this CPU.
#[inline(always)]
pub unsafe fn set_current(here: &PerCpu, task: *const Task) {
    here.current.set(task.cast());
}

/// Returns the task that runs on this CPU, if any.
#[inline(always)]
pub fn running(here: &PerCpu) -> Option<&Task> {
    // SAFETY: by the contract of `set_current`; the reference is used only on this CPU, by the
    // task's code or by a handler that interrupted the task.
    unsafe { current(here).as_ref() }
}

/// The registers of a task that the kernel does not use, while the task does not run. (The other
/// registers are in the frame on the task's stack.)
pub struct Registers {
    /// The point at which the task's kernel code continues.
    pub context: UnsafeCell<Context>,
    fpu: UnsafeCell<FpuState>,
    /// The user's data segment selectors.
    pub selectors: Cell<Selectors>,
    /// The user's FS base: the address of its thread-local storage.
    pub fs_base: Cell<u64>,
    /// The user's GS base.
    pub gs_base: Cell<u64>,
}

impl Registers {
    /// Stores the processor's registers in `self`.
    ///
    /// # Safety
    /// `self` belongs to the task that this CPU runs.
    #[inline]
    pub unsafe fn save(&self) {
        // SAFETY: by the contract, no other code accesses the cell.
        unsafe { fpu::save(&mut *self.fpu.get()) };
        self.selectors.set(Selectors::current());
        self.fs_base.set(arch::fs_base());
        self.gs_base.set(arch::gs_base());
    }

    /// Loads the processor's registers from `self`.
    ///
    /// # Safety
    /// `self` belongs to the task that this CPU is about to run; no other CPU runs the task.
    #[inline]
    pub unsafe fn load(&self) {
        // SAFETY: by the contract, no other code accesses the cell.
        unsafe { fpu::restore(&*self.fpu.get()) };
        // Before the bases, because loading selectors changes the bases.
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
