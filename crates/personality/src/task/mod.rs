//! Threads and processes: scheduling, waiting, parents and children.
//!
//! A [`Thread`] is the unit of execution; the [scheduler] decides when and on which CPU a thread
//! runs. A [`Process`] contains the resources shared by its threads: [memory](memory::Memory),
//! files, signal handlers, children. [`wait`] contains the waiting of threads for events.
//!
//! A thread enters the kernel by a trap, with its registers at the top of its kernel stack. Before
//! the thread returns to user mode, [`attention`](upcalls::attention) handles pending requests:
//! switch to another thread, deliver a signal, or end. Only the thread itself performs these
//! actions; other CPUs request an action by setting the `attention` flag of the CPU that runs the
//! thread.

mod balance;
pub mod boot;
pub mod clone;
pub mod collapse;
pub mod exec;
pub mod exit;
mod finish;
pub mod futex;
pub mod ids;
pub mod init;
pub mod lack;
pub mod limits;
pub mod memory;
pub mod oom;
pub mod process;
pub mod reads;
pub mod relatives;
pub mod schedule;
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

/// Lets other threads run, between two steps of a long system call. Returns whether the call
/// continues; if not, a signal is pending. The caller holds no lock.
pub fn cond_resched() -> bool {
    give_turn();
    !signal::pending(&current())
}

/// Yields like [`cond_resched`], for a system call that only the end of the thread, or a `SIGKILL`,
/// interrupts.
pub fn cond_resched_unless_killed() -> bool {
    give_turn();
    !wait::is_killed(&current())
}

fn give_turn() {
    faultless_bare::arch::serve_interrupts();
    scheduler::give_way();
}
