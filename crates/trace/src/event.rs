//! The model of a recording: who ran, and what each did to memory, in order of time.
//!
//! Only what succeeded is here: a call that the kernel refused left memory as it was. Calls stand at
//! the moment from which others can see them: what gives memory (`mmap`, `brk`, `mremap`) where it
//! returns, what takes it away (`munmap`, `madvise`) where it enters.

use crate::page_set::PageSet;
use bitflags::bitflags;
use faultless::PAGE_SIZE;
use rangemap::RangeMap;
use std::fmt;

/// The most events in a recording; a bound on what a hostile file can make us hold.
pub const MAX_EVENTS: usize = 16 << 20;
/// The most threads in a recording.
pub const MAX_THREADS: usize = 1 << 16;
/// The most areas that copies of address spaces (`fork`) may add up to in one recording.
pub const MAX_AREAS: usize = 4 << 20;

bitflags! {
    /// Which events a recording was made with; what is missing must be assumed.
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
        /// Mapping records: each area as the kernel sees it when it comes or changes protection.
        const AREAS = 1 << 9;
        /// The flags of `clone`: tells `vfork` from `fork`.
        const CLONE_FLAGS = 1 << 10;
        /// Where in its page the instruction lies that each fault was taken on.
        const INSTRUCTIONS = 1 << 11;
    }
}

impl Recorded {
    /// Each kind of event with the words in which replay names it.
    pub const NAMES: [(Self, &str); 11] = [
        (Self::USER_FAULTS, "faults in user mode"),
        (Self::KERNEL_FAULTS, "faults in kernel mode"),
        (Self::ACCESS, "whether a fault read or wrote"),
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
    /// What an area permits; the values are Linux's `PROT_*`.
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

/// What kind of access a fault was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// The recording does not say.
    Unknown,
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Exec,
}

/// What lies behind an area.
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
    /// The kernel's own: vdso, vvar.
    Special,
}

/// How a thread came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Birth {
    /// Another thread of the same process.
    Thread,
    /// A new process with a copy of its parent's memory.
    Fork,
    /// A new process that shares its parent's memory until it executes a program or exits.
    Vfork,
}

/// One thing that happened. Addresses and lengths are in bytes; all but `Brk`'s are multiples of
/// the page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A page fault.
    Fault {
        /// The address of the page.
        page: u64,
        /// What the faulting instruction wanted.
        access: Access,
        /// Taken in kernel mode, on user memory (`read` into a fresh buffer).
        kernel: bool,
        /// The page was present: the fault is about permission, as in copy-on-write.
        present: bool,
        /// The instruction that faulted, by its address modulo the page size; where the recording says it. Programs are
        /// loaded at other pages each time: this is the same in every process, and tells nothing of the host.
        instruction: Option<u16>,
    },
    /// `mmap` gave this area.
    Map {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
        /// Permissions.
        prot: Prot,
        /// Linux's `MAP_*` flags as passed.
        flags: u32,
        /// What lies behind it.
        backing: Backing,
    },
    /// The kernel reported that an area now looks like this, outside any recorded call: a program
    /// was loaded, the stack grew, or a call was made that the recording leaves out.
    Area {
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
        /// Permissions.
        prot: Prot,
        /// What lies behind it.
        backing: Backing,
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
        /// Its index in [`Trace::threads`].
        child: u32,
        /// What it shares with its parent.
        birth: Birth,
    },
    /// The process executed a program: it starts again with an empty address space.
    Exec,
    /// The thread ended.
    Exit,
}

/// Something that a thread did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Microseconds since the recording began.
    pub time_us: u64,
    /// The index of the thread in [`Trace::threads`].
    pub thread: u32,
    /// What it did.
    pub kind: Kind,
}

/// How a recording was made.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Header {
    /// The recorded program.
    pub program: String,
    /// How the recording was made, in words; empty where that is not known.
    pub made: String,
    /// Bytes in a page.
    pub page_size: u32,
    /// The kernel's release; empty where it is not known.
    pub kernel: String,
    /// The mode of transparent huge pages for the program; empty where it is not known.
    pub thp: String,
    /// CPUs that were online; 0 where it is not known.
    pub cpus: u32,
    /// The events it was made with.
    pub recorded: Recorded,
    /// Events that were lost while recording.
    pub lost: u64,
    /// What the reader of the original recording remarked.
    pub notes: Vec<String>,
}

/// A thread of the recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadInfo {
    /// The index of its process in [`Trace::processes`].
    pub process: u32,
    /// Its last name.
    pub name: String,
}

/// A process of the recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    /// The index of the process that began it, where the recording saw that.
    pub parent: Option<u32>,
}

/// A recording.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Trace {
    /// How it was made.
    pub header: Header,
    /// The processes.
    pub processes: Vec<ProcessInfo>,
    /// The threads of all processes.
    pub threads: Vec<ThreadInfo>,
    /// What they did, in order of time.
    pub events: Vec<Event>,
}

impl Header {
    /// A warning if events were lost while recording.
    pub fn loss(&self) -> Option<String> {
        let count = self.lost;
        let events = if count == 1 { "event was" } else { "events were" };
        (count > 0)
            .then(|| format!("warning: {count} {events} lost while recording: faults are missing"))
    }
}

#[cfg(test)]
impl Kind {
    /// A fault of a program on the page at `page`, which is not there.
    pub(crate) const fn first(page: u64, access: Access) -> Self {
        Self::Fault { page, access, kernel: false, present: false, instruction: None }
    }
}

impl Trace {
    /// What one thread of one process did, all at once.
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

    /// Checks what every reader of a trace relies on: indices in range, time not running backwards,
    /// each thread begun at most once, nothing done before that or after its exit, ranges aligned
    /// and not wrapping.
    ///
    /// # Errors
    /// The number of the offending event, or `None` where a table is at fault, and what is wrong.
    pub fn check(&self) -> Result<(), (Option<u64>, String)> {
        if u64::from(self.header.page_size) != PAGE_SIZE {
            return Err((None, format!("pages of {} bytes; want 4096", self.header.page_size)));
        }
        if self.threads.len() > MAX_THREADS || self.events.len() > MAX_EVENTS {
            return Err((None, "more threads or events than a recording may have".into()));
        }
        let processes = self.processes.len() as u32;
        if self.threads.iter().any(|thread| thread.process >= processes)
            || self.processes.iter().any(|process| process.parent.is_some_and(|p| p >= processes))
        {
            return Err((None, "a thread or process names a process that is not there".into()));
        }
        let mut seen = vec![Seen::Never; self.threads.len()];
        let mut now = 0;
        for (number, event) in self.events.iter().enumerate() {
            let wrong = |reason: &str| Err((Some(number as u64), reason.to_owned()));
            let Some(state) = seen.get_mut(event.thread as usize) else {
                return wrong("its thread is not in the table");
            };
            if *state == Seen::Gone {
                return wrong("its thread has exited");
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
                    Some(_) => return wrong("the new thread was there before"),
                }
                let of = |thread: u32| self.threads[thread as usize].process;
                if (of(child) == of(event.thread)) != (birth == Birth::Thread) {
                    return wrong("the new thread is in the wrong process");
                }
            }
            if let Kind::Fault { instruction: Some(place), .. } = event.kind {
                if !self.header.recorded.contains(Recorded::INSTRUCTIONS) {
                    return wrong(
                        "it has an instruction, and the header says that none were recorded",
                    );
                }
                if u64::from(place) >= PAGE_SIZE {
                    return wrong("its instruction lies beyond the end of a page");
                }
            }
            if !event.kind.is_well_formed() {
                return wrong("a range is not aligned, is empty or wraps");
            }
        }
        Ok(())
    }

    /// Counts of what is in the trace.
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

    /// Faults that the kernel took and did not serve: where it copies from a program's memory while it cannot wait
    /// (`write` into the page cache), page faults are disabled. The copy gives up, often after some attempts, and the page
    /// is faulted in before the next. Such a fault is seen by the next one of its thread: on the same page, which is
    /// still absent although nothing took it away.
    fn unserved_faults(&self) -> usize {
        // By thread: the page of its last event, if that may be such a fault, and how many changes its process had
        // seen by then.
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

    /// Faults on a page that was not present in private anonymous memory, heap or stack.
    fn anon_first_touches(&self) -> usize {
        // Backing by range start and end, per process; a page is looked up in the area that was
        // reported last over it.
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
                    // What no report covers is the heap below the break.
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
    /// Whether ranges are aligned, not empty and do not wrap.
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

/// Counts of what is in a trace.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names say it; the few that do not are documented")]
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
    /// Faults on a present page: copy-on-write and the like.
    pub present_faults: usize,
    /// Of those in kernel mode, faults that were not served.
    pub unserved_faults: usize,
    /// Different pages that faulted, counted per process.
    pub distinct_pages: usize,
    /// Faults on an absent page of private anonymous memory, heap or stack.
    pub anon_first_touches: usize,
    pub maps: usize,
    /// Mapping records outside any recorded call.
    pub areas: usize,
    pub unmaps: usize,
    pub remaps: usize,
    pub protects: usize,
    pub advises: usize,
    pub brks: usize,
    pub execs: usize,
    /// Which of these were recorded: a count of what was not is 0, and printed as `-`.
    pub recorded: Recorded,
}

/// A count, or `-` where nothing of its kind was recorded.
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
            // What tells reads from writes tells this, too.
            of(Recorded::ACCESS, self.present_faults),
            of(Recorded::MMAP, self.maps),
            of(Recorded::MUNMAP, self.unmaps),
            of(Recorded::MREMAP, self.remaps),
            of(Recorded::MPROTECT, self.protects),
            of(Recorded::MADVISE, self.advises),
            of(Recorded::BRK, self.brks),
            self.execs,
        )?;
        let counted = Recorded::all() - Recorded::AREAS - Recorded::CLONE_FLAGS;
        if self.recorded.contains(counted) { Ok(()) } else { f.write_str(" (-: not recorded)") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_that_the_kernel_did_not_serve_is_seen_by_the_next() {
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
