//! For `LD_PRELOAD`: populates a program's large blocks of memory when they are made.
//!
//! One file serves programs of glibc and of musl. The library depends on no other library, and
//! has no undefined symbol that one of the two lacks: symbols of the C library are weak
//! ([`symbols`]), and system calls are made directly ([`syscall`]). Each operation has a variable
//! that enables the operation; without the variables, the library has no effect.
//!
//! | variable | operation | module |
//! |---|---|---|
//! | `FAULTLESS_POPULATE=BYTES` | populates new blocks of this size and more | [`populate`] |
//! | `FAULTLESS_HUGE_TEXT=copy`, `=collapse` | moves text to huge pages at the start | [`text`] |
//!
//! The hooks of the program's calls are in [`allocator`] and [`mapping`]. A hook calls the original
//! function first, and the operation follows. A failed operation is not reported, and the
//! program continues without the operation.

#![no_std]

pub mod allocator;
pub mod environment;
pub mod errno;
pub mod mapping;
pub mod maps;
pub mod next;
pub mod page;
pub mod populate;
pub mod start;
pub mod symbols;
pub mod syscall;
pub mod text;
pub mod version;

/// Ends the process by `SIGABRT`. The library contains no code that panics intentionally.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    syscall::abort()
}
