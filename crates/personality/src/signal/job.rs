//! Whether a process is stopped, and what its parent has not heard of that yet.

use crate::task::status::ExitStatus;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use faultless_bare::sync::Mutex;

/// How `wait4` tells of a process that goes on.
pub(super) const GOES_ON: ExitStatus = ExitStatus(0xffff);

/// Whether a process is stopped.
#[derive(Debug, Default)]
pub struct Job {
    /// Changed with `news` locked.
    stopped: AtomicBool,
    /// How often it was told to go on; changed with `news` locked.
    continues: AtomicU64,
    /// What its parent was not told yet: that it stopped, or goes on.
    pub(super) news: Mutex<Option<ExitStatus>>,
}

impl Job {
    /// Whether the process is stopped.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// How often the process was told to go on.
    pub(super) fn continues(&self) -> u64 {
        self.continues.load(Ordering::SeqCst)
    }

    /// The process goes on. False: it was not stopped.
    pub(super) fn go_on(&self) -> bool {
        let mut last = self.news.lock();
        self.continues.fetch_add(1, Ordering::SeqCst);
        let was_stopped = self.stopped.swap(false, Ordering::SeqCst);
        if was_stopped {
            *last = Some(GOES_ON);
        }
        was_stopped
    }

    /// The process stops, unless it was told to go on since `continues` was read, or is stopped.
    pub(super) fn stop(&self, continues: u64, news: ExitStatus) -> bool {
        let mut last = self.news.lock();
        let stops = self.continues() == continues && !self.stopped.swap(true, Ordering::SeqCst);
        if stops {
            *last = Some(news);
        }
        stops
    }

    /// What is new for a parent that wants to hear of stops or of going on; `keep` leaves it new.
    pub fn news(&self, of_stops: bool, of_going_on: bool, keep: bool) -> Option<ExitStatus> {
        let mut news = self.news.lock();
        let wanted = |news: &ExitStatus| if *news == GOES_ON { of_going_on } else { of_stops };
        let found = news.filter(wanted)?;
        if !keep {
            *news = None;
        }
        Some(found)
    }
}
