//! The heap of the builds that count lines: what is allocated shares its lines with nothing else, and is not given
//! out again while a [`Keep`] lives.
//!
//! So a line that two CPUs write is one object's, and not that of two which happen to be neighbours, or to have had
//! the same place one after the other; and counts do not depend on where the host's allocator puts things.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

const LINE: usize = 64;

/// How many want all to be kept.
static KEEPING: AtomicUsize = AtomicUsize::new(0);

/// While it lives nothing that is freed is given out again.
#[derive(Debug)]
pub struct Keep(());

impl Keep {
    /// From now on.
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

/// `layout` in whole lines; none where that is more than there can be.
fn whole(layout: Layout) -> Option<Layout> {
    Some(layout.align_to(LINE).ok()?.pad_to_align())
}

// SAFETY: the system's allocator, asked for more and with a larger alignment, the same when it is given back.
unsafe impl GlobalAlloc for Lines {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: not smaller than the caller's, which is not zero.
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
