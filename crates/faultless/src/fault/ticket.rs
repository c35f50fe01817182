//! How a fault validates its answer, and why an attempt aborts.

use crate::file::object::NoPage;
use crate::machine::Machine;
use crate::space::Space;
use crate::space::vma::Vma;
use crate::stat::{Counter, Point};
use crate::sync::atomic::AtomicU64;
use crate::table::node::{self, LAST};
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;

/// What proves that a fault's answer still holds: the VMA's sequence has not changed, or a lock is held. A fault *validates*
/// its ticket when it has taken the entry; the ticket is then *valid*, or the attempt aborts.
///
/// Two words, so that it travels in registers.
#[derive(Clone, Copy, Debug)]
pub struct Ticket<'a> {
    /// The VMA whose sequence was `seen`, and must not have changed; none if a lock is held.
    vma: Option<&'a Vma>,
    /// Without a VMA: [`VMA_LOCK`], [`SPACE_LOCK`] or [`PAGE_LOCK`].
    seen: u64,
}

/// The VMA's lock is held: it excludes writers of the VMA; its neighbours may change.
const VMA_LOCK: u64 = 1;
/// A lock is held that excludes all writers.
const SPACE_LOCK: u64 = 3;
/// A lock is held that excludes writers of this page; others may change the pages beside it.
const PAGE_LOCK: u64 = 5;

impl<'a> Ticket<'a> {
    /// A ticket without a lock: valid while the sequence of `vma` is `seen`.
    #[inline(always)]
    pub const fn speculative(vma: &'a Vma, seen: u64) -> Self {
        Self { vma: Some(vma), seen }
    }

    /// A ticket under the VMA's lock.
    pub const fn vma_lock() -> Self {
        Self { vma: None, seen: VMA_LOCK }
    }

    /// A ticket under a lock that excludes every operation that could change the mapping.
    pub const fn held() -> Self {
        Self { vma: None, seen: SPACE_LOCK }
    }

    /// A ticket under a lock of the page alone.
    pub const fn page_held() -> Self {
        Self { vma: None, seen: PAGE_LOCK }
    }

    /// Whether it also holds for the other pages of the VMA.
    pub const fn is_of_neighbours(self) -> bool {
        self.vma.is_some() || self.seen != PAGE_LOCK
    }

    /// Validates the ticket: whether the answer still holds. The caller holds the entry, so `true` is final: a
    /// later writer waits for the entry.
    #[inline(always)]
    pub fn is_valid(self) -> bool {
        self.vma.is_none_or(|vma| vma.sequence.unchanged(self.seen))
    }

    /// Whether its only lock is a VMA lock.
    pub const fn is_vma_lock(self) -> bool {
        self.vma.is_none() && self.seen == VMA_LOCK
    }
}

/// Why an attempt aborted. It has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// The VMA is missing, being changed, or was changed meanwhile.
    VmaChanged,
    /// The VMA has no anon_vma and this attempt may not make one.
    NoAnon,
    /// The VMA seems to forbid the access.
    Access,
    /// A table above the entry changed.
    TableChanged,
    /// No frame was available without waiting.
    NoMemory,
    /// The heap was exhausted when an anon_vma was needed.
    NoHeap,
    /// The page lies beyond the end of its object, or its object may have no more pages.
    BeyondObject,
    /// The page must be read from its object's store first.
    Absent,
    /// The pages around are to be made a folio first.
    NoFolio,
    /// The page has as many mappings as can be counted.
    TooManyMappings,
}

impl Abort {
    /// The counter of speculations aborted for this reason.
    pub(crate) const fn counter(self) -> Counter {
        match self {
            Self::VmaChanged => Counter::SpfVmaChanged,
            Self::NoAnon => Counter::SpfVmaNoanon,
            Self::BeyondObject | Self::Absent | Self::NoFolio => Counter::SpfVmaNotsup,
            Self::Access => Counter::SpfVmaAccess,
            Self::TableChanged => Counter::SpfPmdChanged,
            Self::NoMemory | Self::NoHeap | Self::TooManyMappings => Counter::SpfNomem,
        }
    }

    /// The trace point for it, if one was published.
    pub(crate) const fn point(self) -> Option<Point> {
        match self {
            Self::VmaChanged => Some(Point::VmaChanged),
            Self::NoAnon => Some(Point::VmaNoanon),
            Self::BeyondObject | Self::Absent | Self::NoFolio => Some(Point::VmaNotsup),
            Self::Access => Some(Point::VmaAccess),
            Self::TableChanged => Some(Point::PmdChanged),
            Self::NoMemory | Self::NoHeap | Self::TooManyMappings => None,
        }
    }
}

impl From<NoPage> for Abort {
    fn from(no_page: NoPage) -> Self {
        match no_page {
            NoPage::Beyond | NoPage::Full => Self::BeyondObject,
            NoPage::Absent => Self::Absent,
            NoPage::OutOfMemory => Self::NoMemory,
        }
    }
}

/// Why a ticket was not valid: a writer came in between. It may be long gone, and the table with the
/// entry too. Called in the attempt's grace section.
#[cold]
#[inline(never)]
pub(crate) fn overtaken<M: Machine>(
    cpu: &Cpu<'_, M>,
    space: &Space<M>,
    page: u64,
    slot: &AtomicU64,
) -> Abort {
    // SAFETY: inside a grace section.
    match unsafe { descend(cpu.vm().machine(), space.root(), page) } {
        Reached::Last(slots) if core::ptr::eq(slot, &slots[node::index(page, LAST)]) => {
            Abort::VmaChanged
        }
        _ => Abort::TableChanged,
    }
}
