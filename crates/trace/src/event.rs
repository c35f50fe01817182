//! The model of a recording: threads and processes, and their memory operations in order of time.
//!
//! Contains successful operations only, because a call that the kernel refused did not change
//! memory. The time of a call is the time from which others can see its effect: the return of calls
//! that add memory (`mmap`, `brk`, `mremap`), and the entry of calls that remove memory (`munmap`,
//! `madvise`).

use crate::page_set::PageSet;
use bitflags::bitflags;
use faultless::PAGE_SIZE;
use rangemap::RangeMap;
use std::fmt;

/// The most events in a recording, which limits the memory that a hostile file can use.
pub const MAX_EVENTS: usize = 16 << 20;
/// The most threads in a recording.
pub const MAX_THREADS: usize = 1 << 16;
/// The most pages that are resident when a recording begins: 128 GiB.
pub const MAX_RESIDENT: u64 = 32 << 20;
/// The most areas to which copies of address spaces (`fork`) may add up in one recording.
pub const MAX_AREAS: usize = 4 << 20;

bitflags! {
    /// The kinds of events in a recording. Missing kinds must be assumed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Recorded: u32 {
        /// Faults taken in user mode.
        const USER_FAULTS = 1;
        /// Faults on user memory taken in kernel mode.
        const KERNEL_FAULTS = 1 << 1;
        /// Whether a fault was a read, a write or an instruction fetch.
        const ACCESS = 1 << 2;
        /// `mmap` calls.
        const MMAP = 1 << 3;
        /// `munmap` calls.
        const MUNMAP = 1 << 4;
        /// `mremap` calls.
        const MREMAP = 1 << 5;
        /// `mprotect` calls.
        const MPROTECT = 1 << 6;
        /// `madvise` calls.
        const MADVISE = 1 << 7;
        /// `brk` calls.
        const BRK = 1 << 8;
        /// Mapping records: each area as seen by the kernel when the area is created or changes
        /// protection.
        const AREAS = 1 << 9;
        /// The flags of `clone`, which distinguish `vfork` from `fork`.
        const CLONE_FLAGS = 1 << 10;
        /// The offset in its page of the instruction of each fault.
        const INSTRUCTIONS = 1 << 11;
    }
}

impl Recorded {
    /// Each kind of event, with its description in replay messages.
    pub const NAMES: [(Self, &str); 11] = [
        (Self::USER_FAULTS, "faults in user mode"),
        (Self::KERNEL_FAULTS, "faults in kernel mode"),
        (Self::ACCESS, "the kind of access of a fault"),
        (Self::MMAP, "mmap calls"),
        (Self::MUNMAP, "munmap calls"),
        (Self::MREMAP, "mremap calls"),
        (Self::MPROTECT, "mprotect calls"),
        (Self::MADVISE, "madvise calls"),
        (Self::BRK, "brk calls"),
        (Self::AREAS, "mapping records"),
        (Self::CLONE_FLAGS, "the flags of clone"),
    ];
}

bitflags! {
    /// The permissions of an area. The values are Linux's `PROT_*`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default, PartialOrd, Ord, Hash)]
    pub struct Prot: u8 {
        /// Loads.
        const READ = 1;
        /// Stores.
        const WRITE = 2;
        /// Instruction fetches.
        const EXEC = 4;
    }
}

/// The kind of access of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Not recorded.
    Unknown,
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Exec,
}

/// The memory behind an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Backing {
    /// Private anonymous memory.
    Anon,
    /// Shared anonymous memory.
    SharedAnon,
    /// A file, mapped privately.
    File,
    /// A file, mapped shared.
    SharedFile,
    /// The area below the program break.
    Heap,
    /// The main thread's stack, which grows down.
    Stack,
    /// The kernel's own areas: vdso, vvar.
    Special,
}

impl Backing {
    /// Returns the backing of an area that the kernel reports under the name `name`.
    pub(crate) fn named(name: &[u8], shared: bool) -> Self {
        match name {
            b"[heap]" => Self::Heap,
            b"[stack]" => Self::Stack,
            b"//anon" | b"" => Self::Anon,
            // Shared anonymous memory, System V's segments, and memfd.
            _ if [&b"/dev/zero"[..], b"/SYSV", b"/memfd:"]
                .iter()
                .any(|it| name.starts_with(it)) =>
            {
                if shared {
                    Self::SharedAnon
                } else {
                    Self::Anon
                }
            }
            _ if name.starts_with(b"[anon") => Self::Anon,
            [b'[', ..] => Self::Special,
            _ if shared => Self::SharedFile,
            _ => Self::File,
        }
    }
}

/// The way in which a thread was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Birth {
    /// Another thread of the same process.
    Thread,
    /// A new process with a copy of its parent's memory.
    Fork,
    /// A new process that shares its parent's memory until it executes a program or exits.
    Vfork,
}

/// An event. Addresses and lengths are in bytes, and multiples of the page size except for `Brk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A page fault.
    Fault {
        /// The address of the page.
        page: u64,
        /// The access of the faulting instruction.
        access: Access,
        /// Taken in kernel mode, on user memory (`read` into a fresh buffer).
        kernel: bool,
        /// The page was present: the fault is about permission, as in copy-on-write.
        present: bool,
        /// The address of the faulting instruction modulo the page size, if recorded. Programs are
        /// loaded at different pages each time. The offset is the same in every process, and
        /// reveals no information about the host.
        instruction: Option<u16>,
    },
    /// `mmap` returned this area.
    Map {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
        /// Permissions.
        prot: Prot,
        /// Linux's `MAP_*` flags as passed.
        flags: u32,
        /// The memory behind the area.
        backing: Backing,
    },
    /// The kernel reported this state of an area outside any recorded call: a program was loaded,
    /// the stack grew, or a call is missing in the recording.
    Area {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
        /// Permissions.
        prot: Prot,
        /// The memory behind the area.
        backing: Backing,
    },
    /// Pages that were resident when the recording began.
    Resident {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
        /// The process has stored to the pages: they are anonymous pages of this process alone.
        /// Pages of files, pages shared with other processes and the zero page are not.
        written: bool,
    },
    /// `munmap`.
    Unmap {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
    },
    /// `mremap`.
    Remap {
        /// First byte of the old range.
        old: u64,
        /// Bytes of the old range.
        old_len: u64,
        /// First byte of the new range.
        new: u64,
        /// Bytes of the new range.
        new_len: u64,
        /// Linux's `MREMAP_*` flags as passed.
        flags: u32,
    },
    /// `mprotect`.
    Protect {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
        /// Permissions from now on.
        prot: Prot,
    },
    /// `madvise`.
    Advise {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
        /// Linux's `MADV_*` number.
        advice: u32,
    },
    /// `brk` returned this program break; any byte address.
    Brk {
        /// The break.
        end: u64,
    },
    /// A thread or process began.
    Spawn {
        /// The index of the child in [`Trace::threads`].
        child: u32,
        /// The memory shared with its parent.
        birth: Birth,
    },
    /// The process executed a program, and starts again with an empty address space.
    Exec,
    /// The thread ended.
    Exit,
}

/// An operation of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Microseconds since the recording began.
    pub time_us: u64,
    /// The index of the thread in [`Trace::threads`].
    pub thread: u32,
    /// The operation.
    pub kind: Kind,
}

/// The conditions of a recording.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Header {
    /// The recorded program.
    pub program: String,
    /// A description of the recording's origin; empty if unknown.
    pub made: String,
    /// Bytes in a page.
    pub page_size: u32,
    /// The kernel's release; empty if unknown.
    pub kernel: String,
    /// The mode of transparent huge pages for the program; empty if unknown.
    pub thp: String,
    /// The number of online CPUs; 0 if unknown.
    pub cpus: u32,
    /// The recorded kinds of events.
    pub recorded: Recorded,
    /// Events lost during the recording.
    pub lost: u64,
    /// Remarks of the reader of the original recording.
    pub notes: Vec<String>,
}

/// A thread of the recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadInfo {
    /// The index of its process in [`Trace::processes`].
    pub process: u32,
    /// The last name of the thread.
    pub name: String,
}

/// A process of the recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    /// The index of the process that created it, if recorded.
    pub parent: Option<u32>,
}

/// A recording.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Trace {
    /// The conditions of the recording.
    pub header: Header,
    /// The processes.
    pub processes: Vec<ProcessInfo>,
    /// The threads of all processes.
    pub threads: Vec<ThreadInfo>,
    /// The operations of the threads, in order of time.
    pub events: Vec<Event>,
}

impl Header {
    /// Returns a warning if events were lost during the recording.
    pub fn loss(&self) -> Option<String> {
        let count = self.lost;
        let events = if count == 1 { "event was" } else { "events were" };
        (count > 0)
            .then(|| format!("warning: {count} {events} lost while recording: faults are missing"))
    }
}

#[cfg(test)]
impl Kind {
    /// Returns a fault of a program on the absent page at `page`.
    pub(crate) const fn first(page: u64, access: Access) -> Self {
        Self::Fault { page, access, kernel: false, present: false, instruction: None }
    }
}

impl Trace {
    /// Returns a trace of events of one thread of one process, all at the same time.
    #[cfg(test)]
    pub(crate) fn of_one_thread(events: impl IntoIterator<Item = Kind>) -> Self {
        let event = |kind| Event { time_us: 0, thread: 0, kind };
        Self {
            header: Header { page_size: PAGE_SIZE as u32, ..Header::default() },
            processes: vec![ProcessInfo { parent: None }],
            threads: vec![ThreadInfo { process: 0, name: String::new() }],
            events: events.into_iter().map(event).collect(),
        }
    }

    /// Checks the assumptions of every reader of a trace: indices are in range, time does not run
    /// backwards, each thread starts at most once, a thread has no event before its start or after
    /// its exit, and ranges are aligned and do not wrap.
    ///
    /// # Errors
    /// The number of the offending event, or `None` if a table is wrong, and the description of the
    /// error.
    pub fn check(&self) -> Result<(), (Option<u64>, String)> {
        if u64::from(self.header.page_size) != PAGE_SIZE {
            return Err((None, format!("pages of {} bytes; want 4096", self.header.page_size)));
        }
        if self.threads.len() > MAX_THREADS || self.events.len() > MAX_EVENTS {
            return Err((None, "more threads or events than the limit of a recording".into()));
        }
        let processes = self.processes.len() as u32;
        if self.threads.iter().any(|thread| thread.process >= processes)
            || self.processes.iter().any(|process| process.parent.is_some_and(|p| p >= processes))
        {
            return Err((None, "a thread or process names a process that does not exist".into()));
        }
        let mut seen = vec![Seen::Never; self.threads.len()];
        let (mut now, mut resident) = (0, 0u64);
        for (number, event) in self.events.iter().enumerate() {
            let wrong = |reason: &str| Err((Some(number as u64), reason.to_owned()));
            let Some(state) = seen.get_mut(event.thread as usize) else {
                return wrong("the thread is not in the table");
            };
            if *state == Seen::Gone {
                return wrong("the thread has exited");
            }
            *state = if event.kind == Kind::Exit { Seen::Gone } else { Seen::Alive };
            if event.time_us < now {
                return wrong("time runs backwards");
            }
            now = event.time_us;
            if let Kind::Spawn { child, birth } = event.kind {
                match seen.get_mut(child as usize) {
                    None => return wrong("the new thread is not in the table"),
                    Some(state @ Seen::Never) => *state = Seen::Alive,
                    Some(_) => return wrong("the new thread already exists"),
                }
                let of = |thread: u32| self.threads[thread as usize].process;
                if (of(child) == of(event.thread)) != (birth == Birth::Thread) {
                    return wrong("the new thread is in the wrong process");
                }
            }
            if let Kind::Fault { instruction: Some(place), .. } = event.kind {
                if !self.header.recorded.contains(Recorded::INSTRUCTIONS) {
                    return wrong(
                        "the event has an instruction, but the header declares a recording without instructions",
                    );
                }
                if u64::from(place) >= PAGE_SIZE {
                    return wrong("the instruction lies beyond the end of a page");
                }
            }
            if !event.kind.is_well_formed() {
                return wrong("a range is not aligned, is empty or wraps");
            }
            if let Kind::Resident { len, .. } = event.kind {
                resident = resident.saturating_add(len / PAGE_SIZE);
                if resident > MAX_RESIDENT {
                    return wrong("more resident pages than the limit of a recording");
                }
            }
        }
        Ok(())
    }

    /// Returns counts of the contents of the trace.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary {
            threads: self.threads.len(),
            processes: self.processes.len(),
            events: self.events.len(),
            duration_us: self.events.last().map_or(0, |event| event.time_us),
            recorded: self.header.recorded,
            ..Summary::default()
        };
        let mut pages = vec![PageSet::default(); self.processes.len()];
        for event in &self.events {
            match event.kind {
                Kind::Fault { page, access, kernel, present, .. } => {
                    *(if kernel {
                        &mut summary.kernel_faults
                    } else {
                        &mut summary.user_faults
                    }) += 1;
                    summary.write_faults += usize::from(access == Access::Write);
                    summary.present_faults += usize::from(present);
                    let process = self.threads[event.thread as usize].process;
                    pages[process as usize].insert(page / PAGE_SIZE);
                }
                Kind::Map { .. } => summary.maps += 1,
                Kind::Area { .. } => summary.areas += 1,
                Kind::Resident { len, .. } => summary.resident_pages += (len / PAGE_SIZE) as usize,
                Kind::Unmap { .. } => summary.unmaps += 1,
                Kind::Remap { .. } => summary.remaps += 1,
                Kind::Protect { .. } => summary.protects += 1,
                Kind::Advise { .. } => summary.advises += 1,
                Kind::Brk { .. } => summary.brks += 1,
                Kind::Exec => summary.execs += 1,
                Kind::Spawn { .. } | Kind::Exit => {}
            }
        }
        summary.distinct_pages = pages.iter().map(|pages| pages.len() as usize).sum();
        summary.unserved_faults = self.unserved_faults();
        summary.anon_first_touches = self.anon_first_touches();
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
                Kind::Fault { .. } | Kind::Spawn { .. } | Kind::Exit => {}
                _ => changes[process] += 1,
            }
        }
        count
    }

    /// Counts faults on absent pages of private anonymous memory, heap or stack.
    fn anon_first_touches(&self) -> usize {
        // Backing by range start and end, per process. A page is looked up in the most recently
        // reported area that contains it.
        let mut areas: Vec<RangeMap<u64, Backing>> = vec![RangeMap::new(); self.processes.len()];
        let (mut count, mut copied) = (0, 0);
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
                Kind::Fault { page, present: false, .. } => {
                    // Memory without a report is the heap below the break.
                    let backing = areas[process].get(&page).copied().unwrap_or(Backing::Heap);
                    count += usize::from(matches!(
                        backing,
                        Backing::Anon | Backing::Heap | Backing::Stack
                    ));
                }
                _ => {}
            }
        }
        count
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Seen {
    Never,
    Alive,
    Gone,
}

impl Kind {
    /// Returns whether ranges are aligned, not empty and do not wrap.
    fn is_well_formed(&self) -> bool {
        let fits = |start: u64, len: u64| {
            start.is_multiple_of(PAGE_SIZE)
                && len.is_multiple_of(PAGE_SIZE)
                && len > 0
                && start.checked_add(len).is_some()
        };
        match *self {
            Self::Fault { page, .. } => page.is_multiple_of(PAGE_SIZE),
            Self::Map { start, len, .. }
            | Self::Area { start, len, .. }
            | Self::Resident { start, len, .. }
            | Self::Unmap { start, len }
            | Self::Protect { start, len, .. }
            | Self::Advise { start, len, .. } => fits(start, len),
            // An old length of zero duplicates a shared mapping.
            Self::Remap { old, old_len, new, new_len, .. } => {
                fits(new, new_len) && (fits(old, old_len) || (old_len == 0 && fits(old, PAGE_SIZE)))
            }
            Self::Brk { .. } | Self::Spawn { .. } | Self::Exec | Self::Exit => true,
        }
    }
}

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
        let counted = Recorded::all() - Recorded::AREAS - Recorded::CLONE_FLAGS;
        if self.recorded.contains(counted) { Ok(()) } else { f.write_str(" (-: not recorded)") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        };
        let (kernel, user) = (fault(true, false), fault(false, false));
        let forget = Kind::Advise { start: PAGE_SIZE, len: PAGE_SIZE, advice: 4 };
        let elsewhere = Kind::Fault {
            page: 2 * PAGE_SIZE,
            access: Access::Read,
            kernel: true,
            present: false,
            instruction: None,
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
                processes: vec![ProcessInfo { parent: None }],
                threads: vec![ThreadInfo { process: 0, name: String::new() }; 2],
                events: events.iter().map(event).collect(),
                ..Trace::default()
            };
            assert_eq!(trace.summary().unserved_faults, unserved, "{events:?}");
        }
    }
}
