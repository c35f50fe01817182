//! The machine's upcalls for a thread: return to user mode, exceptions, interrupts.

use super::{balance, current, exit, lack, reads, scheduler};
use crate::errno::Errno;
use crate::fs;
use crate::signal;
use core::sync::atomic::Ordering;
use faultless::FaultError;
use faultless_bare::arch::{TrapFrame, user};
use faultless_bare::percpu;
use linux_raw_sys::general as nr;

/// Handles a thread's requests on its return to user mode, if its CPU's `attention` is set. The
/// caller clears the flag first, and calls again if the flag is set again.
pub fn attention(frame: &mut TrapFrame) {
    scheduler::finish_switch();
    let thread = current();
    if thread.must_end() {
        exit::end_thread();
    }
    lack::resume(frame, thread.task.lack.take());
    if thread.must_end() {
        exit::end_thread();
    }
    let set_tid = thread.set_tid.take();
    if set_tid != 0 {
        // As on Linux, a bad address is no error.
        let _ = user::write(set_tid, &thread.tid);
    }
    scheduler::give_way();
    if scheduler::take_slice_end() {
        balance::balance();
    }
    thread.process.text.run(|| thread.process.memory());
    signal::deliver(frame);
}

/// Sends the signal of a page fault that cannot be served; if memory is out, waits for memory.
pub fn page_fault(frame: &mut TrapFrame, addr: u64, error: FaultError) {
    match error {
        FaultError::Segv { mapped } => {
            let code = if mapped { nr::SEGV_ACCERR } else { nr::SEGV_MAPERR };
            signal::fault(frame, nr::SIGSEGV, code, addr);
        }
        FaultError::Bus => signal::fault(frame, nr::SIGBUS, nr::BUS_ADRERR, addr),
        FaultError::OutOfMemory => lack::fault(),
    }
}

/// Lets other threads run until the page at `addr` has been read.
pub fn pending(frame: &mut TrapFrame, addr: u64) {
    let thread = current();
    thread.major_faults.fetch_add(1, Ordering::Relaxed);
    let Some(read) = percpu::cpu().pending_read() else { return };
    fs::cache::make_room();
    match reads::wait(&read) {
        // A killed thread ends on its return.
        Ok(()) | Err(Errno::EINTR) => {}
        Err(_) => page_fault(frame, addr, FaultError::Bus),
    }
}

/// Sends Linux's signal for any other exception of a program.
pub fn exception(frame: &mut TrapFrame) {
    /// `SI_KERNEL`.
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

/// The timer interrupt.
pub fn tick(frame: &TrapFrame) {
    crate::time::tick(frame);
    scheduler::tick();
}

/// The reschedule interrupt.
pub fn reschedule() {
    percpu::this().attention.store(true, Ordering::Relaxed);
}
