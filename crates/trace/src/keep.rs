//! The savings of an allocator that keeps the freed memory of a recorded program: glibc with
//! `MALLOC_MMAP_MAX_=0` and a large `MALLOC_TRIM_THRESHOLD_`.
//!
//! Each block with a separate mapping then comes from the heap: from the smallest sufficient free
//! part, or otherwise from the end of the heap. Freed memory, and pages of the heap above a lowered
//! break, stay resident and cause no fault when used again. A block moved by `mremap` is copied.

use crate::event::{Backing, Birth, Kind, Prot, Trace};
use crate::page_set::PageSet;
use crate::plan::{self, PlanError};
use faultless::{PAGE_SIZE, page_up};
use std::collections::BTreeMap;
use std::ops::Range;

/// The smallest block for which glibc creates a mapping by default, in bytes.
const THRESHOLD: u64 = 128 << 10;
/// `MAP_PRIVATE | MAP_ANONYMOUS`, the flags of glibc's mappings.
const FLAGS: u32 = 0x22;
/// The unit of an allocator's own arenas in bytes. glibc's settings do not affect them.
const ARENA: u64 = 256 << 10;
/// The sizes of glibc's reservations for an arena of a thread, in bytes.
const RESERVED: [u64; 2] = [64 << 20, 128 << 20];

/// The effect of keeping memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Avoided faults, whose pages are still resident.
    pub saved: u64,
    /// Avoided calls of `mmap`, `munmap` and `mremap`.
    pub calls: u64,
    /// Pages to copy, which `mremap` would have moved.
    pub copied: u64,
    /// The peak number of free and resident pages.
    pub peak_free: u64,
    /// The peak number of resident pages that the allocator of one process has given to the
    /// program, with the pages of its arenas for threads. Free pages are reused, so at no time are
    /// more pages free and resident.
    pub peak_held: u64,
}

/// Returns the effect on `trace`.
///
/// # Errors
/// The trace does not pass [`Trace::check`].
pub fn kept(trace: &Trace) -> Result<Kept, PlanError> {
    plan::complete(trace)?;
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

/// One process's memory as managed by the allocator. Units are pages; the heap's pages are numbered
/// from 0.
#[derive(Clone, Default)]
struct Heap {
    /// Blocks by their recorded page: pages, and the place in the heap.
    blocks: BTreeMap<u64, (u64, u64)>,
    /// Free parts: the first page, and the number of pages.
    free: BTreeMap<u64, u64>,
    end: u64,
    resident: PageSet,
    /// The break, in bytes, and touched pages below an earlier break.
    brk: Option<u64>,
    touched: PageSet,
    /// The first break, in pages. The pages below belong to the program's file.
    base: Option<u64>,
    /// Free and resident pages.
    idle: u64,
    /// The number of pages in `resident`, and in `touched` from `base` on.
    total: u64,
    /// Reservations for arenas of threads, from page to page, and their touched pages.
    arenas: BTreeMap<u64, u64>,
    in_arenas: PageSet,
    arena_pages: u64,
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
            Kind::Map { start, len, prot, backing: Backing::Anon, .. }
                if prot.is_empty() && RESERVED.contains(&len) =>
            {
                self.arenas.insert(start / PAGE_SIZE, (start + len) / PAGE_SIZE);
            }
            Kind::Unmap { start, len } => {
                if let Some((pages, at)) = self.blocks.remove(&(start / PAGE_SIZE)) {
                    self.give(at, pages);
                    out.calls += 1;
                }
                self.remove_arena(start / PAGE_SIZE..(start + len) / PAGE_SIZE);
            }
            Kind::Remap { old, new, new_len, .. } => {
                if let Some((pages, at)) = self.blocks.remove(&(old / PAGE_SIZE)) {
                    let want = new_len / PAGE_SIZE;
                    let to = self.resize(at, pages, want);
                    if to != at {
                        out.copied += self.resident_in(at, pages);
                        for n in 0..pages.min(want) {
                            if self.resident.contains(at + n) {
                                self.total += u64::from(self.resident.insert(to + n));
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
                self.base.get_or_insert(end);
                let before = self.brk.replace(end).unwrap_or(end);
                let moved = self.touched.count(end.min(before)..end.max(before));
                self.idle =
                    if end < before { self.idle + moved } else { self.idle.saturating_sub(moved) };
            }
            // The heap of a process that ran before the recording.
            Kind::Area { start, len, backing: Backing::Heap, .. } if self.brk.is_none() => {
                self.base = Some(start / PAGE_SIZE);
                self.brk = Some((start + len) / PAGE_SIZE);
            }
            Kind::Resident { start, len, .. } => self.hold(start / PAGE_SIZE, len / PAGE_SIZE),
            Kind::Fault { page, present: false, .. } => self.fault(page / PAGE_SIZE, out),
            _ => {}
        }
        out.peak_free = out.peak_free.max(self.idle);
        let held = self.total.saturating_sub(self.idle) + self.arena_pages;
        out.peak_held = out.peak_held.max(held);
    }

    /// Adds pages of the heap that are resident at the start of the recording.
    fn hold(&mut self, page: u64, pages: u64) {
        let (base, end) = (self.base.unwrap_or(0), self.brk.unwrap_or(0));
        for page in page.max(base)..(page + pages).min(end) {
            self.total += u64::from(self.touched.insert(page));
        }
    }

    fn fault(&mut self, page: u64, out: &mut Kept) {
        let block = self.blocks.range(..=page).next_back();
        let mut counts = true;
        let new = match block {
            Some((start, (pages, at))) if page < start + pages => {
                self.resident.insert(at + page - start)
            }
            // Other blocks than those of the heap reach the same place only by chance.
            _ if self.brk.is_some_and(|end| page < end) => {
                counts = self.base.is_some_and(|base| page >= base);
                self.touched.insert(page)
            }
            _ => {
                let arena = self.arenas.range(..=page).next_back();
                if arena.is_some_and(|(_, end)| page < *end) {
                    self.arena_pages += u64::from(self.in_arenas.insert(page));
                }
                return;
            }
        };
        self.total += u64::from(new && counts);
        out.saved += u64::from(!new);
    }

    /// Ends an arena of a thread that lies in the unmapped pages `gone`.
    fn remove_arena(&mut self, gone: Range<u64>) {
        let arena = self.arenas.range(gone.clone()).next();
        if let Some((&start, &end)) = arena.filter(|(_, end)| **end <= gone.end) {
            self.arenas.remove(&start);
            self.arena_pages -= self.in_arenas.count(start..end);
            self.in_arenas.remove(start..end);
        }
    }

    /// Returns a place for `pages`.
    fn take(&mut self, pages: u64) -> u64 {
        let fits = self.free.iter().filter(|(_, len)| **len >= pages).min_by_key(|(_, len)| **len);
        let Some((&at, &len)) = fits else {
            // A free part at the end grows.
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

    /// Resizes the block at `at` to `want` pages, in place if possible.
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
    fn freed_block_is_reused() {
        let mut events = vec![map(0, 65)];
        events.extend(touch(0, 40));
        events.extend([unmap(0, 65), map(500, 50)]);
        events.extend(touch(500, 50));
        let got = with(&events);
        // 40 pages were resident, at the start of the second block.
        assert_eq!(got, Kept { saved: 40, calls: 3, copied: 0, peak_free: 40, peak_held: 50 });
    }

    /// The free pages of a block and the free pages of the heap are counted apart, and glibc reuses
    /// them for each other.
    #[test]
    fn held_pages_are_those_of_one_time() {
        let mut events = vec![map(1000, 65)];
        events.extend(touch(1000, 65));
        events.push(unmap(1000, 65));
        let brk = |pages: u64| Kind::Brk { end: START + pages * PAGE_SIZE };
        // A page of the program's file, below the heap.
        events.extend([brk(8), Kind::first(START, Access::Write), brk(48)]);
        events.extend(touch(8, 40));
        events.push(brk(8));
        let got = with(&events);
        assert_eq!((got.peak_free, got.peak_held), (105, 65));
    }

    #[test]
    fn pages_of_the_program_below_the_heap_are_not_held() {
        let brk = |pages: u64| Kind::Brk { end: START + pages * PAGE_SIZE };
        let mut events = vec![brk(8)];
        events.extend(touch(0, 5));
        events.push(brk(48));
        events.extend(touch(8, 10));
        assert_eq!(with(&events).peak_held, 10);
    }

    #[test]
    fn arenas_of_threads_are_held_until_they_are_unmapped() {
        let start = START + (1 << 30);
        let reserve = |start| {
            let (prot, backing) = (Prot::empty(), Backing::Anon);
            Kind::Map { start, len: 64 << 20, prot, flags: 0x4022, backing }
        };
        let fault = |page: u64| Kind::first(start + page * PAGE_SIZE, Access::Write);
        let mut events = vec![map(0, 65), reserve(start)];
        events.extend(touch(0, 65).chain((0..10).map(fault)));
        assert_eq!(with(&events).peak_held, 75);
        events.extend([Kind::Unmap { start, len: 64 << 20 }, reserve(start)]);
        events.extend((0..12).map(fault));
        assert_eq!(with(&events).peak_held, 77);
    }

    #[test]
    fn adjacent_free_parts_are_merged() {
        let mut events = vec![map(0, 65), map(100, 65), map(200, 65)];
        events.extend(touch(0, 65).chain(touch(100, 65)));
        events.extend([unmap(0, 65), unmap(100, 65), map(1000, 130)]);
        events.extend(touch(1000, 130));
        assert_eq!(with(&events).saved, 130);
    }

    #[test]
    fn growing_block_moves_unless_it_is_the_last() {
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
    fn pages_above_a_lowered_break_stay_resident() {
        let brk = |pages: u64| Kind::Brk { end: START + pages * PAGE_SIZE };
        let mut events = vec![brk(0), brk(32)];
        events.extend(touch(0, 32));
        events.extend([brk(8), brk(16)]);
        events.extend(touch(8, 8));
        let got = with(&events);
        assert_eq!((got.saved, got.peak_free), (8, 24));
    }

    #[test]
    fn heap_from_before_the_recording_is_held() {
        let prot = Prot::READ | Prot::WRITE;
        let heap = Kind::Area { start: START, len: 8 * PAGE_SIZE, prot, backing: Backing::Heap };
        let resident = Kind::Resident { start: START, len: 6 * PAGE_SIZE, written: true };
        let brk = |pages: u64| Kind::Brk { end: START + pages * PAGE_SIZE };
        let touch = Kind::first(START + 5 * PAGE_SIZE, Access::Write);
        let got = with(&[heap, resident, brk(4), brk(8), touch]);
        // Two pages are freed, and one of them is used again.
        assert_eq!((got.saved, got.peak_free, got.peak_held), (1, 2, 6));
        // The first break of the recording is not the start of the heap.
        let touch = Kind::first(START + 6 * PAGE_SIZE, Access::Write);
        assert_eq!(with(&[heap, resident, brk(12), touch]).peak_held, 7);
    }

    #[test]
    fn arenas_of_other_allocators_are_ignored() {
        let mut events = vec![map(0, 256)];
        events.extend(touch(0, 256));
        events.extend([unmap(0, 256), map(0, 256)]);
        events.extend(touch(0, 256));
        assert_eq!(with(&events), Kept::default());
    }
}
