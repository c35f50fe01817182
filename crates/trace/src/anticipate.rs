//! The savings and the waste of anticipatory prefault on a recorded program.
//!
//! A simulation of the policy only: one walk over the recording in the order of time. Each thread
//! has a [`Predictor`], which chooses a window at each fault on an absent page of private anonymous
//! memory that was not mapped ahead. Copies are excluded, because the recording has them with or
//! without prefault. A page mapped ahead counts as accessed from its first fault in the recording.
//!
//! See [`bound`](crate::bound) for the limit of any policy, [`instruction`] for the effect of the
//! faulting instruction, and [`folio`] for the effect of Linux's larger folios.

pub mod folio;
pub mod instruction;

use crate::event::{Access, Backing, Birth, Event, Kind, Prot, Trace};
use crate::plan::space::{Area, Met, Space};
use crate::plan::{self, PlanError};
use faultless::SpaceId;
use faultless::prefault::BLOCK;
use faultless::prefault::{self, History, Miss, Predictor, Seen, Window};
use faultless::{PAGE_SIZE, VirtRange, page_up};
use folio::LARGEST;
use rangemap::RangeMap;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

const TABLE: u64 = faultless::format::ENTRIES as u64;
const MADV_DONTNEED: u32 = 4;
const MADV_DONTNEED_LOCKED: u32 = 24;
const MADV_HUGEPAGE: u32 = 14;
const MADV_NOHUGEPAGE: u32 = 15;
const MREMAP_DONTUNMAP: u32 = 4;

/// The actual or possible effect of prefault on one recording. Pages and faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Faults on absent pages of private anonymous memory, as recorded.
    pub faults: u64,
    /// Remaining faults.
    pub left: u64,
    /// Pages mapped ahead.
    pub ahead: u64,
    /// Pages mapped ahead that were unmapped before any touch, or not touched until the end of the
    /// recording.
    pub wasted: u64,
    /// The peak number of untouched pages mapped ahead.
    pub peak_untouched: u64,
    /// The peak number of mapped pages without prefault.
    pub peak_resident: u64,
}

impl Outcome {
    /// Returns the share of faults avoided, from 0 to 1.
    pub fn avoided(&self) -> f64 {
        1.0 - self.left as f64 / self.faults.max(1) as f64
    }

    /// Returns the share of untouched pages among pages mapped ahead, from 0 to 1.
    pub fn waste(&self) -> f64 {
        self.wasted as f64 / self.ahead.max(1) as f64
    }
}

/// Returns the outcome of `trace` with windows of at most `2^max_order` pages, chosen by predictors
/// of type `P`.
///
/// # Errors
/// The trace does not pass [`Trace::check`].
pub fn predicted<P: Predictor>(trace: &Trace, max_order: u8) -> Result<Outcome, PlanError> {
    walk(trace, &mut Anticipate::<P>::new(trace, max_order))
}

/// The policy under test.
struct Anticipate<P: Predictor> {
    max_order: u8,
    threads: Vec<P>,
    defaults: P::Defaults,
    /// By space.
    history: Vec<History>,
}

impl<P: Predictor> Anticipate<P> {
    fn new(trace: &Trace, max_order: u8) -> Self {
        let threads = trace.threads.iter().map(|_| P::NEW).collect();
        Self { max_order, threads, defaults: P::Defaults::default(), history: Vec::new() }
    }

    fn history(&mut self, space: usize) -> &History {
        if self.history.len() <= space {
            self.history.resize_with(space + 1, History::default);
        }
        &self.history[space]
    }
}

impl<P: Predictor> Anticipate<P> {
    /// Returns the window for `fault`, after a check of an earlier window.
    fn window(&mut self, fault: &Fault<'_>) -> Window<P::Record> {
        let miss = Miss {
            space: SpaceId(fault.space as u64),
            page: fault.page,
            kind: match fault.access {
                Access::Read | Access::Exec => prefault::Kind::Read,
                Access::Write | Access::Unknown => prefault::Kind::Write,
            },
            reach: fault.reach.clone(),
            history: self.history(fault.space).recall(fault.page),
        };
        let predictor = &mut self.threads[fault.thread];
        let window = predictor
            .predict(&miss, self.max_order, &self.defaults, |page| look(fault.pages, page));
        if let Some(check) = predictor.to_check() {
            predictor.checked(&check, |page| look(fault.pages, page));
        }
        window
    }

    fn check_used(&mut self, thread: usize, space: usize, range: &Range<u64>, pages: &Pages) {
        let predictor = &mut self.threads[thread];
        while let Some(check) = predictor.to_check_in(SpaceId(space as u64), range) {
            predictor.checked(&check, |page| look(pages, page));
        }
    }
}

impl<P: Predictor> Policy for Anticipate<P> {
    fn fault(&mut self, fault: &Fault<'_>) -> Vec<u64> {
        let window = self.window(fault);
        self.threads[fault.thread].mapped(&window, window.span());
        window.pages().collect()
    }

    fn taken(&mut self, thread: usize, space: usize, range: &Range<u64>, pages: &Pages) {
        self.check_used(thread, space, range, pages);
        let history = self.history(space);
        let mut blocks: BTreeMap<u64, u64> = BTreeMap::new();
        for (page, state) in pages.range(range.clone()) {
            let used = u64::from(*state == State::Touched) << (page % BLOCK);
            *blocks.entry(page / BLOCK * BLOCK).or_default() |= used;
        }
        for (block, used) in blocks {
            let inside = |n: &u64| range.contains(&(block + n));
            let taken = (0..BLOCK).filter(inside).fold(0, |mask, n| mask | 1 << n);
            history.record(block, taken, used);
        }
    }

    fn leaves(&mut self, thread: usize, space: usize, pages: &Pages) {
        self.check_used(thread, space, &(0..u64::MAX), pages);
        self.threads[thread].exit(&self.defaults);
    }
}

/// A policy that chooses the pages to map.
trait Policy {
    /// Returns the pages to map at `fault`, with or without the faulting page.
    fn fault(&mut self, fault: &Fault<'_>) -> Vec<u64>;

    /// Called when the thread removes the pages in `range` of its space, of which `pages` are
    /// mapped.
    fn taken(&mut self, _thread: usize, _space: usize, _range: &Range<u64>, _pages: &Pages) {}

    /// Called when the thread ends, or starts another program.
    fn leaves(&mut self, _thread: usize, _space: usize, _pages: &Pages) {}
}

/// The mapped pages of a space.
type Pages = BTreeMap<u64, State>;

/// A fault for which a policy may choose pages.
struct Fault<'a> {
    thread: usize,
    space: usize,
    page: u64,
    access: Access,
    /// The offset of the instruction in its page, if known.
    instruction: Option<u16>,
    /// The range of prefault: the part of the mapping in the page's table.
    reach: Range<u64>,
    /// Whether the program requested huge pages here (`MADV_HUGEPAGE`) or refused them
    /// (`MADV_NOHUGEPAGE`).
    huge: Option<bool>,
    /// The part of the mapping with the same advice, within the largest folio. The kernel splits a
    /// mapping at a change of advice.
    alike: Range<u64>,
    pages: &'a Pages,
}

fn look(pages: &Pages, page: u64) -> Seen {
    match pages.get(&page) {
        None => Seen::Empty,
        Some(State::Touched) => Seen::Used,
        Some(State::Ahead | State::AheadReadOnly) => Seen::Unused,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Touched,
    Ahead,
    /// The zero page, or a page shared with a forked process: a store still faults.
    AheadReadOnly,
}

/// An address space. Each program executed by a process has a new one.
#[derive(Clone, Default)]
struct Memory {
    areas: Space,
    pages: Pages,
    /// Advice about huge pages, by page number.
    huge: RangeMap<u64, bool>,
    threads: u32,
}

/// One walk over a recording.
struct Walk<'p> {
    policy: &'p mut dyn Policy,
    spaces: Vec<Memory>,
    /// The thread of the current event.
    thread: usize,
    space: usize,
    untouched: u64,
    resident: u64,
    out: Outcome,
}

fn walk(trace: &Trace, policy: &mut dyn Policy) -> Result<Outcome, PlanError> {
    walk_over(trace, trace.events.iter(), policy)
}

/// Walks like [`walk`], with `events` instead of the events of `trace`.
fn walk_over(
    trace: &Trace,
    events: impl Iterator<Item = Event>,
    policy: &mut dyn Policy,
) -> Result<Outcome, PlanError> {
    plan::complete(trace)?;
    let mut walk = Walk {
        policy,
        spaces: Vec::new(),
        thread: 0,
        space: 0,
        untouched: 0,
        resident: 0,
        out: Outcome::default(),
    };
    let mut of_process: Vec<Option<usize>> = vec![None; trace.processes.len()];
    let mut of_thread: Vec<Option<usize>> = vec![None; trace.threads.len()];
    for event in events {
        let thread = event.thread as usize;
        let process = trace.threads[thread].process as usize;
        let space = *of_thread[thread].get_or_insert_with(|| {
            let space = *of_process[process].get_or_insert_with(|| walk.begin(Memory::default()));
            walk.spaces[space].threads += 1;
            space
        });
        (walk.thread, walk.space) = (thread, space);
        match event.kind {
            Kind::Spawn { child, birth } => {
                let child = child as usize;
                let shared = if birth == Birth::Fork { walk.fork() } else { space };
                walk.spaces[shared].threads += 1;
                of_thread[child] = Some(shared);
                if birth == Birth::Fork {
                    of_process[trace.threads[child].process as usize] = Some(shared);
                }
            }
            Kind::Exec => {
                walk.leave();
                let fresh = walk.begin(Memory { threads: 1, ..Memory::default() });
                of_thread[thread] = Some(fresh);
                of_process[process] = Some(fresh);
            }
            Kind::Exit => walk.leave(),
            kind => walk.memory(kind),
        }
    }
    walk.out.wasted += walk.untouched;
    Ok(walk.out)
}

impl Walk<'_> {
    fn begin(&mut self, space: Memory) -> usize {
        self.spaces.push(space);
        self.spaces.len() - 1
    }

    fn here(&mut self) -> &mut Memory {
        &mut self.spaces[self.space]
    }

    fn fork(&mut self) -> usize {
        let parent = self.here();
        for state in parent.pages.values_mut() {
            if *state == State::Ahead {
                *state = State::AheadReadOnly;
            }
        }
        let mut child = Memory { threads: 0, ..parent.clone() };
        // Untouched pages stay counted with the parent.
        child.pages.retain(|_, state| *state == State::Touched);
        self.resident += child.pages.len() as u64;
        self.begin(child)
    }

    /// Removes the thread from its space.
    fn leave(&mut self) {
        self.policy.leaves(self.thread, self.space, &self.spaces[self.space].pages);
        self.here().threads -= 1;
        if self.here().threads == 0 {
            let all = self.here().pages.split_off(&0);
            self.drop_pages(all.into_values());
            *self.here() = Memory::default();
        }
    }

    fn memory(&mut self, kind: Kind) {
        let bytes = |start: u64, len: u64| VirtRange::new(start, start + len);
        match kind {
            Kind::Fault { page, access, present, instruction, .. } => {
                self.fault(page, access, present, instruction);
            }
            Kind::Map { start, len, prot, backing, .. } => {
                self.map(bytes(start, len), prot, backing);
            }
            Kind::Area { start, len, prot, backing } => {
                let range = bytes(start, len);
                if backing == Backing::Heap {
                    // The heap of a process that ran before the recording.
                    self.here().areas.brk.get_or_insert(range.end);
                }
                for hole in self.here().areas.holes_in(range) {
                    self.map(hole, prot, backing);
                }
                for (part, old) in self.here().areas.areas_in(range) {
                    if old.backing == backing {
                        self.here().areas.insert(part, Area { prot, ..old });
                    } else {
                        self.map(part, prot, backing);
                    }
                }
            }
            Kind::Resident { start, len, .. } => self.hold(bytes(start, len)),
            Kind::Unmap { start, len } => self.unmap(bytes(start, len)),
            Kind::Protect { start, len, prot } => {
                for (part, old) in self.here().areas.areas_in(bytes(start, len)) {
                    self.here().areas.insert(part, Area { prot, ..old });
                }
            }
            Kind::Advise { start, len, advice: MADV_DONTNEED | MADV_DONTNEED_LOCKED } => {
                self.take(bytes(start, len));
            }
            Kind::Advise { start, len, advice: advice @ (MADV_HUGEPAGE | MADV_NOHUGEPAGE) } => {
                let pages = page_numbers(bytes(start, len));
                if !pages.is_empty() {
                    self.here().huge.insert(pages, advice == MADV_HUGEPAGE);
                }
            }
            Kind::Remap { old, old_len, new, new_len, flags } => {
                let keep = flags & MREMAP_DONTUNMAP != 0;
                self.remap(bytes(old, old_len), bytes(new, new_len), keep);
            }
            Kind::Brk { end } => {
                let to = page_up(end).unwrap_or(end);
                let from = self.here().areas.brk.replace(to).unwrap_or(to);
                if to > from {
                    let prot = Prot::READ | Prot::WRITE;
                    self.map(VirtRange::new(from, to), prot, Backing::Heap);
                } else {
                    self.unmap(VirtRange::new(to, from));
                }
            }
            Kind::Advise { .. }
            | Kind::Caller { .. }
            | Kind::Spawn { .. }
            | Kind::Exec
            | Kind::Exit => {}
        }
    }

    fn map(&mut self, range: VirtRange, prot: Prot, backing: Backing) {
        self.take(range);
        self.forget_advice(range);
        self.here().areas.insert(range, Area { prot, backing, assumed: false });
    }

    fn unmap(&mut self, range: VirtRange) {
        self.take(range);
        self.forget_advice(range);
        self.here().areas.remove(range);
    }

    /// Drops the advice about huge pages for `range`: a new mapping has no advice.
    fn forget_advice(&mut self, range: VirtRange) {
        let pages = page_numbers(range);
        if !pages.is_empty() {
            self.here().huge.remove(pages);
        }
    }

    /// Removes the pages in `range`.
    fn take(&mut self, range: VirtRange) {
        let pages = page_numbers(range);
        if pages.is_empty() {
            return;
        }
        self.policy.taken(self.thread, self.space, &pages, &self.spaces[self.space].pages);
        let taken: Vec<_> = self.here().pages.extract_if(pages, |_, _| true).collect();
        self.drop_pages(taken.into_iter().map(|(_, state)| state));
    }

    fn drop_pages(&mut self, pages: impl Iterator<Item = State>) {
        for state in pages {
            if state == State::Touched {
                self.resident -= 1;
            } else {
                self.untouched -= 1;
                self.out.wasted += 1;
            }
        }
    }

    fn remap(&mut self, old: VirtRange, new: VirtRange, keep: bool) {
        let areas = self.here().areas.areas_in(old);
        let area = areas.first().map(|(_, area)| (area.prot, area.backing));
        let (prot, backing) = area.unwrap_or((Prot::READ | Prot::WRITE, Backing::Anon));
        let (from, to) = (page_numbers(old), page_numbers(new));
        let huge = self.here().huge.get(&from.start).copied();
        let moved: Vec<_> = self.here().pages.extract_if(from.clone(), |_, _| true).collect();
        if !keep {
            self.unmap(old);
        }
        self.map(new, prot, backing);
        if let Some(huge) = huge.filter(|_| !to.is_empty()) {
            self.here().huge.insert(to.clone(), huge);
        }
        let (stay, cut): (Vec<_>, Vec<_>) = moved
            .into_iter()
            .map(|(page, state)| (page - from.start + to.start, state))
            .partition(|(page, _)| to.contains(page));
        self.here().pages.extend(stay);
        self.drop_pages(cut.into_iter().map(|(_, state)| state));
    }

    /// Adds private anonymous pages that are resident at the start of the recording.
    fn hold(&mut self, range: VirtRange) {
        for (part, area) in self.here().areas.areas_in(range) {
            if matches!(area.backing, Backing::Anon | Backing::Heap | Backing::Stack) {
                for page in page_numbers(part) {
                    let new = self.here().pages.insert(page, State::Touched).is_none();
                    self.resident += u64::from(new);
                }
            }
        }
        self.out.peak_resident = self.out.peak_resident.max(self.resident);
    }

    fn fault(&mut self, address: u64, access: Access, present: bool, instruction: Option<u16>) {
        let page = address / PAGE_SIZE;
        let range = match self.here().areas.meet(address) {
            Met::Area(range, area) => match area.backing {
                Backing::Anon | Backing::Heap | Backing::Stack => range,
                _ => return,
            },
            Met::Growth(by, area) => {
                self.here().areas.insert(by, area);
                by
            }
            Met::Hole => return,
        };
        if present {
            // A copy, which prefault does not save. It is a touch nevertheless.
            if let Some(state) = self.here().pages.get_mut(&page)
                && *state != State::Touched
            {
                *state = State::Touched;
                self.untouched -= 1;
                self.resident += 1;
            }
            return;
        }
        self.out.faults += 1;
        let before = self.here().pages.insert(page, State::Touched);
        if before != Some(State::Touched) {
            self.resident += 1;
        }
        self.out.peak_resident = self.out.peak_resident.max(self.resident);
        if let Some(State::Ahead | State::AheadReadOnly) = before {
            self.untouched -= 1;
        }
        let reads = access == Access::Read;
        if before == Some(State::Ahead) || before == Some(State::AheadReadOnly) && reads {
            return;
        }
        self.out.left += 1;
        self.prefault(page, access, instruction, range);
    }

    fn prefault(&mut self, page: u64, access: Access, instruction: Option<u16>, range: VirtRange) {
        let table = page / TABLE * TABLE;
        let area = page_numbers(range);
        let reach = area.start.max(table)..area.end.min(table + TABLE);
        let largest = page >> LARGEST << LARGEST;
        let within = area.start.max(largest)..area.end.min(largest + (1 << LARGEST));
        let Memory { pages, huge, .. } = &self.spaces[self.space];
        let advised = huge.get_key_value(&page);
        let around = match advised {
            Some((range, _)) => range.clone(),
            None => huge.gaps(&within).find(|gap| gap.contains(&page)).unwrap_or(within.clone()),
        };
        let chosen = self.policy.fault(&Fault {
            thread: self.thread,
            space: self.space,
            page,
            access,
            instruction,
            reach,
            huge: advised.map(|(_, huge)| *huge),
            alike: within.start.max(around.start)..within.end.min(around.end),
            pages,
        });
        let ahead = if access == Access::Read { State::AheadReadOnly } else { State::Ahead };
        for page in chosen {
            assert!(within.contains(&page), "page {page:#x} out of {within:x?}");
            if let Entry::Vacant(entry) = self.here().pages.entry(page) {
                entry.insert(ahead);
                self.untouched += 1;
                self.out.ahead += 1;
            }
        }
        self.out.peak_untouched = self.out.peak_untouched.max(self.untouched);
    }
}

fn page_numbers(range: VirtRange) -> Range<u64> {
    range.start / PAGE_SIZE..range.end / PAGE_SIZE
}

#[cfg(test)]
mod tests;
