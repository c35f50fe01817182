//! Files of the host as backing stores: the pages of such an object are read from the file on
//! demand, and written back to it.
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
//!     let file = Object::of_store(cpu.cpu(), store, 1)?;
//!     let backing = Backing { object: &file, first: 0, may_write: true };
//!     let (space, flags) = (cpu.running().space(), MapFlags::SHARED);
//!     let at = space.mmap_object(cpu.cpu(), None, PAGE_SIZE, Prot::RW, flags, backing)?;
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
//! An error of the host becomes the [`Errno`] with its number, or `EIO` if no [`Errno`] has the
//! number. `EBADF` also becomes `EIO`: the host returns `EBADF` for a read from a write-only file,
//! and for a write to a read-only file.
//!
//! # Other parties
//!
//! The length is read once, when the object is created. Later changes by other parties are visible
//! in pages read from then on. If another party truncates the file, the missing bytes are read as
//! zeros, and a writeback extends the file again.
//!
//! # Blocking
//!
//! Reads and writes block the CPU. The blocked CPU serves no flush requests, so other CPUs that
//! unmap pages of the same space wait for the host's disk as well.

use faultless::{BackingStore, Errno, PAGE_SIZE, ReadRun, StoreError, WriteRun};
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// The number of pages read and written at once: 128 KiB, the default read-ahead of Linux
/// (`read_ahead_kb`). The host has then read this much from its disk, so that smaller requests
/// would only cost more calls, and larger requests would take frames for pages that may remain
/// unused.
const PREFERRED_PAGES: usize = 32;

/// The number of memory parts in one call of the host. More parts take more calls.
const MOST_PARTS: usize = 64;

/// Zeros to write if no hole can be punched.
static ZEROS: [u8; 16 * PAGE_SIZE as usize] = [0; 16 * PAGE_SIZE as usize];

/// A regular file of the host, as the store of an [`Object`](faultless::Object).
#[derive(Debug)]
pub struct HostFile {
    file: File,
}

/// `preadv` or `pwritev`.
type Call = unsafe extern "C" fn(i32, *const libc::iovec, i32, libc::off_t) -> isize;

impl HostFile {
    /// Creates the backing store of `file`, which must be open for reading, and for writing if the
    /// object is ever stored to.
    ///
    /// # Errors
    /// `EINVAL`: the file is not a regular file; or it is open for appending (`O_APPEND`), which
    /// moves all writes behind its end, or for direct access (`O_DIRECT`), which cannot write a
    /// part of a block. The host's error, if the host cannot report the file's state.
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

    /// Moves bytes between the file, from `offset` on, and `parts` of memory, until all bytes are
    /// moved, or the call moves no bytes. Returns the number of moved bytes.
    ///
    /// # Safety
    /// The parts are valid memory, writable by `call` if it is `preadv`.
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
            // SAFETY: the vector has `count` parts, which by the caller's promise are memory valid
            // for the call.
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

    /// As [`BackingStore::punch`]; `punch` receives offset and length in bytes.
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

    /// Writes zeros to the part of `bytes` inside the file.
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
    /// The present length of the host's file; 0 if the host cannot report the length.
    fn len(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.len())
    }

    fn preferred_pages(&self) -> usize {
        PREFERRED_PAGES
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let offset = run.offset();
        let parts = run.memory().map(|part| (part.as_mut_ptr(), part.len()));
        // SAFETY: the run lends the memory for writing, as long as it is borrowed.
        unsafe { self.transfer(libc::preadv, offset, parts) }
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let parts = run.memory().map(|(at, len)| (at.cast_mut(), len));
        // SAFETY: the memory is valid for reads during this call; `pwritev` does not write to it.
        let done = unsafe { self.transfer(libc::pwritev, run.offset(), parts)? };
        // A call that writes no bytes and returns no error would do so forever.
        if done < run.bytes() { Err(StoreError { done, errno: Errno::EIO }) } else { Ok(()) }
    }

    /// `fdatasync`: the bytes, and the length.
    fn sync(&self) -> Result<(), Errno> {
        self.file.sync_data().map_err(|error| errno(&error))
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.file.set_len(bytes).map_err(|error| errno(&error))
    }

    /// `fallocate` with `FALLOC_FL_PUNCH_HOLE`; writes zeros if the host's file system has no
    /// holes.
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

/// Removes the first `moved` bytes from `parts`, whose rest moves to the front. Returns the number
/// of remaining parts.
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
