//! Per-CPU data.
//!
//! In the kernel the GS base of a CPU is its [`PerCpu`], from its first instructions on. Interrupts
//! are off and the kernel is not preempted, so accesses through [`this`] need no locks. A thread
//! that yields the CPU may continue on another CPU: it must not keep references to per-CPU data
//! across the switch.
//!
//! [`Remote`], on separate cache lines, contains the fields accessed by other CPUs.

pub use crate::arch::apic::MAX_CPUS;
use crate::descriptors::Descriptors;
use crate::heap::local::Local;
use crate::machine::Bare;
use crate::pcid::Slots;
use core::arch::asm;
use core::cell::{Cell, RefCell, UnsafeCell};
use core::fmt;
use core::mem::{MaybeUninit, offset_of};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use faultless::locks::Padded;
use faultless::locks::Permit;
use faultless::{Cpu, CpuId, Space, Vm};
use x86_64::VirtAddr;
use x86_64::registers::model_specific::GsBase;

/// Counted interrupts, for `/proc/interrupts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// Timer interrupts.
    Timer,
    /// Reschedule interrupts.
    Reschedule,
    /// Flush requests.
    Flush,
    /// Interrupts of devices.
    Device,
}

/// The private data of one CPU.
#[repr(C)]
pub struct PerCpu {
    /// The address of this structure; the first field.
    this: Cell<*const Self>,
    /// The stack for entries from user mode.
    pub(crate) kernel_stack: Cell<u64>,
    /// The lowest byte of the stack on which this CPU starts and idles.
    pub(crate) idle_stack: Cell<u64>,
    /// The number of [guards](crate::paging::guards) when this CPU last dropped its translations of
    /// kernel addresses.
    pub(crate) guards: Cell<u64>,
    /// The program's stack pointer, saved here by SYSCALL's entry for a few instructions.
    pub(crate) user_stack: Cell<u64>,
    /// Set if this CPU must call [`Kernel::attention`](crate::Kernel::attention) before it returns
    /// to user mode.
    pub attention: AtomicBool,
    /// The CPU number. The boot CPU may still change the number before this CPU gets the subsystem.
    pub(crate) id: Cell<CpuId>,
    /// The running [task](crate::task), if any.
    pub(crate) current: Cell<*const ()>,
    /// The running space, if any. Set by [`machine::run`](crate::machine::run).
    pub space: Cell<*const Space<Bare>>,
    /// The running space's number, or 0.
    pub(crate) running: Cell<u64>,
    /// Set if [`vm`] and [`cpu`] may be called.
    ready: Cell<bool>,
    vm: Cell<*const Vm<Bare>>,
    cpu: UnsafeCell<MaybeUninit<Cpu<'static, Bare>>>,
    pub(crate) heap: Local,
    pub(crate) slots: RefCell<Slots>,
    /// Set while this CPU serves flush requests. See [`plant`](crate::machine::plant).
    pub(crate) serving: Cell<bool>,
    /// Set if a flush is delayed to the next tick. See [`plant`](crate::machine::plant).
    pub(crate) late: Cell<bool>,
    pub(crate) descriptors: Descriptors,
}

impl PerCpu {
    /// The data of CPU `id`.
    pub const fn new(id: CpuId) -> Self {
        Self {
            this: Cell::new(ptr::null()),
            kernel_stack: Cell::new(0),
            idle_stack: Cell::new(0),
            guards: Cell::new(0),
            user_stack: Cell::new(0),
            attention: AtomicBool::new(false),
            id: Cell::new(id),
            current: Cell::new(ptr::null()),
            space: Cell::new(ptr::null()),
            running: Cell::new(0),
            ready: Cell::new(false),
            vm: Cell::new(ptr::null()),
            cpu: UnsafeCell::new(MaybeUninit::uninit()),
            heap: Local::new(),
            slots: RefCell::new(Slots::new()),
            serving: Cell::new(false),
            late: Cell::new(false),
            descriptors: Descriptors::new(),
        }
    }

    /// Returns the right to call the subsystem from this CPU.
    #[inline(always)]
    pub fn cpu(&self) -> &Cpu<'static, Bare> {
        debug_assert!(self.ready.get(), "no subsystem yet");
        // SAFETY: made by `enter`, before any code that calls the subsystem runs on this CPU.
        unsafe { (*self.cpu.get()).assume_init_ref() }
    }

    /// Counts an interrupt.
    pub(crate) fn count(&self, interrupt: Interrupt) {
        let count = &remote(self.id.get()).interrupts[interrupt as usize];
        // Only this CPU writes the count.
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

impl fmt::Debug for PerCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PerCpu({})", self.id.get().0)
    }
}

const _: () = assert!(offset_of!(PerCpu, this) == 0);

/// Per-CPU data accessed by other CPUs.
pub(crate) struct Remote {
    interrupts: [AtomicU64; 4],
    /// The time of the oldest pending flush request, in nanoseconds since boot; 0 without a pending
    /// request.
    pub(crate) asked: AtomicU64,
    /// For [`Bare`]'s `park`.
    pub(crate) permit: Permit,
}

static REMOTES: [Padded<Remote>; MAX_CPUS] = [const {
    Padded(Remote {
        interrupts: [const { AtomicU64::new(0) }; 4],
        asked: AtomicU64::new(0),
        permit: Permit::new(),
    })
}; MAX_CPUS];

/// The number of running CPUs.
static CPUS: AtomicUsize = AtomicUsize::new(1);

/// Returns the data of a CPU accessed by other CPUs.
#[inline]
pub(crate) fn remote(id: CpuId) -> &'static Remote {
    &REMOTES[id.index()]
}

/// Returns the private data of this CPU.
#[inline(always)]
pub fn this() -> &'static PerCpu {
    let this: *const PerCpu;
    // SAFETY: in the kernel the GS base is this CPU's `PerCpu`, which is never freed and whose
    // first field is its address. Not `pure`: after a switch the thread may be on another CPU.
    unsafe {
        asm!("mov {}, gs:[0]", out(reg) this, options(nomem, nostack, preserves_flags));
        &*this
    }
}

/// Returns the right to call the subsystem from this CPU. The reference must not be kept while the
/// thread yields the CPU.
#[inline(always)]
pub fn cpu() -> &'static Cpu<'static, Bare> {
    this().cpu()
}

/// Returns whether [`cpu`] may be called: always, except early in boot.
pub fn has_cpu() -> bool {
    this().ready.get()
}

/// This CPU's number.
#[inline]
pub fn id() -> CpuId {
    this().id.get()
}

/// The subsystem.
#[inline]
pub fn vm() -> &'static Vm<Bare> {
    // SAFETY: set by `enter`, with a `'static` reference.
    unsafe { &*this().vm.get() }
}

/// Returns the number of running CPUs.
pub fn cpus() -> usize {
    CPUS.load(Ordering::Relaxed)
}

/// Returns the number of interrupts of a CPU, by [`Interrupt`].
pub fn interrupts(cpu: CpuId) -> [u64; 4] {
    remote(cpu).interrupts.each_ref().map(|count| count.load(Ordering::Relaxed))
}

pub(crate) fn set_cpus(cpus: usize) {
    CPUS.store(cpus, Ordering::Relaxed);
}

/// Makes `here` the data of this CPU, and loads its tables.
///
/// # Safety
/// Called once on this CPU, with data used by no other CPU, after
/// [`set_entries`](crate::descriptors::set_entries).
pub(crate) unsafe fn install(here: &'static PerCpu) {
    here.this.set(here);
    // SAFETY: the data belongs permanently to this CPU alone.
    unsafe {
        here.descriptors.load();
        set(here);
    }
}

/// Allows this CPU to call the subsystem from now on.
///
/// # Safety
/// Called once on this CPU, whose number is below the machine's number of CPUs.
pub(crate) unsafe fn enter(vm: &'static Vm<Bare>) {
    let here = this();
    // SAFETY: the only `Cpu` of this number. Interrupt handlers call the subsystem only to serve
    // flushes and to complete reads, and never inside another call of the subsystem, since
    // interrupts are off there.
    unsafe { (*here.cpu.get()).write(vm.cpu(here.id.get())) };
    here.vm.set(vm);
    here.ready.set(true);
}

/// Makes `here` this CPU's [`PerCpu`].
///
/// # Safety
/// `here` belongs to this CPU alone, and does not move.
unsafe fn set(here: &'static PerCpu) {
    GsBase::write(VirtAddr::from_ptr(here));
}
