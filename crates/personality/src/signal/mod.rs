//! Signals.
//!
//! *Sending* ([`send`]) queues a signal for a thread or for a process, and makes a thread that
//! accepts it check its queues: the thread is woken if it waits, its CPU interrupted if it runs. *Delivery*
//! ([`deliver`](mod@deliver)) happens when the thread returns to user mode: it takes a pending signal
//! that it does not block, and executes its action. A handler runs in user mode, on a [`frame`]
//! with everything that `rt_sigreturn` restores.
//!
//! *No signal is lost.* The sender first queues the signal, and then checks where the thread is; the thread is first put on
//! a CPU, or marked as blocked, and then checks its queues. Any thread of a process may take what is in the process's
//! queue: a thread that was notified of such a signal, and blocks it or ends, notifies another.
//!
//! *Restarts.* A system call that a signal interrupts returns [`Errno::RESTART`](crate::errno::Errno::RESTART)
//! or [`RESTART_UNHANDLED`](crate::errno::Errno::RESTART_UNHANDLED), which no program sees: delivery
//! replaces it by `EINTR`, or restarts the call.
//!
//! *Locks.* Those of the queues and of the handlers are leaves. State that only its thread accesses is in cells.

mod action;
mod deliver;
mod frame;
mod info;
mod job;
mod mask;
pub mod orphan;
mod pending;
mod queue;
mod send;
mod set;
mod state;
mod stop;

pub use action::Action;
pub use deliver::{deliver, restart_call};
pub use frame::{frame_bytes, restore, set_stack};
pub use info::{Info, TOLD};
pub use mask::{block, set_action, wait_for, with_blocked};
pub use pending::{killed, pending, take_waiting};
pub use send::{
    child_ended, fault, queue_process, queue_thread, send_process, send_thread, sent, thread_ends,
};
pub use set::{AlternateStack, Set, UNBLOCKABLE, bit, number};
pub use state::{ProcessSignals, ThreadSignals};
