//! The root of an object's tables.
//!
//! Most files are small, and a page cache keeps the tables of all of them. So an object has as many
//! levels as its pages need: a single table for at most 512 pages. If an object grows, it gets a
//! new root when a page beyond the old root's span is added: the first entry of the new root points
//! to the old root.
//!
//! No table is unlinked by this change. A CPU that has read the old root finds the present pages
//! through it, and finds no page beyond, as if it had read a moment earlier. For the protocols of
//! the object the word that names the root is one more entry above the last level, which changes
//! from "no table" to a table, and never back. A CPU that stores a length, or the pages being cut
//! off, issues a full fence and then reads the root; a CPU that adds a page takes its entry (a full
//! fence) after it has read the root.

use super::object::{NoPage, Object};
use crate::addr::{FrameNumber, PAGE_SHIFT, VirtRange};
use crate::fault::prepared::Prepared;
use crate::frame::FrameUse;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, LAST, ROOT};
use crate::table::range::{self, Leaves};
use crate::table::walk::{Reached, descend_from};
use crate::vm::Cpu;
use core::ops::Range;

/// A root table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Top {
    pub table: FrameNumber,
    pub level: u32,
}

/// The position of the frame number in [`Root`], above the level.
const FRAME_SHIFT: u32 = 8;

impl Top {
    /// Returns the level of a root for `pages` pages.
    pub(super) fn level_for(pages: u64) -> u32 {
        (LAST..ROOT).find(|&level| pages <= pages_of(level)).unwrap_or(ROOT)
    }

    const fn word(self) -> u64 {
        (self.table.0 as u64) << FRAME_SHIFT | self.level as u64
    }

    /// Walks to the page at `index`; `None` if the page is beyond the span of the tables.
    ///
    /// # Safety
    /// The tables stay linked.
    #[inline(always)]
    pub(super) unsafe fn find<M: Machine>(self, machine: &M, index: u64) -> Option<Reached<'_>> {
        if index >= pages_of(self.level) {
            return None;
        }
        // SAFETY: the caller's promise.
        Some(unsafe { descend_from(machine, self.table, self.level, index << PAGE_SHIFT) })
    }

    /// Visits the entries of `pages` for which there are tables, as [`range::visit`] does.
    /// Addresses are offsets in bytes.
    ///
    /// # Errors
    /// The error returned by `visit`.
    ///
    /// # Safety
    /// The tables stay linked.
    pub(super) unsafe fn visit<'v, M: Machine, E>(
        self,
        cpu: &Cpu<'v, M>,
        pages: Range<u64>,
        visit: impl FnMut(Leaves<'v>) -> Result<(), E>,
    ) -> Result<(), E> {
        let at = |page: u64| page.min(pages_of(self.level)) << PAGE_SHIFT;
        let bytes = VirtRange { start: at(pages.start), end: at(pages.end.max(pages.start)) };
        let machine = cpu.vm().machine();
        // SAFETY: the caller's promise.
        unsafe { range::visit_from(machine, self.table, self.level, bytes, cpu, visit) }
    }
}

/// Returns the number of pages spanned by a root of `level`.
#[inline(always)]
const fn pages_of(level: u32) -> u64 {
    node::table_span(level) >> PAGE_SHIFT
}

/// The word that names the root.
#[derive(Debug)]
pub(super) struct Root(AtomicU64);

impl Root {
    pub(super) fn new(top: Top) -> Self {
        Self(AtomicU64::new(top.word()))
    }

    #[inline(always)]
    pub(super) fn top(&self) -> Top {
        let word = self.0.load(Ordering::Acquire);
        let table = FrameNumber((word >> FRAME_SHIFT) as u32);
        Top { table, level: (word & ((1 << FRAME_SHIFT) - 1)) as u32 }
    }
}

impl Object {
    /// Returns the root of its tables, which another root may have replaced since.
    #[inline(always)]
    pub(crate) fn top(&self) -> Top {
        self.root.top()
    }

    /// Puts a root above `below`, if `below` still is the root.
    ///
    /// # Errors
    /// No frame is available for the root.
    #[cold]
    pub(super) fn grow<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        below: Top,
        prepared: &mut Prepared,
    ) -> Result<(), NoPage> {
        let frame = prepared.table(cpu).ok_or(NoPage::OutOfMemory)?;
        // SAFETY: a new frame, which no other CPU can access.
        let slots = unsafe { node::entries(cpu.vm().machine(), frame.number()) };
        slots[0].store(Entry::table(below.table).0, Ordering::Relaxed);
        let level = below.level + 1;
        let table = cpu.vm().frames.publish(frame, FrameUse::Table, 0, u64::from(level));
        let (old, new) = (below.word(), Top { table, level }.word());
        if lost(Mutant::GrowsOnce) {
            self.root.0.store(new, Ordering::Release);
        } else if self
            .root
            .0
            .compare_exchange(old, new, Ordering::Release, Ordering::Relaxed)
            .is_err()
        {
            // SAFETY: the only reference, and no other CPU has seen the table.
            unsafe { cpu.put_unmapped(table) };
            return Ok(());
        }
        cpu.count(Counter::TablePublished);
        Ok(())
    }
}
