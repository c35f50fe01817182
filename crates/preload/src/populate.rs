//! Populates a new block at once, by `MADV_POPULATE_WRITE` (Linux 5.14).
//!
//! A block is populated if it has at least as many bytes as the variable `FAULTLESS_POPULATE`
//! specifies, is not resident, and is not larger than half of the [`available`] memory. Without the
//! variable, or if the kernel refuses, no page is populated.

use crate::environment::{OFF, Size};
use crate::layout::{Count, Reason, TOO_LARGE};
use crate::{ahead, available, files, page, report, residency, syscall};
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
    if begin == end {
        return;
    }
    if residency::is_resident(end - page::size()) {
        report::add(Count::ResidentBlocks, 1);
        return;
    }
    if !available::permits(end - begin) {
        report::refuse(Reason::Populate, TOO_LARGE as i32);
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

/// Populates one page for each requested operation that populates, and counts refusals.
pub fn probe() {
    if from() != OFF {
        populate_page(MADV_POPULATE_WRITE, Reason::Populate);
    } else if ahead::from() != OFF {
        populate_page(MADV_POPULATE_WRITE, Reason::Ahead);
    }
    if files::from() != OFF {
        populate_page(files::MADV_POPULATE_READ, Reason::Files);
    }
}

/// Populates a new page by `advice`. Counts a refusal for `reason`.
fn populate_page(advice: i32, reason: Reason) {
    const PROT_READ_WRITE: i32 = 3;
    /// `MAP_PRIVATE` and `MAP_ANONYMOUS`.
    const MEMORY: i32 = 0x22;
    let len = page::size();
    // SAFETY: the kernel chooses the place of the new memory, which no other code uses.
    let populated = unsafe {
        syscall::mmap(ptr::null_mut(), len, PROT_READ_WRITE, MEMORY, -1, 0).and_then(|memory| {
            let populated = syscall::madvise(memory as usize, len, advice);
            let _ = syscall::munmap(memory as usize, len);
            populated
        })
    };
    if let Err(code) = populated {
        report::refuse(reason, code);
    }
}
