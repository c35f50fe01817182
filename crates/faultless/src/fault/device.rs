//! The first touch of device memory: a fixed range of physical memory outside the subsystem's
//! frames.
//!
//! The page offset of the VMA is the frame number, so the fault looks up, allocates and counts no
//! page. A fault also maps the pages around its own, a block of up to `fault_around_pages` pages,
//! limited by the VMA; see [`object`](super::object) for the protocol.

use super::{Access, Attempt, FaultKind};
use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::fault::ticket::Abort;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::table::node::{self, ENTRIES, LAST};

impl<M: Machine> Attempt<'_, '_, M> {
    /// Maps the page and the pages around it into `table`. `None`: another CPU was faster.
    pub(super) fn map_device(
        self,
        table: &[AtomicU64; ENTRIES],
    ) -> Result<Option<FaultKind>, Abort> {
        let here = node::index(self.page, LAST);
        let (below, above) = self.around(here);
        let run = &table[here - below..=here + above];
        let Some(held) = self.take_run(run, below, !0)? else { return self.entry_changed() };
        let first = self.vma.index_of(self.page - below as u64 * PAGE_SIZE);
        held.commit(|at| {
            let entry = self.leaf(FrameNumber(first as u32 + at as u32));
            let stored = at == below && self.access == Access::Write;
            if stored { entry.writable_dirty() } else { entry }
        });
        self.cpu.count(Counter::DevicePage);
        Ok(Some(FaultKind::Device))
    }
}
