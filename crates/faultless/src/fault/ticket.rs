//! Validation of speculative faults, and the reasons for an abort.

use crate::file::object::NoPage;
use crate::machine::Machine;
use crate::space::Space;
use crate::space::vma::Vma;
use crate::stat::{Counter, TracePoint};
use crate::sync::atomic::AtomicU64;
use crate::table::node::{self, LAST};
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;

/// The proof that the result of a fault is still correct: the VMA's sequence has not changed, or a
/// lock is held. A fault *validates* its ticket after locking the entry; the ticket is then
/// *valid*, or the attempt aborts.
///
/// Two words, so that a ticket is passed in registers.
#[derive(Clone, Copy, Debug)]
pub struct Ticket<'a> {
    /// The VMA whose sequence was `seen` and must not change; `None` if a lock is held.
    vma: Option<&'a Vma>,
    /// Without a VMA: [`VMA_LOCK`], [`SPACE_LOCK`] or [`PAGE_LOCK`].
    seen: u64,
}

/// The VMA's lock is held. It excludes writers of the VMA; the neighbouring VMAs may change.
const VMA_LOCK: u64 = 1;
/// A lock is held that excludes all writers.
const SPACE_LOCK: u64 = 3;
/// A lock is held that excludes writers of this page; the neighbouring pages may change.
const PAGE_LOCK: u64 = 5;

impl<'a> Ticket<'a> {
    /// Returns a ticket without a lock: valid while the sequence of `vma` is `seen`.
    #[inline(always)]
    pub const fn speculative(vma: &'a Vma, seen: u64) -> Self {
        Self { vma: Some(vma), seen }
    }

    /// Returns a ticket under the VMA's lock.
    pub const fn vma_lock() -> Self {
        Self { vma: None, seen: VMA_LOCK }
    }

    /// Returns a ticket under a lock that excludes every operation which could change the mapping.
    pub const fn held() -> Self {
        Self { vma: None, seen: SPACE_LOCK }
    }

    /// Returns a ticket under a lock of the page alone.
    pub const fn page_held() -> Self {
        Self { vma: None, seen: PAGE_LOCK }
    }

    /// Returns whether the ticket also holds for the other pages of the VMA.
    pub const fn is_of_neighbours(self) -> bool {
        self.vma.is_some() || self.seen != PAGE_LOCK
    }

    /// Validates the ticket: returns whether the result is still correct. The caller holds the
    /// entry, so `true` is final: a later writer waits for the entry.
    #[inline(always)]
    pub fn is_valid(self) -> bool {
        self.vma.is_none_or(|vma| vma.sequence.unchanged(self.seen))
    }

    /// Returns whether the only lock is a VMA lock.
    pub const fn is_vma_lock(self) -> bool {
        self.vma.is_none() && self.seen == VMA_LOCK
    }
}

/// The reason why an attempt aborted. The attempt has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// The VMA is being changed or has changed since the look-up, or a speculation found no VMA.
    VmaChanged,
    /// No VMA covers the page. An attempt under a lock reports this, a speculation
    /// [`VmaChanged`](Self::VmaChanged).
    Unmapped,
    /// The VMA has no anon_vma, and this attempt may not make one.
    NoAnon,
    /// The VMA forbids the access. The VMA of a speculation is not validated, so the fallback
    /// checks again.
    Access,
    /// A table above the entry changed.
    TableChanged,
    /// No frame was available without waiting.
    NoMemory,
    /// The heap was exhausted when a VMA of a grown stack was needed.
    NoHeap,
    /// The page lies beyond the end of its object, or the object has reached its maximum number of
    /// pages.
    BeyondObject,
    /// The page must first be read from the store of its object.
    Absent,
    /// The surrounding pages must first be made a folio.
    NoFolio,
    /// The page has the maximum number of mappings.
    TooManyMappings,
}

impl Abort {
    /// Returns the counter of speculations aborted for this reason.
    pub(crate) const fn counter(self) -> Counter {
        match self {
            Self::VmaChanged | Self::Unmapped => Counter::SpfVmaChanged,
            Self::NoAnon => Counter::SpfVmaNoanon,
            Self::BeyondObject | Self::Absent | Self::NoFolio => Counter::SpfVmaNotsup,
            Self::Access => Counter::SpfVmaAccess,
            Self::TableChanged => Counter::SpfPmdChanged,
            Self::NoMemory | Self::NoHeap | Self::TooManyMappings => Counter::SpfNomem,
        }
    }

    /// Returns the trace point for this reason, if one was published.
    pub(crate) const fn point(self) -> Option<TracePoint> {
        match self {
            Self::VmaChanged | Self::Unmapped => Some(TracePoint::VmaChanged),
            Self::NoAnon => Some(TracePoint::VmaNoanon),
            Self::BeyondObject | Self::Absent | Self::NoFolio => Some(TracePoint::VmaNotsup),
            Self::Access => Some(TracePoint::VmaAccess),
            Self::TableChanged => Some(TracePoint::PmdChanged),
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

/// Returns the reason why a ticket was not valid. A writer has changed the VMA; by now the writer
/// may have finished, and the table with the entry may be unlinked. The caller is in the attempt's
/// grace section.
#[cold]
#[inline(never)]
pub(crate) fn why_invalid<M: Machine>(
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
