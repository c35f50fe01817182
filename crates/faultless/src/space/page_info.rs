//! What each page of a space maps.

use super::Space;
use super::access::prot_of;
use super::area::Prot;
use super::move_pages::leaves_of;
use super::pages::each_entry;
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::frame::{FrameUse, Kind};
use crate::machine::Machine;
use crate::table::Entry;
use crate::table::format::CacheMode;
use crate::table::node;
use crate::vm::Cpu;

/// The mapping of one page of a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageInfo {
    /// The frame.
    pub frame: FrameNumber,
    /// The accesses that need no fault. A page that a fault would copy before a store is not
    /// `WRITE`; a page of a mapping without any permission has none.
    pub prot: Prot,
    /// The cache mode of device memory; `None` for the subsystem's memory.
    pub device: Option<CacheMode>,
    /// The use of the frame: [`FrameUse::Zero`] for the zero page, [`FrameUse::Device`] for device
    /// memory.
    pub usage: FrameUse,
    /// The number of mappings of the frame in all spaces, at least 1; always 1 for the zero page
    /// and device memory. A CPU that looks at the page counts as a mapping for that moment.
    pub mappings: u32,
    /// True if the frame has a single mapping. False for the zero page and device memory.
    pub exclusive: bool,
    /// Whether a [pin](Space::pin) keeps the page.
    pub pinned: bool,
    /// Whether a program has used this mapping since its accessed bit was cleared.
    pub accessed: bool,
    /// For a private page: whether the page is not [lazily freed](crate::Advice::Free), or a
    /// program has stored to the page since. For an object's page: whether this mapping allows
    /// stores, or a program has stored through the mapping.
    pub dirty: bool,
}

/// Where a page of a space is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PagePlace {
    /// In memory.
    Mapped(PageInfo),
    /// In the swap area, in this slot.
    Swapped {
        /// The number of the slot.
        slot: u64,
        /// The number of mappings in all spaces.
        mappings: u32,
    },
}

impl<M: Machine> Space<M> {
    /// Returns the page in memory that is mapped at `addr`, or `None`. The call changes no state
    /// and faults in no page. The page may move immediately afterwards, and the frame may then have
    /// another owner: a software MMU uses [`walk`](Self::walk).
    pub fn page_at(&self, cpu: &Cpu<'_, M>, addr: u64) -> Option<PageInfo> {
        let section = self.section(cpu);
        let entry = self.entry_by(cpu, &section, addr, |slot| slot.wait_and_load(cpu))?;
        entry.is_mapped().then(|| page_of(cpu, entry))
    }

    /// Calls `tell` with each page that `range` touches and that is in memory or in the swap area,
    /// in ascending order, not at one moment. An empty or reversed range touches no page. `tell`
    /// runs in a grace section, and must obey the rules of [`areas`](Self::areas).
    pub fn pages(&self, cpu: &Cpu<'_, M>, range: VirtRange, mut tell: impl FnMut(u64, PagePlace)) {
        let section = self.section(cpu);
        if range.end <= range.start {
            return;
        }
        // A visit of entries requires whole pages.
        let range = range.widen(PAGE_SIZE);
        // Another CPU that owns the space may change the tables in place.
        self.core.enter(cpu.id(), cpu, &section);
        let mut one = |addr: u64, entry: Entry| {
            if entry.is_mapped() {
                tell(addr, PagePlace::Mapped(page_of(cpu, entry)));
            } else if entry.is_swapped() {
                let slot = entry.slot();
                let mappings = cpu.vm().swap.get().map_or(0, |swap| swap.count(slot)).max(1);
                tell(addr, PagePlace::Swapped { slot, mappings });
            }
        };
        // SAFETY: in a section of the space.
        unsafe {
            each_entry(cpu, self.root(), range, |part, entry| {
                if !entry.is_huge() {
                    return one(part.start, entry);
                }
                for addr in (part.start..part.end).step_by(PAGE_SIZE as usize) {
                    one(addr, entry.part(node::index(addr, node::LAST)));
                }
            });
        }
    }
}

/// Returns the description of the page that `entry` maps.
fn page_of<M: Machine>(cpu: &Cpu<'_, M>, entry: Entry) -> PageInfo {
    let frame = entry.frame();
    let (accessed, prot, device) = (entry.is_accessed(), prot_of(entry), cpu.vm().device(entry));
    if entry.is_special() {
        let usage = if cpu.vm().maps_zeros(entry) { FrameUse::Zero } else { FrameUse::Device };
        return PageInfo {
            frame,
            prot,
            device,
            usage,
            mappings: 1,
            exclusive: false,
            pinned: false,
            accessed,
            dirty: false,
        };
    }
    let meta = cpu.vm().frames.meta(frame);
    let refs = meta.refs();
    let (usage, others) = match meta.kind() {
        // The object has one reference.
        Kind::Used(FrameUse::Shared) => (FrameUse::Shared, 1),
        _ => (FrameUse::Anon, 0),
    };
    let mut mappings = refs.saturating_sub(others);
    if usage == FrameUse::Shared {
        mappings += leaves_of(cpu, frame).saturating_sub(1);
    }
    let dirty = match usage {
        FrameUse::Anon => !cpu.is_lazily_freed(entry),
        _ => entry.is_dirty() || entry.is_writable(),
    };
    PageInfo {
        frame,
        prot,
        device,
        usage,
        mappings: mappings.max(1),
        exclusive: mappings == 1,
        pinned: meta.is_pinned(),
        accessed,
        dirty,
    }
}
