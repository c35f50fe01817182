//! The calls that created and freed the memory of a program, with their call stacks.
//!
//! A fault occurs at the first touch of a page. The memory of the page comes from a call, often at
//! another place of the program. A change such as `MAP_POPULATE` belongs to this call. If the
//! program had the page before, a call has freed the page to the kernel, and a change that keeps
//! the memory belongs to that call.

use crate::event::{Backing, Birth, Event, Kind, MAX_AREAS, StackId, Trace};
use faultless::page_up;
use rangemap::RangeMap;
use std::ops::Range;

const MADV_DONTNEED: u32 = 4;
const MADV_DONTNEED_LOCKED: u32 = 24;

/// Returns whether `madvise` with `advice` frees pages at once.
pub const fn discards(advice: u32) -> bool {
    matches!(advice, MADV_DONTNEED | MADV_DONTNEED_LOCKED)
}

/// A kind of call that creates or frees memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// `mmap`.
    Mmap,
    /// `mremap`, which lets a mapping grow.
    Mremap,
    /// `brk`, which lets the heap grow or shrink.
    Brk,
    /// `munmap`.
    Munmap,
    /// `madvise` with `MADV_DONTNEED` or `MADV_DONTNEED_LOCKED`.
    Madvise,
}

impl Call {
    /// Returns the name of the call.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mmap => "mmap",
            Self::Mremap => "mremap",
            Self::Brk => "brk",
            Self::Munmap => "munmap",
            Self::Madvise => "madvise",
        }
    }
}

/// A call that created or freed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Caller {
    /// The kind of call.
    pub call: Call,
    /// The call stack.
    pub stack: StackId,
}

/// The calls that created the present memory of each process, and the calls that freed memory.
#[derive(Clone, Debug, Default)]
pub struct Callers {
    spaces: Vec<Space>,
    /// The thread and the call stack of the next event.
    next: Option<(u32, StackId)>,
    /// Areas that forks have copied.
    copied: usize,
}

/// The memory of a process, in bytes.
#[derive(Clone, Debug, Default)]
struct Space {
    callers: RangeMap<u64, Caller>,
    /// The last call that freed pages at each address.
    freed: RangeMap<u64, Caller>,
    brk: Option<u64>,
}

impl Callers {
    /// Creates the state at the start of `trace`.
    pub fn new(trace: &Trace) -> Self {
        Self { spaces: vec![Space::default(); trace.processes.len()], ..Self::default() }
    }

    /// Changes the state by `event` of `trace`. The events are given in order.
    pub fn step(&mut self, trace: &Trace, event: &Event) {
        let process = |thread: u32| trace.threads[thread as usize].process as usize;
        let next = self.next.take().filter(|(thread, _)| *thread == event.thread);
        let stack = next.map(|(_, stack)| stack).filter(|stack| *stack != StackId::NONE);
        let by = |call| stack.map(|stack| Caller { call, stack });
        let space = &mut self.spaces[process(event.thread)];
        match event.kind {
            Kind::Caller { stack } => self.next = Some((event.thread, stack)),
            Kind::Map { start, len, .. } => {
                space.replace(start..start + len, by(Call::Mmap));
                space.set(start..start + len, by(Call::Mmap));
            }
            Kind::Area { start, len, backing, .. } => {
                space.set(start..start + len, None);
                if backing == Backing::Heap {
                    // The heap of a process that ran before the recording.
                    space.brk.get_or_insert(start + len);
                }
            }
            Kind::Unmap { start, len } => {
                space.set(start..start + len, None);
                space.free(start..start + len, by(Call::Munmap));
            }
            Kind::Advise { start, len, advice } if discards(advice) => {
                space.free(start..start + len, by(Call::Madvise));
            }
            Kind::Remap { old, old_len, new, new_len, .. } => {
                space.free(old..old + old_len, by(Call::Mremap));
                space.remap(old..old + old_len, new..new + new_len, by(Call::Mremap));
            }
            Kind::Brk { end } => {
                let to = page_up(end).unwrap_or(end);
                let from = space.brk.replace(to).unwrap_or(to);
                space.set(from..to, by(Call::Brk));
                space.set(to..from, None);
                space.free(to..from, by(Call::Brk));
            }
            Kind::Spawn { child, birth: Birth::Fork } => {
                self.copied += space.callers.len() + space.freed.len();
                if self.copied <= MAX_AREAS {
                    self.spaces[process(child)] = space.clone();
                }
            }
            Kind::Exec => *space = Space::default(),
            _ => {}
        }
    }

    /// Returns the call that created the memory at `address` of the process with this index, if the
    /// call was recorded with its call stack.
    pub fn of(&self, process: usize, address: u64) -> Option<Caller> {
        self.spaces.get(process)?.callers.get(&address).copied()
    }

    /// Returns the call that freed the memory at `address` of the process with this index last, if
    /// the call was recorded with its call stack.
    pub fn freed(&self, process: usize, address: u64) -> Option<Caller> {
        self.spaces.get(process)?.freed.get(&address).copied()
    }
}

impl Space {
    /// Sets the call that created `range`.
    fn set(&mut self, range: Range<u64>, caller: Option<Caller>) {
        set(&mut self.callers, range, caller);
    }

    /// Sets the call that freed `range`.
    fn free(&mut self, range: Range<u64>, caller: Option<Caller>) {
        set(&mut self.freed, range, caller);
    }

    /// Frees the memory in `range` that a known call created: `caller` maps other memory there.
    fn replace(&mut self, range: Range<u64>, caller: Option<Caller>) {
        if range.is_empty() {
            return;
        }
        let parts = self.callers.overlapping(&range);
        let within = |part: &Range<u64>| part.start.max(range.start)..part.end.min(range.end);
        let parts: Vec<_> = parts.map(|(part, _)| within(part)).collect();
        parts.into_iter().for_each(|part| self.free(part, caller));
    }

    /// Moves `old` to `new`. A part of `new` beyond the length of `old` was created by `caller`.
    fn remap(&mut self, old: Range<u64>, new: Range<u64>, caller: Option<Caller>) {
        let moved: Vec<_> = if old.is_empty() {
            Vec::new()
        } else {
            let parts = self.callers.overlapping(&old);
            parts.map(|(part, caller)| (part.clone(), *caller)).collect()
        };
        self.set(old.clone(), None);
        self.set(new.clone(), None);
        let grown = new.start + (old.end - old.start);
        self.set(grown.min(new.end)..new.end, caller);
        for (part, caller) in moved {
            let [start, end] = [part.start.max(old.start), part.end.min(old.end)]
                .map(|at| (at - old.start + new.start).min(new.end));
            self.set(start..end, Some(caller));
        }
    }
}

/// Sets the call of `range`, or removes the range without a call.
fn set(calls: &mut RangeMap<u64, Caller>, range: Range<u64>, caller: Option<Caller>) {
    if range.is_empty() {
        return;
    }
    match caller {
        Some(caller) => calls.insert(range, caller),
        None => calls.remove(range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{ProcessInfo, Prot, ThreadInfo};

    const P: u64 = 4096;
    const A: u64 = 1 << 30;
    const B: u64 = 1 << 31;

    fn called(number: u32) -> Kind {
        Kind::Caller { stack: StackId::new(number) }
    }

    fn map(start: u64, pages: u64) -> Kind {
        let (len, prot) = (pages * P, Prot::READ | Prot::WRITE);
        Kind::Map { start, len, prot, flags: 0x22, backing: Backing::Anon }
    }

    /// Returns the calls that created the memory at each of the addresses, after the events of the
    /// threads of two processes.
    fn after(events: &[(u32, Kind)], at: &[(usize, u64)]) -> Vec<Option<(&'static str, u32)>> {
        found(events, at, Callers::of)
    }

    /// Returns the calls that freed the memory at each of the addresses of the first process.
    fn freed(events: &[(u32, Kind)], at: &[u64]) -> Vec<Option<(&'static str, u32)>> {
        let at: Vec<_> = at.iter().map(|address| (0, *address)).collect();
        found(events, &at, Callers::freed)
    }

    fn found(
        events: &[(u32, Kind)],
        at: &[(usize, u64)],
        find: fn(&Callers, usize, u64) -> Option<Caller>,
    ) -> Vec<Option<(&'static str, u32)>> {
        let mut trace = Trace::of_one_thread([]);
        trace.processes.push(ProcessInfo { parent: Some(0), pid: None });
        trace.threads.push(ThreadInfo { process: 1, name: String::new() });
        let mut callers = Callers::new(&trace);
        for (thread, kind) in events {
            callers.step(&trace, &Event { time_us: 0, thread: *thread, kind: *kind });
        }
        let of = |(process, address): &(usize, u64)| find(&callers, *process, *address);
        let name = |caller: Caller| (caller.call.name(), caller.stack.number());
        at.iter().map(|at| of(at).map(name)).collect()
    }

    #[test]
    fn memory_belongs_to_the_last_call_that_created_it() {
        let unmap = Kind::Unmap { start: A + P, len: P };
        let events = [
            (0, called(1)),
            (0, map(A, 4)),
            (0, unmap),
            (0, called(2)),
            (0, map(A + 2 * P, 1)),
            // A call without a call stack.
            (0, map(A + 3 * P, 1)),
        ];
        let at = [0, 1, 2, 3].map(|page| (0, A + page * P));
        assert_eq!(after(&events, &at), [Some(("mmap", 1)), None, Some(("mmap", 2)), None]);
    }

    #[test]
    fn call_stack_applies_to_the_next_event_of_its_thread_only() {
        let events = [
            (0, called(1)),
            (1, map(A, 1)),
            (0, map(A, 1)),
            (0, called(2)),
            (0, Kind::Unmap { start: B, len: P }),
            (0, map(B, 1)),
        ];
        assert_eq!(after(&events, &[(1, A), (0, A), (0, B)]), [None, None, None]);
    }

    #[test]
    fn mremap_creates_only_the_part_that_grows() {
        let remap = Kind::Remap { old: A, old_len: 2 * P, new: B, new_len: 4 * P, flags: 1 };
        let events = [(0, called(1)), (0, map(A, 2)), (0, called(2)), (0, remap)];
        let at = [A, B, B + P, B + 2 * P, B + 3 * P].map(|address| (0, address));
        let (mmap, mremap) = (Some(("mmap", 1)), Some(("mremap", 2)));
        assert_eq!(after(&events, &at), [None, mmap, mmap, mremap, mremap]);
        let shrink = Kind::Remap { old: B, old_len: 4 * P, new: B, new_len: P, flags: 0 };
        let events = [&events[..], &[(0, called(3)), (0, shrink)]].concat();
        assert_eq!(after(&events, &at), [None, mmap, None, None, None]);
    }

    #[test]
    fn break_creates_the_pages_that_it_adds() {
        let brk = |pages: u64| (0, Kind::Brk { end: A + pages * P - 1 });
        let events = [(0, called(1)), brk(1), (0, called(2)), brk(3), (0, called(3)), brk(2)];
        let at = [0, 1, 2].map(|page| (0, A + page * P));
        // The first call reports the start of the heap.
        assert_eq!(after(&events, &at), [None, Some(("brk", 2)), None]);
    }

    #[test]
    fn last_call_that_freed_memory_is_known() {
        let advise = |advice| Kind::Advise { start: A, len: 2 * P, advice };
        let unmap = |start| Kind::Unmap { start, len: P };
        let events = [
            (0, called(1)),
            (0, map(A, 4)),
            (0, called(2)),
            (0, advise(MADV_DONTNEED)),
            (0, called(3)),
            (0, unmap(A + P)),
            // The memory is created again, and the call that freed it stays.
            (0, called(4)),
            (0, map(A + P, 1)),
        ];
        let at = [0, 1, 2].map(|page| A + page * P);
        let (madvise, munmap) = (Some(("madvise", 2)), Some(("munmap", 3)));
        assert_eq!(freed(&events, &at), [madvise, munmap, None]);
        // MADV_FREE and MADV_HUGEPAGE free no page at once.
        let kept = [&events[..], &[(0, called(5)), (0, advise(8)), (0, advise(14))]].concat();
        assert_eq!(freed(&kept, &at), [madvise, munmap, None]);
        // A call without a call stack.
        let unknown = [&events[..], &[(0, unmap(A))]].concat();
        assert_eq!(freed(&unknown, &at), [None, munmap, None]);
        // A mapping in place of present memory frees this memory.
        let replaced = [&events[..], &[(0, called(6)), (0, map(A, 2))]].concat();
        assert_eq!(freed(&replaced, &at), [Some(("mmap", 6)), Some(("mmap", 6)), None]);
        let executed = [&events[..], &[(0, Kind::Exec)]].concat();
        assert_eq!(freed(&executed, &at), [None; 3]);
    }

    #[test]
    fn break_and_mremap_free_memory() {
        let brk = |pages: u64| (0, Kind::Brk { end: A + pages * P });
        let events = [brk(4), (0, called(1)), brk(2)];
        assert_eq!(freed(&events, &[A + P, A + 2 * P]), [None, Some(("brk", 1))]);
        let remap = Kind::Remap { old: A, old_len: 2 * P, new: B, new_len: 2 * P, flags: 1 };
        let events = [(0, map(A, 2)), (0, called(2)), (0, remap)];
        assert_eq!(freed(&events, &[A + P, B]), [Some(("mremap", 2)), None]);
    }

    #[test]
    fn child_inherits_the_calls_of_its_parent_until_it_executes_a_program() {
        let fork = Kind::Spawn { child: 1, birth: Birth::Fork };
        let events = [(0, called(1)), (0, map(A, 1)), (0, fork)];
        assert_eq!(after(&events, &[(1, A)]), [Some(("mmap", 1))]);
        let executed = [&events[..], &[(1, Kind::Exec)]].concat();
        assert_eq!(after(&executed, &[(1, A), (0, A)]), [None, Some(("mmap", 1))]);
    }
}
