//! The queue of pending signals of a thread or a process.
//!
//! A signal below 32 is queued at most once, with its first information; real-time signals are
//! queued each time.

use super::info::Info;
use super::set::{Set, bit};
use crate::errno::{Errno, Result};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::Vec;
use linux_raw_sys::general as linux;

/// Synchronous signals, which are delivered first.
const SYNCHRONOUS: Set = bit(linux::SIGSEGV)
    | bit(linux::SIGBUS)
    | bit(linux::SIGILL)
    | bit(linux::SIGTRAP)
    | bit(linux::SIGFPE)
    | bit(linux::SIGSYS);

/// Pending signals.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// The set of pending signals: changed with `infos` locked, read without the lock.
    set: AtomicU64,
    /// The information of the signals, in order of arrival.
    infos: Mutex<Vec<Info>>,
}

impl Queue {
    /// Returns the set of pending signals.
    #[inline]
    pub(super) fn set(&self) -> Set {
        self.set.load(Ordering::SeqCst)
    }

    /// Queues a signal. Without `room` (`RLIMIT_SIGPENDING`), or if memory is short, the signal
    /// becomes pending without its information.
    ///
    /// # Errors
    /// `EAGAIN` in this case, if a program supplied information with a real-time signal.
    pub(super) fn push(&self, info: Info, room: bool) -> Result<()> {
        let mut infos = self.infos.lock();
        let signal = info.signal();
        if signal < linux::SIGRTMIN && self.set() & bit(signal) != 0 {
            return Ok(());
        }
        if let Some(counted) = info.of_timer()
            && let Some(waiting) =
                infos.iter_mut().find(|it| it.of_timer().is_some_and(|(id, _)| id == counted.0))
        {
            // The pending signal counts this expiration, too.
            waiting.overrun_more(counted.1.saturating_add(1));
            return Ok(());
        }
        if room && infos.try_push(info).is_ok() {
            // The signal is pending with its information.
        } else if signal >= linux::SIGRTMIN && info.code() < 0 {
            return Err(Errno::EAGAIN);
        }
        self.set.fetch_or(bit(signal), Ordering::SeqCst);
        Ok(())
    }

    /// Returns the number of queued information records.
    pub(super) fn count(&self) -> u64 {
        self.infos.lock().len() as u64
    }

    /// Takes the first pending signal of `wanted`.
    pub(super) fn take(&self, wanted: Set) -> Option<Info> {
        if self.set() & wanted == 0 {
            return None;
        }
        let mut infos = self.infos.lock();
        let mut waiting = self.set() & wanted;
        if waiting & SYNCHRONOUS != 0 {
            waiting &= SYNCHRONOUS;
        }
        if waiting == 0 {
            return None;
        }
        let signal = waiting.trailing_zeros() + 1;
        let at = infos.iter().position(|info| info.signal() == signal);
        let info = at.map_or(Info::lost(signal), |at| infos.remove(at));
        if !infos.iter().any(|info| info.signal() == signal) {
            self.set.fetch_and(!bit(signal), Ordering::SeqCst);
        }
        Some(info)
    }

    /// Removes the signals of a set.
    pub(super) fn forget(&self, set: Set) {
        if self.set() & set == 0 {
            return;
        }
        let mut infos = self.infos.lock();
        infos.retain(|info| set & bit(info.signal()) == 0);
        self.set.fetch_and(!set, Ordering::SeqCst);
    }
}
