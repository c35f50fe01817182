//! Memory that a program returns to the kernel and uses again: the decay of allocators.
//!
//! An allocator frees pages by `MADV_DONTNEED`, by `munmap` and `mmap`, or lazily by `MADV_FREE`.
//! The next touch of such a page is a fault that zeroes a page, and each call may interrupt the
//! CPUs of other threads to flush their TLBs. Stacks, files and shared memory are not counted.

use crate::event::{Backing, Birth, Kind, Trace};
use crate::page_set::{PageSet, PageStates, State, pages};
use crate::plan::PlanError;
use faultless::{PAGE_SIZE, page_up};
use rangemap::{RangeMap, RangeSet};
use std::ops::Range;

const MADV_DONTNEED: u32 = 4;
const MADV_FREE: u32 = 8;
const MADV_DONTNEED_LOCKED: u32 = 24;
const MAP_STACK: u32 = 0x2_0000;
/// Times from a discard to the fault on the page, in microseconds: 10 ms, 100 ms, 1 s and 10 s.
pub const AGES: [u64; 4] = [10_000, 100_000, 1_000_000, 10_000_000];

/// The pages of the processor's caches from which a fault gets a frame quickly: 4 MiB, the second
/// level and a share of the third of a current server.
pub const CACHE: u64 = 1024;

/// Counts of returned memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discards {
    /// `MADV_DONTNEED` calls on private memory that freed pages.
    pub calls: u64,
    /// Pages freed by these calls.
    pub pages: u64,
    /// Faults on these pages after the call.
    pub refilled: u64,
    /// The faults of `refilled` within each time of [`AGES`] after the call.
    pub refilled_within: [u64; AGES.len()],
    /// Calls that map private anonymous memory beside stacks.
    pub maps: u64,
    /// Pages of these calls.
    pub map_pages: u64,
    /// The peak of such memory, in mapped pages over all processes.
    pub peak_mapped: u64,
    /// `munmap` calls that freed pages.
    pub unmaps: u64,
    /// Pages freed by `munmap`.
    pub unmapped: u64,
    /// Faults on pages that `munmap` had freed at the same address.
    pub remapped: u64,
    /// `MADV_FREE` calls on private memory with pages. The kernel frees such pages only if memory
    /// is scarce.
    pub lazy_calls: u64,
    /// Pages of these calls.
    pub lazy_pages: u64,
    /// The most CPUs that the calls interrupted to flush their TLBs: for each call the other
    /// threads of the process, at most the other CPUs of the host.
    pub interrupts: u64,
    /// Faults.
    pub filled: u64,
    /// Faults that got a frame that was freed shortly before, so that the frame is still in a cache
    /// ([`CACHE`]). The kernel hands out the frames freed last first.
    pub warm: u64,
    /// The peak number of pages that `MADV_DONTNEED` had freed and that were not used again, over
    /// all processes.
    pub peak_free: u64,
}

impl Discards {
    /// Counts `trace`.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`].
    pub fn of(trace: &Trace) -> Result<Self, PlanError> {
        trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
        let mut counts = Counts::default();
        let mut memories = vec![Memory::default(); trace.processes.len()];
        for (memory, threads) in memories.iter_mut().zip(trace.first_threads()) {
            memory.threads = threads;
        }
        let (mut free, mut mapped) = (0, 0);
        let others =
            if trace.header.cpus == 0 { u64::MAX } else { u64::from(trace.header.cpus) - 1 };
        for event in &trace.events {
            let process = trace.threads[event.thread as usize].process as usize;
            free -= memories[process].free;
            mapped -= memories[process].mapped_pages;
            match event.kind {
                Kind::Spawn { child, birth } => {
                    let to = trace.threads[child as usize].process as usize;
                    if birth == Birth::Fork {
                        memories[to] = memories[process].clone();
                        // The freed pages of the child were never its own.
                        memories[to].free = 0;
                        memories[to].shared = memories[to].there.len();
                        memories[to].gone = PageSet::default();
                        memories[to].threads = 0;
                        mapped += memories[to].mapped_pages;
                    }
                    memories[to].threads += 1;
                }
                Kind::Exit => {
                    let memory = &mut memories[process];
                    memory.threads = memory.threads.saturating_sub(1);
                    if memory.threads == 0 {
                        counts.free(memory.own());
                        *memory = Memory::default();
                    }
                }
                Kind::Exec => {
                    counts.free(memories[process].own());
                    memories[process] = Memory { threads: 1, ..Memory::default() };
                }
                kind => memories[process].step(kind, event.time_us, others, &mut counts),
            }
            let out = &mut counts.out;
            free += memories[process].free;
            mapped += memories[process].mapped_pages;
            out.peak_mapped = out.peak_mapped.max(mapped);
            out.peak_free = out.peak_free.max(free);
        }
        Ok(counts.out)
    }

    /// Returns the share of faults that got a frame from a cache, from 0 to 1.
    pub fn warm_share(&self) -> f64 {
        self.warm as f64 / self.filled.max(1) as f64
    }

    /// Returns the pages that came back.
    pub fn back(&self) -> u64 {
        self.refilled + self.remapped
    }
}

/// The counts so far, and the frames that were freed last.
#[derive(Debug, Default)]
struct Counts {
    out: Discards,
    /// The freed frames that are still in a cache.
    frames: u64,
}

impl Counts {
    /// Counts freed frames. Frames freed earlier leave the cache.
    fn free(&mut self, pages: u64) {
        self.frames = (self.frames + pages).min(CACHE);
    }

    /// Counts a frame for a fault.
    fn fill(&mut self) {
        self.out.filled += 1;
        self.out.warm += u64::from(self.frames > 0);
        self.frames = self.frames.saturating_sub(1);
    }
}

/// The private memory of a process, in pages.
#[derive(Clone, Debug, Default)]
struct Memory {
    /// Mapped ranges that count.
    mapped: RangeSet<u64>,
    mapped_pages: u64,
    pages: PageStates,
    /// The time in microseconds of the last discard of a page.
    discarded_at: RangeMap<u64, u64>,
    /// Resident pages.
    there: PageSet,
    /// Pages freed by `MADV_DONTNEED`, and their number.
    gone: PageSet,
    free: u64,
    brk: Option<u64>,
    threads: u64,
    /// Pages of the parent at the fork of this process.
    shared: u64,
}

impl Memory {
    fn step(&mut self, kind: Kind, now: u64, others: u64, counts: &mut Counts) {
        match kind {
            Kind::Map { start, len, flags, backing, .. } => {
                counts.free(self.unmap(pages(start, len)));
                if backing == Backing::Anon && flags & MAP_STACK == 0 {
                    self.map(pages(start, len));
                    counts.out.maps += 1;
                    counts.out.map_pages += len / PAGE_SIZE;
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
            Kind::Resident { start, len, .. } => {
                for page in pages(start, len) {
                    if self.mapped.contains(&page) {
                        self.touch(page, now, &mut counts.out);
                    }
                }
            }
            Kind::Unmap { start, len } => {
                let freed = self.unmap(pages(start, len));
                counts.free(freed);
                if freed > 0 {
                    counts.out.unmaps += 1;
                    counts.out.unmapped += freed;
                    counts.out.interrupts += self.interrupted(others);
                }
            }
            Kind::Remap { old, old_len, new, new_len, .. } if old_len > 0 => {
                let is_counted = self.mapped.contains(&(old / PAGE_SIZE));
                // The frames of the old range move.
                self.unmap(pages(old, old_len));
                counts.free(self.unmap(pages(new, new_len)));
                if is_counted {
                    self.map(pages(new, new_len));
                }
            }
            Kind::Brk { end } => {
                let to = page_up(end).unwrap_or(end);
                let from = self.brk.replace(to).unwrap_or(to);
                if to > from {
                    self.map(from / PAGE_SIZE..to / PAGE_SIZE);
                } else if to < from {
                    counts.free(self.unmap(to / PAGE_SIZE..from / PAGE_SIZE));
                }
            }
            Kind::Advise { start, len, advice: MADV_DONTNEED | MADV_DONTNEED_LOCKED } => {
                let freed = self.discard(pages(start, len), now);
                counts.free(freed);
                if freed > 0 {
                    counts.out.calls += 1;
                    counts.out.pages += freed;
                    counts.out.interrupts += self.interrupted(others);
                }
            }
            Kind::Advise { start, len, advice: MADV_FREE } => {
                let resident = self.there.count(pages(start, len));
                counts.out.lazy_calls += u64::from(resident > 0);
                counts.out.lazy_pages += resident;
            }
            Kind::Fault { page, present: false, .. } => {
                let page = page / PAGE_SIZE;
                if self.mapped.contains(&page) {
                    self.touch(page, now, &mut counts.out);
                    counts.fill();
                }
            }
            _ => {}
        }
    }

    fn touch(&mut self, page: u64, now: u64, out: &mut Discards) {
        match self.pages.touch(page) {
            Some(State::Discarded) => {
                out.refilled += 1;
                let age = now.saturating_sub(self.discarded_at.get(&page).copied().unwrap_or(0));
                for (within, limit) in out.refilled_within.iter_mut().zip(AGES) {
                    *within += u64::from(age <= limit);
                }
            }
            Some(State::Returned) => out.remapped += 1,
            Some(State::There) | None => {}
        }
        self.there.insert(page);
        if self.free > 0 && self.gone.contains(page) {
            self.gone.remove(page..page + 1);
            self.free -= 1;
        }
    }

    /// Frees the resident pages of `range`, and returns their number.
    fn discard(&mut self, range: Range<u64>, now: u64) -> u64 {
        let freed = self.there.count(range.clone());
        if freed > 0 {
            self.discarded_at.insert(range.clone(), now);
            self.pages.set(range.clone(), State::Discarded);
            for page in self.there.list(range.clone()) {
                self.free += u64::from(self.gone.insert(page));
            }
            self.there.remove(range);
        }
        freed
    }

    /// Removes the mappings in `range`, and returns the number of freed pages.
    fn unmap(&mut self, range: Range<u64>) -> u64 {
        let freed = self.there.count(range.clone());
        self.free -= self.gone.count(range.clone());
        self.gone.remove(range.clone());
        self.there.remove(range.clone());
        self.pages.set(range.clone(), State::Returned);
        if !range.is_empty() {
            self.mapped_pages -= self.mapped_in(&range);
            self.discarded_at.remove(range.clone());
            self.mapped.remove(range);
        }
        freed
    }

    /// Adds a mapping, which may contain mapped pages.
    fn map(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.mapped_pages += range.end - range.start - self.mapped_in(&range);
            self.mapped.insert(range);
        }
    }

    /// Returns the number of mapped pages in `range`.
    fn mapped_in(&self, range: &Range<u64>) -> u64 {
        let within = |part: &Range<u64>| part.end.min(range.end) - part.start.max(range.start);
        self.mapped.overlapping(range).map(within).sum()
    }

    /// Returns the approximate number of pages that no other process has.
    fn own(&self) -> u64 {
        self.there.len().saturating_sub(self.shared)
    }

    /// Returns the number of CPUs that a flush interrupts, at most.
    fn interrupted(&self, others: u64) -> u64 {
        self.threads.saturating_sub(1).min(others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Access, Event, ProcessInfo, Prot, ThreadInfo};

    const START: u64 = 1 << 40;
    const RW: Prot = Prot::READ.union(Prot::WRITE);

    fn map(count: u64, flags: u32) -> Kind {
        let len = count * PAGE_SIZE;
        Kind::Map { start: START, len, prot: RW, flags, backing: Backing::Anon }
    }

    fn touch(range: Range<u64>) -> Vec<Kind> {
        range.map(|page| Kind::first(START + page * PAGE_SIZE, Access::Write)).collect()
    }

    fn advise(range: Range<u64>, advice: u32) -> Kind {
        let (start, len) = (START + range.start * PAGE_SIZE, (range.end - range.start) * PAGE_SIZE);
        Kind::Advise { start, len, advice }
    }

    fn of(parts: &[&[Kind]]) -> Discards {
        Discards::of(&Trace::of_one_thread(parts.concat())).expect("a valid trace")
    }

    #[test]
    fn discards_that_come_back_are_counted_once_for_each_fault() {
        let free = [advise(0..64, MADV_DONTNEED)];
        let got =
            of(&[&[map(64, 0x22)], &touch(0..40), &free, &touch(0..30), &free, &touch(50..52)]);
        let want = Discards {
            calls: 2,
            pages: 70,
            refilled: 30,
            refilled_within: [30; AGES.len()],
            maps: 1,
            map_pages: 64,
            peak_mapped: 64,
            peak_free: 40,
            filled: 72,
            warm: 32,
            ..Discards::default()
        };
        assert_eq!(got, want);
        // A call on memory without pages frees none.
        let got = of(&[&[map(64, 0x22)], &free, &touch(0..1)]);
        assert_eq!((got.calls, got.pages, got.refilled), (0, 0, 0));
    }

    #[test]
    fn faults_are_counted_by_the_time_since_the_discard() {
        let events = [&[map(8, 0x22)][..], &touch(0..8), &[advise(0..8, MADV_DONTNEED)]].concat();
        let mut trace = Trace::of_one_thread(events);
        let mut push = |time_us, kind| trace.events.push(Event { time_us, thread: 0, kind });
        touch(0..2).into_iter().for_each(|kind| push(10_000, kind));
        touch(2..5).into_iter().for_each(|kind| push(500_000, kind));
        // A second discard of a page starts the time again.
        push(900_000, advise(0..1, MADV_DONTNEED));
        touch(0..1).into_iter().for_each(|kind| push(950_000, kind));
        let got = Discards::of(&trace).expect("a valid trace");
        assert_eq!((got.refilled, got.refilled_within), (6, [2, 3, 6, 6]));
    }

    #[test]
    fn frames_freed_last_are_warm() {
        let count = 3 * CACHE / 2;
        let free = [advise(0..count, MADV_DONTNEED)];
        let warm = |parts: &[&[Kind]]| of(parts).warm;
        let first: &[&[Kind]] = &[&[map(count, 0x22)], &touch(0..count)];
        assert_eq!((warm(first), of(first).filled), (0, count), "new frames");
        // The frames freed first do not fit into the cache.
        assert_eq!(warm(&[first, &[&free, &touch(0..count)]].concat()), CACHE);
        // Each frame serves one fault.
        assert_eq!(warm(&[first, &[&free, &touch(0..9)]].concat()), 9);
        let len = count * PAGE_SIZE;
        let again = [Kind::Unmap { start: START, len }, map(count, 0x22)];
        assert_eq!(warm(&[first, &[&again, &touch(0..300)]].concat()), 300);
        assert_eq!(warm(&[first, &[&[map(count, 0x22)], &touch(0..300)]].concat()), 300);
        let brk = |count: u64| Kind::Brk { end: START + count * PAGE_SIZE };
        let heap = [brk(0), brk(8)];
        let got = of(&[&heap, &touch(0..8), &[brk(2), brk(8)], &touch(2..8)]);
        assert_eq!((got.warm, got.warm_share()), (6, 6.0 / 14.0));
    }

    #[test]
    fn frames_of_an_ended_process_are_warm_except_those_of_its_parent() {
        let events = [&[map(8, 0x22)][..], &touch(0..8)].concat();
        let mut trace = Trace::of_one_thread(events);
        trace.processes.push(ProcessInfo { parent: Some(0), pid: None });
        trace.threads.push(ThreadInfo { process: 1, name: String::new() });
        let mut push = |thread, kind| trace.events.push(Event { time_us: 0, thread, kind });
        push(0, Kind::Spawn { child: 1, birth: Birth::Fork });
        let (start, len) = (START + 64 * PAGE_SIZE, 4 * PAGE_SIZE);
        push(1, Kind::Map { start, len, prot: RW, flags: 0x22, backing: Backing::Anon });
        touch(64..67).into_iter().for_each(|kind| push(1, kind));
        push(1, Kind::Exit);
        push(0, Kind::Map { start, len, prot: RW, flags: 0x22, backing: Backing::Anon });
        touch(64..68).into_iter().for_each(|kind| push(0, kind));
        assert_eq!(Discards::of(&trace).expect("a valid trace").warm, 3);
    }

    #[test]
    fn peak_of_mapped_memory_counts_each_page_once() {
        let unmap = Kind::Unmap { start: START, len: 4 * PAGE_SIZE };
        let got = of(&[&[map(8, 0x22), map(6, 0x22), unmap, map(2, 0x22)]]);
        assert_eq!((got.maps, got.map_pages, got.peak_mapped), (3, 16, 8));
    }

    #[test]
    fn unmapped_and_lazily_freed_pages_are_counted_apart() {
        let unmap = Kind::Unmap { start: START, len: 8 * PAGE_SIZE };
        let lazy = [advise(0..8, MADV_FREE)];
        let first = [&[map(8, 0x22)][..], &touch(0..8)].concat();
        let got = of(&[&first, &lazy, &[unmap], &first]);
        assert_eq!((got.unmaps, got.unmapped, got.remapped, got.back()), (1, 8, 8, 8));
        assert_eq!((got.lazy_calls, got.lazy_pages, got.calls, got.peak_free), (1, 8, 0, 0));
    }

    #[test]
    fn stacks_and_files_are_not_counted() {
        let free = [advise(0..8, MADV_DONTNEED)];
        let stack = of(&[&[map(8, 0x22 | MAP_STACK)], &touch(0..8), &free, &touch(0..8)]);
        assert_eq!(stack, Discards::default());
        let (start, len) = (START, 8 * PAGE_SIZE);
        let file = Kind::Map { start, len, prot: RW, flags: 2, backing: Backing::File };
        assert_eq!(of(&[&[file], &touch(0..8), &free, &touch(0..8)]), Discards::default());
    }

    #[test]
    fn interrupts_are_limited_by_threads_and_cpus() {
        let free = advise(0..8, MADV_DONTNEED);
        let events = [&[map(8, 0x22)][..], &touch(0..8), &[free]].concat();
        let mut trace = Trace::of_one_thread(events);
        for child in 1..4 {
            trace.threads.push(ThreadInfo { process: 0, name: String::new() });
            let kind = Kind::Spawn { child, birth: Birth::Thread };
            let first = Event { time_us: 0, thread: 0, kind };
            trace.events = [first].into_iter().chain(&trace.events).collect();
        }
        let interrupts = |trace: &Trace| Discards::of(trace).expect("a valid trace").interrupts;
        assert_eq!(interrupts(&trace), 3);
        trace.header.cpus = 2;
        assert_eq!(interrupts(&trace), 1);
        let exit = Event { time_us: 0, thread: 3, kind: Kind::Exit };
        let (spawns, rest) = (trace.events.iter().take(3), trace.events.iter().skip(3));
        trace.events = spawns.chain([exit]).chain(rest).collect();
        trace.header.cpus = 64;
        assert_eq!(interrupts(&trace), 2);
        // A thread that ran before the recording.
        trace.threads.push(ThreadInfo { process: 0, name: String::new() });
        assert_eq!(interrupts(&trace), 3);
    }

    #[test]
    fn heap_below_a_lowered_break_comes_back() {
        let brk = |count: u64| Kind::Brk { end: START + count * PAGE_SIZE };
        let got = of(&[&[brk(0), brk(8)], &touch(0..8), &[brk(2), brk(8)], &touch(2..8)]);
        assert_eq!((got.remapped, got.unmaps), (6, 0));
    }
}
