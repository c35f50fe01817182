//! Faults on mapped files with other sizes of fault-around.
//!
//! A load or fetch from a file maps the surrounding pages that are in the page cache
//! (`fault_around_bytes`, 64 KiB by default). Recordings are made without fault-around if the host
//! permits this. Otherwise each recorded fault counts as a use of all pages around its page.
//!
//! If the page cache is cold, a fault reads pages around its page (`read_ahead_kb`), and a fault
//! behind the pages that were read last reads the next pages. The walk assumes that no page of a
//! new mapping is in the page cache. A recording has no names of files: a second mapping of a file
//! counts as another file.

use crate::event::{Access, Backing, Birth, Kind, Trace};
use crate::page_set::{PageSet, pages};
use crate::plan::PlanError;
use crate::record::AROUND_ON;
use faultless::PAGE_SIZE;
use rangemap::{RangeMap, RangeSet};
use std::ops::Range;

/// The orders of pages that one fault maps: 64 KiB, 256 KiB, 1 MiB and 2 MiB.
pub const ORDERS: [u8; 4] = [4, 6, 8, 9];
/// The orders of pages that one fault reads from a cold file: 128 KiB, 512 KiB, 2 MiB and 8 MiB.
pub const READS: [u8; 4] = [5, 7, 9, 11];
/// The smallest mapping for which an additional call is worthwhile, in bytes.
const LARGE: u64 = 1 << 20;

/// The misses beyond hits after which the kernel reads single pages.
const MOST_MISSES: u32 = 100;
/// Pages of a huge page.
const HUGE: u64 = 512;

/// Counts of reads of cold files, with one size of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Reads around a page, for which the program waits.
    pub around: u64,
    /// Reads behind the pages that were read before. The kernel starts such a read early.
    pub next: u64,
    /// The reads of `next` directly behind a read of `around`: each begins a sequence, in which the
    /// kernel allocates larger and larger folios.
    pub sequences: u64,
    /// Reads of single pages, after which the kernel has stopped to read around.
    pub single: u64,
    /// Pages that the reads bring into the page cache.
    pub pages: u64,
}

/// Counts of faults on files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// Faults of loads and fetches, with each size of [`ORDERS`].
    pub loads: [u64; ORDERS.len()],
    /// Pages that the faults map, with each size, at most.
    pub mapped: [u64; ORDERS.len()],
    /// Large mappings without executable code, and mostly loaded from.
    pub large: u64,
    /// Their pages, and the loads of `loads` in them with the default size.
    pub large_pages: u64,
    /// See `large_pages`.
    pub large_loads: u64,
    /// The loads of `large_loads` behind the pages that the previous load has mapped.
    pub large_next: u64,
    /// The bytes of the smallest of them.
    pub smallest: u64,
    /// Large mappings without executable code.
    pub data: u64,
    /// All pages of these mappings, and the pages that the program uses of them, at most.
    pub data_pages: u64,
    /// See `data_pages`.
    pub data_used: u64,
    /// Whether fault-around was on during the recording, so that some uses of pages are missing.
    pub around: bool,
    /// Reads of large mappings without executable code from a cold page cache, with each size of
    /// [`READS`].
    pub cold: [Reads; READS.len()],
}

impl Files {
    /// Counts `trace`. A large mapping counts if the program touches the share `mostly` of its
    /// pages, from 0 to 1.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`].
    pub fn of(trace: &Trace, mostly: f64) -> Result<Self, PlanError> {
        trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
        let around = trace.header.notes.iter().any(|note| note.starts_with(AROUND_ON));
        let mut walk = Walk { mostly, ..Walk::default() };
        walk.out.around = around;
        walk.memories.resize_with(trace.processes.len(), Memory::default);
        for event in &trace.events {
            let process = trace.threads[event.thread as usize].process as usize;
            match event.kind {
                Kind::Spawn { child, birth: Birth::Fork } => {
                    let to = trace.threads[child as usize].process as usize;
                    // The entries of files are not copied.
                    walk.memories[to].mapped = walk.memories[process].mapped.clone();
                }
                Kind::Exec => walk.end(process),
                kind => walk.step(process, kind),
            }
        }
        (0..trace.processes.len()).for_each(|process| walk.end(process));
        Ok(walk.out)
    }
}

#[derive(Default)]
struct Memory {
    /// The mappings, by page, with an index in `large`.
    mapped: RangeMap<u64, Option<usize>>,
    /// Mapped windows of each size.
    around: [PageSet; ORDERS.len()],
}

/// A large mapping.
#[derive(Default)]
struct Large {
    pages: u64,
    touched: PageSet,
    loads: u64,
    /// The loads behind the pages that the previous load has mapped.
    next: u64,
    /// The window of the previous load, of the default size.
    window: Option<u64>,
    /// The pages in the page cache, with each size of [`READS`].
    cached: [RangeSet<u64>; READS.len()],
    /// The misses in the page cache beyond its hits, with each size.
    misses: [u32; READS.len()],
    /// The end of the last read if it was a read around a page, with each size.
    around: [Option<u64>; READS.len()],
    /// The page of the last fault.
    last: u64,
}

#[derive(Default)]
struct Walk {
    out: Files,
    mostly: f64,
    memories: Vec<Memory>,
    large: Vec<Large>,
}

impl Large {
    /// Adds a fault on `page` of this mapping, which has the pages `mapping`.
    fn touch(&mut self, page: u64, mapping: &Range<u64>, out: &mut Files) {
        // Fault-around hides uses of pages around a page, and uses in a sequence. A huge page of
        // the page cache is mapped by one fault.
        let (mut from, mut to) = (page, page + 1);
        if out.around {
            from = (page >> ORDERS[0] << ORDERS[0]).max(mapping.start);
            to = (from + (1 << ORDERS[0])).min(mapping.end);
            if (1..=HUGE).contains(&page.saturating_sub(self.last)) && self.last >= mapping.start {
                from = from.min(self.last);
            }
            self.last = page;
        }
        for page in from..to {
            self.touched.insert(page);
        }
        // A fault in the middle of a sequence reads the hidden pages first.
        let first = if from < page - page % (1 << ORDERS[0]) { from } else { page };
        for page in first..=page {
            self.read(page, mapping, &mut out.cold);
        }
    }

    /// Reads `page` of this mapping, which has the pages `mapping`, from a cold page cache.
    fn read(&mut self, page: u64, mapping: &Range<u64>, out: &mut [Reads; READS.len()]) {
        for ((((cached, misses), around), order), out) in
            self.cached.iter_mut().zip(&mut self.misses).zip(&mut self.around).zip(READS).zip(out)
        {
            if cached.contains(&page) {
                // Fault-around counts each page as a hit.
                *misses = misses.saturating_sub(1 << ORDERS[0]);
                continue;
            }
            // A fault behind pages in the page cache continues a sequence.
            let next = page > mapping.start && cached.contains(&(page - 1));
            let single = !next && *misses >= MOST_MISSES;
            *misses += u32::from(!next);
            let pages = if single { 1 } else { 1 << order };
            let start = if next { page } else { page.saturating_sub(pages / 2) };
            let start = start.max(mapping.start);
            let window = start..(start + pages).min(mapping.end);
            out.sequences += u64::from(next && *around == Some(page));
            *around = (!next && !single).then_some(window.end);
            *match (next, single) {
                (true, _) => &mut out.next,
                (_, true) => &mut out.single,
                _ => &mut out.around,
            } += 1;
            out.pages += cached.gaps(&window).map(|gap| gap.end - gap.start).sum::<u64>();
            cached.insert(window);
        }
    }
}

impl Walk {
    fn step(&mut self, process: usize, kind: Kind) {
        match kind {
            Kind::Map { start, len, prot, backing, .. }
            | Kind::Area { start, len, prot, backing } => {
                let range = pages(start, len);
                self.unmap(process, range.clone());
                if !matches!(backing, Backing::File | Backing::SharedFile) {
                    return;
                }
                let executes = prot.contains(crate::event::Prot::EXEC);
                let large = (len >= LARGE && !executes).then(|| {
                    let pages = len / PAGE_SIZE;
                    self.large.push(Large { pages, ..Large::default() });
                    self.large.len() - 1
                });
                self.memories[process].mapped.insert(range, large);
            }
            Kind::Unmap { start, len } => self.unmap(process, pages(start, len)),
            Kind::Fault { page, access, present: false, .. } => {
                self.fault(process, page / PAGE_SIZE, access);
            }
            _ => {}
        }
    }

    fn fault(&mut self, process: usize, page: u64, access: Access) {
        let memory = &mut self.memories[process];
        let Some((mapping, large)) = memory.mapped.get_key_value(&page) else { return };
        let large = *large;
        if let Some(at) = large {
            self.large[at].touch(page, mapping, &mut self.out);
        }
        if access == Access::Write {
            return;
        }
        let mut first = None;
        for (at, order) in ORDERS.iter().enumerate() {
            if !memory.around[at].insert(page >> order) {
                continue;
            }
            let window = page >> order << order;
            let end = (window + (1 << order)).min(mapping.end);
            self.out.loads[at] += 1;
            self.out.mapped[at] += end - window.max(mapping.start);
            if at == 0 {
                first = Some(window >> order);
            }
        }
        if let (Some(at), Some(window)) = (large, first) {
            let large = &mut self.large[at];
            large.loads += 1;
            // A fault on a huge page of the page cache maps the whole huge page.
            let is_next = |last| last < window && window - last <= HUGE >> ORDERS[0];
            large.next += u64::from(large.window.is_some_and(is_next));
            large.window = Some(window);
        }
    }

    fn unmap(&mut self, process: usize, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let memory = &mut self.memories[process];
        memory.mapped.remove(range.clone());
        for (around, order) in memory.around.iter_mut().zip(ORDERS) {
            around.remove(range.start >> order..range.end.div_ceil(1 << order));
        }
    }

    fn end(&mut self, process: usize) {
        self.memories[process] = Memory::default();
        let mostly = self.mostly;
        // Mappings of other processes are counted at the end of the last process.
        if self.memories.iter().any(|memory| !memory.mapped.is_empty()) {
            return;
        }
        for large in self.large.drain(..) {
            let used = large.touched.len();
            self.out.data += 1;
            self.out.data_pages += large.pages;
            self.out.data_used += used;
            if used as f64 >= mostly * large.pages as f64 {
                let bytes = large.pages * PAGE_SIZE;
                let smallest = if self.out.large == 0 { bytes } else { self.out.smallest };
                self.out.smallest = smallest.min(bytes);
                self.out.large += 1;
                self.out.large_pages += large.pages;
                self.out.large_loads += large.loads;
                self.out.large_next += large.next;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Prot;

    const START: u64 = 1 << 40;

    fn map(prot: Prot) -> Kind {
        let len = 1024 * PAGE_SIZE;
        Kind::Map { start: START, len, prot, flags: 1, backing: Backing::SharedFile }
    }

    fn of(first: Kind, faults: impl Iterator<Item = (u64, Access)>) -> Files {
        let fault = |(page, access)| Kind::first(START + page * PAGE_SIZE, access);
        let events: Vec<_> = [first].into_iter().chain(faults.map(fault)).collect();
        Files::of(&Trace::of_one_thread(events), 0.9).expect("a valid trace")
    }

    #[test]
    fn larger_windows_save_loads_in_sequence() {
        let all = || (0..1024).map(|page| (page, Access::Read));
        let got = of(map(Prot::READ), all());
        assert_eq!((got.loads, got.mapped), ([64, 16, 4, 2], [1024; 4]));
        assert_eq!((got.large, got.large_pages, got.large_loads), (1, 1024, 64));
        assert_eq!(got.large_next, 63);
        // Windows in the opposite order.
        let down = of(map(Prot::READ), (0..1024).rev().map(|page| (page, Access::Read)));
        assert_eq!((down.large_loads, down.large_next), (64, 0));
        let code = of(map(Prot::READ | Prot::EXEC), all());
        assert_eq!((code.loads[0], code.large), (64, 0));
    }

    #[test]
    fn cold_file_is_read_in_windows() {
        let got = of(map(Prot::READ), (0..1024).map(|page| (page, Access::Read)));
        let reads = |around, next, pages| Reads { around, next, pages, ..Reads::default() };
        assert_eq!(got.cold[0], Reads { sequences: 1, ..reads(1, 31, 1024) });
        assert_eq!(got.cold[3], reads(1, 0, 1024));
        assert_eq!((got.data, got.data_pages, got.data_used), (1, 1024, 1024));
        let got = of(map(Prot::READ), (256..512).chain(768..1024).map(|page| (page, Access::Read)));
        assert_eq!((got.cold[0].around, got.cold[0].sequences), (2, 2));
        // The page behind the first window, but not behind the last.
        let got = of(map(Prot::READ), [100, 200, 116].map(|page| (page, Access::Read)).into_iter());
        assert_eq!(got.cold[0], reads(2, 1, 96));
        // Distant stores read, too, and use few of the pages.
        let got = of(map(Prot::WRITE), (1..4).map(|n| (n * 256, Access::Write)));
        assert_eq!(got.cold[0], reads(3, 0, 96));
        assert_eq!(got.cold[1], reads(3, 0, 384));
        let code = of(map(Prot::READ | Prot::EXEC), (0..1024).map(|page| (page, Access::Read)));
        assert_eq!(code.cold, [Reads::default(); 4]);
    }

    #[test]
    fn kernel_stops_to_read_around_after_misses() {
        let len = 1 << 30;
        let backing = Backing::SharedFile;
        let map = Kind::Map { start: START, len, prot: Prot::READ, flags: 1, backing };
        let got = of(map, (0..150).map(|n| (n * 1000 + 500, Access::Read)));
        assert_eq!((got.cold[0].around, got.cold[0].single), (100, 50));
        assert_eq!(got.cold[0].pages, 100 * 32 + 50);
    }

    #[test]
    fn hit_in_the_page_cache_permits_sixteen_misses() {
        let (len, backing) = (1 << 30, Backing::SharedFile);
        let map = Kind::Map { start: START, len, prot: Prot::READ, flags: 1, backing };
        let distant = |n: u64| (n * 1000 + 500, Access::Read);
        // The hit is the page behind the last miss.
        let hit = (89 * 1000 + 501, Access::Read);
        let got = of(map, (0..90).map(distant).chain([hit]).chain((90..150).map(distant)));
        assert_eq!((got.cold[0].around, got.cold[0].single), (116, 34));
    }

    #[test]
    fn fault_of_a_recording_with_fault_around_uses_all_pages_around() {
        let fault = |n: u64| Kind::first(START + n * 16 * PAGE_SIZE, Access::Read);
        let events = [map(Prot::READ)].into_iter().chain((0..64).map(fault));
        let mut trace = Trace::of_one_thread(events);
        let count = |trace: &Trace| Files::of(trace, 0.9).expect("a valid trace");
        assert_eq!((count(&trace).large, count(&trace).data_used), (0, 64));
        trace.header.notes.push(format!("{AROUND_ON} (a reason)"));
        let got = count(&trace);
        assert_eq!((got.large, got.data_used, got.around), (1, 1024, true));
        let reads = Reads { around: 1, next: 31, sequences: 1, single: 0, pages: 1024 };
        assert_eq!(got.cold[0], reads);
        // Faults on huge pages of the page cache.
        let fault = |page: u64| Kind::first(START + page * PAGE_SIZE, Access::Read);
        let events = [map(Prot::READ)].into_iter().chain([0, 512, 1008].map(fault));
        let huge = Trace { header: trace.header.clone(), ..Trace::of_one_thread(events) };
        let got = count(&huge);
        assert_eq!((got.large, got.large_loads, got.large_next), (1, 3, 2));
    }

    #[test]
    fn sparse_loads_map_pages_in_vain() {
        let got = of(map(Prot::READ), (0..4).map(|n| (n * 256 + 255, Access::Read)));
        assert_eq!((got.loads, got.mapped), ([4, 4, 4, 2], [64, 256, 1024, 1024]));
        assert_eq!(got.large, 0, "hardly used");
        let stores = of(map(Prot::READ | Prot::WRITE), (0..8).map(|page| (page, Access::Write)));
        assert_eq!((stores.loads, stores.mapped, stores.large), ([0; 4], [0; 4], 0));
    }
}
