//! The store of a file that is measured.

use faultless::{BackingStore, Errno, PAGE_SIZE, ReadRun, StoreError, WriteRun};

/// A store that leaves the pages as they are, so that what is counted is the subsystem's.
#[derive(Debug)]
pub struct Idle {
    /// The length of the file, in pages.
    pub pages: u64,
    /// How many pages it prefers to read at once.
    pub preferred: usize,
}

impl BackingStore for Idle {
    fn len(&self) -> u64 {
        self.pages * PAGE_SIZE
    }

    fn preferred_pages(&self) -> usize {
        self.preferred
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        Ok(run.bytes())
    }

    fn write(&self, _run: &WriteRun<'_>) -> Result<(), StoreError> {
        Ok(())
    }

    fn set_len(&self, _bytes: u64) -> Result<(), Errno> {
        Ok(())
    }
}
