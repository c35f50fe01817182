//! Signals.
//!
//! *Sending* ([`send`]) queues a signal for a thread or for a process, and sees to it that a thread that
//! takes it looks: the thread is woken if it waits, its CPU interrupted if it runs. *Delivery*
//! ([`deliver`]) is the thread's own business, on its way back to user mode: it takes what waits for it
//! and is not blocked, and does what its process wants done. A handler runs in user mode, on a [`frame`]
//! that holds everything which `rt_sigreturn` puts back.
//!
//! *No signal is lost.* The sender queues first and looks afterwards where the thread is; the thread is on
//! its CPU, or blocked, first and looks at its queues afterwards. What a process has in its queue is
//! everybody's: a thread that blocks such a signal, or ends, after it was told of it tells another.
//!
//! *Restarts.* A call that a signal interrupts returns [`Errno::RESTART`](crate::errno::Errno::RESTART)
//! or [`RESTART_UNHANDLED`](crate::errno::Errno::RESTART_UNHANDLED), which no program sees: delivery
//! makes `EINTR` of it, or has the call made again.
//!
//! *Locks.* The queues' and the handlers' are leaves. What belongs to a thread alone is in cells.

mod action;
mod deliver;
mod frame;
mod info;
pub mod orphan;
mod queue;
mod send;
mod set;
mod stop;

pub use action::{Action, Disposition};
pub use deliver::deliver;
pub use frame::{frame_bytes, restore, set_stack};
pub use info::{Info, TOLD};
pub use send::{child_ended, fault, queue_process, queue_thread, send_process, send_thread};
pub use set::{AlternateStack, LAST, Set, UNBLOCKABLE, bit, number};
pub use stop::Job;

use crate::errno::{Errno, Result};
use crate::task::{Process, Thread, current};
use crate::time::ProcessTimers;
use core::cell::Cell;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as linux;
use queue::Queue;
use set::Trap;

/// What signals know of a thread.
pub struct ThreadSignals {
    /// What was sent to it alone.
    queue: Queue,
    /// What it blocks; only itself changes that.
    blocked: AtomicU64,
    /// What it blocks but waits for, in `rt_sigtimedwait`.
    awaited: AtomicU64,
    /// What it blocks again once the call that blocks something else for a while is over.
    saved: Cell<Option<Set>>,
    /// Where its handlers run.
    pub(crate) stack: Cell<AlternateStack>,
    trap: Cell<Trap>,
    /// The deadline of a call that is about to be made again.
    pub(crate) resume: Cell<Option<u64>>,
}

impl Default for ThreadSignals {
    fn default() -> Self {
        Self {
            queue: Queue::default(),
            blocked: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            saved: Cell::new(None),
            stack: Cell::new(AlternateStack::NONE),
            trap: Cell::default(),
            resume: Cell::new(None),
        }
    }
}

impl fmt::Debug for ThreadSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "signals {:#x}, blocked {:#x}", self.queue.set(), self.blocked())
    }
}

impl ThreadSignals {
    /// Those of a thread that the running one, whose these are, makes: it blocks the same.
    pub fn fork(&self, keeps_stack: bool) -> Self {
        let new = Self::default();
        new.blocked.store(self.blocked(), Ordering::Relaxed);
        if keeps_stack {
            new.stack.set(self.stack.get());
        }
        new
    }

    /// The running thread, whose these are, has a new program.
    pub fn reset_for_exec(&self) {
        self.stack.set(AlternateStack::NONE);
        self.resume.set(None);
    }

    /// What the thread blocks.
    pub fn blocked(&self) -> Set {
        self.blocked.load(Ordering::SeqCst)
    }

    /// What waits for it alone.
    pub fn waiting(&self) -> Set {
        self.queue.set()
    }

    /// What it does not want dropped, even where it is ignored.
    fn kept(&self) -> Set {
        self.blocked() | self.awaited.load(Ordering::SeqCst)
    }
}

/// What signals know of a process.
pub struct ProcessSignals {
    /// By signal; not in place, since a process is moved about on a small stack while it is made.
    actions: Mutex<Vec<Action>>,
    /// What any of its threads may take.
    queue: Queue,
    /// Whether it is stopped.
    pub job: Job,
    /// Its timers.
    pub timers: ProcessTimers,
    /// Which signals the ends of its relatives will send it.
    orphaned: orphan::Noted,
}

impl fmt::Debug for ProcessSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "signals {:#x}", self.queue.set())
    }
}

impl ProcessSignals {
    /// Those of a program that has just begun.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Self> {
        Self::with_actions(Vec::try_filled(Action::default(), LAST as usize)?)
    }

    /// Those of a process that ignores all, even what others cannot ignore.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_ignoring_all() -> Result<Self> {
        Self::with_actions(Vec::try_filled(Action::IGNORE, LAST as usize)?)
    }

    /// Those of a child: it does the same, unless it is to have no handlers.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_fork(&self, clear_handlers: bool) -> Result<Self> {
        let new = Self::with_actions(self.actions.lock().try_clone()?)?;
        if clear_handlers {
            new.clear_handlers();
        }
        Ok(new)
    }

    fn with_actions(actions: Vec<Action>) -> Result<Self> {
        Ok(Self {
            actions: Mutex::new(actions),
            queue: Queue::default(),
            job: Job::default(),
            timers: ProcessTimers::try_new()?,
            orphaned: orphan::Noted::default(),
        })
    }

    /// The process has a new program, which knows nothing of handlers and timers of the old.
    pub fn reset_for_exec(&self) {
        self.clear_handlers();
        self.timers.exec();
    }

    fn clear_handlers(&self) {
        for action in self.actions.lock().iter_mut() {
            *action = action.for_exec();
        }
    }

    /// What is done when `signal` comes.
    pub fn action(&self, signal: u32) -> Action {
        self.actions.lock()[(signal - 1) as usize]
    }

    /// What any of its threads may take.
    pub fn waiting(&self) -> Set {
        self.queue.set()
    }

    /// The signals that are ignored because the program said so, and those that have a handler: for
    /// `/proc/self/status`.
    pub fn ignored_and_caught(&self) -> (Set, Set) {
        let (mut ignored, mut caught) = (0, 0);
        for (action, signal) in self.actions.lock().iter().zip(1..) {
            if action.is_ignored_on_purpose() {
                ignored |= bit(signal);
            } else if matches!(action.disposition(signal), Disposition::Handle(_)) {
                caught |= bit(signal);
            }
        }
        (ignored, caught)
    }
}

/// Sets what is done when `signal` comes to `process`, and returns what was.
///
/// # Errors
/// `EINVAL` if that cannot be changed.
pub fn set_action(process: &Process, signal: u32, new: Option<Action>) -> Result<Action> {
    if new.is_some() && bit(signal) & UNBLOCKABLE != 0 {
        return Err(Errno::EINVAL);
    }
    let old = {
        let mut actions = process.signals.actions.lock();
        let action = &mut actions[(signal - 1) as usize];
        let old = *action;
        if let Some(new) = new {
            *action = new.sanitized();
        }
        old
    };
    if new.is_some_and(|new| new.disposition(signal) == Disposition::Ignore) {
        // What is ignored is ignored at once.
        process.signals.queue.forget(bit(signal));
        process.threads.lock().iter().for_each(|it| it.signals.queue.forget(bit(signal)));
    }
    Ok(old)
}

/// Whether a signal is to be delivered to `thread`, or it is to end.
#[inline]
pub fn pending(thread: &Thread) -> bool {
    let waiting = thread.signals.queue.set() | thread.process.signals.queue.set();
    waiting & !thread.signals.blocked() != 0 || thread.must_end()
}

/// Whether a `SIGKILL` is to be delivered to `thread`.
pub fn killed(thread: &Thread) -> bool {
    let waiting = thread.signals.waiting() | thread.process.signals.waiting();
    waiting & bit(linux::SIGKILL) != 0
}

/// Makes the running thread block `set`, and no more.
pub fn block(set: Set) {
    let thread = current();
    let set = set & !UNBLOCKABLE;
    let before = thread.signals.blocked.swap(set, Ordering::SeqCst);
    if set & !before != 0 {
        // Whoever sent one of these to the process may have told this thread alone.
        send::tell_others(&thread.process, &thread, set & !before);
    }
    if pending(&thread) {
        faultless_bare::percpu::this().attention.store(true, Ordering::Relaxed);
    }
}

/// Makes a call of the running thread with `set` blocked in place of what is, as `sigsuspend`, `ppoll` and
/// `pselect` want it. If a signal interrupts the call, its handler runs with `set` blocked.
///
/// # Errors
/// Those of the call.
pub fn with_blocked<R>(set: Set, call: impl FnOnce() -> Result<R>) -> Result<R> {
    let before = current().signals.blocked();
    block(set);
    let result = call();
    match result {
        Err(Errno::RESTART | Errno::RESTART_UNHANDLED | Errno::EINTR) => {
            // Delivery puts it back.
            current().signals.saved.set(Some(before));
            faultless_bare::percpu::this().attention.store(true, Ordering::Relaxed);
        }
        _ => block(before),
    }
    result
}

/// Waits until one of `set`, which the running thread blocks, comes, and takes it.
///
/// # Errors
/// `EAGAIN` at the deadline; `EINTR` for a signal that is not in the set.
pub fn wait_for(set: Set, deadline: Option<u64>) -> Result<Info> {
    use crate::task::wait::{Stop, wait_until};
    let thread = current();
    let signals = &thread.signals;
    let taken = || take(&thread, set);
    if let Some(info) = taken() {
        return Ok(info);
    }
    // Not blocked, so that who sends one finds this thread.
    let before = signals.blocked();
    signals.awaited.store(before & set, Ordering::SeqCst);
    signals.blocked.store(before & !set, Ordering::SeqCst);
    let result = wait_until(&[], deadline, taken);
    block(before);
    signals.awaited.store(0, Ordering::SeqCst);
    result.map_err(|stop| match stop {
        Stop::Timeout => Errno::EAGAIN,
        Stop::Signal => Errno::EINTR,
    })
}

/// Takes a signal of `set` that waits for the running thread, blocked or not.
pub fn take_waiting(set: Set) -> Option<Info> {
    take(&current(), set)
}

/// Whether a parent wants nothing of children that end: they leave no zombies.
pub fn children_are_ignored(parent: &Process) -> bool {
    let action = parent.signals.action(linux::SIGCHLD);
    action.is_ignored_on_purpose() || action.has(linux::SA_NOCLDWAIT)
}

/// The last thread of `process` has ended.
pub fn process_ended(process: &Process) {
    process.signals.timers.end();
}

/// `thread` of `process` is about to end: what the process has in its queue is for the others.
pub fn thread_ends(thread: &Thread) {
    send::tell_others(&thread.process, thread, !0);
}

/// A share of the thread, and whether it takes `signal` now.
fn takes(thread: &Arc<Thread>, signal: u32) -> bool {
    thread.signals.blocked() & bit(signal) == 0 && !thread.must_end()
}

/// Takes a signal in `wanted` that waits for `thread`, which runs.
fn take(thread: &Thread, wanted: Set) -> Option<Info> {
    let process = &thread.process.signals;
    let info = thread.signals.queue.take(wanted).or_else(|| process.queue.take(wanted))?;
    if let Some((number, overrun)) = info.of_timer() {
        process.timers.delivered(number, overrun);
    }
    Some(info)
}
