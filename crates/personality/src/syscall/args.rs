//! The arguments of a system call, and the form of table entries.

use crate::errno::{Errno, Result};
use core::sync::atomic::Ordering;
use faultless_bare::arch::TrapFrame;
use faultless_bare::percpu;

/// A system call: takes its arguments from the program's registers, and stores its result there.
pub type Call = fn(&mut TrapFrame);
/// A number and its system call.
pub type Entry = (u32, Call);

/// A list of system calls: their numbers, and functions from [`Args`] to a result.
macro_rules! calls {
    ($(($number:expr, $call:expr)),* $(,)?) => {
        &[$(($number, |frame| $crate::syscall::args::serve(frame, $call))),*]
    };
}

pub(crate) use calls;

/// Executes the system call of `frame`.
#[inline(always)]
pub fn serve(frame: &mut TrapFrame, call: impl FnOnce(Args<'_>) -> Result) {
    let result = call(Args { frame });
    frame.rax = match result {
        Ok(value) => value,
        Err(errno) => {
            if errno.0 >= Errno::RESTART.0 {
                // Programs never see this error: signal delivery replaces it.
                percpu::this().attention.store(true, Ordering::Relaxed);
            }
            (-i64::from(errno.0)) as u64
        }
    };
}

/// The arguments of a system call, in the program's registers.
#[derive(Debug)]
pub struct Args<'a> {
    /// All registers, for `clone`, `rt_sigreturn` and `execve`.
    pub frame: &'a mut TrapFrame,
}

impl Args<'_> {
    /// The first argument.
    #[inline(always)]
    pub fn a(&self) -> u64 {
        self.frame.rdi
    }
    /// The second.
    #[inline(always)]
    pub fn b(&self) -> u64 {
        self.frame.rsi
    }
    /// The third.
    #[inline(always)]
    pub fn c(&self) -> u64 {
        self.frame.rdx
    }
    /// The fourth.
    #[inline(always)]
    pub fn d(&self) -> u64 {
        self.frame.r10
    }
    /// The fifth.
    #[inline(always)]
    pub fn e(&self) -> u64 {
        self.frame.r8
    }
    /// The sixth.
    #[inline(always)]
    pub fn f(&self) -> u64 {
        self.frame.r9
    }
}
