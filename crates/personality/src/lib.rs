//! Linux's system calls on the bare machine: threads, processes, signals, time, files, IPC.
//!
//! It is the `Kernel` above `faultless_bare`, runs static Linux programs, and ends with the first of them. The binary of
//! this package is the kernel, linked.
//!
//! The modules in order: each imports only what stands above it, and reaches what stands below through a trait, a
//! queue, or a function that it is given.
//!
//! | module | what is in it |
//! |---|---|
//! | `calendar`, `elf`, `path` | what needs no machine, and is tested on the host |
//! | `errno`, `abi`, `wall` | Linux's errors and structures; the date |
//! | `time::usage`, `task::{status, usage, limits, relatives}`, `signal::{set, info, queue, action}` | what a thread and a process are made of |
//! | `task`: `thread`, `process`, `memory`, `scheduler`, `wait`, `futex` | who runs, who waits |
//! | `time`: `queue`, `clock`, `timers` | deadlines, clocks and timers |
//! | `signal`: `send`, `stop`, `orphan` | sending signals, job control |
//! | `fs` without `fs::proc` | files in memory, descriptors, pipes and other streams |
//! | `ipc` | System V's shared memory, semaphores, message queues |
//! | `task::visit`, `fs::proc`, `fs::seed` | `/proc`; the initial files |
//! | `signal::{frame, deliver}`, `time::tick`, `task::{exit, init, finish, exec, clone}` | what happens on the way back to user mode; the ends and beginnings of programs |
//! | `syscall` | the calls by number |
//! | `task::{upcalls, boot}`, `linux` | what the machine calls; the first program |
//!
//! The rows from `task` to `fs` are not yet apart: a process has files and signals, and those wake threads. 27 of
//! their files import each other in a circle (with `fs::live`, through which they know `/proc` as a trait).
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
