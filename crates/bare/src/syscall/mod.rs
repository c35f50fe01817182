//! System calls, by Linux's numbers, with Linux's errors.
//!
//! One file a family of calls; each call is a function of its [`Args`]. What is not there returns `ENOSYS`
//! and is named on the report once.

mod errno;
pub mod memory;

pub use errno::{Errno, Result};

use crate::arch::{TrapFrame, report};
use core::sync::atomic::{AtomicU64, Ordering};
use linux_raw_sys::general as nr;

/// `vector` of a frame that is of a system call; its `error` is then the call's number.
pub const SYSTEM_CALL: u64 = 256;

/// The arguments of a call, as the program left them in its registers.
#[derive(Debug)]
pub struct Args<'a> {
    /// All registers: clone, sigreturn and execve need, or change, them.
    pub frame: &'a mut TrapFrame,
}

impl Args<'_> {
    /// The first argument; and so on.
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

/// Serves the system call of `frame`, whose `rax` is its number.
pub fn dispatch(frame: &mut TrapFrame) {
    let number = frame.rax;
    frame.vector = SYSTEM_CALL;
    frame.error = number;
    let result = call(number as u32, Args { frame });
    frame.rax = match result {
        Ok(value) => value,
        Err(errno) => (-i64::from(errno.0)) as u64,
    };
}

fn call(number: u32, args: Args<'_>) -> Result {
    match number {
        // Memory
        nr::__NR_mmap => memory::mmap(args),
        nr::__NR_munmap => memory::munmap(args),
        nr::__NR_mprotect => memory::mprotect(args),
        nr::__NR_mremap => memory::mremap(args),
        nr::__NR_madvise => memory::madvise(args),
        nr::__NR_brk => memory::brk(args),
        nr::__NR_mincore => memory::mincore(args),
        nr::__NR_msync => memory::msync(args),
        nr::__NR_mlock | nr::__NR_mlock2 => memory::mlock(args),
        nr::__NR_munlock | nr::__NR_mlockall | nr::__NR_munlockall => Ok(0),

        // Processes and threads

        // Signals

        // Time

        // Files

        // The system

        _ => missing(number),
    }
}

/// Numbers that were named already, as bits; one more for all beyond.
static NAMED: [AtomicU64; 9] = [const { AtomicU64::new(0) }; 9];

#[cold]
fn missing(number: u32) -> Result {
    let at = number.min(512);
    let bit = 1 << (at % 64);
    if NAMED[(at / 64) as usize].fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        report!("message system call {number} is not there");
    }
    Err(Errno::ENOSYS)
}
