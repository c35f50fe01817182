//! Calls that hold pages needed elsewhere.
//!
//! A call that evicts or moves pages takes a reference to each page found, and takes the pages from
//! their programs in batches. Meanwhile no other CPU can evict these pages, although no program is
//! using them; and the target frame of a moving page is already in use. So a CPU without evictable
//! pages is not out of memory while another CPU is in such a call. The CPU waits until each CPU in
//! such a call has left the call, and then scans again.
//!
//! 1. *Hold.* The CPU makes the [number](RegionCounter) of its calls odd before it takes the first
//!    reference, and even after it has dropped the last.
//! 2. *Wait.* A CPU that finds a page with such a reference either finds this number odd, or the
//!    call has ended. The CPU waits until the number changes.
//!
//! The CPU does not wait for later calls: CPUs with repeated unsuccessful scans could prolong the
//! wait indefinitely. A CPU in such a call never waits for holders itself, because two such CPUs
//! would wait for each other.

use crate::machine::Machine;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::region_counter::{Region, RegionCounter};
use crate::vm::Cpu;

/// The calls of a CPU that hold pages.
#[derive(Debug, Default)]
pub(crate) struct Holder(RegionCounter);

impl<M: Machine> Cpu<'_, M> {
    /// Step 1; the drop ends the call. A nested call is part of the outer call.
    pub(crate) fn hold_pages(&self) -> Region<'_> {
        let region = self.state().holder.0.begin();
        // A CPU that finds a reference taken from here on finds the call.
        fence(Ordering::Release);
        region
    }

    /// Step 2; the wait also ends if `enough` returns true.
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
    /// Returns whether a CPU holds pages.
    pub(crate) fn is_held(&self) -> bool {
        self.cpus.iter().any(|of| of.holder.0.current().is_some())
    }
}
