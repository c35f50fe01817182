//! `page_fault2` and `page_fault3` of will-it-scale: page faults of a private, and of a shared,
//! file mapping.
//!
//! Each task has a temporary file of 128 MiB, a hole. It repeatedly maps the file, writes to every
//! page, and unmaps the file; a page is an iteration. A write to a private mapping copies the
//! file's page. A write to a shared mapping changes it. Here the size is a parameter. Checks
//! confirm that writes to a private mapping did not change the file, and that writes to a shared
//! mapping did.

use super::touch::{probe, unmap};
use crate::file::{Contents, FileSpec};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Crew, Failure, Needs, Tally, Task, Worker};
use faultless::{MapFlags, PAGE_SIZE, Prot, VirtRange};

static SIZE: Param =
    Param { name: "size", kind: Kind::Size, default: 32 << 20, help: "file of one thread" };
static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 30),
    default: 4,
    help: "number of times that the file is mapped, written and unmapped",
};

/// Map a file, write every page, unmap.
#[derive(Clone, Copy, Debug)]
pub struct PageFaultFile<const SHARED: bool> {
    size: u64,
    passes: Passes,
}

/// `page_fault2`: in a private mapping.
pub type PageFault2 = PageFaultFile<false>;
/// `page_fault3`: in a shared mapping.
pub type PageFault3 = PageFaultFile<true>;

/// Returns the value stored to the page at `offset` in a file: never 0, the contents of the file's
/// own pages.
const fn mark(offset: u64) -> u64 {
    offset | 1
}

impl<const SHARED: bool> PageFaultFile<SHARED> {
    fn map<T: Task>(&self, task: &mut T, file: usize, prot: Prot) -> Result<VirtRange, Failure> {
        let flags = if SHARED { MapFlags::SHARED } else { MapFlags::PRIVATE };
        let start = task.mmap_file(file, (None, self.size), prot, flags, 0)?;
        Ok(VirtRange::new(start, start + self.size))
    }
}

// SAFETY: every address lies in the area just mapped by the same worker, and each worker has a
// separate file.
unsafe impl<const SHARED: bool> Program for PageFaultFile<SHARED> {
    const NAME: &'static str = if SHARED { "page_fault3" } else { "page_fault2" };
    const SUMMARY: &'static str = if SHARED {
        "threads map a file shared, write every page and unmap the file"
    } else {
        "threads map a file private, write every page and unmap the file"
    };
    const UNIT: &'static str = "pages";
    const PARAMS: &'static [&'static Param] = &[&SIZE, &PASSES];

    type State = ();

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        Ok(Self { size: settings.get(&SIZE), passes: Passes::new(settings, &PASSES) })
    }

    fn needs(&self, crew: &Crew) -> Needs {
        // The pages of the file, and copies of them.
        let each = self.size.saturating_mul(if SHARED { 1 } else { 2 });
        Needs {
            written: each.saturating_mul(crew.workers as u64),
            largest: self.size,
            ..Needs::default()
        }
    }

    fn files(&self, crew: &Crew) -> Vec<FileSpec> {
        vec![FileSpec { bytes: self.size, contents: Contents::Zeros }; crew.workers]
    }

    fn prepare<T: Task>(&self, _: &mut T) -> Result<(), Failure> {
        Ok(())
    }

    fn work<T: Task>(&self, task: &mut T, (): &(), worker: Worker) -> Result<Tally, Failure> {
        let mut tally = Tally::default();
        while self.passes.more(task, tally.extra) {
            let area = self.map(task, worker.index, Prot::READ | Prot::WRITE)?;
            let mut page = area.start;
            while page < area.end {
                task.store(page, mark(page - area.start))?;
                probe(task, page, tally.extra)?;
                page += PAGE_SIZE;
            }
            tally.operations += area.pages();
            for page in [area.start, area.end - PAGE_SIZE] {
                let expected = mark(page - area.start);
                Failure::check(
                    "the first word of a stored page",
                    page,
                    expected,
                    task.load(page)?,
                )?;
            }
            unmap(task, area)?;
            tally.extra += 1;
        }
        Ok(tally)
    }

    fn finish<T: Task>(&self, task: &mut T, (): &(), of: Worker) -> Result<(), Failure> {
        let area = self.map(task, of.index, Prot::READ)?;
        for page in (area.start..area.end).step_by(PAGE_SIZE as usize) {
            let expected = if SHARED { mark(page - area.start) } else { 0 };
            Failure::check(
                "the first word of a page of the file",
                page,
                expected,
                task.load(page)?,
            )?;
        }
        unmap(task, area)
    }
}
