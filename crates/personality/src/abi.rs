//! Linux's structures in user memory, and times.

use crate::errno::{Errno, Result};
use faultless_bare::arch::user::{self, Plain};
use linux_raw_sys::general::{
    self as nr, __kernel_old_timeval as Timeval, __kernel_timespec as Timespec,
};

/// Nanoseconds in a second.
pub const SECOND: u64 = 1_000_000_000;

/// A structure of Linux that is copied from or to user memory.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Abi<T>(pub T);

// SAFETY: consecutive words.
unsafe impl Plain for Abi<Timespec> {}
// SAFETY: as above.
unsafe impl Plain for Abi<nr::__kernel_itimerspec> {}
// SAFETY: as above.
unsafe impl Plain for Abi<Timeval> {}
// SAFETY: as above.
unsafe impl Plain for Abi<nr::__kernel_old_itimerval> {}
// SAFETY: words, with a field in place of padding.
unsafe impl Plain for Abi<nr::stat> {}
// SAFETY: words.
unsafe impl Plain for Abi<nr::statfs> {}

/// Nanoseconds of a `timespec`.
///
/// # Errors
/// `EINVAL` for a negative time, or nanoseconds of a second or more.
pub fn nanoseconds(time: &Timespec) -> Result {
    match (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec)) {
        (Ok(seconds), Ok(nanoseconds)) if nanoseconds < SECOND => {
            Ok(seconds.saturating_mul(SECOND).saturating_add(nanoseconds))
        }
        _ => Err(Errno::EINVAL),
    }
}

/// Nanoseconds of a `timeval`.
///
/// # Errors
/// As [`nanoseconds`].
pub fn nanoseconds_of_timeval(time: &Timeval) -> Result {
    // A value that overflows is also invalid as nanoseconds.
    let tv_nsec = time.tv_usec.saturating_mul(1_000);
    nanoseconds(&Timespec { tv_sec: time.tv_sec, tv_nsec })
}

/// The `timespec` of a time.
pub const fn timespec(nanoseconds: u64) -> Abi<Timespec> {
    Abi(Timespec { tv_sec: (nanoseconds / SECOND) as i64, tv_nsec: (nanoseconds % SECOND) as i64 })
}

/// The `timeval` of a time.
pub const fn timeval(nanoseconds: u64) -> Abi<Timeval> {
    Abi(Timeval {
        tv_sec: (nanoseconds / SECOND) as i64,
        tv_usec: (nanoseconds % SECOND / 1_000) as i64,
    })
}

/// Returns the nanoseconds of the `timespec` at `at` in the program's memory.
///
/// # Errors
/// `EFAULT`, and the errors of [`nanoseconds`].
pub fn read_timespec(at: u64) -> Result {
    nanoseconds(&user::read::<Abi<Timespec>>(at)?.0)
}
