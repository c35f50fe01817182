//! Threads and processes: who runs, who waits, who is whose child.
//!
//! A [`Thread`] is what runs; the [scheduler] decides where and when. A [`Process`] is what its
//! threads share: [memory](memory::Memory), files, signal handlers, children. [`wait`] is how a thread
//! waits for anything.
//!
//! A thread enters the kernel by a trap, whose registers stay at the top of its kernel stack, and leaves
//! through [`attention`] whenever somebody wants something of it: that it gives the CPU away, takes a
//! signal, or dies. Nobody else does these things to a thread; they are asked for by setting the
//! `attention` of the CPU that it runs on.

pub mod boot;
pub mod clone;
pub mod exec;
pub mod exit;
pub mod futex;
pub mod init;
pub mod limits;
pub mod memory;
pub mod process;
pub mod relatives;
pub mod scheduler;
pub mod status;
pub mod thread;
pub mod usage;
pub mod wait;

pub use process::Process;
pub use thread::{Current, Thread, current};

use crate::signal;
use core::sync::atomic::Ordering;
use faultless::FaultError;
use faultless_bare::arch::{TrapFrame, user};
use faultless_bare::percpu;
use faultless_bare::report;
use linux_raw_sys::general as nr;
use status::ExitStatus;

/// What a thread does on its way back to user mode when its CPU's `attention` is set. The caller cleared
/// it, and calls again if it is set once more.
pub fn attention(frame: &mut TrapFrame) {
    scheduler::finish_switch();
    let thread = current();
    if thread.must_end() {
        exit::end_thread();
    }
    if thread.task.met_end_of_memory.take() {
        out_of_memory();
        exit::end_thread();
    }
    let set_tid = thread.set_tid.take();
    if set_tid != 0 {
        // As on Linux, a place where it cannot be stored is no error.
        let _ = user::write(set_tid, &thread.tid);
    }
    scheduler::give_way();
    signal::deliver(frame);
}

/// What a program is told of a page fault that cannot be served.
pub fn page_fault(frame: &mut TrapFrame, addr: u64, error: FaultError) {
    match error {
        FaultError::Segv { mapped } => {
            let code = if mapped { nr::SEGV_ACCERR } else { nr::SEGV_MAPERR };
            signal::fault(frame, nr::SIGSEGV, code, addr);
        }
        FaultError::Bus => signal::fault(frame, nr::SIGBUS, nr::BUS_ADRERR, addr),
        FaultError::OutOfMemory => out_of_memory(),
    }
}

/// Any other exception of a program: what Linux makes of it.
pub fn exception(frame: &mut TrapFrame) {
    /// `si_code` of what the kernel says without saying more.
    const KERNEL: u32 = 0x80;
    let rip = frame.rip;
    let (signal, code, addr) = match frame.vector {
        0 => (nr::SIGFPE, nr::FPE_INTDIV, rip),
        1 => (nr::SIGTRAP, nr::TRAP_TRACE, rip),
        3 => (nr::SIGTRAP, KERNEL, 0),
        6 => (nr::SIGILL, nr::ILL_ILLOPN, rip),
        11 | 12 => (nr::SIGBUS, KERNEL, 0),
        16 | 19 => (nr::SIGFPE, nr::FPE_FLTINV, rip),
        17 => (nr::SIGBUS, nr::BUS_ADRALN, 0),
        _ => (nr::SIGSEGV, KERNEL, 0),
    };
    signal::fault(frame, signal, code, addr);
}

/// No frame is left for the running program: it is killed, once it is on its way back to user mode.
fn out_of_memory() {
    let thread = current();
    let process = &thread.process;
    if process.end.status.lock().is_none() {
        let name = process.name.lock();
        // The name is the program's choice, the line is not.
        report!("message out of memory: killed {} {}", process.pid, name.escape_debug());
    }
    exit::kill(process, ExitStatus::killed(nr::SIGKILL));
}

/// What a call does between two of its steps if it takes long: others get a turn. Returns whether the
/// call is to go on; if not, a signal waits. The caller holds no lock.
pub fn breathe() -> bool {
    give_turn();
    !signal::pending(&current())
}

/// As [`breathe`], for a call that only the end of the thread, or a `SIGKILL`, stops.
pub fn breathe_unless_killed() -> bool {
    give_turn();
    !wait::is_killed(&current())
}

fn give_turn() {
    faultless_bare::arch::serve_interrupts();
    scheduler::give_way();
}

/// The timer interrupt.
pub fn tick(frame: &TrapFrame) {
    crate::time::tick(frame);
    scheduler::tick();
}

/// The reschedule interrupt.
pub fn reschedule() {
    percpu::this().attention.store(true, Ordering::Relaxed);
}
