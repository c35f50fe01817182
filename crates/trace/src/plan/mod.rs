//! Converts a recording to operations that real threads can replay concurrently.
//!
//! # Order
//!
//! A recording is one sequence; a replay on real threads need not be. Few operations must stay in
//! order: the operations of one thread, and operations of two threads of a process on the same
//! addresses, if at least one of the two changes the address space there. A touch therefore waits
//! for the last change of its page by another thread. A change waits, for each page in its range,
//! for the last change and the touches by each other thread. Two touches never wait for each other.
//! Earlier operations are covered by the awaited ones, so each operation waits for at most one
//! operation of each other thread, and only if its thread has not already waited for that
//! operation. In addition, a thread waits for the operation that starts it, and the parent of a
//! `vfork` waits for its child to execute a program or exit.
//!
//! Every wait is for an operation that is earlier in the recording, so replay cannot deadlock.
//!
//! If the exact order matters and no time is measured, a plan can keep the order of the recording:
//! each operation waits for the previous one ([`Plan::in_turn`]).
//!
//! # Guarantees of a plan
//!
//! In a replay in any such order on an address space with Linux's semantics, every touch finds a
//! mapping that permits the access (or a stack that grows to the address). Missing information in
//! the recording is assumed, and each assumption is counted in [`Plan::assumptions`]. Every `Map`
//! replaces existing mappings in its range, as `MAP_FIXED` does.
//!
//! # Processes
//!
//! A forked child starts with a copy of its parent's space. A `vfork` child runs in its parent's
//! space, as an additional thread, until it executes a program. The execution is [`Op::Launch`],
//! which starts a new process with an empty space.

mod build;
mod ops;
mod order;
pub(crate) mod space;

use crate::event::{Access, Backing, Prot, Recorded, Trace};
use faultless::VirtRange;
use std::fmt;

pub use ops::{Iter, Ops};

/// The completion of operation `op` of the thread `thread`.
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
    /// Maps anonymous memory at exactly `range`, and replaces existing mappings.
    Map {
        /// The range.
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
        /// The recorded backing.
        backing: Backing,
    },
    /// `munmap`.
    Unmap {
        /// The range.
        range: VirtRange,
    },
    /// `mprotect`.
    Protect {
        /// The range.
        range: VirtRange,
        /// Permissions from now on.
        prot: Prot,
    },
    /// `mremap` to exactly `new`: in place if both ranges have the same start, otherwise with
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
        /// The range.
        range: VirtRange,
        /// Linux's `MADV_*` number.
        advice: u32,
    },
    /// `brk`: the break moves from `old` to `new`. The first call of a process reports the earlier
    /// break and has no other effect.
    Brk {
        /// The break before, in bytes.
        old: u64,
        /// The break from now on, in bytes.
        new: u64,
    },
    /// Pages that were resident when the recording began become resident, without a fault.
    Populate {
        /// The pages, within one mapping that permits the access.
        range: VirtRange,
        /// Whether each page is allocated, as by a store. Otherwise as by a load.
        write: bool,
    },
    /// A load, store or instruction fetch in the page at `page`.
    Touch {
        /// The address of the page.
        page: u64,
        /// The kind of access; never [`Access::Unknown`].
        access: Access,
        /// Whether the kernel accessed the page on the program's behalf.
        kernel: bool,
    },
    /// `fork`: the process `child` starts with a copy of the space of this process.
    Fork {
        /// Index in [`Plan::processes`].
        child: u32,
    },
    /// The process `child` starts with an empty space.
    Launch {
        /// Index in [`Plan::processes`].
        child: u32,
    },
    /// A thread of the same process starts.
    SpawnThread {
        /// Index in [`Plan::threads`].
        thread: u32,
    },
    /// The process starts again with an empty space.
    Exec,
    /// The thread exits. The last thread destroys its process's space.
    Exit,
}

/// A process of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The process that starts it; `None` for a process that exists from the beginning, with an
    /// empty space.
    pub parent: Option<u32>,
    /// Its threads, by index in [`Plan::threads`]. The first starts with the process.
    pub threads: Vec<u32>,
}

/// A thread of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Its process, by index in [`Plan::processes`].
    pub process: u32,
    /// The name in the recording.
    pub name: String,
    /// The operation that starts it; `None` for a thread that exists from the beginning.
    pub start: Option<At>,
    /// The operations of the thread, in order.
    pub ops: Ops,
    /// The time of each operation in microseconds since the recording began, if the plan has times
    /// ([`Plan::in_turn_with_times`]); empty in other plans.
    pub times: Vec<u64>,
    /// The waits of its operations, sorted by the waiting operation.
    waits: Vec<Wait>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wait {
    before: u32,
    on: At,
}

impl Thread {
    /// Returns the operations in order, each with the operations that must complete first.
    pub fn steps(&self) -> impl Iterator<Item = (Op, impl Iterator<Item = At>)> {
        let mut rest = self.waits.as_slice();
        (0u32..).zip(&self.ops).map(move |(index, op)| {
            let len = rest.iter().take_while(|wait| wait.before == index).count();
            let (here, later) = rest.split_at(len);
            rest = later;
            (op, here.iter().map(|wait| wait.on))
        })
    }

    /// Returns the number of operations that restore the state from before the recording: up to the
    /// last [`Op::Populate`], and before the first wait. A replay executes them before it measures.
    pub fn restoring(&self) -> u32 {
        if self.start.is_some() {
            return 0;
        }
        let alone = self.waits.first().map_or(self.ops.len(), |wait| wait.before as usize);
        let populates = |(_, op): &(u32, Op)| matches!(op, Op::Populate { .. });
        let last = (1..).zip(self.ops.iter().take(alone)).filter(populates).last();
        last.map_or(0, |(count, _)| count)
    }

    /// Returns the number of waits of all its operations.
    pub fn wait_count(&self) -> usize {
        self.waits.len()
    }
}

/// The order of the operations of different threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turns {
    /// As far as the result requires an order.
    Concurrent,
    /// The order of the recording.
    One,
    /// The same, with the time of each operation.
    OneWithTimes,
}

/// A recording prepared for replay. The default has no operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    processes: Vec<Process>,
    threads: Vec<Thread>,
    assumptions: Vec<(Assumption, u64)>,
}

impl Plan {
    /// Creates the plan for `trace`.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`], or its forks copy more areas in total than the
    /// limit.
    pub fn new(trace: &Trace) -> Result<Self, PlanError> {
        Self::build(trace, Turns::Concurrent)
    }

    /// Creates the plan for `trace` in the order of the recording, one operation after the other.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn in_turn(trace: &Trace) -> Result<Self, PlanError> {
        Self::build(trace, Turns::One)
    }

    /// Creates the same plan as [`in_turn`](Self::in_turn), with the time of each operation.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn in_turn_with_times(trace: &Trace) -> Result<Self, PlanError> {
        Self::build(trace, Turns::OneWithTimes)
    }

    fn build(trace: &Trace, turns: Turns) -> Result<Self, PlanError> {
        complete(trace)?;
        build::Builder::new(trace, turns).run()
    }

    /// Returns the processes.
    pub fn processes(&self) -> &[Process] {
        &self.processes
    }

    /// Returns the threads of all processes.
    pub fn threads(&self) -> &[Thread] {
        &self.threads
    }

    /// Returns missing information and differences from the recording, with their counts.
    pub fn assumptions(&self) -> impl Iterator<Item = Assumed> {
        self.assumptions.iter().map(|(what, count)| Assumed { what: *what, count: *count })
    }

    /// Returns the number of operations of all threads.
    pub fn op_count(&self) -> usize {
        self.threads.iter().map(|thread| thread.ops.len()).sum()
    }

    /// Returns the number of touches of all threads.
    pub fn touch_count(&self) -> usize {
        let touches = |ops: &Ops| ops.iter().filter(|op| matches!(op, Op::Touch { .. })).count();
        self.threads.iter().map(|thread| touches(&thread.ops)).sum()
    }
}

/// Checks the assumptions of a plan or a prediction: the trace is consistent, and has every fault.
pub(crate) fn complete(trace: &Trace) -> Result<(), PlanError> {
    trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
    trace.header.every_fault().map_err(|reason| PlanError { event: None, reason })
}

/// A trace that cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// The number of the offending event, if a single event is wrong.
    pub event: Option<u64>,
    /// The description of the error.
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

/// Missing information in the recording, or a difference of the replay from the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Assumption {
    /// This kind of event was not recorded.
    NotRecorded(u32),
    /// Events were lost during the recording.
    Lost,
    /// An assumed mapping, created before the recording or by an unrecorded call.
    AssumedMapping,
    /// A file mapping is replayed as anonymous memory.
    FileAsAnonymous,
    /// A mapping of the kernel's own (vdso, vvar) is replayed as anonymous memory.
    SpecialAsAnonymous,
    /// A mapping of huge pages is replayed in base pages.
    HugeTlbAsBasePages,
    /// An access of unknown kind, treated as a write if permitted.
    UnknownAccess,
    /// An area whose permissions must have exceeded the recorded permissions.
    PermissionRaised,
    /// A fault for which Linux raised a signal or returned `EFAULT`; omitted.
    Signal,
    /// A fault or call beyond four-level user space (vsyscall); omitted.
    BeyondUserSpace,
    /// A mapping over another mapping whose removal was not recorded.
    UnseenUnmap,
    /// An `mremap` replayed as `munmap` and `mmap`.
    RemapAsMap,
}

/// An assumption and its count. Prints as a sentence for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assumed {
    /// The assumption.
    pub what: Assumption,
    /// The count; for lost events, the number of events.
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
                write!(f, "{n} mappings added because the recording has accesses without a mapping")
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
                    "{n} accesses assumed to be writes if permitted: their kind is not recorded"
                )
            }
            Assumption::PermissionRaised => {
                write!(f, "{n} areas with an added permission that a recorded access needs")
            }
            Assumption::Signal => {
                write!(f, "{n} faults omitted that ended in a signal or an error")
            }
            Assumption::BeyondUserSpace => {
                write!(f, "{n} faults or calls beyond user space omitted")
            }
            Assumption::UnseenUnmap => {
                write!(
                    f,
                    "{n} mappings placed over older mappings whose unmapping was not recorded"
                )
            }
            Assumption::RemapAsMap => write!(f, "{n} mremap calls replayed as munmap and mmap"),
        }
    }
}
