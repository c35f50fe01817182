//! The bare machine: x86-64 boot, traps, CPUs and memory. On this machine the subsystem serves real
//! page faults of real programs.
//!
//! The loader starts the machine by PVH (QEMU's `-kernel`). The machine starts all CPUs, and then
//! calls the kernel above, which implements the trait `Kernel`. `examples/pages.rs` is a kernel of
//! a hundred lines; `crates/personality` is a kernel that runs Linux programs.
//!
//! The table lists the modules in order. Each module imports only modules above (and
//! `machine::bare` and `heap::local`, which are part of per-CPU data):
//!
//! | module | contents |
//! |---|---|
//! | `pages`, `pcid`, `ranges` | code that needs no machine, and is tested on the host |
//! | `arch` | the processor: registers, copies from and to user memory, the interrupt controller, FPU, clock |
//! | `paging`, `descriptors` | the kernel's page tables; segments and the interrupt descriptor table |
//! | `percpu`, `ioapic` | per-CPU data; the interrupts of devices |
//! | `heap`, `sync`, `console` | the kernel's heap; its locks; the report, and the program's input and output |
//! | `reserve` | frames set aside for copies from and to user memory |
//! | `kernel` | the upcalls into the kernel above |
//! | `task` | the unit of execution on a CPU: stacks, switches, the return to user mode |
//! | `machine` | the subsystem's `Machine`; faults injected by tests |
//! | `trap` | page faults first, then all other entries into the kernel |
//! | `boot` | from PVH's 32-bit mode to all CPUs running |
//!
//! The kernel is not preempted: interrupts are off in kernel mode, except in the idle wait.
//!
//! # A kernel of your own
//!
//! A kernel lives in a crate of its own, outside this workspace. The crate needs four files.
//! `Cargo.toml` names the crates by the path to a copy of this repository:
//!
//! ```toml
#![doc = include_str!("../template/Cargo.toml")]
//! ```
//!
//! `.cargo/config.toml` requests code that runs at a fixed address; a build script cannot do this:
//!
//! ```toml
#![doc = include_str!("../../../.cargo/config.toml")]
//! ```
//!
//! `build.rs` passes the linker script:
//!
//! ```ignore
#![doc = include_str!("../../personality/build.rs")]
//! ```
//!
//! `src/main.rs` may start as a copy of `examples/pages.rs`. Then
//! `cargo build --release --target x86_64-unknown-none` builds
//! `target/x86_64-unknown-none/release/my-kernel`, and the comment at the top of the example
//! contains the command to boot the kernel. A test of `crates/boot` performs these steps in an
//! empty directory.
//!
//! # Other targets
//!
//! On other targets than `x86_64-unknown-none` the crate has only the modules of the first row.
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
pub mod ioapic;
#[cfg(target_os = "none")]
mod kernel;
#[cfg(target_os = "none")]
pub mod machine;
#[cfg(target_os = "none")]
pub mod paging;
#[cfg(target_os = "none")]
pub mod percpu;
#[cfg(target_os = "none")]
pub mod reserve;
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
    // On one line, because the report is read line by line.
    match info.location() {
        Some(at) => console::panic(format_args!("{} ({at})", info.message())),
        None => console::panic(format_args!("{}", info.message())),
    }
}
