//! `discard`: the heap of a language runtime, with a part for each thread.
//!
//! The heaps of Go, Java, jemalloc and tcmalloc are a single mapping. A thread with enough freed
//! memory in its part discards pages with `MADV_DONTNEED`, while other threads touch their parts.
//! All operations are in the same VMA, and two threads never use the same page.
//!
//! Every thread touches a piece of its part and discards the piece, piece after piece
//! (`role=both`). With `role=split`, half of the threads touch their parts, and the second half
//! only discards pieces of separate parts until the first half is done.

use super::touch::{map, part, sweep, touch, touch_all, verify_all};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program, THREADS};
use crate::system::{Crew, Failure, Measured, Mode, Needs, Tally, Task, Worker};
use faultless::{Access, Advice, VirtRange};
use std::sync::atomic::{AtomicUsize, Ordering};

static SIZE: Param =
    Param { name: "size", kind: Kind::Size, default: 16 << 20, help: "memory of one thread" };
static PIECE: Param = Param {
    name: "piece",
    kind: Kind::Size,
    default: 64 << 10,
    help: "size of the range that one call discards",
};
static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 30),
    default: 4,
    help: "number of times that the memory is touched",
};
static ROLE: Param = Param {
    name: "role",
    kind: Kind::Choice(&["both", "split"]),
    default: 0,
    help: "both: each thread writes its part and discards it piece by piece; split: the first \
           half of the threads only write their parts, the second half only discard pieces of \
           their parts until the first half is done",
};
static REFILL: Param = Param {
    name: "refill",
    kind: Kind::Choice(&["no", "yes"]),
    default: 0,
    help: "role=split: whether the discarding threads first write one page of each piece, so \
           that TLBs must be flushed",
};

/// `discard`: touch a part of a heap, and discard it.
#[derive(Clone, Copy, Debug)]
pub struct Discard {
    threads: usize,
    size: u64,
    piece: u64,
    passes: Passes,
    /// The number of touching threads, starting with the first. The remaining threads discard.
    touching: usize,
    refill: bool,
}

/// The data shared by the threads.
#[derive(Debug)]
pub struct State {
    heap: VirtRange,
    /// The number of touching threads that are done: written once by each, and read by the
    /// discarding threads.
    done: AtomicUsize,
}

impl Discard {
    /// The name of the extra result with the number of discarded pieces.
    pub const DISCARDS: &'static str = "discards";

    fn splits(&self) -> bool {
        self.touching < self.threads
    }

    /// Returns the pieces of `part`; the last may be smaller.
    fn pieces(&self, part: VirtRange) -> impl Iterator<Item = VirtRange> + Clone + use<> {
        let piece = self.piece;
        let starts = (part.start..part.end).step_by(piece as usize);
        starts.map(move |start| VirtRange::new(start, part.end.min(start + piece)))
    }

    /// Touches and discards each piece of `part`.
    fn touch_and_discard<T: Task>(&self, task: &mut T, part: VirtRange) -> Result<Tally, Failure> {
        let (mut tally, mut passes) = (Tally::default(), 0);
        while self.passes.more(task, passes) {
            for piece in self.pieces(part) {
                tally.operations += touch_all(task, piece, Access::Write, passes)?;
                task.madvise(piece.start, piece.len(), Advice::DontNeed)?;
                tally.extra += 1;
            }
            passes += 1;
        }
        Ok(tally)
    }

    /// Discards pieces of `part` until all touching threads are done.
    fn discard<T: Task>(
        &self,
        task: &mut T,
        part: VirtRange,
        state: &State,
    ) -> Result<Tally, Failure> {
        let mut tally = Tally::default();
        for piece in self.pieces(part).cycle() {
            if state.done.load(Ordering::Relaxed) >= self.touching {
                break;
            }
            if self.refill {
                touch(task, piece.start, Access::Write, tally.extra)?;
            }
            task.madvise(piece.start, piece.len(), Advice::DontNeed)?;
            tally.extra += 1;
        }
        Ok(tally)
    }
}

// SAFETY: workers touch and discard pages of their own parts of the heap of `prepare`, which stays
// mapped.
unsafe impl Program for Discard {
    const NAME: &'static str = "discard";
    const SUMMARY: &'static str =
        "threads touch their parts of one heap and discard them piece by piece";
    const UNIT: &'static str = "pages";
    const PARAMS: &'static [&'static Param] = &[&SIZE, &PIECE, &PASSES, &ROLE, &REFILL];
    const MODES: &'static [Mode] = &[Mode::Threads];

    type State = State;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        // At most 1,024 by the parameter's kind.
        let threads = settings.get(&THREADS) as usize;
        let (size, piece) = (settings.get(&SIZE), settings.get(&PIECE));
        let splits = settings.get(&ROLE) == 1;
        if splits && threads < 2 {
            return Err(settings.bad(&ROLE, "requires threads=2 or more"));
        }
        if piece > size {
            return Err(settings.bad(&PIECE, "at most the part of one thread"));
        }
        if size > (1 << 46) / threads as u64 {
            return Err(settings.bad(&SIZE, "at most 64T of all threads together"));
        }
        Ok(Self {
            threads,
            size,
            piece,
            passes: Passes::new(settings, &PASSES),
            touching: if splits { threads.div_ceil(2) } else { threads },
            refill: settings.get(&REFILL) == 1,
        })
    }

    fn needs(&self, _: &Crew) -> Needs {
        Needs::written(self.size * self.threads as u64)
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<State, Failure> {
        let heap = map(task, self.size * self.threads as u64)?;
        Ok(State { heap, done: AtomicUsize::new(0) })
    }

    fn work<T: Task>(&self, task: &mut T, state: &State, worker: Worker) -> Result<Tally, Failure> {
        let part = part(state.heap, worker);
        if !self.splits() {
            return self.touch_and_discard(task, part);
        }
        if worker.index >= self.touching {
            return self.discard(task, part, state);
        }
        let swept = sweep(task, part, Access::Write, self.passes, |_, _| Ok(()));
        // Also on failure, or the others would never stop.
        state.done.fetch_add(1, Ordering::Relaxed);
        swept.map(|(operations, _)| Tally { operations, extra: 0 })
    }

    fn finish<T: Task>(&self, task: &mut T, state: &State, _: Worker) -> Result<(), Failure> {
        // Parts with a final discard read as zero. Parts between the discarded parts of other
        // threads keep their contents.
        (0..self.threads).try_for_each(|index| {
            let part = part(state.heap, Worker { index, count: self.threads });
            let touched = self.splits() && index < self.touching;
            verify_all(task, part, if touched { Access::Write } else { Access::Read })
        })
    }

    fn extras(&self, measured: &Measured) -> Vec<(&'static str, f64)> {
        vec![(Self::DISCARDS, measured.tally().extra as f64)]
    }
}
