//! Wait queues: the threads waiting for an event.
//!
//! Queues are generic over the thread, so that threads and processes can contain queues. Waiting
//! itself is in [`wait`](super::wait).

use core::cell::Cell;
use core::{fmt, ptr};
use faultless_bare::sync::Mutex;
use faultless_collections::Arc;

/// A waiter in a queue.
pub trait Wake {
    /// Makes the waiter run again if it waits.
    fn wake(this: &Arc<Self>);
}

/// A queue of the threads waiting for an event.
pub struct WaitQueue<T> {
    ends: Mutex<Ends<T>>,
}

/// The first and the last entry of a queue; null if there is none.
struct Ends<T>([*const Entry<T>; 2]);

// SAFETY: entries are accessed only with the queue locked; they contain only pointers to references
// to `T`.
unsafe impl<T: Send + Sync> Send for Ends<T> {}

/// The entry of a waiting thread. While the entry is linked, it does not move, the queue may access
/// it, and the reference in `thread` exists.
#[derive(Debug)]
pub(super) struct Entry<T> {
    thread: Cell<*const Arc<T>>,
    /// The previous and the next entry; null at the ends.
    neighbours: [Cell<*const Self>; 2],
}

impl<T> Entry<T> {
    /// Returns an unlinked entry.
    pub(super) const fn new() -> Self {
        let neighbours = [const { Cell::new(ptr::null()) }; 2];
        Self { thread: Cell::new(ptr::null()), neighbours }
    }
}

impl<T> WaitQueue<T> {
    /// An empty queue.
    pub const fn new() -> Self {
        Self { ends: Mutex::new(Ends([ptr::null(); 2])) }
    }

    /// Links an entry at the end.
    ///
    /// # Safety
    /// `entry` is in no queue. `entry` and `thread` do not move until the entry is
    /// [unlinked](Self::unlink).
    pub(super) unsafe fn link(&self, entry: &Entry<T>, thread: &Arc<T>) {
        let mut ends = self.ends.lock();
        entry.thread.set(thread);
        let last = core::mem::replace(&mut ends.0[1], entry);
        entry.neighbours[0].set(last);
        entry.neighbours[1].set(ptr::null());
        // SAFETY: a linked entry of a locked queue.
        match unsafe { last.as_ref() } {
            Some(last) => last.neighbours[1].set(entry),
            None => ends.0[0] = entry,
        }
    }

    /// Unlinks an entry.
    ///
    /// # Safety
    /// `entry` is in this queue.
    pub(super) unsafe fn unlink(&self, entry: &Entry<T>) {
        let mut ends = self.ends.lock();
        for (at, end) in ends.0.iter_mut().enumerate() {
            let other = entry.neighbours[1 - at].get();
            // SAFETY: a linked entry of a locked queue.
            match unsafe { entry.neighbours[at].get().as_ref() } {
                Some(neighbour) => neighbour.neighbours[1 - at].set(other),
                None => *end = other,
            }
        }
    }
}

impl<T: Wake> WaitQueue<T> {
    /// Wakes all threads in the queue. The caller has already changed the awaited condition.
    pub fn wake_all(&self) {
        let ends = self.ends.lock();
        let mut at = ends.0[0];
        // SAFETY: a linked entry of a locked queue.
        while let Some(entry) = unsafe { at.as_ref() } {
            // SAFETY: the reference exists while the entry is linked.
            T::wake(unsafe { &*entry.thread.get() });
            at = entry.neighbours[1].get();
        }
    }
}

impl<T> Default for WaitQueue<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for WaitQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WaitQueue")
    }
}
