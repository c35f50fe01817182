//! Law 6: every frame is accounted for, counted from the metadata and checked against the
//! allocators.

use super::Frames;
use super::arena::Lists;
use super::meta::{FrameMeta, Kind, NO_FRAME, Use};
use crate::addr::FrameNumber;
use crate::sync::wait::Wait;
use core::fmt;

/// How many frames there are of each kind, at a quiet moment (while no CPU allocates or frees).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Census {
    /// Holes between regions: not memory, and not part of the [total](Self::total).
    pub reserved: u64,
    /// On the free lists of the buddy allocators.
    pub free: u64,
    /// In the pools of zeroed frames: free, too.
    pub zeroed: u64,
    /// On the CPUs' lists, or held by the callers that allocated them. At a quiet moment, when all
    /// CPUs have drained their lists, what is left here is lost.
    pub pooled: u64,
    /// Free, and waiting for a [deferred](crate::tlb::deferred) flush.
    pub owed: u64,
    /// Page-table nodes.
    pub tables: u64,
    /// Private anonymous pages.
    pub anon: u64,
    /// Pages of objects: of files and shared memory.
    pub shared: u64,
    /// Pages of zeros.
    pub zero: u64,
    /// Waiting for a grace period to end.
    pub retired: u64,
    /// The kernel's own ([`Cpu::alloc_block`](crate::Cpu::alloc_block)).
    pub kernel: u64,
    /// Of the pages of objects, those with another reference than the object's: spaces map them, or a call uses them.
    pub mapped: u64,
    /// Of the anonymous pages and those of objects, those that only [pins](crate::Space::pin) keep.
    pub pinned: u64,
    /// Tails without a head; not 0 only when the moment was not quiet.
    pub torn: u64,
}

impl Census {
    /// Frames of memory: the sum of all kinds but the reserved.
    pub const fn total(&self) -> u64 {
        self.free + self.zeroed + self.taken()
    }

    /// Frames that are out of the buddy allocators and pools.
    pub const fn taken(&self) -> u64 {
        self.pooled
            + self.owed
            + self.tables
            + self.anon
            + self.shared
            + self.zero
            + self.retired
            + self.kernel
            + self.torn
    }
}

/// A broken promise of the accounting, found by a [census](crate::Vm::census).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Imbalance {
    /// The frame it was found at, where it has one.
    pub frame: Option<FrameNumber>,
    /// What is wrong.
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
    /// Counts every frame by what its metadata says, in time linear in the memory.
    pub fn census(&self) -> Census {
        Self::census_of(self.table.blocks().map(|(_, meta)| meta))
    }

    /// As [`census`](Self::census), of the frames of one node.
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
                Kind::Owed => (&mut census.owed, 1),
                Kind::Used(usage) => {
                    census.pinned += u64::from(meta.is_pinned() && meta.refs() == 0);
                    census.mapped += u64::from(usage == Use::Shared && meta.refs() > 1);
                    let class = match usage {
                        Use::Table => &mut census.tables,
                        Use::Anon => &mut census.anon,
                        Use::Shared => &mut census.shared,
                        Use::Zero => &mut census.zero,
                        Use::Retired => &mut census.retired,
                        Use::Kernel => &mut census.kernel,
                        // No frame of the subsystem is.
                        Use::Device => &mut census.torn,
                    };
                    (class, 1 << meta.order())
                }
            };
            *class += frames;
        }
        census
    }

    /// Checks law 6 by brute force, at a quiet moment: the free lists are well formed, every free
    /// frame is on one, and the metadata, the lists and the counters agree on how many frames are
    /// free and how many taken. Returns the census for the caller to compare with what it knows to
    /// be mapped.
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
            return wrong("the count of frames taken is wrong");
        }
        Ok(census)
    }
}
