//! The model of a recording: threads and processes, and their memory operations in order of time.
//!
//! Contains successful operations only, because a call that the kernel refused did not change
//! memory. The time of a call is the time from which others can see its effect: the return of calls
//! that add memory (`mmap`, `brk`, `mremap`), and the entry of calls that remove memory (`munmap`,
//! `madvise`).

mod events;
mod pages;
mod processes;
mod stacks;
mod summary;

pub use events::{Events, Iter};
pub use pages::PAGE_SIZES;
pub use processes::ProcessSummary;
pub use stacks::{Frame, Function, StackId, Stacks};
pub use summary::Summary;

use bitflags::bitflags;
use faultless::PAGE_SIZE;

/// The most events in a recording, which limits the memory that a hostile file can use.
pub const MAX_EVENTS: usize = 16 << 20;
/// The most threads in a recording.
pub const MAX_THREADS: usize = 1 << 16;
/// The most pages that are resident when a recording begins: 128 GiB.
pub const MAX_RESIDENT: u64 = 32 << 20;
/// The most areas to which copies of address spaces (`fork`) may add up in one recording.
pub const MAX_AREAS: usize = 4 << 20;
/// The most functions in the call stacks of a recording.
pub const MAX_FUNCTIONS: usize = 1 << 18;
/// The most frames in the call stacks of a recording. Stacks share frames.
pub const MAX_FRAMES: usize = 1 << 20;

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
        /// The call stack of each fault, and of calls that create memory.
        const STACKS = 1 << 12;
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

impl Access {
    /// All kinds, in the order of declaration.
    pub(crate) const ALL: [Self; 4] = [Self::Unknown, Self::Read, Self::Write, Self::Exec];
}

impl Backing {
    /// All kinds, in the order of declaration.
    pub(crate) const ALL: [Self; 7] = [
        Self::Anon,
        Self::SharedAnon,
        Self::File,
        Self::SharedFile,
        Self::Heap,
        Self::Stack,
        Self::Special,
    ];

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

/// An event. Addresses and lengths are in bytes, and multiples of the page size of the recording
/// except for `Brk`.
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
        /// The address of the faulting instruction modulo 4,096, if recorded. Programs are
        /// loaded at different pages each time. The offset is the same in every process, and
        /// reveals no information about the host.
        instruction: Option<u16>,
        /// The call stack of the fault, if recorded, in [`Trace::stacks`].
        stack: StackId,
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
    /// The call stack of the next event, a call of the same thread that creates or frees memory:
    /// `mmap`, `mremap`, `brk`, `munmap` or `madvise`.
    Caller {
        /// The call stack, in [`Trace::stacks`].
        stack: StackId,
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
    /// Bytes in a base page of the recorded host, one of [`PAGE_SIZES`].
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
    /// Faults that the recorder omitted after each recorded fault; 0 if every fault was recorded.
    /// All other events are recorded.
    pub omitted: u32,
    /// Microseconds of processor time that the recorded processes used, with the cost of recording;
    /// 0 if unknown.
    pub processor_us: u64,
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
    /// Its number in the recorder's PID namespace, if recorded. A later process can have the same
    /// number.
    pub pid: Option<u32>,
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
    pub events: Events,
    /// The call stacks of the faults and of the calls that create memory.
    pub stacks: Stacks,
}

impl Header {
    /// Returns the number of faults of the program for each recorded fault.
    pub fn period(&self) -> u64 {
        u64::from(self.omitted) + 1
    }

    /// Returns an error if the recorder omitted faults.
    ///
    /// # Errors
    /// The description of the recording, and the remedy.
    pub fn every_fault(&self) -> Result<(), String> {
        if self.omitted == 0 {
            return Ok(());
        }
        Err(format!(
            "the recording has one in {} faults, because the program had more faults than the \
             recorder's limit: a replay or a prediction requires every fault. Remedy: record a \
             shorter time with a higher limit, such as --seconds 5 --max-rate 10000000. \
             `faultless advise` prints the cost of the faults of this recording",
            self.period()
        ))
    }

    /// Returns a warning if events were lost during the recording.
    pub fn loss(&self) -> Option<String> {
        let count = self.lost;
        let events = if count == 1 { "event was" } else { "events were" };
        (count > 0)
            .then(|| format!("warning: {count} {events} lost while recording: faults are missing"))
    }
}

impl Kind {
    /// Returns a fault in user mode on the absent page at `page`, without an instruction and a call
    /// stack.
    pub const fn first(page: u64, access: Access) -> Self {
        let (instruction, stack) = (None, StackId::NONE);
        Self::Fault { page, access, kernel: false, present: false, instruction, stack }
    }
}

impl Trace {
    /// Returns a trace of events of one thread of one process, all at the same time.
    #[cfg(test)]
    pub(crate) fn of_one_thread(events: impl IntoIterator<Item = Kind>) -> Self {
        let event = |kind| Event { time_us: 0, thread: 0, kind };
        Self {
            header: Header { page_size: PAGE_SIZE as u32, ..Header::default() },
            processes: vec![ProcessInfo { parent: None, pid: None }],
            threads: vec![ThreadInfo { process: 0, name: String::new() }],
            events: events.into_iter().map(event).collect(),
            stacks: Stacks::default(),
        }
    }

    /// Returns the number of threads of each process that ran when the recording began.
    pub(crate) fn first_threads(&self) -> Vec<u64> {
        let mut first = vec![true; self.threads.len()];
        for event in &self.events {
            if let Kind::Spawn { child, .. } = event.kind {
                first[child as usize] = false;
            }
        }
        let mut counts = vec![0; self.processes.len()];
        for (thread, _) in self.threads.iter().zip(first).filter(|(_, first)| *first) {
            counts[thread.process as usize] += 1;
        }
        counts
    }

    /// Checks the assumptions of every reader of a trace: indices are in range, time does not run
    /// backwards, each thread starts at most once, a thread has no event before its start or after
    /// its exit, and ranges are aligned and do not wrap.
    ///
    /// # Errors
    /// The number of the offending event, or `None` if a table is wrong, and the description of the
    /// error.
    pub fn check(&self) -> Result<(), (Option<u64>, String)> {
        if !PAGE_SIZES.contains(&self.header.page_size) {
            let size = self.header.page_size;
            return Err((None, format!("pages of {size} bytes; want 4096, 16384 or 65536")));
        }
        let size = u64::from(self.header.page_size);
        if self.threads.len() > MAX_THREADS || self.events.len() > MAX_EVENTS {
            return Err((None, "more threads or events than the limit of a recording".into()));
        }
        let processes = self.processes.len() as u32;
        if self.threads.iter().any(|thread| thread.process >= processes)
            || self.processes.iter().any(|process| process.parent.is_some_and(|p| p >= processes))
        {
            return Err((None, "a thread or process names a process that does not exist".into()));
        }
        self.stacks.check().map_err(|reason| (None, reason.to_owned()))?;
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
            if let Kind::Fault { stack, .. } | Kind::Caller { stack } = event.kind
                && stack.frame().is_some_and(|frame| frame >= self.stacks.frames.len())
            {
                return wrong("the call stack is not in the table");
            }
            if let Kind::Fault { stack, .. } | Kind::Caller { stack } = event.kind
                && stack != StackId::NONE
                && !self.header.recorded.contains(Recorded::STACKS)
            {
                return wrong(
                    "the event has a call stack, but the header declares a recording without call \
                     stacks",
                );
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
            if !event.kind.is_well_formed(size) {
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
}

#[derive(Clone, Copy, PartialEq)]
enum Seen {
    Never,
    Alive,
    Gone,
}

impl Kind {
    /// Returns whether ranges are aligned to pages of `size` bytes, not empty and do not wrap.
    fn is_well_formed(&self, size: u64) -> bool {
        let fits = |start: u64, len: u64| {
            start.is_multiple_of(size)
                && len.is_multiple_of(size)
                && len > 0
                && start.checked_add(len).is_some()
        };
        match *self {
            Self::Fault { page, .. } => page.is_multiple_of(size),
            Self::Map { start, len, .. }
            | Self::Area { start, len, .. }
            | Self::Resident { start, len, .. }
            | Self::Unmap { start, len }
            | Self::Protect { start, len, .. }
            | Self::Advise { start, len, .. } => fits(start, len),
            // An old length of zero duplicates a shared mapping.
            Self::Remap { old, old_len, new, new_len, .. } => {
                fits(new, new_len) && (fits(old, old_len) || (old_len == 0 && fits(old, size)))
            }
            Self::Brk { .. }
            | Self::Caller { .. }
            | Self::Spawn { .. }
            | Self::Exec
            | Self::Exit => true,
        }
    }
}
