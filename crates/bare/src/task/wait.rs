//! Waiting: for a pipe, a child, a lock, a time, a signal.
//!
//! Who waits puts itself on the [queues](WaitQueue) of what it waits for, says that it is blocked, and
//! only then looks whether it still has to wait. Who makes something ready changes it first and wakes
//! the queue afterwards. So either the waiter sees the change, or the waker sees the waiter.

use super::scheduler;
use super::thread::{Thread, current};
use crate::arch::clock;
use crate::signal;
use crate::sync::Mutex;
use crate::time;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// Threads that wait for one thing.
#[derive(Debug, Default)]
pub struct WaitQueue {
    waiters: Mutex<Vec<Arc<Thread>>>,
}

/// Why a wait ended without what was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The deadline passed.
    Timeout,
    /// A signal is to be delivered, or the thread is to die.
    Signal,
}

impl WaitQueue {
    /// A queue in which nobody waits.
    pub const fn new() -> Self {
        Self { waiters: Mutex::new(Vec::new()) }
    }

    /// Wakes everybody. What they wait for has changed already.
    pub fn wake_all(&self) {
        self.waiters.lock().iter().for_each(scheduler::wake);
    }

    fn add(&self, thread: &Arc<Thread>) {
        self.waiters.lock().push(thread.clone());
    }

    fn remove(&self, thread: &Arc<Thread>) {
        let mut waiters = self.waiters.lock();
        if let Some(at) = waiters.iter().position(|waiter| Arc::ptr_eq(waiter, thread)) {
            waiters.swap_remove(at);
        }
    }
}

/// Waits until `ready` gives something; it is asked again whenever one of `queues` is woken. `deadline`
/// is in nanoseconds since boot. The caller holds no lock.
///
/// # Errors
/// Why the wait ended without it.
pub fn wait_until<R>(
    queues: &[&WaitQueue],
    deadline: Option<u64>,
    ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    wait(queues, deadline, |thread| thread.must_end() || signal::pending(thread), ready)
}

/// As [`wait_until`], but only the end of the thread, or a `SIGKILL`, stops it, with [`Stop::Signal`].
///
/// # Errors
/// Why the wait ended without it.
pub fn wait_unless_killed<R>(
    queues: &[&WaitQueue],
    ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    wait(queues, None, |thread| is_killed(thread), ready)
}

/// Whether `thread` is to end, or a `SIGKILL` waits for it.
pub fn is_killed(thread: &Thread) -> bool {
    thread.must_end() || signal::killed(thread)
}

/// As [`wait_until`], and nothing stops it: for what is about to happen.
pub fn wait_in_any_case<R>(queues: &[&WaitQueue], mut ready: impl FnMut() -> Option<R>) -> R {
    loop {
        if let Ok(result) = wait(queues, None, |_| false, &mut ready) {
            return result;
        }
    }
}

fn wait<R>(
    queues: &[&WaitQueue],
    deadline: Option<u64>,
    stopped: impl Fn(&Arc<Thread>) -> bool,
    mut ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    if let Some(result) = ready() {
        return Ok(result);
    }
    let thread = current().arc();
    loop {
        queues.iter().for_each(|queue| queue.add(&thread));
        scheduler::block();
        let timer = deadline.map(|at| time::wake_at(at, &thread));
        let result = match ready() {
            Some(result) => Some(Ok(result)),
            None if stopped(&thread) => Some(Err(Stop::Signal)),
            None if deadline.is_some_and(|at| clock::now() >= at) => Some(Err(Stop::Timeout)),
            None => None,
        };
        if result.is_some() {
            scheduler::unblock();
        } else {
            scheduler::sleep();
        }
        if let Some(timer) = timer {
            time::cancel(timer);
        }
        queues.iter().for_each(|queue| queue.remove(&thread));
        if let Some(result) = result {
            return result;
        }
    }
}
