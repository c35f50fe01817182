//! `forks`: short-lived single-threaded processes, as in a kernel build.
//!
//! A build is a shell or make, single-threaded, with some megabytes of memory, which forks
//! repeatedly. Each child reads some inherited pages, writes to some (a copy each), maps and writes
//! new memory, and exits. The parent then writes to pages that it no longer shares. No thread ever
//! shares a space with another, so this shows the cost for single-threaded programs of
//! optimisations for threads. (There is no `exec`, whose work is files.) Workers are independent
//! parents of this kind, as with `make -j`.

use super::touch::{map, touch_all, unmap, verify};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Child, Crew, Failure, Measured, Mode, Needs, Tally, Task, Worker};
use faultless::{Access, PAGE_SIZE, VirtRange};

static IMAGE: Param = Param {
    name: "image",
    kind: Kind::Size,
    default: 4 << 20,
    help: "touched memory of the parent",
};
static DIRTY: Param = Param {
    name: "dirty",
    kind: Kind::Count(0, 1 << 24),
    default: 48,
    help: "inherited pages that a child writes to",
};
static FRESH: Param = Param {
    name: "fresh",
    kind: Kind::Count(1, 1 << 24),
    default: 128,
    help: "new pages that a child writes to",
};
static PROCESSES: Param = Param {
    name: "processes",
    kind: Kind::Count(1, 1 << 30),
    default: 150,
    help: "children that one parent forks",
};

/// `forks`: fork, touch, exit.
#[derive(Clone, Copy, Debug)]
pub struct Forks {
    image: u64,
    dirty: u64,
    fresh: u64,
    passes: Passes,
}

/// The offsets in its pages of the marks of a child, and of the parent.
const CHILDS: u64 = 8;
const PARENTS: u64 = 16;

impl Forks {
    /// The name of the extra result with the pages touched first by children: copied, or new.
    pub const PAGES: &'static str = "pages_touched";
}

/// A child, and its data.
struct Short {
    image: VirtRange,
    dirty: u64,
    fresh: u64,
    number: u64,
}

impl Child for Short {
    fn run<T: Task>(self, task: &mut T) -> Result<(), Failure> {
        let Self { image, fresh, number, .. } = self;
        let dirty = image.start + self.dirty * PAGE_SIZE;
        for page in (image.start..image.end).step_by(PAGE_SIZE as usize) {
            verify(task, page, Access::Write)?;
            Failure::check("a sibling's mark", page + CHILDS, 0, task.load(page + CHILDS)?)?;
            if page < dirty {
                task.store(page + CHILDS, number)?;
                verify(task, page, Access::Write)?;
            }
        }
        let own = map(task, fresh * PAGE_SIZE)?;
        touch_all(task, own, Access::Write, number)?;
        verify(task, own.end - PAGE_SIZE, Access::Write)?;
        unmap(task, own)
    }
}

// SAFETY: every address lies in the image of `prepare`, which stays mapped, or in an area just
// mapped by the same child. Processes have one thread.
unsafe impl Program for Forks {
    const NAME: &'static str = "forks";
    const SUMMARY: &'static str =
        "single-threaded processes fork, touch and exit, as in a kernel build";
    const UNIT: &'static str = "processes";
    const PARAMS: &'static [&'static Param] = &[&IMAGE, &DIRTY, &FRESH, &PROCESSES];
    const MODES: &'static [Mode] = &[Mode::Processes];

    type State = VirtRange;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        let (image, dirty) = (settings.get(&IMAGE), settings.get(&DIRTY));
        if dirty > image / PAGE_SIZE {
            return Err(settings.bad(&DIRTY, "at most the pages of the image"));
        }
        let passes = Passes::new(settings, &PROCESSES);
        Ok(Self { image, dirty, fresh: settings.get(&FRESH), passes })
    }

    fn needs(&self, crew: &Crew) -> Needs {
        let one = self.image + (self.dirty + self.fresh) * PAGE_SIZE;
        Needs::written(one.saturating_mul(crew.workers as u64))
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<VirtRange, Failure> {
        let image = map(task, self.image)?;
        touch_all(task, image, Access::Write, 0)?;
        Ok(image)
    }

    fn work<T: Task>(&self, task: &mut T, image: &VirtRange, _: Worker) -> Result<Tally, Failure> {
        let mut processes = 0;
        while self.passes.more(task, processes) {
            let (dirty, fresh, number) = (self.dirty, self.fresh, processes + 1);
            task.fork(Short { image: *image, dirty, fresh, number })?;
            let page = image.start;
            Failure::check("the child's mark", page + CHILDS, 0, task.load(page + CHILDS)?)?;
            Failure::check(
                "the parent's mark",
                page + PARENTS,
                processes,
                task.load(page + PARENTS)?,
            )?;
            processes += 1;
            task.store(page + PARENTS, processes)?;
        }
        Ok(Tally { operations: processes, extra: processes * (self.dirty + self.fresh) })
    }

    fn finish<T: Task>(&self, task: &mut T, image: &VirtRange, _: Worker) -> Result<(), Failure> {
        for page in (image.start..image.end).step_by(PAGE_SIZE as usize) {
            verify(task, page, Access::Write)?;
            Failure::check("the child's mark", page + CHILDS, 0, task.load(page + CHILDS)?)?;
        }
        Ok(())
    }

    fn extras(&self, measured: &Measured) -> Vec<(&'static str, f64)> {
        vec![(Self::PAGES, measured.tally().extra as f64)]
    }
}
