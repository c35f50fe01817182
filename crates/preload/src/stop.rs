//! The end of the operations in a program that could be harmed by further system calls or by
//! populated pages.
//!
//! - A program that installs a seccomp filter lists the system calls that it needs. The operations
//!   make others, such as `mincore`, for which a filter can end the program. A filter that exists
//!   before the start of the program, such as the filter of a container, is no reason: the starter
//!   of the program has permitted the calls of a whole system.
//! - A program that uses `userfaultfd` provides the contents of pages at their first touch. A
//!   populated page has no first touch, so the program would read zeros.
//!
//! The library finds both by [hooks](crate::calls), before the program makes the call. Pages that
//! were populated before stay populated.

use crate::layout::{FILTER, USER_FAULTS};
use crate::{ahead, report};
use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, Ordering};

/// The reason as the code of a refusal, or 0 while operations are permitted.
static STOPPED: AtomicU32 = AtomicU32::new(0);

/// Returns the reason for which no operation is permitted, as the code of a refusal.
#[inline]
pub fn code() -> Option<c_int> {
    match STOPPED.load(Ordering::Relaxed) {
        0 => None,
        code => Some(code as c_int),
    }
}

/// Returns whether the program has installed a seccomp filter.
#[inline]
pub fn is_filtered() -> bool {
    STOPPED.load(Ordering::Relaxed) == FILTER
}

/// Ends the operations before the program installs a seccomp filter.
#[cold]
pub fn before_filter() {
    // The record of a forked child needs system calls.
    report::prepare();
    STOPPED.store(FILTER, Ordering::SeqCst);
    ahead::end();
}

/// Ends the operations before the program uses `userfaultfd`.
#[cold]
pub fn before_user_faults() {
    let _ = STOPPED.compare_exchange(0, USER_FAULTS, Ordering::SeqCst, Ordering::Relaxed);
    ahead::end();
}
