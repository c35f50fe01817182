//! Forks of memory in huge pages: `fork` copies one entry for each huge page, and the first store
//! after the fork to a shared huge page splits it. Copies are of single pages in each case (since
//! Linux 5.8). The further forks copy an entry for each page of a split huge page, and the kernel
//! copies neighbouring entries of this kind in one step (since Linux 6.9).

use crate::event::{Access, Backing, Kind};
use crate::page_set::{PageSet, pages};
use faultless::{PAGE_SIZE, page_up};
use rangemap::{RangeMap, RangeSet};
use std::ops::Range;

const MADV_DONTNEED: u32 = 4;
const MADV_HUGEPAGE: u32 = 14;
const MADV_NOHUGEPAGE: u32 = 15;
const MAP_STACK: u32 = 0x2_0000;

/// Page-table entries of resident private memory, by the kind of the page. The order compares huge
/// pages first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entries {
    /// Huge pages.
    pub huge: u64,
    /// Pages of split huge pages, also untouched pages. Pages that were copied since are single.
    pub split: u64,
    /// Single pages.
    pub single: u64,
}

impl Entries {
    /// Adds the entries of `other`.
    pub fn add(&mut self, other: &Self) {
        self.huge += other.huge;
        self.split += other.split;
        self.single += other.single;
    }
}

/// Counts of forks with huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugeForks {
    /// Entries of the parent, added up over all forks.
    pub entries: Entries,
    /// Entries at the fork with the most huge pages.
    pub most: Entries,
    /// Huge pages split by the first store of the parent or a child after a fork.
    pub splits: u64,
}

/// The aligned blocks of a process that are huge pages, if all memory has huge pages, and if only
/// memory with a request has huge pages.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    /// Pages of a huge page.
    pages: u64,
    /// Private anonymous mappings.
    mapped: RangeSet<u64>,
    brk: Option<u64>,
    /// Advice about huge pages, by page: whether the program requests or refuses them.
    advice: RangeMap<u64, bool>,
    /// The numbers of the blocks.
    huge: [PageSet; 2],
    /// The blocks that are shared since the last fork.
    shared: [PageSet; 2],
    /// The pages that a split has left of huge pages.
    rest: [PageSet; 2],
}

impl Blocks {
    /// Creates the blocks of a process without memory, with huge pages of `pages` pages.
    pub(super) fn new(pages: u64) -> Self {
        Self {
            pages,
            mapped: RangeSet::new(),
            brk: None,
            advice: RangeMap::new(),
            huge: Default::default(),
            shared: Default::default(),
            rest: Default::default(),
        }
    }

    /// Returns the pages of a block.
    fn range(&self, block: u64) -> Range<u64> {
        block * self.pages..(block + 1) * self.pages
    }

    pub(super) fn step(&mut self, kind: Kind) {
        match kind {
            Kind::Map { start, len, flags, backing, .. } => {
                self.unmap(pages(start, len));
                if backing == Backing::Anon && flags & MAP_STACK == 0 {
                    self.map(pages(start, len));
                }
            }
            Kind::Area {
                start, len, backing: backing @ (Backing::Anon | Backing::Heap), ..
            } => {
                self.map(pages(start, len));
                if backing == Backing::Heap {
                    self.brk.get_or_insert(start + len);
                }
            }
            Kind::Unmap { start, len } => self.unmap(pages(start, len)),
            Kind::Advise { start, len, advice: MADV_DONTNEED } => self.split(pages(start, len)),
            Kind::Advise { start, len, advice: advice @ (MADV_HUGEPAGE | MADV_NOHUGEPAGE) } => {
                self.advice.insert(pages(start, len), advice == MADV_HUGEPAGE);
            }
            Kind::Remap { old, old_len, new, new_len, .. } if old_len > 0 => {
                let counts = self.mapped.contains(&(old / PAGE_SIZE));
                self.unmap(pages(old, old_len));
                self.unmap(pages(new, new_len));
                if counts {
                    self.map(pages(new, new_len));
                }
            }
            Kind::Brk { end } => {
                let to = page_up(end).unwrap_or(end);
                let from = self.brk.replace(to).unwrap_or(to);
                self.map(from / PAGE_SIZE..to / PAGE_SIZE);
                self.unmap(to / PAGE_SIZE..from / PAGE_SIZE);
            }
            Kind::Fault { page, access: Access::Write, present: false, .. } => {
                self.touch(page / PAGE_SIZE);
            }
            _ => {}
        }
    }

    /// Counts a fork of this process, whose private pages are `private`.
    pub(super) fn fork(&mut self, private: &PageSet, out: &mut [HugeForks; 2]) {
        let size = self.pages;
        let range = |block: u64| block * size..(block + 1) * size;
        for (at, out) in out.iter_mut().enumerate() {
            let (huge, rest) = (&self.huge[at], &self.rest[at]);
            let in_huge: u64 = huge.pages().map(|block| private.count(range(block))).sum();
            let in_rest = rest.pages().filter(|page| private.contains(*page)).count() as u64;
            let single = private.len() - in_huge - in_rest;
            let now = Entries { huge: huge.len(), split: rest.len(), single };
            out.entries.add(&now);
            out.most = out.most.max(now);
            self.shared[at].clone_from(huge);
        }
    }

    /// Counts a store to a page shared since a fork.
    pub(super) fn copy(&mut self, page: u64, out: &mut [HugeForks; 2]) {
        let block = page / self.pages;
        let pages = self.range(block);
        for (at, out) in out.iter_mut().enumerate() {
            if self.shared[at].contains(block) {
                out.splits += 1;
                self.shared[at].remove(block..block + 1);
                self.huge[at].remove(block..block + 1);
                self.rest[at].insert_all(pages.clone());
            }
            self.rest[at].remove(page..page + 1);
        }
    }

    fn touch(&mut self, page: u64) {
        let block = page / self.pages;
        let all = self.range(block);
        if self.mapped.gaps(&all).next().is_some() {
            return;
        }
        let advice = self.advice.get(&page).copied();
        let applies = [advice != Some(false), advice == Some(true)];
        for ((huge, rest), applies) in self.huge.iter_mut().zip(&self.rest).zip(applies) {
            // A huge page needs a block without pages.
            if applies && rest.count(all.clone()) == 0 {
                huge.insert(block);
            }
        }
    }

    fn map(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.mapped.insert(range);
        }
    }

    fn unmap(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.split(range.clone());
            self.advice.remove(range.clone());
            self.mapped.remove(range);
        }
    }

    /// Removes `range`, and splits the huge pages that `range` contains in part.
    fn split(&mut self, range: Range<u64>) {
        let size = self.pages;
        let blocks = range.start / size..range.end.div_ceil(size);
        if blocks.is_empty() {
            return;
        }
        let ends = [blocks.start, blocks.end - 1];
        for ((huge, shared), rest) in self.huge.iter_mut().zip(&mut self.shared).zip(&mut self.rest)
        {
            for block in ends.into_iter().filter(|block| huge.contains(*block)) {
                rest.insert_all(block * size..(block + 1) * size);
            }
            rest.remove(range.clone());
            huge.remove(blocks.clone());
            shared.remove(blocks.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Prot;

    const START: u64 = 1 << 40;

    fn map(start: u64, pages: u64) -> Kind {
        let (len, prot) = (pages * PAGE_SIZE, Prot::READ | Prot::WRITE);
        Kind::Map { start, len, prot, flags: 0x22, backing: Backing::Anon }
    }

    /// Returns the counts of a fork after `events`, followed by stores to these pages.
    fn forked(events: &[Kind], touched: &[u64], stores: &[u64]) -> [HugeForks; 2] {
        forked_with(512, events, touched, stores)
    }

    /// Returns the same with huge pages of this number of pages.
    fn forked_with(huge: u64, events: &[Kind], touched: &[u64], stores: &[u64]) -> [HugeForks; 2] {
        let mut blocks = Blocks::new(huge);
        let mut private = PageSet::default();
        events.iter().for_each(|kind| blocks.step(*kind));
        for page in touched {
            let page = START / PAGE_SIZE + page;
            private.insert(page);
            blocks.step(Kind::first(page * PAGE_SIZE, Access::Write));
        }
        let mut out = [HugeForks::default(); 2];
        blocks.fork(&private, &mut out);
        stores.iter().for_each(|page| blocks.copy(START / PAGE_SIZE + page, &mut out));
        blocks.fork(&private, &mut out);
        out
    }

    #[test]
    fn first_store_to_a_shared_huge_page_splits_it() {
        // Two whole blocks, and a part of a third.
        let all = forked(&[map(START, 1100)], &[0, 1, 512, 1024, 1025], &[1, 0, 1024])[0];
        // The second fork copies all entries of the split block, two of them of copied pages.
        let entries = Entries { huge: 2 + 1, split: 510, single: 2 + 4 };
        let most = Entries { huge: 2, split: 0, single: 2 };
        assert_eq!(all, HugeForks { entries, most, splits: 1 });
        // No huge page of 32 MiB fits. Each store copies a single page.
        let large = forked_with(8192, &[map(START, 1100)], &[0, 1, 512], &[1])[0];
        assert_eq!((large.entries.huge, large.entries.single, large.splits), (0, 3 + 3, 0));
        let large = forked_with(8192, &[map(START, 8192)], &[0, 1, 512], &[1])[0];
        assert_eq!((large.entries.huge, large.splits), (1, 1));
        assert_eq!((large.entries.split, large.entries.single), (8191, 1));
    }

    #[test]
    fn requests_and_freed_parts_decide() {
        let (start, len) = (START + 512 * PAGE_SIZE, 512 * PAGE_SIZE);
        let ask = Kind::Advise { start, len, advice: MADV_HUGEPAGE };
        let refuse = Kind::Advise { start: START, len, advice: MADV_NOHUGEPAGE };
        let [all, asked] = forked(&[map(START, 1024), ask, refuse], &[0, 512], &[512]);
        let entries = Entries { huge: 1, split: 511, single: 1 + 2 };
        let most = Entries { huge: 1, split: 0, single: 1 };
        let want = HugeForks { entries, most, splits: 1 };
        assert_eq!((all, asked), (want, want));
        let [all, asked] = forked(&[map(START, 1024), ask], &[0, 512], &[]);
        assert_eq!((all.entries.huge, asked.entries.huge), (2 + 2, 1 + 1));
        // A hole in the mapping, made before the first touch.
        let hole = Kind::Unmap { start: START + 700 * PAGE_SIZE, len: PAGE_SIZE };
        let [all, _] = forked(&[map(START, 1024), hole], &[0, 512], &[]);
        assert_eq!(all.entries, Entries { huge: 1 + 1, split: 0, single: 1 + 1 });
    }

    #[test]
    fn freed_part_of_a_huge_page_splits_it() {
        let mut blocks = Blocks::new(512);
        let mut private = PageSet::default();
        blocks.step(map(START, 1024));
        let touch = |blocks: &mut Blocks, page: u64| {
            blocks.step(Kind::first(START + page * PAGE_SIZE, Access::Write));
        };
        for page in [0, 512] {
            private.insert(START / PAGE_SIZE + page);
            touch(&mut blocks, page);
        }
        let entries = |blocks: &mut Blocks, private: &PageSet| {
            let mut out = [HugeForks::default(); 2];
            blocks.fork(private, &mut out);
            out[0].entries
        };
        // The last 12 pages of the first block.
        let (start, len) = (START + 500 * PAGE_SIZE, 12 * PAGE_SIZE);
        blocks.step(Kind::Advise { start, len, advice: MADV_DONTNEED });
        let want = Entries { huge: 1, split: 500, single: 0 };
        assert_eq!(entries(&mut blocks, &private), want);
        // A further touch of the block, which has pages.
        touch(&mut blocks, 505);
        private.insert(START / PAGE_SIZE + 505);
        assert_eq!(entries(&mut blocks, &private), Entries { single: 1, ..want });
        // The same pages, and the second block.
        blocks.step(Kind::Unmap { start, len: len + 512 * PAGE_SIZE });
        private.remove(START / PAGE_SIZE + 500..START / PAGE_SIZE + 1024);
        assert_eq!(entries(&mut blocks, &private), Entries { huge: 0, split: 500, single: 0 });
    }
}
