//! The hook of `dlsym`, which detects libraries that the program has opened.
//!
//! A program looks up a function of a new library before it uses the library. The hook is a jump:
//! the C library finds the caller of `dlsym` by the return address, which is the program's. A hook
//! of `dlopen` could not run code after the original function without a change of this address, and
//! the original function then would use this library's search path and namespace.

use crate::next::Next;
use crate::text;
use core::arch::naked_asm;
use core::ffi::{c_char, c_void};

static DLSYM: Next = Next::new(c"dlsym");

/// Finds the function of the next library. At the start the program has one thread.
pub fn find_next() {
    DLSYM.address();
}

/// Moves the text of new libraries. Returns the address of the next `dlsym`, or 0.
extern "C" fn before() -> usize {
    text::move_opened();
    DLSYM.address().unwrap_or(0)
}

/// C's `dlsym`. Returns null without a `dlsym` in a library of the program.
///
/// # Safety
/// The contract of C's function.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        ".cfi_startproc",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        // The stack is aligned to 16 bytes.
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 8",
        "call {before}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "test rax, rax",
        "jz 2f",
        "jmp rax",
        "2:",
        "ret",
        ".cfi_endproc",
        before = sym before,
    )
}

/// C's `dlsym`. Returns null without a `dlsym` in a library of the program.
///
/// # Safety
/// The contract of C's function.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-32]!",
        ".cfi_def_cfa_offset 32",
        ".cfi_offset x29, -32",
        ".cfi_offset x30, -24",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "bl {before}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "cbz x16, 2f",
        "br x16",
        "2:",
        "mov x0, xzr",
        "ret",
        ".cfi_endproc",
        before = sym before,
    )
}
