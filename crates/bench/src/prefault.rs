//! The savings of prefault, and its cost for threads with random or sparse accesses, on the native
//! machine.
//!
//! *Sequential.* In the page fault test `pft`, written once for all systems, one thread writes one
//! page after the other. The number of faults is an exact count. The cost of a page is the thread's
//! processor time per page: the faults, the zeroing of the frame if done in the fault, and the
//! program's store and load, which find the frame cold or warm. The pages exceed the size of the
//! caches. A pool is filled before the clock starts, as idle CPUs do, and the time to fill the pool
//! is a separate row.
//!
//! *Scattered and sparse.* One thread writes pages in random order in an area of many times their
//! number, or one page in 16, or in 64, upwards. Prefault can save little here, because streams
//! that skip pages are detected up to a stride of 32. The measurement is the cost in time and in
//! resident pages, which are counted exactly.
//!
//! Within a round all settings alternate, since the host's clock changes within seconds. The
//! comparison uses the medians of the *ratios* within rounds. A scattered lap runs between two laps
//! with prefault off. Time is the thread's own time on the processor. A busy host still adds noise:
//! a target on time counts as missed only if the sample exceeds the target by twice the median's
//! standard error.

use crate::report::{Report, Spread};
use crate::window::processor_time;
use faultless::{Access, MapFlags, PAGE_SIZE, Prot, Setting};
use faultless_native::{Config, Native, Stop};
use faultless_workload::{Outcome, Workload};
use std::time::{Duration, Instant};

/// Bytes touched in a sequential lap: more than the caches hold.
const SEQUENTIAL: u64 = 64 << 20;
/// Pages touched in a scattered lap.
const PAGES: u64 = 4096;
/// Frames beyond the touched ones: for page tables, for the CPUs' reserves, and to avoid memory
/// pressure.
const SPARE: u64 = 4096;

/// `prefault_max_order`, and the least factor by which faults must be fewer than pages.
const FEWER: [(u8, f64); 2] = [(3, 7.9), (5, 31.0)];
/// The largest cost of a page with both means, relative to the cost without them.
const QUARTER: f64 = 0.25;
/// The largest relative increase of time and memory by prefault for threads with random or sparse
/// accesses.
const HARM: f64 = 0.01;

/// `prefault_max_order`, and whether there are pre-zeroed frames. The first is the base of the
/// comparison.
const MEANS: [(u8, bool); 6] =
    [(0, false), (0, true), (3, false), (3, true), (5, false), (5, true)];

/// An order of page touches for which a window has no benefit.
#[derive(Clone, Copy, Debug)]
enum Pattern {
    /// One page per this number of pages of an area, in random order.
    Scattered(u64),
    /// One page per this number of pages, upwards.
    Sparse(u64),
}

impl Pattern {
    const ALL: [Self; 4] =
        [Self::Scattered(64), Self::Scattered(16), Self::Sparse(16), Self::Sparse(64)];

    fn name(self) -> String {
        match self {
            Self::Scattered(among) => format!("scattered_write_1_in_{among}"),
            Self::Sparse(among) => format!("sparse_write_1_in_{among}"),
        }
    }

    const fn area(self) -> u64 {
        let (Self::Scattered(among) | Self::Sparse(among)) = self;
        PAGES * among
    }

    /// Returns the page at position `at`, different for each position.
    const fn page(self, at: u64) -> u64 {
        match self {
            Self::Scattered(_) => scattered(at, self.area().ilog2()),
            Self::Sparse(among) => at * among,
        }
    }

    /// Returns whether no page has a touched page beside it. With one page in 16, in random order,
    /// an eighth of the pages are beside another touched page, and are treated as the start of a
    /// stream.
    const fn is_judged(self) -> bool {
        !matches!(self, Self::Scattered(16))
    }
}

/// Returns the number below 2^`bits` at position `at` of a random order: each number occurs once.
/// At least 2 bits.
pub(crate) const fn scattered(at: u64, bits: u32) -> u64 {
    let mask = (1 << bits) - 1;
    // Multiplied by odd numbers and folded: each step is invertible.
    let mixed = at.wrapping_mul(0x9e37_79b9_7f4a_7c15) & mask;
    let mixed = (mixed ^ mixed >> (bits / 2)).wrapping_mul(0xbf58_476d_1ce4_e5b9) & mask;
    mixed ^ mixed >> (bits / 2)
}

/// Runs the measurements.
///
/// # Errors
/// The machine's error as text.
pub fn run(quick: bool) -> Result<Report, String> {
    let mut report = Report::default();
    let time = Duration::from_secs(if quick { 6 } else { 30 });
    sequential(&mut report, time)?;
    let native = machine(PAGES)?;
    for pattern in Pattern::ALL {
        unserved(&mut report, &native, pattern, time)?;
    }
    Ok(report)
}

/// Creates a machine of one CPU with memory for `pages`.
fn machine(pages: u64) -> Result<Native, String> {
    // Prefault is suspended when less than a sixteenth of memory is left.
    let memory_bytes = (pages + pages / 8 + SPARE) * PAGE_SIZE;
    let config = Config { memory_bytes, cpus: 1, populate: true, ..Config::default() };
    Native::new(config).map_err(|error| format!("the machine: {error}"))
}

fn sequential(report: &mut Report, time: Duration) -> Result<(), String> {
    let pages = SEQUENTIAL / PAGE_SIZE;
    let native = machine(pages)?;
    let pft = Workload::parse("pft", [format!("size={SEQUENTIAL}")]);
    let pft = pft.map_err(|error| error.to_string())?;
    let mut costs = MEANS.map(|_| Vec::new());
    let mut ratios = MEANS.map(|_| Vec::new());
    let mut ahead = Vec::new();
    let mut faults = MEANS.map(|_| 0);
    let end = Instant::now() + time;
    while Instant::now() < end {
        let mut base = 0.0;
        for (at, (order, pooled)) in MEANS.into_iter().enumerate() {
            native.vm().set(Setting::PrefaultMaxOrder(order));
            native.vm().set(Setting::ZeroedPool(if pooled { pages + SPARE / 2 } else { 0 }));
            let begin = Instant::now();
            let zeroed = native.zero_ahead(usize::MAX);
            if zeroed != 0 {
                ahead.push(begin.elapsed().as_secs_f64() * 1e9 / zeroed as f64);
            }
            let outcome = pft.run(&native).map_err(|error| error.to_string())?;
            let in_fault = outcome.counter("zeroed_in_fault");
            if pooled && in_fault != Some(0) {
                return Err(format!("the pool was empty: {in_fault:?} frames zeroed in faults"));
            }
            let cost = per_page(&outcome);
            base = if at == 0 { cost } else { base };
            costs[at].push(cost);
            ratios[at].push(cost / base);
            faults[at] = outcome.faults;
        }
    }
    report.median(("pft", 1, "idle"), ("ahead_per_page", "ns"), Spread::of(&ahead));
    for (at, means) in MEANS.into_iter().enumerate() {
        let setting = setting(means);
        let to = ("pft", 1, &setting[..]);
        report.row(to, ("faults", "faults"), faults[at] as f64);
        report.row(to, ("pages_per_fault", "pages"), pages as f64 / faults[at] as f64);
        report.median(to, ("program_per_page", "ns"), Spread::of(&costs[at]));
        report.median(to, ("program_over_single_faults", "times"), Spread::of(&ratios[at]));
    }
    let of = |means| MEANS.into_iter().position(|other| other == means).unwrap_or(0);
    for (order, most) in FEWER {
        let fewer = faults[0] as f64 / faults[of((order, false))] as f64;
        let promise = format!("pft, order {order}: at least {most} times fewer faults");
        report.gate(promise, format!("{fewer:.2}"), fewer >= most);
    }
    let ratio = Spread::of(&ratios[of((5, true))]).median;
    report.gate(
        format!("pft, order 5, pre-zeroed frames: a page at most {QUARTER} of a cold single fault"),
        format!("{ratio:.3}"),
        ratio <= QUARTER,
    );
    Ok(())
}

/// Returns the worker's processor time per page, in nanoseconds.
fn per_page(outcome: &Outcome) -> f64 {
    (outcome.user + outcome.system) * 1e9 / outcome.operations as f64
}

fn setting((order, pooled): (u8, bool)) -> String {
    format!("prefault_max_order={order}{}", if pooled { ", zeroed frames" } else { "" })
}

/// Measures threads without a benefit from prefault.
fn unserved(
    report: &mut Report,
    native: &Native,
    pattern: Pattern,
    time: Duration,
) -> Result<(), String> {
    let name = pattern.name();
    native.vm().set(Setting::ZeroedPool(0));
    let orders = FEWER.map(|(order, _)| order);
    let mut costs = [(); 3].map(|()| Vec::new());
    let mut ratios = orders.map(|_| Vec::new());
    let mut resident = orders.map(|_| 0);
    let end = Instant::now() + time;
    while Instant::now() < end {
        for (at, order) in orders.into_iter().enumerate() {
            let [before, beside, after] = [0, order, 0].map(|order| lap(native, pattern, order));
            let (before, beside, after) = (before?, beside?, after?);
            resident[at] = resident[at].max(beside.resident);
            costs[0].extend([before.cost, after.cost]);
            costs[at + 1].push(beside.cost);
            ratios[at].push(2.0 * beside.cost / (before.cost + after.cost));
        }
    }
    let to = (&name[..], 1, &setting((0, false))[..]);
    report.median(to, ("program_per_page", "ns"), Spread::of(&costs[0]));
    for (at, order) in orders.into_iter().enumerate() {
        let setting = setting((order, false));
        let to = (&name[..], 1, &setting[..]);
        let (ratio, more) = (Spread::of(&ratios[at]), resident[at] as f64 / PAGES as f64);
        report.median(to, ("program_per_page", "ns"), Spread::of(&costs[at + 1]));
        report.median(to, ("program_over_single_faults", "times"), ratio);
        report.row(to, ("resident_over_touched", "times"), more);
        if pattern.is_judged() {
            let promise = format!("{name}, order {order}: at most {} of the time", 1.0 + HARM);
            let (median, blur) = (ratio.median, blur(ratio));
            let found = format!("{median:.4}, plus or minus {blur:.4}");
            report.gate(promise, found, median - blur <= 1.0 + HARM);
            let promise = format!("{name}, order {order}: at most {} of the pages", 1.0 + HARM);
            report.gate(promise, format!("{more:.4}"), more <= 1.0 + HARM);
        }
    }
    Ok(())
}

/// Returns twice the standard error of a sample's median, for the usual distribution of noise.
fn blur(sample: Spread) -> f64 {
    // The range between the tenths is 2.56 standard deviations, and the error of a median is 1.25
    // times the error of a mean.
    2.0 * 1.25 * (sample.high - sample.low) / 2.56 / (sample.size.max(1) as f64).sqrt()
}

/// The results of a lap.
struct Lap {
    /// Nanoseconds of processor time per page.
    cost: f64,
    /// Resident pages at the end.
    resident: u64,
}

/// Runs a new process that touches [`PAGES`] pages.
fn lap(native: &Native, pattern: Pattern, order: u8) -> Result<Lap, String> {
    native.vm().set(Setting::PrefaultMaxOrder(order));
    let process = native.process().map_err(|error| error.to_string())?;
    process
        .run(|cpu| {
            let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::NORESERVE;
            let rw = Prot::READ | Prot::WRITE;
            let area = cpu.mmap(None, pattern.area() * PAGE_SIZE, rw, flags)?;
            let begin = processor_time();
            for at in 0..PAGES {
                cpu.touch(area + pattern.page(at) * PAGE_SIZE, Access::Write)?;
            }
            let time = processor_time() - begin;
            let resident = cpu.running().space().resident_pages(cpu.cpu());
            Ok(Lap { cost: time.as_secs_f64() * 1e9 / PAGES as f64, resident })
        })
        .map_err(|stop: Stop| stop.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_is_a_permutation() {
        for bits in [2, 5, 13, 16] {
            let mut numbers: Vec<_> = (0..1 << bits).map(|at| scattered(at, bits)).collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..1 << bits), "{bits}");
        }
    }

    #[test]
    fn patterns_touch_each_page_once_and_within_the_area() {
        for pattern in Pattern::ALL {
            let mut pages: Vec<_> = (0..PAGES).map(|at| pattern.page(at)).collect();
            pages.sort_unstable();
            pages.dedup();
            assert_eq!(pages.len() as u64, PAGES, "{pattern:?}");
            assert!(pages.last().is_some_and(|last| *last < pattern.area()), "{pattern:?}");
        }
    }

    #[test]
    fn without_prefault_touched_pages_are_resident() {
        let native = machine(PAGES).unwrap();
        for pattern in Pattern::ALL {
            assert_eq!(lap(&native, pattern, 0).unwrap().resident, PAGES, "{pattern:?}");
        }
    }
}
