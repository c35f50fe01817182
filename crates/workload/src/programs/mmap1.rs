//! `mmap1` of will-it-scale: anonymous mmap and munmap of 128 MiB.
//!
//! Each task maps 128 MiB of private anonymous memory and unmaps the untouched memory; a pair is an
//! iteration. Threads work in the same address space, at addresses chosen by the system, and share
//! only the space.

use super::touch::{touch, unmap, verify};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Crew, Failure, Needs, Tally, Task, Worker};
use faultless::{Access, MapFlags, PAGE_SIZE, Prot, VirtRange, is_page_aligned};

static SIZE: Param =
    Param { name: "size", kind: Kind::Size, default: 128 << 20, help: "size of the area" };
static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 40),
    default: 20_000,
    help: "number of times that the area is mapped and unmapped",
};

/// The size up to which memory is reserved. A system may refuse a mapping larger than its memory,
/// so larger mappings have `MAP_NORESERVE`.
const RESERVED: u64 = 1 << 30;

fn map<T: Task>(task: &mut T, len: u64) -> Result<VirtRange, Failure> {
    let mut flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    flags.set(MapFlags::NORESERVE, len > RESERVED);
    let start = task.mmap(None, len, Prot::READ | Prot::WRITE, flags)?;
    Ok(VirtRange::new(start, start + len))
}

/// `mmap1`: map and unmap, untouched.
#[derive(Clone, Copy, Debug)]
pub struct Mmap1 {
    size: u64,
    passes: Passes,
}

// SAFETY: only `finish` touches memory: pages of an area that it has just mapped.
unsafe impl Program for Mmap1 {
    const NAME: &'static str = "mmap1";
    const SUMMARY: &'static str = "threads map and unmap an area without touching it";
    const UNIT: &'static str = "pairs";
    const PARAMS: &'static [&'static Param] = &[&SIZE, &PASSES];

    type State = ();

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        Ok(Self { size: settings.get(&SIZE), passes: Passes::new(settings, &PASSES) })
    }

    fn needs(&self, _: &Crew) -> Needs {
        Needs::mapped(self.size.min(RESERVED))
    }

    fn prepare<T: Task>(&self, _: &mut T) -> Result<(), Failure> {
        Ok(())
    }

    fn work<T: Task>(&self, task: &mut T, (): &(), _: Worker) -> Result<Tally, Failure> {
        let mut done = 0;
        while self.passes.more(task, done) {
            let area = map(task, self.size)?;
            if area.start == 0 || !is_page_aligned(area.start) {
                let (addr, found) = (area.start, area.start % PAGE_SIZE);
                return Err(Failure::Wrong {
                    what: "the mapped address",
                    addr,
                    expected: 0,
                    found,
                });
            }
            unmap(task, area)?;
            done += 1;
        }
        Ok(Tally { operations: done, extra: 0 })
    }

    fn finish<T: Task>(&self, task: &mut T, (): &(), _: Worker) -> Result<(), Failure> {
        let area = map(task, self.size)?;
        let last = area.end - PAGE_SIZE;
        touch(task, last, Access::Write, 0)?;
        verify(task, last, Access::Write)?;
        unmap(task, area)
    }
}
