//! The backing store of scenario files: bytes in memory, accessed in steps between which other
//! threads may run.

use super::machine::step;
use super::{Guest, PAGE, Space, World};
use faultless::{BackingStore, Errno, Object, ReadRun, Reading, Shared, StoreError, WriteRun};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};

const PAGE_BYTES: usize = PAGE as usize;

/// The behaviour of a disk at one of its next calls, instead of the regular behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Transfers the given number of bytes, and then fails.
    Fail(usize),
    /// Reads at once, and reports the completion later.
    Later,
    /// Reads fail at this page.
    Bad(u64),
}

/// A kept read, and its number of bytes.
type Taken = (Reading, usize);

/// See the module. No lock of the disk is held across a step.
#[derive(Debug)]
pub struct Disk {
    bytes: Mutex<Vec<u8>>,
    preferred: usize,
    read_only: bool,
    /// The plan of every read from now on, if any, and the plans of the next writes.
    reads: Mutex<Option<Plan>>,
    writes: Mutex<VecDeque<Plan>>,
    taken: Mutex<VecDeque<Taken>>,
    /// The number of requests for each page.
    asked: Mutex<BTreeMap<u64, u32>>,
}

impl Disk {
    /// Creates a file of `pages` pages, read and written `preferred` pages at a time. The first two
    /// words of page `n` are `n + 1`.
    pub fn new(pages: u64, preferred: usize) -> Arc<Self> {
        Arc::new(Self::build(pages, preferred, false))
    }

    /// A file of `pages` pages that is only read, page by page.
    pub fn read_only(pages: u64) -> Arc<Self> {
        Arc::new(Self::build(pages, 1, true))
    }

    fn build(pages: u64, preferred: usize, read_only: bool) -> Self {
        let mut bytes = vec![0; pages as usize * PAGE_BYTES];
        for (number, page) in (1u64..).zip(bytes.chunks_exact_mut(PAGE_BYTES)) {
            page[..8].copy_from_slice(&number.to_ne_bytes());
            page[8..16].copy_from_slice(&number.to_ne_bytes());
        }
        Self {
            bytes: Mutex::new(bytes),
            preferred,
            read_only,
            reads: Mutex::default(),
            writes: Mutex::default(),
            taken: Mutex::default(),
            asked: Mutex::default(),
        }
    }

    /// Creates a disk for swapping, with bytes of no page.
    pub fn scratch(pages: u64, preferred: usize) -> Arc<Self> {
        let disk = Self::new(pages, preferred);
        disk.bytes.lock().unwrap().fill(0xee);
        disk
    }

    pub fn plan_reads(&self, plan: Option<Plan>) {
        *self.reads.lock().unwrap() = plan;
    }

    /// Restores the regular behaviour.
    pub fn heal(&self) {
        *self.reads.lock().unwrap() = None;
        self.writes.lock().unwrap().clear();
    }

    pub fn plan_write(&self, plan: Plan) {
        self.writes.lock().unwrap().push_back(plan);
    }

    /// The first word of a page; 0 beyond the end.
    pub fn word(&self, page: u64) -> u64 {
        let (bytes, at) = (self.bytes.lock().unwrap(), page as usize * PAGE_BYTES);
        bytes.get(at..at + 8).map_or(0, |word| u64::from_ne_bytes(word.try_into().unwrap()))
    }

    /// Returns the number of requests for the page.
    pub fn asked(&self, page: u64) -> u32 {
        self.asked.lock().unwrap().get(&page).copied().unwrap_or(0)
    }

    /// Returns the next kept read, to be completed.
    pub fn next_taken(&self) -> Option<Taken> {
        self.taken.lock().unwrap().pop_front()
    }

    /// Copies the bytes at `offset` to `to`, up to the end of the file.
    fn copy_out(&self, offset: usize, to: &mut [u8]) -> usize {
        let bytes = self.bytes.lock().unwrap();
        let from = &bytes[offset.min(bytes.len())..(offset + to.len()).min(bytes.len())];
        to[..from.len()].copy_from_slice(from);
        from.len()
    }
}

impl BackingStore for Disk {
    fn len(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }

    fn preferred_pages(&self) -> usize {
        self.preferred
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let first = run.first();
        {
            let mut asked = self.asked.lock().unwrap();
            let pages = run.bytes().div_ceil(PAGE_BYTES) as u64;
            (first..first + pages).for_each(|page| *asked.entry(page).or_default() += 1);
        }
        step();
        let (mut at, mut done) = (run.offset() as usize, 0);
        for to in run.memory() {
            done += self.copy_out(at, to);
            at += to.len();
            step();
        }
        match *self.reads.lock().unwrap() {
            Some(Plan::Fail(done)) => Err(StoreError { done, errno: Errno::EIO }),
            Some(Plan::Bad(page)) => match page.checked_sub(first) {
                Some(before) if before < run.bytes().div_ceil(PAGE_BYTES) as u64 => {
                    Err(StoreError { done: before as usize * PAGE_BYTES, errno: Errno::EIO })
                }
                _ => Ok(done),
            },
            Some(Plan::Later) => {
                let reading = run.take_along().expect("the first call for this read");
                self.taken.lock().unwrap().push_back((reading, done));
                Ok(0)
            }
            None => Ok(done),
        }
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let plan = self.writes.lock().unwrap().pop_front();
        let (start, mut buffer) = (run.offset() as usize, Vec::new());
        for (from, len) in run.memory() {
            step();
            // SAFETY: valid for reads during the call; one thread runs at a time, and this copy
            // contains no step.
            buffer.extend_from_slice(unsafe { std::slice::from_raw_parts(from, len) });
        }
        // The fetched bytes arrive later.
        step();
        let failed = match plan {
            Some(Plan::Fail(done)) => Err(StoreError { done, errno: Errno::EIO }),
            _ => Ok(()),
        };
        buffer.truncate(failed.err().map_or(usize::MAX, |failed| failed.done));
        let mut bytes = self.bytes.lock().unwrap();
        let end = start + buffer.len();
        assert!(end <= bytes.len(), "written behind the end: {end} of {}", bytes.len());
        bytes[start..end].copy_from_slice(&buffer);
        failed
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        step();
        self.bytes.lock().unwrap().resize(bytes as usize, 0);
        Ok(())
    }

    fn punch(&self, pages: Range<u64>) -> Result<(), Errno> {
        step();
        let mut bytes = self.bytes.lock().unwrap();
        let end = (pages.end as usize * PAGE_BYTES).min(bytes.len());
        bytes[pages.start as usize * PAGE_BYTES..end].fill(0);
        Ok(())
    }
}

/// How a device ends a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Good,
    /// After the first page.
    Error,
    /// The read is dropped.
    Dropped,
}

/// Ends the next kept read, if any.
pub fn end_read(guest: &Guest<'_>, disk: &Disk, end: End) -> bool {
    guest.poll();
    let Some((reading, done)) = disk.next_taken() else { return false };
    step();
    let failed = StoreError { done: done.min(PAGE_BYTES), errno: Errno::EIO };
    match end {
        End::Good => reading.complete(guest.cpu, Ok(done)),
        End::Error => reading.complete(guest.cpu, Err(failed)),
        End::Dropped => {
            drop(reading);
            step();
            guest.cpu.end_dropped();
        }
    }
    true
}

/// Writes back the stores to the pages of `file`, which `spaces` map.
pub fn write_back(
    guest: &Guest<'_>,
    spaces: &[&Space],
    file: &Shared<Object>,
) -> Result<u64, Errno> {
    let protect = |pages: std::ops::Range<u64>| {
        let each = |space: &&Space| space.write_protect(guest.cpu, file, pages.clone());
        spaces.iter().for_each(each);
    };
    file.write_back(guest.cpu, 0..u64::MAX, protect)
}

/// Returns the first word of a page to the kernel, which waits for the page.
pub fn read_page(guest: &Guest<'_>, file: &Shared<Object>, index: u64) -> Result<u64, Errno> {
    loop {
        guest.poll();
        // SAFETY: a word of the lent page; one thread runs at a time.
        let word = |at: Option<*const u8>| at.map_or(0, |at| unsafe { at.cast::<u64>().read() });
        match file.read_page(guest.cpu, index, word) {
            Err(Errno::EAGAIN) => guest.cpu.await_read()?,
            done => return done,
        }
    }
}

/// Stores the first word of a page for the kernel, which waits for the page.
pub fn write_page(
    guest: &Guest<'_>,
    file: &Shared<Object>,
    index: u64,
    value: u64,
) -> Result<(), Errno> {
    loop {
        guest.poll();
        let word = |at: *mut u8| {
            step();
            // SAFETY: as above.
            unsafe { at.cast::<u64>().write(value) };
        };
        match file.write_page(guest.cpu, index, word) {
            Err(Errno::EAGAIN) => guest.cpu.await_read()?,
            done => return done,
        }
    }
}

/// Overwrites a whole page for the kernel, without a read: the first two words are `value`.
pub fn overwrite_page(
    guest: &Guest<'_>,
    file: &Shared<Object>,
    index: u64,
    value: u64,
) -> Result<usize, Errno> {
    guest.poll();
    file.overwrite_page(guest.cpu, index, |at| {
        // SAFETY: a lent page; one thread runs at a time, and no thread between the two words.
        unsafe { at.cast::<[u64; 2]>().write([value; 2]) };
        step();
        PAGE as usize
    })
}

/// After a last write-back everything that was stored is in the store: `words`, of the first pages.
pub fn nothing_is_lost(
    world: &World,
    spaces: &[&Space],
    file: &Shared<Object>,
    disk: &Disk,
    words: &[u64],
) {
    disk.heal();
    world.within(spaces[0], |guest| {
        write_back(guest, spaces, file).unwrap();
        for (index, &word) in (0..).zip(words) {
            assert_eq!(disk.word(index), word, "page {index} was lost before it reached the store");
            assert_eq!(read_page(guest, file, index), Ok(word), "of page {index}");
        }
    });
}
