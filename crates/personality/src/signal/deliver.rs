//! Delivery of pending signals to a thread, on its return to user mode.

use super::action::{Action, Disposition};
use super::mask::block;
use super::pending::{pending, take};
use super::{frame, send, stop};
use crate::errno::Errno;
use crate::task::status::ExitStatus;
use crate::task::{cond_resched, current, exit};
use faultless_bare::arch::SYSTEM_CALL;
use faultless_bare::arch::TrapFrame;
use linux_raw_sys::general as linux;

/// Delivers the pending signals of the running thread with the registers `frame`.
pub fn deliver(frame: &mut TrapFrame) {
    let thread = current();
    let signals = &thread.signals;
    let mut interrupted = interrupted_call(frame);
    loop {
        stop::wait();
        if thread.must_end() {
            exit::end_thread();
        }
        if !pending(&thread) {
            break;
        }
        let continues = thread.process.signals.job.continues();
        let Some(info) = take(&thread, !signals.blocked()) else { continue };
        let signal = info.signal();
        let action = {
            let mut actions = thread.process.signals.actions.lock();
            let action = &mut actions[(signal - 1) as usize];
            let found = *action;
            if found.has(linux::SA_RESETHAND)
                && matches!(found.disposition(signal), Disposition::Handle(_))
            {
                *action = Action::default();
            }
            found
        };
        match action.disposition(signal) {
            Disposition::Ignore => {}
            Disposition::Terminate => exit::exit_group(ExitStatus::killed(signal)),
            Disposition::Stop => stop::stop(signal, continues),
            Disposition::Handle(handler) => {
                if let Some(errno) = interrupted.take() {
                    signals.resume.set(None);
                    let again = errno == Errno::RESTART && action.has(linux::SA_RESTART);
                    finish_call(frame, if again { None } else { Some(Errno::EINTR) });
                }
                // The mask after the handler.
                let blocked = signals.saved.take().unwrap_or(signals.blocked());
                match frame::push(frame, &info, &action, handler, blocked) {
                    Ok(()) => block(signals.blocked() | action.blocks(signal)),
                    Err(_) => {
                        block(blocked);
                        send::force_segv(signal);
                    }
                }
                // This loop may run for an unlimited time: a handler that cannot start causes
                // another signal. So other threads run in between, one of which may kill the
                // process.
                let _ = cond_resched();
            }
        }
    }
    if interrupted.is_some() {
        finish_call(frame, None);
    }
    if let Some(blocked) = signals.saved.take() {
        // This may unblock signals.
        block(blocked);
    }
}

/// The restart error of the system call from which `frame` returns, if it was interrupted.
fn interrupted_call(frame: &TrapFrame) -> Option<Errno> {
    if frame.vector != SYSTEM_CALL || frame.error == u64::from(linux::__NR_rt_sigreturn) {
        return None;
    }
    [Errno::RESTART, Errno::RESTART_UNHANDLED]
        .into_iter()
        .find(|errno| frame.rax == (-i64::from(errno.0)) as u64)
}

/// Makes an interrupted call return `errno`, or restarts the call.
fn finish_call(frame: &mut TrapFrame, errno: Option<Errno>) {
    match errno {
        Some(errno) => frame.rax = (-i64::from(errno.0)) as u64,
        None => restart_call(frame),
    }
}

/// Makes the program repeat its call, on the return from the system call with the registers
/// `frame`.
pub fn restart_call(frame: &mut TrapFrame) {
    /// Bytes of the instruction.
    const SYSCALL: u64 = 2;
    frame.rax = frame.error;
    frame.rip -= SYSCALL;
}
