//! `xsbench`: random lookups in a table that exceeds the fast memory node.
//!
//! Modelled on XSBench, the proxy of a Monte Carlo neutron transport code: threads look up energies
//! in a large table of cross sections. Each lookup bisects the table, so all lookups use some
//! common pages, and then gathers from random places. The table takes three quarters of both nodes'
//! memory. It is filled first, and then read (`access=read`), or each lookup stores to the gathered
//! places (`access=write`).
//!
//! The workers' CPUs take turns with the work of a system thread: they make room in the fast node,
//! and promote used pages.

use super::tiered::{FAST, Fresh, RATIO, SEED, background, moments, random, tiers};
use super::touch::map;
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program, THREADS};
use crate::system::{Crew, Failure, Mode, Needs, Tally, Task, Tiers, Worker};
use faultless::{PAGE_SIZE, Prot, VirtRange};

static LOOKUPS: Param = Param {
    name: "lookups",
    kind: Kind::Count(1, 1 << 40),
    default: 20_000,
    help: "lookups of one thread in a pass",
};
static PASSES: Param =
    Param { name: "passes", kind: Kind::Count(1, 1 << 30), default: 1, help: "number of passes" };
static ACCESS: Param = Param {
    name: "access",
    kind: Kind::Choice(&["read", "write"]),
    default: 0,
    help: "lookups only read the table, or also write to it",
};

/// Steps of a bisection, and places gathered by a lookup.
const STEPS: u32 = 8;
const GATHERED: u64 = 5;
/// Lookups of a worker between two calls of `background` on any CPU, and the pages promoted per
/// call.
const BACKGROUND_EACH: u64 = 64;
const PROMOTED: u64 = 32;

/// Random lookups in a large table.
#[derive(Clone, Copy, Debug)]
pub struct XsBench {
    tiers: Tiers,
    threads: u64,
    lookups: u64,
    passes: Passes,
    writes: bool,
    seed: u64,
}

/// The data shared by the threads.
#[derive(Clone, Copy, Debug)]
pub struct State {
    table: VirtRange,
    fresh: Fresh,
}

impl XsBench {
    /// Returns the pages of the table.
    const fn pages(&self) -> u64 {
        self.tiers.bytes() / PAGE_SIZE * 3 / 4
    }

    /// Reads the page with this `number`, whose first word is its address.
    fn look<T: Task>(&self, task: &mut T, table: VirtRange, number: u64) -> Result<(), Failure> {
        let page = table.start + number * PAGE_SIZE;
        Failure::check("the first word of a page of the table", page, page, task.load(page)?)
    }
}

// SAFETY: workers load from the table of `prepare`, which stays mapped, store to their own words of
// the table, and store to their own parts of the fresh pages.
unsafe impl Program for XsBench {
    const NAME: &'static str = "xsbench";
    const SUMMARY: &'static str =
        "threads read random places of a table that is larger than fast memory";
    const UNIT: &'static str = "lookups";
    const PARAMS: &'static [&'static Param] = &[&FAST, &RATIO, &LOOKUPS, &PASSES, &ACCESS, &SEED];
    const MODES: &'static [Mode] = &[Mode::Threads];

    type State = State;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        Ok(Self {
            tiers: tiers(settings)?,
            threads: settings.get(&THREADS),
            lookups: settings.get(&LOOKUPS),
            passes: Passes::new(settings, &PASSES),
            writes: settings.get(&ACCESS) == 1,
            seed: settings.get(&SEED),
        })
    }

    fn needs(&self, _: &Crew) -> Needs {
        let all = self.tiers.bytes();
        Needs { written: all, largest: all, tiers: Some(self.tiers) }
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<State, Failure> {
        let table = map(task, self.pages() * PAGE_SIZE)?;
        for page in (table.start..table.end).step_by(PAGE_SIZE as usize) {
            task.store(page, page)?;
        }
        if !self.writes {
            task.mprotect(table.start, table.len(), Prot::READ)?;
        }
        Ok(State {
            table,
            fresh: Fresh::map(task, self.tiers, (self.threads, self.threads), self.lookups)?,
        })
    }

    fn work<T: Task>(&self, task: &mut T, state: &State, worker: Worker) -> Result<Tally, Failure> {
        let mut random = random(self.seed, worker.index);
        let mut own = state.fresh.of(worker, moments(self.seed, worker.index));
        let mut tally = Tally::default();
        // Each worker has a word in each page. With more workers than words, some have no word, and
        // only read.
        let word = 8 * (worker.index as u64 + 1);
        let writes = self.writes && word < PAGE_SIZE;
        while self.passes.more(task, tally.extra) {
            for _ in 0..self.lookups {
                let wanted = random.below(self.pages());
                let (mut low, mut high) = (0_u64, self.pages());
                for _ in 0..STEPS {
                    let middle = low.midpoint(high);
                    self.look(task, state.table, middle)?;
                    if middle <= wanted { low = middle } else { high = middle }
                }
                for _ in 0..GATHERED {
                    let number = random.below(self.pages());
                    self.look(task, state.table, number)?;
                    if writes {
                        let at = state.table.start + number * PAGE_SIZE + word;
                        let value = task.load(at)?;
                        task.store(at, value + 1)?;
                    }
                }
                tally.operations += 1;
                own.after(task, tally.operations)?;
                background(task, worker, (tally.operations, BACKGROUND_EACH), PROMOTED);
            }
            tally.extra += 1;
        }
        Ok(tally)
    }

    fn finish<T: Task>(&self, task: &mut T, state: &State, _: Worker) -> Result<(), Failure> {
        (0..self.pages()).try_for_each(|number| self.look(task, state.table, number))
    }
}
