//! The machine, as seen by the subsystem.

use crate::arch::features;
use core::sync::atomic::{AtomicBool, Ordering};
use faultless::MemoryRegion;
use faultless_collections::Vec;

/// Set if the CPUs have process-context identifiers (PCID).
static HAS_PCID: AtomicBool = AtomicBool::new(false);

/// See [`HAS_PCID`].
#[inline(always)]
pub(super) fn has_pcid() -> bool {
    HAS_PCID.load(Ordering::Relaxed)
}

/// This machine.
#[derive(Debug)]
pub struct Bare {
    pub(super) cpus: usize,
    pub(super) regions: Vec<MemoryRegion>,
}

impl Bare {
    /// Returns the machine.
    ///
    /// # Safety
    /// Called once. `cpus` CPUs run, or will run; the regions do not overlap, are mapped in the
    /// direct map, and have no other use.
    pub(crate) unsafe fn new(cpus: usize, regions: Vec<MemoryRegion>) -> Self {
        HAS_PCID.store(features().pcid, Ordering::Relaxed);
        Self { cpus, regions }
    }
}
