//! Files on the disk.

use crate::device::{self, Disk, Order};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use faultless::{BackingStore, Errno, PAGE_SIZE, ReadRun, StoreError, WriteRun};
use faultless_collections::{Arc, OutOfMemory};

/// The number of pages read at once: 128 KiB, Linux's default for reads around a fault
/// (`read_ahead_kb`).
const PREFERRED_PAGES: usize = 32;

/// Set after a failed read of several pages of a file, so that later reads are page by page.
#[derive(Debug, Default)]
pub(crate) struct OneByOne(AtomicBool);

impl OneByOne {
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns the number of pages to read at once: `pages`, or 1 after a failure.
    pub(crate) fn or(&self, pages: usize) -> usize {
        if self.0.load(Ordering::Relaxed) { 1 } else { pages }
    }
}

/// Neighbouring pages of the disk: the contents of a file.
#[derive(Debug)]
pub struct Extent {
    /// The number of the first page on the disk.
    first: u64,
    /// The bytes of the file that are on the disk; the bytes after them are zeros.
    bytes: AtomicU64,
    one_by_one: Arc<OneByOne>,
}

impl Extent {
    /// The `bytes` bytes from page `first` of the disk on.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(first: u64, bytes: u64) -> Result<Self, OutOfMemory> {
        let one_by_one = Arc::try_new(OneByOne::default())?;
        Ok(Self { first, bytes: AtomicU64::new(bytes), one_by_one })
    }
}

impl BackingStore for Extent {
    fn len(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn preferred_pages(&self) -> usize {
        self.one_by_one.or(PREFERRED_PAGES)
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let (first, wanted) = (run.first(), run.bytes() as u64);
        let bytes = self.len().saturating_sub(first * PAGE_SIZE).min(wanted) as usize;
        if bytes != 0
            && let Some(reading) = run.take_along()
        {
            let one_by_one = self.one_by_one.clone();
            let (disk, page) = (Disk::Files, self.first + first);
            device::read(Order { reading, disk, page, bytes, one_by_one });
        }
        // The rest is zeros.
        Ok(0)
    }

    /// Stored data stays in the file's pages, which are dropped only with the file.
    fn is_read_only(&self) -> bool {
        true
    }

    fn write(&self, _: &WriteRun<'_>) -> Result<(), StoreError> {
        Err(StoreError { done: 0, errno: Errno::EPERM })
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.bytes.fetch_min(bytes, Ordering::Relaxed);
        Ok(())
    }
}
