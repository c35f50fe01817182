//! Waiting: for a pipe, a child, a lock, a time, a signal.
//!
//! A waiter links itself into the [queues](WaitQueue) of the awaited events, marks itself as
//! blocked, and only then checks whether it still has to wait. A waker first changes the condition,
//! and then wakes the queue. So either the waiter sees the change, or the waker sees the waiter.
//!
//! Waiting needs no memory: a thread's [`Place`]s in queues lie on its stack, and the thread
//! unlinks its places before it continues.

use super::scheduler;
pub use super::thread::WaitQueue;
use super::thread::{Thread, current};
use super::wait_queue::Entry;
use crate::signal;
use crate::time;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::arch::clock;
use faultless_collections::Arc;

/// A place in a queue.
#[derive(Debug)]
pub struct Place<'a> {
    queue: &'a WaitQueue,
    entry: Entry<Thread>,
}

impl<'a> Place<'a> {
    /// A place in `queue`.
    pub const fn at(queue: &'a WaitQueue) -> Self {
        Self { queue, entry: Entry::new() }
    }

    /// The queue.
    pub const fn queue(&self) -> &'a WaitQueue {
        self.queue
    }
}

/// Announces changes of a file: a queue, and a count of announcements.
#[derive(Debug, Default)]
pub struct Changes {
    /// The threads waiting for a change.
    pub queue: WaitQueue,
    count: AtomicU64,
}

impl Changes {
    /// Announces a completed change.
    pub fn announce(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.queue.wake_all();
    }

    /// The number of announcements.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}

/// Why a wait ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The deadline passed.
    Timeout,
    /// A signal is pending, or the thread must end.
    Signal,
}

/// Waits until `ready` returns a result; `ready` is called again whenever one of `queues` is woken.
/// `deadline` is in nanoseconds since boot. The caller holds no lock.
///
/// # Errors
/// The reason for an early end of the wait.
pub fn wait_until<const N: usize, R>(
    queues: &[&WaitQueue; N],
    deadline: Option<u64>,
    ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    wait_at(&queues.map(Place::at), deadline, ready)
}

/// Waits like [`wait_until`], in given places.
///
/// # Errors
/// The reason for an early end of the wait.
pub fn wait_at<R>(
    places: &[Place<'_>],
    deadline: Option<u64>,
    ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    wait(places, deadline, |thread| thread.must_end() || signal::pending(thread), ready)
}

/// Waits like [`wait_until`], but only the end of the thread, or a `SIGKILL`, ends the wait early,
/// with [`Stop::Signal`].
///
/// # Errors
/// The reason for an early end of the wait.
pub fn wait_unless_killed<R>(
    queue: &WaitQueue,
    ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    wait(&[Place::at(queue)], None, |thread| is_killed(thread), ready)
}

/// Returns whether `thread` must end, or has a pending `SIGKILL`.
pub fn is_killed(thread: &Thread) -> bool {
    thread.must_end() || signal::killed(thread)
}

/// Waits like [`wait_until`], without any early end: for conditions that become true soon.
pub fn wait_in_any_case<R>(queue: &WaitQueue, mut ready: impl FnMut() -> Option<R>) -> R {
    let place = [Place::at(queue)];
    loop {
        if let Ok(result) = wait(&place, None, |_| false, &mut ready) {
            return result;
        }
    }
}

fn wait<R>(
    places: &[Place<'_>],
    deadline: Option<u64>,
    stopped: impl Fn(&Arc<Thread>) -> bool,
    mut ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    if let Some(result) = ready() {
        return Ok(result);
    }
    let thread = current().arc();
    loop {
        for Place { queue, entry } in places {
            // SAFETY: `places` is borrowed, and `thread` exists, until the entries are unlinked
            // below; no code in between leaves this function.
            unsafe { queue.link(entry, &thread) };
        }
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
        for Place { queue, entry } in places {
            // SAFETY: linked above.
            unsafe { queue.unlink(entry) };
        }
        if let Some(result) = result {
            return result;
        }
    }
}
