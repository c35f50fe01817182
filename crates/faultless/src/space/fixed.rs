//! The part of a space that does not move with it, so that others than its owner find it.

use crate::addr::FrameNumber;
use crate::machine::{CpuId, SpaceId};
use crate::reclaim::listed::Lazy;
use crate::sync::atomic::AtomicU64;
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::owner::Owner;
use crate::sync::percpu::Padded;
use crate::sync::range::RangeLock;
use crate::sync::rwlock::RwLock;
use crate::sync::wait::Wait;
use crate::tlb::cpuset::CpuSet;

/// What reclaim needs of a space: its tables, what excludes writers from them, and which CPUs may have cached
/// translations.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) id: SpaceId,
    /// The frame of the root table. It is a table until the space ends.
    pub(crate) root: FrameNumber,
    /// The CPU that changes the tree in place, and claims nothing, as long as it is alone.
    pub(crate) owner: Padded<Owner>,
    pub(crate) ranges: Padded<RangeLock>,
    pub(crate) mmap_lock: Padded<RwLock>,
    pub(crate) cpus: Padded<CpuSet>,
    /// Resident pages, but for what the CPUs that run the space have not added yet.
    pub(crate) resident: AtomicU64,
    pub(crate) lazy: Lazy,
}

impl Core {
    /// Of an empty space, which `cpu` makes.
    pub(super) fn new(id: SpaceId, root: FrameNumber, cpu: CpuId) -> Self {
        Self {
            id,
            root,
            owner: Padded(Owner::new(cpu)),
            ranges: Padded(RangeLock::new()),
            mmap_lock: Padded(RwLock::new()),
            cpus: Padded(CpuSet::new()),
            resident: AtomicU64::new(0),
            lazy: Lazy::default(),
        }
    }

    /// Makes sure that no CPU but `cpu`, this one, owns the space, for as long as `section` is open.
    #[inline]
    pub(crate) fn enter(&self, cpu: CpuId, wait: &impl Wait, section: &Section<'_>) {
        if !lost(Mutant::UserLooksAtOwner) {
            self.owner.share(section, cpu, wait);
        }
    }
}
