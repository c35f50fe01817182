//! The bare machine: an x86-64 under which the subsystem serves real page faults of real programs, and what any
//! kernel on it needs.
//!
//! It is started by PVH (QEMU's `-kernel`), brings all CPUs up, and hands over to the `Kernel` above it, of which it
//! knows nothing else. `examples/pages.rs` is one of a hundred lines; `crates/personality` is one that runs Linux's
//! programs.
//!
//! The modules, each of which needs only those above it (`machine::bare`, `heap::local`: what per-CPU state is made of):
//!
//! | module | what is in it |
//! |---|---|
//! | `pages`, `pcid`, `ranges` | what can be thought through without the machine, so that the host tests it |
//! | `arch` | the processor: registers, copies from and to user memory, the interrupt controller, FPU, clock |
//! | `paging`, `descriptors` | the kernel's own page tables; segments, and the table of entries |
//! | `percpu` | what belongs to one CPU |
//! | `heap`, `sync`, `console` | the kernel's heap; its locks; what it says, and what programs do |
//! | `kernel` | what is wanted of the kernel above: the upcalls |
//! | `task` | what can run on a CPU: stacks, switches, the way back to user mode |
//! | `machine` | what the subsystem wants beneath it; faults that tests plant |
//! | `trap` | page faults first, then everything else that enters the kernel |
//! | `boot` | from PVH's 32 bits to all CPUs running |
//!
//! The kernel is not preempted: interrupts are off whenever a CPU is in it, but for the wait in idle.
//!
//! On any other target than `x86_64-unknown-none` there is nothing here but the first row.
#![no_std]

extern crate alloc;

pub mod pages;
pub mod pcid;
pub mod ranges;

#[cfg(target_os = "none")]
pub mod arch;
#[cfg(target_os = "none")]
pub mod boot;
#[cfg(target_os = "none")]
pub mod console;
#[cfg(target_os = "none")]
mod descriptors;
#[cfg(target_os = "none")]
pub mod heap;
#[cfg(target_os = "none")]
mod kernel;
#[cfg(target_os = "none")]
pub mod machine;
#[cfg(target_os = "none")]
pub mod paging;
#[cfg(target_os = "none")]
pub mod percpu;
#[cfg(target_os = "none")]
pub mod sync;
#[cfg(target_os = "none")]
pub mod task;
#[cfg(target_os = "none")]
mod trap;

#[doc(hidden)]
pub use faultless;
#[cfg(target_os = "none")]
pub use kernel::Kernel;

#[cfg(target_os = "none")]
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    // On one line, as the report is read.
    match info.location() {
        Some(at) => console::panic(format_args!("{} ({at})", info.message())),
        None => console::panic(format_args!("{}", info.message())),
    }
}
