//! Threads that work at the same time, and how fast each of them was while all did.
//!
//! All threads begin together; when the first has done its share, all stop. Each one's speed is
//! what it did over the time from the first one's begin to the last one's end, so a thread that
//! came late or was not running for a while counts as slow.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// A time in which threads work side by side.
#[derive(Debug)]
pub struct Window {
    threads: usize,
    arrived: AtomicUsize,
    over: AtomicBool,
}

/// What one thread did in a window.
#[derive(Clone, Copy, Debug)]
pub struct Lap {
    done: u64,
    begin: Instant,
    end: Instant,
}

impl Window {
    /// A window for `threads` threads, each of which must call [`lap`](Self::lap).
    pub fn new(threads: usize) -> Self {
        Self { threads, arrived: AtomicUsize::new(0), over: AtomicBool::new(false) }
    }

    /// Waits for the others, then calls `chunk` with 0, 1, ... up to `chunks` times, until one of
    /// the threads is done. While it waits it calls `poll`.
    ///
    /// # Errors
    /// The first that `chunk` gave; the other threads stop.
    pub fn lap<E>(
        &self,
        chunks: u64,
        poll: impl Fn(),
        mut chunk: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<Lap, E> {
        self.arrived.fetch_add(1, Ordering::AcqRel);
        let mut looks = 0u32;
        while self.arrived.load(Ordering::Acquire) < self.threads {
            poll();
            looks += 1;
            if looks.is_multiple_of(1 << 12) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        let begin = Instant::now();
        let mut done = 0;
        let mut result = Ok(());
        while done < chunks && result.is_ok() && !self.over.load(Ordering::Relaxed) {
            result = chunk(done);
            done += 1;
        }
        let end = Instant::now();
        self.over.store(true, Ordering::Relaxed);
        result.map(|()| Lap { done, begin, end })
    }
}

/// Chunks a second of each thread.
pub fn speeds(laps: &[Lap]) -> Vec<f64> {
    let begin = laps.iter().map(|lap| lap.begin).min();
    let end = laps.iter().map(|lap| lap.end).max();
    let seconds = begin.zip(end).map_or(0.0, |(begin, end)| (end - begin).as_secs_f64());
    laps.iter().map(|lap| lap.done as f64 / seconds).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_stop_with_the_first() {
        let window = Window::new(2);
        let laps = std::thread::scope(|scope| {
            let endless = scope.spawn(|| {
                window.lap(
                    u64::MAX,
                    || (),
                    |_| {
                        std::thread::yield_now();
                        Ok::<_, ()>(())
                    },
                )
            });
            let short = window.lap(10, || (), |_| Ok::<_, ()>(()));
            [short.unwrap(), endless.join().unwrap().unwrap()]
        });
        assert_eq!(laps[0].done, 10);
        assert!(speeds(&laps).iter().all(|speed| speed.is_finite()));
    }

    #[test]
    fn a_failure_stops_all() {
        let window = Window::new(1);
        assert_eq!(
            window.lap(10, || (), |at| if at == 3 { Err(at) } else { Ok(()) }).err(),
            Some(3)
        );
        assert!(window.over.load(Ordering::Relaxed));
    }
}
