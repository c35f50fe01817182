//! The use of memory in blocks of the size of a huge page: the blocks that khugepaged may collapse
//! to a huge page, and the memory that a collapse adds.

use crate::anticipate::folio::THP;
use crate::event::{Backing, Birth, Kind, Trace};
use crate::page_set::{PageSet, pages};
use crate::plan::PlanError;
use faultless::{PAGE_SIZE, page_up};
use rangemap::RangeSet;
use std::collections::BTreeSet;
use std::ops::Range;

const MADV_DONTNEED: u32 = 4;
const MAP_STACK: u32 = 0x2_0000;

/// Numbers of blocks by their number of resident pages, from 1 to all, at the end of the processes.
/// A block lies in private anonymous memory as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks(Vec<u64>);

/// The effect of khugepaged with one value of `max_ptes_none`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collapsed {
    /// Huge pages.
    pub blocks: u64,
    /// Pages of them that the program has not touched: additional memory.
    pub unused: u64,
}

impl Blocks {
    /// Creates counts without a block, of blocks of `pages` pages.
    pub fn new(pages: u64) -> Self {
        Self(vec![0; pages as usize + 1])
    }

    /// Returns the pages of a block.
    pub fn pages(&self) -> u64 {
        self.0.len() as u64 - 1
    }

    /// Counts `trace`, with blocks of 2 MiB.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`].
    pub fn of(trace: &Trace) -> Result<Self, PlanError> {
        Self::with_huge(trace, 1 << THP)
    }

    /// Counts `trace`, with blocks of `huge` pages.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`].
    pub fn with_huge(trace: &Trace, huge: u64) -> Result<Self, PlanError> {
        trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
        let mut out = Self::new(huge);
        let mut memories = vec![Memory::default(); trace.processes.len()];
        for event in &trace.events {
            let process = trace.threads[event.thread as usize].process as usize;
            match event.kind {
                // The pages of a child are mostly those of its parent.
                Kind::Spawn { child, birth: Birth::Fork } => {
                    let to = trace.threads[child as usize].process as usize;
                    memories[to].mapped = memories[process].mapped.clone();
                    memories[to].brk = memories[process].brk;
                }
                Kind::Exec => {
                    let ended = std::mem::take(&mut memories[process]);
                    out.add(&ended);
                }
                kind => memories[process].step(kind),
            }
        }
        memories.iter().for_each(|memory| out.add(memory));
        Ok(out)
    }

    /// Adds a block with this number of resident pages, from 1 to all. Ignores others.
    pub fn add_block(&mut self, resident: u64) {
        if (1..=self.pages()).contains(&resident) {
            self.0[resident as usize] += 1;
        }
    }

    fn add(&mut self, memory: &Memory) {
        let size = self.pages();
        let blocks: BTreeSet<u64> = memory.there.pages().map(|page| page / size).collect();
        for block in blocks {
            let range = block * size..(block + 1) * size;
            let whole = memory.mapped.gaps(&range).next().is_none();
            let resident = memory.there.count(range);
            if whole {
                self.add_block(resident);
            }
        }
    }

    /// Returns the effect of khugepaged if a block may have at most `max_ptes_none` empty pages.
    /// Blocks with all pages resident are included, because they have no huge page yet.
    pub fn collapsed(&self, max_ptes_none: u64) -> Collapsed {
        let least = self.pages().saturating_sub(max_ptes_none).max(1);
        let mut out = Collapsed::default();
        for (resident, blocks) in (0..).zip(&self.0).filter(|(resident, _)| *resident >= least) {
            out.blocks += blocks;
            out.unused += blocks * (self.pages() - resident);
        }
        out
    }
}

impl Default for Blocks {
    fn default() -> Self {
        Self::new(1 << THP)
    }
}

/// The private anonymous memory of a process, in pages.
#[derive(Clone, Debug, Default)]
struct Memory {
    mapped: RangeSet<u64>,
    there: PageSet,
    brk: Option<u64>,
}

impl Memory {
    fn step(&mut self, kind: Kind) {
        match kind {
            Kind::Map { start, len, flags, backing, .. } => {
                self.unmap(pages(start, len));
                if backing == Backing::Anon && flags & MAP_STACK == 0 {
                    self.mapped.insert(pages(start, len));
                }
            }
            Kind::Area {
                start, len, backing: backing @ (Backing::Anon | Backing::Heap), ..
            } => {
                self.mapped.insert(pages(start, len));
                if backing == Backing::Heap {
                    self.brk.get_or_insert(start + len);
                }
            }
            Kind::Resident { start, len, .. } => {
                pages(start, len).for_each(|page| self.touch(page));
            }
            Kind::Unmap { start, len } => self.unmap(pages(start, len)),
            Kind::Remap { old, old_len, new, new_len, .. } if old_len > 0 => {
                let counts = self.mapped.contains(&(old / PAGE_SIZE));
                let (from, to) = (pages(old, old_len), pages(new, new_len));
                let moved = self.there.list(from.clone());
                self.unmap(from.clone());
                self.unmap(to.clone());
                if counts {
                    self.mapped.insert(to.clone());
                    let places = moved.into_iter().map(|page| page - from.start + to.start);
                    places.filter(|page| *page < to.end).for_each(|page| self.touch(page));
                }
            }
            Kind::Brk { end } => {
                let to = page_up(end).unwrap_or(end);
                let from = self.brk.replace(to).unwrap_or(to);
                if to > from {
                    self.mapped.insert(from / PAGE_SIZE..to / PAGE_SIZE);
                } else {
                    self.unmap(to / PAGE_SIZE..from / PAGE_SIZE);
                }
            }
            Kind::Advise { start, len, advice: MADV_DONTNEED } => {
                self.there.remove(pages(start, len));
            }
            Kind::Fault { page, present: false, .. } => self.touch(page / PAGE_SIZE),
            _ => {}
        }
    }

    fn touch(&mut self, page: u64) {
        if self.mapped.contains(&page) {
            self.there.insert(page);
        }
    }

    fn unmap(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.there.remove(range.clone());
            self.mapped.remove(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Access, Prot};

    const START: u64 = 1 << 40;
    const PAGES: u64 = 512;

    #[test]
    fn collapse_adds_the_empty_pages_of_a_block() {
        let (len, prot) = (4 * PAGES * PAGE_SIZE, Prot::READ | Prot::WRITE);
        let map = Kind::Map { start: START, len, prot, flags: 0x22, backing: Backing::Anon };
        let touch = |page: u64| Kind::first(START + page * PAGE_SIZE, Access::Write);
        let mut events = vec![map];
        // 512, 400 and 1 pages of three blocks; 8 pages of the last are freed.
        events.extend((0..512).chain(512..912).chain([1024]).chain(1536..1544).map(touch));
        let start = START + 3 * PAGES * PAGE_SIZE;
        events.push(Kind::Advise { start, len: PAGES * PAGE_SIZE, advice: MADV_DONTNEED });
        let blocks = Blocks::of(&Trace::of_one_thread(events.clone())).expect("a valid trace");
        let of = |none| {
            let Collapsed { blocks, unused } = blocks.collapsed(none);
            (blocks, unused)
        };
        assert_eq!([of(511), of(128), of(111), of(0)], [(3, 112 + 511), (2, 112), (1, 0), (1, 0)]);
        // A block at the border of a mapping has no huge page.
        events.push(Kind::Unmap { start: START + 100 * PAGE_SIZE, len: PAGE_SIZE });
        let blocks = Blocks::of(&Trace::of_one_thread(events)).expect("a valid trace");
        assert_eq!(blocks.collapsed(511).blocks, 2);
    }

    #[test]
    fn moved_pages_stay_resident_at_their_new_place() {
        let (len, prot) = (2 * PAGES * PAGE_SIZE, Prot::READ | Prot::WRITE);
        let map = |start| Kind::Map { start, len, prot, flags: 0x22, backing: Backing::Anon };
        let touch = |page: u64| Kind::first(START + page * PAGE_SIZE, Access::Write);
        let new = START + 64 * PAGES * PAGE_SIZE;
        // The second block has no room at the new place, before another mapping.
        let moved = Kind::Remap { old: START, old_len: len, new, new_len: len / 2, flags: 3 };
        let maps = [map(START), map(new + len / 2)].into_iter();
        let events = maps.chain((0..520).map(touch)).chain([moved]);
        let blocks = Blocks::of(&Trace::of_one_thread(events)).expect("a valid trace");
        assert_eq!(blocks.collapsed(511), Collapsed { blocks: 1, unused: 0 });
    }
}
