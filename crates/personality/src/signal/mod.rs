//! Signals.
//!
//! *Sending* ([`send`]) queues a signal for a thread or for a process, and sees to it that a thread that
//! takes it looks: the thread is woken if it waits, its CPU interrupted if it runs. *Delivery*
//! ([`deliver`]) is the thread's own business, on its way back to user mode: it takes what waits for it
//! and is not blocked, and does what its process wants done. A handler runs in user mode, on a [`frame`]
//! that holds everything which `rt_sigreturn` puts back.
//!
//! *No signal is lost.* The sender queues first and looks afterwards where the thread is; the thread is on
//! its CPU, or blocked, first and looks at its queues afterwards. What a process has in its queue is
//! everybody's: a thread that blocks such a signal, or ends, after it was told of it tells another.
//!
//! *Restarts.* A call that a signal interrupts returns [`Errno::RESTART`](crate::errno::Errno::RESTART)
//! or [`RESTART_UNHANDLED`](crate::errno::Errno::RESTART_UNHANDLED), which no program sees: delivery
//! makes `EINTR` of it, or has the call made again.
//!
//! *Locks.* The queues' and the handlers' are leaves. What belongs to a thread alone is in cells.

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
pub use deliver::deliver;
pub use frame::{frame_bytes, restore, set_stack};
pub use info::{Info, TOLD};
pub use mask::{block, set_action, wait_for, with_blocked};
pub use pending::{killed, pending, take_waiting};
pub use send::{
    child_ended, fault, queue_process, queue_thread, send_process, send_thread, sent, thread_ends,
};
pub use set::{AlternateStack, Set, UNBLOCKABLE, number};
pub use state::{ProcessSignals, ThreadSignals};
