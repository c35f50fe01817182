//! The threads of a round, and their choice of operations.

use super::pins::Held;
use super::region::Region;
use super::world::{Program, World, locked};
use super::{accesses, calls, files, kernel, pins};
use faultless::Error;
use faultless_native::NativeCpu;
use std::ops::Range;
use std::sync::Arc;

/// The end of an operation without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Did {
    All,
    /// The subsystem refused, for a permitted reason.
    Refused,
    /// Another thread prevented the operation, or there was no work.
    Nothing,
}

impl From<Result<(), Error>> for Did {
    fn from(result: Result<(), Error>) -> Self {
        if result.is_ok() { Self::All } else { Self::Refused }
    }
}

/// The result of an operation. The error describes the mismatch.
pub type Outcome = Result<Did, String>;

/// Runs one operation on a program of the CPU.
type Do = for<'w, 'n> fn(&mut Agent<'w, 'n>, &NativeCpu<'_, 'n>, &Arc<Program<'n>>) -> Outcome;

/// An operation chosen by threads.
pub struct Operation {
    pub name: &'static str,
    /// The weight in the random choice of operations.
    weight: u32,
    call: Do,
}

const fn operation(name: &'static str, weight: u32, call: Do) -> Operation {
    Operation { name, weight, call }
}

/// All operations.
pub const OPERATIONS: &[Operation] = &[
    operation("store", 60, accesses::store),
    operation("load", 40, accesses::load),
    operation("peep", 20, accesses::peep),
    operation("read remotely", 6, accesses::read_remotely),
    operation("write remotely", 4, accesses::write_remotely),
    operation("move", 14, calls::move_pages),
    operation("gather", 1, calls::gather),
    operation("keep and move", 3, calls::keep_and_move),
    operation("unmap", 3, calls::unmap),
    operation("map", 8, calls::map),
    operation("shrink", 2, calls::shrink),
    operation("grow", 3, calls::grow),
    operation("discard", 3, calls::discard),
    operation("free lazily", 3, calls::free_lazily),
    operation("protect", 6, calls::protect),
    operation("advise", 10, calls::advise),
    operation("evict", 10, calls::evict),
    operation("bind", 3, calls::bind),
    operation("lock", 2, calls::lock),
    operation("list", 2, calls::list),
    operation("fork", 10, calls::fork),
    operation("end child", 4, calls::end_child),
    operation("pin", 5, pins::pin),
    operation("use pin", 8, pins::use_pin),
    operation("unpin", 2, pins::unpin),
    operation("reclaim", 3, kernel::reclaim),
    operation("background", 2, kernel::background),
    operation("reclaim ahead", 3, kernel::reclaim_ahead),
    operation("compact", 2, kernel::compact),
    operation("compact ahead", 2, kernel::compact_ahead),
    operation("balance", 4, kernel::balance),
    operation("migrate", 6, kernel::migrate),
    operation("flush deferred", 3, kernel::flush_deferred),
    operation("zero ahead", 2, kernel::zero_ahead),
    operation("set", 2, kernel::set),
    operation("write back", 4, files::write_back),
    operation("sync", 1, files::sync),
    operation("drop clean", 2, files::drop_clean),
    operation("evict file", 3, files::evict),
    operation("cut file", 3, files::cut),
    operation("extend file", 4, files::extend),
    operation("punch hole", 2, files::punch),
    operation("read file", 4, files::read),
    operation("write file", 5, files::write),
];

/// A thread of a process.
pub struct Agent<'w, 'n> {
    pub world: &'w World<'n>,
    /// The process of the thread.
    pub program: &'w Arc<Program<'n>>,
    /// The words owned by the thread.
    pub writer: usize,
    pub random: fastrand::Rng,
    /// The pages pinned by the thread in its process.
    pub held: Vec<Held<'n>>,
}

impl<'w, 'n> Agent<'w, 'n> {
    pub fn new(
        world: &'w World<'n>,
        program: &'w Arc<Program<'n>>,
        writer: usize,
        random: fastrand::Rng,
    ) -> Self {
        Self { world, program, writer, random, held: Vec::new() }
    }

    /// Does the operations of a phase.
    pub fn run(&mut self, cpu: &mut NativeCpu<'_, 'n>) -> Result<(), String> {
        let program = self.program;
        for _ in 0..self.world.plan.operations {
            if self.world.is_over() {
                break;
            }
            if self.random.u32(0..24) == 0 {
                self.visit_child(cpu)?;
            } else {
                self.operate(cpu, program)?;
            }
        }
        Ok(())
    }

    /// Runs one operation on `program`, the program of the CPU.
    fn operate(
        &mut self,
        cpu: &NativeCpu<'_, 'n>,
        program: &Arc<Program<'n>>,
    ) -> Result<(), String> {
        let all: u32 = OPERATIONS.iter().map(|operation| operation.weight).sum();
        let mut choice = self.random.u32(0..all);
        for (number, operation) in OPERATIONS.iter().enumerate() {
            if choice < operation.weight {
                let did = (operation.call)(self, cpu, program);
                let did = did.map_err(|wrong| {
                    let id = program.process.space().id();
                    format!(
                        "{wrong}; found by `{}` of thread {} in {id:?}",
                        operation.name, self.writer
                    )
                })?;
                self.world.tally.operation(number, did);
                return Ok(());
            }
            choice -= operation.weight;
        }
        Ok(())
    }

    /// Runs a child for a few operations.
    fn visit_child(&mut self, cpu: &mut NativeCpu<'_, 'n>) -> Result<(), String> {
        let children = locked(&self.world.children).clone();
        let Some(child) = self.random.choice(&children).cloned() else { return Ok(()) };
        drop(children);
        let visit = |cpu: &mut NativeCpu<'_, 'n>| {
            let mut operate = || {
                for _ in 0..self.random.u32(1..12) {
                    self.operate(cpu, &child)?;
                }
                Ok(())
            };
            Ok(operate())
        };
        cpu.switch(&child.process, visit).map_err(|stop| stop.to_string())?
    }

    /// A region of `program`.
    pub fn region<'p>(&mut self, program: &'p Program<'n>) -> &'p Region {
        &program.regions[self.random.usize(0..program.regions.len())]
    }

    /// A page of `region`. A few pages are chosen more often than the others.
    pub fn page(&mut self, region: &Region) -> usize {
        let some = if self.random.bool() { region.len() } else { region.len() / 8 };
        self.random.usize(0..some)
    }

    /// Some pages of `region`, at most `most`.
    pub fn pages(&mut self, region: &Region, most: usize) -> Range<usize> {
        let first = self.page(region);
        let most = most.min(region.len() - first);
        first..first + 1 + self.random.usize(0..most)
    }

    /// Returns the address and length of some pages of `region` that were found in one slot. Some
    /// of the pages may have moved since.
    pub fn stretch(&mut self, region: &Region, most: usize) -> (u64, u64) {
        let mut pages = self.pages(region, most);
        let slot = region.slot(pages.start);
        let same = |page: &usize| region.slot(*page) == slot && !region.hole(*page).1;
        let others = pages.clone().skip(1).find(|page| !same(page));
        pages.end = others.unwrap_or(pages.end);
        let range = region.range(slot, &pages);
        (range.start, range.len())
    }
}
