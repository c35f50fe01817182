//! Kernel stacks.
//!
//! Below each stack lies a [guard](paging::guard) page: a stack overflow causes a double fault,
//! which has its own stack, and overwrites no other memory. A few stacks of ended tasks are kept,
//! with their guards, for new tasks.

use crate::arch::TrapFrame;
use crate::paging;
use alloc::alloc::{alloc, dealloc};
use core::alloc::Layout;
use core::fmt;
use core::ptr::NonNull;
use faultless::PAGE_SIZE;
use faultless::locks::Spin;
use faultless::locks::SpinLock;

/// Bytes of a kernel stack. `fork` needs most: less than 20 KiB.
pub const STACK_BYTES: usize = 24 << 10;
/// Bytes of the guard below the stack.
pub(crate) const GUARD_BYTES: usize = PAGE_SIZE as usize;
/// The number of stacks kept for the next threads.
const KEPT: usize = 32;

const LAYOUT: Layout = match Layout::from_size_align(GUARD_BYTES + STACK_BYTES, GUARD_BYTES) {
    Ok(layout) => layout,
    Err(_) => panic!("stacks are aligned to pages"),
};

/// Unused stacks, with their guards.
struct Kept {
    bases: [Option<NonNull<u8>>; KEPT],
    count: usize,
}

// SAFETY: the value owns the memory.
unsafe impl Send for Kept {}

/// The holder of this lock does not wait.
static STACKS: SpinLock<Kept> = SpinLock::new(Kept { bases: [None; KEPT], count: 0 });

/// A stack for a thread in the kernel: its lowest address, which is the address of the guard.
pub struct KernelStack(NonNull<u8>);

// SAFETY: the value owns this memory.
unsafe impl Send for KernelStack {}
// SAFETY: a shared reference gives only addresses.
unsafe impl Sync for KernelStack {}

impl KernelStack {
    /// A stack; `None` when the heap is exhausted.
    pub fn try_new() -> Option<Self> {
        Self::kept().or_else(Self::make)
    }

    fn kept() -> Option<Self> {
        let mut kept = STACKS.lock(&Spin);
        let last = kept.count.checked_sub(1)?;
        kept.count = last;
        kept.bases[last].take().map(Self)
    }

    #[cold]
    fn make() -> Option<Self> {
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc(LAYOUT) })?;
        // SAFETY: the lowest page of the new allocation, which is not used until `drop` removes the
        // guard.
        if unsafe { paging::guard(base.as_ptr()) } {
            return Some(Self(base));
        }
        // SAFETY: allocated with this layout.
        unsafe { dealloc(base.as_ptr(), LAYOUT) };
        None
    }

    /// Returns the address above the highest byte, a multiple of 16.
    pub fn top(&self) -> u64 {
        self.0.as_ptr() as u64 + LAYOUT.size() as u64
    }

    /// Returns the address of the frame of a thread that is in the kernel on this stack.
    pub(super) fn frame(&self) -> *mut TrapFrame {
        (self.top() as *mut TrapFrame).wrapping_sub(1)
    }
}

impl Drop for KernelStack {
    fn drop(&mut self) {
        {
            let mut kept = STACKS.lock(&Spin);
            let count = kept.count;
            if let Some(place) = kept.bases.get_mut(count) {
                *place = Some(self.0);
                kept.count += 1;
                return;
            }
        }
        // SAFETY: allocated and guarded by `make`; the owner ensures that no thread runs on the
        // stack.
        unsafe {
            paging::unguard(self.0.as_ptr());
            dealloc(self.0.as_ptr(), LAYOUT);
        }
    }
}

impl fmt::Debug for KernelStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelStack(top {:#x})", self.top())
    }
}
