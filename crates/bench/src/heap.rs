//! The heap of the builds that count lines. Allocations share no cache lines, and are not reused
//! while a [`Keep`] lives.
//!
//! A line written by two CPUs thus belongs to one object, and not to two adjacent objects, or to
//! two objects that had the same address one after the other. Counts do not depend on the addresses
//! of the host's allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

const LINE: usize = 64;

/// The number of live [`Keep`] values.
static KEEPING: AtomicUsize = AtomicUsize::new(0);

/// Prevents the reuse of freed memory until it is dropped.
#[derive(Debug)]
pub struct Keep(());

impl Keep {
    /// Starts to keep all freed memory.
    pub fn all() -> Self {
        KEEPING.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        KEEPING.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Lines;

/// Returns `layout` in whole lines; `None` if the size is too large.
fn whole(layout: Layout) -> Option<Layout> {
    Some(layout.align_to(LINE).ok()?.pad_to_align())
}

// SAFETY: calls the system's allocator with a larger size and alignment, which are the same for the
// deallocation.
unsafe impl GlobalAlloc for Lines {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: not smaller than the caller's layout, which is not zero.
        whole(layout).map_or(std::ptr::null_mut(), |layout| unsafe { System.alloc(layout) })
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if KEEPING.load(Ordering::Relaxed) == 0
            && let Some(layout) = whole(layout)
        {
            // SAFETY: allocated above with this layout.
            unsafe { System.dealloc(at, layout) };
        }
    }
}

#[global_allocator]
static HEAP: Lines = Lines;
