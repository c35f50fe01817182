//! How a fault's answer is validated, and why it may be given up.

use crate::space::vma::Vma;
use crate::stat::{Counter, Point};

/// What makes the answer of a fault true at the moment it is installed.
///
/// Two words, so that it travels in registers.
#[derive(Clone, Copy, Debug)]
pub struct Ticket<'a> {
    /// The VMA whose sequence was `seen`, and must be so still; or none, when a lock is held.
    vma: Option<&'a Vma>,
    /// Without a VMA: [`VMA_LOCK`], [`SPACE_LOCK`] or [`PAGE_LOCK`].
    seen: u64,
}

/// The VMA's lock is held: writers of the VMA are out, its neighbours may change.
const VMA_LOCK: u64 = 1;
/// A lock is held that keeps all writers out.
const SPACE_LOCK: u64 = 3;
/// A lock is held that keeps writers of this page out; others may change the pages beside it.
const PAGE_LOCK: u64 = 5;

impl<'a> Ticket<'a> {
    /// A ticket without a lock: good while the sequence of `vma` is `seen`.
    #[inline(always)]
    pub const fn speculative(vma: &'a Vma, seen: u64) -> Self {
        Self { vma: Some(vma), seen }
    }

    /// A ticket under the VMA's lock.
    pub const fn vma_lock() -> Self {
        Self { vma: None, seen: VMA_LOCK }
    }

    /// A ticket under a lock that keeps everybody out who could change the mapping.
    pub const fn held() -> Self {
        Self { vma: None, seen: SPACE_LOCK }
    }

    /// A ticket under a lock of the page alone.
    pub const fn page_held() -> Self {
        Self { vma: None, seen: PAGE_LOCK }
    }

    /// Whether what it says of the page it says of those beside it in the VMA, too.
    pub const fn is_of_neighbours(self) -> bool {
        self.vma.is_some() || self.seen != PAGE_LOCK
    }

    /// Whether the answer still stands. Called with the entry held, which makes a yes final: a
    /// writer that comes later waits for the entry.
    #[inline(always)]
    pub fn stands(self) -> bool {
        self.vma.is_none_or(|vma| vma.sequence.unchanged(self.seen))
    }

    /// Whether it is held up by a VMA lock alone.
    pub const fn is_vma_lock(self) -> bool {
        self.vma.is_none() && self.seen == VMA_LOCK
    }
}

/// Why an attempt was given up. Nothing of it is left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// The VMA is missing, being changed, or was changed meanwhile.
    VmaChanged,
    /// The VMA has no reverse-map root and this attempt may not make one.
    NoAnon,
    /// Something that attempts of this kind do not deal with.
    NotSupported,
    /// The VMA seems to forbid the access.
    Access,
    /// A table above the entry changed.
    TableChanged,
    /// No frame could be had without waiting.
    NoMemory,
    /// The heap had no room for a reverse-map root.
    NoHeap,
    /// The page lies beyond the end of its object.
    BeyondObject,
    /// The page has as many mappings as can be counted.
    TooManyMappings,
}

impl Abort {
    /// Where a speculation given up for this reason is counted.
    pub(crate) const fn counter(self) -> Counter {
        match self {
            Self::VmaChanged => Counter::SpfVmaChanged,
            Self::NoAnon => Counter::SpfVmaNoanon,
            Self::NotSupported | Self::BeyondObject => Counter::SpfVmaNotsup,
            Self::Access => Counter::SpfVmaAccess,
            Self::TableChanged => Counter::SpfPmdChanged,
            Self::NoMemory | Self::NoHeap | Self::TooManyMappings => Counter::SpfNomem,
        }
    }

    /// The trace point that tells of it, where the field has one.
    pub(crate) const fn point(self) -> Option<Point> {
        match self {
            Self::VmaChanged => Some(Point::VmaChanged),
            Self::NoAnon => Some(Point::VmaNoanon),
            Self::NotSupported | Self::BeyondObject => Some(Point::VmaNotsup),
            Self::Access => Some(Point::VmaAccess),
            Self::TableChanged => Some(Point::PmdChanged),
            Self::NoMemory | Self::NoHeap | Self::TooManyMappings => None,
        }
    }
}
