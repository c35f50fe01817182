//! Linux's system calls on the bare machine: threads, processes, signals, time, files, IPC.
//!
//! This crate implements the `Kernel` trait of `faultless_bare`. The kernel runs static Linux
//! programs, and ends when the first program ends. The binary of this package is the linked kernel.
//!
//! The table lists the modules in order. Each module imports only modules of its own row and of the
//! rows above. A module calls modules of lower rows through a trait, a queue, or a function passed
//! as an argument:
//!
//! | module | contents |
//! |---|---|
//! | `calendar`, `elf`, `path` | code that needs no machine, and is tested on the host |
//! | `errno`, `abi`, `wall` | Linux's errors and structures; the date |
//! | `time::usage`, `task::{status, usage, limits, relatives, memory, collapse, wait_queue}`, `task::futex::waiter`, `signal::{set, info, queue, action, job, state}` | the parts of threads and processes |
//! | `task::{thread, process, oom}`, `time::{clock, deadline, timers}` | threads and processes; the clocks for their run time, their deadlines and timers |
//! | `task::{scheduler, wait, reads, futex}`, `signal::pending` | the assignment of threads to CPUs; waiting of threads |
//! | `signal::{send, stop, orphan, mask}`, `time::expire` | sending and blocking signals, job control; expiry of timers |
//! | `fs` without `fs::proc` and `fs::seed` | files in memory, descriptors, pipes and other streams |
//! | `ipc` | System V's shared memory, semaphores, message queues |
//! | `fs::proc`, `fs::seed` | `/proc`; the initial files |
//! | `signal::{frame, deliver}`, `time::tick`, `task::{visit, exit, lack, init, finish, exec, clone}` | the return to user mode; the start and end of programs |
//! | `syscall` | the system calls by number |
//! | `task::{upcalls, boot}`, `linux` | the upcalls of the machine; the first program |
#![no_std]
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_types,
        clippy::disallowed_methods,
        clippy::disallowed_macros,
        reason = "tests run on hosts with enough memory"
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
