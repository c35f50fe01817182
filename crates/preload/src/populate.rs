//! Populates a new block at once, by `MADV_POPULATE_WRITE` (Linux 5.14).
//!
//! A block is populated if it has at least as many bytes as the variable `FAULTLESS_POPULATE`
//! specifies, and is not resident. Without the variable, or if the kernel refuses, no page is
//! populated.

use crate::environment::{OFF, Size};
use crate::layout::{Count, Reason};
use crate::{ahead, page, report, syscall};
use core::ptr;

/// The advice that populates pages for writing.
pub const MADV_POPULATE_WRITE: i32 = 23;
/// For smaller blocks the call costs more than the faults.
const LEAST: usize = 64 << 10;

/// The minimum size in bytes of a populated block.
static FROM: Size = Size::new(b"FAULTLESS_POPULATE=", LEAST);

/// Returns the minimum size in bytes of a populated block.
#[inline]
pub fn from() -> usize {
    FROM.get()
}

/// Populates the whole pages of a new block. Skips a block whose last page is already resident,
/// because `realloc` has kept it: checking all pages takes time, too.
#[cold]
pub fn block(start: usize, bytes: usize) {
    let (begin, end) = page::whole(start, bytes);
    let page = page::size();
    if begin == end {
        return;
    }
    let mut last = [0];
    let known = syscall::mincore(end - page, &mut last, page).is_ok();
    if known && last[0] & 1 != 0 {
        report::add(Count::ResidentBlocks, 1);
        return;
    }
    // SAFETY: the pages belong to a block that was just allocated, and populating changes no byte
    // of the pages.
    match unsafe { syscall::madvise(begin, end - begin, MADV_POPULATE_WRITE) } {
        Ok(()) => {
            report::add(Count::PopulatedBlocks, 1);
            report::add(Count::PopulatedBytes, end - begin);
        }
        Err(code) => report::refuse(Reason::Populate, code),
    }
}

/// Populates one page, if an operation that populates is requested, and counts a refusal.
pub fn probe() {
    const PROT_READ_WRITE: i32 = 3;
    /// `MAP_PRIVATE` and `MAP_ANONYMOUS`.
    const MEMORY: i32 = 0x22;
    let reason = match (from(), ahead::from()) {
        (OFF, OFF) => return,
        (OFF, _) => Reason::Ahead,
        _ => Reason::Populate,
    };
    let len = page::size();
    // SAFETY: the kernel chooses the place of the new memory, which no other code uses.
    let populated = unsafe {
        syscall::mmap(ptr::null_mut(), len, PROT_READ_WRITE, MEMORY, -1, 0).and_then(|memory| {
            let populated = syscall::madvise(memory as usize, len, MADV_POPULATE_WRITE);
            let _ = syscall::munmap(memory as usize, len);
            populated
        })
    };
    if let Err(code) = populated {
        report::refuse(reason, code);
    }
}
