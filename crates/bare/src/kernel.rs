//! The upcalls of the machine into the kernel above.
//!
//! A kernel implements [`Kernel`], and the linked crate names the kernel with
//! [`kernel!`](crate::kernel!). Each upcall is a function resolved by the linker, which link-time
//! optimisation may inline; there is no indirect call. A page fault served by the subsystem makes
//! no upcall.
//!
//! Every upcall is made with interrupts off, on the kernel stack of the running task (or on the
//! CPU's own stack, at the start and in idle), and may wait only for locks. Upcalls with the frame
//! of a program may switch to another task, and return when this task continues.

use crate::arch::TrapFrame;
use crate::percpu::{self, Interrupt};
use core::fmt;
use faultless::{Access, FaultError};

/// A kernel above the bare machine.
pub trait Kernel {
    /// Starts the kernel. Called once, on the boot CPU, when the subsystem works and `cpus` CPUs
    /// are up. The other CPUs wait until this call returns.
    fn start(cpus: usize);

    /// Runs tasks on each CPU after the start, and [waits](crate::arch::idle) while there are no
    /// tasks.
    fn run() -> !;

    /// Serves a system call of the program with the registers `frame`: `rax` is the number, and
    /// receives the result.
    fn system_call(frame: &mut TrapFrame);

    /// Handles a page fault of the program that the subsystem does not resolve. The program
    /// continues with the registers `frame`, and would cause the fault again.
    fn page_fault(frame: &mut TrapFrame, addr: u64, access: Access, why: FaultError);

    /// Waits for a page that is [being read](faultless::Cpu::pending_read) for the program's access
    /// to `addr`. After the return, the program repeats the access. The default waits on this CPU.
    fn pending(frame: &mut TrapFrame, addr: u64, access: Access) {
        if percpu::cpu().await_read().is_err() {
            Self::page_fault(frame, addr, access, FaultError::Bus);
        }
    }

    /// Handles an interrupt of this CPU by a device (`interrupted`), or a wait of this CPU for a
    /// read that devices may have completed. The kernel may complete reads of backing stores, and
    /// may take only the locks of devices and of wait queues. The default does nothing.
    fn devices(_interrupted: bool) {}

    /// Handles another exception of the program, `frame.vector`.
    fn exception(frame: &mut TrapFrame);

    /// Handles an interrupt by the timer or another CPU, in user mode or in idle. The default does
    /// nothing.
    fn interrupt(_interrupt: Interrupt, _frame: &TrapFrame) {}

    /// Handles a task's return to user mode after its CPU's
    /// [attention](crate::percpu::PerCpu::attention) was set. The flag is clear now; if it is set
    /// again, this upcall is repeated. The default does nothing.
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
