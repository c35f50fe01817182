//! Signals as files (`signalfd`).
//!
//! A reader takes the pending signals of its own thread and process, so the events depend on the
//! calling thread. All of these files share one announcement, for any signal to any process.

use super::stream::{Events, Stream};
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::signal::{self, Set, UNBLOCKABLE};
use crate::task::current;
use crate::task::wait::Changes;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_collections::Arc;

/// A file of the signals in a set.
#[derive(Debug)]
pub struct SignalFile {
    set: AtomicU64,
    changes: Arc<Changes>,
}

impl SignalFile {
    /// A file for `set`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(set: Set) -> Result<Arc<Self>> {
        let changes = signal::sent()?;
        Ok(Arc::try_new(Self { set: AtomicU64::new(set & !UNBLOCKABLE), changes })?)
    }

    /// Changes the set.
    pub fn set(&self, set: Set) {
        self.set.store(set & !UNBLOCKABLE, Ordering::SeqCst);
        self.changes.announce();
    }
}

impl Stream for SignalFile {
    fn read(&self, to: &mut Transfer<'_>) -> Result {
        if to.left() < signal::TOLD as u64 {
            return Err(Errno::EINVAL);
        }
        let set = self.set.load(Ordering::SeqCst);
        while to.left() >= signal::TOLD as u64
            && let Some(info) = signal::take_waiting(set)
        {
            to.put_bytes(&info.told());
        }
        if to.moved() == 0 && to.left() != 0 { Err(Errno::EAGAIN) } else { to.result() }
    }

    fn ready(&self) -> Events {
        let thread = current();
        let waiting = thread.signals.waiting() | thread.process.signals.waiting();
        match waiting & self.set.load(Ordering::SeqCst) {
            0 => Events::empty(),
            _ => Events::READ,
        }
    }

    fn changes(&self) -> Option<&Arc<Changes>> {
        Some(&self.changes)
    }
}
