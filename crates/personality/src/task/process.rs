//! Processes: the state shared by the threads of a process.

use super::collapse::TextScan;
use super::ids::Ids;
use super::limits::{Limits, PID_MAX};
use super::memory::{Memory, OwnMemory};
use super::relatives::Relatives;
use super::status::End;
use super::thread::{Siblings, Thread, WaitQueue};
use super::usage::{Usage, Used};
use crate::errno::Result;
use crate::signal::ProcessSignals;
use crate::time::{ProcessTimers, Times};
use alloc::boxed::Box;
use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use faultless::try_box;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Chain, Link, Linked, Map, String};

/// A process.
pub struct Process {
    /// The process number (PID).
    pub pid: u32,
    /// The numbers of parent, group and session.
    pub relatives: Relatives,
    /// The memory; `None` after the end of the process, and in process 1.
    pub memory: OwnMemory,
    /// The state of the collapse of text.
    pub text: TextScan,
    /// Woken when the process replaces its memory or ends: for the caller of `vfork`.
    pub memory_changed: WaitQueue,
    /// The descriptors and directories. The type is defined in [`fs`](crate::fs), which imports
    /// this module.
    pub(crate) files: Box<dyn Any + Send + Sync>,
    /// The signal handlers, and the signals pending for the process.
    pub signals: ProcessSignals,
    /// Its timers.
    pub timers: ProcessTimers,
    /// The name shown by `ps`: set by `PR_SET_NAME`, or the file name of the program.
    pub name: Mutex<String>,
    /// The value of `/proc/PID/oom_score_adj`.
    pub oom_score_adj: AtomicI32,
    /// Set if the process was made by `vfork`.
    pub by_vfork: AtomicBool,
    /// The children. A parent's family is locked before a child's.
    pub family: Mutex<Family>,
    /// The link in the parent's chain of children.
    sibling: Link<Self>,
    /// Woken when a child ends.
    pub children_changed: WaitQueue,
    /// Woken when the process continues after a stop.
    pub goes_on: WaitQueue,
    /// The threads that have not ended.
    pub threads: Mutex<Chain<Thread, Siblings>>,
    /// Woken when a thread ends.
    pub threads_changed: WaitQueue,
    /// Its end.
    pub end: End,
    /// The usage of ended threads and children. Locked after `threads`.
    pub used: Used,
    /// Its limits.
    pub limits: Limits,
    /// The user and group ids.
    pub ids: Ids,
    /// The start time, in nanoseconds since boot.
    pub started: u64,
}

/// The children of a process, as a kind of [chains](Chain).
#[derive(Debug)]
pub struct Children;

// SAFETY: the field has no other use.
unsafe impl Linked<Children> for Process {
    fn link(&self) -> &Link<Self> {
        &self.sibling
    }
}

/// The children of a process, and the signal to its own parent.
#[derive(Debug, Default)]
pub struct Family {
    /// The children that have not been waited for.
    pub children: Chain<Process, Children>,
    /// The signal sent to the parent when this process ends.
    pub exit_signal: u32,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)
    }
}

impl Process {
    /// A process without threads, not in the table yet.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(
        pid: u32,
        memory: Option<Arc<Memory>>,
        files: impl Any + Send + Sync,
        signals: ProcessSignals,
        family: Family,
    ) -> Result<Self> {
        Ok(Self {
            pid,
            relatives: Relatives::new(pid),
            memory: OwnMemory::new(memory),
            text: TextScan::default(),
            memory_changed: WaitQueue::new(),
            files: try_box(files)?,
            signals,
            timers: ProcessTimers::try_new()?,
            name: Mutex::default(),
            oom_score_adj: AtomicI32::new(0),
            by_vfork: AtomicBool::new(false),
            family: Mutex::new(family),
            sibling: Link::new(),
            children_changed: WaitQueue::new(),
            goes_on: WaitQueue::new(),
            threads: Mutex::default(),
            threads_changed: WaitQueue::new(),
            end: End::default(),
            used: Used::default(),
            limits: Limits::default(),
            ids: Ids::default(),
            started: faultless_bare::arch::clock::now(),
        })
    }

    /// The parent's number; 0 for process 1.
    pub fn parent(&self) -> u32 {
        self.relatives.parent.load(Ordering::Relaxed)
    }

    /// Returns the memory; `None` after the end of the process, and for process 1.
    pub fn memory(&self) -> Option<Arc<Memory>> {
        self.memory.get()
    }

    /// Returns the usage of the threads so far.
    pub fn usage(&self) -> Usage {
        let threads = self.threads.lock();
        let ended = *self.used.by_ended.lock();
        threads.iter().fold(ended, |sum, thread| sum + thread.usage())
    }

    /// Returns [`usage`](Self::usage) with the peak of the present memory. The caller holds no
    /// lock, because the reference to the memory may become the last one.
    pub fn usage_now(&self) -> Usage {
        let present = self.memory().map_or(0, |memory| memory.note_peaks()[1]);
        let mut used = self.usage();
        used.most_resident = used.most_resident.max(present);
        used
    }

    /// Counts the pages of the memory, before the process leaves its memory.
    pub(super) fn note_memory(&self) {
        let peak = self.memory().map_or(0, |memory| memory.note_peaks()[1]);
        let mut ended = self.used.by_ended.lock();
        ended.most_resident = ended.most_resident.max(peak);
    }

    /// Returns the CPU time of the threads so far.
    pub fn times(&self) -> Times {
        let threads = self.threads.lock();
        let ended = self.used.by_ended.lock().times;
        threads.iter().fold(ended, |sum, thread| sum + thread.cpu_time.times())
    }
}

/// The existing processes and threads, by number. Zombies are processes too.
///
/// The parent of a process changes only with the table locked. So an ending process finds the
/// parent that will reap it.
#[derive(Debug, Default)]
pub struct Table {
    /// By process number.
    pub processes: Map<u32, Arc<Process>>,
    /// By thread number.
    pub threads: Map<u32, Arc<Thread>>,
    last: u32,
    /// Set if the numbers have wrapped around, so that the next number may be in use.
    used_up: bool,
}

/// The table of all processes and threads.
pub static TABLE: Mutex<Table> =
    Mutex::new(Table { processes: Map::new(), threads: Map::new(), last: 0, used_up: false });

impl Table {
    /// An unused number, also among groups and sessions.
    pub fn new_number(&mut self) -> u32 {
        loop {
            if self.last == PID_MAX {
                self.last = 1;
                self.used_up = true;
            }
            self.last += 1;
            if !(self.used_up && self.has(self.last)) {
                return self.last;
            }
        }
    }

    fn has(&self, number: u32) -> bool {
        let is = |of: &AtomicU32| of.load(Ordering::Relaxed) == number;
        self.processes.contains_key(&number)
            || self.threads.contains_key(&number)
            || self.processes.values().any(|p| is(&p.relatives.group) || is(&p.relatives.session))
    }
}

/// The process with this number, zombies included.
pub fn find(pid: u32) -> Option<Arc<Process>> {
    TABLE.lock().processes.get(&pid).cloned()
}

/// Calls `show` for each process, zombies included, without the table locked. Needs no memory.
pub fn each(mut show: impl FnMut(&Arc<Process>)) {
    let mut last = None;
    loop {
        let next = TABLE.lock().processes.after(last.as_ref()).map(|(_, next)| next.clone());
        let Some(next) = next else { return };
        show(&next);
        last = Some(next.pid);
    }
}

/// The thread with this number.
pub fn find_thread(tid: u32) -> Option<Arc<Thread>> {
    TABLE.lock().threads.get(&tid).cloned()
}
