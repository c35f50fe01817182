//! Waiting: for a pipe, a child, a lock, a time, a signal.
//!
//! Who waits puts itself on the [queues](WaitQueue) of what it waits for, says that it is blocked, and
//! only then looks whether it still has to wait. Who makes something ready changes it first and wakes
//! the queue afterwards. So either the waiter sees the change, or the waker sees the waiter.
//!
//! To wait needs no memory: a thread's [`Place`]s in queues lie on its stack, and it takes them out before it goes on.

use super::scheduler;
pub use super::thread::WaitQueue;
use super::thread::{Thread, current};
use super::wait_queue::Entry;
use crate::signal;
use crate::time;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::arch::clock;
use faultless_collections::Arc;

/// A place to wait in.
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

/// Announcements of changes.
#[derive(Debug, Default)]
pub struct Changes {
    /// Who waits for one.
    pub queue: WaitQueue,
    count: AtomicU64,
}

impl Changes {
    /// Announces a change, which has been made already.
    pub fn announce(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.queue.wake_all();
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}

/// Why a wait ended without what was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The deadline passed.
    Timeout,
    /// A signal is to be delivered, or the thread is to die.
    Signal,
}

/// Waits until `ready` gives something; it is asked again whenever one of `queues` is woken. `deadline`
/// is in nanoseconds since boot. The caller holds no lock.
///
/// # Errors
/// Why the wait ended without it.
pub fn wait_until<const N: usize, R>(
    queues: &[&WaitQueue; N],
    deadline: Option<u64>,
    ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    wait_at(&queues.map(Place::at), deadline, ready)
}

/// As [`wait_until`], in places that are there already.
///
/// # Errors
/// Why the wait ended without it.
pub fn wait_at<R>(
    places: &[Place<'_>],
    deadline: Option<u64>,
    ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    wait(places, deadline, |thread| thread.must_end() || signal::pending(thread), ready)
}

/// As [`wait_until`], but only the end of the thread, or a `SIGKILL`, stops it, with [`Stop::Signal`].
///
/// # Errors
/// Why the wait ended without it.
pub fn wait_unless_killed<R>(
    queue: &WaitQueue,
    ready: impl FnMut() -> Option<R>,
) -> Result<R, Stop> {
    wait(&[Place::at(queue)], None, |thread| is_killed(thread), ready)
}

/// Whether `thread` is to end, or a `SIGKILL` waits for it.
pub fn is_killed(thread: &Thread) -> bool {
    thread.must_end() || signal::killed(thread)
}

/// As [`wait_until`], and nothing stops it: for what is about to happen.
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
            // SAFETY: `places` is borrowed, and `thread` stays, until they are taken out below; nothing in between
            // leaves this function.
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
