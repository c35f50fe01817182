//! The platform required by the subsystem: memory, CPUs, their TLBs, and interrupts between CPUs.

use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::fault::prefault::Predictor;
use core::fmt;

/// The maximum number of CPUs of a machine.
pub const MAX_CPUS: usize = 1024;

/// The number of a CPU, `0..Machine::cpus()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuId(pub u16);

impl CpuId {
    /// Returns the number as an index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Identifies an address space in TLBs. Never reused within one `Vm`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpaceId(pub u64);

impl fmt::Debug for SpaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "space {}", self.0)
    }
}

/// The lowest address that programs may map, by default: Linux's usual `vm.mmap_min_addr`.
pub(crate) const LOWEST_ADDRESS: u64 = 65536;

/// The maximum number of memory nodes of a machine.
pub const MAX_NODES: usize = 8;

/// A run of frames that the subsystem may allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// The memory node (tier or socket), below [`MAX_NODES`].
    pub node: u8,
    /// First frame of the run.
    pub first: FrameNumber,
    /// Frames in the run.
    pub frames: u32,
}

/// Which translations of a space to drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalidate {
    /// Translations of the pages in this range, and every cached upper-level entry above them.
    Range(VirtRange),
    /// All translations of the space.
    All,
}

/// The platform below a [`Vm`](crate::Vm).
///
/// # Safety
///
/// The subsystem's memory safety depends on these promises of the implementor:
///
/// - `cpus` and `regions` never change. Regions do not overlap, end below frame number
///   [`u32::MAX`], and only the subsystem uses their frames.
/// - For every frame of a region, `frame_bytes(f)` is a pointer to [`PAGE_SIZE`] bytes of memory,
///   page-aligned, valid for reads and writes for the machine's whole life. It is the same memory
///   that guest programs access through a translation to `f`; different frames do not overlap.
/// - When `invalidate` or `invalidate_all` returns, the calling CPU uses no translation of this
///   space in this range, nor any cached table pointer above it, from before the call; page-table
///   walks started before the call have ended.
/// - CPUs use the tables of a space, and translations from these tables, only while they run the
///   space: from [`Space::activate`](crate::Space::activate) to
///   [`Space::deactivate`](crate::Space::deactivate) on the CPU.
/// - After `interrupt(c)`, CPU `c`, while it runs a space, soon calls
///   [`Cpu::serve_flushes`](crate::Cpu::serve_flushes), between two instructions of its program;
///   inside a call, the subsystem does this itself.
/// - All stores before `interrupt(c)` on the calling CPU *happen before* the resulting
///   `serve_flushes` on CPU `c`. `serve_flushes` reads the queue with a relaxed load. Without this
///   ordering it could miss the request. A flag that is set with release and read with acquire is
///   sufficient; a command to an interrupt controller is issued after earlier stores.
/// - Between the begin and the end of `park`, and nowhere else inside a call of the subsystem, the
///   machine may take interrupts on the calling CPU. Their handlers may call
///   [`Cpu::serve_flushes`](crate::Cpu::serve_flushes) with the `Cpu` of the interrupted call, and
///   no other function of the subsystem with this `Cpu`. (Other code that a kernel runs on the core
///   during `park` does not count as this `Cpu`.)
/// - No function of the machine calls the subsystem with the `Cpu` whose call invoked the function,
///   except as documented for `park` and `poll_reads`: this CPU is in the middle of a call.
/// - Code that walks the tables supports the whole [format](crate::format), including leaves above
///   the last level, which map text (`huge_text`). [`Space::walk`](crate::Space::walk) does this
///   for a software MMU.
/// - Hardware changes page-table entries only by setting the accessed and dirty bits of present
///   entries, atomically; it sets the dirty bit only of a writable entry, before the store is done.
/// - A CPU uses, and caches, a translation only of an entry with the accessed bit set, and sets the
///   bit first. Reclaim unmaps a page with a clear accessed bit without a flush.
///   [`Space::walk`](crate::Space::walk) keeps this promise, too.
///
/// # Panics
///
/// No function of the machine may panic. The subsystem calls these functions while it holds
/// entries, claims and locks: after a panic other CPUs would wait indefinitely. A
/// [store](crate::BackingStore), a watcher of trace points and the closure of a call may panic: the
/// call unwinds, and the CPU holds no locks afterwards. The pages of a read that panicked are read
/// again, and the pages of a write that panicked stay dirty. After a panic of a
/// [predictor](Self::Predictor) the CPU holds no lock, but a fault may leak a frame.
pub unsafe trait Machine: Send + Sync + 'static {
    /// The predictor of the pages that a fault maps in addition to its own:
    /// [`Streams`](crate::prefault::Streams), or another policy for experiments.
    type Predictor: Predictor;

    /// Returns the number of CPUs, `1..=MAX_CPUS`.
    fn cpus(&self) -> usize;

    /// Returns the memory managed by the subsystem.
    fn regions(&self) -> &[MemoryRegion];

    /// Returns the memory node nearest to `cpu`. The frames of the CPU come from this node while it
    /// has free frames, and then from the other nodes in the order of their numbers. The result
    /// never changes.
    fn nearest_node(&self, cpu: CpuId) -> u8 {
        let _ = cpu;
        0
    }

    /// Returns the cost of an access to memory of `node`, in any unit; nodes with a higher cost are
    /// slower. Unused pages [move](crate::Cpu::balance) from faster nodes to slower nodes. By
    /// default all nodes have the same cost, as if nodes were sockets. The result never changes.
    fn node_cost(&self, node: u8) -> u32 {
        let _ = node;
        1
    }

    /// Returns the lowest address that programs may map, a multiple of [`PAGE_SIZE`] below
    /// [`USER_END`](crate::USER_END). The result never changes. Below it a program's null pointers
    /// fault, and no mapping is placed. If a hypervisor's guest memory is a space, the lowest
    /// address is 0.
    fn lowest_address(&self) -> u64 {
        LOWEST_ADDRESS
    }

    /// Returns a pointer to the bytes of `frame`, a frame of one of the regions.
    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8;

    /// Drops translations of `space` from the TLB of `cpu`, which is the calling CPU.
    fn invalidate(&self, cpu: CpuId, space: SpaceId, what: Invalidate);

    /// Drops all translations of every space from the TLB of `cpu`, which is the calling CPU.
    fn invalidate_all(&self, cpu: CpuId);

    /// Requests `cpu`, another CPU, to serve its flush requests. All earlier stores of the caller
    /// are visible by then.
    fn interrupt(&self, cpu: CpuId);

    /// Called between two reads in a wait loop for another CPU; `looks` counts the calls from 0. A
    /// machine whose CPUs share real cores should yield if `looks` is large.
    fn relax(&self, looks: u32) {
        let _ = looks;
        core::hint::spin_loop();
    }

    /// Releases the core of `cpu`, the calling CPU, because its wait may take long, until another
    /// CPU [wakes](Self::wake) or [interrupts](Self::interrupt) the CPU. Spurious returns are
    /// allowed. A wake-up or interrupt must not be lost: if it came after the last return of
    /// `park`, the next `park` returns at once. Stores of the waking or interrupting CPU before the
    /// wake-up are visible after the return. A [`Permit`](crate::sync::park::Permit) implements
    /// these rules.
    ///
    /// By default a CPU only [relaxes](Self::relax), which is correct if each CPU has its own core.
    /// A machine that implements `park` implements `wake`, too.
    fn park(&self, cpu: CpuId) {
        let _ = cpu;
        self.relax(u32::MAX);
    }

    /// Ends the [`park`](Self::park) of `cpu`, another CPU, or its next `park`. Called under no
    /// lock.
    fn wake(&self, cpu: CpuId) {
        let _ = cpu;
    }

    /// Called repeatedly by `cpu`, the calling CPU, while it [waits](crate::Cpu::await_read) for a
    /// read of a backing store. If no other CPU can receive the device's completion, because this
    /// CPU's interrupts are off, the machine polls the device here and
    /// [completes](crate::Reading::complete) reads. Completion requires the CPU's own
    /// [`Cpu`](crate::Cpu), which such a kernel stores in a place accessible to this function.
    /// Calls that need a page under read wait in the same way: [`Space::pin`](crate::Space::pin),
    /// [`Space::read_bytes`](crate::Space::read_bytes) and similar calls.
    fn poll_reads(&self, cpu: CpuId) {
        let _ = cpu;
    }

    /// Fills `frame` with zeros. The caller owns the frame.
    ///
    /// # Safety
    /// `frame` belongs to the caller alone, and no translation to it exists.
    #[inline(always)]
    unsafe fn zero_frame(&self, frame: FrameNumber) {
        // SAFETY: `frame_bytes` is valid for a page by the trait's contract; the caller owns the
        // frame.
        unsafe { core::ptr::write_bytes(self.frame_bytes(frame), 0, PAGE_SIZE as usize) };
    }

    /// Fills `frames` frames, starting with `first`, with zeros which no CPU will read soon. A
    /// machine may use stores that bypass the caches and are slower to read back, as
    /// [`zero_nontemporal`] does. The zeros are visible before later stores of the caller.
    ///
    /// # Safety
    /// The frames are one block, belong to the caller alone, and no translation to them exists.
    unsafe fn zero_ahead(&self, first: FrameNumber, frames: u32) {
        for frame in first.0..first.0 + frames {
            // SAFETY: the caller's promise.
            unsafe { self.zero_frame(FrameNumber(frame)) };
        }
    }

    /// Prefetches the first cache line of `frame`, which was zeroed long ago and is about to be
    /// used: a hint.
    #[inline(always)]
    fn prefetch_frame(&self, frame: FrameNumber) {
        prefetch(self.frame_bytes(frame));
    }

    /// Copies the bytes of `from` to `to`.
    ///
    /// # Safety
    /// `to` belongs to the caller alone; `from` stays allocated during the call. Programs may store
    /// to `from` during the call. Then the copy may mix old and new bytes. Either the caller
    /// discards the copy, or `from` is a page of a file under concurrent writes by programs, and
    /// readers of such a file may see a mix.
    #[inline(always)]
    unsafe fn copy_frame(&self, to: FrameNumber, from: FrameNumber) {
        // SAFETY: both are valid for a page and distinct by the trait's contract. A racing store of
        // a program is outside the Rust memory model, as on any kernel; the caller expects no
        // particular bytes in this case.
        unsafe {
            core::ptr::copy_nonoverlapping(
                self.frame_bytes(from).cast_const(),
                self.frame_bytes(to),
                PAGE_SIZE as usize,
            );
        }
    }
}

/// Prefetches the cache line at `at`, if the host has such a hint. Accesses no memory.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // Prefetches to the second level, because lines at the same offset of many pages compete for a
    // few lines of the first level.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint, which neither faults nor changes memory, for any address.
    unsafe {
        core::arch::asm!(
            "prefetcht1 [{at}]",
            at = in(reg) at,
            options(nostack, preserves_flags, readonly),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// Fills a page with zeros by stores that bypass the caches, if the host has such stores. Later
/// stores may become visible before the zeros, until [`nontemporal_done`] is called.
///
/// # Safety
/// `page` is valid for the writes of [`PAGE_SIZE`] bytes, and aligned to 64.
#[inline]
pub unsafe fn zero_nontemporal(page: *mut u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller's promise. `movnti` needs no vector unit, so a kernel may use it.
    unsafe {
        core::arch::asm!(
            "2:",
            "movnti [{at}], {zero}",
            "movnti [{at} + 8], {zero}",
            "movnti [{at} + 16], {zero}",
            "movnti [{at} + 24], {zero}",
            "movnti [{at} + 32], {zero}",
            "movnti [{at} + 40], {zero}",
            "movnti [{at} + 48], {zero}",
            "movnti [{at} + 56], {zero}",
            "add {at}, 64",
            "cmp {at}, {end}",
            "jb 2b",
            at = inout(reg) page => _,
            end = in(reg) page.wrapping_add(PAGE_SIZE as usize),
            zero = in(reg) 0u64,
            options(nostack),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller's promise.
    unsafe {
        page.write_bytes(0, PAGE_SIZE as usize);
    }
}

/// Makes the stores of [`zero_nontemporal`] on this CPU visible before all later stores.
#[inline]
pub fn nontemporal_done() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a fence.
    unsafe {
        core::arch::asm!("sfence", options(nostack, preserves_flags));
    }
}
