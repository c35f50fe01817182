//! The common start of a crew, and the stop at the end of the time limit.
//!
//! Workers [`arrive`](Start::arrive). The conductor waits for all workers, records the initial
//! state, and starts the crew. After the limit, if any, the conductor sets a flag. The lines read
//! by workers during the measured work are written once.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The interval of the conductor's checks.
const LOOK: Duration = Duration::from_micros(200);

/// The signals of one run. May be located in memory shared by processes.
#[derive(Debug, Default)]
pub(crate) struct Start {
    /// Workers that wait for the start, or will never arrive.
    ready: AtomicUsize,
    go: AtomicBool,
    /// Workers that have ended their work.
    done: AtomicUsize,
    stop: Line<AtomicBool>,
}

/// A value on separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

impl<T> Deref for Line<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl Start {
    /// Waits for the start, and calls `meanwhile` repeatedly.
    pub(crate) fn arrive(&self, mut meanwhile: impl FnMut()) {
        self.ready.fetch_add(1, Ordering::Release);
        while !self.go.load(Ordering::Acquire) {
            meanwhile();
            std::thread::yield_now();
        }
    }

    /// Reports a worker that will neither arrive nor work.
    pub(crate) fn absent(&self) {
        self.ready.fetch_add(1, Ordering::Release);
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a guard whose drop counts a worker as done, also in a panic.
    pub(crate) fn until_done(&self) -> impl Drop + '_ {
        struct Done<'a>(&'a AtomicUsize);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        Done(&self.done)
    }

    /// Returns whether the time is up.
    #[inline]
    pub(crate) fn expired(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Dismisses the present workers, because an incomplete crew gives no result.
    pub(crate) fn dismiss(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.go.store(true, Ordering::Release);
    }

    /// Waits for the workers, calls `begin`, and starts the workers. With a `limit`, stops all
    /// workers afterwards. `alive` returns the number of workers still able to do their part.
    pub(crate) fn conduct(
        &self,
        limit: Option<Duration>,
        mut alive: impl FnMut() -> usize,
        begin: impl FnOnce(),
    ) {
        while self.ready.load(Ordering::Acquire) < alive() {
            std::thread::sleep(LOOK / 4);
        }
        begin();
        self.go.store(true, Ordering::Release);
        let Some(limit) = limit else {
            return;
        };
        let end = Instant::now() + limit;
        while self.done.load(Ordering::Relaxed) < alive() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(LOOK));
        }
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_starts_after_all_have_arrived() {
        let start = Start::default();
        let working = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    start.arrive(|| ());
                    let _done = start.until_done();
                    working.fetch_add(1, Ordering::Relaxed);
                    while !start.expired() {
                        std::thread::yield_now();
                    }
                });
            }
            scope.spawn(|| start.absent());
            let begin = || assert_eq!(working.load(Ordering::Relaxed), 0);
            start.conduct(Some(Duration::from_millis(10)), || 4, begin);
        });
        assert_eq!(working.into_inner(), 3);
    }

    #[test]
    fn limit_does_not_delay_finished_workers() {
        let (start, begin) = (Start::default(), Instant::now());
        start.absent();
        start.conduct(Some(Duration::from_secs(100)), || 1, || ());
        assert!(begin.elapsed() < Duration::from_secs(50));
        assert!(start.expired());
    }
}
