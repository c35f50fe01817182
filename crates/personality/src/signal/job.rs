//! Job control: the stop state of a process, and the news for its parent.

use crate::task::status::ExitStatus;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use faultless_bare::sync::Mutex;

/// The status of a process that continues, for `wait4`.
pub(super) const GOES_ON: ExitStatus = ExitStatus(0xffff);

/// The job-control state of a process.
#[derive(Debug, Default)]
pub struct Job {
    /// Changed with `news` locked.
    stopped: AtomicBool,
    /// The number of `SIGCONT`s so far; changed with `news` locked.
    continues: AtomicU64,
    /// The last stop or continuation, until the parent has waited for this event.
    news: Mutex<Option<ExitStatus>>,
}

impl Job {
    /// Returns whether the process is stopped.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Returns the number of `SIGCONT`s so far.
    pub(super) fn continues(&self) -> u64 {
        self.continues.load(Ordering::SeqCst)
    }

    /// Continues the process. False: the process was not stopped.
    pub(super) fn go_on(&self) -> bool {
        let mut last = self.news.lock();
        self.continues.fetch_add(1, Ordering::SeqCst);
        let was_stopped = self.stopped.swap(false, Ordering::SeqCst);
        if was_stopped {
            *last = Some(GOES_ON);
        }
        was_stopped
    }

    /// Stops the process, unless it is stopped, or has received `SIGCONT` since `continues` was
    /// read.
    pub(super) fn stop(&self, continues: u64, news: ExitStatus) -> bool {
        let mut last = self.news.lock();
        let stops = self.continues() == continues && !self.stopped.swap(true, Ordering::SeqCst);
        if stops {
            *last = Some(news);
        }
        stops
    }

    /// Returns the news for a parent that waits for stops or continuations; removes the news unless
    /// `keep`.
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
