//! System calls, by Linux's numbers, with Linux's errors.
//!
//! There is one file for each family. Each system call is a function of its [`Args`], and each file
//! lists its calls by number. A missing call returns `ENOSYS`, and is reported once.

pub mod across;
mod args;
pub mod file;
pub mod futex;
pub mod ids;
pub mod ipc;
pub mod memory;
pub mod mempolicy;
pub mod mlock;
pub mod numa;
pub mod process;
pub mod sched;
pub mod signal;
pub mod system;
pub mod time;

pub use crate::errno::{Errno, Result};
pub use args::Args;

use crate::task::current;
use args::{Call, Entry, calls};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::arch::TrapFrame;
use faultless_bare::report;
use linux_raw_sys::general as nr;
use syscalls::Sysno;

/// Serves the system call of `frame`, with its number in `rax`.
#[inline]
pub fn dispatch(frame: &mut TrapFrame) {
    // As on Linux, the upper half of the register is ignored.
    let number = frame.rax as u32 as usize;
    TABLE.get(number).copied().unwrap_or(MISSING)(frame);
}

/// All system calls, one list for each file.
const CALLS: &[&[Entry]] = &[
    ALWAYS,
    memory::CALLS,
    mlock::CALLS,
    across::CALLS,
    numa::CALLS,
    mempolicy::CALLS,
    ipc::shm::CALLS,
    ipc::sem::CALLS,
    ipc::msg::CALLS,
    process::CALLS,
    futex::CALLS,
    ids::CALLS,
    sched::CALLS,
    signal::CALLS,
    time::CALLS,
    file::open::CALLS,
    file::special::CALLS,
    file::rw::CALLS,
    file::range::CALLS,
    file::descriptor::CALLS,
    file::lock::CALLS,
    file::meta::CALLS,
    file::names::CALLS,
    file::poll::CALLS,
    file::socket::CALLS,
    system::CALLS,
];

/// System calls with a constant result: all files are in memory.
const ALWAYS: &[Entry] = calls![
    // Only programs use this number: the kernel restarts calls under their own number.
    (nr::__NR_restart_syscall, |_| Err(Errno::EINTR)),
    (nr::__NR_sync, |_| Ok(0)),
    // Not reported: glibc always tries this call, and works without it.
    (nr::__NR_rseq, |_| Err(Errno::ENOSYS)),
];

const MISSING: Call = |frame| args::serve(frame, missing);

/// The length of the table.
const NUMBERS: usize = 512;

/// The system calls by number.
static TABLE: [Call; NUMBERS] = {
    let mut table: [Call; NUMBERS] = [MISSING; NUMBERS];
    let mut list = 0;
    while list < CALLS.len() {
        let mut at = 0;
        while at < CALLS[list].len() {
            let (number, call) = CALLS[list][at];
            table[number as usize] = call;
            at += 1;
        }
        list += 1;
    }
    table
};

/// The reported numbers, as bits; one more bit stands for all larger numbers.
static NAMED: [AtomicU64; 9] = [const { AtomicU64::new(0) }; 9];

#[cold]
fn missing(args: Args<'_>) -> Result {
    let number = args.frame.rax as u32;
    let at = number.min(NUMBERS as u32);
    let bit = 1 << (at % 64);
    if NAMED[(at / 64) as usize].fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        let name = Sysno::new(number as usize).map_or("no call of Linux", |call| call.name());
        let process = &current().process;
        // The program chooses the name; it must not break the line of the report.
        report!(
            "message system call {number} ({name}) of {} is not implemented",
            process.name.lock().escape_debug()
        );
    }
    Err(Errno::ENOSYS)
}
