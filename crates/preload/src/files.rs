//! Populates a new mapping of a file at once, by `MADV_POPULATE_READ` (Linux 5.14).
//!
//! A mapping is populated if it has at least as many bytes as the variable
//! `FAULTLESS_POPULATE_FILES` specifies, and no code. Without the variable, or if the kernel
//! refuses, no page is populated. A part of the file that is not in the page cache is read. Pages
//! after the end of the file cannot be populated, and the pages before are. Files with holes in
//! tmpfs and other file systems in memory are not populated.

use crate::environment::Size;
use crate::layout::{Count, Reason};
use crate::{page, report, stop, syscall};
use core::ffi::c_int;

/// The advice that populates pages for reading.
pub const MADV_POPULATE_READ: c_int = 22;
/// The error of a page after the end of the file.
const EFAULT: c_int = 14;
/// For smaller mappings the call costs more than the faults.
const LEAST: usize = 64 << 10;
const PROT_READ: c_int = 1;
const PROT_EXEC: c_int = 4;
const MAP_ANONYMOUS: c_int = 0x20;
/// `MAP_POPULATE`: the kernel has populated the mapping.
const MAP_POPULATE: c_int = 0x8000;

/// The minimum size in bytes of a populated mapping.
static FROM: Size = Size::new(b"FAULTLESS_POPULATE_FILES=", LEAST);

/// Returns the minimum size in bytes of a populated mapping.
#[inline]
pub fn from() -> usize {
    FROM.get()
}

/// Returns whether a mapping with these arguments has the data of a file.
pub fn is_data(prot: c_int, flags: c_int) -> bool {
    flags & (MAP_ANONYMOUS | MAP_POPULATE) == 0 && prot & (PROT_READ | PROT_EXEC) == PROT_READ
}

/// Returns whether a file is in memory and has holes. Populating allocates memory for the holes.
fn is_sparse_memory(file: c_int) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    const HUGETLBFS: u64 = 0x9584_58f6;
    matches!(syscall::file_system(file), Ok(TMPFS | RAMFS | HUGETLBFS))
        && syscall::has_holes(file) != Ok(false)
}

/// Populates a new mapping of `file`.
#[cold]
pub fn made(start: usize, bytes: usize, file: c_int) {
    if let Some(code) = stop::code() {
        report::refuse(Reason::Files, code);
        return;
    }
    if is_sparse_memory(file) {
        return;
    }
    // A mapping starts at a page, and its last page can be used in whole.
    let end = start + bytes.next_multiple_of(page::size());
    // SAFETY: the program has just mapped the pages, and populating for reading changes no byte.
    match unsafe { syscall::madvise(start, end - start, MADV_POPULATE_READ) } {
        Ok(()) => {
            report::add(Count::PopulatedFiles, 1);
            report::add(Count::PopulatedFileBytes, end - start);
        }
        Err(EFAULT) => {}
        Err(code) => report::refuse(Reason::Files, code),
    }
}
