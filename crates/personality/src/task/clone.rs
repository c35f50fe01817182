//! New threads and processes.

use super::lack;
use super::memory::Memory;
use super::process::{Family, Process, TABLE};
use super::scheduler;
use super::thread::{Current, Thread, current};
use super::wait::wait_unless_killed;
use crate::errno::{Errno, Result};
use core::ptr;
use core::sync::atomic::Ordering;
use faultless_bare::arch::fpu::{self, FpuState};
use faultless_bare::arch::{self, Selectors, TrapFrame, user};
use faultless_collections::{Arc, Slot};
use linux_raw_sys::general as nr;

/// The arguments of `clone`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request {
    /// `CLONE_*`, without the signal.
    pub flags: u32,
    /// Set if the child has no handlers: `CLONE_CLEAR_SIGHAND`.
    pub clear_handlers: bool,
    /// The signal to the parent at the end of the child; 0: no signal.
    pub exit_signal: u32,
    /// The child's stack pointer; 0: the parent's stack pointer.
    pub stack: u64,
    /// The child's FS base, if `CLONE_SETTLS`.
    pub tls: u64,
    /// The address that receives the child's number in the parent's memory, if
    /// `CLONE_PARENT_SETTID`.
    pub parent_tid: u64,
    /// The address that receives the child's number in the child's memory, if `CLONE_CHILD_SETTID`
    /// or `CLONE_CHILD_CLEARTID`.
    pub child_tid: u64,
}

/// The flags for namespaces, which are not supported.
pub const NAMESPACES: u32 = nr::CLONE_NEWNS
    | nr::CLONE_NEWCGROUP
    | nr::CLONE_NEWUTS
    | nr::CLONE_NEWIPC
    | nr::CLONE_NEWUSER
    | nr::CLONE_NEWPID
    | nr::CLONE_NEWNET;

impl Request {
    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Checks that the flags are compatible and supported.
    fn check(&self) -> Result<()> {
        let lacks = |flag, wanted| self.has(flag) && !self.has(wanted);
        if lacks(nr::CLONE_THREAD, nr::CLONE_SIGHAND)
            || lacks(nr::CLONE_SIGHAND, nr::CLONE_VM)
            || self.has(NAMESPACES | nr::CLONE_PIDFD)
            || self.exit_signal > 64
        {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }
}

/// Makes a thread with the initial registers `frame`, in the running process or in a new one, and
/// returns the thread number.
///
/// # Errors
/// As Linux: `EINVAL` (incompatible flags, or namespaces), `ENOMEM`, `EAGAIN`.
pub fn clone(frame: &TrapFrame, request: &Request) -> Result {
    request.check()?;
    if faultless_bare::heap::low() {
        return Err(Errno::EAGAIN);
    }
    let parent = current();
    let number = TABLE.lock().new_number();
    let (process, new) = if request.has(nr::CLONE_THREAD) {
        (parent.process.clone(), false)
    } else {
        // First, and called from here: a copy of memory needs much of the stack.
        let memory = parent.process.memory().ok_or(Errno::ENOMEM)?;
        let memory = if request.has(nr::CLONE_VM) { memory } else { copy(&parent, &memory)? };
        (new_process(&parent, number, memory, request)?, true)
    };
    let slots = (Slot::try_new()?, if new { Some(Slot::try_new()?) } else { None });
    let child = new_thread(&parent, number, process, frame, request)?;
    if request.has(nr::CLONE_PARENT_SETTID) {
        // As on Linux, a bad address is no error.
        let _ = user::write(request.parent_tid, &number);
    }
    let process = new.then(|| child.process.clone());
    publish(&parent, child, slots, request)?;
    if let Some(process) = process
        && request.has(nr::CLONE_VFORK)
    {
        let own = parent.process.memory.space();
        let left = || (!ptr::eq(process.memory.space(), own)).then_some(());
        // A killed parent does not wait.
        let _ = wait_unless_killed(&process.memory_changed, left);
    }
    Ok(u64::from(number))
}

fn copy(parent: &Current, memory: &Memory) -> Result<Arc<Memory>> {
    let copy = lack::with_memory(|| memory.try_fork())?;
    // The fork makes every page shared, and the next faults copy pages. The recorded streams do not
    // predict these faults.
    parent.task.streams.reset();
    Ok(copy)
}

#[inline(never)]
fn new_process(
    parent: &Current,
    number: u32,
    memory: Arc<Memory>,
    request: &Request,
) -> Result<Arc<Process>> {
    let from = &parent.process;
    let files = from.files().fork(request.has(nr::CLONE_FILES), request.has(nr::CLONE_FS))?;
    let signals = from.signals.try_fork(request.clear_handlers)?;
    // A sibling sends the parent the same signal as this process: it cannot choose another.
    let exit_signal = if request.has(nr::CLONE_PARENT) {
        from.family.lock().exit_signal
    } else {
        request.exit_signal
    };
    let family = Family { exit_signal, ..Family::default() };
    let process = Process::try_new(number, Some(memory), files, signals, family)?;
    process.relatives.group.store(from.relatives.group.load(Ordering::Relaxed), Ordering::Relaxed);
    process
        .relatives
        .session
        .store(from.relatives.session.load(Ordering::Relaxed), Ordering::Relaxed);
    let name = from.name.lock().try_clone()?;
    *process.name.lock() = name;
    process.limits.copy_from(&from.limits);
    process.ids.copy_from(&from.ids)?;
    let oom_score_adj = from.oom_score_adj.load(Ordering::Relaxed);
    process.oom_score_adj.store(oom_score_adj, Ordering::Relaxed);
    process.by_vfork.store(request.has(nr::CLONE_VFORK), Ordering::Relaxed);
    Ok(Arc::try_new(process)?)
}

fn new_thread(
    parent: &Current,
    number: u32,
    process: Arc<Process>,
    frame: &TrapFrame,
    request: &Request,
) -> Result<Arc<Thread>> {
    let mut frame = TrapFrame { rax: 0, ..*frame };
    if request.stack != 0 {
        frame.rsp = request.stack;
    }
    let mut fpu = FpuState::try_new().ok_or(Errno::ENOMEM)?;
    fpu::save(&mut fpu);
    let keeps_stack = request.flags & (nr::CLONE_VM | nr::CLONE_VFORK) != nr::CLONE_VM;
    let signals = parent.signals.fork(keeps_stack);
    let affinity = parent.affinity.load(Ordering::Relaxed);
    let child = Thread::try_new(number, process, frame, fpu, signals, affinity)?;
    child.mem_policy.set(parent.mem_policy.get());
    let schedule = parent.schedule.lock().of_child();
    *child.schedule.lock() = schedule;
    let selectors = Selectors::current();
    let (selectors, tls) = if request.has(nr::CLONE_SETTLS) {
        (selectors.without_fs(), request.tls)
    } else {
        (selectors, arch::fs_base())
    };
    child.task.registers.selectors.set(selectors);
    child.task.registers.fs_base.set(tls);
    child.task.registers.gs_base.set(arch::gs_base());
    if request.has(nr::CLONE_CHILD_SETTID) {
        child.set_tid.set(request.child_tid);
    }
    if request.has(nr::CLONE_CHILD_CLEARTID) {
        child.clear_tid.store(request.child_tid, Ordering::Relaxed);
    }
    Ok(child)
}

/// Preallocated entries: one for the table of threads, and one for the table of processes if the
/// process is new.
type Slots = (Slot<u32, Arc<Thread>>, Option<Slot<u32, Arc<Process>>>);

/// Lists `child`, and its process if the process is new (then there is a slot), and queues the
/// child.
fn publish(parent: &Current, child: Arc<Thread>, slots: Slots, request: &Request) -> Result<()> {
    {
        let mut table = TABLE.lock();
        let process = &child.process;
        let new = slots.1.is_some();
        // A CPU that kills all users of this memory has either marked the parent, or will find the
        // child.
        if new && request.has(nr::CLONE_VM) && parent.must_end() {
            return Err(Errno::EAGAIN);
        }
        if let Some(slot) = slots.1 {
            // With `CLONE_PARENT`, the grandparent (if still listed); otherwise the parent.
            let guardian = if request.has(nr::CLONE_PARENT) {
                let number = parent.process.parent();
                table.processes.get(&number).cloned()
            } else {
                None
            };
            let guardian = guardian.as_ref().unwrap_or(&parent.process);
            process.relatives.parent.store(guardian.pid, Ordering::Relaxed);
            guardian.family.lock().children.push(process.clone());
            table.processes.insert(slot, process.pid, process.clone());
        }
        let mut threads = process.threads.lock();
        // A thread that ends all other threads has either marked this thread, or will find the new
        // one.
        if !new && parent.must_end() {
            return Err(Errno::EAGAIN);
        }
        threads.push(child.clone());
        table.threads.insert(slots.0, child.tid, child.clone());
    }
    scheduler::start(child);
    Ok(())
}
