//! Sending signals.

use super::{Disposition, Info, Set, UNBLOCKABLE, bit, stop, takes};
use crate::errno::Result;
use crate::fs::signals;
use crate::task::process::Process;
use crate::task::status::ExitStatus;
use crate::task::{Thread, current, scheduler};
use core::ptr;
use core::sync::atomic::Ordering;
use faultless_bare::arch::TrapFrame;
use faultless_collections::Arc;
use linux_raw_sys::general as linux;

/// Sends a signal to a process.
pub fn send_process(process: &Arc<Process>, info: Info) {
    // It always waits, if not with all that it tells.
    let _ = queue_process(process, info);
}

/// Sends a signal to a thread.
pub fn send_thread(thread: &Arc<Thread>, info: Info) {
    // As `send_process`.
    let _ = queue_thread(thread, info);
}

/// As [`send_process`], for a program that wants to know.
///
/// # Errors
/// `EAGAIN` if too many signals wait already.
pub fn queue_process(process: &Arc<Process>, info: Info) -> Result<()> {
    post(process, None, info)
}

/// As [`send_thread`], for a program that wants to know.
///
/// # Errors
/// `EAGAIN` if too many signals wait already.
pub fn queue_thread(thread: &Arc<Thread>, info: Info) -> Result<()> {
    post(&thread.process, Some(thread), info)
}

/// Tells `parent` that `child` has ended.
pub fn child_ended(parent: &Arc<Process>, signal: u32, child: &Arc<Process>, status: ExitStatus) {
    send_process(parent, Info::child(signal, child.pid, child.times(), status));
}

fn post(process: &Arc<Process>, thread: Option<&Arc<Thread>>, info: Info) -> Result<()> {
    let signal = info.signal();
    stop::before(process, signal);
    queue(process, thread, info)?;
    signals::announce();
    Ok(())
}

fn queue(process: &Process, thread: Option<&Arc<Thread>>, info: Info) -> Result<()> {
    let signal = info.signal();
    let threads = process.threads.lock();
    let kept = match thread {
        Some(thread) => thread.signals.kept(),
        None => threads.iter().fold(0, |set, thread| set | thread.signals.kept()),
    };
    let ignored = process.signals.action(signal).disposition(signal) == Disposition::Ignore;
    if ignored && kept & bit(signal) == 0 {
        return Ok(());
    }
    match thread {
        Some(thread) => {
            thread.signals.queue.push(info)?;
            if takes(thread, signal) {
                tell(thread);
            }
        }
        None => {
            process.signals.queue.push(info)?;
            // The first thread if it takes it, as on Linux.
            if let Some(taker) = threads.iter().find(|thread| takes(thread, signal)) {
                tell(taker);
            }
        }
    }
    Ok(())
}

/// Has `thread` look at what waits for it.
pub(super) fn tell(thread: &Arc<Thread>) {
    scheduler::wake(thread);
    scheduler::notify(thread);
}

/// Tells other threads of what waits for any of the process, is in `set`, and `but` will not take.
pub(super) fn tell_others(process: &Process, but: &Thread, set: Set) {
    let mut left = process.signals.queue.set() & set;
    if left == 0 {
        return;
    }
    for thread in process.threads.lock().iter().filter(|it| !ptr::eq(Arc::as_ptr(it), but)) {
        let taken = left & !thread.signals.blocked();
        if taken != 0 && !thread.must_end() {
            tell(thread);
            left &= !taken;
        }
    }
}

/// A signal for what the running thread just did, which `frame` tells; it cannot be ignored: if it is, or
/// is blocked, the process dies of it.
pub fn fault(frame: &mut TrapFrame, signal: u32, code: u32, addr: u64) {
    let thread = current();
    let trap = super::Trap { vector: frame.vector, error: frame.error, addr };
    thread.signals.trap.set(trap);
    force(Info::fault(signal, code, addr));
}

/// Sends the running thread a signal that it cannot ignore.
pub(super) fn force(info: Info) {
    let thread = current().arc();
    let signal = info.signal();
    let set = bit(signal);
    {
        let mut actions = thread.process.signals.actions.lock();
        let action = &mut actions[(signal - 1) as usize];
        let blocked = thread.signals.blocked.fetch_and(!set, Ordering::SeqCst) & set != 0;
        if blocked || action.is_ignored_on_purpose() {
            *action = super::Action::default();
        }
    }
    debug_assert!(set & UNBLOCKABLE == 0 || signal == linux::SIGKILL);
    send_thread(&thread, info);
}

/// As [`force`] for `SIGSEGV`, when a frame of `signal` cannot be made, or is not one: if that was a
/// `SIGSEGV` itself, the process dies.
pub(super) fn force_segv(signal: u32) {
    if signal == linux::SIGSEGV {
        let process = &current().process;
        process.signals.actions.lock()[(signal - 1) as usize] = super::Action::default();
    }
    force(Info::kernel(linux::SIGSEGV));
}
