//! Memory reserved as a whole and made usable in parts: the heap of a Java virtual machine, and the
//! arenas of glibc's `malloc` for threads.
//!
//! A reservation is a large private mapping without permissions. Parts of the reservation become
//! usable by `mprotect`, or by an `mmap` over them.

use crate::event::{Backing, Kind, Prot, Trace};
use crate::page_set::PageSet;
use crate::plan::{self, PlanError};
use faultless::PAGE_SIZE;
use rangemap::RangeSet;
use std::ops::Range;

/// The smallest mapping that counts as a reservation, in bytes.
const LEAST: u64 = 16 << 20;
/// The alignment of each heap in a glibc arena. glibc reserves this size, or twice the size to find
/// an aligned address.
const ARENA: u64 = 64 << 20;

/// One reservation, from its mapping to the end of its process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// Bytes.
    pub len: u64,
    /// Usable bytes at the first touch of a page.
    pub begun: u64,
    /// The peak number of usable bytes.
    pub usable: u64,
    /// Different touched pages.
    pub touched: u64,
    /// Touches of pages that were touched earlier and freed since.
    pub refilled: u64,
    /// Whether the layout is that of a glibc arena.
    pub arena: bool,
}

/// Returns the reservations of `trace` with a part that became usable for loads and stores, in
/// order of their creation.
///
/// # Errors
/// The trace does not pass [`Trace::check`].
pub fn reserved(trace: &Trace) -> Result<Vec<Reserved>, PlanError> {
    plan::complete(trace)?;
    let mut all: Vec<Live> = Vec::new();
    for event in &trace.events {
        let process = trace.threads[event.thread as usize].process;
        match event.kind {
            Kind::Map { start, len, prot, backing: Backing::Anon, .. } => {
                let range = start..start + len;
                let known = all.iter_mut().find(|live| live.holds(process, &range));
                match known {
                    Some(live) => live.change(range, prot),
                    None if prot.is_empty() && len >= LEAST => all.push(Live::new(process, range)),
                    None => {}
                }
            }
            Kind::Protect { start, len, prot } => {
                let range = start..start + len;
                if let Some(live) = all.iter_mut().find(|live| live.holds(process, &range)) {
                    live.change(range, prot);
                }
            }
            Kind::Unmap { start, len } => {
                let gone = start..start + len;
                let mine = |live: &&mut Live| live.process == process;
                all.iter_mut().filter(mine).for_each(|live| live.unmap(&gone));
            }
            Kind::Fault { page, present: false, .. } => {
                let at = page..page + PAGE_SIZE;
                if let Some(live) = all.iter_mut().find(|live| live.holds(process, &at)) {
                    live.touch(page);
                }
            }
            Kind::Exec => {
                all.iter_mut().filter(|live| live.process == process).for_each(|live| live.end());
            }
            _ => {}
        }
    }
    Ok(all.into_iter().map(Live::counts).filter(|one| one.usable > 0).collect())
}

/// A reservation, and its counts.
struct Live {
    process: u32,
    /// The mapped range; empty after its end.
    range: Range<u64>,
    usable: RangeSet<u64>,
    touched: PageSet,
    counts: Reserved,
}

impl Live {
    fn new(process: u32, range: Range<u64>) -> Self {
        let counts = Reserved { len: range.end - range.start, ..Reserved::default() };
        Self { process, range, usable: RangeSet::new(), touched: PageSet::default(), counts }
    }

    fn holds(&self, process: u32, part: &Range<u64>) -> bool {
        self.process == process && self.range.start <= part.start && part.end <= self.range.end
    }

    fn change(&mut self, part: Range<u64>, prot: Prot) {
        if prot != Prot::READ | Prot::WRITE {
            self.usable.remove(part);
            return;
        }
        let first = self.counts.usable == 0;
        let arena =
            part.start.is_multiple_of(ARENA) && [ARENA, 2 * ARENA].contains(&self.counts.len);
        self.counts.arena |= first && arena;
        self.usable.insert(part);
        self.counts.usable = self.counts.usable.max(self.now());
    }

    /// Returns the bytes usable now.
    fn now(&self) -> u64 {
        self.usable.iter().map(|part| part.end - part.start).sum()
    }

    fn unmap(&mut self, gone: &Range<u64>) {
        let whole = gone.start <= self.range.start && self.range.end <= gone.end;
        if whole {
            self.end();
            return;
        }
        self.usable.remove(gone.clone());
        // Memory beside an arena is unmapped, at either end.
        if gone.contains(&self.range.start) {
            self.range.start = gone.end;
        } else if gone.start < self.range.end && self.range.end <= gone.end {
            self.range.end = gone.start;
        }
    }

    fn touch(&mut self, page: u64) {
        if self.touched.is_empty() {
            self.counts.begun = self.now();
        }
        self.counts.refilled += u64::from(!self.touched.insert(page / PAGE_SIZE));
    }

    fn end(&mut self) {
        self.range = 0..0;
        self.usable.clear();
    }

    fn counts(self) -> Reserved {
        Reserved { touched: self.touched.len(), ..self.counts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Access;

    const START: u64 = 1 << 40;
    const MIB: u64 = 1 << 20;

    fn of(events: &[Kind]) -> Vec<Reserved> {
        reserved(&Trace::of_one_thread(events.iter().copied())).unwrap()
    }

    fn map(at: u64, len: u64, prot: Prot) -> Kind {
        Kind::Map { start: START + at, len, prot, flags: 0x4022, backing: Backing::Anon }
    }

    fn touch(at: u64) -> Kind {
        Kind::first(START + at, Access::Write)
    }

    fn protect(at: u64, len: u64, prot: Prot) -> Kind {
        Kind::Protect { start: START + at, len, prot }
    }

    const RW: Prot = Prot::READ.union(Prot::WRITE);
    const NONE: Prot = Prot::empty();

    #[test]
    fn growing_heap_differs_from_initially_complete_heap() {
        let got = of(&[
            map(0, 256 * MIB, NONE),
            map(0, 8 * MIB, RW),
            touch(0),
            touch(PAGE_SIZE),
            touch(0),
            map(8 * MIB, 8 * MIB, RW),
            touch(8 * MIB),
            // One part is unmapped, and another is added.
            map(8 * MIB, 8 * MIB, NONE),
            map(64 * MIB, MIB, RW),
        ]);
        let want = Reserved {
            len: 256 * MIB,
            begun: 8 * MIB,
            usable: 16 * MIB,
            touched: 3,
            refilled: 1,
            arena: false,
        };
        assert_eq!(got, [want]);
    }

    #[test]
    fn arenas_are_recognised_by_alignment() {
        let end = 128 * MIB;
        let arena = [
            map(16 * MIB, end, NONE),
            Kind::Unmap { start: START + 16 * MIB, len: 48 * MIB },
            Kind::Unmap { start: START + end, len: 16 * MIB },
            protect(64 * MIB, 132 << 10, RW),
            touch(64 * MIB),
            protect(64 * MIB + (132 << 10), PAGE_SIZE, RW),
        ];
        let got = of(&arena);
        assert_eq!((got.len(), got[0].arena, got[0].touched), (1, true, 1));
        assert_eq!((got[0].begun, got[0].usable), (132 << 10, 136 << 10));
        // Another address, or another size.
        let other = of(&[map(16 * MIB, end, NONE), protect(16 * MIB, MIB, RW)]);
        assert!(!other[0].arena);
        let other = of(&[map(64 * MIB, 32 * MIB, NONE), protect(64 * MIB, MIB, RW)]);
        assert!(!other[0].arena);
    }

    #[test]
    fn unusable_small_and_code_mappings_are_ignored() {
        let exec = RW | Prot::EXEC;
        let got = of(&[
            map(0, 64 * MIB, NONE),
            map(100 * MIB, MIB, NONE),
            protect(100 * MIB, MIB, RW),
            map(200 * MIB, 64 * MIB, NONE),
            protect(200 * MIB, MIB, exec),
            // Another mapping at the address of an ended one.
            map(300 * MIB, 64 * MIB, NONE),
            Kind::Unmap { start: START + 300 * MIB, len: 64 * MIB },
            map(300 * MIB, 64 * MIB, RW),
        ]);
        assert_eq!(got, []);
    }

    #[test]
    fn recorded_java_program_has_a_heap() {
        let trace = crate::recordings::find("java").unwrap().trace().unwrap();
        let all = reserved(&trace).unwrap();
        let heap = all.iter().max_by_key(|one| one.usable).unwrap();
        assert!(!heap.arena && heap.touched > 1000, "{heap:?}");
        assert!(heap.touched * PAGE_SIZE <= heap.usable && heap.usable <= heap.len, "{heap:?}");
    }
}
