//! Hooks of the calls that make and change mappings.
//!
//! Reserved memory (`MAP_NORESERVE`, `MAP_STACK`, `PROT_NONE`) is not populated, and files are
//! populated on request only. A call
//! that changes a part of a watched block ends the watch before the change: from then on the
//! program manages the pages by itself.

use crate::next::Next;
use crate::{ahead, blocks, discard, errno, files, syscall};
use core::ffi::{c_int, c_void};
use core::mem::transmute;
use core::ptr;

const PROT_WRITE: c_int = 2;
const MAP_PRIVATE: c_int = 2;
const MAP_FIXED: c_int = 0x10;
const MAP_ANONYMOUS: c_int = 0x20;
/// `MAP_NORESERVE` and `MAP_STACK`.
const RESERVED: c_int = 0x4000 | 0x2_0000;
const ENOSYS: c_int = 38;
const FAILED: *mut c_void = ptr::without_provenance_mut(usize::MAX);

static MMAP: Next = Next::new(c"mmap");
static MUNMAP: Next = Next::new(c"munmap");
static MREMAP: Next = Next::new(c"mremap");
static MPROTECT: Next = Next::new(c"mprotect");

/// Finds the functions of the next library. At the start the program has one thread.
pub fn find_next() {
    for next in [&MMAP, &MUNMAP, &MREMAP, &MPROTECT] {
        next.address();
    }
}

/// The C function `mmap`.
///
/// # Safety
/// The contract of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    before_mmap(at as usize, len, flags);
    // SAFETY: the arguments come from the caller, who requests this call.
    let start = unsafe { original_mmap(at, len, prot, flags, file, offset) };
    if start != FAILED && len >= blocks::smallest() && is_memory(prot, flags) {
        blocks::made(start as usize, len);
    } else if start != FAILED && len >= files::from() && files::is_data(prot, flags) {
        files::made(start as usize, len, file);
    }
    start
}

/// Calls the next `mmap`, or the kernel.
///
/// # Safety
/// The contract of the system call.
unsafe fn original_mmap(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
    // SAFETY: the symbol table has returned this function by its name; the caller's contract.
    unsafe {
        if let Some(next) = MMAP.address() {
            return transmute::<usize, Mmap>(next)(at, len, prot, flags, file, offset);
        }
        syscall::mmap(at, len, prot, flags, file, offset).unwrap_or_else(|code| {
            errno::set(code);
            FAILED
        })
    }
}

/// Returns whether a mapping is private anonymous memory that the program can write at once.
fn is_memory(prot: c_int, flags: c_int) -> bool {
    const MEMORY: c_int = MAP_PRIVATE | MAP_ANONYMOUS;
    flags & (MEMORY | RESERVED) == MEMORY && prot & PROT_WRITE != 0
}

/// The C function `mmap64`.
///
/// # Safety
/// The contract of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the same call on machines with 64-bit addresses.
    unsafe { mmap(at, len, prot, flags, file, offset) }
}

/// Ends the watch of blocks in a range that the program changes.
#[inline]
pub fn changes(start: usize, len: usize) {
    if ahead::is_watching() {
        ahead::forget_range(start, len);
    }
}

/// Ends the operations in a range of which the program removes the pages.
#[inline]
pub fn replaces(start: usize, len: usize) {
    changes(start, len);
    discard::forget(start, start.saturating_add(len));
}

/// Ends the operations in the ranges of a call of `mmap`, before the call.
#[inline]
pub fn before_mmap(at: usize, len: usize, flags: c_int) {
    if flags & MAP_FIXED != 0 {
        replaces(at, len);
    }
}

/// Ends the operations in the ranges of a call of `mremap`, before the call. The kernel reads the
/// new address only if the flags request this.
#[inline]
pub fn before_mremap(start: usize, len: usize, new_len: usize, flags: c_int, to: usize) {
    const FIXED: c_int = 2;
    replaces(start, len);
    if flags & FIXED != 0 {
        replaces(to, new_len);
    }
}

/// Reports that the C library lacks a function.
pub fn missing() -> c_int {
    errno::set(ENOSYS);
    -1
}

/// The C function `munmap`.
///
/// # Safety
/// The contract of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(start: *mut c_void, len: usize) -> c_int {
    replaces(start as usize, len);
    let Some(next) = MUNMAP.address() else { return missing() };
    // SAFETY: the symbol table has returned this function by its name; the caller's contract.
    unsafe {
        transmute::<usize, unsafe extern "C" fn(*mut c_void, usize) -> c_int>(next)(start, len)
    }
}

/// The C function `mremap`.
///
/// # Safety
/// The contract of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    start: *mut c_void,
    len: usize,
    new_len: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    type Mremap =
        unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;
    before_mremap(start as usize, len, new_len, flags, to as usize);
    let Some(next) = MREMAP.address() else {
        missing();
        return FAILED;
    };
    // SAFETY: the symbol table has returned this function by its name. C passes the address, a
    // variable argument, like a fixed argument. The caller's contract.
    unsafe { transmute::<usize, Mremap>(next)(start, len, new_len, flags, to) }
}

/// The C function `mprotect`.
///
/// # Safety
/// The contract of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(start: *mut c_void, len: usize, prot: c_int) -> c_int {
    changes(start as usize, len);
    let Some(next) = MPROTECT.address() else { return missing() };
    // SAFETY: the symbol table has returned this function by its name; the caller's contract.
    unsafe {
        transmute::<usize, unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int>(next)(
            start, len, prot,
        )
    }
}
