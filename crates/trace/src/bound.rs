//! The maximum number of first touches that prefault can save: a limit for any policy, with any
//! knowledge.
//!
//! The input is a replay with prefault off, in which each operation follows the previous one
//! ([`Plan::in_turn`]). [`Took`] identifies its first touches. The rules are those of the
//! subsystem. A fault maps its own page and others, together at most the size of the window. All of
//! them are in the same VMA and in the same page table. A page mapped this way saves the fault of
//! its first touch if the page is empty at that moment and is not removed before the touch.
//!
//! # Why it is a bound
//!
//! If an exact rule is hard to follow, a more permissive rule replaces it:
//!
//! - A window may contain any pages of its VMA and table, not only adjacent pages. (Windows of the
//!   subsystem may omit pages.)
//! - Pages that one fault could map together at any time, directly or through other pages, form a
//!   *group*. A fault may map any pages of its group that are mapped by then. Adjacent VMAs of the
//!   same protection are not distinguished, because they may have merged.
//! - A page mapped by a fault serves loads and stores alike, though a load maps the zero page.
//! - A store to the zero page faults in any case and may map other pages, but is not counted.
//! - A load in a forked child of a page that its parent had mapped, but had not touched, has no
//!   cost.
//!
//! Within a group each first touch thus has an interval, from the moment at which its page is
//! mapped and empty to the touch. Each fault may save other first touches whose interval contains
//! the fault, up to the size of the window. The number of remaining faults is minimal if each fault
//! saves the earliest touches. (Exchange argument: let the best choice save a later touch *l* at a
//! fault instead of an earlier touch *s*, so that *s* is a fault and saves a set *S*. Save *s*
//! instead of *l*. The earliest touch of *S* and *l* becomes the fault and saves the remaining
//! touches of *S* and *l*, whose intervals contain this moment, too. The number of faults does not
//! change.)

use crate::event::{Access, Backing, Prot};
use crate::plan::space::{Area, Met, Space};
use crate::plan::{Op, Plan};
use faultless::prefault::MAX_ORDER;
use faultless::{PAGE_SIZE, VirtRange, page_up};
use rangemap::RangeMap;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::fmt;

/// Bytes mapped by a table of the last level.
const TABLE: u64 = 512 * PAGE_SIZE;
const MADV_DONTNEED: u32 = 4;
const MADV_DONTNEED_LOCKED: u32 = 24;

/// The page fault of an operation in a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Took {
    /// No fault, or the operation is no touch.
    Nothing,
    /// A fault on an absent page that was then filled with zeros.
    First,
    /// A fault on a present page, which was copied.
    Copy,
    /// Any other fault.
    Other,
}

/// An operation of a replay, in four bytes, because replays have millions of operations.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Done(u32);

impl Done {
    const KINDS: [Took; 4] = [Took::Nothing, Took::First, Took::Copy, Took::Other];

    /// Creates the record of the next operation of `thread`, an index in [`Plan::threads`] below
    /// 2^30, with its fault.
    pub fn new(thread: u32, took: Took) -> Self {
        Self(thread << 2 | took as u32)
    }

    /// Returns the thread whose next operation was executed, by index in [`Plan::threads`].
    pub fn thread(self) -> u32 {
        self.0 >> 2
    }

    /// Returns the fault of the operation.
    pub fn took(self) -> Took {
        Self::KINDS[self.0 as usize & 3]
    }
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Done({}, {:?})", self.thread(), self.took())
    }
}

/// The limit of savings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bound {
    /// First touches of private anonymous memory.
    pub touches: u64,
    /// First touches that prefault can save, at most.
    pub saved: u64,
}

/// Returns the bound for windows of at most `2^max_order` pages, for a replay of `plan` with
/// prefault off. `done` lists the executed operations in order. Operations missing in the plan are
/// ignored.
pub fn bound(plan: &Plan, done: &[Done], max_order: u8) -> Bound {
    let mut walk = Walk::default();
    walk.spaces.resize_with(plan.processes().len(), Memory::default);
    let mut ops: Vec<_> = plan.threads().iter().map(|thread| thread.ops.iter()).collect();
    for (now, step) in (0..).zip(done) {
        let number = step.thread() as usize;
        let Some(thread) = plan.threads().get(number) else { continue };
        let Some(op) = ops[number].next() else { continue };
        walk.now = now;
        walk.step(thread.process as usize, &op, step.took());
    }
    walk.count((1 << max_order.min(MAX_ORDER)) - 1)
}

/// A part of private anonymous memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    group: u32,
    /// The time from which its untouched pages are mapped and empty.
    born: u32,
    /// Whether a parent process may have mapped pages of this part.
    inherited: bool,
    prot: Prot,
}

/// An address space. Addresses are in bytes.
#[derive(Clone, Default)]
struct Memory {
    areas: Space,
    pieces: RangeMap<u64, Piece>,
    /// Pages that map the zero page, because their first touch was a load.
    zeros: BTreeSet<u64>,
}

/// See [`Fault::born`].
const UNCOUNTED: u32 = u32::MAX;

/// A fault that may save other faults.
#[derive(Clone, Copy)]
struct Fault {
    at: u32,
    group: u32,
    /// The time from which the fault could be saved; [`UNCOUNTED`] for a fault that is not counted.
    born: u32,
}

#[derive(Default)]
struct Walk {
    /// By process.
    spaces: Vec<Memory>,
    /// By group: another group that it was joined with, or itself.
    groups: Vec<u32>,
    faults: Vec<Fault>,
    /// First touches without cost.
    free: u64,
    now: u32,
}

impl Walk {
    fn step(&mut self, process: usize, op: &Op, took: Took) {
        match *op {
            Op::Map { range, prot, shared, backing, .. } => {
                let area = Area { prot, backing, assumed: false };
                self.spaces[process].areas.insert(range, area);
                self.spaces[process].take(range, self.now);
                self.spaces[process].pieces.remove(range.start..range.end);
                let alone = matches!(backing, Backing::Anon | Backing::Heap | Backing::Stack);
                if alone && !shared {
                    self.insert(process, range, prot);
                }
            }
            Op::Unmap { range } => self.spaces[process].unmap(range),
            Op::Protect { range, prot } => self.spaces[process].protect(range, prot),
            Op::Remap { old, new, keep_old } => self.remap(process, old, new, keep_old),
            Op::Advise { range, advice: MADV_DONTNEED | MADV_DONTNEED_LOCKED } => {
                self.spaces[process].take(range, self.now);
            }
            Op::Brk { old, new } => {
                let [from, to] = [old, new].map(|end| page_up(end).unwrap_or(end));
                self.spaces[process].unmap(VirtRange::new(to, from));
                let grown = VirtRange::new(from, to);
                let prot = Prot::READ | Prot::WRITE;
                let heap = Area { prot, backing: Backing::Heap, assumed: false };
                self.spaces[process].areas.insert(grown, heap);
                self.insert(process, grown, prot);
            }
            Op::Touch { page, access, .. } => self.touch(process, page, access, took),
            Op::Fork { child } => {
                let copy = self.spaces[process].clone();
                self.spaces[child as usize] = self.copied(copy);
            }
            Op::Launch { child } => self.spaces[child as usize] = Memory::default(),
            Op::Exec => self.spaces[process] = Memory::default(),
            Op::Advise { .. } | Op::Populate { .. } | Op::SpawnThread { .. } | Op::Exit => {}
        }
    }

    /// Adds new private anonymous memory, with a group for each table.
    fn insert(&mut self, process: usize, range: VirtRange, prot: Prot) {
        let mut start = range.start;
        while start < range.end {
            let end = (start / TABLE * TABLE + TABLE).min(range.end);
            let group = self.new_group();
            let piece = Piece { group, born: self.now, inherited: false, prot };
            self.spaces[process].pieces.insert(start..end, piece);
            start = end;
        }
    }

    fn new_group(&mut self) -> u32 {
        self.groups.push(self.groups.len() as u32);
        self.groups.len() as u32 - 1
    }

    fn find(&mut self, mut group: u32) -> u32 {
        while self.groups[group as usize] != group {
            let above = self.groups[self.groups[group as usize] as usize];
            self.groups[group as usize] = above;
            group = above;
        }
        group
    }

    /// Returns a child's memory with new groups, because its faults fill no page of its parent.
    fn copied(&mut self, mut memory: Memory) -> Memory {
        let mut own = HashMap::new();
        let pieces: Vec<_> =
            memory.pieces.iter().map(|(range, piece)| (range.clone(), *piece)).collect();
        for (range, piece) in pieces {
            let group = self.find(piece.group);
            let group = *own.entry(group).or_insert_with(|| self.new_group());
            let piece = Piece { group, born: self.now, inherited: true, ..piece };
            memory.pieces.insert(range, piece);
        }
        memory
    }

    fn remap(&mut self, process: usize, old: VirtRange, new: VirtRange, keep_old: bool) {
        let memory = &mut self.spaces[process];
        let Some(&(_, area)) = memory.areas.areas_in(old).first() else { return };
        let moved = memory.pieces_in(old);
        let zeros: Vec<_> = memory.zeros.range(old.start..old.end).copied().collect();
        let anonymous = !moved.is_empty();
        if keep_old {
            memory.take(old, self.now);
        } else {
            memory.unmap(old);
        }
        memory.unmap(new);
        memory.areas.insert(new, area);
        if anonymous {
            self.insert(process, new, area.prot);
        }
        let memory = &mut self.spaces[process];
        // Parts beyond the new end are removed.
        let to = |addr: u64| (addr - old.start + new.start).min(new.end);
        for (range, piece) in moved {
            if to(range.start) < to(range.end) {
                memory.pieces.insert(to(range.start)..to(range.end), piece);
            }
        }
        memory.zeros.extend(zeros.into_iter().map(to).filter(|page| *page < new.end));
    }

    fn touch(&mut self, process: usize, page: u64, access: Access, took: Took) {
        if let Met::Growth(by, area) = self.spaces[process].areas.meet(page) {
            self.spaces[process].areas.insert(by, area);
            self.insert(process, by, area.prot);
        }
        let memory = &mut self.spaces[process];
        let Some(piece) = memory.pieces.get(&page).copied() else { return };
        let born = match took {
            Took::First => piece.born,
            Took::Copy if memory.zeros.remove(&page) => UNCOUNTED,
            _ => return,
        };
        if took == Took::First && access != Access::Write {
            memory.zeros.insert(page);
        }
        let group = self.join(process, page);
        if took == Took::First && piece.inherited && access != Access::Write {
            self.free += 1;
            self.faults.push(Fault { at: self.now, group, born: UNCOUNTED });
        } else {
            self.faults.push(Fault { at: self.now, group, born });
        }
    }

    /// Returns the group of all pages that a fault on `page` may map.
    fn join(&mut self, process: usize, page: u64) -> u32 {
        let table = page / TABLE * TABLE;
        let pieces = &self.spaces[process].pieces;
        let near: Vec<_> = pieces.overlapping(&(table..table + TABLE)).collect();
        let own = near.iter().position(|(range, _)| range.contains(&page)).unwrap_or(0);
        let one = |(a, first): &(&std::ops::Range<u64>, &Piece),
                   (b, second): &(&std::ops::Range<u64>, &Piece)| {
            a.end == b.start && first.prot == second.prot
        };
        let below = (0..own).rev().take_while(|at| one(&near[*at], &near[at + 1])).count();
        let above = (own + 1..near.len()).take_while(|at| one(&near[at - 1], &near[*at])).count();
        let reach = near.get(own - below..=own + above).unwrap_or_default();
        let groups: Vec<_> = reach.iter().map(|(_, piece)| piece.group).collect();
        let mut all = groups.first().map_or(0, |group| self.find(*group));
        for group in groups {
            let other = self.find(group);
            self.groups[other as usize] = all;
            all = self.find(all);
        }
        all
    }

    /// Counts the savings of all faults, each with up to `room` others.
    fn count(mut self, room: usize) -> Bound {
        let mut faults = std::mem::take(&mut self.faults);
        for fault in &mut faults {
            fault.group = self.find(fault.group);
        }
        // The times differ.
        faults.sort_unstable_by_key(|fault| (fault.group, fault.at));
        let counted = faults.iter().filter(|fault| fault.born != UNCOUNTED).count() as u64;
        let of_groups = faults.chunk_by(|one, next| one.group == next.group);
        let saved: u64 = of_groups.map(|group| saved(group, room)).sum();
        Bound { touches: counted + self.free, saved: saved + self.free }
    }
}

/// Returns the number of saved `faults` in a group if each remaining fault saves up to `room`
/// others, the earliest first.
fn saved(faults: &[Fault], room: usize) -> u64 {
    let counted = faults.iter().filter(|fault| fault.born != UNCOUNTED);
    let mut births: Vec<_> = counted.map(|fault| (fault.born, fault.at)).collect();
    births.sort_unstable();
    let mut births = births.into_iter().peekable();
    let mut spared = std::collections::HashSet::new();
    // Faults that can be saved now, the earliest first.
    let mut open = BinaryHeap::new();
    for fault in faults {
        if spared.contains(&fault.at) {
            continue;
        }
        while let Some((_, at)) = births.next_if(|(born, _)| *born <= fault.at) {
            open.push(Reverse(at));
        }
        let mut left = room;
        while left > 0
            && let Some(Reverse(at)) = open.pop()
        {
            if at > fault.at {
                spared.insert(at);
                left -= 1;
            }
        }
    }
    spared.len() as u64
}

impl Memory {
    /// Removes the pages in `range`. The mapping there becomes empty.
    fn take(&mut self, range: VirtRange, now: u32) {
        for (part, piece) in self.pieces_in(range) {
            self.pieces.insert(part, Piece { born: now, inherited: false, ..piece });
        }
        let gone: Vec<_> = self.zeros.range(range.start..range.end).copied().collect();
        for page in gone {
            self.zeros.remove(&page);
        }
    }

    fn unmap(&mut self, range: VirtRange) {
        if range.is_empty() {
            return;
        }
        self.take(range, 0);
        self.areas.remove(range);
        self.pieces.remove(range.start..range.end);
    }

    fn protect(&mut self, range: VirtRange, prot: Prot) {
        for (part, area) in self.areas.areas_in(range) {
            self.areas.insert(part, Area { prot, ..area });
        }
        for (part, piece) in self.pieces_in(range) {
            self.pieces.insert(part, Piece { prot, ..piece });
        }
    }

    /// Returns the pieces in `range`, cut to `range`.
    fn pieces_in(&self, range: VirtRange) -> Vec<(std::ops::Range<u64>, Piece)> {
        if range.is_empty() {
            return Vec::new();
        }
        let cut = |r: &std::ops::Range<u64>| r.start.max(range.start)..r.end.min(range.end);
        let range = range.start..range.end;
        self.pieces.overlapping(&range).map(|(r, piece)| (cut(r), *piece)).collect()
    }
}

#[cfg(test)]
mod tests;
