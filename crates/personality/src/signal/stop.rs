//! Job control: stopped processes.
//!
//! A stopped process has its threads wait on their way back to user mode, until `SIGCONT` or the end.
//!
//! *A stop that came before a `SIGCONT` has no effect after it*, even if a thread has taken it out of the
//! queue already: `SIGCONT` empties the queues of stops, then counts itself, then has the process go on; who
//! takes a stop reads the count before it takes it, and stops only if the count is still that.

use super::orphan::is_orphaned;
use super::{Info, Set, bit, send};
use crate::task::current;
use crate::task::process::{Process, TABLE, find};
use crate::task::status::ExitStatus;
use crate::task::wait::{WaitQueue, wait_unless_killed};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::Arc;
use linux_raw_sys::general as linux;

/// How `wait4` tells of a process that goes on.
const GOES_ON: ExitStatus = ExitStatus(0xffff);

const STOPS: Set =
    bit(linux::SIGSTOP) | bit(linux::SIGTSTP) | bit(linux::SIGTTIN) | bit(linux::SIGTTOU);

/// Whether a process is stopped.
#[derive(Debug, Default)]
pub struct Job {
    /// Changed with `news` locked.
    stopped: AtomicBool,
    /// How often it was told to go on; changed with `news` locked.
    continues: AtomicU64,
    /// Woken when it goes on.
    goes_on: WaitQueue,
    /// What its parent was not told yet: that it stopped, or goes on.
    news: Mutex<Option<ExitStatus>>,
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
    fn go_on(&self) -> bool {
        let mut last = self.news.lock();
        self.continues.fetch_add(1, Ordering::SeqCst);
        let was_stopped = self.stopped.swap(false, Ordering::SeqCst);
        if was_stopped {
            *last = Some(GOES_ON);
        }
        was_stopped
    }

    /// The process stops, unless it was told to go on since `continues` was read, or is stopped.
    fn stop(&self, continues: u64, news: ExitStatus) -> bool {
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

/// Before `signal` is sent to `process`: `SIGCONT` has it go on and takes the signals back that would stop
/// it, which take back a `SIGCONT`.
pub(super) fn before(process: &Arc<Process>, signal: u32) {
    let undone = match signal {
        linux::SIGCONT => STOPS,
        _ if STOPS & bit(signal) != 0 => bit(linux::SIGCONT),
        _ => return,
    };
    process.signals.queue.forget(undone);
    process.threads.lock().iter().for_each(|thread| thread.signals.queue.forget(undone));
    let job = &process.signals.job;
    if signal == linux::SIGCONT && job.go_on() {
        job.goes_on.wake_all();
        tell_parent(process, GOES_ON);
    }
}

/// Stops the running thread's process because of `signal`, which was taken when it had been told to go on
/// so often.
pub(super) fn stop(signal: u32, continues: u64) {
    let process = current().process.clone();
    let group = process.relatives.group.load(Ordering::Relaxed);
    if signal != linux::SIGSTOP && is_orphaned(&TABLE.lock(), group, 0) {
        return;
    }
    let news = ExitStatus(signal << 8 | 0x7f);
    if !process.signals.job.stop(continues, news) {
        return;
    }
    process.threads.lock().iter().for_each(send::tell);
    tell_parent(&process, news);
}

/// Waits while the running thread's process is stopped, and is not to be killed.
pub(super) fn wait() {
    let thread = current();
    let job = &thread.process.signals.job;
    if job.is_stopped() {
        let _ = wait_unless_killed(&job.goes_on, || (!job.is_stopped()).then_some(()));
    }
}

fn tell_parent(process: &Arc<Process>, news: ExitStatus) {
    *process.signals.job.news.lock() = Some(news);
    let Some(parent) = find(process.parent()) else { return };
    let action = parent.signals.action(linux::SIGCHLD);
    if !action.has(linux::SA_NOCLDSTOP) {
        send::send_process(
            &parent,
            Info::child(linux::SIGCHLD, process.pid, process.times(), news),
        );
    }
    parent.children_changed.wake_all();
}
