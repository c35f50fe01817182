//! Counts of the faults of each process.

use super::{Backing, Birth, Kind, MAX_AREAS, Trace};
use crate::page_set::PageSet;
use faultless::PAGE_SIZE;
use rangemap::RangeMap;

/// Counts of one process.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ProcessSummary {
    /// The index in [`Trace::processes`].
    pub process: u32,
    /// The index of the process that created it, if recorded.
    pub parent: Option<u32>,
    /// Its number in the recorder's PID namespace, if recorded.
    pub pid: Option<u32>,
    /// The last name of its first thread.
    pub name: String,
    /// Faults in user and in kernel mode.
    pub faults: u64,
    /// Different pages that faulted.
    pub pages: u64,
    /// Faults on an absent page of private anonymous memory, heap or stack.
    pub first_touches: u64,
    /// Faults on a present page: copy-on-write and similar.
    pub present: u64,
}

impl ProcessSummary {
    /// Returns the number in the recording, the name, and the PID if known.
    pub fn label(&self) -> String {
        let name = if self.name.is_empty() { "?" } else { &self.name };
        let pid = self.pid.map_or(String::new(), |pid| format!(", PID {pid}"));
        format!("{} {name}{pid}", self.process)
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        self.faults += other.faults;
        self.pages += other.pages;
        self.first_touches += other.first_touches;
        self.present += other.present;
    }
}

impl Trace {
    /// Returns the counts of each process with a fault, the process with the most faults first.
    pub fn processes_by_faults(&self) -> Vec<ProcessSummary> {
        let mut counted = self.count_processes();
        counted.retain(|process| process.faults > 0);
        counted.sort_by_key(|process| std::cmp::Reverse(process.faults));
        counted
    }

    /// Returns the counts of each process, by its index.
    pub(super) fn count_processes(&self) -> Vec<ProcessSummary> {
        let mut counted: Vec<_> = (0..)
            .zip(&self.processes)
            .map(|(process, info)| ProcessSummary {
                process,
                parent: info.parent,
                pid: info.pid,
                ..ProcessSummary::default()
            })
            .collect();
        for thread in self.threads.iter().rev() {
            counted[thread.process as usize].name.clone_from(&thread.name);
        }
        let mut pages = vec![PageSet::default(); self.processes.len()];
        // Backing by range start and end, per process. A page is looked up in the most recently
        // reported area that contains it.
        let mut areas: Vec<RangeMap<u64, Backing>> = vec![RangeMap::new(); self.processes.len()];
        let mut copied = 0;
        for event in &self.events {
            let process = self.threads[event.thread as usize].process as usize;
            match event.kind {
                Kind::Map { start, len, backing, .. } | Kind::Area { start, len, backing, .. } => {
                    areas[process].insert(start..start + len, backing);
                }
                Kind::Unmap { start, len } => areas[process].remove(start..start + len),
                Kind::Remap { old, old_len, new, new_len, .. } => {
                    let backing = areas[process].get(&old).copied().unwrap_or(Backing::Anon);
                    if old_len > 0 {
                        areas[process].remove(old..old + old_len);
                    }
                    areas[process].insert(new..new + new_len, backing);
                }
                Kind::Spawn { child, birth } if birth != Birth::Thread => {
                    let to = self.threads[child as usize].process as usize;
                    copied += areas[process].len();
                    if copied <= MAX_AREAS {
                        areas[to] = areas[process].clone();
                    }
                }
                Kind::Exec => areas[process].clear(),
                Kind::Fault { page, present, .. } => {
                    let counts = &mut counted[process];
                    counts.faults += 1;
                    pages[process].insert(page / PAGE_SIZE);
                    if present {
                        counts.present += 1;
                        continue;
                    }
                    // Memory without a report is the heap below the break.
                    let backing = areas[process].get(&page).copied().unwrap_or(Backing::Heap);
                    counts.first_touches += u64::from(matches!(
                        backing,
                        Backing::Anon | Backing::Heap | Backing::Stack
                    ));
                }
                _ => {}
            }
        }
        for (counts, pages) in counted.iter_mut().zip(&pages) {
            counts.pages = pages.len();
        }
        counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Access, Event, ProcessInfo, Prot, StackId, ThreadInfo};

    #[test]
    fn processes_are_counted_apart_and_the_largest_is_first() {
        let first = |page: u64| Kind::first(page * PAGE_SIZE, Access::Write);
        let copy = Kind::Fault {
            page: 9 * PAGE_SIZE,
            access: Access::Write,
            kernel: false,
            present: true,
            instruction: None,
            stack: StackId::NONE,
        };
        let file = Kind::Area {
            start: 20 * PAGE_SIZE,
            len: PAGE_SIZE,
            prot: Prot::READ,
            backing: Backing::File,
        };
        let fork = Kind::Spawn { child: 1, birth: Birth::Fork };
        let events = [
            (0, file),
            (0, first(9)),
            (0, fork),
            (1, copy),
            (1, first(10)),
            (1, first(10)),
            (1, first(20)),
            (2, Kind::Exit),
        ];
        let thread = |process, name: &str| ThreadInfo { process, name: name.to_owned() };
        let event = |(thread, kind)| Event { time_us: 0, thread, kind };
        let trace = Trace {
            processes: [(None, 40), (Some(0), 41), (None, 42)]
                .map(|(parent, pid)| ProcessInfo { parent, pid: Some(pid) })
                .to_vec(),
            threads: vec![thread(0, "server"), thread(1, "worker"), thread(2, "idle")],
            events: events.into_iter().map(event).collect(),
            ..Trace::default()
        };
        let worker = ProcessSummary {
            process: 1,
            parent: Some(0),
            pid: Some(41),
            name: "worker".into(),
            faults: 4,
            pages: 3,
            first_touches: 2,
            present: 1,
        };
        let server = ProcessSummary {
            pid: Some(40),
            name: "server".into(),
            faults: 1,
            pages: 1,
            first_touches: 1,
            ..ProcessSummary::default()
        };
        let mut all = ProcessSummary::default();
        let counted = trace.processes_by_faults();
        counted.iter().for_each(|process| all.add(process));
        assert_eq!(counted, [worker, server]);
        let summary = trace.summary();
        assert_eq!(all.faults as usize, summary.user_faults + summary.kernel_faults);
        assert_eq!(all.pages as usize, summary.distinct_pages);
        assert_eq!(all.first_touches as usize, summary.anon_first_touches);
        assert_eq!(all.present as usize, summary.present_faults);
    }
}
