//! `vma_mmap`, `vma_mmap_touch`, `vma_fault`, `vma_unmap`, `vma_unmap_untouched`: each operation by itself, every
//! thread in its own part of one region.
//!
//! These are the five microbenchmarks of CortenMM (SOSP 2025): a region is divided into small chunks, each
//! thread has as many of them as the others, and does one thing to each: maps it, maps it and touches its pages,
//! touches pages of the one mapping that is there, or unmaps it from that mapping, touched before or not. The
//! chunks of a thread are neighbours (`order=private`), or lie between those of the others in an order of chance
//! (`order=shuffled`): so that all work in the same page tables and VMAs, and still never on the same page.
//!
//! What an operation finds is made anew for each round, off the clock ([`rounds`](super::rounds)): it alone is
//! measured, and neither the mapping nor the touching that it needs.

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
    help: "chunks of one thread are neighbours, or lie among those of the others",
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
    help: "rounds: how often each chunk's turn comes",
};

/// What there is where the chunks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum There {
    /// Nothing.
    Hole,
    /// A mapping without pages.
    Untouched,
    /// A mapping with all its pages.
    Touched,
}

/// One of the five.
pub trait Case: Copy + Debug + Sync + 'static {
    /// The program's name.
    const NAME: &'static str;
    /// What it does, in one line.
    const SUMMARY: &'static str;
    /// What it counts: a plural.
    const UNIT: &'static str;
    /// What a round finds.
    const BEFORE: There;
    /// What it leaves.
    const AFTER: There;

    /// Does it to one chunk, and returns how many of the unit that was.
    ///
    /// # Errors
    /// What the system refused, or answered wrongly.
    fn act<T: Task>(task: &mut T, chunk: VirtRange, round: u64) -> Result<u64, Failure>;
}

/// Maps `range`, where nothing is.
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
    /// `vma_unmap`: unmap each chunk of one mapping whose pages are all there.
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

/// What the threads know in common.
#[derive(Debug)]
pub struct State {
    /// All chunks by number, in the order of their turns: first those of the first thread.
    turns: Vec<u32>,
    /// Where the region is in this round: written while nobody acts.
    region: AtomicU64,
    rounds: Rounds,
}

impl<C: Case> Vma<C> {
    fn region(&self, state: &State) -> VirtRange {
        let start = state.region.load(Ordering::Relaxed);
        VirtRange::new(start, start + (self.chunks * self.threads) as u64 * self.chunk)
    }

    /// The turns of `worker`.
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
        // They meet before they look.
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

// SAFETY: workers access chunks of their own, while they are mapped: the region of the round is mapped by
// `prepare` of the first, or its chunks are by their owners, over nothing; it is unmapped by their owners, or as a
// whole by the first, when all have met.
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
        // `new` has seen to it that this is a size.
        let region = self.chunk * (self.chunks * self.threads) as u64;
        let touched = C::BEFORE == There::Touched || C::AFTER == There::Touched;
        if touched { Needs::written(region) } else { Needs::mapped(region) }
    }

    fn prepare<T: Task>(&self, _: &mut T) -> Result<State, Failure> {
        // At most 2^30 of them.
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
            // Nothing is there, or this is refused.
            map_at(task, region)?;
        }
        let access = if C::AFTER == There::Touched { Access::Write } else { Access::Read };
        verify_all(task, region, access)?;
        unmap(task, region)
    }
}
