//! Two threads beside one, on the native machine.
//!
//! Threads touch disjoint parts of one area of one process: page faults, served by the subsystem,
//! of programs that run on the software MMU. In the `churn` case one of the threads maps and unmaps
//! an unrelated range of 64 KiB to every 16 pages that it touches. Beside that, the same threads zero
//! as many private pages of plain host memory: what the machine's memory itself lets two threads do.
//!
//! # How the figures are formed
//!
//! A sample takes a few milliseconds. In one run, samples of every case, policy and number of threads
//! are taken in turn, round after round, so that whatever else the host does meets all of them. A
//! host that does something else can only make a sample slower; so the speed of a thread alone is
//! that of its *fastest* sample, which if anything makes scaling look worse. The *scaling* of a
//! sample of two threads is the sum of each thread's speed over the speed of the same thread, doing
//! the same, alone: 2 is perfect. Only time in which both threads were at work counts ([`window`]).
//! The scaling that is reported and gated is that of the best round; the median and the tenths are
//! reported beside it. After the least number of rounds, more are run until all gates are met or the
//! time is up.
//!
//! [`window`]: crate::window

use crate::report::{Report, Spread};
use crate::window::{Lap, Window, speeds};
use faultless::{Access, AnonVmaCheck, Counter, Locking, MapFlags, PAGE_SIZE, Prot, Setting};
use faultless::{FrameNumber, Totals};
use faultless_native::{Config, Memory, Native, NativeCpu, Stop};
use std::time::{Duration, Instant};

/// Pages that a thread touches or zeroes in one sample at most.
const PAGES: u64 = 8192;
/// Pages between two looks at the window, and for one mapping and unmapping where there is churn.
const CHUNK: u64 = 16;
/// The unrelated range.
const CHURN_BYTES: u64 = 64 << 10;
/// How far below the area the unrelated range is: not its neighbour, which it would merge with.
const CHURN_BELOW: u64 = 4 << 30;

/// Read faults of two threads, at least so many times those of one.
const READ_SCALING: f64 = 1.9;
/// Write faults scale at least so well as zeroing alone does.
const WRITE_SCALING: f64 = 0.95;
/// Under one lock of the space, at most so much of the speculative faults a second with churn.
const BEHIND: f64 = 0.9;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);

/// What the threads do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Fault { locking: Locking, access: Access, churn: bool },
    Zero,
}

/// The samples of one kind of work.
#[derive(Debug)]
struct Series {
    work: Work,
    /// Pages a second, of each of the two threads alone.
    alone: [Vec<f64>; 2],
    /// Pages a second of both threads together.
    pair: Vec<[f64; 2]>,
}

impl Series {
    fn new(work: Work) -> Self {
        Self { work, alone: Default::default(), pair: Vec::new() }
    }

    fn best_alone(&self) -> [f64; 2] {
        let [first, second] = &self.alone;
        // Where both do the same, each sample is one of both.
        if second.is_empty() {
            [Spread::of(first).best; 2]
        } else {
            [Spread::of(first).best, Spread::of(second).best]
        }
    }

    fn scaling(&self) -> Spread {
        let [first, second] = self.best_alone();
        let each: Vec<_> =
            self.pair.iter().map(|both| both[0] / first + both[1] / second).collect();
        Spread::of(&each)
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

/// Measures.
///
/// # Errors
/// What the machine refused.
pub fn run(quick: bool) -> Result<Report, String> {
    let bench = Bench::new()?;
    let (least, most) = if quick { (10, 30) } else { (30, 120) };
    let limit = Instant::now() + Duration::from_secs(most);
    let mut all = every_series();
    let mut rounds = 0;
    loop {
        for series in &mut all {
            bench.sample(series).map_err(|stop| stop.to_string())?;
        }
        rounds += 1;
        let mut gates = Report::default();
        gate(&mut gates, &all);
        if rounds >= least && (gates.met() || Instant::now() >= limit) {
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
            // Amid the faults that it is compared with, and twice as often.
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
    let mut spread = |cpus, name: String, unit, spread: Spread| {
        let at = (&workload[..], cpus, &setting[..]);
        report.row(at, (&name, unit), spread.best);
        report.row(at, (&format!("{name}_median"), unit), spread.median);
        report.row(at, (&format!("{name}_p10"), unit), spread.low);
        report.row(at, (&format!("{name}_p90"), unit), spread.high);
    };
    for (thread, alone) in series.alone.iter().enumerate().filter(|(_, alone)| !alone.is_empty()) {
        let which = match (series.work, thread) {
            (Work::Fault { churn: true, .. }, 0) => "_churning",
            _ => "",
        };
        spread(1, format!("{what}{which}_per_second"), unit, Spread::of(alone));
    }
    spread(2, format!("{what}_per_second"), unit, series.together());
    spread(2, "scaling".into(), "times", series.scaling());
}

fn gate(report: &mut Report, all: &[Series]) {
    let of = |work| all.iter().find(|series| series.work == work);
    let zero = of(Work::Zero).map_or(0.0, |series| series.scaling().best);
    for access in [Access::Read, Access::Write] {
        for churn in [false, true] {
            let under = |locking| of(Work::Fault { locking, access, churn });
            let Some(ours) = under(Locking::Speculative) else { continue };
            let (name, scaling) = (ours.workload(), ours.scaling().best);
            let found = format!("{scaling:.3} (zeroing {zero:.3})");
            if access == Access::Read {
                let promise = format!("{name}: two threads at least {READ_SCALING} times one");
                report.gate(promise, found, scaling >= READ_SCALING);
            } else {
                let promise = format!("{name}: scales at least {WRITE_SCALING} as well as zeroing");
                report.gate(promise, found, scaling >= WRITE_SCALING * zero);
            }
            if let (true, Some(theirs)) = (churn, under(Locking::MmapLock)) {
                let (ours, theirs) = (ours.together().best, theirs.together().best);
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
        let native = Native::new(config).map_err(|errno| format!("the machine: {errno:?}"))?;
        let mut plain = Memory::new((2 * PAGES + 1) * PAGE_SIZE, 1)
            .map_err(|errno| format!("memory to zero: {errno:?}"))?;
        plain.populate();
        Ok(Self { native, plain })
    }

    /// Adds a sample of each number of threads.
    fn sample(&self, series: &mut Series) -> Result<(), Stop> {
        let pages = |speeds: Vec<f64>| speeds.into_iter().map(|speed| speed * CHUNK as f64);
        match series.work {
            Work::Zero => {
                series.alone[0].extend(pages(self.zero(1)));
                series.pair.extend(both(pages(self.zero(2))));
            }
            Work::Fault { locking, access, churn } => {
                self.native.vm().set(Setting::Locking(locking));
                if churn {
                    series.alone[0].extend(pages(self.faults(access, &[true])?));
                    series.alone[1].extend(pages(self.faults(access, &[false])?));
                } else {
                    series.alone[0].extend(pages(self.faults(access, &[false])?));
                }
                series.pair.extend(both(pages(self.faults(access, &[churn, false])?)));
            }
        }
        Ok(())
    }

    /// Chunks a second of threads that touch, and churn where they say so.
    fn faults(&self, access: Access, churns: &[bool]) -> Result<Vec<f64>, Stop> {
        let threads = churns.len();
        let process = self.native.process()?;
        let bytes = threads as u64 * PAGES * PAGE_SIZE;
        let area = process.run(|cpu| Ok(cpu.mmap(0, bytes, RW, PRIVATE)?))?;
        let window = Window::new(threads);
        let laps = process.run_threads(threads, |cpu, number| {
            let part = area + number as u64 * PAGES * PAGE_SIZE;
            touch(cpu, &window, part, access, churns[number].then_some(area - CHURN_BELOW))
        })?;
        Ok(speeds(&laps))
    }

    /// Chunks a second of threads that zero private pages.
    fn zero(&self, threads: usize) -> Vec<f64> {
        let window = Window::new(threads);
        let lap = |number: usize| {
            // Frame 0 is nobody's.
            let first = 1 + number as u64 * PAGES;
            let zeroed = window.lap(
                PAGES / CHUNK,
                || (),
                |chunk| {
                    for page in first + chunk * CHUNK..first + (chunk + 1) * CHUNK {
                        let bytes = self.plain.frame_bytes(FrameNumber(page as u32));
                        // SAFETY: a page of the mapping; each is of one thread only.
                        unsafe { bytes.write_bytes(0, PAGE_SIZE as usize) };
                    }
                    Ok::<_, std::convert::Infallible>(())
                },
            );
            match zeroed {
                Ok(lap) => lap,
                Err(never) => match never {},
            }
        };
        let laps: Vec<Lap> = std::thread::scope(|scope| {
            let spawned: Vec<_> =
                (0..threads).map(|number| scope.spawn(move || lap(number))).collect();
            spawned
                .into_iter()
                .map(|thread| {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect()
        });
        speeds(&laps)
    }
}

/// The speeds of two threads.
fn both(mut speeds: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    Some([speeds.next()?, speeds.next()?])
}

fn touch(
    cpu: &NativeCpu<'_, '_>,
    window: &Window,
    part: u64,
    access: Access,
    churn: Option<u64>,
) -> Result<Lap, Stop> {
    window.lap(
        PAGES / CHUNK,
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

/// Areas that a thread of `small_allocs` maps, and their pages.
const AREAS: u64 = 1024;
const AREA_PAGES: u64 = 10;

/// Threads map small areas and read them: who takes a lock of the whole space?
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
    let refused = |errno| faultless::Error {
        operation: "new machine",
        range: faultless::VirtRange::new(0, 0),
        errno,
    };
    let native = Native::new(config).map_err(refused)?;
    native.vm().set(Setting::Locking(locking));
    native.vm().set(Setting::AnonVmaCheck(check));
    let process = native.process()?;
    let before = native.vm().totals();
    let window = Window::new(threads);
    process.run_threads(threads, |cpu, _| {
        window.lap(
            AREAS,
            || cpu.poll(),
            |_| {
                let area = cpu.mmap(0, AREA_PAGES * PAGE_SIZE, RW, PRIVATE)?;
                for page in 0..AREA_PAGES {
                    cpu.touch(area + page * PAGE_SIZE, Access::Read)?;
                }
                Ok::<_, Stop>(())
            },
        )
    })?;
    Ok(native.vm().totals().since(&before))
}
