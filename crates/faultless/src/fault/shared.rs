//! The first touch of a page of shared memory through one mapping.

use super::{Access, Attempt, FaultKind};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::Abort;
use crate::machine::Machine;
use crate::space::vma::Prot;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::table::entry::Entry;
use crate::table::protocol;

impl<M: Machine> Attempt<'_, '_, M> {
    /// Maps the object's page. Counting the mapping writes the frame's own line, nothing else that is
    /// shared. `None`: another CPU changed the entry first.
    pub(super) fn map_shared(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
    ) -> Result<Option<FaultKind>, Abort> {
        let Some(object) = &self.vma.area.object else {
            return Err(Abort::NotSupported);
        };
        let index = self.vma.area.index_of(self.page);
        if index >= object.pages() {
            return Err(Abort::BeyondObject);
        }
        let frame = object.page(self.cpu, index, prepared).map_err(|_| Abort::NoMemory)?;
        let mut entry = self.leaf(frame);
        if self.access == Access::Write {
            entry = entry.writable_dirty();
        }
        debug_assert!(self.access != Access::Write || self.vma.area.allows(Prot::WRITE));
        let Ok(held) = protocol::take(slot, Entry::NONE) else {
            return self.outrun();
        };
        if !self.ticket.stands() {
            held.revert();
            return Err(self.overtaken(slot));
        }
        // The object's own reference keeps the frame while the object lives, and a VMA that stands
        // keeps the object alive.
        self.cpu.vm().frames.meta(frame).get_ref();
        held.commit(entry);
        self.cpu.add_resident(self.space, 1);
        self.cpu.count(Counter::SharedPage);
        Ok(Some(FaultKind::Shared))
    }
}
