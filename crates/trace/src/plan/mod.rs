//! From a recording to operations that real threads can replay side by side.
//!
//! # Order
//!
//! A recording is one sequence; a replay on real threads must not be. What must stay in order is
//! little: what one thread did; and what two threads of a process did to the same addresses, where
//! at least one of the two changed the address space there. So a touch waits for the last change of
//! its page by another thread, and a change waits for the last change and the touches, by each other
//! thread, of each page in its range. Two touches never wait for each other. Earlier operations are
//! covered through the ones waited for, so each operation waits for at most one of each other
//! thread, and only where that thread has not been waited for that far before. Besides, a thread
//! waits for the operation that begins it, and the parent of a `vfork` for its child to execute a
//! program or exit.
//!
//! Every wait is for an operation that is earlier in the recording, so replay cannot deadlock.
//!
//! Where it matters what came before what, and no time is measured, a plan keeps the order of the recording:
//! each operation waits for the one before it ([`Plan::in_turn`]).
//!
//! # What a plan promises
//!
//! Replayed in any such order on an address space with Linux's semantics, every touch finds a
//! mapping that permits it (or a stack that grows to it). What the recording does not say is
//! assumed, and each assumption is counted in [`Plan::assumptions`]. Every `Map` replaces what was
//! in its range, as `MAP_FIXED` does.
//!
//! # Processes
//!
//! A forked child begins with a copy of its parent's space. A `vfork` child runs in its parent's, as
//! one more thread there, until it executes a program: that is [`Op::Launch`], which begins a new
//! process with an empty space.

mod build;
mod order;
pub(crate) mod space;

use crate::event::{Access, Backing, Prot, Recorded, Trace};
use faultless::VirtRange;
use std::fmt;

/// The operation `op` of the thread `thread`, once it has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct At {
    /// Index in [`Plan::threads`].
    pub thread: u32,
    /// Index in [`Thread::ops`].
    pub op: u32,
}

/// One operation. Ranges are page-aligned, not empty and below the end of user space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Map anonymous memory at exactly `range`, in place of what is there.
    Map {
        /// Where.
        range: VirtRange,
        /// Permissions.
        prot: Prot,
        /// `MAP_SHARED`.
        shared: bool,
        /// `MAP_GROWSDOWN`.
        grows_down: bool,
        /// `MAP_POPULATE`.
        populate: bool,
        /// `MAP_NORESERVE`.
        noreserve: bool,
        /// What lay behind it when it was recorded.
        backing: Backing,
    },
    /// `munmap`.
    Unmap {
        /// What.
        range: VirtRange,
    },
    /// `mprotect`.
    Protect {
        /// What.
        range: VirtRange,
        /// Permissions from now on.
        prot: Prot,
    },
    /// `mremap` to exactly `new`: in place where both begin at the same address, else
    /// `MREMAP_MAYMOVE | MREMAP_FIXED`.
    Remap {
        /// The old range.
        old: VirtRange,
        /// The new range.
        new: VirtRange,
        /// `MREMAP_DONTUNMAP`.
        keep_old: bool,
    },
    /// `madvise`.
    Advise {
        /// What.
        range: VirtRange,
        /// Linux's `MADV_*` number.
        advice: u32,
    },
    /// `brk`: the break moves from `old` to `new`. The first of a process tells where it was before
    /// and moves nothing.
    Brk {
        /// The break before, in bytes.
        old: u64,
        /// The break from now on, in bytes.
        new: u64,
    },
    /// A load, store or instruction fetch in the page at `page`.
    Touch {
        /// The address of the page.
        page: u64,
        /// Which; never [`Access::Unknown`].
        access: Access,
        /// The kernel did it on the program's behalf.
        kernel: bool,
    },
    /// `fork`: the process `child` begins with a copy of this one's space.
    Fork {
        /// Index in [`Plan::processes`].
        child: u32,
    },
    /// The process `child` begins with an empty space.
    Launch {
        /// Index in [`Plan::processes`].
        child: u32,
    },
    /// A thread of the same process begins.
    SpawnThread {
        /// Index in [`Plan::threads`].
        thread: u32,
    },
    /// The process starts again with an empty space.
    Exec,
    /// The thread ends, and with the last thread its process's space.
    Exit,
}

/// A process of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The process that begins it; none where it is there from the start, with an empty space.
    pub parent: Option<u32>,
    /// Its threads, by index in [`Plan::threads`]; the first begins with the process.
    pub threads: Vec<u32>,
}

/// A thread of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Its process, by index in [`Plan::processes`].
    pub process: u32,
    /// Its name in the recording.
    pub name: String,
    /// The operation that begins it; none where it is there from the start.
    pub start: Option<At>,
    /// What it does, in order.
    pub ops: Vec<Op>,
    /// The time of each operation in microseconds since the recording began, if the plan keeps the
    /// order of the recording ([`Plan::in_turn`]); empty in other plans.
    pub times: Vec<u64>,
    /// Which of its operations wait for what, sorted by the operation that waits.
    waits: Vec<Wait>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wait {
    before: u32,
    on: At,
}

impl Thread {
    /// The operations in order, each with what must have completed before it may begin.
    pub fn steps(&self) -> impl Iterator<Item = (&Op, impl Iterator<Item = At>)> {
        let mut rest = self.waits.as_slice();
        (0u32..).zip(&self.ops).map(move |(index, op)| {
            let len = rest.iter().take_while(|wait| wait.before == index).count();
            let (here, later) = rest.split_at(len);
            rest = later;
            (op, here.iter().map(|wait| wait.on))
        })
    }

    /// How many waits its operations have together.
    pub fn wait_count(&self) -> usize {
        self.waits.len()
    }
}

/// A recording made replayable. The default has no operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    processes: Vec<Process>,
    threads: Vec<Thread>,
    assumptions: Vec<(Assumption, u64)>,
}

impl Plan {
    /// The plan for `trace`.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`], or forks address spaces of more areas, taken
    /// together, than memory should be spent on.
    pub fn new(trace: &Trace) -> Result<Self, PlanError> {
        Self::build(trace, false)
    }

    /// The plan for `trace` in the order of the recording, one operation after the other.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn in_turn(trace: &Trace) -> Result<Self, PlanError> {
        Self::build(trace, true)
    }

    fn build(trace: &Trace, in_turn: bool) -> Result<Self, PlanError> {
        trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
        build::Builder::new(trace, in_turn).run()
    }

    /// The processes.
    pub fn processes(&self) -> &[Process] {
        &self.processes
    }

    /// The threads of all processes.
    pub fn threads(&self) -> &[Thread] {
        &self.threads
    }

    /// What the recording does not say or the replay does otherwise, and how often.
    pub fn assumptions(&self) -> impl Iterator<Item = Assumed> {
        self.assumptions.iter().map(|(what, count)| Assumed { what: *what, count: *count })
    }

    /// Operations of all threads.
    pub fn op_count(&self) -> usize {
        self.threads.iter().map(|thread| thread.ops.len()).sum()
    }

    /// Touches of all threads.
    pub fn touch_count(&self) -> usize {
        let touches = |ops: &[Op]| ops.iter().filter(|op| matches!(op, Op::Touch { .. })).count();
        self.threads.iter().map(|thread| touches(&thread.ops)).sum()
    }
}

/// A trace that cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// The number of the event at which it shows, where it is one event's fault.
    pub event: Option<u64>,
    /// What is wrong.
    pub reason: String,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.event {
            Some(event) => write!(f, "event {event}: {}", self.reason),
            None => f.write_str(&self.reason),
        }
    }
}

impl std::error::Error for PlanError {}

/// Something that the recording does not say, or that the replay does otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Assumption {
    /// This kind of event was not recorded.
    NotRecorded(u32),
    /// Events were lost while recording.
    Lost,
    /// A mapping from before the recording, or from a call that it leaves out, was made up.
    AssumedMapping,
    /// A file mapping is replayed as anonymous memory.
    FileAsAnonymous,
    /// A mapping of the kernel's own (vdso, vvar) is replayed as anonymous memory.
    SpecialAsAnonymous,
    /// A mapping of huge pages is replayed in base pages.
    HugeTlbAsBasePages,
    /// The recording does not say what the access was: taken as a write where that is permitted.
    UnknownAccess,
    /// An area that must have permitted more than the recording says.
    PermissionRaised,
    /// A fault that Linux answered with a signal or `EFAULT`, left out.
    Signal,
    /// A fault or call beyond four-level user space (vsyscall), left out.
    BeyondUserSpace,
    /// A mapping over one that the recording did not see go.
    UnseenUnmap,
    /// An `mremap` that is replayed as `munmap` and `mmap`.
    RemapAsMap,
}

/// An assumption, and how often it was made. Prints as a sentence for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assumed {
    /// What was assumed.
    pub what: Assumption,
    /// How often; for lost events, how many.
    pub count: u64,
}

impl fmt::Display for Assumed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.count;
        match self.what {
            Assumption::NotRecorded(bit) => {
                let names = Recorded::NAMES.iter().find(|(kind, _)| kind.bits() == bit);
                write!(f, "not recorded: {}", names.map_or("", |(_, name)| *name))
            }
            Assumption::Lost => write!(f, "{n} events were lost while recording"),
            Assumption::AssumedMapping => {
                write!(f, "{n} mappings made up where the recording shows accesses but no mapping")
            }
            Assumption::FileAsAnonymous => {
                write!(f, "{n} file mappings replayed as anonymous memory")
            }
            Assumption::SpecialAsAnonymous => {
                write!(f, "{n} kernel mappings (vdso, vvar) replayed as anonymous memory")
            }
            Assumption::HugeTlbAsBasePages => {
                write!(f, "{n} mappings of huge pages replayed in base pages")
            }
            Assumption::UnknownAccess => {
                write!(
                    f,
                    "{n} accesses taken as writes where permitted: their kind is not recorded"
                )
            }
            Assumption::PermissionRaised => {
                write!(f, "{n} areas given a permission that an access in the recording needs")
            }
            Assumption::Signal => {
                write!(f, "{n} faults left out that ended in a signal or an error")
            }
            Assumption::BeyondUserSpace => {
                write!(f, "{n} faults or calls beyond user space left out")
            }
            Assumption::UnseenUnmap => {
                write!(f, "{n} mappings placed over others that were not seen to go")
            }
            Assumption::RemapAsMap => write!(f, "{n} mremap calls replayed as munmap and mmap"),
        }
    }
}
