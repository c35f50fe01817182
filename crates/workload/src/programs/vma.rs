//! `vma_mmap`, `vma_mmap_touch`, `vma_fault`, `vma_unmap`, `vma_unmap_untouched`: single
//! operations, with every thread in a separate part of one region.
//!
//! These are the five microbenchmarks of CortenMM (SOSP 2025). A region is divided into small
//! chunks, in equal numbers for each thread. The thread does one operation on each chunk: map, map
//! and touch the pages, touch the pages in an existing mapping, or unmap from an existing mapping,
//! touched or untouched. The chunks of a thread are adjacent (`order=private`), or randomly placed
//! between the chunks of other threads (`order=shuffled`). With the latter, all threads work in the
//! same page tables and VMAs, but never on the same page.
//!
//! The initial state of an operation is created for each round, off the clock
//! ([`rounds`](super::rounds)). Only the operation is measured, without its mapping and touching.

use super::random::Random;
use super::rounds::{Round, Rounds};
use super::touch::{map, touch_all, unmap, verify_all};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program, THREADS};
use crate::system::{Crew, Failure, Mode, Needs, Tally, Task, Worker};
use faultless::{Access, MapFlags, Prot, VirtRange};
use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

static ORDER: Param = Param {
    name: "order",
    kind: Kind::Choice(&["private", "shuffled"]),
    default: 0,
    help: "chunks of one thread are neighbours, or lie between chunks of other threads",
};
static CHUNK: Param =
    Param { name: "chunk", kind: Kind::Size, default: 16 << 10, help: "size of a chunk" };
static CHUNKS: Param = Param {
    name: "chunks",
    kind: Kind::Count(1, 1 << 20),
    default: 1024,
    help: "chunks of one thread",
};
static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 30),
    default: 16,
    help: "number of rounds through all chunks",
};

/// The state of the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum There {
    /// No mapping.
    Hole,
    /// A mapping without pages.
    Untouched,
    /// A mapping with all its pages.
    Touched,
}

/// One of the five programs.
pub trait Case: Copy + Debug + Sync + 'static {
    /// The program's name.
    const NAME: &'static str;
    /// A summary of the work, in one line.
    const SUMMARY: &'static str;
    /// The counted unit, in the plural.
    const UNIT: &'static str;
    /// The state before a round.
    const BEFORE: There;
    /// The state after a round.
    const AFTER: There;

    /// Does the operation on one chunk, and returns the number of units.
    ///
    /// # Errors
    /// A refused call or a wrong result of the system.
    fn act<T: Task>(task: &mut T, chunk: VirtRange, round: u64) -> Result<u64, Failure>;
}

/// Maps the unmapped `range`.
#[inline]
fn map_at<T: Task>(task: &mut T, range: VirtRange) -> Result<(), Failure> {
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED_NOREPLACE;
    let start = task.mmap(range.start, range.len(), Prot::READ | Prot::WRITE, flags)?;
    Failure::check("the mapped address", range.start, range.start, start)
}

macro_rules! cases {
    ($($(#[$doc:meta])* $program:ident = $case:ident {
        $name:literal, $summary:literal, $unit:literal, $before:ident => $after:ident,
        $act:expr $(,)?
    })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $case {}

        $(#[$doc])*
        pub type $program = Vma<$case>;

        impl Case for $case {
            const NAME: &'static str = $name;
            const SUMMARY: &'static str = $summary;
            const UNIT: &'static str = $unit;
            const BEFORE: There = There::$before;
            const AFTER: There = There::$after;

            #[inline]
            fn act<T: Task>(task: &mut T, chunk: VirtRange, round: u64) -> Result<u64, Failure> {
                let act: fn(&mut T, VirtRange, u64) -> Result<u64, Failure> = $act;
                act(task, chunk, round)
            }
        }
    )*};
}

cases! {
    /// `vma_mmap`: map each chunk.
    VmaMmap = MmapCase {
        "vma_mmap", "threads map small chunks of one region, each in its own part", "mappings",
        Hole => Untouched,
        |task, chunk, _| map_at(task, chunk).map(|()| 1),
    }
    /// `vma_mmap_touch`: map each chunk and write its pages.
    VmaMmapTouch = MmapTouchCase {
        "vma_mmap_touch", "threads map small chunks of one region and write their pages", "mappings",
        Hole => Touched,
        |task, chunk, round| {
            map_at(task, chunk)?;
            touch_all(task, chunk, Access::Write, round).map(|_| 1)
        },
    }
    /// `vma_fault`: write the pages of each chunk of one mapping.
    VmaFault = FaultCase {
        "vma_fault", "threads write the pages of small chunks of one mapping", "pages",
        Untouched => Touched,
        |task, chunk, round| touch_all(task, chunk, Access::Write, round),
    }
    /// `vma_unmap`: unmap each chunk of one fully touched mapping.
    VmaUnmap = UnmapCase {
        "vma_unmap", "threads unmap small chunks of one touched mapping", "unmappings",
        Touched => Hole,
        |task, chunk, _| unmap(task, chunk).map(|()| 1),
    }
    /// `vma_unmap_untouched`: unmap each chunk of one mapping without pages.
    VmaUnmapUntouched = UnmapUntouchedCase {
        "vma_unmap_untouched", "threads unmap small chunks of one untouched mapping", "unmappings",
        Untouched => Hole,
        |task, chunk, _| unmap(task, chunk).map(|()| 1),
    }
}

/// A program of this family.
#[derive(Clone, Copy, Debug)]
pub struct Vma<C> {
    threads: usize,
    shuffled: bool,
    chunk: u64,
    chunks: usize,
    passes: Passes,
    case: PhantomData<C>,
}

/// The data shared by the threads.
#[derive(Debug)]
pub struct State {
    /// All chunks by number, in the order of use, starting with those of the first thread.
    turns: Vec<u32>,
    /// The start of the region in this round, written while all other threads wait.
    region: AtomicU64,
    rounds: Rounds,
}

impl<C: Case> Vma<C> {
    fn region(&self, state: &State) -> VirtRange {
        let start = state.region.load(Ordering::Relaxed);
        VirtRange::new(start, start + (self.chunks * self.threads) as u64 * self.chunk)
    }

    /// Returns the turns of `worker`.
    fn turns_of(&self, worker: Worker) -> Range<usize> {
        worker.index * self.chunks..(worker.index + 1) * self.chunks
    }

    fn chunk_at(&self, region: VirtRange, number: u32) -> VirtRange {
        let start = region.start + u64::from(number) * self.chunk;
        VirtRange::new(start, start + self.chunk)
    }
}

/// One thread's rounds.
struct Turns<'a, C> {
    program: &'a Vma<C>,
    state: &'a State,
    mine: &'a [u32],
    operations: u64,
}

impl<C: Case> Turns<'_, C> {
    fn chunks(&self) -> impl Iterator<Item = VirtRange> + '_ {
        let region = self.program.region(self.state);
        self.mine.iter().map(move |&number| self.program.chunk_at(region, number))
    }
}

impl<C: Case, T: Task> Round<T> for Turns<'_, C> {
    fn prepare(&mut self, task: &mut T, round: u64) -> Result<(), Failure> {
        let last = self.program.region(self.state);
        if round > 0 && C::AFTER != There::Hole {
            unmap(task, last)?;
        }
        let region = map(task, last.len())?;
        if C::BEFORE == There::Hole {
            unmap(task, region)?;
        }
        // A meeting precedes every read.
        self.state.region.store(region.start, Ordering::Relaxed);
        Ok(())
    }

    fn ready(&mut self, task: &mut T, round: u64) -> Result<(), Failure> {
        if C::BEFORE == There::Touched {
            for chunk in self.chunks() {
                touch_all(task, chunk, Access::Write, round)?;
            }
        }
        Ok(())
    }

    fn act(&mut self, task: &mut T, round: u64) -> Result<(), Failure> {
        let mut operations = 0;
        for chunk in self.chunks() {
            operations += C::act(task, chunk, round)?;
        }
        self.operations += operations;
        Ok(())
    }
}

// SAFETY: workers access their own chunks while these are mapped. `prepare` of the first worker
// maps the region of the round, or the owners map its chunks over unmapped addresses. The owners
// unmap the chunks, or the first worker unmaps the region after a meeting of all.
unsafe impl<C: Case> Program for Vma<C> {
    const NAME: &'static str = C::NAME;
    const SUMMARY: &'static str = C::SUMMARY;
    const UNIT: &'static str = C::UNIT;
    const PARAMS: &'static [&'static Param] = &[&ORDER, &CHUNK, &CHUNKS, &PASSES];
    const MODES: &'static [Mode] = &[Mode::Threads];

    type State = State;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        // At most 1,024 and 2^20 by the parameters' kinds.
        let (threads, chunks) = (settings.get(&THREADS), settings.get(&CHUNKS));
        let chunk = settings.get(&CHUNK);
        if chunk > (1 << 46) / (threads * chunks) {
            return Err(settings.bad(&CHUNK, "at most 64T of all chunks together"));
        }
        Ok(Self {
            threads: threads as usize,
            shuffled: settings.get(&ORDER) == 1,
            chunk,
            chunks: chunks as usize,
            passes: Passes::new(settings, &PASSES),
            case: PhantomData,
        })
    }

    fn needs(&self, _: &Crew) -> Needs {
        // `new` has checked that this does not overflow.
        let region = self.chunk * (self.chunks * self.threads) as u64;
        let touched = C::BEFORE == There::Touched || C::AFTER == There::Touched;
        if touched { Needs::written(region) } else { Needs::mapped(region) }
    }

    fn prepare<T: Task>(&self, _: &mut T) -> Result<State, Failure> {
        // At most 2^30 chunks.
        let mut turns: Vec<u32> = (0..(self.chunks * self.threads) as u32).collect();
        if self.shuffled {
            Random::new(self.threads as u64).shuffle(&mut turns);
        }
        Ok(State { turns, region: AtomicU64::new(0), rounds: Rounds::default() })
    }

    fn work<T: Task>(&self, task: &mut T, state: &State, worker: Worker) -> Result<Tally, Failure> {
        let mine = &state.turns[self.turns_of(worker)];
        let mut turns = Turns { program: self, state, mine, operations: 0 };
        state.rounds.run(task, worker, self.passes, &mut turns)?;
        Ok(Tally { operations: turns.operations, extra: 0 })
    }

    fn finish<T: Task>(&self, task: &mut T, state: &State, _: Worker) -> Result<(), Failure> {
        let region = self.region(state);
        if C::AFTER == There::Hole {
            // Succeeds only if the region is unmapped.
            map_at(task, region)?;
        }
        let access = if C::AFTER == There::Touched { Access::Write } else { Access::Read };
        verify_all(task, region, access)?;
        unmap(task, region)
    }
}
