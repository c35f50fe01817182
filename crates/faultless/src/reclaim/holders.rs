//! Calls that hold pages which other CPUs may need.
//!
//! A call that evicts or moves pages takes a reference to each page that it finds, and takes them from their programs in batches. Until then no other CPU can
//! evict these pages, though no program is using them; and a frame to which a page moves is in use already. So a CPU that finds nothing to evict is not out
//! of memory as long as another is in such a call. It waits until each CPU that was in one has left it, and looks again.
//!
//! 1. *Hold.* The CPU makes the number of its calls odd, before it takes the first reference. It makes the number even when it has dropped the last.
//! 2. *Wait.* A CPU that met a page with such a reference finds that number odd, or the call has ended. It waits until the number is another one.
//!
//! It does not wait for calls that begin later: CPUs that look for pages again and again, and find none, would let it wait for ever. A call in which a CPU
//! holds pages never waits so itself: two of them would wait for each other.

use crate::machine::Machine;
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::wait::until;
use crate::vm::Cpu;

/// How often a CPU has begun such a call, and ended one: odd in between. Its CPU alone writes it.
#[derive(Debug, Default)]
pub(crate) struct Holder(AtomicU64);

impl Holder {
    /// The number of the call that the CPU is in.
    fn call(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Acquire)).filter(|calls| calls % 2 != 0)
    }
}

/// A CPU is in such a call until this is dropped.
#[derive(Debug)]
pub(crate) struct Holds<'a>(Option<&'a Holder>);

impl Drop for Holds<'_> {
    fn drop(&mut self) {
        if let Some(holder) = self.0 {
            holder.0.store(holder.0.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// Step 1. Within another such call it is part of that one.
    pub(crate) fn hold_pages(&self) -> Holds<'_> {
        let holder = &self.state().holder;
        if holder.call().is_some() {
            return Holds(None);
        }
        holder.0.store(holder.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        // A CPU that finds a reference which is taken from here on finds the call.
        fence(Ordering::Release);
        Holds(Some(holder))
    }

    /// Step 2, or until there is `enough`.
    pub(super) fn await_holders(&self, enough: impl Fn() -> bool) {
        fence(Ordering::Acquire);
        if self.state().holder.call().is_some() {
            return;
        }
        for of in self.vm().cpus.iter() {
            if let Some(call) = of.holder.call() {
                until(self, || of.holder.call() != Some(call) || enough());
            }
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
impl<M: Machine> crate::Vm<M> {
    /// Whether a CPU holds pages.
    pub(crate) fn is_held(&self) -> bool {
        self.cpus.iter().any(|of| of.holder.call().is_some())
    }
}
