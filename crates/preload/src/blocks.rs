//! The operation for a new block: populate at once, or populate ahead of its use.

use crate::layout::Reason;
use crate::{ahead, populate, report, stop};

/// With both operations, smaller blocks are populated at once, and this size and more ahead.
const LARGE: usize = 64 << 20;

/// Returns the size in bytes of the smallest block for which an operation is requested.
#[inline]
pub fn smallest() -> usize {
    populate::from().min(ahead::from())
}

/// Starts the operation for a new block of at least [`smallest`] bytes.
#[cold]
pub fn made(start: usize, bytes: usize) {
    let whole = bytes >= populate::from();
    let watched = bytes >= ahead::from();
    if let Some(code) = stop::code() {
        report::refuse(if whole { Reason::Populate } else { Reason::Ahead }, code);
        return;
    }
    if whole && !(watched && bytes >= LARGE) {
        populate::block(start, bytes);
    } else if watched {
        ahead::watch(start, bytes);
    }
}
