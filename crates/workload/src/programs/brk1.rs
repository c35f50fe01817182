//! `brk1` of will-it-scale: brk increase and decrease of one page.
//!
//! Each task queries the program break once, then repeatedly raises the break by a page and lowers
//! it again; each of the two calls is an iteration. Threads all move the same break between the
//! same two addresses, so some calls have no effect, as in the original.

use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Crew, Failure, Needs, Tally, Task, Worker};
use faultless::PAGE_SIZE;

static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 40),
    default: 30_000,
    help: "number of times that the break is raised and lowered",
};

/// `brk1`: raise the program break by a page, and lower it.
#[derive(Clone, Copy, Debug)]
pub struct Brk1 {
    passes: Passes,
}

// SAFETY: `work` accesses no memory, and every pass restores the break of `prepare`.
unsafe impl Program for Brk1 {
    const NAME: &'static str = "brk1";
    const SUMMARY: &'static str = "threads raise the program break by one page and lower it";
    const UNIT: &'static str = "calls";
    const PARAMS: &'static [&'static Param] = &[&PASSES];

    type State = u64;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        Ok(Self { passes: Passes::new(settings, &PASSES) })
    }

    fn needs(&self, crew: &Crew) -> Needs {
        // A page above the break of each process.
        Needs::written(crew.workers as u64 * PAGE_SIZE)
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<u64, Failure> {
        Ok(task.brk(0))
    }

    fn work<T: Task>(&self, task: &mut T, low: &u64, _: Worker) -> Result<Tally, Failure> {
        let (low, high) = (*low, *low + PAGE_SIZE);
        let mut done = 0;
        while self.passes.more(task, done) {
            Failure::check("the raised break", high, high, task.brk(high))?;
            Failure::check("the lowered break", low, low, task.brk(low))?;
            done += 1;
        }
        Ok(Tally { operations: 2 * done, extra: 0 })
    }

    fn finish<T: Task>(&self, task: &mut T, low: &u64, _: Worker) -> Result<(), Failure> {
        // The memory of a raised break is accessible and zero, regardless of earlier contents.
        let page = faultless::page_up(*low).unwrap_or(*low);
        let high = page + PAGE_SIZE;
        Failure::check("the raised break", high, high, task.brk(high))?;
        Failure::check("a word above the old break", page, 0, task.load(page)?)?;
        task.store(page, 1)?;
        Failure::check("the lowered break", *low, *low, task.brk(*low))?;
        Failure::check("the raised break", high, high, task.brk(high))?;
        Failure::check("a word above the old break", page, 0, task.load(page)?)?;
        Failure::check("the lowered break", *low, *low, task.brk(*low))
    }
}
