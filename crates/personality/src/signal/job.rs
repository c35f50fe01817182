//! Job control: whether a process is stopped, and what its parent has not seen of that yet.

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
    /// How often it got `SIGCONT`; changed with `news` locked.
    continues: AtomicU64,
    /// The last stop or continuation, until the parent has waited for it.
    news: Mutex<Option<ExitStatus>>,
}

impl Job {
    /// Whether the process is stopped.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// How often the process got `SIGCONT`.
    pub(super) fn continues(&self) -> u64 {
        self.continues.load(Ordering::SeqCst)
    }

    /// Continues the process. False: it was not stopped.
    pub(super) fn go_on(&self) -> bool {
        let mut last = self.news.lock();
        self.continues.fetch_add(1, Ordering::SeqCst);
        let was_stopped = self.stopped.swap(false, Ordering::SeqCst);
        if was_stopped {
            *last = Some(GOES_ON);
        }
        was_stopped
    }

    /// Stops the process, unless it got `SIGCONT` since `continues` was read, or is stopped.
    pub(super) fn stop(&self, continues: u64, news: ExitStatus) -> bool {
        let mut last = self.news.lock();
        let stops = self.continues() == continues && !self.stopped.swap(true, Ordering::SeqCst);
        if stops {
            *last = Some(news);
        }
        stops
    }

    /// The news for a parent that waits for stops or continuations; it is removed unless `keep`.
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
