//! Hooks of `prctl`, `ioctl` and `syscall`, which detect that the program installs a seccomp
//! filter or uses `userfaultfd`. The hook of `syscall` also detects calls that change mappings.
//!
//! Each hook is a jump, as in [`dlsym`](crate::dlsym): the original function finds all arguments,
//! also those on the stack, and a child of `vfork` returns to the program. A program that makes
//! system calls without the C library is not detected.

use crate::next::Next;
use crate::syscall::number::{MADVISE, MMAP, MPROTECT, MREMAP, MUNMAP, PROCESS_MADVISE};
use crate::{advice, discard, mapping, stop};
use core::arch::naked_asm;

const PR_SET_SECCOMP: i32 = 22;
/// The mode of `prctl` and the operation of `seccomp` that permit four calls only.
const PRCTL_STRICT: usize = 1;
const SECCOMP_STRICT: usize = 0;
const SECCOMP_FILTER: usize = 1;
/// The first request of a program to a descriptor of `userfaultfd`, in 32 bits.
const UFFDIO_API: u32 = 0xc018_aa3f;

/// The numbers of the calls that end the operations.
#[cfg(target_arch = "x86_64")]
mod number {
    pub const IOCTL: usize = 16;
    pub const SECCOMP: usize = 317;
    pub const USERFAULTFD: usize = 323;
}
#[cfg(target_arch = "aarch64")]
mod number {
    pub const IOCTL: usize = 29;
    pub const SECCOMP: usize = 277;
    pub const USERFAULTFD: usize = 282;
}

static PRCTL: Next = Next::new(c"prctl");
static IOCTL: Next = Next::new(c"ioctl");
static SYSCALL: Next = Next::new(c"syscall");

/// Finds the functions of the next library. At the start the program has one thread.
pub fn find_next() {
    for next in [&PRCTL, &IOCTL, &SYSCALL] {
        next.address();
    }
}

/// Returns the address of the next `prctl`, or 0.
extern "C" fn before_prctl(option: i32, mode: usize, filter: usize) -> usize {
    // A call without a filter asks the kernel for an error.
    if option == PR_SET_SECCOMP && (mode == PRCTL_STRICT || filter != 0) {
        stop::before_filter();
    }
    PRCTL.address().unwrap_or(0)
}

/// Returns the address of the next `ioctl`, or 0. musl has a request of 32 bits.
extern "C" fn before_ioctl(_: i32, request: u32) -> usize {
    if request == UFFDIO_API {
        stop::before_user_faults();
    }
    IOCTL.address().unwrap_or(0)
}

/// Returns the address of the next `syscall`, or 0. Returns another function, with the same
/// arguments, for advice that can discard copied text.
extern "C" fn before_syscall(
    number: usize,
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
    fifth: usize,
) -> usize {
    match number {
        MMAP => mapping::before_mmap(first, second, fourth as i32),
        MUNMAP => mapping::replaces(first, second),
        MREMAP => mapping::before_mremap(first, second, third, fourth as i32, fifth),
        MPROTECT => mapping::changes(first, second),
        MADVISE => {
            advice::before(first, second, third as i32);
            if discard::can_meet_text(third as i32) {
                return advice::madvise_by_number as *const () as usize;
            }
        }
        PROCESS_MADVISE => {
            // SAFETY: the program passes the arguments of the call.
            unsafe { advice::before_ranges(second as *const _, third, fourth as i32) };
            if discard::can_meet_text(fourth as i32) {
                return advice::process_madvise_by_number as *const () as usize;
            }
        }
        number::SECCOMP if first == SECCOMP_STRICT => stop::before_filter(),
        number::SECCOMP if first == SECCOMP_FILTER && third != 0 => stop::before_filter(),
        number::USERFAULTFD => stop::before_user_faults(),
        number::IOCTL if second as u32 == UFFDIO_API => stop::before_user_faults(),
        _ => {}
    }
    SYSCALL.address().unwrap_or(0)
}

/// Defines the hook `$name`. The hook calls `$before` with the arguments of the program, and jumps
/// to the returned address with the same arguments. Returns -1 for the address 0.
macro_rules! hook {
    ($name:ident, $before:ident) => {
        /// The C function of this name.
        ///
        /// # Safety
        /// The contract of C's function.
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() -> usize {
            naked_asm!(
                ".cfi_startproc",
                "push rdi",
                ".cfi_adjust_cfa_offset 8",
                "push rsi",
                ".cfi_adjust_cfa_offset 8",
                "push rdx",
                ".cfi_adjust_cfa_offset 8",
                "push rcx",
                ".cfi_adjust_cfa_offset 8",
                "push r8",
                ".cfi_adjust_cfa_offset 8",
                "push r9",
                ".cfi_adjust_cfa_offset 8",
                // The number of vector registers with arguments. The stack is aligned to 16 bytes.
                "push rax",
                ".cfi_adjust_cfa_offset 8",
                "call {before}",
                "mov r11, rax",
                "pop rax",
                ".cfi_adjust_cfa_offset -8",
                "pop r9",
                ".cfi_adjust_cfa_offset -8",
                "pop r8",
                ".cfi_adjust_cfa_offset -8",
                "pop rcx",
                ".cfi_adjust_cfa_offset -8",
                "pop rdx",
                ".cfi_adjust_cfa_offset -8",
                "pop rsi",
                ".cfi_adjust_cfa_offset -8",
                "pop rdi",
                ".cfi_adjust_cfa_offset -8",
                "test r11, r11",
                "jz 2f",
                "jmp r11",
                "2:",
                "mov rax, -1",
                "ret",
                ".cfi_endproc",
                before = sym $before,
            )
        }

        /// The C function of this name.
        ///
        /// # Safety
        /// The contract of C's function.
        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() -> usize {
            naked_asm!(
                ".cfi_startproc",
                "stp x29, x30, [sp, #-80]!",
                ".cfi_def_cfa_offset 80",
                ".cfi_offset x29, -80",
                ".cfi_offset x30, -72",
                "mov x29, sp",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "bl {before}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]",
                "ldp x2, x3, [sp, #32]",
                "ldp x4, x5, [sp, #48]",
                "ldp x6, x7, [sp, #64]",
                "ldp x29, x30, [sp], #80",
                ".cfi_def_cfa_offset 0",
                ".cfi_restore x29",
                ".cfi_restore x30",
                "cbz x16, 2f",
                "br x16",
                "2:",
                "mov x0, #-1",
                "ret",
                ".cfi_endproc",
                before = sym $before,
            )
        }
    };
}

hook!(prctl, before_prctl);
hook!(ioctl, before_ioctl);
hook!(syscall, before_syscall);
