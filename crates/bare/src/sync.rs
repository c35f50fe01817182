//! The kernel's locks.
//!
//! *Wait loops service shootdown requests.* Interrupts are off in the kernel, so a CPU that waits
//! for a lock receives no flush interrupt. The requester may be the holder of this lock, in the
//! middle of a copy to user memory or inside the subsystem. So waiters serve flush requests
//! themselves.
//!
//! *Order.* Locks are taken from the outside in: process table, process, threads and files, wait
//! queues, run queues; at most one of a kind at a time, unless the module documents an exception. A
//! holder does not yield the CPU: [`Mutex`] is a spin lock.

use crate::percpu;
use core::fmt;
use faultless::locks::{SpinGuard, SpinLock};

/// A spin lock whose waiters serve flush requests.
pub struct Mutex<T>(SpinLock<T>);

impl<T> Mutex<T> {
    /// A free lock around `value`.
    pub const fn new(value: T) -> Self {
        Self(SpinLock::new(value))
    }

    /// Takes the lock.
    #[inline]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        self.0.lock(percpu::cpu())
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mutex")
    }
}
