//! Forks of memory in huge pages: `fork` copies one entry for each huge page, and the first store
//! after the fork to a shared huge page splits it. Copies are of single pages in each case (since
//! Linux 5.8).

use crate::event::{Access, Backing, Kind};
use crate::page_set::{PageSet, pages};
use faultless::{PAGE_SIZE, page_up};
use rangemap::{RangeMap, RangeSet};
use std::ops::Range;

const MADV_DONTNEED: u32 = 4;
const MADV_HUGEPAGE: u32 = 14;
const MADV_NOHUGEPAGE: u32 = 15;
const MAP_STACK: u32 = 0x2_0000;

/// Counts of forks with huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugeForks {
    /// Huge pages of the parent, added up over all forks.
    pub blocks: u64,
    /// Resident private pages of the parent outside huge pages, added up over all forks.
    pub entries: u64,
    /// Huge pages at the fork with the most of them, and its private pages outside.
    pub most: [u64; 2],
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
        for ((huge, shared), out) in self.huge.iter().zip(&mut self.shared).zip(out) {
            let within: u64 = huge.pages().map(|block| private.count(range(block))).sum();
            let now = [huge.len(), private.len() - within];
            out.blocks += now[0];
            out.entries += now[1];
            out.most = out.most.max(now);
            shared.clone_from(huge);
        }
    }

    /// Counts a store to a page shared since a fork.
    pub(super) fn copy(&mut self, page: u64, out: &mut [HugeForks; 2]) {
        let block = page / self.pages;
        for ((huge, shared), out) in self.huge.iter_mut().zip(&mut self.shared).zip(out) {
            if shared.contains(block) {
                out.splits += 1;
                shared.remove(block..block + 1);
                huge.remove(block..block + 1);
            }
        }
    }

    fn touch(&mut self, page: u64) {
        let block = page / self.pages;
        if self.mapped.gaps(&self.range(block)).next().is_some() {
            return;
        }
        let advice = self.advice.get(&page).copied();
        for (huge, applies) in
            self.huge.iter_mut().zip([advice != Some(false), advice == Some(true)])
        {
            if applies {
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

    /// Removes the huge pages that `range` contains in whole or in part.
    fn split(&mut self, range: Range<u64>) {
        let blocks = range.start / self.pages..range.end.div_ceil(self.pages);
        if !blocks.is_empty() {
            self.huge.iter_mut().chain(&mut self.shared).for_each(|set| set.remove(blocks.clone()));
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
        // The second fork copies the two entries of the split block.
        let want = HugeForks { blocks: 2 + 1, entries: 2 + 4, splits: 1, most: [2, 2] };
        assert_eq!(all, want);
        // No huge page of 32 MiB fits. Each store copies a single page.
        let large = forked_with(8192, &[map(START, 1100)], &[0, 1, 512], &[1])[0];
        assert_eq!((large.blocks, large.entries, large.splits), (0, 3 + 3, 0));
        let large = forked_with(8192, &[map(START, 8192)], &[0, 1, 512], &[1])[0];
        assert_eq!((large.blocks, large.entries, large.splits), (1, 3, 1));
    }

    #[test]
    fn requests_and_freed_parts_decide() {
        let (start, len) = (START + 512 * PAGE_SIZE, 512 * PAGE_SIZE);
        let ask = Kind::Advise { start, len, advice: MADV_HUGEPAGE };
        let refuse = Kind::Advise { start: START, len, advice: MADV_NOHUGEPAGE };
        let [all, asked] = forked(&[map(START, 1024), ask, refuse], &[0, 512], &[512]);
        let want = HugeForks { blocks: 1, entries: 1 + 2, splits: 1, most: [1, 1] };
        assert_eq!((all, asked), (want, want));
        let [all, asked] = forked(&[map(START, 1024), ask], &[0, 512], &[]);
        assert_eq!((all.blocks, asked.blocks), (2 + 2, 1 + 1));
        // A hole in the mapping, made before the first touch.
        let hole = Kind::Unmap { start: START + 700 * PAGE_SIZE, len: PAGE_SIZE };
        let [all, _] = forked(&[map(START, 1024), hole], &[0, 512], &[]);
        assert_eq!((all.blocks, all.entries), (1 + 1, 1 + 1));
    }
}
