//! The identification of an overflowed kernel stack.

use crate::kernel;
use crate::percpu;
use crate::task::stack::{GUARD_BYTES, STACK_BYTES};
use core::fmt;

/// Returns the stack of this CPU that overflowed, if the fault at `fault` is an overflow.
pub fn overrun(fault: u64) -> Option<Overrun> {
    let here = percpu::this();
    let below = |low: u64| (low.wrapping_sub(GUARD_BYTES as u64)..low).contains(&fault);
    if below(here.descriptors.fatal_stack()) {
        return Some(Overrun::Fatal);
    }
    let top = here.kernel_stack.get();
    if top != 0 {
        return below(top - STACK_BYTES as u64).then_some(Overrun::Thread);
    }
    below(here.idle_stack.get()).then_some(Overrun::Idle)
}

/// An overflowed stack.
#[derive(Clone, Copy, Debug)]
pub enum Overrun {
    /// The stack of the running thread.
    Thread,
    /// The stack on which the CPU starts and idles.
    Idle,
    /// The stack of fatal exceptions.
    Fatal,
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thread => {
                f.write_str("the kernel stack of ")?;
                kernel::describe(f)
            }
            Self::Idle => f.write_str("the stack of the idle loop"),
            Self::Fatal => f.write_str("the stack of fatal exceptions"),
        }
    }
}
