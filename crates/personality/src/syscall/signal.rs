//! System calls for signals.

use super::{Args, Errno, Result};
use crate::abi;
use crate::signal::{self, Action, AlternateStack, Info, Set};
use crate::syscall::args::{Entry, calls};
use crate::task::ids::may_signal;
use crate::task::process::{Process, TABLE, each, find_thread};
use crate::task::wait::{Stop, wait_until};
use crate::task::{Thread, current};
use crate::time;
use core::sync::atomic::Ordering;
use faultless_bare::arch::user;
use faultless_collections::Arc;
use linux_raw_sys::general as linux;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (linux::__NR_rt_sigaction, rt_sigaction),
    (linux::__NR_rt_sigprocmask, rt_sigprocmask),
    (linux::__NR_rt_sigpending, rt_sigpending),
    (linux::__NR_rt_sigsuspend, rt_sigsuspend),
    (linux::__NR_rt_sigtimedwait, rt_sigtimedwait),
    (linux::__NR_rt_sigqueueinfo, rt_sigqueueinfo),
    (linux::__NR_rt_tgsigqueueinfo, rt_tgsigqueueinfo),
    (linux::__NR_rt_sigreturn, rt_sigreturn),
    (linux::__NR_sigaltstack, sigaltstack),
    (linux::__NR_pause, pause),
    (linux::__NR_kill, kill),
    (linux::__NR_tkill, tkill),
    (linux::__NR_tgkill, tgkill),
];

/// Checks the size of a signal set.
fn check_size(size: u64) -> Result<()> {
    if size == size_of::<Set>() as u64 { Ok(()) } else { Err(Errno::EINVAL) }
}

fn number(number: u64) -> Result<u32> {
    signal::number(number).ok_or(Errno::EINVAL)
}

/// `rt_sigaction(signal, new, old, size)`.
pub fn rt_sigaction(args: Args<'_>) -> Result {
    check_size(args.d())?;
    let new: Option<Action> = if args.b() == 0 { None } else { Some(user::read(args.b())?) };
    let old = signal::set_action(&current().process, number(args.a())?, new)?;
    if args.c() != 0 {
        user::write(args.c(), &old)?;
    }
    Ok(0)
}

/// `rt_sigprocmask(how, new, old, size)`.
pub fn rt_sigprocmask(args: Args<'_>) -> Result {
    check_size(args.d())?;
    let old = current().signals.blocked();
    if args.b() != 0 {
        let set: Set = user::read(args.b())?;
        signal::block(match args.a() as u32 {
            linux::SIG_BLOCK => old | set,
            linux::SIG_UNBLOCK => old & !set,
            linux::SIG_SETMASK => set,
            _ => return Err(Errno::EINVAL),
        });
    }
    if args.c() != 0 {
        user::write(args.c(), &old)?;
    }
    Ok(0)
}

/// `rt_sigpending(set, size)`.
pub fn rt_sigpending(args: Args<'_>) -> Result {
    // As on Linux, a shorter set gets fewer signals.
    let size = args.b() as usize;
    if size > size_of::<Set>() {
        return Err(Errno::EINVAL);
    }
    let thread = current();
    let waiting = thread.signals.waiting() | thread.process.signals.waiting();
    let set = waiting & thread.signals.blocked();
    user::write_bytes(args.a(), &set.to_le_bytes()[..size])?;
    Ok(0)
}

/// Waits for the delivery of a signal.
fn wait_for_any() -> Result {
    match wait_until(&[], None, || None::<()>) {
        Ok(()) | Err(Stop::Timeout) => Ok(0),
        Err(Stop::Signal) => Err(Errno::RESTART_UNHANDLED),
    }
}

/// `rt_sigsuspend(set, size)`.
pub fn rt_sigsuspend(args: Args<'_>) -> Result {
    check_size(args.b())?;
    let set: Set = user::read(args.a())?;
    signal::with_blocked(set, wait_for_any)
}

/// `pause()`.
pub fn pause(_: Args<'_>) -> Result {
    wait_for_any()
}

/// `rt_sigtimedwait(set, info, timeout, size)`.
pub fn rt_sigtimedwait(args: Args<'_>) -> Result {
    check_size(args.d())?;
    let set: Set = user::read(args.a())?;
    let deadline = match args.c() {
        0 => None,
        at => Some(time::now().saturating_add(abi::read_timespec(at)?)),
    };
    let info = signal::wait_for(set & !signal::UNBLOCKABLE, deadline)?;
    if args.b() != 0 {
        user::write(args.b(), &info)?;
    }
    Ok(u64::from(info.signal()))
}

/// `rt_sigreturn()`.
pub fn rt_sigreturn(args: Args<'_>) -> Result {
    Ok(signal::restore(args.frame))
}

/// `sigaltstack(new, old)`.
pub fn sigaltstack(args: Args<'_>) -> Result {
    let sp = args.frame.rsp;
    let new: Option<AlternateStack> =
        if args.a() == 0 { None } else { Some(user::read(args.a())?) };
    let mut old = current().signals.stack.get();
    if let Some(new) = new {
        signal::set_stack(&new, sp)?;
    }
    if args.b() != 0 {
        if old.holds(sp) {
            old.flags |= linux::SS_ONSTACK;
        }
        user::write(args.b(), &old)?;
    }
    Ok(0)
}

/// Returns the signal to send; `None` for 0, which only checks permissions.
fn to_send(signal: u64) -> Result<Option<u32>> {
    if signal as u32 == 0 { Ok(None) } else { number(signal).map(Some) }
}

/// Returns the process with this number, or the process of the thread with this number.
fn process_of(number: u32) -> Result<Arc<Process>> {
    let table = TABLE.lock();
    let of_thread = || table.threads.get(&number).map(|thread| thread.process.clone());
    table.processes.get(&number).cloned().or_else(of_thread).ok_or(Errno::ESRCH)
}

/// `kill(pid, signal)`.
pub fn kill(args: Args<'_>) -> Result {
    let pid = args.a() as i32;
    let (mut found, mut permitted) = (false, false);
    let signal = to_send(args.b());
    let mut send = |process: &Arc<Process>| {
        found = true;
        if !may_send(process, args.b()) {
            return;
        }
        permitted = true;
        if let Ok(Some(signal)) = signal {
            signal::send_process(process, Info::sent(signal, &current().process, false));
        }
    };
    match pid {
        1.. => {
            send(&process_of(pid as u32)?);
        }
        i32::MIN => {}
        _ => {
            let own = &current().process;
            let group = match pid {
                0 => own.relatives.group.load(Ordering::Relaxed),
                _ => pid.unsigned_abs(),
            };
            let is_meant = |process: &Arc<Process>| {
                if pid == -1 {
                    // All processes but process 1 and the caller.
                    process.pid > 1 && process.pid != own.pid
                } else {
                    process.relatives.group.load(Ordering::Relaxed) == group
                }
            };
            each(|process| {
                if is_meant(process) {
                    send(process);
                }
            });
        }
    }
    match (found, permitted) {
        (false, _) => Err(Errno::ESRCH),
        // As on Linux, a signal to all processes need not reach any process.
        (true, false) if pid != -1 => signal.and(Err(Errno::EPERM)),
        (true, _) => signal.map(|_| 0),
    }
}

/// Returns whether the caller may send `signal` to `process`: within a session, every process may
/// send `SIGCONT`.
fn may_send(process: &Process, signal: u64) -> bool {
    let session = |of: &Process| of.relatives.session.load(Ordering::Relaxed);
    let continues = signal as u32 == linux::SIGCONT;
    may_signal(process) || continues && session(process) == session(&current().process)
}

fn check_permission(process: &Process, signal: u64) -> Result<()> {
    if may_send(process, signal) { Ok(()) } else { Err(Errno::EPERM) }
}

/// Returns the thread `tid`, if it belongs to the process `pid` (`None`: to any process).
fn thread_of(pid: Option<i32>, tid: i32) -> Result<Arc<Thread>> {
    if tid <= 0 || pid.is_some_and(|pid| pid <= 0) {
        return Err(Errno::EINVAL);
    }
    let fits = |thread: &Arc<Thread>| pid.is_none_or(|pid| thread.process.pid == pid as u32);
    find_thread(tid as u32).filter(fits).ok_or(Errno::ESRCH)
}

fn send_to_thread(pid: Option<i32>, tid: i32, signal: u64) -> Result {
    let thread = thread_of(pid, tid)?;
    check_permission(&thread.process, signal)?;
    if let Some(signal) = to_send(signal)? {
        let info = Info::sent(signal, &current().process, true);
        if signal >= linux::SIGRTMIN {
            signal::queue_thread(&thread, info)?;
        } else {
            signal::send_thread(&thread, info);
        }
    }
    Ok(0)
}

/// `tkill(tid, signal)`.
pub fn tkill(args: Args<'_>) -> Result {
    send_to_thread(None, args.a() as i32, args.b())
}

/// `tgkill(pid, tid, signal)`.
pub fn tgkill(args: Args<'_>) -> Result {
    send_to_thread(Some(args.a() as i32), args.b() as i32, args.c())
}

/// Reads the information about `signal` at `at` in the program's memory. Information for other
/// processes must not claim to come from the kernel.
fn told(at: u64, signal: u64, to: u32) -> Result<Info> {
    let info: Info = user::read(at)?;
    if (info.code() >= 0 || info.code() == linux::SI_TKILL) && to != current().process.pid {
        return Err(Errno::EPERM);
    }
    Ok(info.as_signal(signal as u32))
}

/// `rt_sigqueueinfo(pid, signal, info)`.
pub fn rt_sigqueueinfo(args: Args<'_>) -> Result {
    let pid = args.a() as u32;
    let info = told(args.c(), args.b(), pid)?;
    let process = process_of(pid)?;
    check_permission(&process, args.b())?;
    if to_send(args.b())?.is_some() {
        signal::queue_process(&process, info)?;
    }
    Ok(0)
}

/// `rt_tgsigqueueinfo(pid, tid, signal, info)`.
pub fn rt_tgsigqueueinfo(args: Args<'_>) -> Result {
    let pid = args.a() as i32;
    let info = told(args.d(), args.c(), pid as u32)?;
    let thread = thread_of(Some(pid), args.b() as i32)?;
    check_permission(&thread.process, args.c())?;
    if to_send(args.c())?.is_some() {
        signal::queue_thread(&thread, info)?;
    }
    Ok(0)
}
