//! Counts of the contents of a trace.

use super::{Access, Kind, Recorded, Trace};
use faultless::PAGE_SIZE;
use std::fmt;

/// Counts of the contents of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(
    missing_docs,
    reason = "names of most fields are sufficient; the other fields are documented"
)]
pub struct Summary {
    pub events: usize,
    pub processes: usize,
    pub threads: usize,
    /// From the first event to the last.
    pub duration_us: u64,
    pub user_faults: usize,
    pub kernel_faults: usize,
    /// Faults known to be writes.
    pub write_faults: usize,
    /// Faults on a present page: copy-on-write and similar.
    pub present_faults: usize,
    /// Faults in kernel mode that were not served.
    pub unserved_faults: usize,
    /// Different pages that faulted, counted per process.
    pub distinct_pages: usize,
    /// Faults on an absent page of private anonymous memory, heap or stack.
    pub anon_first_touches: usize,
    /// Pages that were resident when the recording began, counted per process.
    pub resident_pages: usize,
    pub maps: usize,
    /// Mapping records outside any recorded call.
    pub areas: usize,
    pub unmaps: usize,
    pub remaps: usize,
    pub protects: usize,
    pub advises: usize,
    pub brks: usize,
    pub execs: usize,
    /// Faults of the program for each counted fault.
    pub period: u64,
    /// The recorded kinds. A count of an unrecorded kind is 0, and printed as `-`.
    pub recorded: Recorded,
}

/// A count, or `-` if its kind was not recorded.
struct Known(usize, bool);

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.1 { write!(f, "{}", self.0) } else { f.write_str("-") }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |kind, count| Known(count, self.recorded.contains(kind));
        write!(
            f,
            "{} thread{} in {} process{}, {:.2} s: {} faults in user and {} in kernel mode on {} \
             pages ({} first touches of anonymous memory, {} of present pages); {} mmap, {} munmap, \
             {} mremap, {} mprotect, {} madvise, {} brk, {} exec",
            self.threads,
            if self.threads == 1 { "" } else { "s" },
            self.processes,
            if self.processes == 1 { "" } else { "es" },
            self.duration_us as f64 / 1e6,
            of(Recorded::USER_FAULTS, self.user_faults),
            of(Recorded::KERNEL_FAULTS, self.kernel_faults),
            self.distinct_pages,
            self.anon_first_touches,
            // A source that distinguishes reads from writes also has this.
            of(Recorded::ACCESS, self.present_faults),
            of(Recorded::MMAP, self.maps),
            of(Recorded::MUNMAP, self.unmaps),
            of(Recorded::MREMAP, self.remaps),
            of(Recorded::MPROTECT, self.protects),
            of(Recorded::MADVISE, self.advises),
            of(Recorded::BRK, self.brks),
            self.execs,
        )?;
        if self.resident_pages > 0 {
            write!(f, "; {} pages resident at the start", self.resident_pages)?;
        }
        if self.period > 1 {
            let faults = (self.user_faults + self.kernel_faults) as u64 * self.period;
            write!(f, "; one in {} faults is recorded: about {faults} faults", self.period)?;
        }
        let counted = Recorded::all() - Recorded::AREAS - Recorded::CLONE_FLAGS;
        if self.recorded.contains(counted) { Ok(()) } else { f.write_str(" (-: not recorded)") }
    }
}

impl Trace {
    /// Returns counts of the contents of the trace.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary {
            threads: self.threads.len(),
            processes: self.processes.len(),
            events: self.events.len(),
            duration_us: self.events.last_us(),
            period: self.header.period(),
            recorded: self.header.recorded,
            ..Summary::default()
        };
        let size = u64::from(self.header.page_size).max(PAGE_SIZE);
        for event in &self.events {
            match event.kind {
                Kind::Fault { access, kernel, present, .. } => {
                    *(if kernel {
                        &mut summary.kernel_faults
                    } else {
                        &mut summary.user_faults
                    }) += 1;
                    summary.write_faults += usize::from(access == Access::Write);
                    summary.present_faults += usize::from(present);
                }
                Kind::Map { .. } => summary.maps += 1,
                Kind::Area { .. } => summary.areas += 1,
                Kind::Resident { len, .. } => summary.resident_pages += (len / size) as usize,
                Kind::Unmap { .. } => summary.unmaps += 1,
                Kind::Remap { .. } => summary.remaps += 1,
                Kind::Protect { .. } => summary.protects += 1,
                Kind::Advise { .. } => summary.advises += 1,
                Kind::Brk { .. } => summary.brks += 1,
                Kind::Exec => summary.execs += 1,
                Kind::Caller { .. } | Kind::Spawn { .. } | Kind::Exit => {}
            }
        }
        for process in self.count_processes() {
            summary.distinct_pages += process.pages as usize;
            summary.anon_first_touches += process.first_touches as usize;
        }
        summary.unserved_faults = self.unserved_faults();
        summary
    }

    /// Counts faults that the kernel took and did not serve. Page faults are disabled while the
    /// kernel copies from a program's memory and cannot wait (`write` into the page cache). The
    /// copy fails, often after some attempts, and the page is faulted in before the next copy. Such
    /// a fault is detected by the next fault of its thread: on the same page, which is still absent
    /// although no operation removed it.
    fn unserved_faults(&self) -> usize {
        // By thread: the page of its last event, if the event may be such a fault, and the number
        // of changes of its process at that time.
        let mut last: Vec<Option<(u64, u64)>> = vec![None; self.threads.len()];
        let mut changes = vec![0u64; self.processes.len()];
        let mut count = 0;
        for event in &self.events {
            let thread = event.thread as usize;
            let process = self.threads[thread].process as usize;
            let before = last[thread].take();
            match event.kind {
                Kind::Fault { page, kernel, present: false, .. } => {
                    count += usize::from(before == Some((page, changes[process])));
                    last[thread] = kernel.then_some((page, changes[process]));
                }
                Kind::Fault { .. } | Kind::Caller { .. } | Kind::Spawn { .. } | Kind::Exit => {}
                _ => changes[process] += 1,
            }
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Event, MAX_RESIDENT, ProcessInfo, StackId, ThreadInfo};

    #[test]
    fn resident_pages_are_counted_and_limited() {
        let resident = |pages: u64| Kind::Resident {
            start: PAGE_SIZE,
            len: pages * PAGE_SIZE,
            written: false,
        };
        let trace = Trace::of_one_thread([resident(3), resident(MAX_RESIDENT - 3)]);
        trace.check().unwrap();
        assert_eq!(trace.summary().resident_pages as u64, MAX_RESIDENT);
        assert!(trace.summary().to_string().contains("33554432 pages resident at the start"));
        let trace = Trace::of_one_thread([resident(4), resident(MAX_RESIDENT - 3)]);
        assert_eq!(trace.check().unwrap_err().0, Some(1));
    }

    #[test]
    fn unserved_fault_is_detected_by_the_next_fault() {
        let fault = |kernel, present| Kind::Fault {
            page: PAGE_SIZE,
            access: Access::Read,
            kernel,
            present,
            instruction: None,
            stack: StackId::NONE,
        };
        let (kernel, user) = (fault(true, false), fault(false, false));
        let forget = Kind::Advise { start: PAGE_SIZE, len: PAGE_SIZE, advice: 4 };
        let elsewhere = Kind::Fault {
            page: 2 * PAGE_SIZE,
            access: Access::Read,
            kernel: true,
            present: false,
            instruction: None,
            stack: StackId::NONE,
        };
        for (events, unserved) in [
            (&[(0, kernel), (0, kernel), (0, kernel)][..], 2),
            (&[(0, kernel), (0, user)], 1),
            (&[(0, kernel), (1, forget), (0, kernel)], 0),
            (&[(0, kernel), (1, kernel), (0, elsewhere)], 0),
            (&[(0, kernel), (0, elsewhere), (0, kernel)], 0),
            (&[(0, user), (0, kernel)], 0),
            (&[(0, kernel), (0, fault(true, true))], 0),
        ] {
            let event = |&(thread, kind): &(u32, Kind)| Event { time_us: 0, thread, kind };
            let trace = Trace {
                processes: vec![ProcessInfo { parent: None, pid: None }],
                threads: vec![ThreadInfo { process: 0, name: String::new() }; 2],
                events: events.iter().map(event).collect(),
                ..Trace::default()
            };
            assert_eq!(trace.summary().unserved_faults, unserved, "{events:?}");
        }
    }
}
