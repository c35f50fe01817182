//! The signal state of threads and processes.

use super::action::{Action, Disposition};
use super::job::Job;
use super::queue::Queue;
use super::set::{AlternateStack, LAST, Set, Trap, bit};
use crate::errno::Result;
use core::cell::Cell;
use core::fmt;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::Vec;
use linux_raw_sys::general as linux;

/// The signal state of a thread.
pub struct ThreadSignals {
    /// The pending signals of the thread.
    pub(super) queue: Queue,
    /// The blocked signals; only the thread itself changes this set.
    pub(super) blocked: AtomicU64,
    /// The signals awaited by `rt_sigtimedwait`, although they are blocked.
    pub(super) awaited: AtomicU64,
    /// The mask to restore after a call with a temporary mask.
    pub(super) saved: Cell<Option<Set>>,
    /// The alternate stack for handlers.
    pub(crate) stack: Cell<AlternateStack>,
    pub(super) trap: Cell<Trap>,
    /// The deadline of a restarted call.
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
    /// Returns the state of a new thread made by the owner, with the same blocked signals.
    pub fn fork(&self, keeps_stack: bool) -> Self {
        let new = Self::default();
        new.blocked.store(self.blocked(), Ordering::Relaxed);
        if keeps_stack {
            new.stack.set(self.stack.get());
        }
        new
    }

    /// Resets the state for a new program.
    pub fn reset_for_exec(&self) {
        self.stack.set(AlternateStack::NONE);
        self.resume.set(None);
    }

    /// Returns the blocked signals of the thread.
    pub fn blocked(&self) -> Set {
        self.blocked.load(Ordering::SeqCst)
    }

    /// The pending signals of the thread.
    pub fn waiting(&self) -> Set {
        self.queue.set()
    }

    /// Returns the signals that stay pending even if they are ignored.
    pub(super) fn kept(&self) -> Set {
        self.blocked() | self.awaited.load(Ordering::SeqCst)
    }
}

/// The signal state of a process.
pub struct ProcessSignals {
    /// Indexed by signal. In a vector, because a new process is moved on a small stack.
    pub(super) actions: Mutex<Vec<Action>>,
    /// The pending signals of the process.
    pub(super) queue: Queue,
    /// The job-control state.
    pub job: Job,
    /// The noted reasons for signals to the process, as bits of [`orphan`](super::orphan).
    pub(super) orphaned: AtomicU32,
}

impl fmt::Debug for ProcessSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "signals {:#x}", self.queue.set())
    }
}

impl ProcessSignals {
    /// The state of a new program.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Self> {
        Self::with_actions(Vec::try_filled(Action::default(), LAST as usize)?)
    }

    /// Returns the state of process 1, which ignores all signals, including unblockable ones.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_ignoring_all() -> Result<Self> {
        Self::with_actions(Vec::try_filled(Action::IGNORE, LAST as usize)?)
    }

    /// The state of a child: the same actions, with or without the handlers.
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
            orphaned: AtomicU32::new(0),
        })
    }

    /// Removes all handlers: the parent's handlers in a child, or the handlers of the replaced
    /// program.
    pub fn clear_handlers(&self) {
        for action in self.actions.lock().iter_mut() {
            *action = action.for_exec();
        }
    }

    /// The action for `signal`.
    pub fn action(&self, signal: u32) -> Action {
        self.actions.lock()[(signal - 1) as usize]
    }

    /// The pending signals of the process.
    pub fn waiting(&self) -> Set {
        self.queue.set()
    }

    /// Returns the signals with `SIG_IGN`, and the signals with a handler, for `/proc/self/status`.
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

    /// Returns whether ended children leave no zombies, by the action for `SIGCHLD`.
    pub fn ignores_children(&self) -> bool {
        let action = self.action(linux::SIGCHLD);
        action.is_ignored_on_purpose() || action.has(linux::SA_NOCLDWAIT)
    }
}
