//! Files of the host as backing stores: an object of one is read from the file on demand, and written back to it.
//!
//! ```
//! use faultless::{Backing, MapFlags, Object, PAGE_SIZE, Prot};
//! use faultless_native::{Config, HostFile, Native};
//! use std::os::unix::fs::FileExt;
//! use std::sync::Arc;
//!
//! let host = tempfile::tempfile()?;
//! host.write_all_at(b"read on demand", 0)?;
//! let native = Native::new(Config::default())?;
//! let store = Arc::new(HostFile::new(host.try_clone()?)?);
//! native.process()?.run(|cpu| {
//!     let file = Object::of_store(cpu.cpu(), store, 1).expect("memory for an object");
//!     let backing = Backing { object: &file, first: 0, may_write: true };
//!     let space = cpu.running().space();
//!     let at = space.mmap_object(cpu.cpu(), 0, PAGE_SIZE, Prot::RW, MapFlags::SHARED, backing)?;
//!     assert_eq!(cpu.load::<u8>(at)?, b'r');
//!     cpu.store(at, b'R')?;
//!     let protect = |pages| space.write_protect(cpu.cpu(), &file, pages);
//!     assert_eq!(file.write_back(cpu.cpu(), 0..1, protect), Ok(1));
//!     cpu.munmap(at, PAGE_SIZE)?;
//!     Object::release(file, cpu.cpu());
//!     Ok(())
//! })?;
//! let mut first = [0];
//! host.read_exact_at(&mut first, 0)?;
//! assert_eq!(&first, b"R");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Errors
//!
//! An error of the host is the [`Errno`] with its number. Where there is none it is `EIO`: also for `EBADF`, which is what the host says
//! of a read from a file that is open for writing only, and of a write to one that is open for reading only.
//!
//! # Other parties
//!
//! The length is read once, when the object is made. What others do to the file afterwards is seen in the pages that are read
//! from then on; if they shorten it, what is missing is read as zeros, and what is written back makes it longer again.
//!
//! # Blocking
//!
//! Reads and writes block the CPU. It serves no flush requests meanwhile, so that other CPUs that unmap pages of the same space
//! wait for the host's disk as well.

use faultless::{BackingStore, Errno, PAGE_SIZE, ReadRun, StoreError, WriteRun};
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// How many pages are read and written at once: 128 KiB, as much as Linux reads ahead of a program unless it is told otherwise
/// (`read_ahead_kb`). The host has read as much from its disk then, so that asking for less would only cost more calls; and reading
/// more would take frames for pages that nobody may want.
const PREFERRED_PAGES: usize = 32;

/// Parts of memory that one call of the host is told of. More take more calls.
const MOST_PARTS: usize = 64;

/// Zeros to write where no hole can be punched.
static ZEROS: [u8; 16 * PAGE_SIZE as usize] = [0; 16 * PAGE_SIZE as usize];

/// A regular file of the host, as what is behind an [`Object`](faultless::Object).
#[derive(Debug)]
pub struct HostFile {
    file: File,
}

/// `preadv` or `pwritev`.
type Call = unsafe extern "C" fn(i32, *const libc::iovec, i32, libc::off_t) -> isize;

impl HostFile {
    /// The backing store that `file` is. It is to be open for reading, and for writing if anything is ever to be stored to the object.
    ///
    /// # Errors
    /// `EINVAL`: it is no regular file; or it is open for appending (`O_APPEND`), which puts all that is written behind its end, or
    /// for direct access (`O_DIRECT`), which writes no part of a block. The host's, if it does not tell.
    pub fn new(file: File) -> Result<Self, Errno> {
        let metadata = file.metadata().map_err(|error| errno(&error))?;
        // SAFETY: a plain call.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(errno(&Error::last_os_error()));
        }
        if !metadata.is_file() || flags & (libc::O_APPEND | libc::O_DIRECT) != 0 {
            return Err(Errno::EINVAL);
        }
        Ok(Self { file })
    }

    /// The file.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Moves bytes between the file, from `offset` on, and `parts` of memory, until there are no more, or the call moves none.
    /// Returns how many it has moved.
    ///
    /// # Safety
    /// The parts are memory, which `call` may write to if it is `preadv`.
    unsafe fn transfer(
        &self,
        call: Call,
        offset: u64,
        mut parts: impl Iterator<Item = (*mut u8, usize)>,
    ) -> Result<usize, StoreError> {
        let mut vector = [libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; MOST_PARTS];
        let (mut count, mut done) = (0, 0);
        loop {
            while count < MOST_PARTS
                && let Some((at, len)) = parts.next()
            {
                vector[count] = libc::iovec { iov_base: at.cast(), iov_len: len };
                count += 1;
            }
            if count == 0 {
                return Ok(done);
            }
            // An offset in an object is below 2^47.
            let (fd, at) = (self.file.as_raw_fd(), (offset + done as u64) as libc::off_t);
            // SAFETY: the vector has `count` parts, of which the caller says that they are memory for this.
            let moved = unsafe { call(fd, vector.as_ptr(), count as i32, at) };
            let Ok(moved) = usize::try_from(moved) else {
                let error = Error::last_os_error();
                if error.kind() == ErrorKind::Interrupted {
                    continue;
                }
                return Err(StoreError { done, errno: errno(&error) });
            };
            if moved == 0 {
                return Ok(done);
            }
            done += moved;
            count = skip(&mut vector[..count], moved);
        }
    }

    /// As [`BackingStore::punch`]; `punch` is told offset and length in bytes.
    fn punch_by(
        &self,
        pages: &Range<u64>,
        punch: impl Fn(u64, u64) -> Result<(), Error>,
    ) -> Result<(), Errno> {
        let (start, end) = (pages.start * PAGE_SIZE, pages.end * PAGE_SIZE);
        if start >= end {
            return Ok(());
        }
        loop {
            let error = match punch(start, end - start) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => error,
            };
            return match error.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => self.write_zeros(start..end),
                _ => Err(errno(&error)),
            };
        }
    }

    /// Writes zeros to those of `bytes` that the file has.
    fn write_zeros(&self, bytes: Range<u64>) -> Result<(), Errno> {
        let end = bytes.end.min(self.len());
        let mut at = bytes.start;
        while at < end {
            let part = &ZEROS[..(end - at).min(ZEROS.len() as u64) as usize];
            self.file.write_all_at(part, at).map_err(|error| errno(&error))?;
            at += part.len() as u64;
        }
        Ok(())
    }
}

impl BackingStore for HostFile {
    /// The host's file as it is now; 0 if the host does not tell.
    fn len(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.len())
    }

    fn preferred_pages(&self) -> usize {
        PREFERRED_PAGES
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let offset = run.offset();
        let parts = run.memory().map(|part| (part.as_mut_ptr(), part.len()));
        // SAFETY: the run lends the memory for writing, for as long as it is borrowed.
        unsafe { self.transfer(libc::preadv, offset, parts) }
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let parts = run.memory().map(|(at, len)| (at.cast_mut(), len));
        // SAFETY: the memory is valid for reads while this call lasts; `pwritev` writes nothing to it.
        let done = unsafe { self.transfer(libc::pwritev, run.offset(), parts)? };
        // A call that writes nothing and names no error would do so for ever.
        if done < run.bytes() { Err(StoreError { done, errno: Errno::EIO }) } else { Ok(()) }
    }

    /// `fdatasync`: the bytes, and the length.
    fn sync(&self) -> Result<(), Errno> {
        self.file.sync_data().map_err(|error| errno(&error))
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.file.set_len(bytes).map_err(|error| errno(&error))
    }

    /// `fallocate` with `FALLOC_FL_PUNCH_HOLE`; zeros are written where the host's file system has no holes.
    fn punch(&self, pages: Range<u64>) -> Result<(), Errno> {
        self.punch_by(&pages, |at, len| {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (fd, at, len) = (self.file.as_raw_fd(), at as libc::off_t, len as libc::off_t);
            // SAFETY: a plain call.
            let refused = unsafe { libc::fallocate(fd, mode, at, len) } != 0;
            if refused { Err(Error::last_os_error()) } else { Ok(()) }
        })
    }
}

/// The host's error as the subsystem's.
fn errno(error: &Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::of_number)
}

/// Takes the first `moved` bytes out of `parts`, the rest of which comes to the front. Returns how many parts are left.
fn skip(parts: &mut [libc::iovec], mut moved: usize) -> usize {
    let mut whole = 0;
    while let Some(part) = parts.get(whole)
        && part.iov_len <= moved
    {
        moved -= part.iov_len;
        whole += 1;
    }
    if let Some(part) = parts.get_mut(whole) {
        part.iov_base = part.iov_base.wrapping_byte_add(moved);
        part.iov_len -= moved;
    }
    parts.copy_within(whole.., 0);
    parts.len() - whole
}

#[cfg(test)]
mod tests;
