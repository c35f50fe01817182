//! Job control: stopping processes.
//!
//! The threads of a stopped process wait, before they return to user mode, for `SIGCONT` or the
//! end.
//!
//! *A stop signal sent before a `SIGCONT` has no effect after the `SIGCONT`*, even if a thread has
//! already taken the stop signal out of the queue. `SIGCONT` first removes stop signals from the
//! queues, then increments a count, and then continues the process. A thread that takes a stop
//! signal reads the count first, and stops only if the count has not changed since.

use super::info::Info;
use super::job::GOES_ON;
use super::orphan::is_orphaned;
use super::send;
use super::set::{Set, bit};
use crate::task::current;
use crate::task::process::{Process, TABLE, find};
use crate::task::status::ExitStatus;
use crate::task::wait::wait_unless_killed;
use core::sync::atomic::Ordering;
use faultless_collections::Arc;
use linux_raw_sys::general as linux;

const STOPS: Set =
    bit(linux::SIGSTOP) | bit(linux::SIGTSTP) | bit(linux::SIGTTIN) | bit(linux::SIGTTOU);

/// Prepares for sending `signal` to `process`: `SIGCONT` continues the process and removes pending
/// stop signals; a stop signal removes a pending `SIGCONT`.
pub(super) fn before(process: &Arc<Process>, signal: u32) {
    let undone = match signal {
        linux::SIGCONT => STOPS,
        _ if STOPS & bit(signal) != 0 => bit(linux::SIGCONT),
        _ => return,
    };
    process.signals.queue.forget(undone);
    process.threads.lock().iter().for_each(|thread| thread.signals.queue.forget(undone));
    if signal == linux::SIGCONT && process.signals.job.go_on() {
        process.goes_on.wake_all();
        tell_parent(process, GOES_ON);
    }
}

/// Stops the running thread's process because of `signal`; `continues` was read before the signal
/// was taken.
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

/// Waits while the running thread's process is stopped, and not killed.
pub(super) fn wait() {
    let thread = current();
    let process = &thread.process;
    let job = &process.signals.job;
    if job.is_stopped() {
        let _ = wait_unless_killed(&process.goes_on, || (!job.is_stopped()).then_some(()));
    }
}

/// Notifies the parent of news in the job state. The parent may already have received these news,
/// and newer ones.
fn tell_parent(process: &Arc<Process>, news: ExitStatus) {
    let Some(parent) = find(process.parent()) else { return };
    let action = parent.signals.action(linux::SIGCHLD);
    if !action.has(linux::SA_NOCLDSTOP) {
        send::send_process(&parent, Info::child(linux::SIGCHLD, process, news));
    }
    parent.children_changed.wake_all();
}
