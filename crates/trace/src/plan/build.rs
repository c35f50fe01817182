//! One walk over the recording: each event becomes operations, checked against a model of the
//! address space at that point.

use super::order::Order;
use super::space::{Area, Met, Space};
use super::{Assumption, At, Op, Ops, Plan, PlanError, Process, Thread, Turns, Wait};
use crate::event::{Access, Backing, Birth, Event, Kind, MAX_AREAS, Prot, Recorded, Trace};
use faultless::{PAGE_SIZE, USER_END, VirtRange, page_up};
use std::collections::{BTreeMap, HashMap};

/// The lowest address that a program may map (`vm.mmap_min_addr`). A touch below is a null pointer.
const LOWEST: u64 = 64 << 10;
/// The size of the aligned window that is assumed to be mapped around a touch of unmapped memory.
const ASSUMED_WINDOW: u64 = 256 << 10;
const MAP_FIXED: u32 = 0x10;
const MAP_GROWSDOWN: u32 = 0x100;
const MAP_NORESERVE: u32 = 0x4000;
const MAP_POPULATE: u32 = 0x8000;
const MAP_HUGETLB: u32 = 0x4_0000;
const MREMAP_DONTUNMAP: u32 = 4;
/// The last advice about the order of memory use: `MADV_NORMAL`, `MADV_RANDOM` and this one.
const MADV_SEQUENTIAL: u32 = 2;

/// The effect of an operation with respect to order.
#[derive(Clone, Copy)]
enum Effect {
    Nothing,
    Touch(u64),
    Change(VirtRange),
    /// Two ranges: the old and the new range of `mremap`.
    Move(VirtRange, VirtRange),
    Break(VirtRange),
}

pub(super) struct Builder<'a> {
    trace: &'a Trace,
    processes: Vec<Process>,
    threads: Vec<Thread>,
    spaces: Vec<(Space, Order)>,
    /// By thread of the trace: its thread in the plan.
    thread_of: Vec<Option<u32>>,
    /// By process of the trace: its process in the plan.
    process_of: Vec<Option<u32>>,
    /// By thread of the plan that is a `vfork` child in its parent's space: its parent.
    guests: HashMap<u32, u32>,
    /// By parent of a `vfork`: the operation for which its next operation waits.
    owed: HashMap<u32, At>,
    /// By waiting thread and awaited thread: the last awaited operation.
    waited: HashMap<(u32, u32), u32>,
    assumptions: BTreeMap<Assumption, u64>,
    areas_copied: usize,
    waits: Vec<At>,
    /// By process of the trace: whether all of its operations are by one thread.
    alone: Vec<bool>,
    /// By thread of the trace: the number of its events.
    events: Vec<u32>,
    turns: Turns,
    /// The time of the present event, in microseconds.
    now: u64,
    /// The previous operation.
    last: Option<At>,
}

impl<'a> Builder<'a> {
    pub fn new(trace: &'a Trace, turns: Turns) -> Self {
        let mut threads = vec![0u32; trace.processes.len()];
        trace.threads.iter().for_each(|thread| threads[thread.process as usize] += 1);
        let mut events = vec![0; trace.threads.len()];
        for event in &trace.events {
            events[event.thread as usize] += 1;
            // The child runs in its parent's space.
            if let Kind::Spawn { birth: Birth::Vfork, .. } = event.kind {
                threads[trace.threads[event.thread as usize].process as usize] += 1;
            }
        }
        let in_turn = turns != Turns::Concurrent;
        Self {
            trace,
            alone: threads.into_iter().map(|count| count <= 1 || in_turn).collect(),
            events,
            processes: Vec::new(),
            threads: Vec::new(),
            spaces: Vec::new(),
            thread_of: vec![None; trace.threads.len()],
            process_of: vec![None; trace.processes.len()],
            guests: HashMap::new(),
            owed: HashMap::new(),
            waited: HashMap::new(),
            assumptions: BTreeMap::new(),
            areas_copied: 0,
            waits: Vec::new(),
            turns,
            now: 0,
            last: None,
        }
    }

    pub fn run(mut self) -> Result<Plan, PlanError> {
        for (kind, _) in Recorded::NAMES {
            if !self.trace.header.recorded.contains(kind) {
                self.assume(Assumption::NotRecorded(kind.bits()));
            }
        }
        if self.trace.header.lost > 0 {
            self.assumptions.insert(Assumption::Lost, self.trace.header.lost);
        }
        for (number, event) in self.trace.events.iter().enumerate() {
            self.now = event.time_us;
            self.event(&event)
                .map_err(|reason| PlanError { event: Some(number as u64), reason })?;
        }
        Ok(Plan {
            processes: self.processes,
            threads: self.threads,
            assumptions: self.assumptions.into_iter().collect(),
        })
    }

    fn assume(&mut self, what: Assumption) {
        *self.assumptions.entry(what).or_default() += 1;
    }

    /// Creates a process of the plan for a process of the trace.
    fn new_process(&mut self, parent: Option<u32>, space: Space, traced: u32) -> u32 {
        self.processes.push(Process { parent, threads: Vec::new() });
        self.spaces.push((space, Order::new(self.alone[traced as usize])));
        self.processes.len() as u32 - 1
    }

    fn new_thread(&mut self, process: u32, traced: u32, start: Option<At>) -> u32 {
        let thread = self.threads.len() as u32;
        let name = self.trace.threads[traced as usize].name.clone();
        // An event is usually one operation. A thread of the trace is one thread of the plan, or
        // two after a vfork.
        let count = std::mem::take(&mut self.events[traced as usize]) as usize;
        let ops = Ops::with_capacity(count);
        let times = Vec::with_capacity(if self.turns == Turns::OneWithTimes { count } else { 0 });
        self.threads.push(Thread { process, name, start, ops, times, waits: Vec::new() });
        self.processes[process as usize].threads.push(thread);
        self.thread_of[traced as usize] = Some(thread);
        thread
    }

    /// Returns the plan's thread for a thread of the trace. A thread without a recorded start
    /// exists from the beginning.
    fn thread(&mut self, traced: u32) -> u32 {
        if let Some(thread) = self.thread_of[traced as usize] {
            return thread;
        }
        let in_trace = self.trace.threads[traced as usize].process;
        let process = match self.process_of[in_trace as usize] {
            Some(process) => process,
            None => {
                let new = self.new_process(None, Space::default(), in_trace);
                self.process_of[in_trace as usize] = Some(new);
                new
            }
        };
        self.new_thread(process, traced, None)
    }

    fn space(&mut self, thread: u32) -> &mut Space {
        &mut self.spaces[self.threads[thread as usize].process as usize].0
    }

    /// Returns the place of the next operation of `thread`.
    fn next(&self, thread: u32) -> At {
        At { thread, op: self.threads[thread as usize].ops.len() as u32 }
    }

    /// Adds an operation, with the operations for which it must wait.
    fn emit(&mut self, thread: u32, op: Op, effect: Effect) -> At {
        let at = self.next(thread);
        let process = self.threads[thread as usize].process as usize;
        let order = &mut self.spaces[process].1;
        let mut waits = std::mem::take(&mut self.waits);
        match effect {
            Effect::Nothing => {}
            Effect::Touch(page) => order.touch(at, page, &mut waits),
            Effect::Change(range) => order.change(at, range, &mut waits),
            Effect::Move(old, new) => {
                order.change(at, old, &mut waits);
                order.change(at, new, &mut waits);
            }
            Effect::Break(range) => {
                order.change(at, range, &mut waits);
                order.brk(at, &mut waits);
            }
        }
        waits.extend(self.owed.remove(&thread));
        let last = self.last.replace(at).filter(|last| last.thread != thread);
        if self.turns != Turns::Concurrent {
            // The last operation covers all others.
            waits.clear();
            waits.extend(last);
        }
        // Only the last operation of each thread, unless this thread has already waited for it.
        waits.sort_unstable_by_key(|wait| (wait.thread, std::cmp::Reverse(wait.op)));
        waits.dedup_by_key(|wait| wait.thread);
        let into = &mut self.threads[thread as usize];
        for on in waits.drain(..) {
            let waited = self.waited.entry((thread, on.thread)).or_insert(0);
            // The number of the operation plus one, with 0 for no wait.
            if *waited <= on.op {
                *waited = on.op + 1;
                into.waits.push(Wait { before: at.op, on });
            }
        }
        into.ops.push(op);
        if self.turns == Turns::OneWithTimes {
            into.times.push(self.now);
        }
        self.waits = waits;
        at
    }

    fn event(&mut self, event: &Event) -> Result<(), String> {
        let thread = self.thread(event.thread);
        match event.kind {
            Kind::Fault { page, access, kernel, .. } => self.fault(thread, page, access, kernel),
            Kind::Map { start, len, prot, flags, backing } => {
                if let Some(range) = self.user_range(start, len) {
                    self.map(thread, range, prot, flags, backing);
                }
            }
            Kind::Area { start, len, prot, backing } => {
                if let Some(range) = self.user_range(start, len) {
                    self.area(thread, range, prot, backing);
                }
            }
            Kind::Resident { start, len, written } => {
                if let Some(range) = self.user_range(start, len) {
                    self.populate(thread, range, written);
                }
            }
            Kind::Unmap { start, len } => {
                if let Some(range) = self.user_range(start, len) {
                    self.unmap(thread, range);
                }
            }
            Kind::Protect { start, len, prot } => {
                if let Some(range) = self.user_range(start, len) {
                    self.assume_mapped(thread, range, prot);
                    self.protect(thread, range, prot);
                }
            }
            Kind::Advise { start, len, advice } => {
                if let Some(range) = self.user_range(start, len) {
                    self.assume_mapped(thread, range, Prot::READ | Prot::WRITE);
                    self.advise(thread, range, advice);
                }
            }
            Kind::Remap { old, old_len, new, new_len, flags } => {
                // An old length of zero stands for a place, not for a range.
                let from = self.user_range(old, old_len.max(PAGE_SIZE));
                let to = self.user_range(new, new_len);
                if let (Some(from), Some(to)) = (from, to) {
                    self.remap(thread, from, to, old_len == 0, flags & MREMAP_DONTUNMAP != 0);
                }
            }
            Kind::Brk { end } => self.brk(thread, end),
            Kind::Caller { .. } => {}
            Kind::Spawn { child, birth } => self.spawn(thread, child, birth)?,
            Kind::Exec => self.exec(thread, event.thread),
            Kind::Exit => {
                let at = self.emit(thread, Op::Exit, Effect::Nothing);
                self.release(thread, at);
            }
        }
        Ok(())
    }

    fn advise(&mut self, thread: u32, range: VirtRange, advice: u32) {
        let stands_in = |area: &Area| matches!(area.backing, Backing::File | Backing::Special);
        let areas = self.space(thread).areas_in(range);
        let parts = match advice <= MADV_SEQUENTIAL && areas.iter().any(|(_, area)| stands_in(area))
        {
            // Advice about the order of file reads does not apply to the anonymous memory that
            // represents the file.
            true => {
                areas.into_iter().filter(|(_, area)| !stands_in(area)).map(|(r, _)| r).collect()
            }
            false => vec![range],
        };
        for range in parts {
            self.emit(thread, Op::Advise { range, advice }, Effect::Change(range));
        }
    }

    /// Returns the range if it lies in user space.
    fn user_range(&mut self, start: u64, len: u64) -> Option<VirtRange> {
        let range = VirtRange::new(start, start.saturating_add(len));
        if range.end > USER_END {
            self.assume(Assumption::BeyondUserSpace);
            return None;
        }
        Some(range)
    }

    fn fault(&mut self, thread: u32, page: u64, access: Access, kernel: bool) {
        if page >= USER_END {
            return self.assume(Assumption::BeyondUserSpace);
        }
        let (range, area, grown) = match self.space(thread).meet(page) {
            Met::Area(range, area) => (range, area, None),
            Met::Growth(by, area) => (by, area, Some(by)),
            Met::Hole if page < LOWEST => return self.assume(Assumption::Signal),
            Met::Hole => {
                let window = VirtRange::page(page).widen(ASSUMED_WINDOW);
                let holes = self.space(thread).holes_in(window);
                // Addresses below the null page's limit and beyond user space cannot be mapped.
                let user = VirtRange::new(LOWEST, USER_END);
                let hole = holes.into_iter().find(|hole| hole.contains(page));
                let hole = hole.unwrap_or(VirtRange::page(page)).intersect(user);
                let mut prot = Prot::READ | Prot::WRITE;
                prot.set(Prot::EXEC, access == Access::Exec);
                (hole, self.assume_area(thread, hole, prot), None)
            }
        };
        let access = match access {
            Access::Unknown => {
                self.assume(Assumption::UnknownAccess);
                let order = [Access::Write, Access::Read, Access::Exec];
                order.into_iter().find(|access| area.permits(*access)).unwrap_or(Access::Read)
            }
            known => known,
        };
        if !area.permits(access) {
            let told = self.trace.header.recorded.intersects(Recorded::MPROTECT | Recorded::AREAS);
            if told && !area.assumed {
                return self.assume(Assumption::Signal);
            }
            self.assume(Assumption::PermissionRaised);
            let more = match access {
                Access::Write => Prot::READ | Prot::WRITE,
                Access::Exec => Prot::READ | Prot::EXEC,
                Access::Read | Access::Unknown => Prot::READ,
            };
            // A stack's growth gets the permissions of the stack.
            let whole = if grown.is_some() {
                VirtRange::new(range.end, range.end + PAGE_SIZE)
            } else {
                range
            };
            self.protect(thread, whole, area.prot | more);
        }
        let effect = match grown {
            Some(by) => {
                // Read again, because the permissions may have been raised above.
                if let Met::Growth(_, area) = self.space(thread).meet(page) {
                    self.space(thread).insert(by, area);
                }
                Effect::Change(by)
            }
            None => Effect::Touch(page),
        };
        self.emit(thread, Op::Touch { page, access, kernel }, effect);
    }

    /// Creates an assumed area in `range`, which is a hole.
    fn assume_area(&mut self, thread: u32, range: VirtRange, prot: Prot) -> Area {
        self.assume(Assumption::AssumedMapping);
        let area = Area { prot, backing: Backing::Anon, assumed: true };
        self.place(thread, range, area, 0);
        area
    }

    fn assume_mapped(&mut self, thread: u32, range: VirtRange, prot: Prot) {
        for hole in self.space(thread).holes_in(range) {
            self.assume_area(thread, hole, prot);
        }
    }

    /// Maps `area` at `range`.
    fn place(&mut self, thread: u32, range: VirtRange, area: Area, flags: u32) {
        match area.backing {
            Backing::File | Backing::SharedFile => self.assume(Assumption::FileAsAnonymous),
            Backing::Special => self.assume(Assumption::SpecialAsAnonymous),
            Backing::Anon | Backing::SharedAnon | Backing::Heap | Backing::Stack => {}
        }
        if flags & MAP_HUGETLB != 0 {
            self.assume(Assumption::HugeTlbAsBasePages);
        }
        self.space(thread).insert(range, area);
        let op = Op::Map {
            range,
            prot: area.prot,
            shared: area.is_shared(),
            grows_down: area.backing == Backing::Stack,
            populate: flags & MAP_POPULATE != 0,
            noreserve: flags & MAP_NORESERVE != 0,
            backing: area.backing,
        };
        self.emit(thread, op, Effect::Change(range));
    }

    fn map(&mut self, thread: u32, range: VirtRange, prot: Prot, flags: u32, backing: Backing) {
        let known = |area: &(VirtRange, Area)| !area.1.assumed;
        if flags & MAP_FIXED == 0 && self.space(thread).areas_in(range).iter().any(known) {
            self.assume(Assumption::UnseenUnmap);
        }
        let grows = flags & MAP_GROWSDOWN != 0 && backing == Backing::Anon;
        let backing = if grows { Backing::Stack } else { backing };
        self.place(thread, range, Area { prot, backing, assumed: false }, flags);
    }

    /// Applies an area reported by the kernel: maps missing parts, and sets the permissions of
    /// existing parts.
    fn area(&mut self, thread: u32, range: VirtRange, prot: Prot, backing: Backing) {
        let area = Area { prot, backing, assumed: false };
        let calls = self.trace.header.recorded.contains(Recorded::BRK);
        if backing == Backing::Heap && calls && self.space(thread).brk.is_none() {
            // The heap of a process that ran before the recording.
            self.brk(thread, range.start);
            self.brk(thread, range.end);
        }
        for hole in self.space(thread).holes_in(range) {
            self.place(thread, hole, area, 0);
        }
        for (part, old) in self.space(thread).areas_in(range) {
            if old.backing != backing && !old.assumed {
                self.assume(Assumption::UnseenUnmap);
                self.place(thread, part, area, 0);
            } else if old.prot != prot {
                self.protect(thread, part, prot);
            }
        }
    }

    /// Makes the pages of `range` resident. Pages without a mapping, or without permissions, are
    /// omitted: the mapping changed while the pages were listed.
    fn populate(&mut self, thread: u32, range: VirtRange, written: bool) {
        for (part, area) in self.space(thread).areas_in(range) {
            let write = written && area.permits(Access::Write);
            if area.permits(Access::Read) {
                self.emit(thread, Op::Populate { range: part, write }, Effect::Change(part));
            }
        }
    }

    fn unmap(&mut self, thread: u32, range: VirtRange) {
        self.space(thread).remove(range);
        self.emit(thread, Op::Unmap { range }, Effect::Change(range));
    }

    /// Makes room in `range`, which was free in the recorded program: existing areas were assumed,
    /// or their removal was not recorded.
    fn clear(&mut self, thread: u32, range: VirtRange) {
        for (part, area) in self.space(thread).areas_in(range) {
            if !area.assumed {
                self.assume(Assumption::UnseenUnmap);
            }
            self.unmap(thread, part);
        }
    }

    fn protect(&mut self, thread: u32, range: VirtRange, prot: Prot) {
        let space = self.space(thread);
        for (part, area) in space.areas_in(range) {
            space.insert(part, Area { prot, ..area });
        }
        self.emit(thread, Op::Protect { range, prot }, Effect::Change(range));
    }

    fn remap(&mut self, thread: u32, old: VirtRange, new: VirtRange, copies: bool, keep_old: bool) {
        self.assume_mapped(thread, old, Prot::READ | Prot::WRITE);
        let areas = self.space(thread).areas_in(old);
        let Some(&(_, area)) = areas.first() else { return };
        let in_place = old.start == new.start;
        if areas.len() == 1 && !copies && (in_place || !old.overlaps(new)) {
            if in_place {
                self.clear(thread, VirtRange::new(old.end, new.end));
            }
            let space = self.space(thread);
            if !keep_old {
                space.remove(old);
            }
            space.insert(new, area);
            self.emit(thread, Op::Remap { old, new, keep_old }, Effect::Move(old, new));
            return;
        }
        // A second view of a shared mapping, or parts that differ here and did not differ in the
        // recorded program.
        self.assume(Assumption::RemapAsMap);
        if !copies && !keep_old {
            self.unmap(thread, old);
        }
        self.place(thread, new, area, 0);
    }

    fn brk(&mut self, thread: u32, end: u64) {
        let aligned = page_up(end).filter(|end| *end <= USER_END);
        let space = self.space(thread);
        let old = space.brk.unwrap_or(end);
        // Both breaks were accepted, so both can be rounded up.
        let (Some(to), Some(from)) = (aligned, page_up(old)) else {
            return self.assume(Assumption::BeyondUserSpace);
        };
        space.brk = Some(end);
        let (grown, shrunk) = (VirtRange::new(from, to), VirtRange::new(to, from));
        self.clear(thread, grown);
        let prot = Prot::READ | Prot::WRITE;
        let heap = Area { prot, backing: Backing::Heap, assumed: false };
        self.space(thread).insert(grown, heap);
        self.space(thread).remove(shrunk);
        let moved = VirtRange::new(from.min(to), from.max(to));
        self.emit(thread, Op::Brk { old, new: end }, Effect::Break(moved));
    }

    fn spawn(&mut self, thread: u32, child: u32, birth: Birth) -> Result<(), String> {
        let at = self.next(thread);
        let process = self.threads[thread as usize].process;
        match birth {
            Birth::Thread | Birth::Vfork => {
                let new = self.new_thread(process, child, Some(at));
                if birth == Birth::Vfork {
                    self.guests.insert(new, thread);
                }
                self.emit(thread, Op::SpawnThread { thread: new }, Effect::Nothing);
            }
            Birth::Fork => {
                let copy = self.space(thread).clone();
                self.areas_copied += copy.area_count();
                if self.areas_copied > MAX_AREAS {
                    return Err(format!("forks copy more than {MAX_AREAS} areas"));
                }
                let traced = self.trace.threads[child as usize].process;
                let new = self.new_process(Some(process), copy, traced);
                self.process_of[traced as usize] = Some(new);
                self.new_thread(new, child, Some(at));
                self.emit(thread, Op::Fork { child: new }, Effect::Change(VirtRange::USER));
            }
        }
        Ok(())
    }

    fn exec(&mut self, thread: u32, traced: u32) {
        let process = self.threads[thread as usize].process;
        if self.guests.contains_key(&thread) {
            let start = self.next(thread);
            let in_trace = self.trace.threads[traced as usize].process;
            let child = self.new_process(Some(process), Space::default(), in_trace);
            self.emit(thread, Op::Launch { child }, Effect::Nothing);
            let at = self.emit(thread, Op::Exit, Effect::Nothing);
            self.release(thread, at);
            self.process_of[in_trace as usize] = Some(child);
            self.new_thread(child, traced, Some(start));
        } else if self.threads[thread as usize].ops.is_empty() && self.space(thread).is_empty() {
            // The first program of the recording: its space is already empty.
        } else {
            *self.space(thread) = Space::default();
            self.emit(thread, Op::Exec, Effect::Change(VirtRange::USER));
        }
    }

    /// Ends the use of the parent's space by a `vfork` child. The parent continues after `at`.
    fn release(&mut self, thread: u32, at: At) {
        if let Some(parent) = self.guests.remove(&thread) {
            self.owed.insert(parent, at);
        }
    }
}
