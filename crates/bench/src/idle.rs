//! The backing store of a measured file.

use faultless::{BackingStore, Errno, PAGE_SIZE, ReadRun, StoreError, WriteRun};

/// A store without any change to pages, so only the subsystem is counted.
#[derive(Debug)]
pub struct Idle {
    /// The length of the file, in pages.
    pub pages: u64,
    /// The preferred number of pages per read.
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
