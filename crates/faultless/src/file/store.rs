//! Backing stores: where the pages of a file come from, and where they go back to.
//!
//! A kernel implements [`BackingStore`] over a disk, a network or a program, and makes objects of it
//! ([`Object::of_store`](super::Object::of_store)). The subsystem asks it for runs of pages, in order, of up to [`MOST_PAGES`].
//!
//! A read may end at once or later. A store that has the data at hand puts it into the pages of the [`ReadRun`] and returns how much
//! there was. A device starts the transfer, and [takes the run along](ReadRun::take_along): the [`Reading`] is completed by the code that is
//! told of the end of the transfer. Faults that need one of the pages meanwhile are told that they are [pending](crate::FaultKind::Pending).
//!
//! # What becomes of what goes wrong
//!
//! | the store | the pages |
//! |---|---|
//! | fails after some bytes | those before are there; faults that wait for the next page are told of the error; faults that wait for others look again, and read from their own page on; the next access reads again |
//! | fails with `EAGAIN` | as above, but those who wait are told to look again, and so read again: a store that wants to be asked for fewer pages |
//! | returns fewer bytes than asked for, because another party has shortened the file | the rest is zeros |
//! | drops a [`Reading`] and never completes it | as after an error of nothing read, `EIO` |
//! | cannot write | the pages stay dirty, and the error is told once to each open file ([`Object::write_error`](super::Object::write_error)) |
//!
//! A completion cannot come twice: it consumes the `Reading`.

use super::read::Reading;
use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::error::Errno;
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::ops::Deref;

/// The most pages of one read or write: 2 MiB.
pub const MOST_PAGES: usize = 512;

/// A store that did not do all that it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreError {
    /// The bytes from the start of the run that were read or written all the same.
    pub done: usize,
    /// Why the next were not.
    pub errno: Errno,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {} bytes", self.errno.name(), self.done)
    }
}

impl core::error::Error for StoreError {}

/// What is behind an [`Object`](super::Object): a file of a disk, of a network, of the host.
///
/// Calls come from CPUs that hold nothing but, for those that write, the object's turn to write: no lock, no section, no entry. They may
/// block, or make calls of the subsystem with the CPU that they run on. A CPU that blocks here serves no
/// [flush requests](crate::Cpu::serve_flushes), for which other CPUs wait; a store that blocks for long serves them meanwhile. Several
/// CPUs may read at the same time; one writes.
///
/// A device that reads later takes the run along. Here `transferred` is called when it has the bytes:
///
/// ```
/// use faultless::{BackingStore, Cpu, Errno, Machine, PAGE_SIZE, ReadRun, Reading, StoreError, WriteRun};
/// use std::sync::Mutex;
///
/// #[derive(Debug)]
/// struct Device {
///     pages: u64,
///     asked: Mutex<Vec<Reading>>,
/// }
///
/// impl BackingStore for Device {
///     fn len(&self) -> u64 {
///         self.pages * PAGE_SIZE
///     }
///
///     fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
///         // The device is told `run.offset()` and `run.bytes()`. A store that has the data at hand writes it to `run.memory()`
///         // here, and returns how much it was.
///         self.asked.lock().unwrap().extend(run.take_along());
///         Ok(0)
///     }
///
///     fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
///         Err(StoreError { done: 0, errno: Errno::EPERM })
///     }
///
///     fn set_len(&self, bytes: u64) -> Result<(), Errno> {
///         Err(Errno::EPERM)
///     }
/// }
///
/// /// The device has read what `reading` asked for: bytes `from`. Returns what the threads that wait for it know it by.
/// fn transferred<M: Machine>(cpu: &Cpu<'_, M>, mut reading: Reading, from: &[u8]) -> u64 {
///     let (mut left, id) = (from, reading.id());
///     for page in reading.memory(cpu) {
///         let (now, later) = left.split_at(page.len().min(left.len()));
///         page[..now.len()].copy_from_slice(now);
///         left = later;
///     }
///     // Bytes that are missing are zeros.
///     reading.complete(cpu, Ok(from.len()));
///     id
/// }
/// ```
pub trait BackingStore: Send + Sync + fmt::Debug {
    /// Its length in bytes, when an object is made of it.
    fn len(&self) -> u64;

    /// Whether it has no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many pages it prefers to read or write at once, 1 to [`MOST_PAGES`].
    fn preferred_pages(&self) -> usize {
        16
    }

    /// Returns whether the store is only read; the answer must not change. What programs store to pages of it stays in memory then, as long as the object: it is neither written back nor
    /// [evicted](crate::Cpu::reclaim).
    fn is_read_only(&self) -> bool {
        false
    }

    /// Reads the pages of `run`, and returns how many bytes there were, from the start of the run; or [takes it along](ReadRun::take_along), and then
    /// what it returns does not count.
    ///
    /// # Errors
    /// The bytes that were read before the error, and the error.
    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError>;

    /// Writes the bytes of `run`. When it returns they are where the next read finds them.
    ///
    /// Any call that needs memory may come to write pages of any object ([`Cpu::reclaim`](crate::Cpu::reclaim)). So it must not wait for a lock under which the
    /// kernel makes calls of the subsystem, except those of the store's own object that change what the store has. If it needs memory of the subsystem
    /// itself, no more pages are evicted for that.
    ///
    /// A panic counts as an error of no bytes written: the pages of `run` stay dirty.
    ///
    /// # Errors
    /// The bytes that were written before the error, and the error.
    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError>;

    /// Makes what was written durable, for `fsync`. By default there is nothing to do.
    ///
    /// # Errors
    /// Why it is not.
    fn sync(&self) -> Result<(), Errno> {
        Ok(())
    }

    /// Sets its length in bytes. Bytes that are added are zeros.
    ///
    /// # Errors
    /// Why it has not; its length is the old one.
    fn set_len(&self, bytes: u64) -> Result<(), Errno>;

    /// Makes the bytes of `pages` zeros.
    ///
    /// # Errors
    /// Why it has not; by default `EOPNOTSUPP`.
    fn punch(&self, pages: core::ops::Range<u64>) -> Result<(), Errno> {
        let _ = pages;
        Err(Errno::EOPNOTSUPP)
    }
}

/// A [`BackingStore`] as an object has it: shared with others, or the object's own, which a kernel can make without a memory allocation that
/// must not fail ([`try_box`](crate::try_box)).
#[derive(Debug)]
pub enum Store {
    /// Shared.
    Shared(Arc<dyn BackingStore>),
    /// The object's own.
    Own(Box<dyn BackingStore>),
}

impl Deref for Store {
    type Target = dyn BackingStore;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Shared(store) => &**store,
            Self::Own(store) => &**store,
        }
    }
}

impl<S: BackingStore + 'static> From<Arc<S>> for Store {
    fn from(store: Arc<S>) -> Self {
        Self::Shared(store)
    }
}

impl From<Arc<dyn BackingStore>> for Store {
    fn from(store: Arc<dyn BackingStore>) -> Self {
        Self::Shared(store)
    }
}

impl<S: BackingStore + 'static> From<Box<S>> for Store {
    fn from(store: Box<S>) -> Self {
        Self::Own(store)
    }
}

/// Pages that a store is to read: neighbours in the file, whose frames nobody else uses yet.
#[derive(Debug)]
pub struct ReadRun {
    pub(super) reading: Option<Reading>,
}

/// The memory of one page of a run.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Its frame, for a device that reaches memory by physical addresses.
    pub frame: FrameNumber,
    pub(super) at: *mut u8,
}

// SAFETY: the pointer is to a frame, which any CPU may use; which CPU does is up to the owner of the run.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl ReadRun {
    /// The number of the first page in the file.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.reading.as_ref().map_or(0, Reading::first)
    }

    /// The offset of the first page in the file, in bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.first() * PAGE_SIZE
    }

    /// How many bytes of the file are wanted: those of all pages, but for what is beyond the file's end.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.reading.as_ref().map_or(0, Reading::bytes)
    }

    /// The memory of the pages with the bytes that are wanted, in order. It holds anything: programs see as many bytes of it as the store says it has
    /// read, and zeros behind.
    pub fn memory(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let (pages, bytes) = self.reading.as_ref().map_or((&[][..], 0), Reading::parts);
        // SAFETY: the call of the store is one of the subsystem, which exists; and the frames are the read's alone until it ends, which
        // takes the reading.
        wanted(pages, bytes).map(|(at, len)| unsafe { core::slice::from_raw_parts_mut(at, len) })
    }

    /// Takes the run along: it is completed later ([`Reading::complete`]), by any CPU. The memory stays the run's until then.
    /// `None`: it was taken already, and the run is empty.
    pub fn take_along(&mut self) -> Option<Reading> {
        self.reading.take()
    }
}

/// Pages that a store is to write: neighbours in the file. Programs may be loading them, and calls of the kernel storing to them.
#[derive(Debug)]
pub struct WriteRun<'a> {
    pub(super) first: u64,
    pub(super) bytes: usize,
    pub(super) pages: &'a [Buffer],
}

impl WriteRun<'_> {
    /// The number of the first page in the file.
    #[must_use]
    pub const fn first(&self) -> u64 {
        self.first
    }

    /// The offset of the first page in the file, in bytes.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.first * PAGE_SIZE
    }

    /// How many bytes are to be written: those of all pages, but for what is beyond the file's end.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memory of the pages, in order.
    #[must_use]
    pub const fn buffers(&self) -> &[Buffer] {
        self.pages
    }

    /// The memory of the pages with the bytes to be written, in order: where it begins, and how many bytes. It is valid for reads
    /// while the call lasts. Calls of the kernel may be storing to it, so it is no slice.
    pub fn memory(&self) -> impl Iterator<Item = (*const u8, usize)> {
        wanted(self.pages, self.bytes).map(|(at, len)| (at.cast_const(), len))
    }
}

/// The memory of the first `bytes` bytes of `pages`, page by page.
pub(super) fn wanted(pages: &[Buffer], bytes: usize) -> impl Iterator<Item = (*mut u8, usize)> {
    const PAGE: usize = PAGE_SIZE as usize;
    let len = move |at: usize| bytes.saturating_sub(at * PAGE).min(PAGE);
    pages
        .iter()
        .enumerate()
        .map(move |(at, page)| (page.at, len(at)))
        .take_while(|(_, len)| *len != 0)
}
