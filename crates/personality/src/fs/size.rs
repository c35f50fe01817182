//! The limit of the size of files, `RLIMIT_FSIZE`.

use crate::errno::{Errno, Result};
use crate::signal::{Info, send_thread};
use crate::task::thread::{Thread, current, try_current};
use core::sync::atomic::Ordering;
use linux_raw_sys::general::SIGXFSZ;

/// Returns the limit of the running process, in bytes.
pub fn limit() -> u64 {
    let of = |thread: &Thread| thread.process.limits.file_size.load(Ordering::Relaxed);
    try_current().map_or(u64::MAX, |thread| of(&thread))
}

/// Sends the running thread the signal of the limit, and returns the error. The caller holds no
/// lock.
pub fn exceeded() -> Errno {
    let thread = current();
    send_thread(&thread.arc(), Info::sent(SIGXFSZ, &thread.process, false));
    Errno::EFBIG
}

/// Checks that the running process may extend a file to `length` bytes.
///
/// # Errors
/// `EFBIG`, with a signal.
pub fn check(length: u64) -> Result<()> {
    if length > limit() { Err(exceeded()) } else { Ok(()) }
}
