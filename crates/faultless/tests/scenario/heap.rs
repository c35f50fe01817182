//! The heap, which overwrites what is freed: who reads it afterwards finds pointers to nowhere, and
//! sequences that look as if nobody wrote.

use std::alloc::{GlobalAlloc, Layout, System};

/// An even number, and as a pointer not one of a program's.
const FREED: u8 = 0xa4;

struct Overwriting;

// SAFETY: the system's allocator; what is freed is nobody's any more when it is overwritten.
unsafe impl GlobalAlloc for Overwriting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: of that size, by the caller's promise, and free from now on.
        unsafe {
            at.write_bytes(FREED, layout.size());
            // The compiler knows that nobody reads what is freed.
            System.dealloc(core::hint::black_box(at), layout);
        }
    }
}

#[global_allocator]
static HEAP: Overwriting = Overwriting;
