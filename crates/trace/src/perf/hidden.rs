//! Programs of which the kernel reports only a part.
//!
//! The kernel reports the calls of 64-bit programs. A 32-bit program has other numbers of calls:
//! the tracepoints of single calls omit these calls, and `raw_syscalls` reports numbers that mean
//! other calls. The kernel stops the recording of a program that runs as another user (setuid),
//! unless perf has the privilege to record the program.

use crate::event::{Backing, Birth, Event, Kind, ProcessInfo, ThreadInfo};
use crate::names::listed;

/// The end of the addresses of a 32-bit program.
const NARROW: u64 = 1 << 32;
/// The time after which a program that was executed has had a fault, in microseconds.
const START_US: u64 = 1000;

const NARROW_NOTE: &str = "the kernel does not report the calls of 32-bit programs";
pub(super) const STOPPED_NOTE: &str =
    "the kernel stops the recording of a program that runs as another user";

/// Returns whether `note` is a note about a program of which a part is missing.
pub(crate) fn is_hidden(note: &str) -> bool {
    [NARROW_NOTE, STOPPED_NOTE].iter().any(|start| note.starts_with(start))
}

/// Returns whether `note` is a note about a program without a fault.
pub(super) fn is_stopped(note: &str) -> bool {
    note.starts_with(STOPPED_NOTE)
}

/// A program that a process runs, from an `exec` to the next.
#[derive(Clone, Debug, Default)]
struct Program {
    /// The time of the `exec`, in microseconds; `None` if it precedes the recording.
    executed_us: Option<u64>,
    /// The program has addresses below the end of a 32-bit program.
    low: bool,
    /// The program has addresses above.
    high: bool,
    faults: u64,
    /// The thread that ran the program first.
    thread: u32,
}

impl Program {
    /// Returns whether this is a 32-bit program. A 64-bit program has its stack and the kernel's
    /// code (vdso) at high addresses.
    fn is_narrow(&self) -> bool {
        self.low && !self.high
    }

    fn touch(&mut self, start: u64, len: u64) {
        let high = start.saturating_add(len) > NARROW;
        self.high |= high;
        self.low |= !high;
    }
}

/// The programs of all processes.
#[derive(Debug)]
pub(super) struct Programs {
    /// The programs of each process, in order.
    all: Vec<Vec<Program>>,
    /// The number of the present program of each process, while [`keeps`](Self::keeps) walks.
    at: Vec<usize>,
    /// The time of the last event, in microseconds.
    end_us: u64,
}

impl Programs {
    /// Walks `events`.
    pub(super) fn of(
        events: impl Iterator<Item = Event>,
        threads: &[ThreadInfo],
        processes: &[ProcessInfo],
    ) -> Self {
        let mut all = vec![Vec::<Program>::new(); processes.len()];
        let process = |thread: u32| threads[thread as usize].process as usize;
        let mut end_us = 0;
        for event in events {
            end_us = event.time_us;
            let programs = &mut all[process(event.thread)];
            if programs.is_empty() {
                programs.push(Program { thread: event.thread, ..Program::default() });
            }
            let Some(program) = programs.last_mut() else { continue };
            match event.kind {
                Kind::Exec => programs.push(Program {
                    executed_us: Some(event.time_us),
                    thread: event.thread,
                    ..Program::default()
                }),
                Kind::Spawn { child, birth: Birth::Fork | Birth::Vfork } => {
                    let copy = Program { executed_us: None, thread: child, ..program.clone() };
                    all[process(child)].push(copy);
                }
                Kind::Fault { page, .. } => {
                    program.faults += 1;
                    program.touch(page, 1);
                }
                // The kernel moves the stack of a 32-bit program down from a high address.
                Kind::Area { backing: Backing::Anon, .. } => {}
                Kind::Area { start, len, .. } => program.touch(start, len),
                _ => {}
            }
        }
        let at = vec![0; all.len()];
        Self { all, at, end_us }
    }

    /// Returns whether `event` is what its kind says. The events are given in order.
    pub(super) fn keeps(&mut self, event: &Event, threads: &[ThreadInfo]) -> bool {
        let process = threads[event.thread as usize].process as usize;
        match event.kind {
            Kind::Exec => self.at[process] += 1,
            Kind::Map { .. }
            | Kind::Unmap { .. }
            | Kind::Remap { .. }
            | Kind::Protect { .. }
            | Kind::Advise { .. }
            | Kind::Brk { .. }
            | Kind::Caller { .. } => {
                return !self.all[process].get(self.at[process]).is_some_and(Program::is_narrow);
            }
            _ => {}
        }
        true
    }

    /// Returns the notes about programs of which a part is missing. `calls` is whether calls were
    /// recorded, and `whole` whether every fault was.
    pub(super) fn notes(&self, threads: &[ThreadInfo], calls: bool, whole: bool) -> Vec<String> {
        let mut notes = Vec::new();
        let programs = || self.all.iter().flatten();
        let names = |chosen: &[&Program]| {
            let name = |it: &&Program| threads[it.thread as usize].name.clone();
            listed(chosen.iter().map(name).collect())
        };
        let narrow: Vec<_> = programs().filter(|it| it.is_narrow() && it.faults > 0).collect();
        if calls && !narrow.is_empty() {
            notes.push(format!(
                "{NARROW_NOTE} ({}): a page that such a program unmapped and touched again looks \
                 like a page that was never unmapped, so the reported savings of prefault are too \
                 small. Remedy: record a 64-bit build of the program",
                names(&narrow)
            ));
        }
        // Every program has a fault at its start.
        let last = self.all.iter().filter_map(|programs| programs.last());
        let stopped: Vec<_> = last
            .filter(|it| it.faults == 0)
            .filter(|it| it.executed_us.is_some_and(|at| self.end_us - at >= START_US))
            .collect();
        if whole && !stopped.is_empty() {
            notes.push(format!(
                "{STOPPED_NOTE} (setuid, setgid or capabilities), and no fault of {} was \
                 recorded. Remedy: record as root",
                names(&stopped)
            ));
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Access, Prot};

    const HIGH: u64 = 0x7ffd_0000_0000;

    /// Returns the kinds that remain and the notes of one process that does `kinds`.
    fn of(kinds: &[Kind]) -> (usize, Vec<String>) {
        let threads = [ThreadInfo { process: 0, name: "app".into() }];
        let time_us = |kind: &Kind| if *kind == LATE { 10_000 } else { 0 };
        let event = |kind: &Kind| Event { time_us: time_us(kind), thread: 0, kind: *kind };
        let mut programs = Programs::of(
            kinds.iter().map(event),
            &threads,
            &[ProcessInfo { parent: None, pid: None }],
        );
        let notes = programs.notes(&threads, true, true);
        let kept = kinds.iter().filter(|kind| programs.keeps(&event(kind), &threads));
        (kept.count(), notes)
    }

    fn area(start: u64) -> Kind {
        let (prot, backing) = (Prot::READ | Prot::EXEC, Backing::File);
        Kind::Area { start, len: 0x2000, prot, backing }
    }

    const UNMAP: Kind = Kind::Unmap { start: 0x40_0000, len: 0x1000 };

    /// An event at the end of the recording.
    const LATE: Kind = Kind::Exit;

    fn fault(page: u64) -> Kind {
        Kind::first(page, Access::Read)
    }

    #[test]
    fn calls_of_32_bit_programs_are_dropped_with_a_note() {
        // The first place of the stack, which becomes executable there.
        let (prot, backing) = (Prot::all(), Backing::Anon);
        let stack = Kind::Area { start: HIGH, len: 0x1000, prot, backing };
        let narrow = [Kind::Exec, stack, area(0x804_8000), fault(0xffff_0000)];
        let (kept, notes) = of(&[&narrow[..], &[UNMAP]].concat());
        assert_eq!(kept, 4);
        assert!(notes.len() == 1 && notes[0].contains("32-bit programs (app)"), "{notes:?}");
        let wide = [Kind::Exec, area(0x40_0000), area(HIGH), fault(0x40_0000), UNMAP];
        assert_eq!(of(&wide), (5, vec![]));
    }

    /// A shell of 64 bits executes a program of 32 bits in its own process.
    #[test]
    fn width_belongs_to_a_program_and_not_to_a_process() {
        let wide = [area(0x40_0000), area(HIGH), fault(HIGH), UNMAP];
        let narrow = [Kind::Exec, area(0x804_8000), fault(0x804_8000), UNMAP];
        let (kept, notes) = of(&[&wide[..], &narrow].concat());
        assert_eq!((kept, notes.len()), (7, 1));
    }

    #[test]
    fn executed_program_without_faults_has_a_note() {
        let (_, notes) = of(&[area(HIGH), fault(HIGH), Kind::Exec, LATE]);
        assert!(notes.len() == 1 && notes[0].contains("no fault of app was recorded"), "{notes:?}");
        // The recording ends at the start of the program.
        assert_eq!(of(&[area(HIGH), fault(HIGH), Kind::Exec]).1.len(), 0);
        let runs = [area(HIGH), fault(HIGH), Kind::Exec, area(HIGH), fault(HIGH), LATE];
        assert_eq!(of(&runs).1.len(), 0);
    }
}
