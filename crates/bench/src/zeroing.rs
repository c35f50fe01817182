//! The cost of zeroing a page, in the fault and in advance.
//!
//! A page must be zero when a program first touches it. If the fault zeroes the page, the program
//! waits for the zeroing. If the page was pre-zeroed, another thread spends the time, and the page
//! may or may not be in the caches. All variants are measured on the same host memory, in one run,
//! variant by variant and round after round, since the host's clock changes within seconds. The
//! comparison uses the medians of the *ratios* within rounds.
//!
//! - *in the fault*: each page is zeroed by ordinary stores, and then used;
//! - *ahead, cached*: the pages of a pool are zeroed by ordinary stores, and then used;
//! - *ahead, non-temporal*: the same by stores that bypass the caches.
//!
//! Pools have 64 pages, which stay in the caches of one core, or 4,096, which do not. The use of
//! the page is minimal (its first line is written) or complete (all its lines are written). The
//! same core does the pre-zeroing, as after an idle time. The time of pre-zeroing is a separate
//! row, and not part of a ratio.
//!
//! *On a busy machine* one thread reads memory at random while another pre-zeroes continuously:
//! memory that fits into the shared cache, and memory that does not. The cost of a zeroed page to
//! the reader is the time lost by the reader, divided by the pages zeroed in that time. Times in
//! which the host preempted the reader do not count.
//!
//! Finally, the complete path: write faults of a program on the native machine, without pools and
//! with pools.

use crate::report::{Report, Spread};
use crate::window::{PEACE, processor_time};
use faultless::{Access, FrameNumber, MapFlags, PAGE_SIZE, Prot, Setting};
use faultless::{nontemporal_done, zero_nontemporal};
use faultless_native::{Config, Memory, Native, Stop};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pages of the zeroed memory: more than the caches hold.
const PAGES: u32 = 32768;
/// Pages of a lap.
const LAP: u32 = 4096;
/// The sizes of pools, in pages.
const POOLS: [u32; 2] = [64, LAP];
/// Frames between two fences, as in the subsystem.
const RUN: u32 = faultless::ZEROED_RUN as u32;
const LINE: usize = 64;
/// The largest cost of a write fault with a zeroed frame, relative to a write fault without.
const POOLED: f64 = 0.35;
/// Words read by the busy thread in a lap, and pages of its memory.
const READS: u64 = 3000;
const READ_PAGES: [u32; 2] = [2048, 16384];

/// The kind of stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stores {
    Cached,
    NonTemporal,
}

impl Stores {
    const ALL: [Self; 2] = [Self::Cached, Self::NonTemporal];

    const fn name(self) -> &'static str {
        match self {
            Self::Cached => "cached",
            Self::NonTemporal => "non-temporal",
        }
    }

    fn zero(self, memory: &Memory, first: u32, pages: u32) {
        for page in first..first + pages {
            let bytes = memory.frame_bytes(FrameNumber(page));
            match self {
                // SAFETY: a page of the mapping, of this thread only.
                Self::Cached => unsafe { bytes.write_bytes(0, PAGE_SIZE as usize) },
                Self::NonTemporal => {
                    // SAFETY: as above.
                    unsafe { zero_nontemporal(bytes) };
                    if (page + 1 - first).is_multiple_of(RUN) {
                        nontemporal_done();
                    }
                }
            }
        }
    }
}

/// The part of a page used by the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Using {
    FirstLine,
    AllLines,
}

impl Using {
    const ALL: [Self; 2] = [Self::FirstLine, Self::AllLines];

    const fn name(self) -> &'static str {
        match self {
            Self::FirstLine => "first_line",
            Self::AllLines => "all_lines",
        }
    }

    fn write(self, memory: &Memory, page: u32) {
        let bytes = memory.frame_bytes(FrameNumber(page));
        let step = if self == Self::FirstLine { PAGE_SIZE as usize } else { LINE };
        for at in (0..PAGE_SIZE as usize).step_by(step) {
            // SAFETY: within a page of the mapping, used by this thread only. Volatile, because a
            // program's store is not merged with the zeroing.
            unsafe { bytes.add(at).cast::<u64>().write_volatile(at as u64 + 1) };
        }
    }
}

/// Nanoseconds per page: of pre-zeroing, and of the program.
#[derive(Clone, Copy, Debug)]
struct Cost {
    ahead: f64,
    program: f64,
}

/// Runs the measurements.
///
/// # Errors
/// The machine's error as text.
pub fn run(quick: bool) -> Result<Report, String> {
    let mut memory = Memory::new(u64::from(PAGES) * PAGE_SIZE, 1)
        .map_err(|errno| format!("memory to zero: {errno:?}"))?;
    memory.populate();
    let mut report = Report::default();
    let time = Duration::from_secs(if quick { 2 } else { 15 });
    alone(&mut report, &memory, time);
    for pages in READ_PAGES {
        busy(&mut report, &memory, pages, time)?;
    }
    faults(&mut report, time)?;
    Ok(report)
}

/// The parts of memory used by successive laps, so each lap finds cold pages.
struct Laps<'m> {
    memory: &'m Memory,
    next: u32,
}

impl Laps<'_> {
    fn first(&mut self) -> u32 {
        let first = self.next;
        self.next = (first + LAP) % PAGES;
        first
    }

    fn in_fault(&mut self, using: Using) -> Cost {
        let first = self.first();
        let begin = processor_time();
        for page in first..first + LAP {
            Stores::Cached.zero(self.memory, page, 1);
            using.write(self.memory, page);
        }
        Cost { ahead: 0.0, program: per_page(processor_time() - begin) }
    }

    fn ahead(&mut self, stores: Stores, pool: u32, using: Using) -> Cost {
        let first = self.first();
        let (mut ahead, mut program) = (Duration::ZERO, Duration::ZERO);
        for from in (first..first + LAP).step_by(pool as usize) {
            let begin = processor_time();
            stores.zero(self.memory, from, pool);
            nontemporal_done();
            let zeroed = processor_time();
            (from..from + pool).for_each(|page| using.write(self.memory, page));
            ahead += zeroed - begin;
            program += processor_time() - zeroed;
        }
        Cost { ahead: per_page(ahead), program: per_page(program) }
    }
}

fn per_page(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9 / f64::from(LAP)
}

/// A variant compared within one lap of each: uses pages zeroed in the fault, or in the given way.
struct Series {
    using: Using,
    how: Option<(Stores, u32)>,
    costs: Vec<Cost>,
    /// Relative to the program's time with zeroing in the fault: the time of the program, and of
    /// the program plus the zeroing.
    program: Vec<f64>,
    both: Vec<f64>,
    /// The time of zeroing ahead by these stores, relative to cached stores.
    over_cached: Vec<f64>,
}

impl Series {
    fn new(using: Using, how: Option<(Stores, u32)>) -> Self {
        let [program, both, over_cached] = [(); 3].map(|()| Vec::new());
        Self { using, how, costs: Vec::new(), program, both, over_cached }
    }
}

/// Measures one thread.
fn alone(report: &mut Report, memory: &Memory, time: Duration) {
    let mut all = Vec::new();
    for using in Using::ALL {
        all.push(Series::new(using, None));
        for pool in POOLS {
            // Cached stores first, as the base of the comparison.
            all.extend(Stores::ALL.map(|stores| Series::new(using, Some((stores, pool)))));
        }
    }
    let mut laps = Laps { memory, next: 0 };
    let end = Instant::now() + time;
    while Instant::now() < end {
        let (mut base, mut cached) = (Cost { ahead: 0.0, program: 1.0 }, 1.0);
        for series in &mut all {
            let cost = match series.how {
                None => {
                    base = laps.in_fault(series.using);
                    base
                }
                Some((stores, pool)) => laps.ahead(stores, pool, series.using),
            };
            series.costs.push(cost);
            series.program.push(cost.program / base.program);
            series.both.push((cost.program + cost.ahead) / base.program);
            match series.how {
                Some((Stores::Cached, _)) => cached = cost.ahead,
                Some((Stores::NonTemporal, _)) => series.over_cached.push(cost.ahead / cached),
                None => {}
            }
        }
    }
    for series in &all {
        let workload = format!("zero_and_use_{}", series.using.name());
        let setting = match series.how {
            None => "in the fault, cached".to_owned(),
            Some((stores, pool)) => format!("ahead {pool} pages, {}", stores.name()),
        };
        let at = (&workload[..], 1, &setting[..]);
        let spread =
            |of: fn(&Cost) -> f64| Spread::of(&series.costs.iter().map(of).collect::<Vec<_>>());
        report.median(at, ("program_per_page", "ns"), spread(|cost| cost.program));
        if series.how.is_none() {
            continue;
        }
        report.median(at, ("ahead_per_page", "ns"), spread(|cost| cost.ahead));
        report.median(at, ("program_over_in_fault", "times"), Spread::of(&series.program));
        report.median(at, ("program_and_ahead_over_in_fault", "times"), Spread::of(&series.both));
        if !series.over_cached.is_empty() {
            let over = Spread::of(&series.over_cached);
            report.median(at, ("ahead_over_cached", "times"), over);
            if series.using == Using::FirstLine && series.how == Some((Stores::NonTemporal, LAP)) {
                let promise =
                    "pre-zeroing more than the caches hold: non-temporal stores take less time";
                report.gate(promise, format!("{:.3} of cached", over.median), over.median < 1.0);
            }
        }
    }
}

/// Measures a thread bound by memory, beside a thread that zeroes ahead.
fn busy(report: &mut Report, memory: &Memory, pages: u32, time: Duration) -> Result<(), String> {
    let mut own = Memory::new(u64::from(pages) * PAGE_SIZE, 1)
        .map_err(|errno| format!("memory to read: {errno:?}"))?;
    own.populate();
    let (over, idle) = (AtomicBool::new(false), 2);
    let (what, zeroed) = (AtomicU64::new(idle), AtomicU64::new(0));
    let mut samples = [(); 2].map(|()| (Vec::new(), Vec::new(), Vec::new()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut laps = Laps { memory, next: 0 };
            let mut first = 0;
            while !over.load(Ordering::Relaxed) {
                let Some(&stores) = Stores::ALL.get(what.load(Ordering::Acquire) as usize) else {
                    std::hint::spin_loop();
                    continue;
                };
                if first % LAP == 0 {
                    first = laps.first();
                }
                stores.zero(memory, first, RUN);
                nontemporal_done();
                first += RUN;
                zeroed.fetch_add(RUN.into(), Ordering::Relaxed);
            }
        });
        let end = Instant::now() + time;
        while Instant::now() < end {
            for (number, (slower, lost, rate)) in samples.iter_mut().enumerate() {
                let alone = read(&own, pages);
                what.store(number as u64, Ordering::Release);
                let (before, begin) = (zeroed.load(Ordering::Relaxed), Instant::now());
                let beside = read(&own, pages);
                let zeroed = zeroed.load(Ordering::Relaxed) - before;
                let in_peace = begin.elapsed() <= beside + beside / PEACE;
                what.store(idle, Ordering::Release);
                let alone = (alone + read(&own, pages)) / 2;
                if !in_peace || zeroed == 0 {
                    continue;
                }
                slower.push(beside.as_secs_f64() / alone.as_secs_f64());
                let zeroed = zeroed as f64;
                lost.push((beside.as_secs_f64() - alone.as_secs_f64()) * 1e9 / zeroed);
                rate.push(zeroed / beside.as_secs_f64());
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    for (stores, (slower, lost, rate)) in Stores::ALL.into_iter().zip(&samples) {
        let workload = format!("zeroing_beside_random_reads_in_{}_mib", pages >> 8);
        let at = (&workload[..], 2, stores.name());
        report.median(at, ("reads_take_longer", "times"), Spread::of(slower));
        report.median(at, ("reader_loses_per_page_zeroed", "ns"), Spread::of(lost));
        report.median(at, ("zeroed", "pages/s"), Spread::of(rate));
    }
    Ok(())
}

/// Reads at random, one read after the other, and returns the time.
fn read(memory: &Memory, pages: u32) -> Duration {
    let begin = processor_time();
    let mut at = 1u64;
    for _ in 0..READS {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let word = (at >> 33) % (u64::from(pages) * PAGE_SIZE / 8);
        // The next address depends on the value read, which is 0.
        at = at.wrapping_add(memory.load::<u64>(word * 8));
    }
    black_box(at);
    processor_time() - begin
}

/// Measures write faults through the subsystem, with each page then written completely or only
/// touched.
fn faults(report: &mut Report, time: Duration) -> Result<(), String> {
    let pages = u64::from(LAP);
    let config = Config {
        memory_bytes: 3 * pages * PAGE_SIZE,
        cpus: 1,
        populate: true,
        ..Config::default()
    };
    let native = Native::new(config).map_err(|error| format!("the machine: {error}"))?;
    // Every page must be a fault.
    native.vm().set(Setting::PrefaultMaxOrder(0));
    let settings = [0, pages].map(|pool| (pool, format!("zeroed_pool={pool}")));
    let end = Instant::now() + time;
    let mut costs = [(); 4].map(|()| Vec::new());
    let mut ratios = [(); 2].map(|()| Vec::new());
    let process = native.process().map_err(|error| error.to_string())?;
    let failed = |stop: Stop| stop.to_string();
    while Instant::now() < end {
        for (which, using) in Using::ALL.into_iter().enumerate() {
            let mut per_page = [0.0; 2];
            for (number, (pool, _)) in settings.iter().enumerate() {
                native.vm().set(Setting::ZeroedPool(*pool));
                per_page[number] = process
                    .run(|cpu| {
                        cpu.cpu().zero_ahead(usize::MAX);
                        let rw = Prot::READ | Prot::WRITE;
                        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
                        let area = cpu.mmap(None, pages * PAGE_SIZE, rw, flags)?;
                        let begin = processor_time();
                        for page in (area..).step_by(PAGE_SIZE as usize).take(pages as usize) {
                            if using == Using::FirstLine {
                                cpu.touch(page, Access::Write)?;
                            } else {
                                cpu.fill(page, PAGE_SIZE, 1)?;
                            }
                        }
                        let time = processor_time() - begin;
                        cpu.munmap(area, pages * PAGE_SIZE)?;
                        Ok(time.as_secs_f64() * 1e9 / pages as f64)
                    })
                    .map_err(failed)?;
                costs[2 * which + number].push(per_page[number]);
            }
            ratios[which].push(per_page[1] / per_page[0]);
        }
    }
    for (which, using) in Using::ALL.into_iter().enumerate() {
        let workload = format!("write_fault_and_use_{}", using.name());
        for (number, (_, setting)) in settings.iter().enumerate() {
            let at = (&workload[..], 1, &setting[..]);
            report.median(at, ("program_per_page", "ns"), Spread::of(&costs[2 * which + number]));
        }
        let at = (&workload[..], 1, &settings[1].1[..]);
        let ratio = Spread::of(&ratios[which]);
        report.median(at, ("program_over_in_fault", "times"), ratio);
        if using == Using::FirstLine {
            let promise =
                format!("{workload}: with a pre-zeroed frame at most {POOLED} of without");
            report.gate(promise, format!("{:.3}", ratio.median), ratio.median <= POOLED);
        }
    }
    Ok(())
}
