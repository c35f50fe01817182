//! Counts resident pages, on the CPU's own cache line while the CPU runs the space.

use super::Space;
use super::core::Core;
use crate::machine::{Machine, SpaceId};
use crate::sync::atomic::Ordering;
use crate::vm::Cpu;

impl<M: Machine> Cpu<'_, M> {
    /// Counts resident pages of `space`, on this CPU's own cache line while the CPU runs that
    /// space.
    #[inline(always)]
    pub(crate) fn add_resident(&self, space: &Space<M>, pages: i64) {
        if !self.add_resident_here(space.id(), pages) {
            space.core.resident.fetch_add(pages as u64, Ordering::Relaxed);
        }
    }

    /// [`add_resident`](Self::add_resident) for a space of which the caller knows only the core.
    pub(crate) fn add_resident_of(&self, core: &Core, pages: i64) {
        if !self.add_resident_here(core.id, pages) {
            core.resident.fetch_add(pages as u64, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn add_resident_here(&self, space: SpaceId, pages: i64) -> bool {
        let resident = &self.state().resident;
        let here = resident.space.load(Ordering::Relaxed) == space.0;
        if here {
            let now = resident.pages.load(Ordering::Relaxed).wrapping_add(pages as u64);
            resident.pages.store(now, Ordering::Relaxed);
        }
        here
    }
}
