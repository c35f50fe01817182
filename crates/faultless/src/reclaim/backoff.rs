//! How often work in the background is tried that found nothing.
//!
//! Where no page can be evicted or moved, or only a few, a look at all of them shows it, and the next call would look at all of them again. So after a call that found
//! nothing, or too little, the next one is left out, then the next three, seven, and so on. One that finds something ends that. Whoever is out of
//! memory does not ask.

use crate::sync::atomic::{AtomicU32, Ordering};

/// The most calls that are left out.
const MOST: u32 = 255;

/// Of one kind of work.
#[derive(Debug)]
pub(super) struct Backoff {
    /// How many calls are left out after the next one that finds nothing.
    next: AtomicU32,
    /// How many are left out still.
    left: AtomicU32,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { next: AtomicU32::new(1), left: AtomicU32::new(0) }
    }

    /// Whether this call is to be left out. (Calls of two CPUs at the same time may count as one.)
    pub(super) fn leaves_out(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left != 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        left != 0
    }

    /// A call was not left out, and has `found` something or not.
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
    fn what_finds_nothing_is_tried_less_and_less_often() {
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
