//! Hooks of `prctl`, `ioctl` and `syscall`, which detect that the program installs a seccomp
//! filter or uses `userfaultfd`. The hook of `syscall` also detects calls that change mappings.
//!
//! Each hook is a [jump](crate::jump). A program that makes system calls without the C library is
//! not detected.

use crate::jump::jump;
use crate::next::Next;
use crate::syscall::number::{MADVISE, MMAP, MPROTECT, MREMAP, MUNMAP, PROCESS_MADVISE};
use crate::{advice, discard, mapping, stop};

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

/// Returns the address of a function, or of a function that reports an error.
fn address(next: &Next) -> usize {
    /// Returns -1, the C library's result of a failed call.
    extern "C" fn missing() -> isize {
        mapping::missing() as isize
    }
    next.address().unwrap_or(missing as *const () as usize)
}

/// Returns the address of the next `prctl`.
extern "C" fn before_prctl(option: i32, mode: usize, filter: usize) -> usize {
    // A call without a filter asks the kernel for an error.
    if option == PR_SET_SECCOMP && (mode == PRCTL_STRICT || filter != 0) {
        stop::before_filter();
    }
    address(&PRCTL)
}

/// Returns the address of the next `ioctl`. musl has a request of 32 bits.
extern "C" fn before_ioctl(_: i32, request: u32) -> usize {
    if request == UFFDIO_API {
        stop::before_user_faults();
    }
    address(&IOCTL)
}

/// Returns the address of the next `syscall`. Returns another function, with the same arguments,
/// for advice that can discard copied text.
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
    address(&SYSCALL)
}

jump!(prctl, before_prctl);
jump!(ioctl, before_ioctl);
jump!(syscall, before_syscall);
