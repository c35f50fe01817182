//! A disk: files whose pages are read on demand.
//!
//! A read takes the time of copying the pages, because the measurement concerns memory and not the
//! disk. Writes are not simulated.

use crate::accounts::Spent;
use crate::profile::Time;
use crate::simulation::Simulation;
use core::fmt;
use faultless_observed::{BackingStore, Errno, ReadRun, StoreError, WriteRun};
use std::rc::Rc;

/// A file on the disk.
pub(crate) struct Disk {
    simulation: Rc<Simulation>,
    bytes: u64,
}

// SAFETY: the disk stays on the creating thread, like the machine (one thread).
unsafe impl Send for Disk {}
// SAFETY: as above.
unsafe impl Sync for Disk {}

impl Disk {
    pub(crate) fn new(simulation: Rc<Simulation>, bytes: u64) -> Self {
        Self { simulation, bytes }
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Disk({} bytes)", self.bytes)
    }
}

impl BackingStore for Disk {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let (first, bytes) = (run.first(), run.bytes());
        for (number, page) in (first..).zip(run.memory()) {
            page.fill(0);
            if let Some(word) = page.first_chunk_mut() {
                *word = number.to_le_bytes();
            }
        }
        let pages = bytes.div_ceil(faultless_observed::PAGE_SIZE as usize) as Time;
        self.simulation.spend(pages * self.simulation.costs.copy_page, Spent::Pages);
        Ok(bytes)
    }

    fn write(&self, _: &WriteRun<'_>) -> Result<(), StoreError> {
        Err(StoreError { done: 0, errno: Errno::EPERM })
    }

    fn set_len(&self, _: u64) -> Result<(), Errno> {
        // Deleting a file truncates it; the contents of the disk stay.
        Ok(())
    }
}
