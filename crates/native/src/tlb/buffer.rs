//! One set-associative buffer of a CPU, the building block of the translation look-aside buffers
//! and the caches of upper-level entries.

use crate::mmu::Translation;
use core::num::NonZeroU64;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// The content of a tag.
#[derive(Debug, Default)]
struct Entry {
    bits: AtomicU64,
    owner: AtomicU64,
}

#[derive(Debug)]
struct Set<const WAYS: usize> {
    /// Page number, size and epoch of each way (see [`Tlb::tag`]), side by side to be searched.
    tags: [AtomicU64; WAYS],
    ways: [Entry; WAYS],
    /// The next way to be replaced.
    next: AtomicU8,
}

impl<const WAYS: usize> Set<WAYS> {
    #[inline(always)]
    fn way(&self, tag: u64) -> Option<usize> {
        self.tags.iter().position(|way| way.load(Relaxed) == tag)
    }
}

/// Sets of translations, replaced round-robin.
#[derive(Debug)]
pub(super) struct Buffer<const SETS: usize, const WAYS: usize>([Set<WAYS>; SETS]);

impl<const SETS: usize, const WAYS: usize> Buffer<SETS, WAYS> {
    pub(super) fn new() -> Self {
        const { assert!(SETS.is_power_of_two()) };
        Self(core::array::from_fn(|_| Set {
            tags: core::array::from_fn(|_| AtomicU64::new(0)),
            ways: core::array::from_fn(|_| Entry::default()),
            next: AtomicU8::new(0),
        }))
    }

    #[inline(always)]
    fn set(&self, page: u64) -> &Set<WAYS> {
        &self.0[page as usize & (SETS - 1)]
    }

    #[inline(always)]
    pub(super) fn find(&self, page: u64, tag: u64) -> Option<Translation> {
        let set = self.set(page);
        let Entry { bits, owner } = &set.ways[set.way(tag)?];
        // A way with a tag has been filled: its bits are not 0.
        let bits = NonZeroU64::new(bits.load(Relaxed))?;
        Some(Translation { bits, owner: owner.load(Relaxed) })
    }

    pub(super) fn fill(&self, page: u64, tag: u64, found: Translation) {
        let set = self.set(page);
        // A page has one entry at most: an older entry is replaced.
        let way = set.way(tag).unwrap_or_else(|| {
            let next = usize::from(set.next.load(Relaxed));
            set.next.store(((next + 1) % WAYS) as u8, Relaxed);
            next
        });
        set.tags[way].store(tag, Relaxed);
        set.ways[way].bits.store(found.bits.get(), Relaxed);
        set.ways[way].owner.store(found.owner, Relaxed);
    }

    pub(super) fn drop_page(&self, page: u64, tag: u64) {
        let set = self.set(page);
        if let Some(way) = set.way(tag) {
            set.tags[way].store(0, Relaxed);
        }
    }

    pub(super) fn clear(&self) {
        self.0.iter().flat_map(|set| &set.tags).for_each(|tag| tag.store(0, Relaxed));
    }
}
