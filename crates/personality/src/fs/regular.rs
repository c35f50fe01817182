//! The contents of regular files: a memory object, and a length.
//!
//! Bytes are copied directly between the object's pages and the program. The lock orders writes and changes of
//! the length; reads take none. It may be held during accesses to user memory: a page fault takes no
//! lock of the file system, even if that memory is a mapping of the same file.
//!
//! *The tail:* in the last page of the object the bytes beyond the length are zero, except for what
//! programs store there through mappings; that is cleared when the file grows over it.

use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::memory::{self, EndsDropped};
use core::fmt;
use core::ops::{Deref, Range};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use faultless::Object;
use faultless::Shared;
use faultless::{Copies, PAGE_SHIFT, PAGE_SIZE};
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use linux_raw_sys::general as linux;

/// The largest length of a file.
pub const MAX_LENGTH: u64 = Object::MAX_PAGES << PAGE_SHIFT;

/// The frames that files must leave free.
fn frames_left_to_others() -> u64 {
    percpu::vm().total_frames() / 8
}

/// A reference to an object, which its drop releases at once: free memory counts, for a file that is written next.
#[derive(Debug)]
pub struct Held {
    object: Shared<Object>,
    /// Below the object.
    _end: EndsDropped,
}

impl Held {
    /// Takes over a reference.
    pub const fn new(object: Shared<Object>) -> Self {
        Self { object, _end: EndsDropped }
    }
}

impl Deref for Held {
    type Target = Shared<Object>;

    fn deref(&self) -> &Shared<Object> {
        &self.object
    }
}

/// The contents of a regular file.
pub struct Regular {
    object: Held,
    length: AtomicU64,
    change: Mutex<()>,
    /// Whether it was ever mapped.
    mapped: AtomicBool,
    /// Its seals (`F_SEAL_…`); only `F_SEAL_SEAL` if it cannot be sealed.
    seals: AtomicU32,
}

impl fmt::Debug for Regular {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.length())
    }
}

impl Regular {
    /// An empty file, whose object carries `tag`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(tag: u64) -> Result<Self> {
        let object = Object::try_new(percpu::cpu(), 0, tag)?;
        Ok(Self {
            object: Held::new(object),
            length: AtomicU64::new(0),
            change: Mutex::new(()),
            mapped: AtomicBool::new(false),
            seals: AtomicU32::new(linux::F_SEAL_SEAL),
        })
    }

    /// Its bytes.
    pub fn length(&self) -> u64 {
        self.length.load(Ordering::Acquire)
    }

    /// Its resident pages.
    pub fn resident_pages(&self) -> u64 {
        self.object.resident_pages(percpu::cpu())
    }

    /// Its object, for a mapping.
    pub fn map(&self) -> &Shared<Object> {
        self.mapped.store(true, Ordering::SeqCst);
        &self.object
    }

    /// Its seals.
    pub fn seals(&self) -> u32 {
        self.seals.load(Ordering::Relaxed)
    }

    /// Allows sealing.
    pub fn allow_seals(&self) {
        self.seals.store(0, Ordering::Relaxed);
    }

    /// Adds seals.
    ///
    /// # Errors
    /// `EPERM`: `F_SEAL_SEAL` is set.
    pub fn seal(&self, more: u32) -> Result<()> {
        let _change = self.change.lock();
        if self.seals() & linux::F_SEAL_SEAL != 0 {
            return Err(Errno::EPERM);
        }
        self.seals.fetch_or(more, Ordering::Relaxed);
        Ok(())
    }

    fn refuse_if(&self, sealed: u32) -> Result<()> {
        if self.seals() & sealed == 0 { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// Copies the bytes from `offset` on to `to`.
    ///
    /// # Errors
    /// `EFAULT`.
    pub fn read(&self, to: &mut Transfer<'_>, offset: u64) -> Result {
        let length = self.length();
        let mut at = offset;
        while at < length && to.left() != 0 {
            let part = (PAGE_SIZE - at % PAGE_SIZE).min(length - at);
            let cpu = percpu::cpu();
            at += self.object.read_page(cpu, at >> PAGE_SHIFT, |page| match page {
                // SAFETY: the part lies within the page that is lent.
                Some(page) => unsafe { to.put(page.add((at % PAGE_SIZE) as usize), part) },
                None => to.put_zeros(part),
            })?;
            // A large read takes long, and other CPUs may wait for a flush.
            cpu.serve_flushes();
        }
        to.result()
    }

    /// Copies bytes from `from` to `offset` or, without one, to the end; returns where they begin.
    ///
    /// # Errors
    /// `EFBIG`, `ENOSPC`, `EFAULT`, `EPERM`: it is sealed.
    pub fn write(&self, from: &mut Transfer<'_>, offset: Option<u64>) -> Result {
        let _change = self.change.lock();
        self.refuse_if(linux::F_SEAL_WRITE | linux::F_SEAL_FUTURE_WRITE)?;
        let length = self.length();
        let start = offset.unwrap_or(length);
        if from.left() == 0 {
            return Ok(start);
        }
        if start >= MAX_LENGTH {
            return Err(Errno::EFBIG);
        }
        from.limit(MAX_LENGTH - start);
        if start + from.left() > length {
            self.refuse_if(linux::F_SEAL_GROW)?;
            self.grow(length, start + from.left())?;
        }
        let mut at = start;
        let mut room = Ok(());
        while from.left() != 0 {
            let part = PAGE_SIZE - at % PAGE_SIZE;
            let cpu = percpu::cpu();
            let index = at >> PAGE_SHIFT;
            room = self.may_grow_by_page(index).and_then(|()| {
                let to = (at % PAGE_SIZE) as usize;
                // SAFETY: the part lies within the page that is lent.
                let write = |page: *mut u8| unsafe { from.take(page.add(to), part) };
                at += self.object.write_page(cpu, index, write).map_err(|_| Errno::ENOSPC)?;
                Ok(())
            });
            if room.is_err() {
                break;
            }
            cpu.serve_flushes();
        }
        self.length.fetch_max(at, Ordering::Release);
        // Frees pages that were added for bytes that could not be copied.
        self.shorten();
        match room {
            Err(errno) if from.moved() == 0 => Err(errno),
            _ => from.result().map(|_| start),
        }
    }

    /// Fails if files would take the last frames.
    fn may_grow_by_page(&self, index: u64) -> Result<()> {
        let cpu = percpu::cpu();
        // The count is a sum over all CPUs: not done for every page.
        if index & 15 == 0
            && !self.object.has_page(cpu, index)
            && cpu.vm().free_frames() < frames_left_to_others()
        {
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }

    /// Adds pages up to `end`, and clears the tail that becomes part of the file. `change` is held.
    fn grow(&self, length: u64, end: u64) -> Result<()> {
        self.clear(length, end.min(length.next_multiple_of(PAGE_SIZE)));
        self.object.set_pages(percpu::cpu(), end.div_ceil(PAGE_SIZE))?;
        Ok(())
    }

    /// Zeroes `from..to`, which lie in one page, if the page is resident.
    fn clear(&self, from: u64, to: u64) {
        let cpu = percpu::cpu();
        let index = from >> PAGE_SHIFT;
        if from < to && self.object.has_page(cpu, index) {
            let zero = |page: *mut u8| {
                // SAFETY: the part lies within the page that is lent.
                unsafe {
                    ptr::write_bytes(
                        page.add((from % PAGE_SIZE) as usize),
                        0,
                        (to - from) as usize,
                    );
                }
            };
            // A page that left the object meanwhile is zero.
            let _ = self.object.write_page(cpu, index, zero);
        }
    }

    /// Sets the length.
    ///
    /// # Errors
    /// `EFBIG`; `EPERM`: it is sealed.
    pub fn truncate(&self, length: u64) -> Result<()> {
        if length > MAX_LENGTH {
            return Err(Errno::EFBIG);
        }
        let _change = self.change.lock();
        let before = self.length();
        if length >= before {
            if length > before {
                self.refuse_if(linux::F_SEAL_GROW)?;
                self.grow(before, length)?;
            }
            self.length.store(length, Ordering::Release);
            return Ok(());
        }
        self.refuse_if(linux::F_SEAL_SHRINK)?;
        self.length.store(length, Ordering::Release);
        self.clear(length, before.min(length.next_multiple_of(PAGE_SIZE)));
        self.shorten();
        Ok(())
    }

    /// Frees the pages beyond the end. `change` is held, so none is added before all of them are unmapped
    /// everywhere.
    fn shorten(&self) {
        let (before, pages) = (self.object.pages(), self.length().div_ceil(PAGE_SIZE));
        if pages < before {
            // Shrinking never fails.
            let _ = self.object.set_pages(percpu::cpu(), pages);
            self.revoke(pages..before, Copies::Drop);
        }
    }

    /// Allocates pages for `range`, and with `grow` extends the file over it.
    ///
    /// # Errors
    /// `EFBIG`, `ENOSPC`; `EPERM`: it is sealed.
    pub fn allocate(&self, start: u64, end: u64, grow: bool) -> Result<()> {
        if end > MAX_LENGTH {
            return Err(Errno::EFBIG);
        }
        let _change = self.change.lock();
        let length = self.length();
        if end > length && grow {
            self.refuse_if(linux::F_SEAL_GROW)?;
        }
        let pages = (end - start).div_ceil(PAGE_SIZE);
        if pages + frames_left_to_others() > percpu::vm().free_frames() {
            return Err(Errno::ENOSPC);
        }
        let last = if grow { end } else { end.min(length) };
        if last > length {
            self.grow(length, last)?;
        }
        for index in start >> PAGE_SHIFT..last.div_ceil(PAGE_SIZE) {
            let made = self.object.write_page(percpu::cpu(), index, |_| ());
            made.map_err(|_| Errno::ENOSPC)?;
            percpu::cpu().serve_flushes();
        }
        self.length.fetch_max(last, Ordering::Release);
        Ok(())
    }

    /// Zeroes `start..end`, and frees the pages that lie wholly in it. Private copies of programs
    /// stay.
    ///
    /// # Errors
    /// `EPERM`: it is sealed.
    pub fn punch(&self, start: u64, end: u64) -> Result<()> {
        let end = end.min(MAX_LENGTH);
        let (first, last) = (start.div_ceil(PAGE_SIZE), end >> PAGE_SHIFT);
        let _change = self.change.lock();
        self.refuse_if(linux::F_SEAL_WRITE | linux::F_SEAL_FUTURE_WRITE)?;
        self.clear(start, end.min(first << PAGE_SHIFT));
        if last >= first {
            self.clear(last << PAGE_SHIFT, end);
        }
        if first < last {
            self.object.free_pages(percpu::cpu(), first..last);
            self.revoke(first..last, Copies::Keep);
        }
        Ok(())
    }

    /// The first byte from `offset` on in a resident page, or, unless `there`, in a hole.
    /// The end of the file is a hole. A very long hole is reported in parts, as if there were data between.
    ///
    /// # Errors
    /// `ENXIO`: there is none.
    pub fn seek(&self, offset: u64, there: bool) -> Result {
        /// The most pages that one call checks.
        const LONGEST: u64 = 1 << 18;
        let length = self.length();
        if offset >= length {
            return Err(Errno::ENXIO);
        }
        let cpu = percpu::cpu();
        let first = offset >> PAGE_SHIFT;
        let found = (first..length.div_ceil(PAGE_SIZE))
            .find(|&index| index - first == LONGEST || self.object.has_page(cpu, index) == there);
        match found {
            Some(index) => Ok((index << PAGE_SHIFT).max(offset)),
            None if there => Err(Errno::ENXIO),
            None => Ok(length),
        }
    }

    /// Unmaps `pages`, which have left the object, in every process. `change` is held.
    fn revoke(&self, pages: Range<u64>, copies: Copies) {
        if self.mapped.load(Ordering::SeqCst) {
            memory::revoke(&self.object, pages, copies);
        }
    }
}
