//! For `LD_PRELOAD`: populates a program's large blocks of memory and its mapped files before their
//! use, and moves the program's text to huge pages.
//!
//! One file serves programs of glibc and of musl. The library depends on no other library, and
//! has no undefined symbol that one of the two lacks: symbols of the C library are weak
//! ([`symbols`]), and system calls are made directly ([`syscall`]). Each operation has a variable
//! that enables the operation; without the variables, the library has no effect.
//!
//! | variable | operation | module |
//! |---|---|---|
//! | `FAULTLESS_POPULATE=BYTES` | populates new blocks of this size and more | [`populate`] |
//! | `FAULTLESS_PREFAULT_AHEAD=BYTES` | populates large blocks ahead of a program that touches pages in order | [`ahead`] |
//! | `FAULTLESS_POPULATE_FILES=BYTES` | populates new mappings of files of this size and more | [`files`] |
//! | `FAULTLESS_HUGE_TEXT=copy`, `=collapse` | moves text to huge pages at the start, and when libraries are opened | [`text`] |
//!
//! The hooks of the program's calls are in [`allocator`], [`mapping`] and [`advice`], and [`dlsym`]
//! detects new libraries. [`calls`] detects programs in which the operations [`stop`]. A hook of an
//! allocation calls the original function first, and the operation follows.
//! The program continues without a failed operation; [`report`] counts operations and failures, and
//! [`warning`] prints failures.

#![no_std]

pub mod advice;
pub mod ahead;
pub mod allocator;
pub mod available;
pub mod blocks;
pub mod calls;
pub mod copy;
pub mod discard;
pub mod dlsym;
pub mod environment;
pub mod errno;
pub mod files;
pub mod helper;
pub mod jump;
pub mod layout;
pub mod loaded;
pub mod mapping;
pub mod maps;
pub mod next;
pub mod page;
pub mod populate;
pub mod report;
pub mod residency;
pub mod start;
pub mod stop;
pub mod symbols;
pub mod syscall;
pub mod text;
pub mod thread;
pub mod version;
pub mod warning;

// Tables of `core` for unwinding name this function, which code without unwinding never calls. The
// symbol is hidden: a program with Rust's standard library in a shared object needs its own.
#[cfg(not(test))]
core::arch::global_asm!(
    ".pushsection .text.rust_eh_personality,\"ax\",%progbits",
    ".globl rust_eh_personality",
    ".hidden rust_eh_personality",
    ".type rust_eh_personality,%function",
    "rust_eh_personality:",
    ".quad 0",
    ".popsection",
);

/// Ends the process by `SIGABRT`. The library contains no code that panics intentionally.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    syscall::abort()
}
