//! The first touch of private anonymous memory.

use super::{Attempt, FaultKind};
use crate::addr::{FrameNumber, PAGE_SHIFT};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::{Abort, why_invalid};
use crate::frame::{Flushed, Frame, FrameUse};
use crate::machine::Machine;
use crate::rmap::AnonVmaSlot;
use crate::space::merge::{joins_a_change, mergeable_anon_vma};
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::wait::until;
use crate::table::Entry;
use crate::table::protocol;

impl<M: Machine> Attempt<'_, '_, M> {
    /// Serves a load or instruction fetch of untouched memory with the zero page, which is not
    /// counted and needs no reverse map. `None`: another CPU changed the entry first.
    #[inline(always)]
    pub(super) fn read_untouched(self, slot: &AtomicU64) -> Result<Option<FaultKind>, Abort> {
        let entry = self.leaf(self.cpu.vm().zero).special();
        let Ok(held) = protocol::take(slot, Entry::NONE, self.cpu) else {
            return self.entry_changed();
        };
        if !self.ticket.is_valid() {
            held.revert();
            return Err(why_invalid(self.cpu, self.space, self.page, slot));
        }
        held.commit(entry);
        self.cpu.count(Counter::ZeroPage);
        Ok(Some(FaultKind::ZeroPage))
    }

    /// Serves a store to an untouched page of a VMA with an anon_vma: maps a new zeroed page.
    #[inline(always)]
    pub(super) fn write_untouched(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
    ) -> Result<Option<FaultKind>, Abort> {
        let leaf = |this: Self, frame| this.leaf(frame).writable_dirty();
        self.map_zeroed(prepared, slot, leaf)
    }

    /// Maps a new zeroed page into an empty entry. `leaf` makes the entry from the frame number.
    #[inline(always)]
    pub(super) fn map_zeroed(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
        leaf: impl FnOnce(Self, FrameNumber) -> Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        let frame = prepared.zeroed(self.cpu).ok_or(Abort::NoMemory)?;
        let entry = leaf(self, frame.number());
        let Ok(held) = protocol::take(slot, Entry::NONE, self.cpu) else {
            prepared.keep_zeroed(frame);
            return self.entry_changed();
        };
        if !self.ticket.is_valid() {
            held.revert();
            prepared.keep_zeroed(frame);
            return Err(why_invalid(self.cpu, self.space, self.page, slot));
        }
        self.publish(frame);
        held.commit(entry);
        self.cpu.add_resident(self.space, 1);
        self.cpu.count(Counter::AnonPage);
        Ok(Some(FaultKind::Anon))
    }

    /// Returns a leaf for `frame` with the VMA's protection, without write permission.
    #[inline(always)]
    pub(super) fn leaf(self, frame: crate::FrameNumber) -> Entry {
        self.vma.leaf.of(frame)
    }

    /// Describes a frame that becomes this fault's anonymous page: the anchor is the space's, the
    /// index is the page number. Returns the frame number.
    #[inline(always)]
    pub(super) fn publish<S: Flushed>(self, frame: Frame<S>) -> FrameNumber {
        let index = self.page >> PAGE_SHIFT;
        self.cpu.vm().frames.publish(frame, FrameUse::Anon, self.space.anchor(), index)
    }

    /// Makes an anon_vma for the VMA if there is none: the fault is about to create an anonymous
    /// page.
    ///
    /// The operation needs no lock. It reads the neighbours in the current version of the tree.
    /// Sharing an anon_vma with a neighbour that changes concurrently is harmless, because the
    /// anon_vma only decides which VMAs merge. If a VMA under change will become part of this VMA,
    /// the fault waits for the end of the change.
    #[inline(always)]
    pub(super) fn prepare_anon_vma(self) -> Result<(), Abort> {
        match self.vma.anon_vma.value() {
            0 => self.make_anon_vma(),
            // The VMA was replaced although a lock excluded all changes of this page.
            AnonVmaSlot::SEALED => Err(Abort::VmaChanged),
            _ => Ok(()),
        }
    }

    #[cold]
    fn make_anon_vma(self) -> Result<(), Abort> {
        let _space_lock = self.lock_for_anon_vma()?;
        let near = {
            let section = self.cpu.section();
            // VMAs that will merge must share one anon_vma, and a VMA under change cannot take an
            // anon_vma yet. While this CPU owns the space, no VMA is under change.
            if !self.space.core.owner.was(self.cpu.id()) {
                until(self.cpu, || !joins_a_change(self.space.view(self.cpu, &section), self.vma));
            }
            mergeable_anon_vma(&self.space.view(self.cpu, &section), self.vma)
        };
        let anon_vma = near.unwrap_or_else(|| self.cpu.make_anon_vma(false));
        self.cpu.count(Counter::AnonVmaPrepared);
        // A writer seals the anon_vma slots of the VMAs it changes; a lock excludes writers.
        self.vma.anon_vma.set(anon_vma).map(|_| ()).ok_or(Abort::VmaChanged)
    }

    /// Counts and reports that another CPU changed the entry between the read and the
    /// compare-and-swap.
    #[inline(always)]
    pub(super) fn entry_changed(self) -> Result<Option<FaultKind>, Abort> {
        self.cpu.count(Counter::TrylockFailed);
        Ok(None)
    }
}
