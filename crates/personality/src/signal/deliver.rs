//! Delivery: what a thread does about the signals that wait for it, on its way back to user mode.

use super::action::{Action, Disposition};
use super::mask::block;
use super::pending::{pending, take};
use super::{frame, send, stop};
use crate::errno::Errno;
use crate::task::status::ExitStatus;
use crate::task::{breathe, current, exit};
use faultless_bare::arch::SYSTEM_CALL;
use faultless_bare::arch::TrapFrame;
use linux_raw_sys::general as linux;

/// Has the running thread, whose registers are `frame`, do about signals what is to be done.
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
                // What is blocked again when the handler returns.
                let blocked = signals.saved.take().unwrap_or(signals.blocked());
                match frame::push(frame, &info, &action, handler, blocked) {
                    Ok(()) => block(signals.blocked() | action.blocks(signal)),
                    Err(_) => {
                        block(blocked);
                        send::force_segv(signal);
                    }
                }
                // There may be many, and more all the time: a handler that cannot even begin is a signal
                // again. Between two of them others get a turn, and whoever kills the process its way.
                let _ = breathe();
            }
        }
    }
    if interrupted.is_some() {
        finish_call(frame, None);
    }
    if let Some(blocked) = signals.saved.take() {
        // This may let something through.
        block(blocked);
    }
}

/// How the system call that `frame` comes back from was interrupted, if it was.
fn interrupted_call(frame: &TrapFrame) -> Option<Errno> {
    if frame.vector != SYSTEM_CALL || frame.error == u64::from(linux::__NR_rt_sigreturn) {
        return None;
    }
    [Errno::RESTART, Errno::RESTART_UNHANDLED]
        .into_iter()
        .find(|errno| frame.rax == (-i64::from(errno.0)) as u64)
}

/// Has a call that was interrupted return `errno`, or be made again.
fn finish_call(frame: &mut TrapFrame, errno: Option<Errno>) {
    /// Bytes of the instruction.
    const SYSCALL: u64 = 2;
    match errno {
        Some(errno) => frame.rax = (-i64::from(errno.0)) as u64,
        None => {
            frame.rax = frame.error;
            frame.rip -= SYSCALL;
        }
    }
}
