//! Counts of the faults of a recording by purpose, and of the mappings that they filled.
//!
//! One walk in the order of time. Recordings are made without fault-around. With the kernel's
//! default, a load or fetch from a file maps the surrounding 64 KiB, so a later load there does not
//! count as a fault. A store maps only its page, and so does the first touch of a page of shared
//! anonymous memory.

mod by_stack;
mod huge;

pub use by_stack::StackFaults;
pub use huge::HugeShared;

use crate::anticipate::folio::THP;
use crate::callers::{Caller, Callers};
use crate::event::{Access, Backing, Birth, Kind, Recorded, StackId, Trace};
use crate::page_set::{PageSet, PageStates, State};
use crate::plan::space::{Area, Met, Space};
use crate::plan::{self, PlanError};
use faultless::{PAGE_SIZE, VirtRange, page_up};
use rangemap::RangeMap;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::rc::Rc;

use by_stack::Counts;
use huge::SharedFolios;

/// Pages mapped by one fault on a file: Linux's default of `fault_around_bytes`.
const AROUND: u64 = 16;
/// Pages of a sequence that one fault could map: a window of order 3.
const WINDOW: u64 = 8;
/// The smallest mapping for which an additional call is worthwhile, in bytes.
const LARGE: u64 = 256 << 10;
/// `MAP_STACK` and `MAP_NORESERVE`: memory that is reserved, and usually not used completely.
const RESERVED: u32 = 0x2_0000 | 0x4000;
const MADV_DONTNEED: u32 = 4;
const MADV_HUGEPAGE: u32 = 14;
const MADV_NOHUGEPAGE: u32 = 15;

/// Counts of a recording's faults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Stores to untouched private anonymous memory: each zeroes a page.
    pub zeroed: u64,
    /// Loads of untouched private anonymous memory: each maps the zero page.
    pub zero_page: u64,
    /// Faults on a present page of private memory: copies, mostly.
    pub copies: u64,
    /// Faults on files and on pages of shared memory touched earlier by another process, with
    /// fault-around.
    pub file: u64,
    /// First touches of pages of shared anonymous memory, System V's segments and memfd: each
    /// zeroes a page.
    pub shared: u64,
    /// Allocated huge pages of shared memory: 0 as recorded, because recordings have none.
    pub shared_folios: u64,
    /// The faults on shared memory that huge pages would replace if all shared memory got them
    /// (`shmem_enabled=always`), except memory for which the program refuses them
    /// (`MADV_NOHUGEPAGE`).
    pub huge_shared: HugeShared,
    /// The same for memory with a request of the program (`MADV_HUGEPAGE`; `shmem_enabled=advise`).
    pub huge_asked: HugeShared,
    /// The faults of `file` that fetched an instruction.
    pub text: u64,
    /// Different pages of executed code, without fault-around.
    pub text_pages: u64,
    /// Faults of `zeroed` on the second to eighth page of a sequence, up or down, of one thread.
    pub in_sequence: u64,
    /// Faults of `zeroed` on pages that the program had earlier at this address and had freed by
    /// `munmap` or `brk`.
    pub returned: u64,
    /// Faults of `zeroed` on pages that the program had freed with `MADV_DONTNEED`.
    pub discarded: u64,
    /// `brk` calls that moved the break.
    pub breaks: u64,
    /// Whether the program requests huge pages (`MADV_HUGEPAGE`).
    pub asks_for_huge: bool,
    /// Large private anonymous mappings, by length.
    pub mappings: Vec<Mappings>,
    /// The faults of each call stack, if the recording has call stacks.
    pub stacks: BTreeMap<StackId, StackFaults>,
    /// The faults of each call stack in the memory of each call, if the call was recorded with its
    /// call stack.
    pub callers: BTreeMap<(StackId, Caller), u64>,
    /// The faults of `returned` and `discarded` of each call stack by the call that had freed the
    /// page, if the call was recorded with its call stack.
    pub freed: BTreeMap<(StackId, Caller), u64>,
}

/// Mappings of one length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mappings {
    /// The length of each mapping, in bytes.
    pub len: u64,
    /// The number of mappings.
    pub count: u64,
    /// Touched pages.
    pub touched: u64,
    /// The peak number of mapped pages that are never touched.
    pub unused: u64,
}

impl Mappings {
    /// Returns the share of touched pages, from 0 to 1.
    pub fn used(&self) -> f64 {
        self.touched as f64 / (self.count * self.len / PAGE_SIZE).max(1) as f64
    }
}

impl Census {
    /// Counts `trace`, with huge pages of 2 MiB.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`].
    pub fn of(trace: &Trace) -> Result<Self, PlanError> {
        Self::with_huge(trace, 1 << THP)
    }

    /// Counts `trace`, with huge pages of `huge` pages.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`].
    pub fn with_huge(trace: &Trace, huge: u64) -> Result<Self, PlanError> {
        plan::complete(trace)?;
        let last = vec![Run::default(); trace.threads.len()];
        let mut walk = Walk { last, huge, ..Walk::default() };
        walk.memories.resize_with(trace.processes.len(), Memory::default);
        if trace.header.recorded.contains(Recorded::STACKS) {
            walk.callers = Callers::new(trace);
        }
        for event in &trace.events {
            if trace.header.recorded.contains(Recorded::STACKS) {
                walk.callers.step(trace, &event);
            }
            let thread = event.thread as usize;
            let process = trace.threads[thread].process as usize;
            match event.kind {
                Kind::Spawn { child, birth: Birth::Fork } => {
                    let to = trace.threads[child as usize].process as usize;
                    walk.memories[to] = walk.memories[process].clone();
                    walk.memories[to].live.clear();
                    // The entries of shared memory and files are not copied.
                    walk.memories[to].around = PageSet::default();
                    for folios in &mut walk.memories[to].folios {
                        folios.mapped = PageSet::default();
                    }
                }
                // A vfork child does little before it executes a program.
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

    /// Returns all faults that the kernel serves, with fault-around.
    pub fn faults(&self) -> u64 {
        self.zeroed + self.zero_page + self.copies + self.file + self.shared + self.shared_folios
    }

    /// Returns the census with huge pages for shared memory: `huge_shared` or `huge_asked`.
    pub fn with_huge_shared(&self, huge: HugeShared) -> Self {
        let HugeShared { first, mapped, folios, maps } = huge;
        Self {
            shared: self.shared - first,
            file: self.file - mapped + maps,
            shared_folios: folios,
            huge_shared: HugeShared::default(),
            huge_asked: HugeShared::default(),
            ..self.clone()
        }
    }
}

/// The page of a thread's last fault, and the number of earlier faults in sequence with it.
#[derive(Clone, Copy, Default)]
struct Run {
    page: u64,
    len: u64,
}

/// An existing large mapping.
#[derive(Clone)]
struct Live {
    len: u64,
    born: u64,
    touched: PageSet,
}

#[derive(Clone, Default)]
struct Memory {
    areas: Space,
    /// Touched pages, and their state.
    pages: PageStates,
    /// Blocks of files mapped by a fault.
    around: PageSet,
    live: BTreeMap<u64, Live>,
    text: PageSet,
    /// Pages of shared memory allocated by this process or a relative. Processes that fork have
    /// shared memory at the same addresses.
    shared: Rc<RefCell<PageSet>>,
    /// Advice about huge pages, by page number: whether the program requests or refuses them.
    advice: RangeMap<u64, bool>,
    /// Huge pages of shared memory, if all shared memory had them, and if only memory with a
    /// request had them.
    folios: [SharedFolios; 2],
}

impl Memory {
    /// Counts a fault on a `page` of shared anonymous memory in the mapping `range`. A huge page
    /// has `huge` pages.
    fn shared_fault(
        &mut self,
        (census, huge): (&mut Census, u64),
        range: VirtRange,
        page: u64,
        access: Access,
    ) {
        let first = self.shared.borrow_mut().insert(page);
        // Only allocated pages are mapped around a load.
        let around = !first && access != Access::Write && !self.around.insert(page / AROUND);
        if around {
            return;
        }
        *(if first { &mut census.shared } else { &mut census.file }) += 1;
        // The kernel aligns such a mapping to huge pages if shared memory has them.
        let start = range.start / PAGE_SIZE;
        let folio = start + (page - start) / huge * huge;
        if (folio + huge) * PAGE_SIZE > range.end {
            return;
        }
        let asks = self.advice.get(&page).copied();
        let all = (&mut census.huge_shared, asks != Some(false));
        let asked = (&mut census.huge_asked, asks == Some(true));
        for ((huge, applies), folios) in [all, asked].into_iter().zip(&mut self.folios) {
            if !applies {
                continue;
            }
            *(if first { &mut huge.first } else { &mut huge.mapped }) += 1;
            if folios.mapped.insert(folio) {
                let new = folios.allocated.borrow_mut().insert(folio);
                *(if new { &mut huge.folios } else { &mut huge.maps }) += 1;
            }
        }
    }

    /// Handles pages that are resident at the start of the recording.
    fn hold(&mut self, range: VirtRange) {
        for (part, area) in self.areas.areas_in(range) {
            let pages = part.start / PAGE_SIZE..part.end / PAGE_SIZE;
            match area.backing {
                Backing::SharedAnon => {
                    let mut shared = self.shared.borrow_mut();
                    pages.for_each(|page| _ = shared.insert(page));
                }
                Backing::Anon | Backing::Heap | Backing::Stack => {
                    pages.for_each(|page| _ = self.pages.touch(page));
                }
                Backing::File | Backing::SharedFile | Backing::Special => {}
            }
        }
    }

    /// Handles a new mapping, or the removal of the mapping, in `range`.
    fn forget(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.advice.remove(range);
        }
    }
}

/// The untouched pages of a mapping in its lifetime: first event, last event, pages.
type Unused = (u64, u64, u64);

#[derive(Default)]
struct Walk {
    census: Census,
    memories: Vec<Memory>,
    last: Vec<Run>,
    callers: Callers,
    /// Pages of a huge page.
    huge: u64,
    now: u64,
    unused: HashMap<u64, Vec<Unused>>,
}

impl Walk {
    fn end(&mut self, process: usize) {
        let memory = std::mem::take(&mut self.memories[process]);
        self.census.text_pages += memory.text.len();
        memory.live.into_values().for_each(|live| self.count(live));
    }

    /// Counts a mapping at its end.
    fn count(&mut self, live: Live) {
        let pages = live.len / PAGE_SIZE;
        let touched = live.touched.len();
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
            Kind::Fault { page, access, present, stack, .. } => {
                let before = self.census.counts();
                self.fault(thread, process, page, access, present);
                if stack != StackId::NONE {
                    self.count_stack(process, page, stack, before);
                }
            }
            Kind::Map { start, len, prot, backing, flags } => {
                self.give_back(process, start, len, State::Returned);
                let memory = &mut self.memories[process];
                memory.areas.insert(VirtRange::new(start, start + len), area(prot, backing));
                let pages = start / PAGE_SIZE..(start + len) / PAGE_SIZE;
                memory.forget(pages.clone());
                if backing == Backing::SharedAnon {
                    memory.shared.borrow_mut().remove(pages.clone());
                    for folios in &memory.folios {
                        folios.allocated.borrow_mut().remove(pages.clone());
                    }
                }
                let whole = backing == Backing::Anon && flags & RESERVED == 0;
                if whole && len >= LARGE && prot.contains(crate::event::Prot::WRITE) {
                    let live = Live { len, born: self.now, touched: PageSet::default() };
                    memory.live.insert(start, live);
                }
            }
            Kind::Area { start, len, prot, backing } => {
                memory.areas.insert(VirtRange::new(start, start + len), area(prot, backing));
                if backing == Backing::Heap {
                    // The heap of a process that ran before the recording.
                    memory.areas.brk.get_or_insert(start + len);
                }
            }
            Kind::Resident { start, len, .. } => memory.hold(VirtRange::new(start, start + len)),
            Kind::Unmap { start, len } => {
                self.give_back(process, start, len, State::Returned);
                let memory = &mut self.memories[process];
                memory.forget(start / PAGE_SIZE..(start + len) / PAGE_SIZE);
                memory.areas.remove(VirtRange::new(start, start + len));
            }
            Kind::Protect { start, len, prot } => {
                for (part, old) in memory.areas.areas_in(VirtRange::new(start, start + len)) {
                    memory.areas.insert(part, Area { prot, ..old });
                }
            }
            Kind::Advise { start, len, advice: MADV_DONTNEED } => {
                self.discard(process, start, len, State::Discarded);
            }
            Kind::Advise { start, len, advice: advice @ (MADV_HUGEPAGE | MADV_NOHUGEPAGE) } => {
                let pages = start / PAGE_SIZE..(start + len) / PAGE_SIZE;
                memory.advice.insert(pages, advice == MADV_HUGEPAGE);
                self.census.asks_for_huge |= advice == MADV_HUGEPAGE;
            }
            Kind::Remap { old, old_len, new, new_len, .. } => {
                let moved =
                    memory.areas.areas_in(VirtRange::new(old, old + old_len.max(PAGE_SIZE)));
                let kept = moved.first().map(|(_, area)| *area);
                let live = memory.live.remove(&old);
                self.give_back(process, old, old_len, State::Returned);
                let memory = &mut self.memories[process];
                memory.areas.remove(VirtRange::new(old, old + old_len));
                if let Some(kept) = kept {
                    memory.areas.insert(VirtRange::new(new, new + new_len), kept);
                }
                if let Some(live) = live {
                    self.count(live);
                    let live = Live { len: new_len, born: self.now, touched: PageSet::default() };
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
                    self.discard(process, to, from - to, State::Returned);
                    self.memories[process].areas.remove(VirtRange::new(to, from));
                }
            }
            Kind::Advise { .. }
            | Kind::Caller { .. }
            | Kind::Spawn { .. }
            | Kind::Exec
            | Kind::Exit => {}
        }
    }

    /// Counts the fault on the page at `at` for its call stack, since the census had the counts
    /// `before`.
    fn count_stack(&mut self, process: usize, at: u64, stack: StackId, before: Counts) {
        let mut faults = StackFaults::between(&before, &self.census.counts());
        let memory = &self.memories[process];
        let live = memory.live.range(..=at).next_back();
        faults.in_mapping =
            live.map_or(0, |(start, live)| if at < start + live.len { faults.zeroed } else { 0 });
        let huge = self.huge * PAGE_SIZE;
        let first = at / huge * huge;
        if faults.zeroed > 0
            && let Met::Area(range, _) = memory.areas.meet(at)
            && range.start <= first
            && first + huge <= range.end
        {
            faults.in_huge = faults.zeroed;
        }
        self.census.stacks.entry(stack).or_default().add(&faults);
        if let Some(caller) = self.callers.of(process, at).filter(|_| faults.total() > 0) {
            *self.census.callers.entry((stack, caller)).or_default() += faults.total();
        }
        if let Some(caller) = self.callers.freed(process, at).filter(|_| faults.again > 0) {
            *self.census.freed.entry((stack, caller)).or_default() += faults.again;
        }
    }

    /// Frees the pages of a range to the kernel, and ends the mappings that start there.
    fn give_back(&mut self, process: usize, start: u64, len: u64, how: State) {
        self.discard(process, start, len, how);
        let ended: Vec<_> = self.memories[process]
            .live
            .extract_if(start..start + len, |_, _| true)
            .map(|(_, live)| live)
            .collect();
        ended.into_iter().for_each(|live| self.count(live));
    }

    fn discard(&mut self, process: usize, start: u64, len: u64, how: State) {
        let memory = &mut self.memories[process];
        let (first, end) = (start / PAGE_SIZE, (start + len) / PAGE_SIZE);
        memory.pages.set(first..end, how);
        memory.around.remove(first.div_ceil(AROUND)..end.div_ceil(AROUND));
        for folios in &mut memory.folios {
            folios.mapped.remove(first..end);
        }
    }

    fn fault(&mut self, thread: usize, process: usize, at: u64, access: Access, present: bool) {
        let memory = &mut self.memories[process];
        let page = at / PAGE_SIZE;
        let (range, backing) = match memory.areas.meet(at) {
            Met::Area(range, area) => (range, area.backing),
            Met::Growth(by, area) => {
                memory.areas.insert(by, area);
                (by, Backing::Stack)
            }
            // Memory without a report is the heap below the break.
            Met::Hole => (VirtRange::page(at), Backing::Heap),
        };
        let shared = matches!(backing, Backing::SharedAnon | Backing::SharedFile);
        if present {
            // A store to a shared page permits stores, without a copy.
            *(if shared { &mut self.census.file } else { &mut self.census.copies }) += 1;
            return;
        }
        if backing == Backing::SharedAnon {
            return memory.shared_fault((&mut self.census, self.huge), range, page, access);
        }
        if !matches!(backing, Backing::Anon | Backing::Heap | Backing::Stack) {
            let executes = access == Access::Exec;
            if executes {
                memory.text.insert(page);
            }
            // Fault-around applies to loads only.
            if access == Access::Write {
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
        match memory.pages.touch(page) {
            // An earlier attempt of the kernel was not permitted to wait.
            Some(State::There) => return,
            Some(State::Returned) => self.census.returned += 1,
            Some(State::Discarded) => self.census.discarded += 1,
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

/// Returns the peak number of pages, of spans that add up if they overlap.
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
        Kind::first(page, access)
    }

    #[test]
    fn pages_in_sequence_are_counted_in_windows_of_eight() {
        let mut events = vec![map(100, Backing::Anon)];
        events.extend((0..17).map(|page| fault(page, Access::Write)));
        // Downwards, and then at another place.
        events.extend([60, 59, 58, 90].map(|page| fault(page, Access::Write)));
        let census = census(&events);
        assert_eq!((census.zeroed, census.in_sequence), (21, 14 + 2));
    }

    #[test]
    fn file_fault_maps_surrounding_pages() {
        let file = [map(64, Backing::File)];
        let faults = [3, 4, 15, 16].map(|page| fault(page, Access::Exec));
        let got = census(&[&file[..], &faults, &[fault(5, Access::Write)]].concat());
        assert_eq!((got.file, got.text, got.text_pages, got.faults()), (3, 2, 4, 3));
    }

    #[test]
    fn stores_to_shared_memory_fault_one_page_each() {
        let (r, w) = (Access::Read, Access::Write);
        let faults = |access, pages: std::ops::Range<u64>| pages.map(move |n| fault(n, access));
        let mut events = vec![map(1024 + 8, Backing::SharedAnon)];
        events.extend(faults(w, 0..600).chain(faults(r, 600..700)).chain([fault(1030, w)]));
        let got = census(&events);
        // A load allocates its page, too.
        assert_eq!((got.shared, got.file, got.faults()), (701, 0, 701));
        // The last pages of the mapping do not fill a huge page.
        let want = HugeShared { first: 700, mapped: 0, folios: 2, maps: 0 };
        assert_eq!((got.huge_shared, want.unused(512)), (want, 324 * PAGE_SIZE));
        let huge = got.with_huge_shared(got.huge_shared);
        assert_eq!((huge.shared, huge.shared_folios, huge.faults()), (1, 2, 3));
        assert_eq!(got.huge_asked, HugeShared::default());
        // One part requests huge pages, another refuses them.
        let advise = |page: u64, advice| {
            let (start, len) = (START + page * PAGE_SIZE, 512 * PAGE_SIZE);
            Kind::Advise { start, len, advice }
        };
        let advised = [&events[..1], &[advise(0, 14), advise(512, 15)], &events[1..]].concat();
        let got = census(&advised);
        let want = HugeShared { first: 512, mapped: 0, folios: 1, maps: 0 };
        assert_eq!((got.huge_shared, got.huge_asked), (want, want));
        // Shared files: a store to a page mapped by an earlier load around it faults again.
        let file = [map(64, Backing::SharedFile), fault(0, r), fault(1, r), fault(2, w)];
        assert_eq!(census(&file).file, 2);
        let mut upgrade = Kind::first(START, w);
        if let Kind::Fault { present, .. } = &mut upgrade {
            *present = true;
        }
        let got = census(&[&file[..2], &[upgrade]].concat());
        assert_eq!((got.file, got.copies), (2, 0));
    }

    /// Another process maps allocated pages around a load, without zeroing them again.
    #[test]
    fn shared_memory_is_allocated_once_for_all_processes() {
        use crate::event::{Event, ProcessInfo, ThreadInfo};
        let mut trace = Trace::of_one_thread([map(512, Backing::SharedAnon)]);
        trace.processes.push(ProcessInfo { parent: Some(0), pid: None });
        trace.threads.push(ThreadInfo { process: 1, name: String::new() });
        let mut push = |thread, kind| trace.events.push(Event { time_us: 0, thread, kind });
        (0..32).for_each(|page| push(0, fault(page, Access::Write)));
        push(0, Kind::Spawn { child: 1, birth: Birth::Fork });
        (0..32).for_each(|page| push(1, fault(page, Access::Read)));
        push(1, fault(40, Access::Write));
        push(0, fault(40, Access::Write));
        let got = Census::of(&trace).unwrap();
        assert_eq!((got.shared, got.file), (33, 2 + 1));
        let want = HugeShared { first: 33, mapped: 3, folios: 1, maps: 1 };
        assert_eq!(got.huge_shared, want);
        assert_eq!(got.with_huge_shared(got.huge_shared).faults(), 2);
    }

    #[test]
    fn freed_pages_differ_from_new_pages() {
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
    fn pages_resident_at_the_start_are_known() {
        let w = Access::Write;
        let area = |backing| Kind::Area {
            start: START,
            len: 8 * PAGE_SIZE,
            prot: crate::event::Prot::READ | crate::event::Prot::WRITE,
            backing,
        };
        let resident = Kind::Resident { start: START, len: 4 * PAGE_SIZE, written: true };
        let forget = Kind::Advise { start: START, len: 8 * PAGE_SIZE, advice: MADV_DONTNEED };
        let private = [area(Backing::Anon), resident, forget, fault(3, w), fault(4, w)];
        let got = census(&private);
        assert_eq!((got.zeroed, got.discarded), (2, 1));
        // A process that maps a page of shared memory allocates the page only once.
        let shared = [area(Backing::SharedAnon), resident, fault(3, w), fault(4, w)];
        let got = census(&shared);
        assert_eq!((got.shared, got.file), (1, 1));
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
    fn census_of_a_real_program_matches_its_summary() {
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
