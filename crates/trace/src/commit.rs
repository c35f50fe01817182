//! Memory that a program maps without access, and makes writable in parts, as an allocator that
//! commits its memory on demand. Each part takes an `mprotect` call.

use crate::event::{Backing, Birth, Kind, Prot, Trace};
use crate::page_set::pages;
use crate::plan::PlanError;
use faultless::PAGE_SIZE;
use rangemap::RangeMap;
use std::ops::Range;

const MAP_STACK: u32 = 0x2_0000;

/// Counts of calls that make memory writable for the first time. Stacks do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Commits {
    /// `mprotect` calls.
    pub calls: u64,
    /// Pages of these calls.
    pub pages: u64,
}

impl Commits {
    /// Counts `trace`.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`].
    pub fn of(trace: &Trace) -> Result<Self, PlanError> {
        trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
        let mut out = Self::default();
        let mut memories = vec![Memory::default(); trace.processes.len()];
        for event in &trace.events {
            let process = trace.threads[event.thread as usize].process as usize;
            match event.kind {
                Kind::Spawn { child, birth: Birth::Fork } => {
                    let to = trace.threads[child as usize].process as usize;
                    memories[to] = memories[process].clone();
                }
                Kind::Exec => memories[process] = Memory::default(),
                kind => memories[process].step(kind, &mut out),
            }
        }
        Ok(out)
    }
}

/// The private anonymous mappings of a process, by page: whether the program can write.
#[derive(Clone, Debug, Default)]
struct Memory(RangeMap<u64, bool>);

impl Memory {
    fn step(&mut self, kind: Kind, out: &mut Commits) {
        match kind {
            Kind::Map { start, len, prot, flags, backing } => {
                self.remove(pages(start, len));
                if backing == Backing::Anon && flags & MAP_STACK == 0 {
                    self.insert(pages(start, len), prot);
                }
            }
            Kind::Area { start, len, prot, backing: Backing::Anon } => {
                self.insert(pages(start, len), prot);
            }
            Kind::Unmap { start, len } => self.remove(pages(start, len)),
            Kind::Remap { old, old_len, new, new_len, .. } if old_len > 0 => {
                let writable = self.0.get(&(old / PAGE_SIZE)).copied();
                self.remove(pages(old, old_len));
                self.remove(pages(new, new_len));
                if let Some(writable) = writable {
                    self.0.insert(pages(new, new_len), writable);
                }
            }
            Kind::Protect { start, len, prot } => self.protect(pages(start, len), prot, out),
            _ => {}
        }
    }

    fn protect(&mut self, range: Range<u64>, prot: Prot, out: &mut Commits) {
        if range.is_empty() {
            return;
        }
        let within = |part: &Range<u64>| part.start.max(range.start)..part.end.min(range.end);
        let parts: Vec<_> =
            self.0.overlapping(&range).map(|(part, writable)| (within(part), *writable)).collect();
        let writable = prot.contains(Prot::WRITE);
        let mut committed = 0;
        for (part, before) in parts {
            committed += if writable && !before { part.end - part.start } else { 0 };
            self.0.insert(part, writable);
        }
        out.calls += u64::from(committed > 0);
        out.pages += committed;
    }

    fn insert(&mut self, range: Range<u64>, prot: Prot) {
        if !range.is_empty() {
            self.0.insert(range, prot.contains(Prot::WRITE));
        }
    }

    fn remove(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.0.remove(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1 << 40;
    const RW: Prot = Prot::READ.union(Prot::WRITE);

    fn map(prot: Prot, flags: u32) -> Kind {
        let len = 64 * PAGE_SIZE;
        Kind::Map { start: START, len, prot, flags, backing: Backing::Anon }
    }

    fn protect(range: Range<u64>, prot: Prot) -> Kind {
        let (start, len) = (START + range.start * PAGE_SIZE, (range.end - range.start) * PAGE_SIZE);
        Kind::Protect { start, len, prot }
    }

    fn of(events: &[Kind]) -> (u64, u64) {
        let trace = Trace::of_one_thread(events.iter().copied());
        let Commits { calls, pages } = Commits::of(&trace).expect("a valid trace");
        (calls, pages)
    }

    #[test]
    fn calls_that_make_reserved_memory_writable_are_counted() {
        let reserved = map(Prot::empty(), 0x22);
        // The third call only repeats the first two.
        let grants = [protect(0..16, RW), protect(16..24, RW), protect(0..24, RW)];
        assert_eq!(of(&[&[reserved][..], &grants].concat()), (2, 24));
        // Memory that the program takes back is committed again.
        let again = [protect(0..16, RW), protect(0..16, Prot::empty()), protect(8..24, RW)];
        assert_eq!(of(&[&[reserved][..], &again].concat()), (2, 32));
        let unmap = Kind::Unmap { start: START, len: 64 * PAGE_SIZE };
        assert_eq!(of(&[reserved, unmap, protect(0..16, RW)]), (0, 0));
    }

    #[test]
    fn writable_memory_and_stacks_are_not_counted() {
        assert_eq!(of(&[map(RW, 0x22), protect(0..16, RW)]), (0, 0));
        assert_eq!(of(&[map(Prot::empty(), 0x22 | MAP_STACK), protect(0..16, RW)]), (0, 0));
    }
}
