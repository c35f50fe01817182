//! Copies of address spaces: the page-table entries that `fork` copies, and the pages that are
//! copied afterwards because parent or child stores to them.

use crate::event::{Access, Backing, Birth, Kind, Trace};
use crate::page_set::{PageSet, pages};
use crate::plan::PlanError;
use faultless::{PAGE_SIZE, page_up};
use rangemap::RangeSet;
use std::ops::Range;

const MADV_DONTNEED: u32 = 4;

/// Counts of forks. `vfork` and `posix_spawn` copy no memory, and do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forks {
    /// Forks.
    pub forks: u64,
    /// Resident private pages of the parent, added up over all forks: `fork` copies an entry of
    /// the page table for each.
    pub entries: u64,
    /// The same at the fork with the most pages.
    pub most: u64,
    /// Forks whose child executes a program, and the entries copied for them. `vfork` or
    /// `posix_spawn` would copy none.
    pub to_execute: u64,
    /// See `to_execute`.
    pub execute_entries: u64,
    /// Pages that the parent stored to after a fork, and that were shared then.
    pub copied_by_parent: u64,
    /// Pages that a child stored to, and that were shared then.
    pub copied_by_child: u64,
    /// Inherited pages of children without a store by the child until the end of the recording.
    pub still_shared: u64,
}

impl Forks {
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
                    let entries = memories[process].private.len();
                    out.forks += 1;
                    out.entries += entries;
                    out.most = out.most.max(entries);
                    let parent = &mut memories[process];
                    parent.inherited.clone_from(&parent.private);
                    let mut copy = parent.clone();
                    copy.is_child = true;
                    copy.copied_entries = Some(entries);
                    memories[to] = copy;
                }
                Kind::Exec => {
                    let before = std::mem::take(&mut memories[process]);
                    if let Some(entries) = before.copied_entries {
                        out.to_execute += 1;
                        out.execute_entries += entries;
                    }
                }
                kind => memories[process].step(kind, &mut out),
            }
        }
        out.still_shared =
            memories.iter().filter(|memory| memory.is_child).map(|it| it.inherited.len()).sum();
        Ok(out)
    }

    /// Returns all copied pages.
    pub fn copied(&self) -> u64 {
        self.copied_by_parent + self.copied_by_child
    }
}

/// The private memory of a process, in pages.
#[derive(Clone, Debug, Default)]
struct Memory {
    /// Shared memory, whose pages `fork` does not share by copy-on-write.
    shared: RangeSet<u64>,
    /// Private pages that the process stored to.
    private: PageSet,
    /// Private pages that existed at the last fork, and are not copied yet.
    inherited: PageSet,
    brk: Option<u64>,
    is_child: bool,
    /// The entries that the fork of this child copied.
    copied_entries: Option<u64>,
}

impl Memory {
    fn step(&mut self, kind: Kind, out: &mut Forks) {
        match kind {
            Kind::Map { start, len, backing, .. } | Kind::Area { start, len, backing, .. } => {
                if matches!(kind, Kind::Map { .. }) {
                    self.remove(pages(start, len));
                }
                if matches!(backing, Backing::SharedAnon | Backing::SharedFile) {
                    self.shared.insert(pages(start, len));
                }
            }
            Kind::Resident { start, len, written: true } => {
                pages(start, len).for_each(|page| _ = self.private.insert(page));
            }
            Kind::Unmap { start, len } | Kind::Advise { start, len, advice: MADV_DONTNEED } => {
                self.remove(pages(start, len));
            }
            Kind::Remap { old, old_len, new, new_len, .. } => {
                self.remap(pages(old, old_len), pages(new, new_len));
            }
            Kind::Brk { end } => {
                let to = page_up(end).unwrap_or(end) / PAGE_SIZE;
                let from = self.brk.replace(to).unwrap_or(to);
                self.remove(to..from.max(to));
            }
            Kind::Fault { page, access: Access::Write, present, .. } => {
                let page = page / PAGE_SIZE;
                if self.shared.contains(&page) {
                    return;
                }
                self.private.insert(page);
                if self.inherited.contains(page) {
                    self.inherited.remove(page..page + 1);
                    let count = if self.is_child {
                        &mut out.copied_by_child
                    } else {
                        &mut out.copied_by_parent
                    };
                    *count += u64::from(present);
                }
            }
            _ => {}
        }
    }

    fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.private.remove(range.clone());
        self.inherited.remove(range.clone());
        self.shared.remove(range);
    }

    fn remap(&mut self, old: Range<u64>, new: Range<u64>) {
        let moved = self.private.list(old.clone()).into_iter();
        let moved: Vec<_> = moved
            .map(|from| (from - old.start + new.start, self.inherited.contains(from)))
            .filter(|(to, _)| *to < new.end)
            .collect();
        self.remove(old);
        self.remove(new);
        for (page, inherited) in moved {
            self.private.insert(page);
            if inherited {
                self.inherited.insert(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Event, ProcessInfo, Prot, ThreadInfo};

    const START: u64 = 1 << 40;

    fn fault(page: u64, present: bool) -> Kind {
        let page = START + page * PAGE_SIZE;
        let mut fault = Kind::first(page, Access::Write);
        if let Kind::Fault { present: was, .. } = &mut fault {
            *was = present;
        }
        fault
    }

    fn map(backing: Backing) -> Kind {
        let prot = Prot::READ | Prot::WRITE;
        Kind::Map { start: START, len: 64 * PAGE_SIZE, prot, flags: 0x22, backing }
    }

    /// Returns the counts of a process that touches 40 pages and forks, followed by `events` of
    /// the parent (0) and of the child (1).
    fn forked(backing: Backing, events: &[(u32, Kind)]) -> Forks {
        let first = [map(backing)].into_iter().chain((0..40).map(|page| fault(page, false)));
        let mut trace = Trace::of_one_thread(first);
        trace.processes.push(ProcessInfo { parent: Some(0) });
        trace.threads.push(ThreadInfo { process: 1, name: String::new() });
        let mut push = |thread, kind| trace.events.push(Event { time_us: 0, thread, kind });
        push(0, Kind::Spawn { child: 1, birth: Birth::Fork });
        events.iter().for_each(|(thread, kind)| push(*thread, *kind));
        Forks::of(&trace).expect("a valid trace")
    }

    #[test]
    fn pages_stored_to_after_a_fork_are_copies() {
        let (start, len) = (START + 30 * PAGE_SIZE, 10 * PAGE_SIZE);
        let events = [
            (0, fault(0, true)),
            (0, fault(0, true)),
            (1, fault(1, true)),
            (1, fault(2, true)),
            // A page that was swapped out, a page that was empty at the fork, and freed memory.
            (0, fault(3, false)),
            (0, fault(50, false)),
            (1, Kind::Unmap { start, len }),
        ];
        let got = forked(Backing::Anon, &events);
        let want = Forks {
            forks: 1,
            entries: 40,
            most: 40,
            to_execute: 0,
            execute_entries: 0,
            copied_by_parent: 1,
            copied_by_child: 2,
            still_shared: 40 - 2 - 10,
        };
        assert_eq!((got, got.copied()), (want, 3));
    }

    #[test]
    fn child_that_executes_a_program_shares_no_pages() {
        let got = forked(Backing::Anon, &[(1, Kind::Exec), (1, fault(1, false))]);
        assert_eq!((got.forks, got.copied(), got.still_shared), (1, 0, 0));
        assert_eq!((got.to_execute, got.execute_entries), (1, 40));
    }

    #[test]
    fn shared_memory_is_not_copied() {
        let got = forked(Backing::SharedAnon, &[(1, fault(1, true)), (0, fault(2, true))]);
        assert_eq!((got.forks, got.entries, got.copied(), got.still_shared), (1, 0, 0, 0));
    }

    #[test]
    fn moved_pages_stay_shared_until_a_store() {
        let (old, new) = (START, START + (1 << 30));
        let len = 8 * PAGE_SIZE;
        let moved = Kind::Remap { old, old_len: len, new, new_len: len, flags: 1 };
        let got = forked(Backing::Anon, &[(1, moved), (1, fault(1 << 18, true))]);
        assert_eq!((got.copied_by_child, got.still_shared), (1, 39));
    }
}
