//! Backoff for background work that finds too little.
//!
//! If no pages or only a few can be evicted or moved, a call scans all pages in vain, and the next
//! call would repeat the scan. So after an unsuccessful call the next call is skipped, then the
//! next three, seven, and so on. A successful call resets the backoff. A CPU without memory does
//! not use the backoff.

use crate::sync::atomic::{AtomicU32, Ordering};

/// The maximum number of skipped calls.
const MOST: u32 = 255;

/// The backoff of one kind of work.
#[derive(Debug)]
pub(super) struct Backoff {
    /// The number of calls to skip after the next unsuccessful call.
    next: AtomicU32,
    /// The number of calls still to skip.
    left: AtomicU32,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { next: AtomicU32::new(1), left: AtomicU32::new(0) }
    }

    /// Returns whether this call should be skipped. (Concurrent calls of two CPUs may count as
    /// one.)
    pub(super) fn leaves_out(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left != 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        left != 0
    }

    /// Records the result of an executed call: whether it `found` enough.
    pub(super) fn tried(&self, found: bool) {
        let next = if found { 0 } else { self.next.load(Ordering::Relaxed) };
        self.left.store(next, Ordering::Relaxed);
        self.next.store((2 * next + 1).min(MOST), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn unsuccessful_work_backs_off_exponentially() {
        let backoff = Backoff::new();
        let left_out = || (0..).find(|_| !backoff.leaves_out()).unwrap_or(u32::MAX);
        let mut seen = [0; 10];
        for seen in &mut seen {
            *seen = left_out();
            backoff.tried(false);
        }
        assert_eq!(seen, [0, 1, 3, 7, 15, 31, 63, 127, 255, 255]);
        assert_eq!(left_out(), 255);
        backoff.tried(true);
        assert_eq!(left_out(), 0);
        backoff.tried(false);
        assert_eq!(left_out(), 1);
    }
}
