//! Concurrent threads, and their speeds.
//!
//! A [`Course`] is a number of laps. All threads begin a lap together; when the first has done its
//! share, all stop, and begin the next lap. The speed of a thread in a lap is its work divided by
//! the time from the first start to the last end, so a late or interrupted thread counts as slow.
//! Laps take a millisecond or less, so that some laps are undisturbed even on a busy host. A lap in
//! which one of the threads waited for a processor is discarded, as is the first lap, whose caches
//! are in an unknown state.

use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Laps of threads that work concurrently.
#[derive(Debug)]
pub struct Course {
    laps: Vec<Window>,
    chunks: u64,
}

impl Course {
    /// Creates a course of `laps` laps of `chunks` chunks for `threads` threads, each of which must
    /// call [`run`](Self::run).
    pub fn new(threads: usize, laps: u64, chunks: u64) -> Self {
        Self { laps: (0..laps).map(|_| Window::new(threads)).collect(), chunks }
    }

    /// Runs the course: calls `chunk` with the number of each chunk, and `poll` while the thread
    /// waits for the others.
    ///
    /// # Errors
    /// The first error of `chunk`; no thread runs another lap then.
    pub fn run<E>(
        &self,
        poll: impl Fn(),
        mut chunk: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<Vec<Lap>, E> {
        self.laps(self.chunks, poll, |_| Ok(()), |lap, at| chunk(lap * self.chunks + at))
    }

    /// Runs the course like [`run`](Self::run), but calls `prepare` before each lap with the number
    /// of the lap, and `chunk` with the numbers of the lap and of the chunk in the lap.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn prepared<E>(
        &self,
        poll: impl Fn(),
        prepare: impl FnMut(u64) -> Result<(), E>,
        chunk: impl FnMut(u64, u64) -> Result<(), E>,
    ) -> Result<Vec<Lap>, E> {
        self.laps(self.chunks, poll, prepare, chunk)
    }

    /// Runs beside the other threads like [`run`](Self::run), but the lap ends when another thread
    /// has done its share. `chunk` receives the number of its chunks so far in the lap.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn beside<E>(
        &self,
        poll: impl Fn(),
        mut chunk: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<Vec<Lap>, E> {
        self.laps(u64::MAX, poll, |_| Ok(()), |_, at| chunk(at))
    }

    fn laps<E>(
        &self,
        share: u64,
        poll: impl Fn(),
        mut prepare: impl FnMut(u64) -> Result<(), E>,
        mut chunk: impl FnMut(u64, u64) -> Result<(), E>,
    ) -> Result<Vec<Lap>, E> {
        let waits = Waits::open();
        let laps = self.laps.iter().zip(0..).map(|(window, lap)| {
            prepare(lap)?;
            window.lap(share, &waits, &poll, |at| chunk(lap, at))
        });
        laps.collect::<Result<_, _>>().inspect_err(|_| self.laps.iter().for_each(Window::abandon))
    }

    /// Returns the chunks per second of each thread in each lap that counts. `threads` contains the
    /// result of [`run`](Self::run) in each thread.
    pub fn speeds(&self, threads: &[Vec<Lap>]) -> Vec<Vec<f64>> {
        (1..self.laps.len())
            .map(|at| threads.iter().filter_map(|laps| laps.get(at).copied()).collect())
            .filter(|laps: &Vec<Lap>| laps.iter().all(|lap| lap.in_peace))
            .map(|laps| speeds(&laps))
            .collect()
    }
}

/// A time in which threads work concurrently.
#[derive(Debug)]
struct Window {
    threads: usize,
    arrived: AtomicUsize,
    over: AtomicBool,
}

/// The work of one thread in a window.
#[derive(Clone, Copy, Debug)]
pub struct Lap {
    done: u64,
    begin: Instant,
    end: Instant,
    /// Whether the host always let the thread run when it was runnable.
    in_peace: bool,
}

/// The divisor of the time of a lap that gives the longest wait of an undisturbed thread for a
/// processor.
pub(crate) const PEACE: u32 = 50;

/// Returns the processor time of this thread.
pub(crate) fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    // Both values are nonnegative.
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The time for which this thread has waited for a processor: the second figure of its `schedstat`.
struct Waits(Option<File>);

impl Waits {
    fn open() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// Returns the time so far; a constant if the host does not report the time.
    fn so_far(&self) -> Duration {
        let mut text = [0; 80];
        let read = self.0.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let text = str::from_utf8(&text[..read]).unwrap_or_default();
        let waited = text.split_whitespace().nth(1).and_then(|waited| waited.parse().ok());
        Duration::from_nanos(waited.unwrap_or(0))
    }
}

impl Window {
    fn new(threads: usize) -> Self {
        Self { threads, arrived: AtomicUsize::new(0), over: AtomicBool::new(false) }
    }

    /// Waits for the others, then calls `chunk` with 0, 1, ... up to `chunks` times, until one of
    /// the threads is done. Calls `poll` during the wait.
    ///
    /// # Errors
    /// The first error of `chunk`; the other threads stop.
    fn lap<E>(
        &self,
        chunks: u64,
        waits: &Waits,
        poll: impl Fn(),
        mut chunk: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<Lap, E> {
        let before = waits.so_far();
        meet(&self.arrived, self.threads, poll);
        let begin = Instant::now();
        let mut done = 0;
        let mut result = Ok(());
        while done < chunks && result.is_ok() && !self.over.load(Ordering::Relaxed) {
            result = chunk(done);
            done += 1;
        }
        let end = Instant::now();
        self.over.store(true, Ordering::Relaxed);
        let in_peace = waits.so_far() - before <= (end - begin) / PEACE;
        result.map(|()| Lap { done, begin, end, in_peace })
    }

    /// Ends all waits.
    fn abandon(&self) {
        self.over.store(true, Ordering::Relaxed);
        self.arrived.store(self.threads, Ordering::Release);
    }
}

/// Waits until `threads` threads have arrived.
pub fn meet(arrived: &AtomicUsize, threads: usize, poll: impl Fn()) {
    arrived.fetch_add(1, Ordering::AcqRel);
    let mut looks = 0u32;
    while arrived.load(Ordering::Acquire) < threads {
        poll();
        looks += 1;
        if looks.is_multiple_of(1 << 12) {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

/// Returns the chunks per second of each thread.
fn speeds(laps: &[Lap]) -> Vec<f64> {
    let begin = laps.iter().map(|lap| lap.begin).min();
    let end = laps.iter().map(|lap| lap.end).max();
    let seconds = begin.zip(end).map_or(0.0, |(begin, end)| (end - begin).as_secs_f64());
    laps.iter().map(|lap| lap.done as f64 / seconds).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_stop_with_the_first_and_begin_again() {
        let course = Course::new(2, 3, 10);
        let laps = std::thread::scope(|scope| {
            let slow = scope.spawn(|| {
                course.run(
                    || (),
                    |_| {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                        Ok::<_, ()>(())
                    },
                )
            });
            let mut reached = Vec::new();
            let fast = course.run(
                || (),
                |chunk| {
                    reached.push(chunk);
                    Ok::<_, ()>(())
                },
            );
            // The faster thread stays faster until the end.
            assert_eq!(reached, (0..30).collect::<Vec<_>>());
            [fast.unwrap(), slow.join().unwrap().unwrap()]
        });
        let speeds = course.speeds(&laps);
        // On a busy host possibly no lap counts.
        assert!(speeds.len() <= 2);
        assert!(speeds.iter().all(|both| both[0] > both[1]));
    }

    #[test]
    fn waiting_for_a_processor_is_detected() {
        let waits = Waits::open();
        if waits.0.is_none() {
            return;
        }
        let busy = AtomicBool::new(true);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..2 * processors {
                scope.spawn(|| {
                    while busy.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let (before, begin) = (waits.so_far(), Instant::now());
            while waits.so_far() == before && begin.elapsed() < Duration::from_secs(10) {
                std::thread::yield_now();
            }
            busy.store(false, Ordering::Relaxed);
            assert!(waits.so_far() > before);
        });
    }

    #[test]
    fn beside_thread_does_not_end_a_lap() {
        let course = Course::new(2, 3, 10);
        let done = std::thread::scope(|scope| {
            scope.spawn(|| {
                let rest = |_| {
                    std::thread::sleep(Duration::from_millis(1));
                    Ok::<_, ()>(())
                };
                course.run(|| (), rest)
            });
            let mut most = 0;
            let beside = course.beside(
                || (),
                |at| {
                    most = most.max(at);
                    Ok::<_, ()>(())
                },
            );
            assert_eq!(beside.unwrap().len(), 3);
            most
        });
        assert!(done > 10, "{done}");
    }

    #[test]
    fn failure_stops_all_threads() {
        let course = Course::new(2, 3, 10);
        std::thread::scope(|scope| {
            // The thread would wait without end in the second lap.
            scope.spawn(|| {
                course.run(
                    || (),
                    |_| {
                        while !course.laps[0].over.load(Ordering::Relaxed) {
                            std::thread::yield_now();
                        }
                        Ok::<_, u64>(())
                    },
                )
            });
            assert_eq!(course.run(|| (), Err).err(), Some(0));
        });
    }
}
