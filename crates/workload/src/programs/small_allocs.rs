//! `small_allocs`: the case `small-allocs-mt` of vm-scalability.
//!
//! The original runs `usemem -t CPUS --readonly --unit 10-PAGES`: each thread maps small
//! areas, one after the other, and reads every page. No page is written, and no area is unmapped
//! before the end. No area therefore needs reverse-map state, and Linux became three times as fast
//! here when read faults stopped preparing this state. With more than one pass, each thread unmaps
//! its areas between passes, one by one.

use super::touch::{map, touch_all, unmap};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Crew, Failure, Measured, Needs, Tally, Task, Worker};
use faultless::Access;

static SIZE: Param =
    Param { name: "size", kind: Kind::Size, default: 80 << 20, help: "memory of one thread" };
static UNIT: Param =
    Param { name: "unit", kind: Kind::Size, default: 40 << 10, help: "size of one small area" };
static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 20),
    default: 1,
    help: "number of times that the areas are mapped and read",
};

/// `small_allocs`: map small areas and read them.
#[derive(Clone, Copy, Debug)]
pub struct SmallAllocs {
    areas: usize,
    unit: u64,
    passes: Passes,
}

impl SmallAllocs {
    /// The name of the extra result with the number of mapped areas.
    pub const AREAS: &'static str = "areas";
}

// SAFETY: each worker loads only from areas that it mapped itself and has not unmapped.
unsafe impl Program for SmallAllocs {
    const NAME: &'static str = "small_allocs";
    const SUMMARY: &'static str =
        "threads map many small areas and read every page, without writes";
    const UNIT: &'static str = "pages";
    const PARAMS: &'static [&'static Param] = &[&SIZE, &UNIT, &PASSES];

    type State = ();

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        let (size, unit) = (settings.get(&SIZE), settings.get(&UNIT));
        let areas = size / unit;
        if areas == 0 {
            return Err(settings.bad(&UNIT, "at most the size of all areas together"));
        }
        if areas > 1 << 24 {
            return Err(settings.bad(&UNIT, "at least one 16-millionth of the size"));
        }
        Ok(Self { areas: areas as usize, unit, passes: Passes::new(settings, &PASSES) })
    }

    fn needs(&self, _: &Crew) -> Needs {
        Needs::mapped(self.unit)
    }

    fn prepare<T: Task>(&self, _: &mut T) -> Result<(), Failure> {
        Ok(())
    }

    fn work<T: Task>(&self, task: &mut T, (): &(), _: Worker) -> Result<Tally, Failure> {
        let mut mapped = Vec::with_capacity(self.areas);
        let mut tally = Tally::default();
        let mut passes = 0;
        while self.passes.more(task, passes) {
            for area in mapped.drain(..) {
                unmap(task, area)?;
            }
            for _ in 0..self.areas {
                let area = map(task, self.unit)?;
                mapped.push(area);
                tally.operations += touch_all(task, area, Access::Read, passes)?;
                tally.extra += 1;
            }
            passes += 1;
        }
        Ok(tally)
    }

    fn extras(&self, measured: &Measured) -> Vec<(&'static str, f64)> {
        vec![(Self::AREAS, measured.tally().extra as f64)]
    }
}
