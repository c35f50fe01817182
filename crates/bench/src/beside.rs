//! Threads in separate parts of one mapping, on the native machine: the mutual slowdown.
//!
//! - *Faults during discards.* One thread touches pages in the lower half of one mapping. The other
//!   discards 64 KiB at a time in the untouched upper half, so no TLB has to be flushed. The
//!   threads share no page, so the faults should be as fast as alone. Two controls: the faults
//!   while the other thread does the same in another space, which shows the interference of the
//!   host's CPUs, and the number of faults per discard that retried or took a lock.
//! - *Two threads compared with one*: the operations of the workloads `discard` and `vma_*` on
//!   pieces of 64 and 16 KiB, each thread in a separate part of one region. The pieces of a thread
//!   are contiguous, or interleaved with the pieces of the other thread.
//!
//! Figures are computed as in [`scaling`](crate::scaling). Each round measures the thread alone
//! before and after the run with company. A round does not count if the two measurements alone
//! differ. The medians of the rounds' ratios are reported and checked. All work is counted in laps
//! ([`window`](crate::window)), which are prepared before they start. Threads that wait for each
//! other yield their processors. If other processes use these processors, every lap of such threads
//! is disturbed, and there is no figure.

use crate::report::{Report, Spread};
use crate::scaling::steady;
use crate::window::{Course, Lap};
use faultless::{Access, Advice, Counter, Locking, MapFlags, PAGE_SIZE, Prot, Setting, Totals};
use faultless_native::{Config, Native, NativeCpu, Process, Stop};
use std::time::{Duration, Instant};

/// The pages touched in a course, the pages of a lap, and the pages between two checks of the
/// window.
const PAGES: u64 = 8192;
const LAP: u64 = 512;
const CHUNK: u64 = 16;
/// The size of a discard, in bytes.
const DISCARD: u64 = 64 << 10;

/// The least speed of faults beside discards, relative to faults alone.
const BESIDE: f64 = 0.97;
/// The least speed of two threads, relative to one.
const TWO: f64 = 1.8;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);
const FIXED: MapFlags = PRIVATE.union(MapFlags::FIXED_NOREPLACE);

/// Laps of a course in which each operation is measured by itself.
const LAPS: u64 = 8;
/// The start of the regions of the laps, and their distance: more than two threads' pieces.
const REGIONS: u64 = 1 << 40;
const REGION: u64 = 64 << 20;
/// An odd number that scatters consecutive numbers.
const SCATTER: u64 = 0x9e37_79b1;

/// Measurements alone and in company.
#[derive(Debug, Default)]
struct Paired {
    alone: Vec<f64>,
    together: Vec<f64>,
    /// The median in company over the median alone, for each round that counts.
    ratio: Vec<f64>,
}

impl Paired {
    fn add(&mut self, before: &[f64], together: &[f64], after: &[f64]) {
        let alone = [before, after].concat();
        if steady(before, after) && !alone.is_empty() && !together.is_empty() {
            self.ratio.push(Spread::of(together).median / Spread::of(&alone).median);
        }
        self.alone.extend(alone);
        self.together.extend(together);
    }

    fn ratio(&self) -> Spread {
        Spread::of(&self.ratio)
    }
}

/// Faults of one kind beside discards.
struct Faults {
    access: Access,
    locking: Locking,
    same_space: Paired,
    elsewhere: Paired,
    /// Discards beside faults in their space, and the counts during the faults.
    discards: u64,
    faults: u64,
    aborts: u64,
    locked: u64,
}

impl Faults {
    fn new(access: Access, locking: Locking) -> Self {
        let (same_space, elsewhere) = (Paired::default(), Paired::default());
        let (discards, faults, aborts, locked) = (0, 0, 0, 0);
        Self { access, locking, same_space, elsewhere, discards, faults, aborts, locked }
    }

    fn name(&self) -> &'static str {
        if self.access == Access::Read {
            "read_fault_beside_discards"
        } else {
            "write_fault_beside_discards"
        }
    }

    fn rows(&self, report: &mut Report) {
        let setting = format!("locking={}", self.locking.name());
        let (one, two) = ((self.name(), 1, &setting[..]), (self.name(), 2, &setting[..]));
        report.median(one, ("faults_per_second", "faults/s"), Spread::of(&self.same_space.alone));
        let together = Spread::of(&self.same_space.together);
        report.median(two, ("faults_per_second", "faults/s"), together);
        report.median(two, ("of_faults_alone", "times"), self.same_space.ratio());
        report.median(two, ("of_faults_alone_elsewhere", "times"), self.elsewhere.ratio());
        let each = |count: u64| count as f64 / self.discards.max(1) as f64;
        report.row(two, ("faults_per_discard", "times"), each(self.faults));
        report.row(two, ("aborted_faults_per_discard", "times"), each(self.aborts));
        report.row(two, ("locking_faults_per_discard", "times"), each(self.locked));
    }

    fn gate(&self, report: &mut Report) {
        let (beside, elsewhere) = (self.same_space.ratio(), self.elsewhere.ratio());
        // Interference between the host's CPUs is not caused by the subsystem.
        let bar = BESIDE * elsewhere.median.min(1.0);
        let promise = format!(
            "{}: at least {BESIDE} of the faults alone, or of the faults beside discards elsewhere",
            self.name()
        );
        let found = format!(
            "{} (elsewhere {}), {} faults aborted by {} discards",
            beside.words(),
            elsewhere.words(),
            self.aborts,
            self.discards
        );
        report.gate(promise, found, beside.median >= bar && beside.size > 0);
    }
}

/// The work of each thread in its own part, as in the workloads of the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Discard,
    Mmap,
    MmapTouch,
    Fault,
    Unmap,
    UnmapUntouched,
}

impl Work {
    const ALL: [Self; 6] = [
        Self::Discard,
        Self::Mmap,
        Self::MmapTouch,
        Self::Fault,
        Self::Unmap,
        Self::UnmapUntouched,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Discard => "discard",
            Self::Mmap => "vma_mmap",
            Self::MmapTouch => "vma_mmap_touch",
            Self::Fault => "vma_fault",
            Self::Unmap => "vma_unmap",
            Self::UnmapUntouched => "vma_unmap_untouched",
        }
    }

    /// Returns the bytes of a piece, which is the subject of one operation.
    const fn piece(self) -> u64 {
        if matches!(self, Self::Discard) { DISCARD } else { 16 << 10 }
    }

    /// Returns the pieces of one thread in a lap, a power of two: some tenths of a millisecond.
    const fn share(self) -> u64 {
        match self {
            Self::Discard => 32,
            Self::MmapTouch | Self::Fault => 128,
            Self::Unmap => 256,
            Self::Mmap | Self::UnmapUntouched => 512,
        }
    }

    /// Returns whether the pieces are mapped before.
    const fn is_mapped(self) -> bool {
        !matches!(self, Self::Mmap | Self::MmapTouch)
    }
}

/// A kind of work, with one thread and with two.
struct Scaled {
    work: Work,
    /// Whether the pieces of a thread are interleaved with the pieces of the other thread.
    shuffled: bool,
    pair: Paired,
}

impl Scaled {
    fn sample(&mut self, native: &Native) -> Result<(), Stop> {
        let (work, shuffled) = (self.work, self.shuffled);
        let before = worked(native, work, shuffled, 1)?;
        let together = worked(native, work, shuffled, 2)?;
        let after = worked(native, work, shuffled, 1)?;
        self.pair.add(&before, &together, &after);
        Ok(())
    }

    fn report(&self, report: &mut Report) {
        let order = if self.shuffled { "shuffled" } else { "private" };
        let (name, setting) = (self.work.name(), format!("order={order}"));
        for (at, sample) in [&self.pair.alone, &self.pair.together].into_iter().enumerate() {
            let at = (name, at + 1, &setting[..]);
            report.median(at, ("pieces_per_second", "pieces/s"), Spread::of(sample));
        }
        let scaling = self.pair.ratio();
        report.median((name, 2, &setting), ("scaling", "times"), scaling);
        let promise = format!("{name}, {order}: two threads at least {TWO} times one");
        report.gate(promise, scaling.words(), scaling.median >= TWO);
    }
}

/// Runs the measurements.
///
/// # Errors
/// The machine's error as text.
pub fn run(quick: bool) -> Result<Report, String> {
    // Enough memory for two threads of any kind of work, with page tables.
    let config = Config { memory_bytes: 112 << 20, cpus: 2, populate: true, ..Config::default() };
    let native = Native::new(config).map_err(|error| format!("the machine: {error}"))?;
    // Every page must be a fault.
    native.vm().set(Setting::PrefaultMaxOrder(0));
    let mut faults = Vec::new();
    for access in [Access::Write, Access::Read] {
        for locking in [Locking::Speculative, Locking::PerVma] {
            faults.push(Faults::new(access, locking));
        }
    }
    let mut scaled = Vec::new();
    for work in Work::ALL {
        for shuffled in [false, true] {
            scaled.push(Scaled { work, shuffled, pair: Paired::default() });
        }
    }
    let end = Instant::now() + Duration::from_secs(if quick { 20 } else { 90 });
    let mut rounds = 0;
    while rounds == 0 || Instant::now() < end {
        for faults in &mut faults {
            native.vm().set(Setting::Locking(faults.locking));
            sample(&native, faults).map_err(|stop| stop.to_string())?;
        }
        native.vm().set(Setting::Locking(Locking::Speculative));
        for scaled in &mut scaled {
            scaled.sample(&native).map_err(|stop| stop.to_string())?;
        }
        rounds += 1;
    }
    let mut report = Report::default();
    report.row(("beside", 2, ""), ("rounds", "rounds"), f64::from(rounds));
    faults.iter().for_each(|faults| faults.rows(&mut report));
    let ours = |faults: &&Faults| faults.locking == Locking::Speculative;
    faults.iter().filter(ours).for_each(|faults| faults.gate(&mut report));
    scaled.iter().for_each(|scaled| scaled.report(&mut report));
    Ok(report)
}

/// Returns the pieces per second of all threads, by lap.
fn worked(native: &Native, work: Work, shuffled: bool, threads: usize) -> Result<Vec<f64>, Stop> {
    let process = native.process()?;
    let (share, all) = (work.share(), threads as u64 * work.share());
    let len = work.piece();
    let region = |lap: u64| REGIONS + lap * REGION;
    if work.is_mapped() {
        process.run(|cpu| {
            for lap in 0..LAPS {
                cpu.mmap(region(lap), all * len, RW, FIXED)?;
            }
            Ok(())
        })?;
    }
    let course = Course::new(threads, LAPS, share);
    let laps = process.run_threads(threads, |cpu, thread| {
        let piece = |lap: u64, at: u64| {
            region(lap) + number(thread as u64 * share + at, all, shuffled) * len
        };
        let cpu = &*cpu;
        let prepare = |lap| match work {
            Work::Unmap => (0..share).try_for_each(|at| touch(cpu, piece(lap, at), len)),
            _ => Ok(()),
        };
        let act = |lap, at| {
            let piece = piece(lap, at);
            if matches!(work, Work::Mmap | Work::MmapTouch) {
                cpu.mmap(piece, len, RW, FIXED)?;
            }
            if matches!(work, Work::MmapTouch | Work::Fault | Work::Discard) {
                touch(cpu, piece, len)?;
            }
            match work {
                Work::Discard => Ok(cpu.madvise(piece, len, Advice::DontNeed)?),
                Work::Unmap | Work::UnmapUntouched => Ok(cpu.munmap(piece, len)?),
                Work::Mmap | Work::MmapTouch | Work::Fault => Ok(()),
            }
        };
        course.prepared(|| cpu.poll(), prepare, act)
    })?;
    Ok(course.speeds(&laps).iter().map(|each| each.iter().sum()).collect())
}

/// Returns the number of the piece for this turn: each of `all`, a power of two, occurs once.
const fn number(turn: u64, all: u64, shuffled: bool) -> u64 {
    if shuffled { turn * SCATTER % all } else { turn }
}

/// Writes the pages of a piece.
fn touch(cpu: &NativeCpu<'_, '_>, piece: u64, len: u64) -> Result<(), Stop> {
    let mut pages = (piece..piece + len).step_by(PAGE_SIZE as usize);
    pages.try_for_each(|page| Ok(cpu.touch(page, Access::Write)?))
}

/// The space in which the other thread discards memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nobody,
    SameSpace,
    Elsewhere,
}

/// Runs one round of `faults`.
fn sample(native: &Native, faults: &mut Faults) -> Result<(), Stop> {
    let access = faults.access;
    let (before, ..) = touched(native, access, Beside::Nobody)?;
    let (together, discards, counted) = touched(native, access, Beside::SameSpace)?;
    let (elsewhere, ..) = touched(native, access, Beside::Elsewhere)?;
    let (after, ..) = touched(native, access, Beside::Nobody)?;
    faults.same_space.add(&before, &together, &after);
    faults.elsewhere.add(&before, &elsewhere, &after);
    faults.discards += discards;
    faults.faults += counted.get(Counter::Faults);
    faults.aborts += counted.aborts();
    faults.locked += counted.get(Counter::RangeLockFault);
    Ok(())
}

/// Returns the pages per second, by lap, of a thread that touches them beside another that discards
/// memory, the number of discards, and the counts of the machine.
fn touched(
    native: &Native,
    access: Access,
    beside: Beside,
) -> Result<(Vec<f64>, u64, Totals), Stop> {
    let process = native.process()?;
    let other = native.process()?;
    let heap = |process: &Process<'_>| {
        process.run(|cpu| Ok(cpu.mmap(None, 2 * PAGES * PAGE_SIZE, RW, PRIVATE)?))
    };
    let (lower, upper) = (heap(&process)?, heap(&other)? + PAGES * PAGE_SIZE);
    let threads = if beside == Beside::Nobody { 1 } else { 2 };
    let course = Course::new(threads, PAGES / LAP, LAP / CHUNK);
    let before = native.vm().totals();
    let (touching, giving) = std::thread::scope(|scope| {
        let giving = (beside != Beside::Nobody).then(|| {
            let (process, upper) = match beside {
                Beside::Elsewhere => (&other, upper),
                _ => (&process, lower + PAGES * PAGE_SIZE),
            };
            let course = &course;
            scope.spawn(move || process.run(|cpu| give_back(cpu, course, upper)))
        });
        let touching = process.run(|cpu| {
            course.run(
                || cpu.poll(),
                |chunk| {
                    let first = lower + chunk * CHUNK * PAGE_SIZE;
                    (first..first + CHUNK * PAGE_SIZE)
                        .step_by(PAGE_SIZE as usize)
                        .try_for_each(|page| Ok(cpu.touch(page, access)?))
                },
            )
        });
        let giving = giving
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        (touching, giving)
    });
    let (giving, discards) = giving.transpose()?.unzip();
    let laps: Vec<_> = std::iter::once(touching?).chain(giving).collect();
    let counted = native.vm().totals().since(&before);
    let speeds = course.speeds(&laps).into_iter().map(|each| each[0] * CHUNK as f64).collect();
    Ok((speeds, discards.unwrap_or(0), counted))
}

/// Discards pieces of the half at `upper` while the other thread touches, and returns their number.
fn give_back(
    cpu: &mut NativeCpu<'_, '_>,
    course: &Course,
    upper: u64,
) -> Result<(Vec<Lap>, u64), Stop> {
    let mut discards = 0;
    let laps = course.beside(
        || cpu.poll(),
        |at| {
            discards += 1;
            let piece = upper + at * DISCARD % (PAGES * PAGE_SIZE);
            Ok::<_, Stop>(cpu.madvise(piece, DISCARD, Advice::DontNeed)?)
        },
    )?;
    Ok((laps, discards))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_counts_if_both_measurements_alone_agree() {
        let mut paired = Paired::default();
        paired.add(&[100.0, 90.0, 110.0], &[49.0, 50.0, 60.0], &[101.0, 100.0]);
        assert_eq!(paired.ratio, [0.5]);
        paired.add(&[100.0], &[50.0], &[80.0]);
        paired.add(&[100.0], &[], &[100.0]);
        assert_eq!(paired.ratio().size, 1);
        assert_eq!((paired.alone.len(), paired.together.len()), (9, 4));
    }

    #[test]
    fn each_page_is_touched_once_while_the_other_thread_discards() {
        let config = Config { memory_bytes: 80 << 20, cpus: 2, ..Config::default() };
        let native = Native::new(config).unwrap();
        native.vm().set(Setting::PrefaultMaxOrder(0));
        for beside in [Beside::Nobody, Beside::SameSpace, Beside::Elsewhere] {
            let (laps, discards, counted) = touched(&native, Access::Write, beside).unwrap();
            assert!(laps.len() < (PAGES / LAP) as usize);
            assert_eq!(counted.get(Counter::Faults), PAGES);
            assert_eq!(discards > 0, beside != Beside::Nobody);
            if beside == Beside::Elsewhere {
                assert_eq!(counted.aborts(), 0);
            }
        }
    }

    #[test]
    fn shuffled_pieces_are_an_interleaved_permutation() {
        for all in [32, 64, 128, 1024] {
            let numbers: Vec<_> = (0..all).map(|turn| number(turn, all, true)).collect();
            let mut sorted = numbers.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..all), "{all}");
            // Half of the first thread's pieces are in the half that would belong to the second.
            let (mine, _) = numbers.split_at(all as usize / 2);
            let beyond = mine.iter().filter(|number| **number >= all / 2).count() as u64;
            assert!(beyond.abs_diff(all / 4) <= all / 32, "{all}: {beyond}");
        }
    }

    /// Each thread does the work of a lap once on each of its pieces.
    #[test]
    fn every_kind_of_work_is_done() {
        let config = Config { memory_bytes: 80 << 20, cpus: 2, ..Config::default() };
        let native = Native::new(config).unwrap();
        native.vm().set(Setting::PrefaultMaxOrder(0));
        for work in Work::ALL {
            for shuffled in [false, true] {
                let before = native.vm().totals();
                // With one thread every lap runs to its end.
                let speeds = worked(&native, work, shuffled, 1).unwrap();
                assert!(speeds.len() < LAPS as usize && speeds.iter().all(|speed| *speed > 0.0));
                let faults = native.vm().totals().since(&before).get(Counter::Faults);
                let pages = LAPS * work.share() * work.piece() / PAGE_SIZE;
                let touches = !matches!(work, Work::Mmap | Work::UnmapUntouched);
                assert_eq!(faults, if touches { pages } else { 0 }, "{work:?}");
                let speeds = worked(&native, work, shuffled, 2).unwrap();
                assert!(speeds.len() < LAPS as usize, "{work:?}");
            }
        }
    }
}
