//! System calls, by Linux's numbers, with Linux's errors.
//!
//! One file a family of calls; each call is a function of its [`Args`]. What is not there returns `ENOSYS`
//! and is named on the report once.

mod errno;
pub mod futex;
pub mod memory;
pub mod process;
pub mod sched;
pub mod system;

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
        nr::__NR_getpid => process::getpid(args),
        nr::__NR_gettid => process::gettid(args),
        nr::__NR_getppid => process::getppid(args),
        nr::__NR_fork => process::fork(args),
        nr::__NR_vfork => process::vfork(args),
        nr::__NR_clone => process::clone(args),
        nr::__NR_clone3 => process::clone3(args),
        nr::__NR_execve => process::execve(args),
        nr::__NR_execveat => process::execveat(args),
        nr::__NR_exit => process::exit(&args),
        nr::__NR_exit_group => process::exit_group(&args),
        nr::__NR_wait4 => process::wait4(args),
        nr::__NR_waitid => process::waitid(args),
        nr::__NR_getpgid => process::getpgid(args),
        nr::__NR_getpgrp => process::getpgrp(args),
        nr::__NR_getsid => process::getsid(args),
        nr::__NR_setpgid => process::setpgid(args),
        nr::__NR_setsid => process::setsid(args),
        nr::__NR_set_tid_address => process::set_tid_address(args),
        nr::__NR_set_robust_list => process::set_robust_list(args),
        nr::__NR_get_robust_list => process::get_robust_list(args),
        nr::__NR_arch_prctl => process::arch_prctl(args),
        nr::__NR_prctl => process::prctl(args),
        nr::__NR_futex => futex::futex(args),
        nr::__NR_sched_yield => sched::sched_yield(args),
        nr::__NR_sched_setaffinity => sched::sched_setaffinity(args),
        nr::__NR_sched_getaffinity => sched::sched_getaffinity(args),
        nr::__NR_sched_setscheduler => sched::sched_setscheduler(args),
        nr::__NR_sched_getscheduler => sched::sched_getscheduler(args),
        nr::__NR_sched_setparam => sched::sched_setparam(args),
        nr::__NR_sched_getparam => sched::sched_getparam(args),
        nr::__NR_sched_getattr => sched::sched_getattr(args),
        nr::__NR_sched_get_priority_max => sched::sched_get_priority(args, 99),
        nr::__NR_sched_get_priority_min => sched::sched_get_priority(args, 1),
        nr::__NR_sched_rr_get_interval => sched::sched_rr_get_interval(args),
        nr::__NR_getpriority => sched::getpriority(args),
        nr::__NR_setpriority => sched::setpriority(args),
        nr::__NR_getcpu => sched::getcpu(args),

        // Signals

        // Time

        // Files

        // The system
        nr::__NR_uname => system::uname(args),
        nr::__NR_sysinfo => system::sysinfo(args),
        nr::__NR_getrandom => system::getrandom(args),
        nr::__NR_prlimit64 => system::prlimit64(args),
        nr::__NR_getrlimit => system::getrlimit(args),
        nr::__NR_setrlimit => system::setrlimit(args),
        nr::__NR_getrusage => system::getrusage(args),
        nr::__NR_times => system::times(args),
        nr::__NR_getresuid | nr::__NR_getresgid => system::getresuid(args),
        nr::__NR_getgroups => system::getgroups(args),
        nr::__NR_capget => system::capget(args),
        nr::__NR_membarrier => system::membarrier(args),
        nr::__NR_personality => system::personality(args),
        nr::__NR_reboot => system::reboot(args),
        // Everybody is root, and stays it.
        nr::__NR_getuid | nr::__NR_geteuid | nr::__NR_getgid | nr::__NR_getegid => Ok(0),
        nr::__NR_setuid | nr::__NR_setgid | nr::__NR_setreuid | nr::__NR_setregid => Ok(0),
        nr::__NR_setresuid | nr::__NR_setresgid | nr::__NR_setgroups | nr::__NR_capset => Ok(0),
        nr::__NR_setfsuid | nr::__NR_setfsgid => Ok(0),
        // Nobody needs it told that it is not there: glibc asks each time, and does without.
        nr::__NR_rseq => Err(Errno::ENOSYS),

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
