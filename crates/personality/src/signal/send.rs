//! Sending signals.

use super::action::{Action, Disposition};
use super::info::Info;
use super::pending::takes;
use super::set::{Set, Trap, UNBLOCKABLE, bit};
use super::stop;
use crate::errno::Result;
use crate::task::process::Process;
use crate::task::status::ExitStatus;
use crate::task::wait::Changes;
use crate::task::{Thread, current, scheduler};
use core::ptr;
use core::sync::atomic::Ordering;
use faultless_bare::arch::TrapFrame;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Weak};
use linux_raw_sys::general as linux;

/// Sends a signal to a process.
pub fn send_process(process: &Arc<Process>, info: Info) {
    // The signal becomes pending even if its information is dropped.
    let _ = queue_process(process, info);
}

/// Sends a signal to a thread.
pub fn send_thread(thread: &Arc<Thread>, info: Info) {
    // As `send_process`.
    let _ = queue_thread(thread, info);
}

/// As [`send_process`], with an error.
///
/// # Errors
/// `EAGAIN` if too many signals wait already.
pub fn queue_process(process: &Arc<Process>, info: Info) -> Result<()> {
    post(process, None, info)
}

/// As [`send_thread`], with an error.
///
/// # Errors
/// `EAGAIN` if too many signals wait already.
pub fn queue_thread(thread: &Arc<Thread>, info: Info) -> Result<()> {
    post(&thread.process, Some(thread), info)
}

/// Sends `parent` the signal for the end of `child`.
pub fn child_ended(parent: &Arc<Process>, signal: u32, child: &Arc<Process>, status: ExitStatus) {
    send_process(parent, Info::child(signal, child, status));
}

fn post(process: &Arc<Process>, thread: Option<&Arc<Thread>>, info: Info) -> Result<()> {
    let signal = info.signal();
    stop::before(process, signal);
    queue(process, thread, info)?;
    announce();
    Ok(())
}

/// Announces every sent signal, to any process, while a `signalfd` exists.
static SENT: Mutex<Weak<Changes>> = Mutex::new(Weak::new());

/// Returns the announcements of signals, shared by all `signalfd`, since few exist.
///
/// # Errors
/// `ENOMEM`.
pub fn sent() -> Result<Arc<Changes>> {
    let mut sent = SENT.lock();
    if let Some(changes) = sent.upgrade() {
        return Ok(changes);
    }
    let new = Arc::try_new(Changes::default())?;
    *sent = Arc::downgrade(&new);
    Ok(new)
}

/// Announces a signal, which is queued already. The caller holds no lock.
fn announce() {
    let changes = SENT.lock().upgrade();
    if let Some(changes) = changes {
        changes.announce();
    }
}

/// How many signals wait with their information for `process` and its `threads`.
fn count<'a>(process: &Process, threads: impl Iterator<Item = &'a Arc<Thread>>) -> u64 {
    let of_threads = threads.map(|thread| thread.signals.queue.count());
    process.signals.queue.count() + of_threads.sum::<u64>()
}

/// How many signals of a process wait with their information.
pub fn queued(process: &Process) -> u64 {
    count(process, process.threads.lock().iter())
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
    // As on Linux, the limit does not apply to signals below the real-time signals from the kernel
    // and from `kill`. The limit counts the signals of the process; Linux counts the signals of all
    // processes of a user.
    let room = signal < linux::SIGRTMIN && info.code() >= 0 || {
        count(process, threads.iter()) < process.limits.signals.load(Ordering::Relaxed)
    };
    match thread {
        Some(thread) => {
            thread.signals.queue.push(info, room)?;
            if takes(thread, signal) {
                tell(thread);
            }
        }
        None => {
            process.signals.queue.push(info, room)?;
            // As on Linux, the first thread has priority if it accepts the signal.
            if let Some(taker) = threads.iter().find(|thread| takes(thread, signal)) {
                tell(taker);
            }
        }
    }
    Ok(())
}

/// Makes `thread` check for pending signals.
pub(super) fn tell(thread: &Arc<Thread>) {
    scheduler::wake(thread);
    scheduler::notify(thread);
}

/// Notifies threads other than `but` of the process's pending signals in `set`.
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

/// Passes the pending signals of the process to its other threads, because `thread` ends.
pub fn thread_ends(thread: &Thread) {
    tell_others(&thread.process, thread, !0);
}

/// Sends the running thread, with the registers `frame`, the signal of an exception. If the signal
/// is ignored or blocked, the process is killed.
pub fn fault(frame: &mut TrapFrame, signal: u32, code: u32, addr: u64) {
    let thread = current();
    let trap = Trap { vector: frame.vector, error: frame.error, addr };
    thread.signals.trap.set(trap);
    force(Info::fault(signal, code, addr));
}

/// Sends the running thread a signal that cannot be ignored.
pub(super) fn force(info: Info) {
    let thread = current().arc();
    let signal = info.signal();
    let set = bit(signal);
    {
        let mut actions = thread.process.signals.actions.lock();
        let action = &mut actions[(signal - 1) as usize];
        let blocked = thread.signals.blocked.fetch_and(!set, Ordering::SeqCst) & set != 0;
        if blocked || action.is_ignored_on_purpose() {
            *action = Action::default();
        }
    }
    debug_assert!(set & UNBLOCKABLE == 0 || signal == linux::SIGKILL);
    send_thread(&thread, info);
}

/// Sends `SIGSEGV` like [`force`], if the frame of `signal` is bad or cannot be written. If
/// `signal` is `SIGSEGV` itself, the process is killed.
pub(super) fn force_segv(signal: u32) {
    if signal == linux::SIGSEGV {
        let process = &current().process;
        process.signals.actions.lock()[(signal - 1) as usize] = Action::default();
    }
    force(Info::kernel(linux::SIGSEGV));
}
