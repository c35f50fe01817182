//! The state of processes that ran before a recording: their mappings and resident pages.
//!
//! perf lists the mappings at its start, and records changes of mappings from then on, but calls
//! and faults only later, when its events are enabled. The mappings in between are incomplete, so
//! the state comes from a [`Snapshot`], which is read after the events were enabled.

use super::Running;
use crate::event::{Event, Kind, Trace};
use crate::page_set::PageSet;
use crate::resident::Snapshot;
use faultless::PAGE_SIZE;

/// Adds the state of the processes in `running` to the beginning of `trace`, which began at
/// `start_ns`. `first` are the number and the index of each process that ran before. Omits the
/// recorder's own processes, and processes without a fault or a call.
pub(super) fn add(trace: &mut Trace, first: &[(i32, u32)], start_ns: u64, running: Running<'_>) {
    let micros = |ns: u64| ns.saturating_sub(start_ns) / 1000;
    let enabled_us = micros(running.enabled_ns);
    let active = active(trace, first, running.own);
    let mut known = vec![false; trace.processes.len()];
    let mut state = Vec::new();
    for snapshot in running.snapshots {
        let process = first.iter().find(|(pid, _)| *pid == snapshot.pid);
        let Some(&(_, process)) = process.filter(|(_, process)| active[*process as usize]) else {
            continue;
        };
        let thread = trace.threads.iter().position(|thread| thread.process == process);
        let Some(thread) = thread else { continue };
        known[process as usize] = true;
        let faulted = faulted(trace, process, micros(snapshot.taken_ns));
        let areas = snapshot.areas.iter().map(|area| Kind::Area {
            start: area.range.start,
            len: area.range.end - area.range.start,
            prot: area.prot,
            backing: area.backing,
        });
        let pages = runs(snapshot, &faulted).map(|(first, end, written)| Kind::Resident {
            start: first * PAGE_SIZE,
            len: (end - first) * PAGE_SIZE,
            written,
        });
        let event = |kind| Event { time_us: 0, thread: thread as u32, kind };
        state.extend(areas.chain(pages).map(event));
    }
    let later = trace.events.iter().filter(|event| {
        let process = trace.threads[event.thread as usize].process as usize;
        let early = event.time_us < enabled_us && known[process];
        !(early && matches!(event.kind, Kind::Area { .. } | Kind::Exec))
    });
    trace.events = state.into_iter().chain(later).collect();
    keep(trace, &active);
}

/// Returns for each process whether it has a fault or a call, and is not one of `own`.
fn active(trace: &Trace, first: &[(i32, u32)], own: &[i32]) -> Vec<bool> {
    let mut active = vec![false; trace.processes.len()];
    for event in &trace.events {
        // The kernel reports areas, programs and ends of all processes.
        let elsewhere =
            matches!(event.kind, Kind::Area { .. } | Kind::Spawn { .. } | Kind::Exec | Kind::Exit);
        active[trace.threads[event.thread as usize].process as usize] |= !elsewhere;
    }
    for (pid, process) in first {
        active[*process as usize] &= !own.contains(pid);
    }
    active
}

/// Returns the pages of `process` with a fault on an absent page up to the time `until`, in
/// microseconds: they became resident after the start.
fn faulted(trace: &Trace, process: u32, until: u64) -> PageSet {
    let mut pages = PageSet::default();
    let small = trace.small_pages();
    for event in trace.events.iter().take_while(|event| event.time_us <= until) {
        let own = trace.threads[event.thread as usize].process == process;
        if let Kind::Fault { page, present: false, .. } = event.kind
            && own
        {
            let first = page / PAGE_SIZE;
            (first..first + small).for_each(|page| _ = pages.insert(page));
        }
    }
    pages
}

/// Returns the runs of pages in `snapshot` that are not in `faulted`: first page, end, written.
fn runs(snapshot: &Snapshot, faulted: &PageSet) -> impl Iterator<Item = (u64, u64, bool)> {
    snapshot.pages.iter().flat_map(move |(run, written)| {
        let mut parts = Vec::new();
        let mut first = run.start;
        for page in run.clone().filter(|page| faulted.contains(*page)) {
            parts.push((first, page, *written));
            first = page + 1;
        }
        parts.push((first, run.end, *written));
        parts.into_iter().filter(|(first, end, _)| first < end)
    })
}

/// Removes the processes that are not `active`, with their threads and events.
fn keep(trace: &mut Trace, active: &[bool]) {
    let numbers = |keeps: &mut dyn Iterator<Item = bool>| {
        let mut next = 0u32;
        let number = |keeps: bool| {
            next += u32::from(keeps);
            keeps.then(|| next - 1)
        };
        keeps.map(number).collect::<Vec<Option<u32>>>()
    };
    let processes = numbers(&mut active.iter().copied());
    let of = |thread: u32| active[trace.threads[thread as usize].process as usize];
    let threads = numbers(&mut (0..trace.threads.len() as u32).map(of));
    trace.events.retain_mut(|event| {
        let Some(thread) = threads[event.thread as usize] else { return false };
        event.thread = thread;
        if let Kind::Spawn { child, .. } = &mut event.kind {
            match threads[*child as usize] {
                Some(number) => *child = number,
                None => return false,
            }
        }
        true
    });
    let mut number = 0..;
    trace.threads.retain_mut(|thread| {
        let Some(process) = processes[thread.process as usize] else { return false };
        thread.process = process;
        true
    });
    trace.processes.retain(|_| number.next().is_some_and(|at: usize| active[at]));
    for process in &mut trace.processes {
        process.parent = process.parent.and_then(|parent| processes[parent as usize]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Access, Backing, Birth, Header, ProcessInfo, Prot, ThreadInfo};
    use crate::resident::Area;

    const P: u64 = PAGE_SIZE;
    const RUNNING: Running<'_> = Running { snapshots: &[], enabled_ns: 0, own: &[] };

    /// Returns a trace of three processes with a thread each, and a second thread of the second.
    fn trace(events: &[(u64, u32, Kind)]) -> Trace {
        let thread = |process| ThreadInfo { process, name: format!("p{process}") };
        Trace {
            header: Header { page_size: P as u32, ..Header::default() },
            processes: [None, None, Some(1)]
                .map(|parent| ProcessInfo { parent, pid: None })
                .to_vec(),
            threads: [0, 1, 2, 1].map(thread).to_vec(),
            events: events
                .iter()
                .map(|&(time_us, thread, kind)| Event { time_us, thread, kind })
                .collect(),
            ..Trace::default()
        }
    }

    fn area(pages: u64) -> Kind {
        let (prot, backing) = (Prot::READ, Backing::Anon);
        Kind::Area { start: 0x10_0000, len: pages * P, prot, backing }
    }

    fn snapshot(pid: i32, taken_ns: u64) -> Snapshot {
        let range = 0x10_0000..0x10_0000 + 64 * P;
        let areas = vec![Area { range, prot: Prot::READ, backing: Backing::Anon }];
        let pages = vec![(0x100..0x108, true), (0x110..0x111, false)];
        Snapshot { pid, taken_ns, areas, pages, ..Snapshot::default() }
    }

    /// A page that faulted before the pages were read became resident after the start, and a page
    /// that faulted later was resident at the start, and has been reclaimed.
    #[test]
    fn pages_that_faulted_before_the_snapshot_are_not_resident() {
        let fault = |page: u64| Kind::first(page * P, Access::Write);
        let mut trace = trace(&[
            (0, 1, area(2)),
            (1, 1, area(3)),
            (1, 1, Kind::Exec),
            (2, 1, fault(0x102)),
            (4, 1, area(5)),
            (5, 3, fault(0x107)),
            (9, 1, fault(0x103)),
        ]);
        let snapshots = [snapshot(7, 1_005_000), snapshot(8, 1_005_000)];
        let running = Running { snapshots: &snapshots, enabled_ns: 1_002_000, own: &[] };
        add(&mut trace, &[(7, 0), (8, 1)], 1_000_000, running);
        let resident = |first: u64, pages: u64, written| Kind::Resident {
            start: first * P,
            len: pages * P,
            written,
        };
        let kinds: Vec<_> = trace.events.iter().map(|event| event.kind).collect();
        let state = [
            area(64),
            resident(0x100, 2, true),
            resident(0x103, 4, true),
            resident(0x110, 1, false),
        ];
        assert_eq!(kinds[..4], state);
        // The mappings that perf listed before its events were enabled are replaced.
        assert_eq!(kinds[4..], [fault(0x102), area(5), fault(0x107), fault(0x103)]);
        trace.check().unwrap();
    }

    /// Faults of other processes, and faults on present pages, made no page resident.
    #[test]
    fn faults_of_others_and_on_present_pages_change_no_state() {
        let write = |page: u64, is_present| {
            let mut kind = Kind::first(page * P, Access::Write);
            if let Kind::Fault { present, .. } = &mut kind {
                *present = is_present;
            }
            kind
        };
        let mut trace = trace(&[
            (2, 1, write(0x101, true)),
            (3, 2, write(0x103, false)),
            (4, 1, write(0x105, false)),
        ]);
        let snapshots = [snapshot(8, 1_005_000)];
        let running = Running { snapshots: &snapshots, enabled_ns: 1_000_000, own: &[] };
        add(&mut trace, &[(8, 1)], 1_000_000, running);
        let resident = trace.events.iter().filter_map(|event| match event.kind {
            Kind::Resident { start, len, .. } => Some((start / P, len / P)),
            _ => None,
        });
        assert_eq!(resident.collect::<Vec<_>>(), [(0x100, 5), (0x106, 2), (0x110, 1)]);
    }

    /// A fault on a base page of 16 KiB makes four pages of 4 KiB resident.
    #[test]
    fn fault_on_a_large_base_page_covers_all_its_pages() {
        let mut trace = trace(&[(2, 1, Kind::first(0x104 * P, Access::Write))]);
        trace.header.page_size = 4 * P as u32;
        let faulted = faulted(&trace, 1, 5);
        let pages = (0x100..0x110).filter(|page| faulted.contains(*page));
        assert_eq!(pages.collect::<Vec<u64>>(), [0x104, 0x105, 0x106, 0x107]);
    }

    /// The state of a process comes from perf if the pages of the process cannot be read.
    #[test]
    fn process_without_a_snapshot_keeps_its_early_mappings() {
        let fault = Kind::first(0x10_0000, Access::Write);
        let areas = [(0, 1, area(1)), (0, 2, area(2))];
        let events = [areas[0], areas[1], (1, 2, Kind::Exec), (5, 1, fault), (6, 2, fault)];
        let mut trace = trace(&events);
        let snapshots = [snapshot(8, 1_001_000)];
        let running = Running { snapshots: &snapshots, enabled_ns: 1_003_000, own: &[] };
        add(&mut trace, &[(8, 1), (9, 2)], 1_000_000, running);
        let of = |number| {
            let own = |event: &Event| {
                trace.processes[trace.threads[event.thread as usize].process as usize].parent
                    == number
            };
            trace.events.iter().filter(own).map(|event| event.kind).collect::<Vec<_>>()
        };
        // The first process has no event, so it is omitted.
        assert_eq!(trace.processes.len(), 2);
        assert_eq!(of(Some(0)), [area(2), Kind::Exec, fault]);
        assert_eq!(of(None)[0], area(64), "the snapshot replaces the early mapping");
        assert!(!of(None).contains(&area(1)));
    }

    #[test]
    fn processes_without_events_and_the_recorder_are_omitted() {
        let fault = Kind::first(0x10_0000, Access::Write);
        let spawn = Kind::Spawn { child: 2, birth: Birth::Fork };
        let events =
            [(0, 0, area(1)), (0, 1, area(1)), (1, 1, spawn), (2, 2, fault), (3, 1, fault)];
        let first = [(7, 0), (8, 1)];
        let mut idle = trace(&events);
        add(&mut idle, &first, 0, RUNNING);
        assert_eq!((idle.processes.len(), idle.threads.len(), idle.events.len()), (2, 3, 4));
        assert_eq!(idle.processes[1].parent, Some(0));
        assert_eq!(
            idle.events.iter().nth(1).unwrap().kind,
            Kind::Spawn { child: 1, birth: Birth::Fork }
        );
        idle.check().unwrap();
        let mut own = trace(&events);
        add(&mut own, &first, 0, Running { own: &[8], ..RUNNING });
        assert_eq!((own.processes.len(), own.events.len()), (1, 1));
        assert_eq!((own.threads[0].name.as_str(), own.processes[0].parent), ("p2", None));
        own.check().unwrap();
    }
}
