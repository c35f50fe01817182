//! What the faults of a recording were for, and which mappings they filled.
//!
//! One walk in the order of time. Recordings are made without fault-around, so a fault on a file counts here as one of the kernel's
//! default only if no earlier one mapped the 64 KiB around it.

use crate::event::{Access, Backing, Birth, Kind, Trace};
use crate::plan::PlanError;
use crate::plan::space::{Area, Met, Space};
use faultless::{PAGE_SIZE, VirtRange, page_up};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Pages that one fault on a file maps: Linux's default of `fault_around_bytes`.
const AROUND: u64 = 16;
/// Pages of a sequence that one fault could map: what a window of order 3 has.
const WINDOW: u64 = 8;
/// The smallest mapping that is worth a call of its own, in bytes.
const LARGE: u64 = 256 << 10;
/// `MAP_STACK` and `MAP_NORESERVE`: memory that is reserved, not meant to be used whole.
const RESERVED: u32 = 0x2_0000 | 0x4000;
const MADV_DONTNEED: u32 = 4;
const MADV_HUGEPAGE: u32 = 14;

/// Counts of a recording's faults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Stores to untouched private anonymous memory: each zeroes a page.
    pub zeroed: u64,
    /// Loads of it: each maps the zero page.
    pub zero_page: u64,
    /// Faults on a present page: copies, mostly.
    pub copies: u64,
    /// Faults on files and shared memory, with fault-around.
    pub file: u64,
    /// Those of `file` that fetched an instruction.
    pub text: u64,
    /// Different pages of code that were executed, fault-around left out.
    pub text_pages: u64,
    /// Of `zeroed`: the second to eighth page of a sequence, up or down, of one thread.
    pub in_sequence: u64,
    /// Of `zeroed`: pages that the program had before at this address and had given back, by `munmap` or `brk`.
    pub returned: u64,
    /// Of `zeroed`: pages that it had given back with `MADV_DONTNEED`.
    pub discarded: u64,
    /// `brk` calls that moved the break.
    pub breaks: u64,
    /// Whether the program asks for huge pages itself (`MADV_HUGEPAGE`).
    pub asks_for_huge: bool,
    /// Large private anonymous mappings, by length.
    pub mappings: Vec<Mappings>,
}

/// Mappings of one length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mappings {
    /// Bytes of each.
    pub len: u64,
    /// How many there were.
    pub count: u64,
    /// Pages of them that were touched.
    pub touched: u64,
    /// The most pages of them that were mapped at one moment and never touched.
    pub unused: u64,
}

impl Mappings {
    /// The share of their pages that was touched, from 0 to 1.
    pub fn used(&self) -> f64 {
        self.touched as f64 / (self.count * self.len / PAGE_SIZE).max(1) as f64
    }
}

impl Census {
    /// Counts `trace`.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`].
    pub fn of(trace: &Trace) -> Result<Self, PlanError> {
        trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
        let mut walk = Walk { last: vec![Run::default(); trace.threads.len()], ..Walk::default() };
        walk.memories.resize_with(trace.processes.len(), Memory::default);
        for event in &trace.events {
            let thread = event.thread as usize;
            let process = trace.threads[thread].process as usize;
            match event.kind {
                Kind::Spawn { child, birth: Birth::Fork } => {
                    let to = trace.threads[child as usize].process as usize;
                    walk.memories[to] = walk.memories[process].clone();
                    walk.memories[to].live.clear();
                }
                // What a vfork child does before it executes a program is little.
                Kind::Spawn { .. } | Kind::Exit => {}
                Kind::Exec => walk.end(process),
                kind => walk.step(thread, process, kind),
            }
        }
        (0..trace.processes.len()).for_each(|process| walk.end(process));
        let Walk { mut census, unused, .. } = walk;
        for mappings in &mut census.mappings {
            mappings.unused = peak(unused.get(&mappings.len).map_or(&[], Vec::as_slice));
        }
        Ok(census)
    }

    /// All faults that the kernel serves, with fault-around.
    pub fn faults(&self) -> u64 {
        self.zeroed + self.zero_page + self.copies + self.file
    }
}

/// Where a thread's last fault was, and how many before it were in sequence with it.
#[derive(Clone, Copy, Default)]
struct Run {
    page: u64,
    len: u64,
}

/// A large mapping that is there.
#[derive(Clone)]
struct Live {
    len: u64,
    born: u64,
    touched: HashSet<u64>,
}

#[derive(Clone, Default)]
struct Memory {
    areas: Space,
    /// Pages that were touched, and what became of them.
    pages: HashMap<u64, Page>,
    /// Blocks of files that a fault has mapped.
    around: HashSet<u64>,
    live: BTreeMap<u64, Live>,
    text: HashSet<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Page {
    There,
    Returned,
    Discarded,
}

/// While a mapping was there: pages of it that were never touched, from one event to another.
type Unused = (u64, u64, u64);

#[derive(Default)]
struct Walk {
    census: Census,
    memories: Vec<Memory>,
    last: Vec<Run>,
    now: u64,
    unused: HashMap<u64, Vec<Unused>>,
}

impl Walk {
    fn end(&mut self, process: usize) {
        let memory = std::mem::take(&mut self.memories[process]);
        self.census.text_pages += memory.text.len() as u64;
        memory.live.into_values().for_each(|live| self.count(live));
    }

    /// A mapping has come to its end.
    fn count(&mut self, live: Live) {
        let pages = live.len / PAGE_SIZE;
        let touched = live.touched.len() as u64;
        let at = self.census.mappings.iter().position(|mappings| mappings.len == live.len);
        let at = at.unwrap_or_else(|| {
            self.census.mappings.push(Mappings { len: live.len, ..Mappings::default() });
            self.census.mappings.len() - 1
        });
        let mappings = &mut self.census.mappings[at];
        mappings.count += 1;
        mappings.touched += touched;
        let span = (live.born, self.now, pages.saturating_sub(touched));
        self.unused.entry(live.len).or_default().push(span);
    }

    fn step(&mut self, thread: usize, process: usize, kind: Kind) {
        self.now += 1;
        let memory = &mut self.memories[process];
        match kind {
            Kind::Fault { page, access, present, .. } => {
                self.fault(thread, process, page, access, present);
            }
            Kind::Map { start, len, prot, backing, flags } => {
                self.give_back(process, start, len, Page::Returned);
                let memory = &mut self.memories[process];
                memory.areas.insert(VirtRange::new(start, start + len), area(prot, backing));
                let whole = backing == Backing::Anon && flags & RESERVED == 0;
                if whole && len >= LARGE && prot.contains(crate::event::Prot::WRITE) {
                    let live = Live { len, born: self.now, touched: HashSet::new() };
                    memory.live.insert(start, live);
                }
            }
            Kind::Area { start, len, prot, backing } => {
                memory.areas.insert(VirtRange::new(start, start + len), area(prot, backing));
            }
            Kind::Unmap { start, len } => {
                self.give_back(process, start, len, Page::Returned);
                self.memories[process].areas.remove(VirtRange::new(start, start + len));
            }
            Kind::Protect { start, len, prot } => {
                for (part, old) in memory.areas.areas_in(VirtRange::new(start, start + len)) {
                    memory.areas.insert(part, Area { prot, ..old });
                }
            }
            Kind::Advise { start, len, advice: MADV_DONTNEED } => {
                self.discard(process, start, len, Page::Discarded);
            }
            Kind::Advise { advice: MADV_HUGEPAGE, .. } => self.census.asks_for_huge = true,
            Kind::Remap { old, old_len, new, new_len, .. } => {
                let moved =
                    memory.areas.areas_in(VirtRange::new(old, old + old_len.max(PAGE_SIZE)));
                let kept = moved.first().map(|(_, area)| *area);
                let live = memory.live.remove(&old);
                self.give_back(process, old, old_len, Page::Returned);
                let memory = &mut self.memories[process];
                memory.areas.remove(VirtRange::new(old, old + old_len));
                if let Some(kept) = kept {
                    memory.areas.insert(VirtRange::new(new, new + new_len), kept);
                }
                if let Some(live) = live {
                    self.count(live);
                    let live = Live { len: new_len, born: self.now, touched: HashSet::new() };
                    self.memories[process].live.insert(new, live);
                }
            }
            Kind::Brk { end } => {
                let to = page_up(end).unwrap_or(end);
                let from = memory.areas.brk.replace(to).unwrap_or(to);
                self.census.breaks += u64::from(to != from);
                if to > from {
                    let prot = crate::event::Prot::READ | crate::event::Prot::WRITE;
                    let heap = area(prot, Backing::Heap);
                    memory.areas.insert(VirtRange::new(from, to), heap);
                } else {
                    self.discard(process, to, from - to, Page::Returned);
                    self.memories[process].areas.remove(VirtRange::new(to, from));
                }
            }
            Kind::Advise { .. } | Kind::Spawn { .. } | Kind::Exec | Kind::Exit => {}
        }
    }

    /// The pages of a range go back to the kernel, and so do the mappings that begin there.
    fn give_back(&mut self, process: usize, start: u64, len: u64, how: Page) {
        self.discard(process, start, len, how);
        let ended: Vec<_> = self.memories[process]
            .live
            .extract_if(start..start + len, |_, _| true)
            .map(|(_, live)| live)
            .collect();
        ended.into_iter().for_each(|live| self.count(live));
    }

    fn discard(&mut self, process: usize, start: u64, len: u64, how: Page) {
        let memory = &mut self.memories[process];
        for page in start / PAGE_SIZE..(start + len) / PAGE_SIZE {
            if let Some(state) = memory.pages.get_mut(&page) {
                *state = how;
            }
            if page % AROUND == 0 {
                memory.around.remove(&(page / AROUND));
            }
        }
    }

    fn fault(&mut self, thread: usize, process: usize, at: u64, access: Access, present: bool) {
        let memory = &mut self.memories[process];
        let page = at / PAGE_SIZE;
        let backing = match memory.areas.meet(at) {
            Met::Area(_, area) => area.backing,
            Met::Growth(by, area) => {
                memory.areas.insert(by, area);
                Backing::Stack
            }
            // What no report covers is the heap below the break.
            Met::Hole => Backing::Heap,
        };
        if present {
            self.census.copies += 1;
            return;
        }
        if !matches!(backing, Backing::Anon | Backing::Heap | Backing::Stack) {
            let executes = access == Access::Exec;
            if executes {
                memory.text.insert(page);
            }
            // A store to a private file maps its copy alone.
            if access == Access::Write && backing == Backing::File {
                self.census.file += 1;
            } else if memory.around.insert(page / AROUND) {
                self.census.file += 1;
                self.census.text += u64::from(executes);
            }
            return;
        }
        if let Some((start, live)) = memory.live.range_mut(..=at).next_back()
            && at < start + live.len
        {
            live.touched.insert(page);
        }
        match memory.pages.insert(page, Page::There) {
            // The kernel tried before, and was not permitted to wait.
            Some(Page::There) => return,
            Some(Page::Returned) => self.census.returned += 1,
            Some(Page::Discarded) => self.census.discarded += 1,
            None => {}
        }
        if matches!(access, Access::Read | Access::Exec) {
            self.census.zero_page += 1;
            return;
        }
        self.census.zeroed += 1;
        let run = &mut self.last[thread];
        run.len = if page.abs_diff(run.page) == 1 { run.len + 1 } else { 0 };
        run.page = page;
        self.census.in_sequence += u64::from(!run.len.is_multiple_of(WINDOW));
    }
}

fn area(prot: crate::event::Prot, backing: Backing) -> Area {
    Area { prot, backing, assumed: false }
}

/// The most pages at one moment, of spans that add up where they overlap.
fn peak(spans: &[Unused]) -> u64 {
    let mut changes: Vec<_> = spans
        .iter()
        .flat_map(|&(from, to, pages)| [(from, true, pages), (to, false, pages)])
        .collect();
    changes.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, begins, pages) in changes {
        now = if begins { now + pages } else { now - pages };
        most = most.max(now);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Prot;

    const START: u64 = 1 << 40;
    const RW: Prot = Prot::READ.union(Prot::WRITE);

    fn census(events: &[Kind]) -> Census {
        let trace = Trace::of_one_thread(events.iter().copied());
        Census::of(&trace).unwrap()
    }

    fn map(pages: u64, backing: Backing) -> Kind {
        let (start, len) = (START, pages * PAGE_SIZE);
        Kind::Map { start, len, prot: RW, flags: 0x22, backing }
    }

    fn fault(page: u64, access: Access) -> Kind {
        let page = START + page * PAGE_SIZE;
        Kind::Fault { page, access, kernel: false, present: false, instruction: None }
    }

    #[test]
    fn pages_in_sequence_are_counted_in_windows_of_eight() {
        let mut events = vec![map(100, Backing::Anon)];
        events.extend((0..17).map(|page| fault(page, Access::Write)));
        // Down, and then somewhere else.
        events.extend([60, 59, 58, 90].map(|page| fault(page, Access::Write)));
        let census = census(&events);
        assert_eq!((census.zeroed, census.in_sequence), (21, 14 + 2));
    }

    #[test]
    fn one_fault_on_a_file_maps_those_around() {
        let file = [map(64, Backing::File)];
        let faults = [3, 4, 15, 16].map(|page| fault(page, Access::Exec));
        let got = census(&[&file[..], &faults, &[fault(5, Access::Write)]].concat());
        assert_eq!((got.file, got.text, got.text_pages, got.faults()), (3, 2, 4, 3));
    }

    #[test]
    fn pages_that_were_given_back_are_told_from_new_ones() {
        let w = Access::Write;
        let len = 8 * PAGE_SIZE;
        let forget = Kind::Advise { start: START, len, advice: MADV_DONTNEED };
        let unmap = Kind::Unmap { start: START, len };
        let got = census(&[
            map(8, Backing::Anon),
            fault(0, w),
            forget,
            fault(0, w),
            fault(1, w),
            unmap,
            map(8, Backing::Anon),
            fault(1, w),
            fault(2, w),
        ]);
        assert_eq!((got.zeroed, got.discarded, got.returned), (5, 1, 1));
    }

    #[test]
    fn mappings_of_one_length_are_counted_together() {
        let touches = (0..96).map(|page| fault(page, Access::Write));
        let unmap = Kind::Unmap { start: START, len: 128 * PAGE_SIZE };
        let once: Vec<_> =
            [map(128, Backing::Anon)].into_iter().chain(touches).chain([unmap]).collect();
        let got = census(&[&once[..], &once[..]].concat());
        let len = 128 * PAGE_SIZE;
        assert_eq!(got.mappings, [Mappings { len, count: 2, touched: 192, unused: 32 }]);
        assert_eq!(got.mappings[0].used(), 0.75);
    }

    #[test]
    fn the_census_of_a_real_program_agrees_with_its_summary() {
        for name in ["python", "sort", "gcc"] {
            let trace = crate::recordings::find(name).unwrap().trace().unwrap();
            let (census, summary) = (Census::of(&trace).unwrap(), trace.summary());
            let anonymous = census.zeroed + census.zero_page;
            let near = (summary.anon_first_touches - summary.unserved_faults) as u64;
            assert!(anonymous.abs_diff(near) <= near / 50, "{name}: {anonymous}, {near}");
            assert!(census.in_sequence < census.zeroed && census.zeroed > 0, "{name}: {census:?}");
        }
    }
}
