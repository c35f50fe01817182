//! The handlers called by the entries: page faults first, then everything else.
//!
//! A page fault of the program, or of a copy from or to the program's memory, goes to
//! [`Space::fault`](faultless::Space::fault) of the space that this CPU runs. (A copy without a
//! running task goes to [`Space::fault_remote`](faultless::Space::fault_remote).) A fault that
//! cannot be served goes to the [kernel](crate::Kernel) above, or to the fixup of the copy. Any
//! other page fault in the kernel is fatal.
//!
//! An instruction of a program can also make the processor itself access memory with kernel rights,
//! for example a descriptor. No mapping of the program can make such an access succeed, so its
//! fault fails at once. If the fault were served, the instruction would repeat the fault endlessly.

pub mod entry;
mod overrun;

use crate::arch::{TrapFrame, apic, user};
use crate::console;
use crate::kernel;
use crate::machine::plant::{self, Plant};
use crate::machine::{self, Bare};
use crate::percpu::{self, Interrupt, PerCpu};
use crate::reserve::{self, Lack};
use crate::task;
use core::sync::atomic::Ordering;
use faultless::{Access, FaultError, FaultKind, Space, USER_END};
use x86_64::registers::control::Cr2;

/// The double fault: the processor could not deliver an exception because the stack has overflowed.
const DOUBLE_FAULT: u64 = 8;
/// Bits of a page fault's error code.
const PRESENT: u64 = 1;
const WRITE: u64 = 1 << 1;
/// The access was made with user rights.
const USER: u64 = 1 << 2;
const RESERVED: u64 = 1 << 3;
const FETCH: u64 = 1 << 4;

/// Returns the space that this CPU runs.
#[inline(always)]
fn running(here: &PerCpu) -> Option<&Space<Bare>> {
    // SAFETY: set by `machine::run`, by whose contract the space exists while it runs.
    unsafe { here.space.get().as_ref() }
}

/// Vector 14.
extern "C" fn page_fault(frame: &mut TrapFrame) {
    let addr = Cr2::read_raw();
    let access = if frame.error & FETCH != 0 {
        Access::Execute
    } else if frame.error & WRITE != 0 {
        Access::Write
    } else {
        Access::Read
    };
    let here = percpu::this();
    if frame.of_user()
        && frame.error & (RESERVED | USER) == USER
        && let Some(space) = running(here)
        && let Some(task) = task::running(here)
    {
        match space.fault(here.cpu(), &task.streams, addr, access) {
            Ok(FaultKind::Pending) => kernel::pending(frame, addr, access),
            Ok(_) => task.count_fault(),
            Err(refusal) => refuse(frame, addr, access, refusal),
        }
        return;
    }
    with_rights_of_kernel(frame, addr, access);
}

/// Passes the fault of a program to the kernel above. As on Linux, the error code visible to the
/// program reveals no information about the kernel's tables: each access to a kernel address is a
/// protection fault, and each access has user rights.
#[cold]
#[inline(never)]
fn refuse(frame: &mut TrapFrame, addr: u64, access: Access, refusal: FaultError) {
    frame.error |= if addr >= USER_END { USER | PRESENT } else { USER };
    kernel::page_fault(frame, addr, access, refusal);
}

/// Serves a fault of a copy from or to `space`, on behalf of the running task, if there is one.
fn serve(
    here: &PerCpu,
    space: &Space<Bare>,
    addr: u64,
    access: Access,
) -> Result<FaultKind, FaultError> {
    match task::running(here) {
        Some(task) => space.fault(here.cpu(), &task.streams, addr, access),
        None => space.fault_remote(here.cpu(), addr, access),
    }
}

/// Handles a page fault in the kernel, or of an access made by the processor for the program, or
/// with a reserved bit set.
#[cold]
#[inline(never)]
fn with_rights_of_kernel(frame: &mut TrapFrame, addr: u64, access: Access) {
    let here = percpu::this();
    if frame.of_user() && frame.error & (RESERVED | USER) == 0 {
        let refusal = FaultError::Segv { mapped: frame.error & PRESENT != 0 };
        return refuse(frame, addr, access, refusal);
    }
    if frame.error & RESERVED == 0
        && !frame.of_user()
        && let Some(fixup) = user::fixup(frame.rip)
    {
        // AC was cleared by the entry; the return to the instruction sets it again.
        match running(here).map(|space| serve_in_any_case(here, space, addr, access)) {
            // The copy may hold any lock: this CPU waits.
            Some(Ok(FaultKind::Pending)) if here.cpu().await_read().is_err() => {}
            Some(Ok(_)) => return,
            Some(Err(_)) | None => {}
        }
        frame.rip = fixup;
        return;
    }
    console::panic(format_args!("page fault at {addr:#x} on cpu {}: {frame:?}", here.id.get().0));
}

/// Serves a fault like [`serve`], and without a free frame as long as the [reserve] lends frames.
/// The kernel handles the lack on the return to user mode, because the copy may hold any lock.
fn serve_in_any_case(
    here: &PerCpu,
    space: &Space<Bare>,
    addr: u64,
    access: Access,
) -> Result<FaultKind, FaultError> {
    /// Other CPUs may take lent frames.
    const TRIES: usize = 3;
    let mut lent = 0;
    loop {
        let served = serve(here, space, addr, access);
        if served != Err(FaultError::OutOfMemory) {
            return served;
        }
        let lack = match reserve::is_lack() {
            false => Lack::Hopeless,
            true if lent < TRIES && reserve::lend() => Lack::Lent,
            true => Lack::Failed,
        };
        note(here, lack);
        if lack != Lack::Lent {
            return served;
        }
        lent += 1;
    }
}

fn note(here: &PerCpu, lack: Lack) {
    if let Some(task) = task::running(here) {
        task.lack.set(task.lack.get().max(lack));
        here.attention.store(true, Ordering::Relaxed);
    }
}

/// Handles every other vector.
extern "C" fn trap(frame: &mut TrapFrame) {
    match apic::Vector::from_number(frame.vector) {
        Some(vector) => interrupt(vector, frame),
        None if frame.of_user() => kernel::exception(frame),
        None => fatal(frame),
    }
}

fn interrupt(vector: apic::Vector, frame: &TrapFrame) {
    let here = percpu::this();
    match vector {
        apic::Vector::Flush => {
            here.count(Interrupt::Flush);
            apic::end_of_interrupt();
            machine::serve();
        }
        // The only purpose of this interrupt is to end the halt.
        apic::Vector::Wake => apic::end_of_interrupt(),
        apic::Vector::Reschedule => {
            here.count(Interrupt::Reschedule);
            apic::end_of_interrupt();
            kernel::interrupt(Interrupt::Reschedule, frame);
        }
        apic::Vector::Timer => {
            here.count(Interrupt::Timer);
            apic::end_of_interrupt();
            machine::tick();
            kernel::interrupt(Interrupt::Timer, frame);
        }
        apic::Vector::Device => {
            here.count(Interrupt::Device);
            kernel::devices(true);
            // The device has lowered its line.
            apic::end_of_interrupt();
        }
        // A spurious interrupt has no EOI.
        apic::Vector::Spurious => {}
        apic::Vector::Error => {
            apic::end_of_interrupt();
            console::panic(format_args!(
                "the interrupt controller of cpu {} failed",
                here.id.get().0
            ));
        }
    }
}

/// An unexpected exception in the kernel.
extern "C" fn fatal(frame: &mut TrapFrame) {
    let id = percpu::id().0;
    let in_user = if frame.of_user() { " from user mode" } else { "" };
    if frame.vector == DOUBLE_FAULT
        && let Some(whose) = overrun::overrun(Cr2::read_raw())
    {
        if !matches!(whose, overrun::Overrun::Fatal) {
            plant::run_over(Plant::OverrunFatal);
        }
        console::panic(format_args!("{whose} was run over on cpu {id}: {frame:?}"));
    }
    console::panic(format_args!("exception{in_user} on cpu {id}: {frame:?}"));
}
