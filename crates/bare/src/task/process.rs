//! A process: what its threads share.

use super::memory::Memory;
use super::thread::Thread;
use super::wait::WaitQueue;
use crate::fs::ProcessFiles;
use crate::machine::Bare;
use crate::signal::ProcessSignals;
use crate::sync::Mutex;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use faultless::Space;

/// How a process ended, as `wait4` encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitStatus(pub u32);

impl ExitStatus {
    /// It called `exit` with this code.
    pub const fn exited(code: u8) -> Self {
        Self((code as u32) << 8)
    }

    /// A signal killed it.
    pub const fn killed(signal: u32) -> Self {
        Self(signal)
    }

    /// What a shell would say: the code, or 128 and the signal.
    pub const fn shell(self) -> u8 {
        if self.0 & 0x7f == 0 { (self.0 >> 8) as u8 } else { 128 + (self.0 & 0x7f) as u8 }
    }
}

/// A process.
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its process group and session.
    pub group: AtomicU32,
    /// See `group`.
    pub session: AtomicU32,
    /// Its memory, until it ends.
    memory: Mutex<Option<Arc<Memory>>>,
    /// The space in `memory`, for the scheduler; null once it has ended.
    space: AtomicPtr<Space<Bare>>,
    /// Its files and directories.
    pub files: ProcessFiles,
    /// Its handlers, and what waits for any of its threads.
    pub signals: ProcessSignals,
    /// The name that `ps` shows: `PR_SET_NAME`, or the file of the program.
    pub name: Mutex<String>,
    /// Whom its relatives are.
    pub family: Mutex<Family>,
    /// Woken when a child ends.
    pub children_changed: WaitQueue,
    /// Woken when it gets other memory or ends: for who called `vfork`.
    pub memory_changed: WaitQueue,
    /// Its threads that have not ended.
    pub threads: Mutex<Vec<Arc<Thread>>>,
    /// How it ended, or is to end: set once.
    pub ending: Mutex<Option<ExitStatus>>,
    /// Nanoseconds that its ended threads ran, and its children that were waited for.
    pub ran: [AtomicU64; 2],
    /// Nanoseconds since boot at its start.
    pub started: u64,
}

/// The relatives of a process.
#[derive(Debug, Default)]
pub struct Family {
    /// The parent's number; 0 for the first process.
    pub parent: u32,
    /// Those who were not waited for yet.
    pub children: Vec<Arc<Process>>,
    /// The signal that the parent gets at its end.
    pub exit_signal: u32,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)
    }
}

impl Process {
    /// A process without threads, not listed yet.
    pub fn new(
        pid: u32,
        memory: Arc<Memory>,
        files: ProcessFiles,
        signals: ProcessSignals,
        family: Family,
    ) -> Self {
        let space = ptr::from_ref(memory.space()).cast_mut();
        Self {
            pid,
            group: AtomicU32::new(pid),
            session: AtomicU32::new(pid),
            memory: Mutex::new(Some(memory)),
            space: AtomicPtr::new(space),
            files,
            signals,
            name: Mutex::default(),
            family: Mutex::new(family),
            children_changed: WaitQueue::new(),
            memory_changed: WaitQueue::new(),
            threads: Mutex::default(),
            ending: Mutex::default(),
            ran: [AtomicU64::new(0), AtomicU64::new(0)],
            started: crate::arch::clock::now(),
        }
    }

    /// Its memory; none once it has ended.
    pub fn memory(&self) -> Option<Arc<Memory>> {
        self.memory.lock().clone()
    }

    /// Gives it other memory, or none at its end, and returns the old. Called by its only thread, which
    /// then runs in the new memory ([`scheduler::run_memory`](super::scheduler::run_memory)) before it drops the old.
    #[must_use = "the old memory may be dropped only when no CPU runs it"]
    pub fn replace_memory(&self, new: Option<Arc<Memory>>) -> Option<Arc<Memory>> {
        let mut memory = self.memory.lock();
        let space = new.as_ref().map_or(ptr::null(), |new| ptr::from_ref(new.space()));
        self.space.store(space.cast_mut(), Ordering::Release);
        core::mem::replace(&mut *memory, new)
    }

    /// The space in its memory, null once it has ended.
    pub(super) fn space(&self) -> *const Space<Bare> {
        self.space.load(Ordering::Acquire)
    }
}

/// The processes and threads that exist, by number. Zombies are processes too.
#[derive(Debug, Default)]
pub struct Table {
    /// By process number.
    pub processes: BTreeMap<u32, Arc<Process>>,
    /// By thread number.
    pub threads: BTreeMap<u32, Arc<Thread>>,
    last: u32,
}

/// Largest number of a process or thread, as on Linux.
const PID_MAX: u32 = 4 << 20;

/// Everybody.
pub static TABLE: Mutex<Table> =
    Mutex::new(Table { processes: BTreeMap::new(), threads: BTreeMap::new(), last: 0 });

impl Table {
    /// A number that no process, thread, or group has.
    pub fn new_number(&mut self) -> u32 {
        loop {
            self.last = if self.last == PID_MAX { 2 } else { self.last + 1 };
            let taken = self.processes.contains_key(&self.last)
                || self.threads.contains_key(&self.last)
                || self.processes.values().any(|p| p.group.load(Ordering::Relaxed) == self.last);
            if !taken {
                return self.last;
            }
        }
    }
}

/// The process with this number, zombies included.
pub fn find(pid: u32) -> Option<Arc<Process>> {
    TABLE.lock().processes.get(&pid).cloned()
}
