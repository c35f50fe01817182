//! The limit of the size of files, `RLIMIT_FSIZE`.

use super::regular::MAX_LENGTH;
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

/// Calls `grow` with the limit. The caller holds no lock.
///
/// # Errors
/// The errors of `grow`; if `EFBIG` is due to the limit, with the signal.
pub fn within_limit<R>(grow: impl FnOnce(u64) -> Result<R>) -> Result<R> {
    let limit = limit();
    match grow(limit) {
        Err(Errno::EFBIG) if limit < MAX_LENGTH => Err(exceeded()),
        result => result,
    }
}
