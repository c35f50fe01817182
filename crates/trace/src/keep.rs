//! What an allocator would save a recorded program that kept its memory: glibc with `MALLOC_MMAP_MAX_=0` and a large
//! `MALLOC_TRIM_THRESHOLD_`.
//!
//! Each block that had a mapping of its own then comes from the heap: from the smallest free part that is large enough, or else from
//! the end of the heap. Memory that was freed, and pages of the heap above a break that went down, stay resident and need no fault
//! when they are used again. A block that `mremap` moved is copied.

use crate::event::{Backing, Birth, Kind, Prot, Trace};
use crate::page_set::PageSet;
use crate::plan::PlanError;
use faultless::{PAGE_SIZE, page_up};
use std::collections::BTreeMap;

/// The smallest block that glibc maps by itself, by default, in bytes.
const THRESHOLD: u64 = 128 << 10;
/// `MAP_PRIVATE | MAP_ANONYMOUS`, as glibc maps a block.
const FLAGS: u32 = 0x22;
/// Bytes in which memory of an allocator's own arenas comes, which no setting of glibc's changes.
const ARENA: u64 = 256 << 10;

/// What keeping memory came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Faults that would not be: their pages are still there.
    pub saved: u64,
    /// Calls of `mmap`, `munmap` and `mremap` that would not be.
    pub calls: u64,
    /// Pages that would be copied as `mremap` would not move them.
    pub copied: u64,
    /// The most pages at one moment that were free and still resident.
    pub peak_free: u64,
}

/// What `trace` comes to.
///
/// # Errors
/// The trace does not pass [`Trace::check`].
pub fn kept(trace: &Trace) -> Result<Kept, PlanError> {
    trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
    let mut heaps = vec![Heap::default(); trace.processes.len()];
    let mut out = Kept::default();
    for event in &trace.events {
        let process = trace.threads[event.thread as usize].process as usize;
        match event.kind {
            Kind::Spawn { child, birth: Birth::Fork } => {
                let to = trace.threads[child as usize].process as usize;
                heaps[to] = heaps[process].clone();
            }
            Kind::Exec => heaps[process] = Heap::default(),
            kind => heaps[process].step(kind, &mut out),
        }
    }
    Ok(out)
}

/// One process's memory as the allocator would have it. Units are pages; the heap's pages are numbered from 0.
#[derive(Clone, Default)]
struct Heap {
    /// Blocks by where they were recorded: pages, and where they are in the heap.
    blocks: BTreeMap<u64, (u64, u64)>,
    /// Free parts: their first page, and how many.
    free: BTreeMap<u64, u64>,
    end: u64,
    resident: PageSet,
    /// The break, in bytes, and pages below an earlier one that were touched.
    brk: Option<u64>,
    touched: PageSet,
    /// Pages that are free and resident.
    idle: u64,
}

impl Heap {
    fn step(&mut self, kind: Kind, out: &mut Kept) {
        match kind {
            Kind::Map { start, len, flags: FLAGS, backing: Backing::Anon, prot }
                if len > THRESHOLD && !len.is_multiple_of(ARENA) && prot.contains(Prot::WRITE) =>
            {
                let pages = len / PAGE_SIZE;
                let at = self.take(pages);
                self.blocks.insert(start / PAGE_SIZE, (pages, at));
                out.calls += 1;
            }
            Kind::Unmap { start, .. } => {
                if let Some((pages, at)) = self.blocks.remove(&(start / PAGE_SIZE)) {
                    self.give(at, pages);
                    out.calls += 1;
                }
            }
            Kind::Remap { old, new, new_len, .. } => {
                if let Some((pages, at)) = self.blocks.remove(&(old / PAGE_SIZE)) {
                    let want = new_len / PAGE_SIZE;
                    let to = self.resize(at, pages, want);
                    if to != at {
                        out.copied += self.resident_in(at, pages);
                        for n in 0..pages.min(want) {
                            if self.resident.contains(at + n) {
                                self.resident.insert(to + n);
                            }
                        }
                        self.give(at, pages);
                    }
                    self.blocks.insert(new / PAGE_SIZE, (want, to));
                    out.calls += 1;
                }
            }
            Kind::Brk { end } => {
                let end = page_up(end).unwrap_or(end) / PAGE_SIZE;
                let before = self.brk.replace(end).unwrap_or(end);
                let moved = self.touched.count(end.min(before)..end.max(before));
                self.idle =
                    if end < before { self.idle + moved } else { self.idle.saturating_sub(moved) };
            }
            Kind::Fault { page, present: false, .. } => self.fault(page / PAGE_SIZE, out),
            _ => {}
        }
        out.peak_free = out.peak_free.max(self.idle);
    }

    fn fault(&mut self, page: u64, out: &mut Kept) {
        let block = self.blocks.range(..=page).next_back();
        let resident = match block {
            Some((start, (pages, at))) if page < start + pages => {
                !self.resident.insert(at + page - start)
            }
            // Others than those of the heap come to the same place by chance, if at all.
            _ => self.brk.is_some_and(|end| page < end) && !self.touched.insert(page),
        };
        out.saved += u64::from(resident);
    }

    /// A place for `pages`.
    fn take(&mut self, pages: u64) -> u64 {
        let fits = self.free.iter().filter(|(_, len)| **len >= pages).min_by_key(|(_, len)| **len);
        let Some((&at, &len)) = fits else {
            // What is free at the end grows.
            let at = match self.free.last_key_value() {
                Some((&at, &len)) if at + len == self.end => at,
                _ => self.end,
            };
            self.free.remove(&at);
            self.idle -= self.resident_in(at, self.end - at);
            self.end = at + pages;
            return at;
        };
        self.free.remove(&at);
        self.idle -= self.resident_in(at, pages);
        if len > pages {
            self.free.insert(at + pages, len - pages);
        }
        at
    }

    fn give(&mut self, mut at: u64, mut pages: u64) {
        self.idle += self.resident_in(at, pages);
        if let Some(len) = self.free.remove(&(at + pages)) {
            pages += len;
        }
        if let Some((&before, &len)) = self.free.range(..at).next_back()
            && before + len == at
        {
            self.free.remove(&before);
            (at, pages) = (before, pages + len);
        }
        self.free.insert(at, pages);
    }

    /// Makes the block at `at` one of `want` pages, in place where it can be.
    fn resize(&mut self, at: u64, pages: u64, want: u64) -> u64 {
        if want <= pages {
            if want < pages {
                self.give(at + want, pages - want);
            }
            return at;
        }
        let more = want - pages;
        if at + pages == self.end {
            self.end += more;
            return at;
        }
        if let Some(&len) = self.free.get(&(at + pages))
            && (len >= more || at + pages + len == self.end)
        {
            self.free.remove(&(at + pages));
            let taken = len.min(more);
            self.idle -= self.resident_in(at + pages, taken);
            if len > more {
                self.free.insert(at + want, len - more);
            }
            self.end = self.end.max(at + want);
            return at;
        }
        self.take(want)
    }

    fn resident_in(&self, at: u64, pages: u64) -> u64 {
        self.resident.count(at..at + pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Access;

    const START: u64 = 1 << 40;

    fn with(events: &[Kind]) -> Kept {
        let trace = Trace::of_one_thread(events.iter().copied());
        kept(&trace).unwrap()
    }

    fn map(at: u64, pages: u64) -> Kind {
        let prot = Prot::READ | Prot::WRITE;
        let (start, len) = (START + at * PAGE_SIZE, pages * PAGE_SIZE);
        Kind::Map { start, len, prot, flags: FLAGS, backing: Backing::Anon }
    }

    fn touch(from: u64, pages: u64) -> impl Iterator<Item = Kind> {
        (from..from + pages).map(|page| Kind::first(START + page * PAGE_SIZE, Access::Write))
    }

    fn unmap(at: u64, pages: u64) -> Kind {
        Kind::Unmap { start: START + at * PAGE_SIZE, len: pages * PAGE_SIZE }
    }

    #[test]
    fn a_block_that_was_freed_is_used_again() {
        let mut events = vec![map(0, 65)];
        events.extend(touch(0, 40));
        events.extend([unmap(0, 65), map(500, 50)]);
        events.extend(touch(500, 50));
        let got = with(&events);
        // 40 pages were resident, and lie where the second block begins.
        assert_eq!(got, Kept { saved: 40, calls: 3, copied: 0, peak_free: 40 });
    }

    #[test]
    fn neighbours_that_are_free_are_one() {
        let mut events = vec![map(0, 65), map(100, 65), map(200, 65)];
        events.extend(touch(0, 65).chain(touch(100, 65)));
        events.extend([unmap(0, 65), unmap(100, 65), map(1000, 130)]);
        events.extend(touch(1000, 130));
        assert_eq!(with(&events).saved, 130);
    }

    #[test]
    fn a_block_that_grows_moves_unless_it_is_the_last() {
        let (old, old_len) = (START, 65 * PAGE_SIZE);
        let grown = |new: u64| Kind::Remap {
            old,
            old_len,
            new: START + new * PAGE_SIZE,
            new_len: 97 * PAGE_SIZE,
            flags: 1,
        };
        let first: Vec<_> = [map(0, 65)].into_iter().chain(touch(0, 65)).collect();
        let got = with(&[&first[..], &[grown(700)]].concat());
        assert_eq!((got.copied, got.peak_free), (0, 0));
        let got = with(&[&first[..], &[map(300, 65), grown(700)]].concat());
        assert_eq!((got.copied, got.peak_free), (65, 65));
    }

    #[test]
    fn pages_above_a_break_that_went_down_stay() {
        let brk = |pages: u64| Kind::Brk { end: START + pages * PAGE_SIZE };
        let mut events = vec![brk(0), brk(32)];
        events.extend(touch(0, 32));
        events.extend([brk(8), brk(16)]);
        events.extend(touch(8, 8));
        let got = with(&events);
        assert_eq!((got.saved, got.peak_free), (8, 24));
    }

    #[test]
    fn arenas_of_other_allocators_are_left_out() {
        let mut events = vec![map(0, 256)];
        events.extend(touch(0, 256));
        events.extend([unmap(0, 256), map(0, 256)]);
        events.extend(touch(0, 256));
        assert_eq!(with(&events), Kept::default());
    }
}
