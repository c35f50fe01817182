//! Makes a private page the space's own, without a store and without write permission: for a
//! [pin](crate::Space::pin) for loads in read-only memory.
//!
//! The operation is equivalent to a store to the page, under a lock, but the entry stays read-only.

use super::absent::{ReadIn, Reader};
use super::table::{Way, way_of};
use super::{Access, Attempt, FaultError, FaultKind, mem_policy};
use crate::addr::VirtRange;
use crate::fault::prepared::{Prepared, Preparing};
use crate::fault::ticket::{Abort, Ticket};
use crate::frame::{FrameUse, Kind};
use crate::machine::Machine;
use crate::space::area::PageSource;
use crate::space::{Guard, Space};
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::table::Entry;
use crate::table::node::{self, LAST};
use crate::table::protocol;
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Makes the page at `page` the space's own, if the mapping is private and has any permission.
    /// The caller must read the entry again.
    ///
    /// # Errors
    /// Memory is exhausted, or the page lies beyond the end of its object or could not be read.
    pub(crate) fn unshare(&self, cpu: &Cpu<'_, M>, page: u64) -> Result<(), FaultError> {
        let mut prepared = Preparing::new(cpu);
        loop {
            match self.unshare_under_lock(cpu, page, &mut prepared) {
                Err(Abort::NoMemory) if prepared.wait_for_one(cpu) => {}
                Err(Abort::NoMemory) => return Err(FaultError::OutOfMemory),
                Err(Abort::BeyondObject) => return Err(FaultError::Bus),
                Err(Abort::Absent) => match self.read_in(cpu, page, None, Reader::Pin) {
                    ReadIn::Retry => {}
                    ReadIn::Pending if cpu.await_read().is_ok() => {}
                    ReadIn::Pending | ReadIn::Failed => return Err(FaultError::Bus),
                    ReadIn::NoMemory => return Err(FaultError::OutOfMemory),
                },
                // Another CPU has changed the entry, or the page is unshared.
                _ => return Ok(()),
            }
        }
    }

    fn unshare_under_lock(
        &self,
        cpu: &Cpu<'_, M>,
        page: u64,
        prepared: &mut Prepared,
    ) -> Result<Option<FaultKind>, Abort> {
        let guard = self.share(cpu, VirtRange::page(page), Counter::RangeLockFault);
        let of_page = matches!(guard, Guard::Range { .. });
        let ticket = if of_page { Ticket::page_held() } else { Ticket::held() };
        let section = cpu.section();
        let Some(entry) = self.view(cpu, &section).at(page) else { return Ok(None) };
        let vma = entry.get();
        if !vma.is_private() || vma.prot().is_empty() {
            return Ok(None);
        }
        // A fault for a store is never served by a huge leaf.
        let access = Access::Write;
        mem_policy::place(cpu, vma, page, access, prepared);
        let Way::Table(table) = way_of(cpu, self, vma, ticket, page, access, prepared)? else {
            return Ok(None);
        };
        let attempt = Attempt { cpu, space: self, vma, ticket, page, access, ahead: None };
        attempt.unshare(prepared, &table[node::index(page, LAST)])
    }
}

impl<M: Machine> Attempt<'_, '_, M> {
    fn unshare(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
    ) -> Result<Option<FaultKind>, Abort> {
        let seen = protocol::wait_and_load(slot, self.cpu);
        if seen.is_none() {
            return match self.vma.memory() {
                PageSource::Object(object) => self.copy_object_page(prepared, object, slot),
                _ => {
                    self.prepare_anon_vma()?;
                    self.map_zeroed(prepared, slot, Self::own_leaf)
                }
            };
        }
        if seen.is_swapped() {
            return self.map_swapped(prepared, slot, seen);
        }
        if !seen.is_present() {
            return Ok(None);
        }
        if self.cpu.vm().maps_zeros(seen) {
            return self.replace_zero_page(prepared, slot, seen);
        }
        let meta = self.cpu.vm().frames.meta(seen.frame());
        let own = meta.kind() == Kind::Used(FrameUse::Anon);
        if own && self.is_only_mapping(meta) != Some(false) {
            return Ok(None);
        }
        self.copy(prepared, slot, seen)
    }

    /// Returns a leaf for `frame`, which belongs to this space alone: writable if the VMA allows
    /// stores.
    pub(super) fn own_leaf(self, frame: crate::FrameNumber) -> Entry {
        let leaf = self.leaf(frame).dirty();
        if self.access.allowed_by(self.vma.prot()) { leaf.writable() } else { leaf }
    }
}
