//! What must lie beneath the subsystem: memory, CPUs, their TLBs, and a way to interrupt them.

use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::fault::prefault::Predictor;
use core::fmt;

/// The largest number of CPUs a machine may have.
pub const MAX_CPUS: usize = 1024;

/// The number of a CPU, `0..Machine::cpus()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuId(pub u16);

impl CpuId {
    /// The number as an index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Names an address space to the TLBs. Never reused within one `Vm`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpaceId(pub u64);

impl fmt::Debug for SpaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "space {}", self.0)
    }
}

/// The lowest address that programs may map, where the machine does not say: Linux's usual `vm.mmap_min_addr`.
pub(crate) const LOWEST_ADDRESS: u64 = 65536;

/// How many memory nodes a machine may have.
pub const MAX_NODES: usize = 8;

/// A run of frames that the subsystem may hand out.
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
    /// Those of the pages in this range, and every cached upper-level entry above them.
    Range(VirtRange),
    /// All of the space.
    All,
}

/// The machine beneath a [`Vm`](crate::Vm).
///
/// # Safety
///
/// The subsystem's memory safety rests on these promises of the implementor:
///
/// - `cpus` and `regions` never change; regions do not overlap, end below frame number [`u32::MAX`], and nothing
///   else uses their frames.
/// - `frame_bytes(f)` is, for every frame of a region, a pointer to [`PAGE_SIZE`] bytes of memory,
///   page-aligned, valid for reads and writes for the machine's whole life, and the same memory
///   that guest programs reach through a translation to `f`; different frames do not overlap.
/// - When `invalidate` or `invalidate_all` returns, the calling CPU uses no translation of that space in that range,
///   nor any cached table pointer above it, older than the call; page-table walks started before the
///   call have ended.
/// - CPUs use the tables of a space, and translations that came from them, only while they run the space: from
///   [`Space::activate`](crate::Space::activate) to [`Space::deactivate`](crate::Space::deactivate) on that CPU.
/// - After `interrupt(c)`, CPU `c`, while it runs a space, calls
///   [`Cpu::serve_flushes`](crate::Cpu::serve_flushes) soon, between two instructions of its program; while
///   it is inside a call of the subsystem, the subsystem does that itself.
/// - What comes before `interrupt(c)` on the calling CPU *happens before* the `serve_flushes` that CPU `c` calls for it. The
///   call looks at its inbox without an ordering of its own: it would find the request missing, and serve nothing. A line
///   that is raised with release and looked at with acquire will do; a command to an interrupt controller
///   is given after earlier stores.
/// - Between the begin and the end of `park`, and nowhere else inside a call of the subsystem, the machine
///   may take interrupts on the calling CPU. Their handlers may call
///   [`Cpu::serve_flushes`](crate::Cpu::serve_flushes) with the `Cpu` whose call is under way, and nothing else of
///   the subsystem with it. (Whatever else a kernel runs on the core meanwhile is not this `Cpu`.)
/// - No function of the machine calls the subsystem as the CPU that it is called on, but for what
///   `park` and `poll_reads` may: that CPU is in the middle of a call.
/// - What walks the tables knows the whole [format](crate::format), leaves above the last level among them, which map text
///   (`huge_text`); [`Space::walk`](crate::Space::walk) does so for an MMU in software.
/// - Hardware changes page-table entries only by setting the accessed and dirty bits of present
///   entries, atomically; it sets the dirty bit only of a writable entry, before the store is done.
/// - A CPU uses, and caches, a translation only of an entry whose accessed bit is set, and sets it first: pages whose bit stays clear leave without a flush. So
///   does [`Space::walk`](crate::Space::walk).
///
/// # Panics
///
/// No function of the machine may panic. The subsystem calls these functions while it holds entries, claims
/// and locks: after a panic other CPUs would wait without end. A [store](crate::BackingStore), a watcher of
/// trace points and the closure of a call may panic: the call unwinds, and the CPU holds nothing afterwards.
/// The pages of a read that panicked are read again, and the pages of a write that panicked stay dirty. After
/// a panic of a [predictor](Self::Predictor) the CPU holds no lock, but a fault may lose a frame.
pub unsafe trait Machine: Send + Sync + 'static {
    /// What predicts which pages a fault maps beside its own: [`Streams`](crate::prefault::Streams), unless another policy is
    /// to be tried.
    type Predictor: Predictor;

    /// How many CPUs there are, `1..=MAX_CPUS`.
    fn cpus(&self) -> usize;

    /// The memory the subsystem manages.
    fn regions(&self) -> &[MemoryRegion];

    /// The memory node that is nearest to `cpu`: its frames come from there while there are any, and then from the other nodes in the order of
    /// their numbers. It never changes.
    fn nearest_node(&self, cpu: CpuId) -> u8 {
        let _ = cpu;
        0
    }

    /// What an access to memory of `node` costs, in any unit: nodes that cost more are slower. Pages that are not used [move](crate::Cpu::balance) from faster nodes to
    /// slower ones. By default all cost the same, as where nodes are sockets. It never changes.
    fn node_cost(&self, node: u8) -> u32 {
        let _ = node;
        1
    }

    /// The lowest address that programs may map, a multiple of [`PAGE_SIZE`] below [`USER_END`](crate::USER_END). It never changes.
    /// Below it a program's null pointers fault, and nothing is placed. A hypervisor's guest, whose memory is a space,
    /// starts at 0: there only a mapping at a fixed address goes to page 0, since a hint of 0 is none.
    fn lowest_address(&self) -> u64 {
        LOWEST_ADDRESS
    }

    /// The bytes of `frame`, which must be of one of the regions.
    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8;

    /// Drops translations of `space` from the TLB of `cpu`, which is the calling CPU.
    fn invalidate(&self, cpu: CpuId, space: SpaceId, what: Invalidate);

    /// Drops all translations of every space from the TLB of `cpu`, which is the calling CPU.
    fn invalidate_all(&self, cpu: CpuId);

    /// Asks `cpu`, another CPU, to serve its flush requests. All that the caller has stored is seen by then.
    fn interrupt(&self, cpu: CpuId);

    /// Called between two looks at something another CPU must change; `looks` counts them from 0.
    /// A machine whose CPUs share real cores yields once `looks` grows.
    fn relax(&self, looks: u32) {
        let _ = looks;
        core::hint::spin_loop();
    }

    /// Gives the core of `cpu`, which is the calling CPU, away, since what it waits for may take long: until
    /// another CPU [wakes](Self::wake) it or [interrupts](Self::interrupt) it. To return for no reason is
    /// allowed, to miss one of these is not: one that came since the last return of `park` makes
    /// the next return at once. What the waker or interrupter stored before is visible then. A
    /// [`Permit`](crate::sync::park::Permit) keeps these rules.
    ///
    /// By default a CPU only [relaxes](Self::relax), which is right where each has a core of its own. A machine
    /// that implements this implements `wake`, too.
    fn park(&self, cpu: CpuId) {
        let _ = cpu;
        self.relax(u32::MAX);
    }

    /// Ends the [`park`](Self::park) of `cpu`, another CPU, or its next one. Called under no lock.
    fn wake(&self, cpu: CpuId) {
        let _ = cpu;
    }

    /// Called now and then by `cpu`, the calling CPU, while it [waits](crate::Cpu::await_read) for a read of a backing store. A machine on which
    /// nobody else may hear that a device is done, because this CPU's interrupts are off, looks for itself, and
    /// [completes](crate::Reading::complete) reads. That takes the CPU's own [`Cpu`](crate::Cpu), which such a kernel keeps where this finds it. Calls that need a page
    /// which is being read wait so, too: [`Space::pin`](crate::Space::pin), [`Space::read_bytes`](crate::Space::read_bytes) and their like.
    fn poll_reads(&self, cpu: CpuId) {
        let _ = cpu;
    }

    /// Fills `frame` with zeros. The caller owns the frame.
    ///
    /// # Safety
    /// `frame` belongs to the caller alone, and no translation to it exists.
    #[inline(always)]
    unsafe fn zero_frame(&self, frame: FrameNumber) {
        // SAFETY: `frame_bytes` is valid for a page by the trait's contract; the caller owns it.
        unsafe { core::ptr::write_bytes(self.frame_bytes(frame), 0, PAGE_SIZE as usize) };
    }

    /// Fills the `frames` frames from `first` on with zeros, which no CPU is about to read: a machine
    /// may do it in a way that is slower to read back and leaves the caches to others, as
    /// [`zero_nontemporal`] does. The zeros come before whatever the caller stores next.
    ///
    /// # Safety
    /// The frames are one block, belong to the caller alone, and no translation to them exists.
    unsafe fn zero_ahead(&self, first: FrameNumber, frames: u32) {
        for frame in first.0..first.0 + frames {
            // SAFETY: handed on.
            unsafe { self.zero_frame(FrameNumber(frame)) };
        }
    }

    /// Asks the caches for the beginning of `frame`, which was zeroed long ago and is about to be used: a hint.
    #[inline(always)]
    fn prefetch_frame(&self, frame: FrameNumber) {
        prefetch(self.frame_bytes(frame));
    }

    /// Copies the bytes of `from` to `to`.
    ///
    /// # Safety
    /// `to` belongs to the caller alone; `from` stays allocated during the call. Programs may
    /// store to `from` meanwhile. Then the copy may mix old and new bytes: either it is thrown away, or it is a copy of
    /// a file that other programs are writing, and readers of such a file may see a mix.
    #[inline(always)]
    unsafe fn copy_frame(&self, to: FrameNumber, from: FrameNumber) {
        // SAFETY: both are valid for a page and distinct by the trait's contract. A racing store
        // of a program is outside the Rust memory model, as on any kernel; the caller expects no
        // particular bytes in that case.
        unsafe {
            core::ptr::copy_nonoverlapping(
                self.frame_bytes(from).cast_const(),
                self.frame_bytes(to),
                PAGE_SIZE as usize,
            );
        }
    }
}

/// Asks the caches for the line at `at`, where the host has such a hint; nothing is accessed.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // To the second level: lines at the same place of many pages fall on a few lines of the first.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint, which neither faults nor changes anything, whatever the address.
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

/// Fills a page with zeros by stores that go past the caches, where the host has them. What is stored
/// afterwards may be seen before the zeros, until [`nontemporal_done`] was called.
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

/// What is stored from now on is seen after what [`zero_nontemporal`] stored on this CPU.
#[inline]
pub fn nontemporal_done() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a fence.
    unsafe {
        core::arch::asm!("sfence", options(nostack, preserves_flags));
    }
}
