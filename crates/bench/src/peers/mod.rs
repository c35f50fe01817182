//! The same work through `memory_set` 0.4 behind a `RwLock`, in one run beside the subsystem.
//!
//! Reasons for which the comparison is fair to `memory_set`:
//! - its page table is as deep as the subsystem's and gets new tables and entries by atomic
//!   operations, so that faults need only the read lock: the best that its API allows
//!   (`fault_lock=read`). Because its backend changes the page table through `&mut`, many users
//!   would take the write lock; this is measured too (`fault_lock=write`). The gates compare with
//!   the better of the two;
//! - its lock is the spinning `RwLock` used by kernels, which wastes no time on going to sleep;
//! - frames come from a separate list for each thread, behind a lock that is always free, and from
//!   the same kind of host memory, backed before the run and zeroed by the same instructions;
//! - it flushes no TLB, keeps no reverse map, counts no events, and frees no page tables; the
//!   subsystem does all of this;
//! - each thread maps near a separate address, at which its search ends at once; the 1,000 other
//!   areas of a real program, if any, are elsewhere;
//! - both are called directly from a thread, fault by fault, without a software MMU in between.
//!
//! All comparisons are reported. The gates cover two faulting threads, and mapping beside other
//! areas. For a single thread, and for mapping in an empty space, a lock around the map has no
//! cost.
//!
//! Speeds are sums over the threads while all of them were working, in laps of less than a
//! millisecond, which alternate, and in which no thread was preempted ([`window`](crate::window));
//! medians, with the tenths beside them.

mod peer;

use crate::report::{Report, Spread};
use crate::window::Course;
use faultless::{Access, MapFlags, PAGE_SIZE, Prot, Setting};
use faultless_native::{Config, Memory, Native, NativeCpu, Process, Stop};
use peer::{FaultLock, Frames, Peer};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The largest number of pages touched by a thread in one course: more than the caches hold.
const PAGES: u64 = 16384;
/// Faults, or pairs, between two checks of the window.
const CHUNK: u64 = 16;
/// The largest number of pairs of mapping and unmapping in one course.
const PAIRS: u64 = 2048;
/// Bytes mapped by a pair.
const PAIR_BYTES: u64 = 64 << 10;
/// The smallest meaningful sample.
const ENOUGH: usize = 20;
/// The address of the mappings of thread 0. Other threads map above, each at a distance of
/// [`APART`].
const BASE: u64 = 0x2000_0000_0000;
const APART: u64 = 1 << 33;
/// The address of the other areas.
const OTHERS: u64 = 0x1000_0000_0000;
const MANY: u64 = 1000;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);

/// The compared work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Faults(Access),
    /// Mapping and unmapping beside this number of other areas.
    Pairs {
        others: u64,
    },
}

impl Work {
    const ALL: [Self; 4] = [
        Self::Faults(Access::Write),
        Self::Faults(Access::Read),
        Self::Pairs { others: 0 },
        Self::Pairs { others: MANY },
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Faults(Access::Write) => "write_fault",
            Self::Faults(_) => "read_fault",
            Self::Pairs { others: 0 } => "mmap_munmap",
            Self::Pairs { .. } => "mmap_munmap_beside_1000_areas",
        }
    }

    /// Returns whether a promise covers this case, as typical for threads of a real program. A
    /// single thread in an empty space does not need the subsystem's support for other threads.
    fn is_gated(self, threads: usize) -> bool {
        match self {
            Self::Faults(_) => threads > 1,
            Self::Pairs { others } => others != 0,
        }
    }

    const fn metric(self) -> (&'static str, &'static str) {
        match self {
            Self::Faults(_) => ("faults_per_second", "faults/s"),
            Self::Pairs { .. } => ("pairs_per_second", "pairs/s"),
        }
    }
}

/// The implementation of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Ours,
    Peer(FaultLock),
}

impl Who {
    const ALL: [Self; 3] = [Self::Ours, Self::Peer(FaultLock::Read), Self::Peer(FaultLock::Write)];

    const fn setting(self) -> &'static str {
        match self {
            Self::Ours => "locking=speculative",
            Self::Peer(FaultLock::Read) => "peer=memory_set fault_lock=read",
            Self::Peer(FaultLock::Write) => "peer=memory_set fault_lock=write",
        }
    }
}

/// Runs the measurements.
///
/// # Errors
/// The machine's error as text.
pub fn run(quick: bool) -> Result<Report, String> {
    let bench = Bench::new()?;
    let rounds = if quick { 20 } else { 100 };
    let mut kinds = Vec::new();
    for work in Work::ALL {
        for threads in [1, 2] {
            for who in Who::ALL {
                kinds.push(((work, threads, who), Vec::new()));
            }
        }
    }
    let limit = Instant::now() + Duration::from_secs(if quick { 20 } else { 120 });
    let mut round = 0;
    // On a busy host many laps do not count.
    while round < rounds
        || kinds.iter().any(|(_, samples)| samples.len() < ENOUGH) && Instant::now() < limit
    {
        for ((work, threads, who), samples) in &mut kinds {
            let laps = match who {
                Who::Ours => bench.ours(*work, *threads).map_err(|stop| stop.to_string())?,
                Who::Peer(lock) => bench
                    .peer(*work, *threads, *lock)
                    .ok_or_else(|| format!("the peer failed at {}", work.name()))?,
            };
            samples.extend(laps.iter().map(|lap| lap.iter().sum::<f64>() * CHUNK as f64));
        }
        round += 1;
    }
    let mut report = Report::default();
    for &((work, threads, who), ref samples) in &kinds {
        let (at, (name, unit)) = ((work.name(), threads, who.setting()), work.metric());
        report.median(at, (name, unit), Spread::of(samples));
    }
    let speed = |work, threads, ours: bool| {
        let of = kinds
            .iter()
            .filter(|((w, t, who), _)| (*w, *t, *who == Who::Ours) == (work, threads, ours));
        of.map(|(_, samples)| Spread::of(samples).median).fold(0.0, f64::max)
    };
    for work in Work::ALL {
        for threads in [1, 2] {
            let (ours, theirs) = (speed(work, threads, true), speed(work, threads, false));
            let measured = ours > 0.0 && theirs > 0.0;
            let times = if measured { ours / theirs } else { 0.0 };
            let at = (work.name(), threads, "speculative over the better memory_set");
            report.row(at, ("times_as_fast", "times"), times);
            if work.is_gated(threads) {
                let promise =
                    format!("{}, {threads} threads: at least as fast as memory_set", work.name());
                let found =
                    if measured { format!("{times:.3} times") } else { "host too busy".into() };
                report.gate(promise, found, times >= 1.0);
            }
        }
    }
    Ok(report)
}

struct Bench {
    native: Native,
    frames: Arc<Frames>,
}

impl Bench {
    fn new() -> Result<Self, String> {
        let bytes = 2 * (PAGES + 2048) * PAGE_SIZE;
        let config = Config { memory_bytes: bytes, cpus: 2, populate: true, ..Config::default() };
        let native = Native::new(config).map_err(|error| format!("the machine: {error}"))?;
        // Every page must be a fault.
        native.vm().set(Setting::PrefaultMaxOrder(0));
        let mut memory =
            Memory::new(bytes, 1).map_err(|errno| format!("the peer's memory: {errno:?}"))?;
        memory.populate();
        Ok(Self { native, frames: Arc::new(Frames::new(memory, 2)) })
    }

    fn ours(&self, work: Work, threads: usize) -> Result<Vec<Vec<f64>>, Stop> {
        let process = self.native.process()?;
        process.run(|cpu| prepare(cpu, work, threads))?;
        let course = course(work, threads);
        let laps = process.run_threads(threads, |cpu, number| {
            let base = BASE + number as u64 * APART;
            course.run(|| cpu.poll(), |chunk| our_chunk(&process, cpu, work, base, chunk))
        })?;
        Ok(course.speeds(&laps))
    }

    fn peer(&self, work: Work, threads: usize, lock: FaultLock) -> Option<Vec<Vec<f64>>> {
        let peer = Peer::new(self.frames.clone(), lock);
        for (addr, bytes) in areas(work, threads) {
            peer.map(addr as usize, bytes as usize)?;
        }
        let course = course(work, threads);
        let laps: Option<Vec<_>> = std::thread::scope(|scope| {
            let spawned: Vec<_> = (0..threads)
                .map(|number| {
                    let (peer, course) = (&peer, &course);
                    scope.spawn(move || {
                        peer::enlist(number);
                        let base = BASE + number as u64 * APART;
                        let lap = course
                            .run(|| (), |chunk| peer_chunk(peer, work, base, chunk).ok_or(()));
                        // Back on the list from which they came.
                        peer.unmap(base as usize, (PAGES * PAGE_SIZE) as usize)?;
                        lap.ok()
                    })
                })
                .collect();
            spawned.into_iter().map(|thread| thread.join().ok().flatten()).collect()
        });
        Some(course.speeds(&laps?))
    }
}

fn course(work: Work, threads: usize) -> Course {
    let (all, lap) = match work {
        Work::Faults(Access::Write) => (PAGES, 512),
        Work::Faults(_) => (PAGES, 4096),
        Work::Pairs { .. } => (PAIRS, 128),
    };
    Course::new(threads, all / lap, lap / CHUNK)
}

/// Returns the areas that exist before the run.
fn areas(work: Work, threads: usize) -> Vec<(u64, u64)> {
    match work {
        Work::Faults(_) => {
            (0..threads as u64).map(|at| (BASE + at * APART, PAGES * PAGE_SIZE)).collect()
        }
        // Not adjacent, to prevent a merge.
        Work::Pairs { others } => {
            (0..others).map(|at| (OTHERS + 2 * at * PAIR_BYTES, PAIR_BYTES)).collect()
        }
    }
}

fn prepare(cpu: &NativeCpu<'_, '_>, work: Work, threads: usize) -> Result<(), Stop> {
    for (addr, bytes) in areas(work, threads) {
        cpu.mmap(addr, bytes, RW, PRIVATE)?;
    }
    Ok(())
}

#[inline(always)]
fn our_chunk(
    process: &Process<'_>,
    cpu: &NativeCpu<'_, '_>,
    work: Work,
    base: u64,
    chunk: u64,
) -> Result<(), Stop> {
    match work {
        Work::Faults(access) => {
            for page in chunk * CHUNK..(chunk + 1) * CHUNK {
                cpu.poll();
                let addr = base + page * PAGE_SIZE;
                if process.space().fault_remote(cpu.cpu(), addr, access).is_err() {
                    // The access receives the signal of the fault.
                    cpu.touch(addr, access)?;
                }
            }
        }
        Work::Pairs { .. } => {
            for _ in 0..CHUNK {
                let area = cpu.mmap(base, PAIR_BYTES, RW, PRIVATE)?;
                cpu.munmap(area, PAIR_BYTES)?;
            }
        }
    }
    Ok(())
}

#[inline(always)]
fn peer_chunk(peer: &Peer, work: Work, base: u64, chunk: u64) -> Option<()> {
    match work {
        Work::Faults(access) => {
            for page in chunk * CHUNK..(chunk + 1) * CHUNK {
                peer.fault((base + page * PAGE_SIZE) as usize, access == Access::Write)?;
            }
        }
        Work::Pairs { .. } => {
            for _ in 0..CHUNK {
                let area = peer.map(base as usize, PAIR_BYTES as usize)?;
                peer.unmap(area, PAIR_BYTES as usize)?;
            }
        }
    }
    Some(())
}
