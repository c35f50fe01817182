//! Costs of the host's hardware, measured by one thread or two.
//!
//! Each figure is the smallest of several rounds, because a disturbance can only increase the time
//! of a round.

use crate::error::Error;
use faultless::{CpuId, Machine, PAGE_SIZE, VirtRange};
use faultless_native::tlb::Tlb;
use faultless_native::{Config, NativeMachine};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::hint::{black_box, spin_loop};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a page and of a line, as lengths.
const PAGE: usize = PAGE_SIZE as usize;
const LINE: usize = 64;
/// Bytes that fit in a CPU's own caches, in the last-level cache, and in no cache.
pub const OWN: usize = 256 << 10;
/// See [`OWN`].
pub const SHARED: usize = 8 << 20;
/// See [`OWN`].
pub const COLD: usize = 96 << 20;

/// The extent of the measurements.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Rounds of each figure.
    pub rounds: usize,
}

impl Effort {
    /// Returns the smallest value of the rounds.
    pub fn smallest(self, mut round: impl FnMut() -> f64) -> f64 {
        (0..self.rounds).map(|_| round()).fold(f64::INFINITY, f64::min)
    }

    /// Runs `body` `times` times, and returns the nanoseconds of one run in the quietest round.
    pub fn each(self, times: u64, mut body: impl FnMut()) -> f64 {
        self.smallest(|| {
            let begin = Instant::now();
            (0..times).for_each(|_| body());
            nanoseconds(begin) / times as f64
        })
    }
}

/// Returns the nanoseconds since `begin`.
pub fn nanoseconds(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e9
}

/// Measures the frequency in GHz, by a chain of instructions of one cycle each.
pub fn ghz(effort: Effort) -> f64 {
    const STEPS: u64 = 200_000;
    /// A shift and an exclusive or, three times.
    const CYCLES: f64 = 6.0;
    let mut x = black_box(1u64);
    let each = effort.each(STEPS, || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
    });
    black_box(x);
    CYCLES / each
}

/// Measures one iteration of a wait loop.
pub fn pause(effort: Effort) -> f64 {
    effort.each(20_000, spin_loop)
}

/// The file with the size of a CPU's second-level cache.
pub const SECOND_LEVEL: &str = "/sys/devices/system/cpu/cpu0/cache/index2/size";

/// Returns the number of lines of the second-level cache. `None` if the host does not report its
/// size.
pub fn cached_lines() -> Option<u64> {
    let text = std::fs::read_to_string(SECOND_LEVEL).ok()?;
    let kib: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
    Some(kib * 1024 / LINE as u64).filter(|lines| *lines > 0)
}

/// Measures a dependent read of a line of `bytes` bytes. Within blocks of 16 pages the order is
/// random, and the blocks are read one after the other.
pub fn chase(effort: Effort, bytes: usize) -> f64 {
    const BLOCK: usize = 16 * PAGE / LINE;
    let lines = bytes / LINE;
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut below = |n: usize| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % n
    };
    let mut order: Vec<u32> = (0..lines as u32).collect();
    for block in order.chunks_mut(BLOCK) {
        (1..block.len()).for_each(|at| block.swap(at, below(at + 1)));
    }
    let mut next = vec![0u32; lines * LINE / size_of::<u32>()];
    let word = |line: u32| line as usize * (LINE / size_of::<u32>());
    for pair in order.windows(2) {
        next[word(pair[0])] = pair[1];
    }
    next[word(order[lines - 1])] = order[0];
    let mut line = order[0];
    let steps = (lines as u64).max(20_000);
    effort.each(steps, || line = black_box(next[word(line)]))
}

/// Measures the nanoseconds to zero a page, while zeroing the pages of `bytes` bytes in turn.
pub fn zero(effort: Effort, bytes: usize) -> f64 {
    let mut memory = vec![1u8; bytes];
    let mut at = 0;
    effort.each((bytes / PAGE).max(4096) as u64, || {
        black_box(&mut memory[at..at + PAGE]).fill(0);
        at = (at + PAGE) % bytes;
    })
}

/// Measures the nanoseconds to copy a page, while copying the pages in one half of `bytes` bytes to
/// the other half in turn.
pub fn copy(effort: Effort, bytes: usize) -> f64 {
    let mut memory = vec![1u8; bytes];
    let (from, to) = memory.split_at_mut(bytes / 2);
    let mut at = 0;
    effort.each((bytes / PAGE).max(4096) as u64, || {
        black_box(&mut to[at..at + PAGE]).copy_from_slice(black_box(&from[at..at + PAGE]));
        at = (at + PAGE) % (bytes / 2);
    })
}

/// Returns the number of written lines that the last-level cache keeps. Zeroing the pages of twice
/// this size is nearly as slow as zeroing [`COLD`] bytes.
pub fn shared_lines(effort: Effort) -> u64 {
    let sizes = [OWN, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, COLD];
    let costs = sizes.map(|bytes| zero(effort, bytes));
    sizes[last_near(&costs)] as u64 / LINE as u64
}

/// Returns the last of some costs, from the nearest on, that is nearer to the first than to the
/// last.
fn last_near(costs: &[f64]) -> usize {
    let between = match costs {
        [first, .., last] => (first * last).sqrt(),
        _ => return 0,
    };
    costs.iter().take_while(|cost| **cost <= between).count().saturating_sub(1)
}

/// Measures the bandwidth of two threads that zero memory in no cache, in 10^9 bytes per second.
///
/// # Errors
/// The threads cannot be started.
pub fn bandwidth(effort: Effort, cpus: [usize; 2]) -> Result<f64, Error> {
    let mut memory = [vec![1u8; COLD], vec![1u8; COLD]];
    let mut most = 0f64;
    for _ in 0..effort.rounds {
        let start = Barrier::new(2);
        let took = together(cpus, memory.each_mut(), |memory| {
            start.wait();
            let begin = Instant::now();
            memory.chunks_exact_mut(PAGE).for_each(|page| black_box(page).fill(0));
            nanoseconds(begin)
        })?;
        most = most.max(2.0 * COLD as f64 / took[0].max(took[1]));
    }
    Ok(most)
}

/// Returns the first two CPUs on which this process may run.
///
/// # Errors
/// The process has fewer than two CPUs.
pub fn two_cpus() -> Result<[usize; 2], Error> {
    const WHAT: &str = "the CPUs of this process";
    let allowed = sched_getaffinity(Pid::from_raw(0)).map_err(|error| Error::run(WHAT, error))?;
    let mut cpus = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    match (cpus.next(), cpus.next()) {
        (Some(one), Some(other)) => Ok([one, other]),
        _ => {
            let why = "transfers between CPUs need two CPUs, and this process may use one: run it on more CPUs (taskset -c 0,1), or check \
                       a bundled profile (--profile)";
            Err(Error::run(WHAT, why))
        }
    }
}

/// Runs `body` on two threads, each pinned to a CPU.
fn together<A: Send, R: Send>(
    cpus: [usize; 2],
    of: [A; 2],
    body: impl Fn(A) -> R + Sync,
) -> Result<Vec<R>, Error> {
    let body = &body;
    let pinned = |(cpu, of): (usize, A)| {
        move || {
            let mut set = CpuSet::new();
            // If pinning is refused, the scheduler soon moves two busy threads to two CPUs.
            let _ = set.set(cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
            body(of)
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = cpus
            .into_iter()
            .zip(of)
            .map(|each| thread::Builder::new().spawn_scoped(scope, pinned(each)))
            .collect();
        let join =
            |thread: std::io::Result<thread::ScopedJoinHandle<'_, R>>| -> std::io::Result<R> {
                let joined = thread?.join();
                Ok(joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            };
        let all: std::io::Result<Vec<R>> = threads.into_iter().map(join).collect();
        all.map_err(|error| Error::host("two threads", error))
    })
}

#[repr(align(128))]
struct Line(AtomicU64);

/// Measures the nanoseconds of a line transfer between two CPUs: half of a round trip by
/// compare-and-swap.
///
/// # Errors
/// The threads cannot be started.
pub fn transfer(effort: Effort, cpus: [usize; 2]) -> Result<f64, Error> {
    const TRIPS: u64 = 5_000;
    let line = Line(AtomicU64::new(0));
    let all = TRIPS * effort.rounds as u64;
    let took = together(cpus, [0, 1], |side| {
        let mut quietest = f64::INFINITY;
        let mut begin = Instant::now();
        for trip in 0..all {
            let mine = 2 * trip + side;
            while line
                .0
                .compare_exchange_weak(mine, mine + 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
            {}
            if (trip + 1).is_multiple_of(TRIPS) {
                quietest = quietest.min(nanoseconds(begin) / (2 * TRIPS) as f64);
                begin = Instant::now();
            }
        }
        quietest
    })?;
    Ok(took[0].min(took[1]))
}

/// Measures the cost of a wake-up: the time on the waking CPU, and the time until the woken thread
/// runs, in nanoseconds.
///
/// # Errors
/// The threads or the machine cannot be created.
pub fn waking(effort: Effort, cpus: [usize; 2]) -> Result<[f64; 2], Error> {
    const TIMES: u64 = 60;
    /// The time after which a thread about to sleep is asleep.
    const ASLEEP: Duration = Duration::from_micros(150);
    let config = Config { memory_bytes: 1 << 20, cpus: 2, ..Config::default() };
    let machine =
        NativeMachine::new(config).map_err(|error| Error::machine("a native machine", error))?;
    let woken = Line(AtomicU64::new(0));
    let all = TIMES * effort.rounds as u64;
    let took = together(cpus, [0, 1], |side| {
        let (mut wake, mut until) = (f64::INFINITY, f64::INFINITY);
        for time in 1..=all {
            if side == 1 {
                machine.park(CpuId(1));
                woken.0.store(time, Ordering::Release);
                continue;
            }
            let asleep = Instant::now() + ASLEEP;
            while Instant::now() < asleep {
                spin_loop();
            }
            let begin = Instant::now();
            machine.wake(CpuId(1));
            wake = wake.min(nanoseconds(begin));
            while woken.0.load(Ordering::Acquire) < time {
                spin_loop();
            }
            until = until.min(nanoseconds(begin));
        }
        [wake, until]
    })?;
    let [wake, until] = took[0];
    Ok([wake, (until - wake).max(0.0)])
}

/// Measures the time of the software TLB to drop one page, and to drop all pages.
pub fn tlb_flushes(effort: Effort) -> [f64; 2] {
    let tlb = Tlb::new();
    let page = VirtRange::page(PAGE_SIZE);
    [
        effort.each(50_000, || black_box(&tlb).invalidate_range(black_box(page))),
        effort.each(50_000, || black_box(&tlb).invalidate_all()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Effort = Effort { rounds: 2 };

    #[test]
    fn last_level_size_is_found_from_costs() {
        assert_eq!(last_near(&[40.0, 44.0, 80.0, 300.0, 360.0]), 2);
        assert_eq!(last_near(&[40.0, 300.0, 50.0, 300.0]), 0);
        assert_eq!(last_near(&[]), 0);
    }

    #[test]
    fn quietest_round_counts() {
        let mut rounds = [7.0, 3.0].into_iter();
        assert_eq!(QUICK.smallest(|| rounds.next().unwrap_or(0.0)), 3.0);
    }

    /// Bounds that any current machine meets, also under load.
    #[test]
    fn figures_have_the_right_order_of_magnitude() {
        let between = |low: f64, value: f64, high: f64| {
            assert!((low..high).contains(&value), "{value} is not between {low} and {high}");
        };
        between(0.3, ghz(QUICK), 8.0);
        between(0.3, pause(QUICK), 1000.0);
        between(0.2, chase(QUICK, 32 << 10), 100.0);
        // The order of these times is not checked, because the host is shared.
        [OWN, SHARED, COLD].into_iter().for_each(|bytes| between(10.0, zero(QUICK, bytes), 1e6));
        if let Ok(cpus) = two_cpus() {
            between(1.0, transfer(QUICK, cpus).expect("two threads"), 1e7);
            let [wake, woken] = waking(QUICK, cpus).expect("two threads");
            between(10.0, wake + woken, 1e8);
        }
    }
}
