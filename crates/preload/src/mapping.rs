//! Hooks of the calls that make mappings.
//!
//! Reserved memory (`MAP_NORESERVE`, `MAP_STACK`, `PROT_NONE`) and files are not populated.

use crate::{errno, populate, syscall};
use core::ffi::{c_int, c_void};
use core::ptr;

const PROT_WRITE: c_int = 2;
const MAP_PRIVATE: c_int = 2;
const MAP_ANONYMOUS: c_int = 0x20;
/// `MAP_NORESERVE` and `MAP_STACK`.
const RESERVED: c_int = 0x4000 | 0x2_0000;

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
    // SAFETY: the arguments come from the caller, who requests this call.
    match unsafe { syscall::mmap(at, len, prot, flags, file, offset) } {
        Ok(start) => {
            if is_memory(prot, flags) {
                populate::block(start as usize, len);
            }
            start
        }
        Err(code) => {
            errno::set(code);
            ptr::without_provenance_mut(usize::MAX)
        }
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
