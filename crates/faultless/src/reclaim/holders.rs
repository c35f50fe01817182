//! Calls that hold pages which other CPUs may need.
//!
//! A call that evicts or moves pages takes a reference to each page that it finds, and takes them from their programs in batches. Until then no other CPU can
//! evict these pages, though no program is using them; and a frame to which a page moves is in use already. So a CPU that finds nothing to evict is not out
//! of memory as long as another is in such a call. It waits until each CPU that was in one has left it, and looks again.
//!
//! 1. *Hold.* The CPU makes the [number](Stays) of its calls odd, before it takes the first reference. It makes the number even when it has dropped the last.
//! 2. *Wait.* A CPU that met a page with such a reference finds that number odd, or the call has ended. It waits until the number is another one.
//!
//! It does not wait for calls that begin later: CPUs that look for pages again and again, and find none, would let it wait for ever. A call in which a CPU
//! holds pages never waits so itself: two of them would wait for each other.

use crate::machine::Machine;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::stays::{Stay, Stays};
use crate::vm::Cpu;

/// The calls of a CPU that hold pages.
#[derive(Debug, Default)]
pub(crate) struct Holder(Stays);

impl<M: Machine> Cpu<'_, M> {
    /// Step 1, until it is dropped. Within another such call it is part of that one.
    pub(crate) fn hold_pages(&self) -> Stay<'_> {
        let stay = self.state().holder.0.begin();
        // A CPU that finds a reference which is taken from here on finds the call.
        fence(Ordering::Release);
        stay
    }

    /// Step 2, or until there is `enough`.
    pub(crate) fn await_holders(&self, enough: impl Fn() -> bool) {
        fence(Ordering::Acquire);
        if self.state().holder.0.current().is_some() {
            return;
        }
        self.vm().cpus.iter().for_each(|of| of.holder.0.await_end(self, &enough));
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
impl<M: Machine> crate::Vm<M> {
    /// Whether a CPU holds pages.
    pub(crate) fn is_held(&self) -> bool {
        self.cpus.iter().any(|of| of.holder.0.current().is_some())
    }
}
