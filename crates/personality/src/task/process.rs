//! A process: what its threads share.

use super::memory::Memory;
use super::thread::{Siblings, Thread};
use super::wait::WaitQueue;
use crate::errno::{Errno, Result};
use crate::fs::ProcessFiles;
use crate::signal::ProcessSignals;
use crate::time::Times;
use core::fmt;
use core::ptr;
use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering,
};
use faultless::{Lock, Space};
use faultless_bare::machine::Bare;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Chain, Link, Linked, Map, String};
use linux_raw_sys::general as nr;

/// How a process locks what it maps from now on: `mlockall` with `MCL_FUTURE`.
#[derive(Default)]
pub struct FutureLock(AtomicU8);

impl FutureLock {
    const HOW: [Lock; 3] = [Lock::No, Lock::Now, Lock::OnFault];

    #[inline]
    pub fn get(&self) -> Lock {
        let at = self.0.load(Ordering::Relaxed);
        Self::HOW.get(usize::from(at)).copied().unwrap_or_default()
    }

    pub fn set(&self, how: Lock) {
        let at = Self::HOW.iter().position(|&each| each == how).unwrap_or(0);
        self.0.store(at as u8, Ordering::Relaxed);
    }
}

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

    /// The signal that killed it, or that it stopped because of; 0 if it exited. (0x7f is for those that
    /// stopped, and go on.)
    const fn low(self) -> u32 {
        self.0 & 0x7f
    }

    /// `si_code` of the `SIGCHLD` that tells of it.
    pub const fn child_code(self) -> u32 {
        match self.low() {
            0 => nr::CLD_EXITED,
            0x7f if self.0 == 0xffff => nr::CLD_CONTINUED,
            0x7f => nr::CLD_STOPPED,
            _ => nr::CLD_KILLED,
        }
    }

    /// `si_status` of the `SIGCHLD` that tells of it: the code or the signal.
    pub const fn child_status(self) -> u32 {
        match self.low() {
            0x7f if self.0 == 0xffff => nr::SIGCONT,
            0 | 0x7f => self.0 >> 8 & 0xff,
            signal => signal,
        }
    }

    /// The signal that killed it.
    pub const fn signal(self) -> Option<u32> {
        if self.low() == 0 { None } else { Some(self.low()) }
    }

    /// What a shell would say: the code, or 128 and the signal.
    pub const fn shell(self) -> u8 {
        if self.low() == 0 { (self.0 >> 8) as u8 } else { 128 + self.low() as u8 }
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
    /// Its memory, until it ends; process 1 has none.
    memory: Mutex<Option<Arc<Memory>>>,
    /// The space in `memory`, for the scheduler; null where there is none.
    space: AtomicPtr<Space<Bare>>,
    /// Its files and directories.
    pub files: ProcessFiles,
    /// Its handlers, and what waits for any of its threads.
    pub signals: ProcessSignals,
    /// The name that `ps` shows: `PR_SET_NAME`, or the file of the program.
    pub name: Mutex<String>,
    /// The parent's number; 0 for process 1. It changes, with the table and `family` locked, when
    /// the parent ends.
    pub parent: AtomicU32,
    /// The signal that it gets when the parent ends (0: none): `PR_SET_PDEATHSIG`.
    pub death_signal: AtomicU32,
    /// Whether it adopts the orphans among its descendants: `PR_SET_CHILD_SUBREAPER`.
    pub adopts: AtomicBool,
    /// What it asked for in `/proc/PID/oom_score_adj`.
    pub oom_score_adj: AtomicI32,
    /// Its other relatives. A parent's is locked before a child's.
    pub family: Mutex<Family>,
    /// Its place among the children of its parent.
    sibling: Link<Self>,
    /// Woken when a child ends.
    pub children_changed: WaitQueue,
    /// Woken when it gets other memory or ends: for who called `vfork`.
    pub memory_changed: WaitQueue,
    /// Its threads that have not ended.
    pub threads: Mutex<Chain<Thread, Siblings>>,
    /// Woken when one of them ends.
    pub threads_changed: WaitQueue,
    /// How it ended, or is to end: set once.
    pub ending: Mutex<Option<ExitStatus>>,
    /// With what its first thread called `exit`: how it ends unless something else decides.
    pub(super) leader_code: AtomicU8,
    /// Whether all of its threads have ended: it is a zombie then, until it is waited for.
    pub ended: AtomicBool,
    /// What its ended threads used. Locked after `threads`.
    pub ended_usage: Mutex<Usage>,
    /// What its children that were waited for used, and those that these had waited for.
    pub children_usage: Mutex<Usage>,
    /// Its limits, by Linux's numbers: soft and hard.
    pub limits: Mutex<Limits>,
    /// The soft one on its address space, in bytes, for who looks often.
    pub address_space: AtomicU64,
    /// Whether what it maps is locked at once (`MCL_FUTURE`), and so faulted in.
    pub locks_future: FutureLock,
    /// Nanoseconds since boot at its start.
    pub started: u64,
}

/// What threads used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// How long they ran.
    pub times: Times,
    /// Page faults of theirs that were served.
    pub faults: u64,
    /// How often they gave the CPU away of their own will, and against it.
    pub switches: [u64; 2],
}

impl core::ops::Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let [own, others] = [self.switches, other.switches];
        Self {
            times: self.times + other.times,
            faults: self.faults + other.faults,
            switches: [own[0] + others[0], own[1] + others[1]],
        }
    }
}

/// Soft and hard limits, by Linux's numbers of resources.
pub type Limits = [[u64; 2]; 16];

/// What the first processes start with: Linux's limits, with a stack as large as the subsystem lets one
/// grow.
const LIMITS: Limits = {
    const NONE: u64 = u64::MAX;
    let mut limits = [[NONE, NONE]; 16];
    limits[nr::RLIMIT_STACK as usize][0] = 8 << 20;
    limits[nr::RLIMIT_CORE as usize][0] = 0;
    limits[nr::RLIMIT_NPROC as usize] = [PID_MAX as u64, PID_MAX as u64];
    limits[nr::RLIMIT_NOFILE as usize] = [1024, 1 << 20];
    limits[nr::RLIMIT_MEMLOCK as usize] = [8 << 20, 8 << 20];
    limits[nr::RLIMIT_SIGPENDING as usize] = [4096, 4096];
    limits[nr::RLIMIT_MSGQUEUE as usize] = [819_200, 819_200];
    limits[nr::RLIMIT_NICE as usize] = [0, 0];
    limits[nr::RLIMIT_RTPRIO as usize] = [0, 0];
    limits
};

/// The children of a process, as a kind of [chains](Chain).
#[derive(Debug)]
pub struct Children;

// SAFETY: a field that is for nothing else.
unsafe impl Linked<Children> for Process {
    fn link(&self) -> &Link<Self> {
        &self.sibling
    }
}

/// The relatives of a process.
#[derive(Debug, Default)]
pub struct Family {
    /// Those who were not waited for yet.
    pub children: Chain<Process, Children>,
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
        memory: Option<Arc<Memory>>,
        files: ProcessFiles,
        signals: ProcessSignals,
        family: Family,
    ) -> Self {
        let space = space_of(memory.as_ref());
        Self {
            pid,
            group: AtomicU32::new(pid),
            session: AtomicU32::new(pid),
            memory: Mutex::new(memory),
            space: AtomicPtr::new(space.cast_mut()),
            files,
            signals,
            name: Mutex::default(),
            parent: AtomicU32::new(0),
            death_signal: AtomicU32::new(0),
            adopts: AtomicBool::new(false),
            oom_score_adj: AtomicI32::new(0),
            family: Mutex::new(family),
            sibling: Link::new(),
            children_changed: WaitQueue::new(),
            memory_changed: WaitQueue::new(),
            threads: Mutex::default(),
            threads_changed: WaitQueue::new(),
            ending: Mutex::default(),
            leader_code: AtomicU8::new(0),
            ended: AtomicBool::new(false),
            ended_usage: Mutex::default(),
            children_usage: Mutex::default(),
            limits: Mutex::new(LIMITS),
            address_space: AtomicU64::new(u64::MAX),
            locks_future: FutureLock::default(),
            started: faultless_bare::arch::clock::now(),
        }
    }

    /// The parent's number; 0 for process 1.
    pub fn parent(&self) -> u32 {
        self.parent.load(Ordering::Relaxed)
    }

    /// Its memory; none once it has ended, or in process 1.
    pub fn memory(&self) -> Option<Arc<Memory>> {
        self.memory.lock().clone()
    }

    /// Gives it other memory, or none at its end, and returns the old. Called by its only thread, which
    /// then runs in the new memory ([`scheduler::run_memory`](super::scheduler::run_memory)) before it drops the old.
    #[must_use = "the old memory may be dropped only when no CPU runs it"]
    pub fn replace_memory(&self, new: Option<Arc<Memory>>) -> Option<Arc<Memory>> {
        let mut memory = self.memory.lock();
        self.space.store(space_of(new.as_ref()).cast_mut(), Ordering::Release);
        core::mem::replace(&mut *memory, new)
    }

    /// Sets one of its limits.
    ///
    /// # Errors
    /// `EINVAL`: there is no such resource, or the soft limit is above the hard one.
    pub fn set_limit(&self, resource: usize, new: [u64; 2]) -> Result<()> {
        let mut limits = self.limits.lock();
        let limit = limits.get_mut(resource).filter(|_| new[0] <= new[1]).ok_or(Errno::EINVAL)?;
        *limit = new;
        if resource == nr::RLIMIT_AS as usize {
            self.address_space.store(new[0], Ordering::Relaxed);
        }
        Ok(())
    }

    /// What its threads used so far.
    pub fn usage(&self) -> Usage {
        let threads = self.threads.lock();
        let ended = *self.ended_usage.lock();
        threads.iter().fold(ended, |sum, thread| sum + thread.usage())
    }

    /// How long its threads ran so far.
    pub fn times(&self) -> Times {
        let threads = self.threads.lock();
        let ended = self.ended_usage.lock().times;
        threads.iter().fold(ended, |sum, thread| sum + thread.cpu_time.times())
    }

    /// The space in its memory, null once it has ended.
    pub(super) fn space(&self) -> *const Space<Bare> {
        self.space.load(Ordering::Acquire)
    }
}

/// The processes and threads that exist, by number. Zombies are processes too.
///
/// Who is whose child changes with the table locked, and only then: so a process that ends finds the
/// parent that will see it.
#[derive(Debug, Default)]
pub struct Table {
    /// By process number.
    pub processes: Map<u32, Arc<Process>>,
    /// By thread number.
    pub threads: Map<u32, Arc<Thread>>,
    last: u32,
    /// Whether numbers were used up once, so that the next may be in use.
    used_up: bool,
}

/// The space in `memory`, null without one.
fn space_of(memory: Option<&Arc<Memory>>) -> *const Space<Bare> {
    memory.map_or(ptr::null(), |memory| ptr::from_ref(memory.space()))
}

/// Largest number of a process or thread, as on Linux.
const PID_MAX: u32 = 4 << 20;

/// Everybody.
pub static TABLE: Mutex<Table> =
    Mutex::new(Table { processes: Map::new(), threads: Map::new(), last: 0, used_up: false });

impl Table {
    /// A number that no process, thread, group or session has.
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
            || self.processes.values().any(|p| is(&p.group) || is(&p.session))
    }
}

/// The process with this number, zombies included.
pub fn find(pid: u32) -> Option<Arc<Process>> {
    TABLE.lock().processes.get(&pid).cloned()
}

/// Shows every process, zombies included, without the table locked. Needs no memory.
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
