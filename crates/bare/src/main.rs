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
mod fs;
mod heap;
mod ipc;
mod machine;
mod percpu;
mod signal;
mod sync;
mod syscall;
mod task;
mod time;

/// What the boot CPU does once all CPUs are up and the subsystem is there, before any runs a thread.
pub fn kernel_main(cpus: usize) {
    // SAFETY: this is the beginning, and the boot CPU.
    unsafe { task::scheduler::init(cpus) };
    for setting in boot::words("set") {
        match setting.parse() {
            Ok(setting) => percpu::vm().set(setting),
            Err(error) => arch::report!("message set={setting}: {error}"),
        }
    }
    task::boot::boot(boot::initrd());
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    // On one line, as the report is read.
    match info.location() {
        Some(at) => arch::console::panic(format_args!("{} ({at})", info.message())),
        None => arch::console::panic(format_args!("{}", info.message())),
    }
}
