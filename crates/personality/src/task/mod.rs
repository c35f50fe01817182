//! Threads and processes: who runs, who waits, who is whose child.
//!
//! A [`Thread`] is what runs; the [scheduler] decides where and when. A [`Process`] is what its
//! threads share: [memory](memory::Memory), files, signal handlers, children. [`wait`] is how a thread
//! waits for anything.
//!
//! A thread enters the kernel by a trap, whose registers stay at the top of its kernel stack, and leaves
//! through [`attention`](upcalls::attention) whenever somebody wants something of it: that it gives the CPU away, takes a
//! signal, or dies. Nobody else does these things to a thread; they are asked for by setting the
//! `attention` of the CPU that it runs on.

pub mod boot;
pub mod clone;
pub mod exec;
pub mod exit;
mod finish;
pub mod futex;
pub mod init;
pub mod limits;
pub mod memory;
pub mod process;
pub mod relatives;
pub mod scheduler;
pub mod status;
pub mod thread;
pub mod upcalls;
pub mod usage;
pub mod visit;
pub mod wait;
mod wait_queue;

pub use process::Process;
pub use thread::{Current, Thread, current};

use crate::signal;

/// What a call does between two of its steps if it takes long: others get a turn. Returns whether the
/// call is to go on; if not, a signal waits. The caller holds no lock.
pub fn breathe() -> bool {
    give_turn();
    !signal::pending(&current())
}

/// As [`breathe`], for a call that only the end of the thread, or a `SIGKILL`, stops.
pub fn breathe_unless_killed() -> bool {
    give_turn();
    !wait::is_killed(&current())
}

fn give_turn() {
    faultless_bare::arch::serve_interrupts();
    scheduler::give_way();
}
