//! What anticipatory prefault would have saved a recorded program, and what it would have wasted.
//!
//! A simulation of policy alone: one walk over the recording in the order of time, in which each
//! thread has its [`Streams`] and each fault on an absent page of private anonymous memory that was
//! not mapped ahead asks them for a window. Copies are left out, as the recording has them with or
//! without prefault. A page mapped ahead counts as accessed from its first fault in the recording.
//!
//! Beside it stands what a perfect predictor reaches with windows of the same size: it maps, of the
//! best window around the fault, exactly the pages that will be touched before they are unmapped.

use crate::event::{Access, Backing, Birth, Kind, Prot, Trace};
use crate::plan::space::{Area, Met, Space};
use faultless::SpaceId;
use faultless::addr::{PAGE_SIZE, VirtRange, page_up};
use faultless::fault::prefault::{self, Miss, Seen, Streams};
use rangemap::RangeMap;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

const TABLE: u64 = 512;
const MADV_DONTNEED: u32 = 4;
const MADV_DONTNEED_LOCKED: u32 = 24;
const MREMAP_DONTUNMAP: u32 = 4;

/// What prefault did, or could have done, to one recording. Pages and faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Faults on absent pages of private anonymous memory, as recorded.
    pub faults: u64,
    /// Those of them that remain.
    pub left: u64,
    /// Pages mapped ahead.
    pub ahead: u64,
    /// Pages mapped ahead that were unmapped, or the recording ended, before any touch.
    pub wasted: u64,
    /// The most pages that were mapped ahead and untouched at one moment.
    pub peak_untouched: u64,
    /// The most pages that were mapped at one moment, without prefault.
    pub peak_resident: u64,
}

impl Outcome {
    /// The share of faults avoided, from 0 to 1.
    pub fn avoided(&self) -> f64 {
        1.0 - self.left as f64 / self.faults.max(1) as f64
    }

    /// The share of pages mapped ahead that were never touched, from 0 to 1.
    pub fn waste(&self) -> f64 {
        self.wasted as f64 / self.ahead.max(1) as f64
    }
}

/// What `trace` comes to with windows of at most `2^max_order` pages.
pub fn streams(trace: &Trace, max_order: u8) -> Outcome {
    let mut threads = vec![Streams::new(); trace.threads.len()];
    walk(trace, &mut |fault: &Fault<'_>| {
        let streams = &mut threads[fault.thread];
        let miss = Miss {
            space: SpaceId(fault.space as u64),
            mapping: 0,
            page: fault.page,
            kind: if fault.access == Access::Read {
                prefault::Kind::Read
            } else {
                prefault::Kind::Write
            },
            reach: fault.reach.clone(),
        };
        let window = streams.predict(&miss, max_order, |page| fault.look(page));
        if let Some(audit) = streams.to_audit(&window) {
            let unused =
                audit.pages.clone().filter(|page| fault.look(*page) == Seen::Unused).count() as u32;
            let all = (audit.pages.end - audit.pages.start) as u32;
            streams.audited(&audit, all - unused, unused);
        }
        streams.mapped(&window, window.pages.clone());
        window.pages.collect()
    })
}

/// The same with perfect foresight.
pub fn perfect(trace: &Trace, max_order: u8) -> Outcome {
    // By space and page: each touch's place in the recording, and that of the last change of the
    // page's mapping before it.
    let mut touches: HashMap<(usize, u64), Vec<(usize, usize, Access)>> = HashMap::new();
    walk(trace, &mut |fault: &Fault<'_>| {
        let touch = (fault.at, fault.born, fault.access);
        touches.entry((fault.space, fault.page)).or_default().push(touch);
        Vec::new()
    });
    let most = 1usize << max_order;
    walk(trace, &mut |fault: &Fault<'_>| {
        let wanted = |page: u64| {
            page == fault.page
                || (fault.look(page) == Seen::Empty
                    && touches.get(&(fault.space, page)).is_some_and(|list| {
                        let next = list.partition_point(|touch| touch.0 <= fault.at);
                        list.get(next).is_some_and(|(_, born, access)| {
                            *born <= fault.at
                                && (*access == Access::Read || fault.access != Access::Read)
                        })
                    }))
        };
        let from = fault.page.saturating_sub(most as u64 - 1).max(fault.reach.start);
        let to = (fault.page + most as u64).min(fault.reach.end);
        let pages: Vec<u64> = (from..to).filter(|page| wanted(*page)).collect();
        let mut best = 0..1;
        let mut end = 0;
        for start in 0..pages.len() {
            if pages[start] > fault.page {
                break;
            }
            while end < pages.len() && pages[end] - pages[start] < most as u64 {
                end += 1;
            }
            let holds = pages[start..end].contains(&fault.page);
            if holds && (end - start > best.len() || !pages[best.clone()].contains(&fault.page)) {
                best = start..end;
            }
        }
        pages[best].to_vec()
    })
}

/// A fault for which a policy may choose pages.
struct Fault<'a> {
    at: usize,
    thread: usize,
    space: usize,
    page: u64,
    access: Access,
    reach: Range<u64>,
    born: usize,
    pages: &'a BTreeMap<u64, State>,
}

impl Fault<'_> {
    fn look(&self, page: u64) -> Seen {
        match self.pages.get(&page) {
            None => Seen::Empty,
            Some(State::Touched) => Seen::Used,
            Some(State::Ahead | State::AheadReadOnly) => Seen::Unused,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Touched,
    Ahead,
    /// The page of zeros, or shared with a forked process: a store still faults.
    AheadReadOnly,
}

#[derive(Clone, Default)]
struct Process {
    areas: Space,
    pages: BTreeMap<u64, State>,
    born: RangeMap<u64, usize>,
    threads: u32,
}

#[derive(Default)]
struct Walk {
    spaces: Vec<Process>,
    out: Outcome,
    untouched: u64,
    resident: u64,
}

fn walk(trace: &Trace, policy: &mut dyn FnMut(&Fault<'_>) -> Vec<u64>) -> Outcome {
    let mut walk = Walk::default();
    let mut of_process: Vec<Option<usize>> = vec![None; trace.processes.len()];
    let mut of_thread: Vec<Option<usize>> = vec![None; trace.threads.len()];
    for (at, event) in trace.events.iter().enumerate() {
        let thread = event.thread as usize;
        let process = trace.threads[thread].process as usize;
        let space = *of_thread[thread].get_or_insert_with(|| {
            let space = *of_process[process].get_or_insert_with(|| walk.fresh());
            walk.spaces[space].threads += 1;
            space
        });
        let bytes = |start: u64, len: u64| VirtRange::new(start, start + len);
        match event.kind {
            Kind::Fault { page, access, present, .. } => {
                walk.fault(at, thread, space, page, access, present, policy);
            }
            Kind::Map { start, len, prot, backing, .. } => {
                walk.change(at, space, bytes(start, len), Some((prot, backing)));
            }
            Kind::Area { start, len, prot, backing } => {
                let range = bytes(start, len);
                for hole in walk.spaces[space].areas.holes_in(range) {
                    walk.change(at, space, hole, Some((prot, backing)));
                }
                for (part, old) in walk.spaces[space].areas.areas_in(range) {
                    if old.backing != backing {
                        walk.change(at, space, part, Some((prot, backing)));
                    } else if old.prot != prot {
                        walk.spaces[space].areas.insert(part, Area { prot, ..old });
                    }
                }
            }
            Kind::Unmap { start, len } => walk.change(at, space, bytes(start, len), None),
            Kind::Protect { start, len, prot } => {
                for (part, old) in walk.spaces[space].areas.areas_in(bytes(start, len)) {
                    walk.spaces[space].areas.insert(part, Area { prot, ..old });
                }
            }
            Kind::Advise { start, len, advice: MADV_DONTNEED | MADV_DONTNEED_LOCKED } => {
                walk.forget(at, space, bytes(start, len));
            }
            Kind::Advise { .. } => {}
            Kind::Remap { old, old_len, new, new_len, flags } => {
                let keep = flags & MREMAP_DONTUNMAP != 0;
                walk.remap(at, space, bytes(old, old_len), bytes(new, new_len), keep);
            }
            Kind::Brk { end } => {
                let to = page_up(end).unwrap_or(end);
                let from = walk.spaces[space].areas.brk.replace(to).unwrap_or(to);
                let heap = (Prot::READ | Prot::WRITE, Backing::Heap);
                if to > from {
                    walk.change(at, space, VirtRange::new(from, to), Some(heap));
                } else if to < from {
                    walk.change(at, space, VirtRange::new(to, from), None);
                }
            }
            Kind::Spawn { child, birth } => {
                let child = child as usize;
                let shared = if birth == Birth::Fork { walk.fork(space) } else { space };
                of_thread[child] = Some(shared);
                walk.spaces[shared].threads += 1;
                if birth == Birth::Fork {
                    of_process[trace.threads[child].process as usize] = Some(shared);
                }
            }
            Kind::Exec => {
                walk.leave(at, space);
                let fresh = walk.fresh();
                walk.spaces[fresh].threads = 1;
                of_thread[thread] = Some(fresh);
                of_process[process] = Some(fresh);
            }
            Kind::Exit => {
                walk.leave(at, space);
                of_thread[thread] = None;
            }
        }
    }
    walk.out.wasted += walk.untouched;
    walk.out
}

impl Walk {
    fn fresh(&mut self) -> usize {
        self.spaces.push(Process::default());
        self.spaces.len() - 1
    }

    fn fork(&mut self, space: usize) -> usize {
        let parent = &mut self.spaces[space];
        for state in parent.pages.values_mut() {
            if *state == State::Ahead {
                *state = State::AheadReadOnly;
            }
        }
        let mut child = parent.clone();
        child.threads = 0;
        // Counted with the parent.
        child.pages.retain(|_, state| *state == State::Touched);
        self.resident += child.pages.len() as u64;
        self.spaces.push(child);
        self.spaces.len() - 1
    }

    fn leave(&mut self, at: usize, space: usize) {
        self.spaces[space].threads -= 1;
        if self.spaces[space].threads == 0 {
            self.forget(at, space, VirtRange::USER);
            self.spaces[space] = Process::default();
        }
    }

    /// The pages in `range` are dropped.
    fn forget(&mut self, at: usize, space: usize, range: VirtRange) {
        if range.is_empty() {
            return;
        }
        let pages = range.start / PAGE_SIZE..range.end / PAGE_SIZE;
        self.spaces[space].born.insert(pages.clone(), at);
        for (_, state) in self.spaces[space].pages.extract_if(pages, |_, _| true) {
            if state == State::Touched {
                self.resident -= 1;
            } else {
                self.untouched -= 1;
                self.out.wasted += 1;
            }
        }
    }

    fn change(&mut self, at: usize, space: usize, range: VirtRange, to: Option<(Prot, Backing)>) {
        self.forget(at, space, range);
        let areas = &mut self.spaces[space].areas;
        match to {
            Some((prot, backing)) => areas.insert(range, Area { prot, backing, assumed: false }),
            None => areas.remove(range),
        }
    }

    fn remap(&mut self, at: usize, space: usize, old: VirtRange, new: VirtRange, keep: bool) {
        let area = self.spaces[space].areas.areas_in(old).first().map(|(_, area)| *area);
        let Some(area) = area else {
            return self.change(at, space, new, Some((Prot::READ | Prot::WRITE, Backing::Anon)));
        };
        let pages = old.start / PAGE_SIZE..old.end / PAGE_SIZE;
        let moved: Vec<_> = self.spaces[space].pages.extract_if(pages, |_, _| true).collect();
        if !keep {
            self.change(at, space, old, None);
        }
        self.change(at, space, new, Some((area.prot, area.backing)));
        for (page, state) in moved {
            let to = page - old.start / PAGE_SIZE + new.start / PAGE_SIZE;
            if to < new.end / PAGE_SIZE {
                self.spaces[space].pages.insert(to, state);
            } else if state == State::Touched {
                self.resident -= 1;
            } else {
                self.untouched -= 1;
                self.out.wasted += 1;
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn fault(
        &mut self,
        at: usize,
        thread: usize,
        space: usize,
        address: u64,
        access: Access,
        present: bool,
        policy: &mut dyn FnMut(&Fault<'_>) -> Vec<u64>,
    ) {
        let page = address / PAGE_SIZE;
        let process = &mut self.spaces[space];
        let range = match process.areas.meet(address) {
            Met::Area(range, area) => {
                if !matches!(area.backing, Backing::Anon | Backing::Heap | Backing::Stack) {
                    return;
                }
                range
            }
            Met::Growth(by, area) => {
                process.areas.insert(by, area);
                by
            }
            Met::Hole => {
                if std::env::var_os("HOLES").is_some() { eprintln!("hole {address:#x}"); }
                return;
            }
        };
        if present {
            if let Some(state @ (State::Ahead | State::AheadReadOnly)) = process.pages.get_mut(&page) {
                *state = State::Touched;
                self.untouched -= 1;
                self.resident += 1;
            }
            return;
        }
        self.out.faults += 1;
        if std::env::var_os("READS").is_some() && access == Access::Read { eprintln!("read"); }
        match process.pages.insert(page, State::Touched) {
            None => self.resident += 1,
            Some(State::Touched) => {
                if std::env::var_os("TWICE").is_some() { eprintln!("twice {address:#x}"); }
            }
            Some(ahead) => {
                self.untouched -= 1;
                self.resident += 1;
                if ahead == State::Ahead || access == Access::Read {
                    return;
                }
            }
        }
        self.out.peak_resident = self.out.peak_resident.max(self.resident);
        self.out.left += 1;
        let table = page / TABLE * TABLE;
        let reach = (range.start / PAGE_SIZE).max(table)
            ..(range.end / PAGE_SIZE).min(table + TABLE);
        let born = process.born.get(&page).copied().unwrap_or(0);
        let chosen = policy(&Fault {
            at,
            thread,
            space,
            page,
            access,
            reach: reach.clone(),
            born,
            pages: &process.pages,
        });
        let state =
            if access == Access::Read { State::AheadReadOnly } else { State::Ahead };
        for page in chosen {
            assert!(reach.contains(&page));
            if let std::collections::btree_map::Entry::Vacant(entry) = process.pages.entry(page) {
                entry.insert(state);
                self.untouched += 1;
                self.out.ahead += 1;
            }
        }
        self.out.peak_untouched = self.out.peak_untouched.max(self.untouched);
    }
}
