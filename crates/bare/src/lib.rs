//! The bare machine: an x86-64 under which the subsystem serves real page faults of real programs, and what any
//! kernel on it needs.
//!
//! It is started by PVH (QEMU's `-kernel`), brings all CPUs up, and hands over to the [`Kernel`] above it, of which it
//! knows nothing else. `examples/pages.rs` is one of a hundred lines; `crates/personality` is one that runs Linux's
//! programs.
//!
//! The modules, each of which needs those above it, but for `boot`'s tables and the per-CPU state, which all do:
//!
//! | module | what is in it |
//! |---|---|
//! | `calendar`, `pages`, `pcid`, `ranges` | what can be thought through without the machine, so that the host tests it |
//! | `kernel` | what is wanted of the kernel above: the upcalls |
//! | `percpu` | what belongs to one CPU |
//! | `heap`, `sync` | the kernel's heap, and its locks |
//! | `arch` | entries and exits, exceptions, copies from and to user memory, stacks and switches, the interrupt controller, the FPU, the clock, the consoles |
//! | `task` | what can run on a CPU |
//! | `machine` | what the subsystem wants beneath it; faults that tests plant |
//! | `boot` | from PVH's 32 bits to all CPUs running; the kernel's own page tables |
//!
//! The kernel is not preempted: interrupts are off whenever a CPU is in it, but for the wait in idle.
//!
//! On any other target than `x86_64-unknown-none` there is nothing here but the first row.
#![no_std]
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_types,
        clippy::disallowed_methods,
        clippy::disallowed_macros,
        reason = "tests run where there is memory"
    )
)]

extern crate alloc;

#[cfg(test)]
extern crate std;

#[path = "arch/calendar.rs"]
pub mod calendar;
#[path = "heap/pages.rs"]
pub mod pages;
#[path = "machine/pcid.rs"]
pub mod pcid;
#[path = "boot/ranges.rs"]
pub mod ranges;

#[cfg(target_os = "none")]
pub mod arch;
#[cfg(target_os = "none")]
pub mod boot;
#[cfg(target_os = "none")]
pub mod heap;
#[cfg(target_os = "none")]
mod kernel;
#[cfg(target_os = "none")]
pub mod machine;
#[cfg(target_os = "none")]
pub mod percpu;
#[cfg(target_os = "none")]
pub mod sync;
#[cfg(target_os = "none")]
pub mod task;

#[doc(hidden)]
pub use faultless;
#[cfg(target_os = "none")]
pub use kernel::Kernel;

#[cfg(target_os = "none")]
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    // On one line, as the report is read.
    match info.location() {
        Some(at) => arch::console::panic(format_args!("{} ({at})", info.message())),
        None => arch::console::panic(format_args!("{}", info.message())),
    }
}
