//! `pft`: the page fault test of Christoph Lameter (2004).
//!
//! Threads touch their part of some gigabytes of anonymous memory, one write per page, and the
//! result is the rate of pages. The original prints a row
//! `Gb Rep Threads CLine User System Wall flt/cpu/s fault/wsec`, as does
//! [`Outcome::pft_row`](crate::Outcome::pft_row), whose head shows pages: with prefault a fault
//! serves several.
//!
//! Here the memory is mapped before the clock starts, and unmapped by the end of the process, so
//! one repetition measures only faults. Between repetitions each thread frees its part with
//! `MADV_DONTNEED`, which is measured too.

use super::touch::{map, part, sweep, verify_all};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Crew, Failure, Measured, Needs, Tally, Task, Worker};
use faultless::{Access, VirtRange};

static SIZE: Param = Param {
    name: "size",
    kind: Kind::Size,
    default: 128 << 20,
    help: "memory of all threads together",
};
static REPETITIONS: Param = Param {
    name: "repetitions",
    kind: Kind::Count(1, 1 << 20),
    default: 1,
    help: "number of times that the memory is touched",
};

/// `pft`: threads each write their part of one large area.
#[derive(Clone, Copy, Debug)]
pub struct Pft {
    size: u64,
    passes: Passes,
}

impl Pft {
    /// The name of the extra result with the size of the memory, in GiB.
    pub const GIGABYTES: &'static str = "gigabytes";
    /// The name of the extra result with the repetitions of the first thread.
    pub const REPETITIONS: &'static str = "repetitions";
    /// The number of written cache lines per page.
    pub const CACHE_LINES: u32 = 1;
}

// SAFETY: every address lies in the area of `prepare`, which stays; each worker keeps to its part.
unsafe impl Program for Pft {
    const NAME: &'static str = "pft";
    const SUMMARY: &'static str =
        "page fault test: threads each write their part of one large area";
    const UNIT: &'static str = "pages";
    const PARAMS: &'static [&'static Param] = &[&SIZE, &REPETITIONS];

    type State = VirtRange;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        Ok(Self { size: settings.get(&SIZE), passes: Passes::new(settings, &REPETITIONS) })
    }

    fn needs(&self, _: &Crew) -> Needs {
        Needs::written(self.size)
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<VirtRange, Failure> {
        map(task, self.size)
    }

    fn work<T: Task>(
        &self,
        task: &mut T,
        area: &VirtRange,
        worker: Worker,
    ) -> Result<Tally, Failure> {
        let (operations, extra) =
            sweep(task, part(*area, worker), Access::Write, self.passes, |_, _| Ok(()))?;
        Ok(Tally { operations, extra })
    }

    fn finish<T: Task>(&self, task: &mut T, area: &VirtRange, of: Worker) -> Result<(), Failure> {
        verify_all(task, part(*area, of), Access::Write)
    }

    fn extras(&self, measured: &Measured) -> Vec<(&'static str, f64)> {
        let gigabytes = self.size as f64 / (1u64 << 30) as f64;
        let repetitions = measured.workers.first().map_or(0, |worker| worker.tally.extra);
        vec![(Self::GIGABYTES, gigabytes), (Self::REPETITIONS, repetitions as f64)]
    }
}
