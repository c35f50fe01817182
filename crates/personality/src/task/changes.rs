//! Announcements of changes.

use super::thread::WaitQueue;
use core::sync::atomic::{AtomicU64, Ordering};

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
