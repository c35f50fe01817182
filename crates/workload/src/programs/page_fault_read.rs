//! `page_fault_read`: read faults only.
//!
//! Like `pft`, with loads: every page of untouched anonymous memory is the shared zero page, so no
//! page is zeroed, and the cost is the entry and exit of the fault. This case shows the effect of a
//! lock most clearly. (will-it-scale has no such case; its `page_fault1` zeroes a page with every
//! fault.)

use super::touch::{map, part, sweep, verify_all};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Crew, Failure, Needs, Tally, Task, Worker};
use faultless::{Access, VirtRange};

static SIZE: Param = Param {
    name: "size",
    kind: Kind::Size,
    default: 256 << 20,
    help: "memory of all threads together",
};
static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 20),
    default: 1,
    help: "number of times that the memory is read",
};

/// `page_fault_read`: threads each read their part of one large untouched area.
#[derive(Clone, Copy, Debug)]
pub struct PageFaultRead {
    size: u64,
    passes: Passes,
}

// SAFETY: every address lies in the area of `prepare`, which stays; nothing is stored.
unsafe impl Program for PageFaultRead {
    const NAME: &'static str = "page_fault_read";
    const SUMMARY: &'static str = "threads each read their part of one large untouched area";
    const UNIT: &'static str = "pages";
    const PARAMS: &'static [&'static Param] = &[&SIZE, &PASSES];

    type State = VirtRange;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        Ok(Self { size: settings.get(&SIZE), passes: Passes::new(settings, &PASSES) })
    }

    fn needs(&self, _: &Crew) -> Needs {
        Needs::mapped(self.size)
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
            sweep(task, part(*area, worker), Access::Read, self.passes, |_, _| Ok(()))?;
        Ok(Tally { operations, extra })
    }

    fn finish<T: Task>(&self, task: &mut T, area: &VirtRange, of: Worker) -> Result<(), Failure> {
        verify_all(task, part(*area, of), Access::Read)
    }
}
