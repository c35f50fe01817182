//! Signals.
//!
//! *Sending* ([`send`]) queues a signal for a thread or for a process, and makes a thread that
//! accepts the signal check its queues: a waiting thread is woken, and the CPU of a running thread
//! is interrupted. *Delivery* ([`deliver`](mod@deliver)) happens when the thread returns to user
//! mode: the thread takes a pending unblocked signal, and executes the action. A handler runs in
//! user mode, on a [`frame`] with all state restored by `rt_sigreturn`.
//!
//! *No signal is lost.* The sender first queues the signal, and then checks the state of the
//! thread; the thread is first put on a CPU, or marked as blocked, and then checks its queues. Any
//! thread of a process may take a signal from the process's queue: a thread that was notified of
//! such a signal, and then blocks the signal or ends, notifies another thread.
//!
//! *Restarts.* A system call interrupted by a signal returns
//! [`Errno::RESTART`](crate::errno::Errno::RESTART) or
//! [`RESTART_UNHANDLED`](crate::errno::Errno::RESTART_UNHANDLED), which programs never see:
//! delivery replaces the error with `EINTR`, or restarts the call.
//!
//! *Locks.* The locks of the queues and of the handlers are leaves. State accessed only by its own
//! thread is in cells.

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
    child_ended, fault, queue_process, queue_thread, queued, send_process, send_thread, sent,
    thread_ends,
};
pub use set::{AlternateStack, Set, UNBLOCKABLE, bit, number};
pub use state::{ProcessSignals, ThreadSignals};
