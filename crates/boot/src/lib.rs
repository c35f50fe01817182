//! The host side of the bare machine: what a kernel is given, how QEMU runs it, and what it said.
//!
//! - [`Machine`] runs a static Linux [`Program`] on the bare kernel, which is embedded here, and gives
//!   back its exit status and the kernel's counters;
//! - [`accel`] finds out whether the host's processor can execute it;
//! - [`linux`] runs the same program under a stock Linux kernel, for comparison;
//! - [`elf`] finds out beforehand what no kernel could run, and says why;
//! - [`guests`] are programs that come along: the same file for either kernel.
//!
//! ```no_run
//! use faultless_boot::{Limits, Machine, Program, Streams};
//!
//! let program = Program::file("target/guest/hello")?;
//! let run = Machine::default().run(&program, Streams::inherit(), &Limits::default())?;
//! println!("{}, {} faults", run.end, run.report.counter("faults").unwrap_or(0));
//! # Ok::<(), faultless_boot::BootError>(())
//! ```
//!
//! # What passes between host and kernel
//!
//! | what | how |
//! |---|---|
//! | settings | the kernel command line: words `cpus=N`, `nodes=A:B` (nodes of memory with these shares), `set=KNOB=VALUE`, `plant=NAME`, `numa_balancing=disable`: pages move between nodes only where programs say so; `text_scan=MILLISECONDS`: the CPU time after which a process looks for text to put on huge pages; `check`: account for every frame at the end; `noinput`: the program's input is at its end |
//! | files | an initial file system, a cpio archive in the `newc` form |
//! | files on a disk | in it, their names and modes, and `.boot/disk`, a line `PAGE LENGTH PATH` for each; their contents on a virtio disk; on the command line, `virtio_mmio.device=SIZE@ADDRESS:LINE` |
//! | pages that leave memory | on another virtio disk; on the command line, `swap=SIZE@ADDRESS:LINE` |
//! | the program | in it, `.boot/argv` and `.boot/environ`, NUL-terminated strings; `argv[0]` is its path |
//! | where it starts | in it, `.boot/cwd`, a path; the root without it |
//! | its output | the debug console at port `0xeb` |
//! | its input | the same; the first byte means nothing, byte `0x04` ends it, and byte `0x10` goes before a `0x04` or `0x10` that is data |
//! | its standard error | the debug console at port `0xea` |
//! | what the kernel says | the debug console at port `0xe9`, in lines: see [`report`] |
//! | the end | the `isa-debug-exit` device at port `0xf4` |

pub mod accel;
pub mod elf;
mod embedded;
mod error;
pub mod initrd;
pub mod linux;
mod machine;
mod nodes;
mod qemu;
pub mod report;

pub use accel::Accel;
pub use embedded::{Guest, guest, guests};
pub use error::BootError;
pub use machine::{Disk, End, Machine, Program, Run};
pub use nodes::{NoNodes, Nodes};
pub use qemu::{Clock, Input, Limits, Streams};
