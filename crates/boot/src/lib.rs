//! The host side of the bare machine: the inputs of a kernel, its run in QEMU, and its report.
//!
//! - [`Machine`] runs a static Linux [`Program`] on the bare kernel, which is embedded here, and
//!   returns its exit status and the kernel's counters;
//! - [`accel`] checks whether the host's processor can execute the machine;
//! - [`linux`] runs the same program under a stock Linux kernel, for comparison;
//! - [`elf`] rejects, before the boot, files that no kernel could run, with the reason;
//! - [`guests`] are embedded programs: the same file for either kernel.
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
//! # The interface between host and kernel
//!
//! | content | form |
//! |---|---|
//! | settings | the kernel command line: words `cpus=N`, `nodes=A:B` (nodes of memory with these shares), `set=KNOB=VALUE`, `plant=NAME`, `numa_balancing=disable`: pages move between nodes only at the request of programs; `text_scan=MILLISECONDS`: the CPU time after which a process searches for text to put on huge pages; `check`: account for every frame at the end; `noinput`: the program's input is at its end |
//! | files | an initial file system, a cpio archive in the `newc` format |
//! | files on a disk | in the archive, their names and modes, and `.boot/disk`, a line `PAGE LENGTH PATH` for each; their contents on a virtio disk; on the command line, `virtio_mmio.device=SIZE@ADDRESS:LINE` |
//! | swapped pages | on another virtio disk; on the command line, `swap=SIZE@ADDRESS:LINE` |
//! | the program | in the archive, `.boot/argv` and `.boot/environ`, NUL-terminated strings; `argv[0]` is the path of the program |
//! | the working directory | in the archive, `.boot/cwd`, a path; without this file, the root |
//! | standard output | the debug console at port `0xeb` |
//! | standard input | the first serial port; the first byte is discarded, byte `0x04` ends the input, and byte `0x10` precedes a `0x04` or `0x10` that is data |
//! | standard error | the debug console at port `0xea` |
//! | the kernel's report | the debug console at port `0xe9`, in lines: see [`report`] |
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
