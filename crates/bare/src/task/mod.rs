//! Threads and processes: who runs, who waits, who is whose child.
//!
//! A [`Thread`] is what runs; the [scheduler] decides where and when. A [`Process`] is what its
//! threads share: [memory](memory::Memory), files, signal handlers, children. [`wait`] is how a thread
//! waits for anything.
//!
//! A thread enters the kernel by a trap, whose registers stay at the top of its kernel stack, and leaves
//! through [`attention`] whenever somebody wants something of it: that it gives the CPU away, takes a
//! signal, or dies. Nobody else does these things to a thread; they are asked for by setting the
//! `attention` of the CPU that it runs on.

pub mod memory;
pub mod process;
pub mod scheduler;
pub mod thread;
pub mod wait;

pub use process::Process;
pub use thread::{Current, Thread, current};

use crate::arch::TrapFrame;
use crate::percpu;
use crate::signal;

/// What a thread does on its way back to user mode when its CPU's `attention` is set. The caller cleared
/// it, and calls again if it is set once more.
pub fn attention(frame: &mut TrapFrame) {
    scheduler::finish_switch();
    scheduler::give_way();
    signal::deliver(frame);
}

/// The timer interrupt: from user mode or from idle.
pub fn tick() {
    crate::time::tick();
    scheduler::tick();
}

/// The reschedule interrupt.
pub fn reschedule() {
    percpu::this().attention.store(true, core::sync::atomic::Ordering::Relaxed);
}
