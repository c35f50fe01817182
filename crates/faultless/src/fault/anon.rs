//! The first touch of private anonymous memory.

use super::{Attempt, FaultKind, overtaken};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::Abort;
use crate::frame::Use;
use crate::machine::Machine;
use crate::rmap::{AnonVma, RootSlot};
use crate::space::merge::{joins_a_change, root_of_neighbour};
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::wait::until;
use crate::table::Entry;
use crate::table::protocol;

impl<M: Machine> Attempt<'_, '_, M> {
    /// A read (or instruction fetch) of memory never written: the zero page, which is not counted
    /// and which needs no reverse map. `None`: another CPU changed the entry first.
    #[inline(always)]
    pub(super) fn read_untouched(self, slot: &AtomicU64) -> Result<Option<FaultKind>, Abort> {
        let entry = self.leaf(self.cpu.vm().zero).special();
        let Ok(held) = protocol::take(slot, Entry::NONE, self.cpu) else {
            return self.outrun();
        };
        if !self.ticket.stands() {
            held.revert();
            return Err(overtaken(self.cpu, self.space, self.page, slot));
        }
        held.commit(entry);
        self.cpu.count(Counter::ZeroPage);
        Ok(Some(FaultKind::ZeroPage))
    }

    /// A write to an untouched page: a new zeroed page, under the anon_vma numbered
    /// `root`.
    #[inline(always)]
    pub(super) fn write_untouched(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
        root: u64,
    ) -> Result<Option<FaultKind>, Abort> {
        let frame = prepared.zeroed(self.cpu).ok_or(Abort::NoMemory)?;
        let entry = self.leaf(frame.number()).writable_dirty();
        let Ok(held) = protocol::take(slot, Entry::NONE, self.cpu) else {
            prepared.keep_zeroed(frame);
            return self.outrun();
        };
        if !self.ticket.stands() {
            held.revert();
            prepared.keep_zeroed(frame);
            return Err(overtaken(self.cpu, self.space, self.page, slot));
        }
        let index = self.vma.area.index_of(self.page);
        self.cpu.vm().frames.publish(frame, Use::Anon, root, index);
        held.commit(entry);
        self.cpu.add_resident(self.space, 1);
        self.cpu.count(Counter::AnonPage);
        Ok(Some(FaultKind::Anon))
    }

    /// A leaf for `frame` as the VMA protects it, stores forbidden for now.
    #[inline(always)]
    pub(super) fn leaf(self, frame: crate::FrameNumber) -> Entry {
        self.vma.leaf.of(frame)
    }

    /// The number of the VMA's anon_vma, made now if there is none: an anonymous page is
    /// about to be created.
    ///
    /// No lock is needed to make it. The neighbours are looked at in the tree's present version;
    /// sharing a root with one that changes meanwhile does no harm, as a root only says where to
    /// look. What the VMA will be one with, once that is no more under change, is waited for.
    #[inline(always)]
    pub(super) fn root(self) -> Result<u64, Abort> {
        match self.vma.root.id() {
            0 => self.make_root(),
            // Replaced, while a lock kept everybody from changing this page.
            RootSlot::SEALED_ID => Err(Abort::VmaChanged),
            id => Ok(id),
        }
    }

    #[cold]
    fn make_root(self) -> Result<u64, Abort> {
        let _space_lock = self.lock_for_anon_vma()?;
        let near = {
            let section = self.cpu.section();
            // All that will be one has one root, and what is under change has no place for it yet.
            until(self.cpu, || !joins_a_change(self.space.view(self.cpu, &section), self.vma));
            root_of_neighbour(&self.space.view(self.cpu, &section), &self.vma.area)
        };
        let root = match near {
            Some(root) => root,
            None => AnonVma::try_new(None).map_err(|_| Abort::NoHeap)?,
        };
        self.cpu.count(Counter::AnonVmaPrepared);
        // A writer seals what it changes; under a lock there is none.
        self.vma.root.set(root).ok_or(Abort::VmaChanged)
    }

    /// Another CPU changed the entry between our look and our swap.
    #[inline(always)]
    pub(super) fn outrun(self) -> Result<Option<FaultKind>, Abort> {
        self.cpu.count(Counter::TrylockFailed);
        Ok(None)
    }
}
