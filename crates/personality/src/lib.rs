//! Linux's system calls on the bare machine: threads, processes, signals, time, files, IPC.
//!
//! It is the [`Kernel`](faultless_bare::Kernel) above [`faultless_bare`], runs static Linux programs, and ends with the
//! first of them. The binary of this package is the kernel, linked.
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

pub mod calendar;
pub mod elf;
pub mod path;

#[cfg(target_os = "none")]
mod abi;
#[cfg(target_os = "none")]
mod errno;
#[cfg(target_os = "none")]
mod fs;
#[cfg(target_os = "none")]
mod ipc;
#[cfg(target_os = "none")]
mod linux;
#[cfg(target_os = "none")]
mod signal;
#[cfg(target_os = "none")]
mod syscall;
#[cfg(target_os = "none")]
mod task;
#[cfg(target_os = "none")]
mod time;
#[cfg(target_os = "none")]
mod wall;

#[cfg(target_os = "none")]
pub use linux::Linux;
