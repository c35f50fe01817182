//! Common parts of programs that use more memory than the fast node has: the sizes of the nodes,
//! and fresh pages allocated during the run.

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
/// The ratio of the fast node to the slow node.
pub(super) static RATIO: Param = Param {
    name: "ratio",
    kind: Kind::Choice(&["1:1", "1:2.3", "1:4", "1:8", "1:99"]),
    default: 2,
    help: "memory of the fast node to memory of the slow node",
};
/// The number of another run of the same kind.
pub(super) static SEED: Param = Param {
    name: "seed",
    kind: Kind::Count(0, 1 << 32),
    default: 0,
    help: "seed of the random choices: places that are read, or first pages of processes",
};
/// The size of the slow node in tenths of the fast node, by the choices of [`RATIO`].
const TENTHS: [u64; 5] = [10, 23, 40, 80, 990];
/// The smallest size of a node, which leaves room for the reserves of CPUs.
const LEAST: u64 = 1 << 20;

/// The divisor of all memory that gives the largest size of the fresh pages. `MOST` is their
/// largest number: they are written, so their moves are flushed at once.
const PART: u64 = 64;
const MOST: u64 = 1024;

/// Does the background work if it is the worker's turn. The workers take turns, after every `each`
/// uses, like a system thread that runs on changing CPUs.
#[inline]
pub(super) fn background<T: Task>(
    task: &mut T,
    worker: Worker,
    (used, each): (u64, u64),
    promoted: u64,
) {
    if used.is_multiple_of(each) && (used / each) % worker.count as u64 == worker.index as u64 {
        task.background(promoted);
    }
}

/// Returns random numbers for the worker with this `index`.
pub(super) fn random(seed: u64, index: usize) -> Random {
    Random::new((seed << 24) + index as u64 + 1)
}

/// Returns different random numbers for this worker.
pub(super) fn moments(seed: u64, index: usize) -> Random {
    random(seed, index + (1 << 23))
}

/// Returns the nodes of `settings`.
pub(super) fn tiers(settings: &Settings) -> Result<Tiers, ParamError> {
    let fast = settings.get(&FAST);
    if fast < LEAST {
        return Err(settings.bad(&FAST, "a size from 1M on"));
    }
    // One of the choices.
    let slow = fast / 10 * TENTHS[settings.get(&RATIO) as usize];
    Ok(Tiers { fast, slow: slow / PAGE_SIZE * PAGE_SIZE })
}

/// Pages allocated one by one by the workers, with a part for each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    pages: VirtRange,
    every: u64,
}

impl Fresh {
    /// Maps the parts of `mine` of all `workers`, each of which makes `used` uses.
    pub(super) fn map<T: Task>(
        task: &mut T,
        tiers: Tiers,
        (mine, workers): (u64, u64),
        used: u64,
    ) -> Result<Self, Failure> {
        let each = ((tiers.bytes() / PAGE_SIZE / PART).min(MOST) / workers).clamp(1, used);
        let pages = map(task, mine * each * PAGE_SIZE)?;
        // Each page has its own fault.
        task.madvise(pages.start, pages.len(), Advice::Random)?;
        Ok(Self { pages, every: used / each })
    }

    /// Returns the part of `worker`, which allocates at times chosen by `random`.
    pub(super) fn of(self, worker: Worker, random: Random) -> Own {
        let part = part(self.pages, worker);
        let mut own = Own { next: part.start, end: part.end, every: self.every, due: 0, random };
        own.due = own.within(0);
        own
    }
}

/// One worker's part of the pages. Allocates one page per `every` uses, at a random time: otherwise
/// all workers, which work at the same pace, would allocate at the same time.
pub(super) struct Own {
    next: u64,
    end: u64,
    every: u64,
    /// The number of uses after which the next allocation is due.
    due: u64,
    random: Random,
}

impl Own {
    /// Returns a random time in the `every` uses after `begin`.
    fn within(&mut self, begin: u64) -> u64 {
        begin + 1 + self.random.below(self.every)
    }

    /// Allocates a page if an allocation is due after `used` uses.
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
