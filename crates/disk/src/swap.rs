//! The swap disk.

use crate::device::{self, Disk, Order};
use crate::extent::OneByOne;
use faultless::{BackingStore, Errno, PAGE_SIZE, ReadRun, StoreError, WriteRun};
use faultless_collections::{Arc, OutOfMemory};

/// The number of pages written at once, or read if several pages are wanted. The number is small,
/// because memory is short during swapping. Linux has the same number (`page-cluster`).
const PREFERRED_PAGES: usize = 8;

/// All of the swap disk, as the store of the swap area ([`Cpu::swap_on`](faultless::Cpu::swap_on)).
#[derive(Debug)]
pub struct SwapArea {
    pages: u64,
    one_by_one: Arc<OneByOne>,
}

impl SwapArea {
    /// Returns the store of the disk started by [`start_swap`](crate::start_swap).
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new() -> Result<Self, OutOfMemory> {
        let one_by_one = Arc::try_new(OneByOne::default())?;
        Ok(Self { pages: Disk::Swap.pages(), one_by_one })
    }
}

impl BackingStore for SwapArea {
    fn len(&self) -> u64 {
        self.pages * PAGE_SIZE
    }

    fn preferred_pages(&self) -> usize {
        self.one_by_one.or(PREFERRED_PAGES)
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let (page, bytes) = (run.first(), run.bytes());
        if bytes != 0
            && let Some(reading) = run.take_along()
        {
            let (disk, one_by_one) = (Disk::Swap, self.one_by_one.clone());
            device::read(Order { reading, disk, page, bytes, one_by_one });
        }
        Ok(0)
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        // Requests end in any order, so after an error the written pages are unknown.
        let written = device::write(Disk::Swap, run.first(), run);
        written.map_err(|errno| StoreError { done: 0, errno })
    }

    fn set_len(&self, _: u64) -> Result<(), Errno> {
        Err(Errno::EPERM)
    }
}
