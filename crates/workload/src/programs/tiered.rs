//! What programs have in common that use more memory than the fast node has: the sizes of the nodes, and fresh pages that are
//! allocated in between.

use super::random::Random;
use super::touch::{map, part};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::system::{Failure, Task, Tiers, Worker};
use faultless::{Advice, PAGE_SIZE, VirtRange};

/// Bytes of the fast node.
pub(super) static FAST: Param = Param {
    name: "fast",
    kind: Kind::Size,
    default: 64 << 20,
    help: "memory of the fast node, at least 1M",
};
/// The fast node to the slow one.
pub(super) static RATIO: Param = Param {
    name: "ratio",
    kind: Kind::Choice(&["1:1", "1:2.3", "1:4", "1:8", "1:99"]),
    default: 2,
    help: "the fast node's memory to the slow one's",
};
/// Another run of the same kind.
pub(super) static SEED: Param = Param {
    name: "seed",
    kind: Kind::Count(0, 1 << 32),
    default: 0,
    help: "another run of the same kind: other places, or other beginnings",
};
/// Tenths of the fast node that the slow one has, by the choices of [`RATIO`].
const TENTHS: [u64; 5] = [10, 23, 40, 80, 990];
/// A smaller node has no room for what CPUs keep.
const LEAST: u64 = 1 << 20;

/// The part of all memory that fresh pages take, at most: one in so many; and how many they are, at most: they are written, so their moves are flushed at once.
const PART: u64 = 64;
const MOST: u64 = 1024;

/// Tends to memory if it is the worker's turn: one of them does after each so many things that it used, one after the other, as a thread of the
/// system runs now on one CPU and now on another.
#[inline]
pub(super) fn tend<T: Task>(task: &mut T, worker: Worker, (used, each): (u64, u64), promoted: u64) {
    if used.is_multiple_of(each) && (used / each) % worker.count as u64 == worker.index as u64 {
        task.tend(promoted);
    }
}

/// Numbers of chance for the worker of that `index`.
pub(super) fn random(seed: u64, index: usize) -> Random {
    Random::new((seed << 24) + index as u64 + 1)
}

/// Others for that worker.
pub(super) fn moments(seed: u64, index: usize) -> Random {
    random(seed, index + (1 << 23))
}

/// The nodes that `settings` ask for.
pub(super) fn tiers(settings: &Settings) -> Result<Tiers, ParamError> {
    let fast = settings.get(&FAST);
    if fast < LEAST {
        return Err(settings.bad(&FAST, "a size from 1M on"));
    }
    // One of the choices.
    let slow = fast / 10 * TENTHS[settings.get(&RATIO) as usize];
    Ok(Tiers { fast, slow: slow / PAGE_SIZE * PAGE_SIZE })
}

/// Pages that workers allocate one by one: each has its part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    pages: VirtRange,
    every: u64,
}

impl Fresh {
    /// The parts of `mine` of all `workers`, each of which uses `used` things.
    pub(super) fn map<T: Task>(
        task: &mut T,
        tiers: Tiers,
        (mine, workers): (u64, u64),
        used: u64,
    ) -> Result<Self, Failure> {
        let each = ((tiers.bytes() / PAGE_SIZE / PART).min(MOST) / workers).clamp(1, used);
        let pages = map(task, mine * each * PAGE_SIZE)?;
        // Each by a fault of its own.
        task.madvise(pages.start, pages.len(), Advice::Random)?;
        Ok(Self { pages, every: used / each })
    }

    /// The part of `worker`, which allocates when `random` says.
    pub(super) fn of(self, worker: Worker, random: Random) -> Own {
        let part = part(self.pages, worker);
        let mut own = Own { next: part.start, end: part.end, every: self.every, due: 0, random };
        own.due = own.within(0);
        own
    }
}

/// One worker's part of them. It allocates one in each so many uses, at a random moment: otherwise all workers, which use things at the same pace, would allocate at the same time.
pub(super) struct Own {
    next: u64,
    end: u64,
    every: u64,
    /// After how many uses the next is due.
    due: u64,
    random: Random,
}

impl Own {
    /// A moment in the so many uses after `begin`.
    fn within(&mut self, begin: u64) -> u64 {
        begin + 1 + self.random.below(self.every)
    }

    /// Allocates a page, if it is time after so many uses.
    #[inline]
    pub(super) fn after<T: Task>(&mut self, task: &mut T, used: u64) -> Result<(), Failure> {
        if used == self.due {
            self.due = self.within(used.next_multiple_of(self.every));
            if self.next < self.end {
                task.allocate(self.next, self.next)?;
                self.next += PAGE_SIZE;
            }
        }
        Ok(())
    }
}
