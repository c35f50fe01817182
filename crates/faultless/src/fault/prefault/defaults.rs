//! Predictor defaults for new threads, learned from threads that have ended.
//!
//! Many threads take only a few faults: children of a shell, workers of a build. These faults are
//! too few to learn how far the thread's streams continue, and each page too many is an unused
//! prefaulted page. So a thread begins with the [`Widths`] of ended threads of any program. The
//! widths are only defaults: each thread earns the credit for its windows by its own faults.

use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The number of stream types: upwards, downwards, and strided.
pub(super) const SIDES: usize = 3;
/// The number of fault kinds.
pub(super) const KINDS: usize = 3;
/// The number of run classes: 0, 1, 2–3, 4–7, 8–15 and 16 pages or more.
pub(super) const CLASSES: usize = 6;
/// Widths are orders in steps of one half.
pub(super) const HALVES: u8 = 2;
/// Orders of windows in half orders, by kind of fault, side, and class of run.
pub(super) type Widths = [[[u8; CLASSES]; SIDES]; KINDS];

/// Widths as long as the run: 2 pages for runs of 2–3, 4 for 4–7, ….
pub(super) const AS_LONG_AS_THE_RUN: Widths =
    [[[0, 0, HALVES, 2 * HALVES, 3 * HALVES, 4 * HALVES]; SIDES]; KINDS];

/// The scale of [`Defaults`]: stored values are widths times this.
const FINE: u32 = 16;
/// How far one thread moves a default: the difference divided by this.
const PACE: i32 = 8;

/// The initial widths of new threads, one value for all threads of a machine. Read when a thread
/// first faults in a space, and written without a lock when a thread leaves. If two threads write
/// concurrently, one update may be lost.
#[derive(Debug)]
pub struct Defaults([[[AtomicU32; CLASSES]; SIDES]; KINDS]);

impl Default for Defaults {
    fn default() -> Self {
        Self::new()
    }
}

impl Defaults {
    /// Returns the defaults of a machine on which no thread has ended.
    pub fn new() -> Self {
        let fine = |width: u8| AtomicU32::new(u32::from(width) * FINE);
        Self(AS_LONG_AS_THE_RUN.map(|sides| sides.map(|classes| classes.map(fine))))
    }

    /// Returns the widths for a new thread.
    pub(super) fn begin(&self) -> Widths {
        let coarse = |fine: &AtomicU32| (fine.load(Relaxed) / FINE) as u8;
        self.0
            .each_ref()
            .map(|sides| sides.each_ref().map(|classes| classes.each_ref().map(coarse)))
    }

    /// Moves the defaults towards the final widths of a thread, for widths that differ from the
    /// initial ones.
    pub(super) fn learn(&self, begun: &Widths, ended: &Widths) {
        let both =
            begun.as_flattened().as_flattened().iter().zip(ended.as_flattened().as_flattened());
        for (default, (begun, ended)) in self.0.as_flattened().as_flattened().iter().zip(both) {
            if begun != ended {
                let old = default.load(Relaxed) as i32;
                let there = (u32::from(*ended) * FINE + FINE / 2) as i32;
                default.store((old + (there - old) / PACE) as u32, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_move_towards_changed_widths() {
        let defaults = Defaults::new();
        let begun = defaults.begin();
        assert_eq!(begun, AS_LONG_AS_THE_RUN);
        let mut ended = begun;
        ended[1][0][5] = 0;
        defaults.learn(&begun, &ended);
        let after = defaults.begin();
        assert!(after[1][0][5] < begun[1][0][5] && after[1][0][5] > 0, "{after:?}");
        for _ in 0..40 {
            defaults.learn(&defaults.begin(), &ended);
        }
        assert_eq!(defaults.begin(), ended);
        // A thread that ends with its initial widths changes no default.
        defaults.learn(&ended, &ended);
        assert_eq!(defaults.begin(), ended);
    }
}
