//! Stores of files and of the swap area: in memory, in a file of the host, and on a device with
//! random failures.

use faultless::{BackingStore, Errno, PAGE_SIZE, ReadRun, StoreError, WriteRun};
use faultless_native::HostFile;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// Decides which operations fail.
#[derive(Debug)]
pub struct Device {
    seed: u64,
    /// The number of failures per 256 operations.
    fails: AtomicU64,
    operations: AtomicU64,
    failed: AtomicU64,
}

impl Device {
    pub fn new(seed: u64) -> Arc<Self> {
        let [fails, operations, failed] = [0, 0, 0].map(AtomicU64::new);
        Arc::new(Self { seed, fails, operations, failed })
    }

    /// Lets `fails` of 256 operations fail from now on.
    pub fn set(&self, fails: u64) {
        self.fails.store(fails, Relaxed);
    }

    /// Returns the number of failed operations.
    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    /// Returns the error of the next operation, if it fails, and a random number.
    fn operate(&self) -> (Result<(), Errno>, u64) {
        let number = self.operations.fetch_add(1, Relaxed);
        let mut random = fastrand::Rng::with_seed(self.seed ^ number << 16);
        if random.u64(0..256) >= self.fails.load(Relaxed) {
            return (Ok(()), random.u64(..));
        }
        self.failed.fetch_add(1, Relaxed);
        (Err(if random.bool() { Errno::EIO } else { Errno::ENOSPC }), random.u64(..))
    }
}

/// The medium of the bytes.
#[derive(Debug)]
enum Medium {
    Memory(Mutex<Vec<u8>>),
    Host(HostFile),
}

/// A store on a [`Device`].
#[derive(Debug)]
pub struct Disk {
    medium: Medium,
    device: Arc<Device>,
}

impl Disk {
    /// A store in memory, of `pages` pages.
    pub fn memory(pages: u64, device: Arc<Device>) -> Arc<Self> {
        let bytes = vec![0; (pages * PAGE_SIZE) as usize];
        Arc::new(Self { medium: Medium::Memory(Mutex::new(bytes)), device })
    }

    /// A store in a temporary file of the host, of `pages` pages.
    pub fn host(pages: u64, device: Arc<Device>) -> Arc<Self> {
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(pages * PAGE_SIZE).expect("room for a temporary file");
        let file = HostFile::new(file).expect("a regular file");
        Arc::new(Self { medium: Medium::Host(file), device })
    }

    /// The word at `offset` of the store itself.
    pub fn word(&self, offset: u64) -> u64 {
        let mut word = [0; 8];
        match &self.medium {
            Medium::Memory(bytes) => {
                let bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
                let found = bytes.get(offset as usize..).unwrap_or_default();
                let found = &found[..found.len().min(8)];
                word[..found.len()].copy_from_slice(found);
            }
            Medium::Host(file) => {
                use std::os::unix::fs::FileExt;
                let _ = file.file().read_at(&mut word, offset).expect("a file that can be read");
            }
        }
        u64::from_ne_bytes(word)
    }

    fn transfer_in(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let bytes = match &self.medium {
            Medium::Host(file) => return file.read(run),
            Medium::Memory(bytes) => bytes,
        };
        let bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = bytes.get(run.offset() as usize..).unwrap_or_default();
        let mut done = 0;
        for to in run.memory() {
            let (now, later) = left.split_at(to.len().min(left.len()));
            to[..now.len()].copy_from_slice(now);
            done += now.len();
            left = later;
        }
        Ok(done)
    }

    /// Writes the parts of `run` that begin below `limit` bytes.
    fn transfer_out(&self, run: &WriteRun<'_>, limit: usize) -> Result<(), StoreError> {
        let bytes = match &self.medium {
            Medium::Host(file) if limit >= run.bytes() => return file.write(run),
            // The host's file has no partial write; the pages are written later.
            Medium::Host(_) => return Ok(()),
            Medium::Memory(bytes) => bytes,
        };
        let mut bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = run.offset() as usize;
        let pages = limit.div_ceil(PAGE_SIZE as usize);
        for (from, len) in run.memory().take(pages) {
            let missing = StoreError { done: 0, errno: Errno::EIO };
            let to = bytes.get_mut(at..at + len).ok_or(missing)?;
            at += len;
            // The parts of a page that are not whole words have no owner.
            for (word, to) in to.chunks_exact_mut(8).enumerate() {
                // SAFETY: an aligned word of memory lent by the run; other CPUs use atomic
                // accesses.
                let from = unsafe { &*from.cast::<AtomicU64>().add(word) };
                to.copy_from_slice(&from.load(Relaxed).to_ne_bytes());
            }
        }
        Ok(())
    }
}

impl BackingStore for Disk {
    fn len(&self) -> u64 {
        match &self.medium {
            Medium::Memory(bytes) => bytes.lock().map_or(0, |bytes| bytes.len() as u64),
            Medium::Host(file) => file.len(),
        }
    }

    fn preferred_pages(&self) -> usize {
        8
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        self.device.operate().0.map_err(|errno| StoreError { done: 0, errno })?;
        self.transfer_in(run)
    }

    /// A failed operation has written everything, a part or no bytes, and reports no bytes written.
    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let (operated, random) = self.device.operate();
        let limit = match operated {
            Ok(()) => usize::MAX,
            Err(_) => (random as usize % 3) * run.bytes().div_ceil(2),
        };
        let written = self.transfer_out(run, limit);
        operated.map_err(|errno| StoreError { done: 0, errno }).and(written)
    }

    fn sync(&self) -> Result<(), Errno> {
        self.device.operate().0
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.device.operate().0?;
        match &self.medium {
            Medium::Memory(memory) => {
                memory.lock().unwrap_or_else(PoisonError::into_inner).resize(bytes as usize, 0);
                Ok(())
            }
            Medium::Host(file) => file.set_len(bytes),
        }
    }

    fn punch(&self, pages: Range<u64>) -> Result<(), Errno> {
        self.device.operate().0?;
        match &self.medium {
            Medium::Memory(memory) => {
                let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                let end = memory.len().min((pages.end * PAGE_SIZE) as usize);
                if let Some(hole) = memory.get_mut((pages.start * PAGE_SIZE) as usize..end) {
                    hole.fill(0);
                }
                Ok(())
            }
            Medium::Host(file) => file.punch(pages),
        }
    }
}
