//! The bare machine: a kernel for x86-64 under which the subsystem serves real page faults of real programs.
//!
//! It is started by PVH (QEMU's `-kernel`), runs static Linux programs, and ends with the first of them.
//! Rooms: [`boot`] from the loader to the first thread, [`arch`] the processor, [`machine`] what the subsystem
//! wants beneath it, [`percpu`] and [`heap`] what everything stands on.
//!
//! The kernel is not preempted: interrupts are off whenever a CPU is in it, but for the wait in idle.
#![no_std]
#![no_main]

extern crate alloc;

mod arch;
mod boot;
mod heap;
mod machine;
mod percpu;
mod selfcheck;

use selfcheck::{syscall, task};

/// What the boot CPU does once all CPUs are up and the subsystem is there, before any runs a thread.
pub fn kernel_main(cpus: usize) {
    task::scheduler::init(cpus);
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    arch::console::panic(format_args!("{info}"))
}
