//! The root of an object's tables.
//!
//! Most files are small, and a page cache keeps the tables of all of them. So an object has as many levels as its pages need: one
//! table alone where these are at most 512. An object that was made small and grows gets a new root when a page beyond is added: the new
//! root's first entry names the old one.
//!
//! No table is unlinked by that. A CPU that has read the old root finds there what is there, and finds no page beyond, as if it
//! had looked a moment earlier. To the protocols of the object the word that names the root is one more entry above the last
//! level, which goes from "no table there" to a table, and does not change back: whoever stores a length, or what is being cut
//! off, issues a full fence and then reads the root, and a CPU that adds a page takes its entry, a full fence, after it has read the root.

use super::object::{NoPage, Object};
use crate::addr::{FrameNumber, PAGE_SHIFT, VirtRange};
use crate::fault::prepared::Prepared;
use crate::frame::Use;
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

/// Where [`Root`] has the frame number, above the level.
const FRAME_SHIFT: u32 = 8;

impl Top {
    /// The level of a root for so many pages.
    pub(super) fn level_for(pages: u64) -> u32 {
        (LAST..ROOT).find(|&level| pages <= pages_of(level)).unwrap_or(ROOT)
    }

    const fn word(self) -> u64 {
        (self.table.0 as u64) << FRAME_SHIFT | self.level as u64
    }

    /// How far a walk to the page at `index` comes; `None` where the page is beyond what the tables span.
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

    /// Visits the entries of `pages` for which there are tables, as [`range::visit`] does. Addresses are offsets in bytes.
    ///
    /// # Errors
    /// What `visit` returned.
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

/// The pages that a root of `level` spans.
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
    /// The root of its tables, which another may have taken the place of since.
    #[inline(always)]
    pub(crate) fn top(&self) -> Top {
        self.root.top()
    }

    /// Puts a root above `below`, if that still is the root.
    ///
    /// # Errors
    /// No frame for it.
    #[cold]
    pub(super) fn grow<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        below: Top,
        prepared: &mut Prepared,
    ) -> Result<(), NoPage> {
        let frame = prepared.table(cpu).ok_or(NoPage::OutOfMemory)?;
        // SAFETY: a frame that nobody else has.
        let slots = unsafe { node::entries(cpu.vm().machine(), frame.number()) };
        slots[0].store(Entry::table(below.table).0, Ordering::Relaxed);
        let level = below.level + 1;
        let table = cpu.vm().frames.publish(frame, Use::Table, 0, u64::from(level));
        let (old, new) = (below.word(), Top { table, level }.word());
        if lost(Mutant::GrowsOnce) {
            self.root.0.store(new, Ordering::Release);
        } else if self
            .root
            .0
            .compare_exchange(old, new, Ordering::Release, Ordering::Relaxed)
            .is_err()
        {
            // SAFETY: the only reference, and nobody has seen the table.
            unsafe { cpu.put_unmapped(table) };
            return Ok(());
        }
        cpu.count(Counter::TablePublished);
        Ok(())
    }
}
