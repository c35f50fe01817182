//! Two threads compared with one, on the native machine.
//!
//! Threads touch disjoint parts of one area of one process: page faults, served by the subsystem,
//! of programs that run on the software MMU. In the `churn` case one of the threads maps and unmaps
//! an unrelated range of 64 KiB per 16 touched pages. For comparison, the same threads zero the
//! same number of private pages of plain host memory, which shows the limit of the machine's memory
//! for two threads.
//!
//! # Computation of the figures
//!
//! A sample is a lap of well under a millisecond ([`window`]). Laps in which the host preempted one
//! of the threads are discarded, and all others count. In one run, every case, policy and number of
//! threads alternate, round after round, for a fixed time. In a round the threads run alone,
//! together, and alone again, within a few milliseconds, because the host's clock may change by a
//! factor of two within seconds. A round in which the threads alone were not equally fast before
//! and after does not count. The *scaling* of a lap together is the sum, over the threads, of the
//! speed of the thread relative to the median speed of the same thread with the same work, alone,
//! in the same round: 2 is perfect. Only time in which both threads were working counts. The
//! reported and checked value is the median over the rounds' medians, with the tenths and the
//! number of rounds beside it.
//!
//! [`window`]: crate::window

use crate::report::{Report, Spread};
use crate::window::{Course, Lap, meet};
use faultless::{Access, AnonVmaCheck, Counter, Locking, MapFlags, PAGE_SIZE, Prot, Setting};
use faultless::{FrameNumber, Totals};
use faultless_native::{Config, Memory, Native, NativeCpu, Stop};
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

/// The largest number of pages that a thread touches or zeroes in one course: more than the caches
/// hold.
const PAGES: u64 = 8192;
/// Pages of a lap with zeroing, and of a lap without.
const LAP_PAGES: [u64; 2] = [512, 2048];
/// Pages between two checks of the window, and per mapping and unmapping in the churn case.
const CHUNK: u64 = 16;
/// The unrelated range.
const CHURN_BYTES: u64 = 64 << 10;
/// The distance of the unrelated range below the area: not adjacent, to prevent a merge.
const CHURN_BELOW: u64 = 4 << 30;

/// The largest relative difference of the speeds alone, before and after, of a round that counts.
const STEADY: f64 = 0.05;

/// The least speed of read faults of two threads, relative to one.
const READ_SCALING: f64 = 1.9;
/// The least scaling of write faults, relative to zeroing alone.
const WRITE_SCALING: f64 = 0.95;
/// The largest speed of faults with churn under one lock of the space, relative to speculative
/// faults.
const BEHIND: f64 = 0.9;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);

/// The work of the threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Fault { locking: Locking, access: Access, churn: bool },
    Zero,
}

/// The samples of one kind of work.
#[derive(Debug)]
struct Series {
    work: Work,
    /// Pages per second, of each of the two threads alone.
    alone: [Vec<f64>; 2],
    /// Pages per second of both threads together.
    pair: Vec<[f64; 2]>,
    /// The median scaling of each round.
    scaling: Vec<f64>,
}

impl Series {
    fn new(work: Work) -> Self {
        Self { work, alone: Default::default(), pair: Vec::new(), scaling: Vec::new() }
    }

    /// Adds the results of a round: laps of each thread alone (of one thread, if both do the same),
    /// before and after laps of both.
    fn add(&mut self, alone: [[Vec<f64>; 2]; 2], pair: Vec<[f64; 2]>) {
        let [before, after] = &alone;
        let steady = before.iter().zip(after).all(|(before, after)| steady(before, after));
        for laps in &alone {
            self.alone.iter_mut().zip(laps).for_each(|(all, laps)| all.extend(laps));
        }
        let [first, second] = [0, 1].map(|thread| {
            let laps: Vec<_> = alone.iter().flat_map(|laps| laps[thread].iter().copied()).collect();
            Spread::of(&laps).median
        });
        let second = if second > 0.0 { second } else { first };
        let each: Vec<_> = pair.iter().map(|both| both[0] / first + both[1] / second).collect();
        if steady && first > 0.0 && !each.is_empty() {
            self.scaling.push(Spread::of(&each).median);
        }
        self.pair.extend(pair);
    }

    fn scaling(&self) -> Spread {
        Spread::of(&self.scaling)
    }

    fn together(&self) -> Spread {
        let each: Vec<_> = self.pair.iter().map(|both| both[0] + both[1]).collect();
        Spread::of(&each)
    }

    fn workload(&self) -> String {
        match self.work {
            Work::Zero => "zero_private_pages".into(),
            Work::Fault { access, churn, .. } => {
                let access = if access == Access::Read { "read" } else { "write" };
                format!("{access}_fault{}", if churn { "_churn" } else { "" })
            }
        }
    }

    fn setting(&self) -> String {
        match self.work {
            Work::Zero => "host memory".into(),
            Work::Fault { locking, .. } => format!("locking={}", locking.name()),
        }
    }
}

/// Returns whether the measurements before and after another measurement agree, except for a small
/// difference.
pub(crate) fn steady(before: &[f64], after: &[f64]) -> bool {
    let (before, after) = (Spread::of(before).median, Spread::of(after).median);
    (before - after).abs() <= STEADY * before.max(after)
}

/// Runs the measurements.
///
/// # Errors
/// The machine's error as text.
pub fn run(quick: bool) -> Result<Report, String> {
    let bench = Bench::new()?;
    let end = Instant::now() + Duration::from_secs(if quick { 20 } else { 90 });
    let mut all = every_series();
    let mut rounds = 0;
    loop {
        for series in &mut all {
            bench.sample(series).map_err(|stop| stop.to_string())?;
        }
        rounds += 1;
        if Instant::now() >= end {
            break;
        }
    }
    let mut report = Report::default();
    report.row(("scaling", 2, ""), ("rounds", "rounds"), f64::from(rounds));
    for series in &all {
        rows(&mut report, series);
    }
    gate(&mut report, &all);
    small_allocs(&mut report)?;
    Ok(report)
}

fn every_series() -> Vec<Series> {
    let mut all = Vec::new();
    for access in [Access::Read, Access::Write] {
        for churn in [false, true] {
            for locking in [Locking::Speculative, Locking::PerVma, Locking::MmapLock] {
                all.push(Series::new(Work::Fault { locking, access, churn }));
            }
            // Among the faults with which it is compared, and twice as often.
            if access == Access::Write && !churn {
                all.push(Series::new(Work::Zero));
            }
        }
    }
    all
}

fn rows(report: &mut Report, series: &Series) {
    let (workload, setting) = (series.workload(), series.setting());
    let what = if series.work == Work::Zero { "pages" } else { "faults" };
    let unit = if series.work == Work::Zero { "pages/s" } else { "faults/s" };
    for (thread, alone) in series.alone.iter().enumerate().filter(|(_, alone)| !alone.is_empty()) {
        let which = match (series.work, thread) {
            (Work::Fault { churn: true, .. }, 0) => "_churning",
            _ => "",
        };
        let name = format!("{what}{which}_per_second");
        report.median((&workload, 1, &setting), (&name, unit), Spread::of(alone));
    }
    let both = (&workload[..], 2, &setting[..]);
    report.median(both, (&format!("{what}_per_second"), unit), series.together());
    report.median(both, ("scaling", "times"), series.scaling());
}

fn gate(report: &mut Report, all: &[Series]) {
    let of = |work| all.iter().find(|series| series.work == work);
    let zero = of(Work::Zero).map_or(0.0, |series| series.scaling().median);
    for access in [Access::Read, Access::Write] {
        for churn in [false, true] {
            let under = |locking| of(Work::Fault { locking, access, churn });
            let Some(ours) = under(Locking::Speculative) else { continue };
            let (name, scaling) = (ours.workload(), ours.scaling().median);
            let found = format!("{scaling:.3} (zeroing {zero:.3})");
            if access == Access::Read {
                let promise = format!("{name}: two threads at least {READ_SCALING} times one");
                report.gate(promise, found, scaling >= READ_SCALING);
            } else {
                let promise = format!("{name}: scales at least {WRITE_SCALING} as well as zeroing");
                report.gate(promise, found, scaling >= WRITE_SCALING * zero);
            }
            if let (true, Some(theirs)) = (churn, under(Locking::MmapLock)) {
                let (ours, theirs) = (ours.together().median, theirs.together().median);
                let found = format!("{:.3} of speculative", theirs / ours);
                let promise =
                    format!("{name}: mmap_lock falls behind, to at most {BEHIND} of the faults/s");
                report.gate(promise, found, theirs <= BEHIND * ours);
            }
        }
    }
}

struct Bench {
    native: Native,
    plain: Memory,
}

impl Bench {
    fn new() -> Result<Self, String> {
        let bytes = 2 * (PAGES + 2048) * PAGE_SIZE;
        let config = Config { memory_bytes: bytes, cpus: 2, populate: true, ..Config::default() };
        let native = Native::new(config).map_err(|error| format!("the machine: {error}"))?;
        // Every page must be a fault.
        native.vm().set(Setting::PrefaultMaxOrder(0));
        let mut plain = Memory::new((2 * PAGES + 1) * PAGE_SIZE, 1)
            .map_err(|errno| format!("memory to zero: {errno:?}"))?;
        plain.populate();
        Ok(Self { native, plain })
    }

    /// Adds samples of each number of threads.
    fn sample(&self, series: &mut Series) -> Result<(), Stop> {
        let flat = |laps: Vec<Vec<f64>>| laps.into_iter().flatten();
        let single = || -> Result<[Vec<f64>; 2], Stop> {
            Ok(match series.work {
                Work::Zero => [flat(self.zero(1)).collect(), Vec::new()],
                Work::Fault { access, churn, .. } => [
                    flat(self.faults(access, &[churn])?).collect(),
                    if churn { flat(self.faults(access, &[false])?).collect() } else { Vec::new() },
                ],
            })
        };
        if let Work::Fault { locking, .. } = series.work {
            self.native.vm().set(Setting::Locking(locking));
        }
        let before = single()?;
        let together = match series.work {
            Work::Zero => self.zero(2),
            Work::Fault { access, churn, .. } => self.faults(access, &[churn, false])?,
        };
        let after = single()?;
        series.add([before, after], together.into_iter().map(|both| [both[0], both[1]]).collect());
        Ok(())
    }

    /// Returns the pages per second, by lap, of threads that touch, and also churn if `churns`
    /// contains true.
    fn faults(&self, access: Access, churns: &[bool]) -> Result<Vec<Vec<f64>>, Stop> {
        let threads = churns.len();
        let process = self.native.process()?;
        let bytes = threads as u64 * PAGES * PAGE_SIZE;
        let area = process.run(|cpu| Ok(cpu.mmap(None, bytes, RW, PRIVATE)?))?;
        let course = course(threads, access == Access::Write);
        let laps = process.run_threads(threads, |cpu, number| {
            let part = area + number as u64 * PAGES * PAGE_SIZE;
            touch(cpu, &course, part, access, churns[number].then_some(area - CHURN_BELOW))
        })?;
        Ok(pages(&course, &laps))
    }

    /// Returns the pages per second, by lap, of threads that zero private pages.
    fn zero(&self, threads: usize) -> Vec<Vec<f64>> {
        let course = course(threads, true);
        let run = |number: usize| {
            // Frame 0 is unused.
            let first = 1 + number as u64 * PAGES;
            let zeroed = course.run(
                || (),
                |chunk| {
                    for page in first + chunk * CHUNK..first + (chunk + 1) * CHUNK {
                        let bytes = self.plain.frame_bytes(FrameNumber(page as u32));
                        // SAFETY: a page of the mapping; each page belongs to one thread only.
                        unsafe { bytes.write_bytes(0, PAGE_SIZE as usize) };
                    }
                    Ok::<_, std::convert::Infallible>(())
                },
            );
            match zeroed {
                Ok(laps) => laps,
                Err(never) => match never {},
            }
        };
        let laps: Vec<_> = std::thread::scope(|scope| {
            let run = &run;
            let spawned: Vec<_> =
                (0..threads).map(|number| scope.spawn(move || run(number))).collect();
            spawned
                .into_iter()
                .map(|thread| {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect()
        });
        pages(&course, &laps)
    }
}

fn course(threads: usize, zeroes: bool) -> Course {
    let lap = LAP_PAGES[usize::from(!zeroes)];
    Course::new(threads, PAGES / lap, lap / CHUNK)
}

fn pages(course: &Course, laps: &[Vec<Lap>]) -> Vec<Vec<f64>> {
    let mut speeds = course.speeds(laps);
    speeds.iter_mut().flatten().for_each(|speed| *speed *= CHUNK as f64);
    speeds
}

fn touch(
    cpu: &NativeCpu<'_, '_>,
    course: &Course,
    part: u64,
    access: Access,
    churn: Option<u64>,
) -> Result<Vec<Lap>, Stop> {
    course.run(
        || cpu.poll(),
        |chunk| {
            if let Some(unrelated) = churn {
                let range = cpu.mmap(unrelated, CHURN_BYTES, RW, PRIVATE)?;
                cpu.munmap(range, CHURN_BYTES)?;
            }
            for page in chunk * CHUNK..(chunk + 1) * CHUNK {
                cpu.touch(part + page * PAGE_SIZE, access)?;
            }
            Ok(())
        },
    )
}

/// The number of areas mapped by a thread of `small_allocs`, and their pages.
const AREAS: u64 = 4096;
const AREA_PAGES: u64 = 10;

/// Maps small areas in threads and reads them, to find the faults that take a lock of the whole
/// space.
fn small_allocs(report: &mut Report) -> Result<(), String> {
    let policies = [
        (Locking::Speculative, AnonVmaCheck::Late),
        (Locking::Speculative, AnonVmaCheck::Early),
        (Locking::PerVma, AnonVmaCheck::Early),
        (Locking::MmapLock, AnonVmaCheck::Early),
    ];
    for (locking, check) in policies {
        for threads in [1, 2] {
            let counted = read_small(locking, check, threads).map_err(|error| error.to_string())?;
            let setting = format!("locking={} anon_vma_check={}", locking.name(), check.name());
            let at = ("small_allocs", threads, &setting[..]);
            for counter in [
                Counter::Faults,
                Counter::Spf,
                Counter::MmapLockRead,
                Counter::ReadFaultLocked,
                Counter::RangeLockFault,
            ] {
                report.row(at, (counter.name(), "count"), counted.get(counter) as f64);
            }
            if (locking, check) == (Locking::Speculative, AnonVmaCheck::Late) {
                let space_wide = counted.get(Counter::MmapLockRead);
                report.gate(
                    format!("small_allocs, {threads} threads, late: no read fault locks the space"),
                    format!("{space_wide} of {} faults", counted.get(Counter::Faults)),
                    space_wide == 0,
                );
            }
        }
    }
    Ok(())
}

fn read_small(locking: Locking, check: AnonVmaCheck, threads: usize) -> Result<Totals, Stop> {
    let config = Config { memory_bytes: 64 << 20, cpus: 2, ..Config::default() };
    let refused = |error: faultless_native::ConfigError| faultless::Error {
        operation: "new machine",
        range: faultless::Error::NO_RANGE,
        errno: error.into(),
    };
    let native = Native::new(config).map_err(refused)?;
    native.vm().set(Setting::PrefaultMaxOrder(0));
    native.vm().set(Setting::Locking(locking));
    native.vm().set(Setting::AnonVmaCheck(check));
    let process = native.process()?;
    let before = native.vm().totals();
    let arrived = AtomicUsize::new(0);
    process.run_threads(threads, |cpu, _| {
        meet(&arrived, threads, || cpu.poll());
        for _ in 0..AREAS {
            let area = cpu.mmap(None, AREA_PAGES * PAGE_SIZE, RW, PRIVATE)?;
            for page in 0..AREA_PAGES {
                cpu.touch(area + page * PAGE_SIZE, Access::Read)?;
            }
        }
        Ok(())
    })?;
    Ok(native.vm().totals().since(&before))
}
