//! A machine that consists only of memory, so that measurements contain only the subsystem.
//!
//! Its TLBs are empty, so there are no invalidations and no interrupts of CPUs. Separate functions
//! with plain names zero and copy a page, which makes both visible in a profile. On x86-64 they are
//! `rep stosq` and `rep movsq`, 512 steps per page, as in a kernel.

use core::cell::UnsafeCell;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::{CpuId, FrameNumber, Invalidate, Machine, MemoryRegion, PAGE_SIZE, SpaceId};

/// The symbol under which the bare machine zeroes a page.
pub const ZERO: &str = "faultless_bench_zero";
/// The symbol under which the bare machine copies a page.
pub const COPY: &str = "faultless_bench_copy";

/// Bits of an entry: present, accessed, and huge leaf.
const PRESENT: u64 = 1;
const ACCESSED: u64 = 1 << 5;
const HUGE: u64 = 1 << 7;
/// The bits of an entry with the frame.
pub const FRAME: u64 = 0x000f_ffff_ffff_f000;

const WORDS: usize = PAGE_SIZE as usize / 8;

#[repr(C, align(4096))]
struct Page(UnsafeCell<[u64; WORDS]>);

// SAFETY: the words are reached through raw pointers only, under `Machine`'s contract.
unsafe impl Sync for Page {}

/// See the module.
pub struct BareMachine {
    cpus: usize,
    memory: Vec<Page>,
    regions: Vec<MemoryRegion>,
}

impl fmt::Debug for BareMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BareMachine({} CPUs, {} frames)", self.cpus, self.memory.len())
    }
}

impl BareMachine {
    /// Creates a machine of `cpus` CPUs and `frames` frames. The first frame, number 0, is unused.
    pub fn new(cpus: usize, frames: u32) -> Self {
        Self::of_nodes(cpus, &[frames])
    }

    /// Creates a machine with this number of frames in each memory node. The very first frame is
    /// unused.
    pub fn of_nodes(cpus: usize, nodes: &[u32]) -> Self {
        let frames: u32 = nodes.iter().sum();
        let memory = (0..frames).map(|_| Page(UnsafeCell::new([0; WORDS]))).collect();
        let mut first = 1;
        let mut region = |(node, end)| {
            let frames = end - first;
            let region = MemoryRegion { node, first: FrameNumber(first), frames };
            first = end;
            region
        };
        let ends = nodes.iter().scan(0, |end, frames| {
            *end += frames;
            Some(*end)
        });
        let regions = (0..).zip(ends).map(&mut region).collect();
        Self { cpus, memory, regions }
    }

    /// Returns the physical address of the byte at host `address`, if the byte belongs to this
    /// memory.
    pub fn phys_of(&self, address: usize) -> Option<u64> {
        let offset = address.checked_sub(self.memory.as_ptr().addr())?;
        (offset < size_of_val(self.memory.as_slice())).then_some(offset as u64)
    }

    /// Returns the page-table entry at physical address `phys`, which must be in this memory and
    /// aligned.
    pub fn entry(&self, phys: u64) -> &AtomicU64 {
        let page = &self.memory[(phys / PAGE_SIZE) as usize];
        let word = (phys % PAGE_SIZE / 8) as usize;
        // SAFETY: inside the page; entries are words that are only used atomically while their page
        // is a table.
        unsafe { AtomicU64::from_ptr(page.0.get().cast::<u64>().add(word)) }
    }

    /// Returns the leaf entry of `addr` in the tables below `root`, with a walk like the
    /// hardware's; `None` if a table is missing.
    pub fn leaf(&self, root: FrameNumber, addr: u64) -> Option<&AtomicU64> {
        let index = |level: u32| 8 * (addr >> (12 + 9 * level) & 511);
        let mut table = root.phys();
        for level in (1..4).rev() {
            table = self.entry(table + index(level)).load(Ordering::Acquire) & FRAME;
            if table == 0 {
                return None;
            }
        }
        Some(self.entry(table + index(0)))
    }

    /// Returns the number of the frame in the huge leaf of `addr`; `None` without a huge leaf.
    pub fn huge_leaf(&self, root: FrameNumber, addr: u64) -> Option<u64> {
        let entry = (1..4).rev().try_fold(root.phys(), |table, level| {
            let index = 8 * (addr >> (12 + 9 * level) & 511);
            let entry = self.entry((table & FRAME) + index).load(Ordering::Acquire);
            (entry & PRESENT != 0).then_some(entry)
        })?;
        (entry & HUGE != 0).then_some((entry & FRAME) / PAGE_SIZE)
    }

    /// Accesses `addr` like the hardware. Returns whether a page is mapped there, and marks the
    /// page accessed.
    pub fn access(&self, root: FrameNumber, addr: u64) -> bool {
        let mapped = |entry: &&AtomicU64| entry.load(Ordering::Acquire) & PRESENT != 0;
        let entry = self.leaf(root, addr).filter(mapped);
        entry.map(|entry| entry.fetch_or(ACCESSED, Ordering::AcqRel)).is_some()
    }
}

/// Zeroes the page at `page`.
///
/// # Safety
/// `page` is valid for the writes of a page, and aligned to it.
#[inline(never)]
#[unsafe(no_mangle)]
unsafe fn faultless_bench_zero(page: *mut u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; the direction flag is clear by the calling convention.
    unsafe {
        core::arch::asm!(
            "rep stosq",
            inout("rcx") WORDS => _, inout("rdi") page => _, in("rax") 0,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        page.write_bytes(0, WORDS);
    }
}

/// Copies the page at `from` to `to`.
///
/// # Safety
/// Both are valid for a page, aligned to it, and distinct.
#[inline(never)]
#[unsafe(no_mangle)]
unsafe fn faultless_bench_copy(to: *mut u64, from: *const u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; the direction flag is clear by the calling convention.
    unsafe {
        core::arch::asm!(
            "rep movsq",
            inout("rcx") WORDS => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        to.copy_from_nonoverlapping(from, WORDS);
    }
}

// SAFETY: `memory` has a separate page for each frame of the one region and never moves. There is
// no TLB to invalidate and no program to interrupt.
unsafe impl Machine for BareMachine {
    type Predictor = faultless::prefault::Streams;

    fn cpus(&self) -> usize {
        self.cpus
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    #[inline(always)]
    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        // As in a kernel, physical memory is mapped at an offset. The subsystem received the
        // numbers from `regions`.
        self.memory.as_ptr().wrapping_add(frame.0 as usize).cast_mut().cast()
    }

    #[inline(always)]
    fn invalidate(&self, _: CpuId, _: SpaceId, _: Invalidate) {}

    fn invalidate_all(&self, _: CpuId) {}

    fn interrupt(&self, _: CpuId) {}

    #[inline(always)]
    unsafe fn zero_frame(&self, frame: FrameNumber) {
        // SAFETY: a page of memory owned by the caller.
        unsafe { faultless_bench_zero(self.frame_bytes(frame).cast()) };
    }

    #[inline(always)]
    unsafe fn copy_frame(&self, to: FrameNumber, from: FrameNumber) {
        // SAFETY: distinct pages of memory.
        unsafe {
            faultless_bench_copy(self.frame_bytes(to).cast(), self.frame_bytes(from).cast());
        }
    }
}
