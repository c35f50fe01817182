//! The translation look-aside buffers of one CPU.
//!
//! Two first-level buffers, for instructions and for data, over a second level shared by both; each
//! is set-associative, and replaced round-robin. Sizes match [Intel's Skylake cores](PROCESSOR)
//! ("Intel 64 and IA-32 Architectures Optimization Reference Manual", the table of its TLB
//! parameters):
//!
//! | | 4 KiB | 2 MiB | 1 GiB |
//! |---|---|---|---|
//! | instruction | 128, 8-way | 8, 8-way | |
//! | data | 64, 4-way | 32, 4-way | 4, 4-way |
//! | second level | 1536, 12-way, with 2 MiB | | 16, 4-way |
//!
//! There are no address-space identifiers: switching spaces flushes. Real cores replace by
//! (pseudo-)LRU, which Intel does not document; a thread has the whole core, with no sibling to
//! share its buffers. The counters ([`TlbStats`]) have the [names](TlbStats::named) of `perf`
//! events on such a core, but belong to a *simulated* TLB.
//!
//! [Upper-level entries](upper) are cached too, so that a walk starts at the deepest known table.
//!
//! *May forget, never lies:* a buffer may lose an entry at any time; but a lookup finds only
//! entries filled after the latest invalidation of their page.
//!
//! Entries and counters are relaxed atomics, which cost as much as plain memory. Only the CPU's own
//! thread should use the entries, but an access by another thread breaks only the TLB's own
//! promise. Counters can be read from any thread. A tag carries the *epoch* of its filling, so that
//! dropping everything is one increment.

mod buffer;
pub mod upper;

use crate::mmu::{PageSize, Step, Translation};
use buffer::Buffer;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use faultless::format::CANONICAL_END;
use faultless::{Access, PAGE_SHIFT, PAGE_SIZE, VirtRange};
use upper::UpperCaches;

/// Invalidations of more pages than this drop everything, as Linux's do.
pub const SINGLE_PAGE_CEILING: u64 = 33;

/// The processor with these buffer sizes.
pub const PROCESSOR: &str = "Intel Skylake";

/// A counter incremented by its CPU and readable by every thread.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    #[inline(always)]
    fn add(&self) {
        self.0.store(self.0.load(Relaxed) + 1, Relaxed);
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Debug, Default)]
        struct Counters { $($name: Counter),* }

        /// The statistics of one CPU's TLBs, or the sum of several.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct TlbStats { $($(#[$doc])* pub $name: u64),* }

        impl Counters {
            fn read(&self) -> TlbStats {
                TlbStats { $($name: self.$name.0.load(Relaxed)),* }
            }
        }

        impl core::ops::AddAssign for TlbStats {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Fetches served by the instruction buffer.
    instruction_hits,
    /// Loads and stores served by the data buffer.
    data_hits,
    /// Fetches that missed the instruction buffer and hit the second level.
    instruction_second_hits,
    /// Loads that missed the data buffer and hit the second level.
    load_second_hits,
    /// Stores that missed the data buffer and hit the second level.
    store_second_hits,
    /// Walks of the page tables for fetches without a hit in any buffer, including walks that ended
    /// in a fault.
    instruction_walks,
    /// Walks of the page tables for loads.
    load_walks,
    /// Walks of the page tables for stores, including the first store to a page that was only read
    /// before.
    store_walks,
    /// Walks of all kinds that started at a known table below the root.
    short_walks,
    /// Flushes of everything.
    flushes,
    /// Pages invalidated one by one.
    page_flushes,
}

/// The names and meanings of the values of [`TlbStats::named`].
pub const TLB_COUNTERS: [(&str, &str); 6] = [
    ("iTLB-load-misses", "Page walks for instruction fetches, in the simulated TLBs."),
    ("dTLB-load-misses", "Page walks for loads, in the simulated TLBs."),
    ("dTLB-store-misses", "Page walks for stores, in the simulated TLBs."),
    ("itlb_misses.stlb_hit", "Fetches that hit the second-level TLB (simulated)."),
    ("dtlb_load_misses.stlb_hit", "Loads that hit the second-level TLB (simulated)."),
    ("dtlb_store_misses.stlb_hit", "Stores that hit the second-level TLB (simulated)."),
];

impl TlbStats {
    /// Returns the counts under their `perf list` names on this [`PROCESSOR`]: a miss in perf is a
    /// walk here.
    pub const fn named(&self) -> [(&'static str, u64); 6] {
        let counts = [
            self.instruction_walks,
            self.load_walks,
            self.store_walks,
            self.instruction_second_hits,
            self.load_second_hits,
            self.store_second_hits,
        ];
        let mut named = [("", 0); 6];
        let mut at = 0;
        while at < named.len() {
            named[at] = (TLB_COUNTERS[at].0, counts[at]);
            at += 1;
        }
        named
    }

    /// Walks for accesses of all kinds.
    pub const fn walks(&self) -> u64 {
        self.instruction_walks + self.load_walks + self.store_walks
    }

    /// Returns the number of accesses of all kinds that hit the second level.
    pub const fn second_hits(&self) -> u64 {
        self.instruction_second_hits + self.load_second_hits + self.store_second_hits
    }
}

/// The buffers of one CPU.
#[derive(Debug)]
pub struct Tlb {
    /// Part of every valid tag; never 0 and never repeated until it wraps.
    epoch: AtomicU64,
    /// Whether a 2 MiB or 1 GiB page was filled since the last full drop; otherwise, lookups skip
    /// these sizes.
    huge: AtomicBool,
    data_4k: Buffer<16, 4>,
    data_2m: Buffer<8, 4>,
    data_1g: Buffer<1, 4>,
    instruction_4k: Buffer<16, 8>,
    instruction_2m: Buffer<1, 8>,
    second: Buffer<128, 12>,
    second_1g: Buffer<4, 4>,
    upper: UpperCaches,
    counters: Counters,
}

/// The bit position of the epoch in a tag: above 36 bits of page number and one bit of size.
const EPOCH_SHIFT: u32 = 37;
const LAST_EPOCH: u64 = (1 << (64 - EPOCH_SHIFT)) - 1;

impl Default for Tlb {
    fn default() -> Self {
        Self::new()
    }
}

impl Tlb {
    /// Empty buffers.
    pub fn new() -> Self {
        Self {
            epoch: AtomicU64::new(1),
            huge: AtomicBool::new(false),
            data_4k: Buffer::new(),
            data_2m: Buffer::new(),
            data_1g: Buffer::new(),
            instruction_4k: Buffer::new(),
            instruction_2m: Buffer::new(),
            second: Buffer::new(),
            second_1g: Buffer::new(),
            upper: UpperCaches::new(),
            counters: Counters::default(),
        }
    }

    /// Returns the tag of a page: its number, whether it is a 2 MiB page (the second level holds
    /// both sizes), and the present epoch.
    #[inline(always)]
    fn tag(&self, page: u64, size: PageSize) -> u64 {
        let large = u64::from(size == PageSize::Size2M);
        page | large << (EPOCH_SHIFT - 1) | self.epoch.load(Relaxed) << EPOCH_SHIFT
    }

    /// Returns the translation of `addr` (below 2^47), if it is cached and allows `access`.
    ///
    /// A translation that forbids the access, or is not yet marked dirty for a store, counts as a
    /// miss: the tables may allow more by now.
    #[inline(always)]
    pub fn lookup(&self, addr: u64, access: Access) -> Option<Translation> {
        let page = addr >> PAGE_SHIFT;
        let tag = self.tag(page, PageSize::Size4K);
        let first = if access == Access::Execute {
            self.instruction_4k.find(page, tag)
        } else {
            self.data_4k.find(page, tag)
        };
        match first {
            Some(found) if found.permits(access) => {
                self.count_first(access);
                Some(found)
            }
            _ => self.lookup_further(addr, access),
        }
    }

    #[inline(always)]
    fn count_first(&self, access: Access) {
        match access {
            Access::Execute => self.counters.instruction_hits.add(),
            Access::Read | Access::Write => self.counters.data_hits.add(),
        }
    }

    /// [`lookup`](Self::lookup) beyond the 4 KiB entries of the first level.
    #[inline(never)]
    fn lookup_further(&self, addr: u64, access: Access) -> Option<Translation> {
        let huge = self.huge.load(Relaxed);
        if huge && let Some(found) = self.first_huge(addr, access) {
            self.count_first(access);
            return Some(found);
        }
        let page = addr >> PAGE_SHIFT;
        let small = self.second.find(page, self.tag(page, PageSize::Size4K));
        let second = small.or_else(|| if huge { self.second_huge(addr) } else { None });
        match second {
            Some(found) if found.permits(access) => {
                self.count_second(access);
                self.fill_first(addr, access, found);
                Some(found)
            }
            _ => None,
        }
    }

    fn count_second(&self, access: Access) {
        match access {
            Access::Execute => self.counters.instruction_second_hits.add(),
            Access::Read => self.counters.load_second_hits.add(),
            Access::Write => self.counters.store_second_hits.add(),
        }
    }

    fn first_huge(&self, addr: u64, access: Access) -> Option<Translation> {
        let page = addr >> PageSize::Size2M.shift();
        let tag = self.tag(page, PageSize::Size2M);
        let found = if access == Access::Execute {
            self.instruction_2m.find(page, tag)
        } else {
            self.data_2m.find(page, tag).or_else(|| {
                let page = addr >> PageSize::Size1G.shift();
                self.data_1g.find(page, self.tag(page, PageSize::Size1G))
            })
        };
        found.filter(|found| found.permits(access))
    }

    fn second_huge(&self, addr: u64) -> Option<Translation> {
        let page = addr >> PageSize::Size2M.shift();
        let found = self.second.find(page, self.tag(page, PageSize::Size2M));
        found.or_else(|| {
            let page = addr >> PageSize::Size1G.shift();
            self.second_1g.find(page, self.tag(page, PageSize::Size1G))
        })
    }

    /// Caches the result of a walk for `access` to `addr`.
    pub fn fill(&self, addr: u64, access: Access, found: Translation) {
        let page = addr >> found.size().shift();
        let tag = self.tag(page, found.size());
        if found.size() != PageSize::Size4K {
            self.huge.store(true, Relaxed);
        }
        if found.size() == PageSize::Size1G {
            self.second_1g.fill(page, tag, found);
        } else {
            self.second.fill(page, tag, found);
        }
        self.fill_first(addr, access, found);
    }

    fn fill_first(&self, addr: u64, access: Access, found: Translation) {
        let page = addr >> found.size().shift();
        let tag = self.tag(page, found.size());
        match (access, found.size()) {
            (Access::Execute, PageSize::Size4K) => self.instruction_4k.fill(page, tag, found),
            (Access::Execute, PageSize::Size2M) => self.instruction_2m.fill(page, tag, found),
            // Fetches from a giant page are left to the second level.
            (Access::Execute, PageSize::Size1G) => {}
            (_, PageSize::Size4K) => self.data_4k.fill(page, tag, found),
            (_, PageSize::Size2M) => self.data_2m.fill(page, tag, found),
            (_, PageSize::Size1G) => self.data_1g.fill(page, tag, found),
        }
    }

    /// Returns the deepest known table on the way to `addr` (below 2^47).
    #[inline]
    pub fn table(&self, addr: u64) -> Option<Step> {
        self.upper.find(addr, self.epoch.load(Relaxed))
    }

    /// Caches a table of a walk to `addr`.
    #[inline]
    pub fn fill_table(&self, addr: u64, step: Step) {
        self.upper.fill(addr, self.epoch.load(Relaxed), step);
    }

    /// Drops every translation of a page that overlaps `range`, and the known tables on the way
    /// there.
    pub fn invalidate_range(&self, range: VirtRange) {
        let range = range.intersect(VirtRange::new(0, CANONICAL_END)).widen(PAGE_SIZE);
        if range.pages() > SINGLE_PAGE_CEILING {
            return self.invalidate_all();
        }
        for addr in (range.start..range.end).step_by(PAGE_SIZE as usize) {
            self.forget(addr);
            self.upper.forget(addr, self.epoch.load(Relaxed));
            self.counters.page_flushes.add();
        }
    }

    /// Drops every translation of `addr`, of any size, as a fault does. Tables on the way there
    /// stay known: hardware may walk ahead of a program at any time, and may thus cache them again.
    pub fn forget(&self, addr: u64) {
        let page = addr >> PAGE_SHIFT;
        let tag = self.tag(page, PageSize::Size4K);
        self.data_4k.drop_page(page, tag);
        self.instruction_4k.drop_page(page, tag);
        self.second.drop_page(page, tag);
        if !self.huge.load(Relaxed) {
            return;
        }
        let page = addr >> PageSize::Size2M.shift();
        let tag = self.tag(page, PageSize::Size2M);
        self.data_2m.drop_page(page, tag);
        self.instruction_2m.drop_page(page, tag);
        self.second.drop_page(page, tag);
        let page = addr >> PageSize::Size1G.shift();
        let tag = self.tag(page, PageSize::Size1G);
        self.data_1g.drop_page(page, tag);
        self.second_1g.drop_page(page, tag);
    }

    /// Drops everything.
    pub fn invalidate_all(&self) {
        let epoch = self.epoch.load(Relaxed);
        if epoch == LAST_EPOCH {
            self.clear();
            self.epoch.store(1, Relaxed);
        } else {
            self.epoch.store(epoch + 1, Relaxed);
        }
        self.huge.store(false, Relaxed);
        self.counters.flushes.add();
    }

    /// Makes every tag invalid in any epoch.
    fn clear(&self) {
        self.data_4k.clear();
        self.data_2m.clear();
        self.data_1g.clear();
        self.instruction_4k.clear();
        self.instruction_2m.clear();
        self.second.clear();
        self.second_1g.clear();
        self.upper.clear();
    }

    /// Counts a walk of the page tables for `access`; `short` means that the walk did not start at
    /// the root.
    #[inline]
    pub fn count_walk(&self, access: Access, short: bool) {
        match access {
            Access::Execute => self.counters.instruction_walks.add(),
            Access::Read => self.counters.load_walks.add(),
            Access::Write => self.counters.store_walks.add(),
        }
        if short {
            self.counters.short_walks.add();
        }
    }

    /// Returns the statistics so far. Counters only grow.
    pub fn stats(&self) -> TlbStats {
        self.counters.read()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless::FrameNumber;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const SIZES: [PageSize; 3] = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
    const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];

    fn full(frame: u32, size: PageSize) -> Translation {
        Translation::new(FrameNumber(frame), size, true, true, true)
    }

    #[test]
    fn a_filled_page_hits_until_its_invalidation() {
        for size in SIZES {
            for access in ACCESSES {
                let tlb = Tlb::new();
                let addr = 5 << size.shift();
                let inside = addr + size.bytes() / 2;
                assert_eq!(tlb.lookup(addr, access), None);
                tlb.fill(addr, access, full(1 << 18, size));
                assert_eq!(tlb.lookup(inside, access), Some(full(1 << 18, size)));
                tlb.invalidate_range(VirtRange::page(inside));
                assert_eq!(tlb.lookup(addr, access), None);
                let stats = tlb.stats();
                assert_eq!(stats.page_flushes, 1);
                assert_eq!(stats.data_hits + stats.instruction_hits + stats.second_hits(), 1);
            }
        }
    }

    #[test]
    fn the_second_level_serves_pages_lost_from_the_first() {
        let tlb = Tlb::new();
        // Five pages of one data set of four ways; 16 sets apart.
        for i in 0..5 {
            tlb.fill((i * 16) << PAGE_SHIFT, Access::Read, full(i as u32 + 1, PageSize::Size4K));
        }
        assert_eq!(tlb.lookup(0, Access::Read), Some(full(1, PageSize::Size4K)));
        assert_eq!(tlb.stats().load_second_hits, 1);
        assert!(tlb.lookup(0, Access::Read).is_some());
        assert_eq!((tlb.stats().second_hits(), tlb.stats().data_hits), (1, 1));
        // Fetches hit second-level entries filled by data accesses.
        assert!(tlb.lookup(0, Access::Execute).is_some());
        assert_eq!((tlb.stats().second_hits(), tlb.stats().instruction_second_hits), (2, 1));
    }

    /// Repeated accesses to pages in a fixed order: pages that fit into a level hit there.
    #[test]
    fn the_levels_have_the_sizes_of_the_processor() {
        let pass = |tlb: &Tlb, pages: u64, size: PageSize, access| {
            for page in 0..pages {
                let addr = page << size.shift();
                if tlb.lookup(addr, access).is_none() {
                    tlb.count_walk(access, false);
                    tlb.fill(addr, access, full((page as u32) << 9, size));
                }
            }
        };
        for (size, access, first, second) in [
            (PageSize::Size4K, Access::Execute, 128, 1536),
            (PageSize::Size4K, Access::Read, 64, 1536),
            (PageSize::Size2M, Access::Execute, 8, 1536),
            (PageSize::Size2M, Access::Read, 32, 1536),
            (PageSize::Size1G, Access::Read, 4, 16),
        ] {
            for (pages, hits_first, hits_second) in
                [(first, true, false), (second, false, true), (2 * second, false, false)]
            {
                let tlb = Tlb::new();
                pass(&tlb, pages, size, access);
                let filled = tlb.stats();
                assert_eq!((filled.walks(), filled.second_hits()), (pages, 0));
                pass(&tlb, pages, size, access);
                let stats = tlb.stats();
                let hits = stats.instruction_hits + stats.data_hits;
                assert_eq!(hits, if hits_first { pages } else { 0 }, "{pages} of {size:?}");
                assert_eq!(
                    stats.second_hits(),
                    if hits_second { pages } else { 0 },
                    "{pages} of {size:?}"
                );
                assert_eq!(
                    stats.instruction_walks,
                    if access == Access::Execute { stats.walks() } else { 0 }
                );
            }
        }
    }

    #[test]
    fn sizes_do_not_mix_up_in_the_shared_level() {
        let tlb = Tlb::new();
        tlb.fill(3 << 21, Access::Read, full(1 << 9, PageSize::Size2M));
        assert_eq!(tlb.lookup(3 << 12, Access::Read), None);
    }

    #[test]
    fn a_forbidding_translation_misses_and_is_replaced() {
        let tlb = Tlb::new();
        let clean = Translation::new(FrameNumber(7), PageSize::Size4K, true, false, false);
        tlb.fill(0x5000, Access::Read, clean);
        assert_eq!(tlb.lookup(0x5000, Access::Read), Some(clean));
        assert_eq!(tlb.lookup(0x5000, Access::Write), None);
        assert_eq!(tlb.lookup(0x5000, Access::Execute), None);
        let dirty = Translation::new(FrameNumber(7), PageSize::Size4K, true, true, false);
        tlb.fill(0x5000, Access::Write, dirty);
        assert_eq!(tlb.lookup(0x5000, Access::Read), Some(dirty));
        assert_eq!(tlb.lookup(0x5000, Access::Write), Some(dirty));
    }

    #[test]
    fn the_last_epoch_wraps_without_reviving_entries() {
        let tlb = Tlb::new();
        tlb.fill(0x5000, Access::Read, full(7, PageSize::Size4K));
        tlb.epoch.store(LAST_EPOCH, Relaxed);
        tlb.fill(0x6000, Access::Read, full(8, PageSize::Size4K));
        tlb.invalidate_all();
        assert_eq!(tlb.epoch.load(Relaxed), 1);
        assert_eq!(tlb.lookup(0x5000, Access::Read), None);
        assert_eq!(tlb.lookup(0x6000, Access::Read), None);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Fill { page: u64, size: PageSize, access: Access, dirty: bool },
        Look { page: u64, access: Access },
        Drop { page: u64, pages: u64 },
        DropAll,
    }

    fn op() -> impl Strategy<Value = Op> {
        // Pages around a 1 GiB boundary, in few sets, so that buffers overflow.
        let page = || (0u64..6, 0u64..40).prop_map(|(big, small)| (big << 17) + small * 16);
        let size = proptest::sample::select(&SIZES[..]);
        let access = || proptest::sample::select(&ACCESSES[..]);
        prop_oneof![
            4 => (page(), size, access(), any::<bool>())
                .prop_map(|(page, size, access, dirty)| Op::Fill { page, size, access, dirty }),
            6 => (page(), access()).prop_map(|(page, access)| Op::Look { page, access }),
            2 => (page(), 1u64..40).prop_map(|(page, pages)| Op::Drop { page, pages }),
            1 => Just(Op::DropAll),
        ]
    }

    proptest! {
        /// Compares the TLB with a page map that drops only invalidated pages.
        #[test]
        fn lookups_return_only_current_entries(ops in proptest::collection::vec(op(), 1..200)) {
            let tlb = Tlb::new();
            // The last fill of each page of each size, until its invalidation.
            let mut model: HashMap<(PageSize, u64), Translation> = HashMap::new();
            let mut frame = 0;
            for op in ops {
                match op {
                    Op::Fill { page, size, access, dirty } => {
                        let addr = page << PAGE_SHIFT;
                        // The tables never map one address at two sizes without a flush in between.
                        for other in SIZES.into_iter().filter(|&other| other != size) {
                            model.retain(|&(s, n), _| {
                                s != other || !overlap(n << s.shift(), s, addr, size)
                            });
                        }
                        tlb.invalidate_range(VirtRange::page(addr));
                        if size != PageSize::Size4K {
                            tlb.invalidate_all();
                            model.clear();
                        }
                        model.remove(&(size, addr >> size.shift()));
                        model.retain(|&(s, n), _| !overlap(n << s.shift(), s, addr, PageSize::Size4K));
                        frame += 1 << 18;
                        let found =
                            Translation::new(FrameNumber(frame & 0xfff_ffff), size, true, dirty, true);
                        tlb.fill(addr, access, found);
                        model.insert((size, addr >> size.shift()), found);
                    }
                    Op::Look { page, access } => {
                        let addr = page << PAGE_SHIFT;
                        if let Some(found) = tlb.lookup(addr, access) {
                            let truth = model.get(&(found.size(), addr >> found.size().shift()));
                            prop_assert_eq!(Some(&found), truth);
                            prop_assert!(found.permits(access));
                        }
                    }
                    Op::Drop { page, pages } => {
                        let start = page << PAGE_SHIFT;
                        let range = VirtRange::new(start, start + (pages << PAGE_SHIFT));
                        tlb.invalidate_range(range);
                        model.retain(|&(size, number), _| {
                            let start = number << size.shift();
                            !range.overlaps(VirtRange::new(start, start + size.bytes()))
                        });
                    }
                    Op::DropAll => {
                        tlb.invalidate_all();
                        model.clear();
                    }
                }
            }
        }
    }

    fn overlap(a: u64, a_size: PageSize, b: u64, b_size: PageSize) -> bool {
        let b = b & !(b_size.bytes() - 1);
        VirtRange::new(a, a + a_size.bytes()).overlaps(VirtRange::new(b, b + b_size.bytes()))
    }
}
