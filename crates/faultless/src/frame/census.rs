//! Law 6: every frame is accounted for, counted from the metadata and checked against the
//! allocators.

use super::Frames;
use super::arena::Lists;
use super::meta::{FrameMeta, FrameUse, Kind, NO_FRAME};
use crate::addr::FrameNumber;
use crate::sync::wait::Wait;
use core::fmt;

/// The number of frames of each kind, at a quiet moment (while no CPU allocates or frees).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Census {
    /// Holes between regions: not memory, and not part of the [total](Self::total).
    pub reserved: u64,
    /// On the free lists of the buddy allocators.
    pub free: u64,
    /// In the pools of zeroed frames; also free.
    pub zeroed: u64,
    /// On the CPUs' lists, or held by the callers that allocated them. At a quiet moment, after all
    /// CPUs have drained their lists, frames counted here are leaked.
    pub pooled: u64,
    /// Free, and waiting for a [deferred](crate::tlb::deferred) flush.
    pub flush_pending: u64,
    /// Page-table nodes.
    pub tables: u64,
    /// Private anonymous pages.
    pub anon: u64,
    /// Pages of objects: of files and shared memory.
    pub shared: u64,
    /// Pages of zeros.
    pub zero: u64,
    /// Waiting for the end of a grace period.
    pub retired: u64,
    /// Allocated by the kernel ([`Cpu::alloc_block`](crate::Cpu::alloc_block)).
    pub kernel: u64,
    /// Pages of objects with a reference besides the object's: mapped by spaces or used by a call.
    pub mapped: u64,
    /// Anonymous pages and pages of objects kept only by [pins](crate::Space::pin).
    pub pinned: u64,
    /// Tails without a head; nonzero only if the moment was not quiet.
    pub torn: u64,
}

impl Census {
    /// Returns the number of frames of memory: the sum of all kinds except the reserved.
    pub const fn total(&self) -> u64 {
        self.free + self.zeroed + self.taken()
    }

    /// Returns the number of frames outside the buddy allocators and pools.
    pub const fn taken(&self) -> u64 {
        self.pooled
            + self.flush_pending
            + self.tables
            + self.anon
            + self.shared
            + self.zero
            + self.retired
            + self.kernel
            + self.torn
    }
}

/// A violation of the accounting, found by a [census](crate::Vm::census).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Imbalance {
    /// The frame at which the violation was found, if any.
    pub frame: Option<FrameNumber>,
    /// The violation.
    pub what: &'static str,
}

impl Imbalance {
    pub(super) fn new(frame: u32, what: &'static str) -> Self {
        Self { frame: (frame != NO_FRAME).then_some(FrameNumber(frame)), what }
    }
}

impl fmt::Display for Imbalance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.frame {
            Some(frame) => write!(f, "{frame:?}: {}", self.what),
            None => f.write_str(self.what),
        }
    }
}

impl core::error::Error for Imbalance {}

impl Frames {
    /// Counts every frame by its metadata, in time linear in the memory.
    pub fn census(&self) -> Census {
        Self::census_of(self.table.blocks().map(|(_, meta)| meta))
    }

    /// As [`census`](Self::census), for the frames of one node.
    pub fn census_on(&self, node: u8) -> Census {
        let own = |meta: &&FrameMeta| self.layout.node(meta.arena()) == node;
        let is_memory = |meta: &&FrameMeta| meta.kind() != Kind::Reserved;
        Self::census_of(self.table.blocks().map(|(_, meta)| meta).filter(is_memory).filter(own))
    }

    fn census_of<'a>(heads: impl Iterator<Item = &'a FrameMeta>) -> Census {
        let mut census = Census::default();
        for meta in heads {
            let (class, frames) = match meta.kind() {
                Kind::Reserved => (&mut census.reserved, 1),
                Kind::Tail => (&mut census.torn, 1),
                Kind::Free => (&mut census.free, 1 << meta.order()),
                Kind::Zeroed => (&mut census.zeroed, 1 << meta.order()),
                Kind::Pooled => (&mut census.pooled, 1 << meta.order()),
                Kind::FlushPending => (&mut census.flush_pending, 1),
                Kind::Used(usage) => {
                    census.pinned += u64::from(meta.is_pinned() && meta.refs() == 0);
                    census.mapped += u64::from(usage == FrameUse::Shared && meta.refs() > 1);
                    let class = match usage {
                        FrameUse::Table => &mut census.tables,
                        FrameUse::Anon => &mut census.anon,
                        FrameUse::Shared => &mut census.shared,
                        FrameUse::Zero => &mut census.zero,
                        FrameUse::Retired => &mut census.retired,
                        FrameUse::Kernel => &mut census.kernel,
                        // No frame of the subsystem is device memory.
                        FrameUse::Device => &mut census.torn,
                    };
                    (class, 1 << meta.order())
                }
            };
            *class += frames;
        }
        census
    }

    /// Checks law 6 by brute force, at a quiet moment: the free lists are well formed, every free
    /// frame is on a list, and the metadata, the lists and the counters agree on the numbers of
    /// free and taken frames. Returns the census for a comparison with the mappings known to the
    /// caller.
    ///
    /// # Errors
    /// The first [`Imbalance`] found.
    pub fn checked_census(&self, wait: &impl Wait) -> Result<Census, Imbalance> {
        let wrong = |what| Err(Imbalance { frame: None, what });
        let (mut listed, mut zeroed) = (0, 0);
        for arena in &self.arenas {
            let validate = |lists: &mut Lists| {
                Ok((lists.free.validate(&self.table)?, lists.zeroed.validate(&self.table)?))
            };
            let found = arena.locked(wait, validate)?;
            listed += found.0;
            zeroed += found.1;
        }
        let census = self.census();
        if census.torn != 0 {
            return wrong("a frame belongs to no block");
        }
        if census.free != listed {
            return wrong("a free frame is on no free list");
        }
        if census.zeroed != zeroed {
            return wrong("a zeroed frame is in no pool");
        }
        if census.total() != self.total() {
            return wrong("the frames of all kinds are not the total");
        }
        if self.free_count() != listed + zeroed {
            return wrong("the count of allocated frames is wrong");
        }
        Ok(census)
    }
}
