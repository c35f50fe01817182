//! A heap that overwrites freed memory: a later reader finds invalid pointers, and sequences
//! without a writer.

use std::alloc::{GlobalAlloc, Layout, System};

/// An even number, and not a valid pointer of a program.
const FREED: u8 = 0xa4;

struct Overwriting;

// SAFETY: the system's allocator; freed memory has no user when it is overwritten.
unsafe impl GlobalAlloc for Overwriting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: memory of this size, by the caller's promise, and free from now on.
        unsafe {
            at.write_bytes(FREED, layout.size());
            // The compiler knows that freed memory is not read.
            System.dealloc(core::hint::black_box(at), layout);
        }
    }
}

#[global_allocator]
static HEAP: Overwriting = Overwriting;
