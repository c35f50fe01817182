//! Descriptor tables: segments, and the handler and stack of each vector.

use crate::arch::{KERNEL_CODE, KERNEL_DATA, USER_CODE, USER_DATA};
use crate::paging;
use core::arch::asm;
use core::cell::UnsafeCell;
use faultless::PAGE_SIZE;
use x86_64::registers::segmentation::{CS, DS, ES, FS, GS, SS, Segment};
use x86_64::structures::DescriptorTablePointer;
use x86_64::structures::gdt::{Descriptor, SegmentSelector};
use x86_64::structures::tss::TaskStateSegment;
use x86_64::{VirtAddr, instructions::tables};

/// The place of the TSS descriptor, which takes two entries.
const TASK: u16 = 0x40;
/// Bytes of each stack for a fatal exception.
const FATAL_STACK: usize = 8 << 10;

/// A stack for fatal exceptions, and the page below the stack.
#[repr(C, align(4096))]
struct FatalStack {
    guard: [u8; PAGE_SIZE as usize],
    bytes: [u8; FATAL_STACK],
}

/// One CPU's segments, and the stacks for its entries into the kernel.
#[repr(C)]
pub struct Descriptors {
    task: UnsafeCell<TaskStateSegment>,
    segments: UnsafeCell<[u64; 10]>,
    fatal: UnsafeCell<FatalStack>,
}

impl Descriptors {
    pub const fn new() -> Self {
        Self {
            task: UnsafeCell::new(TaskStateSegment::new()),
            segments: UnsafeCell::new([0; 10]),
            fatal: UnsafeCell::new(FatalStack {
                guard: [0; PAGE_SIZE as usize],
                bytes: [0; FATAL_STACK],
            }),
        }
    }

    /// The stack on which traps from user mode arrive.
    pub fn set_kernel_stack(&self, top: u64) {
        // SAFETY: the segment belongs to this CPU, and the processor reads the field only at the
        // next entry from user mode.
        unsafe { (*self.task.get()).privilege_stack_table[0] = VirtAddr::new_truncate(top) };
    }

    /// The lowest byte of the stack for fatal exceptions.
    pub fn fatal_stack(&self) -> u64 {
        // SAFETY: only the address is taken.
        unsafe { (&raw const (*self.fatal.get()).bytes) as u64 }
    }

    /// Makes the page below the stack for fatal exceptions a guard.
    pub fn guard(&'static self) {
        // SAFETY: the page is never used; it is page-aligned, in the direct map or the image.
        let guarded = unsafe { paging::guard((&raw const (*self.fatal.get()).guard).cast()) };
        assert!(guarded, "no memory for a guard");
    }

    /// Loads the tables on this CPU. The GS base is lost.
    ///
    /// # Safety
    /// `self` belongs to this CPU and never moves; [`set_entries`] was called.
    pub unsafe fn load(&'static self) {
        // SAFETY: the tables belong to this CPU, which does not use them yet.
        let (task, segments) = unsafe { (&mut *self.task.get(), &mut *self.segments.get()) };
        let top = VirtAddr::new(self.fatal_stack()) + FATAL_STACK as u64;
        // All fatal exceptions share this stack: their handlers do not return.
        task.interrupt_stack_table[0] = top.align_down(16u64);
        let task: *const TaskStateSegment = task;
        // SAFETY: the segment never moves.
        let Descriptor::SystemSegment(low, high) =
            (unsafe { Descriptor::tss_segment_unchecked(task) })
        else {
            unreachable!("a task has a system descriptor");
        };
        let user_segment = |descriptor| match descriptor {
            Descriptor::UserSegment(bits) => bits,
            Descriptor::SystemSegment(..) => unreachable!("not a system descriptor"),
        };
        segments[usize::from(KERNEL_CODE / 8)] = user_segment(Descriptor::kernel_code_segment());
        segments[usize::from(KERNEL_DATA / 8)] = user_segment(Descriptor::kernel_data_segment());
        segments[usize::from(USER_DATA / 8)] = user_segment(Descriptor::user_data_segment());
        segments[usize::from(USER_CODE / 8)] = user_segment(Descriptor::user_code_segment());
        segments[usize::from(TASK / 8)] = low;
        segments[usize::from(TASK / 8) + 1] = high;
        let table = |base: *const u8, len: usize| DescriptorTablePointer {
            limit: (len - 1) as u16,
            base: VirtAddr::from_ptr(base),
        };
        // SAFETY: the tables are complete and permanent, and have the selectors loaded here.
        unsafe {
            tables::lgdt(&table(self.segments.get().cast(), size_of::<[u64; 10]>()));
            CS::set_reg(selector(KERNEL_CODE));
            SS::set_reg(selector(KERNEL_DATA));
            DS::set_reg(selector(0));
            ES::set_reg(selector(0));
            FS::set_reg(selector(0));
            GS::set_reg(selector(0));
            tables::load_tss(selector(TASK));
            // Otherwise the table of local descriptors could be any memory: after reset it starts
            // at address 0.
            asm!("lldt {:x}", in(reg) 0u16, options(nostack, preserves_flags));
            tables::lidt(&table(GATES.0.get().cast(), size_of::<[Gate; 256]>()));
        }
    }
}

const fn selector(number: u16) -> SegmentSelector {
    SegmentSelector(number)
}

/// The entry of a vector; all zero for an unused vector.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Gate(u64, u64);

struct Gates(UnsafeCell<[Gate; 256]>);

// SAFETY: written only by `set_entries`, before other CPUs run.
unsafe impl Sync for Gates {}

static GATES: Gates = Gates(UnsafeCell::new([Gate(0, 0); 256]));

/// Fills the table of entries, which all CPUs share, with the address of each vector's handler.
///
/// # Safety
/// Called once, by the boot CPU, before any CPU loads the table.
pub unsafe fn set_entries(entries: impl Iterator<Item = (usize, u64)>) {
    // SAFETY: the table is not in use yet.
    let gates = unsafe { &mut *GATES.0.get() };
    for (vector, address) in entries {
        // Programs may use INT3 and INTO.
        let privilege: u64 = if matches!(vector, 3 | 4) { 3 } else { 0 };
        let stack = u64::from(matches!(vector, 2 | 8 | 18));
        let low = address & 0xffff
            | u64::from(KERNEL_CODE) << 16
            | stack << 32
            | (0x8e | privilege << 5) << 40
            | (address >> 16 & 0xffff) << 48;
        gates[vector] = Gate(low, address >> 32);
    }
}

const _: () = assert!(KERNEL_DATA == KERNEL_CODE + 8 && USER_CODE == USER_DATA + 8);
