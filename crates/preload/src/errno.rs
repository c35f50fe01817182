//! The `errno` of the calling thread.

use crate::symbols;
use core::ffi::c_int;

/// Sets `errno`.
pub fn set(code: c_int) {
    if let Some(location) = symbols::errno_location() {
        // SAFETY: the C library returns the address of the thread's `errno`.
        unsafe { *location() = code };
    }
}
