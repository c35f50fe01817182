//! `page_fault1_churn`: faults during unrelated changes of the same address space.
//!
//! Threads touch their part of one area, as in `pft`, while one of them maps and unmaps an
//! unrelated range: between its own faults (`churner=touching`, one pair per `every` pages), or
//! exclusively until the others are done (`churner=alone`). Under a lock of the whole space every
//! fault waits for every such call, although the faults and the calls are independent.

use super::touch::{map, part, sweep, touch, unmap, verify_all};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program, THREADS};
use crate::system::{Crew, Failure, Measured, Mode, Needs, Tally, Task, Worker};
use faultless::{Access, VirtRange};
use std::sync::atomic::{AtomicUsize, Ordering};

static SIZE: Param = Param {
    name: "size",
    kind: Kind::Size,
    default: 128 << 20,
    help: "memory of all threads together",
};
static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 20),
    default: 1,
    help: "number of times that the memory is touched",
};
static ACCESS: Param = Param {
    name: "access",
    kind: Kind::Choice(&["write", "read"]),
    default: 0,
    help: "type of access to the pages",
};
static CHURNER: Param = Param {
    name: "churner",
    kind: Kind::Choice(&["touching", "alone"]),
    default: 0,
    help: "the first thread maps and unmaps between touches, or only maps and unmaps",
};
static EVERY: Param = Param {
    name: "every",
    kind: Kind::Count(1, 1 << 30),
    default: 16,
    help: "pages that a touching churner touches per mapping and unmapping",
};
static CHURN_SIZE: Param = Param {
    name: "churn_size",
    kind: Kind::Size,
    default: 64 << 10,
    help: "size of the unrelated range",
};
static CHURN_TOUCH: Param = Param {
    name: "churn_touch",
    kind: Kind::Choice(&["no", "yes"]),
    default: 0,
    help: "whether a page of the unrelated range is written, so that its unmapping must flush TLBs",
};

/// `page_fault1_churn`: threads touch memory while one of them maps and unmaps unrelated ranges.
#[derive(Clone, Copy, Debug)]
pub struct PageFault1Churn {
    size: u64,
    passes: Passes,
    access: Access,
    churner_alone: bool,
    every: u64,
    churn_size: u64,
    churn_touch: bool,
}

/// The data shared by the threads.
#[derive(Debug)]
pub struct State {
    area: VirtRange,
    /// The number of touching threads that are done: written once by each, and read by an exclusive
    /// churner.
    done: AtomicUsize,
}

impl PageFault1Churn {
    /// The name of the extra result with the pairs of mapping and unmapping the unrelated range.
    pub const PAIRS: &'static str = "churn_pairs";

    /// Maps and unmaps the unrelated range.
    #[inline]
    fn churn<T: Task>(&self, task: &mut T) -> Result<(), Failure> {
        let range = map(task, self.churn_size)?;
        if self.churn_touch {
            touch(task, range.start, Access::Write, 0)?;
        }
        unmap(task, range)
    }

    /// Touches `part`. If `churns`, maps and unmaps the unrelated range once per `every` pages.
    fn touch<T: Task>(
        &self,
        task: &mut T,
        part: VirtRange,
        churns: bool,
    ) -> Result<Tally, Failure> {
        let mut extra = 0;
        let (operations, _) = sweep(task, part, self.access, self.passes, |task, touched| {
            if churns && touched % self.every == 0 {
                self.churn(task)?;
                extra += 1;
            }
            Ok(())
        })?;
        Ok(Tally { operations, extra })
    }
}

// SAFETY: workers touch their own parts of the area of `prepare`, which stays mapped, and ranges
// that they map and unmap themselves.
unsafe impl Program for PageFault1Churn {
    const NAME: &'static str = "page_fault1_churn";
    const SUMMARY: &'static str =
        "threads touch memory while one thread maps and unmaps unrelated ranges";
    const UNIT: &'static str = "pages";
    const PARAMS: &'static [&'static Param] =
        &[&SIZE, &PASSES, &ACCESS, &CHURNER, &EVERY, &CHURN_SIZE, &CHURN_TOUCH];
    const MODES: &'static [Mode] = &[Mode::Threads];

    type State = State;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        let churner_alone = settings.get(&CHURNER) == 1;
        if churner_alone && settings.get(&THREADS) < 2 {
            return Err(settings.bad(&CHURNER, "requires threads=2 or more"));
        }
        Ok(Self {
            size: settings.get(&SIZE),
            passes: Passes::new(settings, &PASSES),
            access: if settings.get(&ACCESS) == 0 { Access::Write } else { Access::Read },
            churner_alone,
            every: settings.get(&EVERY),
            churn_size: settings.get(&CHURN_SIZE),
            churn_touch: settings.get(&CHURN_TOUCH) == 1,
        })
    }

    fn needs(&self, _: &Crew) -> Needs {
        let all = self.size.saturating_add(self.churn_size);
        match self.access {
            Access::Write => Needs::written(all),
            _ => Needs::mapped(all),
        }
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<State, Failure> {
        Ok(State { area: map(task, self.size)?, done: AtomicUsize::new(0) })
    }

    fn work<T: Task>(&self, task: &mut T, state: &State, worker: Worker) -> Result<Tally, Failure> {
        if !self.churner_alone {
            return self.touch(task, part(state.area, worker), worker.index == 0);
        }
        let touching = worker.count - 1;
        let Some(index) = worker.index.checked_sub(1) else {
            let mut tally = Tally::default();
            while state.done.load(Ordering::Relaxed) < touching {
                self.churn(task)?;
                tally.extra += 1;
            }
            return Ok(tally);
        };
        let tally = self.touch(task, part(state.area, Worker { index, count: touching }), false);
        // Also on failure, or the churner would never stop.
        state.done.fetch_add(1, Ordering::Relaxed);
        tally
    }

    fn finish<T: Task>(&self, task: &mut T, state: &State, of: Worker) -> Result<(), Failure> {
        verify_all(task, part(state.area, of), self.access)
    }

    fn extras(&self, measured: &Measured) -> Vec<(&'static str, f64)> {
        vec![(Self::PAIRS, measured.tally().extra as f64)]
    }
}
