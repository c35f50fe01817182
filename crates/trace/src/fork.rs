//! Copies of address spaces: the page-table entries that `fork` copies, and the pages that are
//! copied afterwards because parent or child stores to them.

mod huge;

pub use huge::{Entries, HugeForks};

use crate::anticipate::folio::THP;
use crate::event::{Access, Backing, Birth, Kind, StackId, Trace};
use crate::page_set::{PageSet, pages};
use crate::plan::PlanError;
use faultless::{PAGE_SIZE, page_up};
use huge::Blocks;
use rangemap::RangeSet;
use std::collections::BTreeMap;
use std::ops::Range;

const MADV_DONTNEED: u32 = 4;

/// Pages copied after a fork.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Pages that the parent stored to, and that were shared then.
    pub by_parent: u64,
    /// Pages that a child stored to, and that were shared then.
    pub by_child: u64,
}

impl Copied {
    /// Returns all copied pages.
    pub fn total(&self) -> u64 {
        self.by_parent + self.by_child
    }

    /// Adds the pages of `other`.
    pub fn add(&mut self, other: &Self) {
        self.by_parent += other.by_parent;
        self.by_child += other.by_child;
    }
}

/// Counts of forks. `vfork` and `posix_spawn` copy no memory, and do not count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forks {
    /// Forks.
    pub forks: u64,
    /// Resident private pages of the parent, added up over all forks: `fork` copies an entry of
    /// the page table for each.
    pub entries: u64,
    /// The same at the fork with the most pages.
    pub most: u64,
    /// Forks whose child executes a program. `vfork` or `posix_spawn` would copy no entries.
    pub to_execute: u64,
    /// Entries of page tables copied for the forks in `to_execute`.
    pub execute_entries: u64,
    /// Pages copied after the forks.
    pub copied: Copied,
    /// The same for each call stack, if the recording has call stacks.
    pub by_stack: BTreeMap<StackId, Copied>,
    /// Pages that a parent stored to after a fork, when all its children had ended or executed a
    /// program. Such a fault copies no page.
    pub reused: u64,
    /// The forks with huge pages for all memory, and for memory with a request of the program.
    pub huge: [HugeForks; 2],
    /// Inherited pages of children without a store by the child until the end of the recording.
    pub still_shared: u64,
}

impl Forks {
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
        trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
        let mut out = Self::default();
        let mut memories = vec![Memory::new(huge); trace.processes.len()];
        for (memory, threads) in memories.iter_mut().zip(trace.first_threads()) {
            memory.threads = threads;
        }
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
                    parent.blocks.fork(&parent.private, &mut out.huge);
                    parent.inherited.clone_from(&parent.private);
                    let mut copy = parent.clone();
                    copy.is_child = true;
                    copy.sharers.push(process);
                    copy.living = 0;
                    copy.threads = 1;
                    copy.copied_entries = Some(entries);
                    copy.sharers.iter().for_each(|at| memories[*at].living += 1);
                    memories[to] = copy;
                }
                Kind::Spawn { child, birth } => {
                    let to = trace.threads[child as usize].process as usize;
                    memories[to].threads += u64::from(birth == Birth::Thread);
                }
                Kind::Exit => {
                    let memory = &mut memories[process];
                    memory.threads = memory.threads.saturating_sub(1);
                    if memory.threads == 0 {
                        end(&mut memories, process);
                    }
                }
                Kind::Exec => {
                    if let Some(entries) = memories[process].copied_entries {
                        out.to_execute += 1;
                        out.execute_entries += entries;
                    }
                    end(&mut memories, process);
                    memories[process] = Memory { threads: 1, ..Memory::new(huge) };
                }
                kind => memories[process].step(kind, &mut out),
            }
        }
        let children = memories.iter().filter(|memory| memory.is_child);
        out.still_shared = children.map(|memory| memory.inherited.len()).sum();
        Ok(out)
    }
}

/// Handles the end of the memory of `process`: other processes share it no longer.
fn end(memories: &mut [Memory], process: usize) {
    for ancestor in std::mem::take(&mut memories[process].sharers) {
        memories[ancestor].living -= 1;
    }
    memories.iter_mut().for_each(|memory| memory.sharers.retain(|at| *at != process));
}

/// The private memory of a process, in pages.
#[derive(Clone, Debug)]
struct Memory {
    /// Shared memory, whose pages `fork` does not share by copy-on-write.
    shared: RangeSet<u64>,
    /// Private pages that the process stored to.
    private: PageSet,
    /// Private pages that existed at the last fork, and are not copied yet.
    inherited: PageSet,
    brk: Option<u64>,
    /// The aligned blocks that could be huge pages.
    blocks: Blocks,
    is_child: bool,
    /// The ancestors that share pages with this process: those without another program since.
    sharers: Vec<usize>,
    /// The number of descendants that share pages with this process.
    living: u64,
    threads: u64,
    /// The entries that the fork of this child copied.
    copied_entries: Option<u64>,
}

impl Memory {
    /// Creates the memory of a process without pages, with huge pages of `huge` pages.
    fn new(huge: u64) -> Self {
        Self {
            shared: RangeSet::new(),
            private: PageSet::default(),
            inherited: PageSet::default(),
            brk: None,
            blocks: Blocks::new(huge),
            is_child: false,
            sharers: Vec::new(),
            living: 0,
            threads: 0,
            copied_entries: None,
        }
    }

    fn step(&mut self, kind: Kind, out: &mut Forks) {
        self.blocks.step(kind);
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
            Kind::Fault { page, access: Access::Write, present, stack, .. } => {
                let page = page / PAGE_SIZE;
                if self.shared.contains(&page) {
                    return;
                }
                self.private.insert(page);
                if self.inherited.contains(page) {
                    self.inherited.remove(page..page + 1);
                    if present {
                        self.copy(page, stack, out);
                    }
                }
            }
            _ => {}
        }
    }

    /// Counts a store to an inherited page.
    fn copy(&mut self, page: u64, stack: StackId, out: &mut Forks) {
        let copied = match (self.is_child, self.living) {
            (true, _) => Copied { by_child: 1, by_parent: 0 },
            (false, 0) => {
                out.reused += 1;
                return;
            }
            (false, _) => Copied { by_parent: 1, by_child: 0 },
        };
        self.blocks.copy(page, &mut out.huge);
        out.copied.add(&copied);
        if stack != StackId::NONE {
            out.by_stack.entry(stack).or_default().add(&copied);
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
    use crate::event::{Event, Frame, Function, ProcessInfo, Prot, Recorded, ThreadInfo};

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
        trace.processes.push(ProcessInfo { parent: Some(0), pid: None });
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
        let single = Entries { single: 40, ..Entries::default() };
        let want = Forks {
            forks: 1,
            entries: 40,
            most: 40,
            to_execute: 0,
            execute_entries: 0,
            copied: Copied { by_parent: 1, by_child: 2 },
            still_shared: 40 - 2 - 10,
            // 40 entries in no huge page.
            huge: [HugeForks { entries: single, most: single, splits: 0 }; 2],
            ..Forks::default()
        };
        assert_eq!((&got, got.copied.total()), (&want, 3));
    }

    #[test]
    fn child_that_executes_a_program_shares_no_pages() {
        let got = forked(Backing::Anon, &[(1, Kind::Exec), (1, fault(1, false))]);
        assert_eq!((got.forks, got.copied.total(), got.still_shared), (1, 0, 0));
        assert_eq!((got.to_execute, got.execute_entries), (1, 40));
    }

    #[test]
    fn shared_memory_is_not_copied() {
        let got = forked(Backing::SharedAnon, &[(1, fault(1, true)), (0, fault(2, true))]);
        assert_eq!((got.forks, got.entries, got.copied.total(), got.still_shared), (1, 0, 0, 0));
    }

    #[test]
    fn parent_copies_no_page_after_the_end_of_its_children() {
        for ends in [Kind::Exit, Kind::Exec] {
            let events = [(0, fault(0, true)), (1, ends), (0, fault(1, true)), (0, fault(2, true))];
            let got = forked(Backing::Anon, &events);
            assert_eq!((got.copied.by_parent, got.reused), (1, 2), "{ends:?}");
        }
    }

    /// The grandchild still shares pages after its parent has executed a program.
    #[test]
    fn pages_are_shared_with_each_living_descendant() {
        let first = [map(Backing::Anon)].into_iter().chain((0..40).map(|page| fault(page, false)));
        let mut trace = Trace::of_one_thread(first);
        for process in 1..3 {
            trace.processes.push(ProcessInfo { parent: Some(process - 1), pid: None });
            trace.threads.push(ThreadInfo { process, name: String::new() });
        }
        let mut push = |thread, kind| trace.events.push(Event { time_us: 0, thread, kind });
        push(0, Kind::Spawn { child: 1, birth: Birth::Fork });
        push(1, Kind::Spawn { child: 2, birth: Birth::Fork });
        push(1, Kind::Exec);
        push(0, fault(0, true));
        push(2, Kind::Exit);
        push(0, fault(1, true));
        push(1, Kind::Exit);
        push(0, fault(2, true));
        let got = Forks::of(&trace).expect("a valid trace");
        assert_eq!((got.copied.by_parent, got.reused), (1, 2));
    }

    #[test]
    fn copies_are_counted_for_their_stack() {
        let at = |page, number| {
            let mut fault = fault(page, true);
            if let Kind::Fault { stack, .. } = &mut fault {
                *stack = StackId::new(number);
            }
            fault
        };
        let first = [map(Backing::Anon)].into_iter().chain((0..40).map(|page| fault(page, false)));
        let mut trace = Trace::of_one_thread(first);
        trace.header.recorded = Recorded::USER_FAULTS | Recorded::STACKS;
        trace.stacks.functions.push(Function::default());
        trace.stacks.frames = vec![Frame { caller: StackId::NONE, function: 0, line: 0 }; 2];
        trace.processes.push(ProcessInfo { parent: Some(0), pid: None });
        trace.threads.push(ThreadInfo { process: 1, name: String::new() });
        let mut push = |thread, kind| trace.events.push(Event { time_us: 0, thread, kind });
        push(0, Kind::Spawn { child: 1, birth: Birth::Fork });
        push(0, at(0, 1));
        push(1, at(0, 2));
        push(1, at(1, 1));
        // The page is already copied, and another page was empty at the fork.
        push(1, at(1, 2));
        push(1, at(50, 2));
        let got = Forks::of(&trace).expect("a valid trace");
        let want = [
            (StackId::new(1), Copied { by_parent: 1, by_child: 1 }),
            (StackId::new(2), Copied { by_parent: 0, by_child: 1 }),
        ];
        assert_eq!(got.by_stack.into_iter().collect::<Vec<_>>(), want);
    }

    #[test]
    fn moved_pages_stay_shared_until_a_store() {
        let (old, new) = (START, START + (1 << 30));
        let len = 8 * PAGE_SIZE;
        let moved = Kind::Remap { old, old_len: len, new, new_len: len, flags: 1 };
        let got = forked(Backing::Anon, &[(1, moved), (1, fault(1 << 18, true))]);
        assert_eq!((got.copied.by_child, got.still_shared), (1, 39));
    }
}
