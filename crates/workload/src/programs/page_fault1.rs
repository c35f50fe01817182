//! `page_fault1` of will-it-scale: anonymous memory page fault.
//!
//! Each task repeatedly maps 128 MiB of private anonymous memory, writes to every page, and unmaps
//! the memory; a page is an iteration. Here the size is a parameter.

use super::touch::{map, touch_all, unmap, verify};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Crew, Failure, Needs, Tally, Task, Worker};
use faultless::{Access, PAGE_SIZE};

static SIZE: Param =
    Param { name: "size", kind: Kind::Size, default: 32 << 20, help: "memory of one thread" };
static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 30),
    default: 4,
    help: "number of times that the memory is mapped, written and unmapped",
};

/// `page_fault1`: map, write every page, unmap.
#[derive(Clone, Copy, Debug)]
pub struct PageFault1 {
    size: u64,
    passes: Passes,
}

// SAFETY: every address lies in the area that the same worker mapped in the same pass.
unsafe impl Program for PageFault1 {
    const NAME: &'static str = "page_fault1";
    const SUMMARY: &'static str = "threads map an area, write every page and unmap the area";
    const UNIT: &'static str = "pages";
    const PARAMS: &'static [&'static Param] = &[&SIZE, &PASSES];

    type State = ();

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        Ok(Self { size: settings.get(&SIZE), passes: Passes::new(settings, &PASSES) })
    }

    fn needs(&self, crew: &Crew) -> Needs {
        Needs::written(self.size.saturating_mul(crew.workers as u64))
    }

    fn prepare<T: Task>(&self, _: &mut T) -> Result<(), Failure> {
        Ok(())
    }

    fn work<T: Task>(&self, task: &mut T, (): &(), _: Worker) -> Result<Tally, Failure> {
        let mut tally = Tally::default();
        while self.passes.more(task, tally.extra) {
            let area = map(task, self.size)?;
            tally.operations += touch_all(task, area, Access::Write, tally.extra)?;
            verify(task, area.start, Access::Write)?;
            verify(task, area.end - PAGE_SIZE, Access::Write)?;
            unmap(task, area)?;
            tally.extra += 1;
        }
        Ok(tally)
    }
}
