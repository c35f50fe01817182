//! Backing stores: the storage that the pages of a file are read from and written to.
//!
//! A kernel implements [`BackingStore`] over a disk, a network or a program, and makes objects of
//! the store ([`Object::of_store`](super::Object::of_store)). The subsystem requests runs of
//! contiguous pages, of up to [`MOST_PAGES`].
//!
//! A read may be synchronous or asynchronous. A store with the data at hand puts the data into the
//! pages of the [`ReadRun`] and returns the number of bytes. A device starts the transfer, and
//! [takes the run along](ReadRun::take_along): the code that handles the end of the transfer
//! completes the [`Reading`]. In the meantime faults on these pages return
//! [pending](crate::FaultKind::Pending).
//!
//! # Failures
//!
//! | the store | the pages |
//! |---|---|
//! | fails after some bytes | the pages before are present; faults that wait for the next page receive the error; faults that wait for other pages retry, and read starting with their own page; the next access reads again |
//! | fails with `EAGAIN` | as above, but all waiting faults retry, and so read again: for a store that requires smaller requests |
//! | returns fewer bytes than requested, because another party has shortened the file | the rest is zeros |
//! | drops a [`Reading`] without completing it | as after an error `EIO` with no bytes read |
//! | cannot write | the pages stay dirty, and each open file receives the error once ([`Object::write_error`](super::Object::write_error)) |
//!
//! A completion cannot occur twice: it consumes the `Reading`.

use super::read::Reading;
use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::error::Errno;
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::ops::Deref;

/// The maximum number of pages of one read or write: 2 MiB.
pub const MOST_PAGES: usize = 512;

/// The error of a store that did not complete a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreError {
    /// The number of bytes, from the start of the run, that were read or written.
    pub done: usize,
    /// The reason for not processing the rest.
    pub errno: Errno,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {} bytes", self.errno.name(), self.done)
    }
}

impl core::error::Error for StoreError {}

/// The storage of an [`Object`](super::Object): a file on a disk, on a network, or of the host.
///
/// The calling CPU holds no lock, section or entry; for a write it holds the object's turn to
/// write. The functions may block, or make calls of the subsystem with the current CPU. A CPU that
/// blocks here serves no [flush requests](crate::Cpu::serve_flushes), for which other CPUs wait; a
/// store that blocks for long must serve them. Several CPUs may read at the same time; only one
/// writes.
///
/// An asynchronous device takes the run along. In this example `transferred` is called when the
/// bytes have arrived:
///
/// ```
/// use faultless::{BackingStore, Cpu, Errno, Machine, PAGE_SIZE};
/// use faultless::{ReadRun, Reading, StoreError, WriteRun};
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
///         // Pass `run.offset()` and `run.bytes()` to the device. A store with the data at hand
///         // would copy it to `run.memory()` here, and return the number of bytes.
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
/// /// The device has read the bytes `from` for `reading`. Returns the identifier of the read.
/// fn transferred<M: Machine>(cpu: &Cpu<'_, M>, mut reading: Reading, from: &[u8]) -> u64 {
///     let (mut left, id) = (from, reading.id());
///     for page in reading.memory(cpu) {
///         let (now, later) = left.split_at(page.len().min(left.len()));
///         page[..now.len()].copy_from_slice(now);
///         left = later;
///     }
///     // Missing bytes become zeros.
///     reading.complete(cpu, Ok(from.len()));
///     id
/// }
/// ```
pub trait BackingStore: Send + Sync + fmt::Debug {
    /// Returns the length in bytes; called when an object is made of the store.
    fn len(&self) -> u64;

    /// Returns whether the store is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many pages the store prefers to read or write at once, 1 to [`MOST_PAGES`].
    fn preferred_pages(&self) -> usize {
        16
    }

    /// Returns whether the store is read-only; the result must not change. Pages modified by
    /// programs then stay in memory while the object lives: they are neither written back nor
    /// [evicted](crate::Cpu::reclaim).
    fn is_read_only(&self) -> bool {
        false
    }

    /// Reads the pages of `run`, and returns the number of bytes read, from the start of the run;
    /// or [takes the run along](ReadRun::take_along), in which case the result is ignored.
    ///
    /// # Errors
    /// The number of bytes read before the error, and the error.
    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError>;

    /// Writes the bytes of `run`. After the return the next read must find them.
    ///
    /// Any call that needs memory may write pages of any object
    /// ([`Cpu::reclaim`](crate::Cpu::reclaim)). So this function must not wait for a lock under
    /// which the kernel makes calls of the subsystem, except calls on the store's own object that
    /// change the store. If this function itself needs memory of the subsystem, no further pages
    /// are evicted for it.
    ///
    /// A panic counts as an error with no bytes written: the pages of `run` stay dirty.
    ///
    /// # Errors
    /// The number of bytes written before the error, and the error.
    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError>;

    /// Makes the written data durable, for `fsync`. Does nothing by default.
    ///
    /// # Errors
    /// The reason for a failure.
    fn sync(&self) -> Result<(), Errno> {
        Ok(())
    }

    /// Sets the length in bytes. Added bytes are zeros.
    ///
    /// # Errors
    /// The reason for a failure; the length is unchanged.
    fn set_len(&self, bytes: u64) -> Result<(), Errno>;

    /// Makes the bytes of `pages` zeros.
    ///
    /// # Errors
    /// The reason for a failure; by default `EOPNOTSUPP`.
    fn punch(&self, pages: core::ops::Range<u64>) -> Result<(), Errno> {
        let _ = pages;
        Err(Errno::EOPNOTSUPP)
    }
}

/// A [`BackingStore`] of an object: shared, or owned by the object. A kernel can make an owned
/// store by a fallible allocation ([`try_box`](crate::try_box)).
#[derive(Debug)]
pub enum Store {
    /// A shared store.
    Shared(Arc<dyn BackingStore>),
    /// A store owned by the object.
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

/// Pages to be read by a store: contiguous pages of the file, whose frames have no other users yet.
#[derive(Debug)]
pub struct ReadRun {
    pub(super) reading: Option<Reading>,
}

/// The memory of one page of a run.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// The frame, for a device that accesses memory by physical addresses.
    pub frame: FrameNumber,
    pub(super) at: *mut u8,
}

// SAFETY: the pointer is to a frame, which any CPU may use; the owner of the run decides which CPU
// does.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl ReadRun {
    /// Returns the number of the first page in the file.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.reading.as_ref().map_or(0, Reading::first)
    }

    /// Returns the offset of the first page in the file, in bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.first() * PAGE_SIZE
    }

    /// Returns how many bytes of the file to read: the bytes of all pages, limited by the file's
    /// end.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.reading.as_ref().map_or(0, Reading::bytes)
    }

    /// Returns the memory of the pages to read, limited to the bytes to read, in order. Its
    /// contents are arbitrary: programs see the number of bytes that the store reports as read,
    /// followed by zeros.
    pub fn memory(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let (pages, bytes) = self.reading.as_ref().map_or((&[][..], 0), Reading::parts);
        // SAFETY: the subsystem is alive, because it makes the call of the store; and the frames
        // belong to the read alone until it ends, which consumes the reading.
        wanted(pages, bytes).map(|(at, len)| unsafe { core::slice::from_raw_parts_mut(at, len) })
    }

    /// Takes the run along: any CPU completes it later ([`Reading::complete`]). The memory belongs
    /// to the run until then. `None`: the run was taken already, and is empty.
    pub fn take_along(&mut self) -> Option<Reading> {
        self.reading.take()
    }
}

/// Pages to be written by a store: contiguous pages of the file. Programs may load them
/// concurrently, and calls of the kernel may store to them.
#[derive(Debug)]
pub struct WriteRun<'a> {
    pub(super) first: u64,
    pub(super) bytes: usize,
    pub(super) pages: &'a [Buffer],
}

impl WriteRun<'_> {
    /// Returns the number of the first page in the file.
    #[must_use]
    pub const fn first(&self) -> u64 {
        self.first
    }

    /// Returns the offset of the first page in the file, in bytes.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.first * PAGE_SIZE
    }

    /// Returns how many bytes to write: the bytes of all pages, limited by the file's end.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the memory of the pages, in order.
    #[must_use]
    pub const fn buffers(&self) -> &[Buffer] {
        self.pages
    }

    /// Returns the memory of the pages to write, in order: pointers and numbers of bytes. Valid for
    /// reads during the call. Calls of the kernel may store to the memory concurrently, so it is
    /// not returned as a slice.
    pub fn memory(&self) -> impl Iterator<Item = (*const u8, usize)> {
        wanted(self.pages, self.bytes).map(|(at, len)| (at.cast_const(), len))
    }
}

/// Returns the memory of the first `bytes` bytes of `pages`, page by page.
pub(super) fn wanted(pages: &[Buffer], bytes: usize) -> impl Iterator<Item = (*mut u8, usize)> {
    const PAGE: usize = PAGE_SIZE as usize;
    let len = move |at: usize| bytes.saturating_sub(at * PAGE).min(PAGE);
    pages
        .iter()
        .enumerate()
        .map(move |(at, page)| (page.at, len(at)))
        .take_while(|(_, len)| *len != 0)
}
