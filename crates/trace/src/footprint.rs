//! The resident memory of the recorded processes over time: touched pages, until a call frees them.
//!
//! The kernel's reclaim is not recorded, and a recording of running processes lacks the pages of
//! processes that the recorder could not examine. Pages shared by processes count for each process.

use crate::event::{Birth, Kind, Trace};
use crate::page_set::{PageSet, pages};
use faultless::{PAGE_SIZE, page_up};

const MADV_DONTNEED: u32 = 4;

/// A change of the resident memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Microseconds since the recording began.
    pub time_us: u64,
    /// The index of the process in [`Trace::processes`].
    pub process: u32,
    /// Added pages of 4 KiB; negative for removed pages.
    pub pages: i64,
}

/// The pages of a process.
#[derive(Clone, Default)]
struct Memory {
    pages: PageSet,
    /// The program break.
    end: Option<u64>,
    threads: u64,
}

impl Memory {
    /// Removes the pages in the range. Returns the change.
    fn remove(&mut self, start: u64, end: u64) -> i64 {
        let range = pages(start, end.saturating_sub(start));
        let removed = self.pages.count(range.clone());
        self.pages.remove(range);
        -(removed as i64)
    }

    /// Moves the pages of a range. Returns the change.
    fn remap(&mut self, [old, old_len, new, new_len]: [u64; 4]) -> i64 {
        let (from, to) = (old / PAGE_SIZE, new / PAGE_SIZE);
        let moved = self.pages.list(pages(old, old_len));
        let mut change = self.remove(old, old + old_len) + self.remove(new, new + new_len);
        for page in moved.into_iter().filter(|page| page - from < new_len / PAGE_SIZE) {
            change += i64::from(self.pages.insert(page - from + to));
        }
        change
    }
}

/// Passes each change of the resident memory in `trace` to `take`, in order of time.
pub fn changes(trace: &Trace, mut take: impl FnMut(Change)) {
    let mut memories = vec![Memory::default(); trace.processes.len()];
    for (memory, threads) in memories.iter_mut().zip(trace.first_threads()) {
        memory.threads = threads;
    }
    for event in &trace.events {
        let process = trace.threads[event.thread as usize].process;
        let memory = &mut memories[process as usize];
        memory.threads = memory.threads.max(1);
        let end = |start: u64, len: u64| start + len;
        let pages = match event.kind {
            Kind::Fault { page, .. } => i64::from(memory.pages.insert(page / PAGE_SIZE)),
            Kind::Resident { start, len, .. } => {
                pages(start, len).map(|page| i64::from(memory.pages.insert(page))).sum()
            }
            Kind::Map { start, len, .. }
            | Kind::Unmap { start, len }
            | Kind::Advise { start, len, advice: MADV_DONTNEED } => {
                memory.remove(start, end(start, len))
            }
            Kind::Remap { old, old_len, new, new_len, .. } => {
                memory.remap([old, old_len, new, new_len])
            }
            Kind::Brk { end } => {
                let end = page_up(end).unwrap_or(end);
                let before = memory.end.replace(end).unwrap_or(end);
                memory.remove(end, before)
            }
            Kind::Spawn { birth: Birth::Thread, .. } => {
                memory.threads += 1;
                0
            }
            Kind::Spawn { child, birth } => {
                let copy = Memory { threads: 1, ..memory.clone() };
                let pages = copy.pages.len() as i64;
                let child = trace.threads[child as usize].process;
                // A vfork child uses the memory of its parent.
                if birth == Birth::Fork && pages > 0 {
                    memories[child as usize] = copy;
                    take(Change { time_us: event.time_us, process: child, pages });
                }
                0
            }
            Kind::Exec => {
                memory.end = None;
                memory.remove(0, u64::MAX)
            }
            Kind::Exit => {
                memory.threads -= 1;
                if memory.threads == 0 { memory.remove(0, u64::MAX) } else { 0 }
            }
            Kind::Area { .. }
            | Kind::Protect { .. }
            | Kind::Advise { .. }
            | Kind::Caller { .. } => 0,
        };
        if pages != 0 {
            take(Change { time_us: event.time_us, process, pages });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Access, Backing, Event, Prot, ThreadInfo};

    const P: u64 = PAGE_SIZE;
    const START: u64 = 1 << 40;

    fn resident(events: &[(u32, Kind)], processes: &[u32]) -> Vec<i64> {
        let mut trace = Trace::of_one_thread([]);
        let thread = |process: &u32| ThreadInfo { process: *process, name: String::new() };
        trace.threads = processes.iter().map(thread).collect();
        let count = processes.iter().max().unwrap() + 1;
        trace.processes.resize(count as usize, trace.processes[0].clone());
        let event = |&(thread, kind): &(u32, Kind)| Event { time_us: 0, thread, kind };
        trace.events = events.iter().map(event).collect();
        let mut resident = vec![0; count as usize];
        changes(&trace, |change| resident[change.process as usize] += change.pages);
        resident
    }

    #[test]
    fn pages_are_resident_until_they_are_freed() {
        let touch = |page: u64| Kind::first(START + page * P, Access::Write);
        let advise = |page: u64, len: u64, advice| Kind::Advise {
            start: START + page * P,
            len: len * P,
            advice,
        };
        let unmap = |page: u64, len: u64| Kind::Unmap { start: START + page * P, len: len * P };
        let map = Kind::Map {
            start: START,
            len: 2 * P,
            prot: Prot::READ,
            flags: 0x32,
            backing: Backing::Anon,
        };
        let shrink = Kind::Remap {
            old: START,
            old_len: 4 * P,
            new: START + 100 * P,
            new_len: 2 * P,
            flags: 1,
        };
        let held = Kind::Resident { start: START, len: 3 * P, written: true };
        let touched: Vec<_> = (0..4).map(touch).collect();
        for (more, want) in [
            (&[][..], 4),
            (&[touch(0)], 4),
            (&[advise(1, 2, 4)], 2),
            (&[advise(1, 2, 14)], 4),
            (&[unmap(0, 9)], 0),
            (&[map], 2),
            (&[shrink, touch(0)], 3),
            (&[held], 4),
            (&[Kind::Exec], 0),
            (&[Kind::Exit], 0),
            (&[Kind::Brk { end: START + 4 * P }, Kind::Brk { end: START + P + 1 }], 2),
        ] {
            let events: Vec<_> = touched.iter().chain(more).map(|kind| (0, *kind)).collect();
            assert_eq!(resident(&events, &[0]), [want], "{more:?}");
        }
    }

    #[test]
    fn fork_copies_resident_pages_and_the_last_thread_frees_them() {
        let touch = (0, Kind::first(START, Access::Write));
        let spawn = |child, birth| (0, Kind::Spawn { child, birth });
        let (fork, thread) = (spawn(1, Birth::Fork), spawn(2, Birth::Thread));
        let exit = |thread| (thread, Kind::Exit);
        let processes = [0, 1, 0];
        assert_eq!(resident(&[touch, fork], &processes), [1, 1]);
        assert_eq!(resident(&[touch, spawn(1, Birth::Vfork)], &processes), [1, 0]);
        assert_eq!(resident(&[touch, fork, exit(1)], &processes), [1, 0]);
        assert_eq!(resident(&[touch, thread, exit(0)], &processes), [1, 0]);
        assert_eq!(resident(&[touch, thread, exit(0), exit(2)], &processes), [0, 0]);
        // Both threads ran before the recording.
        assert_eq!(resident(&[touch, exit(2)], &processes), [1, 0]);
        assert_eq!(resident(&[touch, exit(2), exit(0)], &processes), [0, 0]);
    }
}
