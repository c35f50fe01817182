//! The upcalls of the machine into the kernel above it.
//!
//! A kernel implements [`Kernel`], and the linked crate names it with [`kernel!`](crate::kernel!). Each upcall is a
//! function that the linker resolves, and that link-time optimisation may inline; there is no indirect call.
//! A page fault that the subsystem serves makes no upcall at all.
//!
//! Every upcall is made with interrupts off, on the kernel stack of the running task (or on the CPU's own, at the
//! start and in idle), and may wait for locks only. Those that get the frame of a program may switch to
//! another task, and return when this one continues.

use crate::arch::TrapFrame;
use crate::percpu::{self, Interrupt};
use core::fmt;
use faultless::{Access, FaultError};

/// A kernel above the bare machine.
pub trait Kernel {
    /// Called once, on the boot CPU, when the subsystem works and `cpus` CPUs are up. The other CPUs wait until it
    /// returns.
    fn start(cpus: usize);

    /// What each CPU does then: run tasks, and [wait](crate::arch::idle) while there are none.
    fn run() -> !;

    /// The program made a system call, with the registers `frame`: `rax` is its number, and gets its result.
    fn system_call(frame: &mut TrapFrame);

    /// The program caused a page fault that the subsystem does not resolve. It continues with the registers `frame`, and
    /// would cause the fault again.
    fn page_fault(frame: &mut TrapFrame, addr: u64, access: Access, why: FaultError);

    /// The program's access to `addr` waits for a page that is [being read](faultless::Cpu::pending_read). When this returns
    /// the program makes the access again. By default this CPU waits.
    fn pending(frame: &mut TrapFrame, addr: u64, access: Access) {
        if percpu::cpu().await_read().is_err() {
            Self::page_fault(frame, addr, access, FaultError::Bus);
        }
    }

    /// A device has `interrupted` this CPU; or this CPU waits for a read, and devices may be done. Reads of backing stores may be
    /// completed, with no locks but those of devices and of wait queues. Does nothing by default.
    fn devices(_interrupted: bool) {}

    /// The program caused another exception, `frame.vector`.
    fn exception(frame: &mut TrapFrame);

    /// The timer or another CPU interrupted this one, in user mode or in idle. Does nothing by default.
    fn interrupt(_interrupt: Interrupt, _frame: &TrapFrame) {}

    /// The task returns to user mode, and its CPU's [attention](crate::percpu::PerCpu::attention) was set.
    /// It is clear now; if it is set again, this is called again. Does nothing by default.
    fn attention(_frame: &mut TrapFrame) {}

    /// Names the running task in the report of a panic.
    fn describe(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the running task")
    }
}

unsafe extern "Rust" {
    #[link_name = "faultless_kernel_start"]
    pub(crate) safe fn start(cpus: usize);
    #[link_name = "faultless_kernel_run"]
    pub(crate) safe fn run() -> !;
    #[link_name = "faultless_kernel_page_fault"]
    pub(crate) safe fn page_fault(
        frame: &mut TrapFrame,
        addr: u64,
        access: Access,
        why: FaultError,
    );
    #[link_name = "faultless_kernel_pending"]
    pub(crate) safe fn pending(frame: &mut TrapFrame, addr: u64, access: Access);
    #[link_name = "faultless_kernel_devices"]
    pub(crate) safe fn devices(interrupted: bool);
    #[link_name = "faultless_kernel_exception"]
    pub(crate) safe fn exception(frame: &mut TrapFrame);
    #[link_name = "faultless_kernel_interrupt"]
    pub(crate) safe fn interrupt(interrupt: Interrupt, frame: &TrapFrame);
    #[link_name = "faultless_kernel_attention"]
    pub(crate) safe fn attention(frame: &mut TrapFrame);
    #[link_name = "faultless_kernel_describe"]
    pub(crate) safe fn describe(f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

unsafe extern "C" {
    /// Called by the entry itself.
    #[link_name = "faultless_kernel_system_call"]
    pub(crate) safe fn system_call(frame: &mut TrapFrame);
}

/// Makes a type that implements [`Kernel`] the kernel of the linked crate. Used once.
#[macro_export]
macro_rules! kernel {
    ($kernel:ty) => {
        const _: () = {
            use ::core::fmt;
            use $crate::arch::TrapFrame;
            use $crate::faultless::{Access, FaultError};
            use $crate::percpu::Interrupt;
            $crate::kernel! {
                $kernel,
                fn faultless_kernel_start = start(cpus: usize) -> ();
                fn faultless_kernel_run = run() -> !;
                extern "C" fn faultless_kernel_system_call = system_call(frame: &mut TrapFrame) -> ();
                fn faultless_kernel_page_fault = page_fault(frame: &mut TrapFrame, addr: u64, access: Access, why: FaultError) -> ();
                fn faultless_kernel_pending = pending(frame: &mut TrapFrame, addr: u64, access: Access) -> ();
                fn faultless_kernel_devices = devices(interrupted: bool) -> ();
                fn faultless_kernel_exception = exception(frame: &mut TrapFrame) -> ();
                fn faultless_kernel_interrupt = interrupt(interrupt: Interrupt, frame: &TrapFrame) -> ();
                fn faultless_kernel_attention = attention(frame: &mut TrapFrame) -> ();
                fn faultless_kernel_describe = describe(f: &mut fmt::Formatter<'_>) -> fmt::Result;
            }
        };
    };
    ($kernel:ty, $($(extern $abi:literal)? fn $symbol:ident = $name:ident($($arg:ident: $of:ty),*) -> $result:ty;)*) => {
        $(#[unsafe(no_mangle)]
        $(extern $abi)? fn $symbol($($arg: $of),*) -> $result {
            <$kernel as $crate::Kernel>::$name($($arg),*)
        })*
    };
}
