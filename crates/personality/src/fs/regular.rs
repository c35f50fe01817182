//! The contents of regular files: a memory object, and a length.
//!
//! The object of a file on the disk has a backing store, from which its pages are read on first
//! use. The pages stay, and so do bytes stored to them: the disk is never written. A thread must
//! not sleep under a lock, so a call [fetches](Regular::fetch) the pages before it copies.
//!
//! Bytes are copied directly between the object's pages and the program. The lock orders writes and
//! changes of the length; reads take no lock. The lock may be held during accesses to user memory:
//! a page fault takes no lock of the file system, even if this memory is a mapping of the same
//! file.
//!
//! *The tail:* in the last page of the object the bytes beyond the length are zero, except for data
//! that programs store there through mappings; this data is cleared when the file grows over it.

use super::cache;
use super::inode::Inode;
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::memory::{self, EndsDropped};
use crate::task::reads::{self, Reader};
use core::fmt;
use core::ops::{Deref, Range};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use faultless::{
    BackingStore, Cpu, FrameNumber, Object, PAGE_SHIFT, PAGE_SIZE, PrivateCopies, Shared, try_box,
};
use faultless_bare::machine::Bare;
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use faultless_collections::Arc;
use faultless_disk::Extent;
use linux_raw_sys::general as linux;

/// The maximum length of a file.
pub const MAX_LENGTH: u64 = Object::MAX_PAGES << PAGE_SHIFT;

/// Returns the number of frames that files must not use.
pub fn frames_left_to_others() -> u64 {
    percpu::vm().total_frames() / 8
}

/// The maximum number of bytes read ahead by one call.
const MOST_AHEAD: u64 = 2 << 20;
/// The maximum number of bytes of a file on the disk that are copied at a time.
const PIECE: u64 = 1 << 20;

/// The reason why a page of a file cannot be stored to.
fn no_page(errno: faultless::Errno) -> Errno {
    match errno {
        faultless::Errno::EAGAIN => Errno::EAGAIN,
        _ => Errno::ENOSPC,
    }
}

/// A reference to an object. Dropping the reference frees the object's memory at once, because the
/// next write to a file needs free memory.
#[derive(Debug)]
pub struct Held {
    object: Shared<Object>,
    /// The field order matters: this field is dropped after the object.
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
    /// Set if the file was ever mapped.
    mapped: AtomicBool,
    /// The seals (`F_SEAL_…`); only `F_SEAL_SEAL` if the file cannot be sealed.
    seals: AtomicU32,
    /// The number of calls that are about to map the file shared and writable.
    mapping: AtomicU32,
}

/// A call that is about to map a file. While this value exists, `F_SEAL_WRITE` is refused.
#[derive(Debug)]
pub struct AboutToMap(Arc<Inode>);

impl Drop for AboutToMap {
    fn drop(&mut self) {
        if let Some(regular) = self.0.regular() {
            regular.mapping.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// The seals against stores.
const NO_STORES: u32 = linux::F_SEAL_WRITE | linux::F_SEAL_FUTURE_WRITE;
/// `F_SEAL_EXEC`: the execute permissions cannot be changed.
pub const SEAL_EXEC: u32 = 0x20;
/// All seals.
const ALL_SEALS: u32 =
    linux::F_SEAL_SEAL | linux::F_SEAL_SHRINK | linux::F_SEAL_GROW | NO_STORES | SEAL_EXEC;

impl fmt::Debug for Regular {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.length())
    }
}

impl Regular {
    /// Makes an empty file, whose object carries `tag` and is charged.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(tag: u64) -> Result<Self> {
        Ok(Self::around(Object::try_new_charged(percpu::cpu(), 0, tag)?, 0))
    }

    /// Makes a file with the contents of `extent`, whose object carries `tag`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_of_extent(extent: Extent, tag: u64) -> Result<Self> {
        let length = extent.len();
        Ok(Self::around(Object::of_store(percpu::cpu(), try_box(extent)?, tag)?, length))
    }

    const fn around(object: Shared<Object>, length: u64) -> Self {
        Self {
            object: Held::new(object),
            length: AtomicU64::new(length),
            change: Mutex::new(()),
            mapped: AtomicBool::new(false),
            seals: AtomicU32::new(linux::F_SEAL_SEAL),
            mapping: AtomicU32::new(0),
        }
    }

    /// Returns whether the file lies on the disk.
    pub fn is_stored(&self) -> bool {
        self.object.is_stored()
    }

    /// Waits until `len` bytes from `offset` on are present, if the file lies on the disk: missing
    /// pages are read. Returns the number of present bytes; bytes beyond the end count as present.
    /// Also reads the pages that the open file's `reader` predicts to be needed next. The caller
    /// holds no lock, and no per-CPU data of this CPU.
    ///
    /// # Errors
    /// The error of the first byte: `EIO`, `ENOMEM`; `EINTR`: the thread is killed.
    pub fn fetch(&self, offset: u64, len: u64, reader: Option<&Reader>) -> Result {
        if !self.object.is_stored() {
            return Ok(len);
        }
        let end = self.length().min(offset.saturating_add(len)).div_ceil(PAGE_SIZE);
        let pages = offset >> PAGE_SHIFT..end;
        cache::make_room();
        let there = pages.start + reads::fetch(&self.object, pages, reader)?;
        Ok(if there >= end { len } else { (there << PAGE_SHIFT) - offset })
    }

    /// Returns whether all of `len` bytes from `offset` on are present, or beyond the end.
    #[inline]
    pub fn is_there(&self, offset: u64, len: u64) -> bool {
        let end = || self.length().min(offset.saturating_add(len)).div_ceil(PAGE_SIZE);
        let there = |index| self.object.has_page(percpu::cpu(), index);
        !self.object.is_stored() || (offset >> PAGE_SHIFT..end()).all(there)
    }

    /// Returns the offsets of the pages in which a write of `len` bytes from `offset` on keeps
    /// other bytes of the file: the first and the last page, if partial. The other pages are
    /// overwritten completely, so their old contents need not be present.
    fn kept(&self, offset: u64, len: u64) -> impl Iterator<Item = u64> {
        let (end, length) = (offset.saturating_add(len), self.length());
        let first = (!offset.is_multiple_of(PAGE_SIZE) && len != 0).then_some(offset);
        let last = (!end.is_multiple_of(PAGE_SIZE) && end < length && len != 0).then_some(end);
        let page = |at: u64| at >> PAGE_SHIFT;
        first.into_iter().chain(last.filter(|last| first.map(page) != Some(page(*last))))
    }

    /// Fetches like [`fetch`](Self::fetch), for a write.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    pub fn fetch_kept(&self, offset: u64, len: u64) -> Result {
        for at in self.kept(offset, len) {
            if let Err(errno) = self.fetch(at, 1, None) {
                // The bytes before the last page can be written.
                let before = (at & !(PAGE_SIZE - 1)).saturating_sub(offset);
                return if before == 0 { Err(errno) } else { Ok(before) };
            }
        }
        Ok(len)
    }

    /// Checks like [`is_there`](Self::is_there), for a write.
    #[inline]
    pub fn kept_is_there(&self, offset: u64, len: u64) -> bool {
        !self.object.is_stored() || self.kept(offset, len).all(|at| self.is_there(at, 1))
    }

    /// Drops the clean, unused pages that lie wholly in `len` bytes from `offset` on; returns their
    /// number. The bytes after the end belong to the last page.
    pub fn drop_clean_within(&self, offset: u64, len: u64) -> u64 {
        let end = offset.saturating_add(len);
        let behind = if end >= self.length() { u64::MAX } else { end >> PAGE_SHIFT };
        self.object.drop_clean(percpu::cpu(), offset.div_ceil(PAGE_SIZE)..behind)
    }

    /// Returns the number of bytes to read or write at a time, of `len`: the pages of a piece are
    /// present at once.
    #[inline]
    pub fn piece(&self, len: u64) -> u64 {
        if self.object.is_stored() { len.min(PIECE) } else { len }
    }

    /// Begins to read missing pages of `len` bytes from `offset` on, if the file lies on the disk.
    pub fn read_ahead(&self, offset: u64, len: u64) {
        let end = self.length().min(offset.saturating_add(len.min(MOST_AHEAD)));
        // As on Linux, errors are reported when the pages are needed.
        let pages = offset >> PAGE_SHIFT..end.div_ceil(PAGE_SIZE);
        let _ = self.object.read_ahead(percpu::cpu(), pages);
    }

    /// Returns the length in bytes.
    pub fn length(&self) -> u64 {
        self.length.load(Ordering::Acquire)
    }

    /// Returns the number of pages used, in memory or on the disk.
    pub fn pages(&self) -> u64 {
        if self.object.is_stored() {
            return self.object.pages();
        }
        self.object.resident_pages(percpu::cpu())
    }

    /// Calls `tell` for each resident page. The second argument is set for a dirty page: the file
    /// lies on the disk, which has other contents.
    pub fn each_resident(&self, tell: impl FnMut(FrameNumber, bool)) {
        self.object.each_resident(percpu::cpu(), tell);
    }

    /// Returns the object, for a mapping.
    pub fn map(&self) -> &Shared<Object> {
        self.mapped.store(true, Ordering::SeqCst);
        &self.object
    }

    /// Returns the seals. Waits for a call that is adding seals, because the call may remove the
    /// seals again.
    pub fn seals(&self) -> u32 {
        let _change = self.change.lock();
        self.present_seals()
    }

    /// Returns the seals. `change` is held.
    fn present_seals(&self) -> u32 {
        self.seals.load(Ordering::Relaxed)
    }

    /// Calls `act` with the seals, which do not change during the call. `act` takes no lock but the
    /// lock of the metadata.
    pub fn with_seals<R>(&self, act: impl FnOnce(u32) -> R) -> R {
        let _change = self.change.lock();
        act(self.present_seals())
    }

    /// Returns whether seals forbid stores. Waits for a call that is adding such a seal, because
    /// the call may remove the seal again.
    pub fn forbids_stores(&self) -> bool {
        self.seals.load(Ordering::SeqCst) & NO_STORES != 0 && self.seals() & NO_STORES != 0
    }

    /// Allows sealing.
    pub fn allow_seals(&self) {
        self.seals.store(0, Ordering::Relaxed);
    }

    /// Adds seals. As on Linux, `F_SEAL_EXEC` also seals the contents of an executable file.
    ///
    /// # Errors
    /// `EINVAL`: an unknown seal. `EPERM`: `F_SEAL_SEAL` is set. `EBUSY`: `F_SEAL_WRITE`, while a
    /// mapping may store.
    pub fn seal(&self, mut more: u32, is_executable: impl FnOnce() -> bool) -> Result<()> {
        if more & !ALL_SEALS != 0 {
            return Err(Errno::EINVAL);
        }
        let _change = self.change.lock();
        let before = self.present_seals();
        if before & linux::F_SEAL_SEAL != 0 {
            return Err(Errno::EPERM);
        }
        if more & SEAL_EXEC != 0 && is_executable() {
            more |= linux::F_SEAL_SHRINK | linux::F_SEAL_GROW | NO_STORES;
        }
        // Set the seals first: a concurrent call that maps the file either finds the seal, or is
        // found here.
        self.seals.fetch_or(more, Ordering::SeqCst);
        if more & !before & linux::F_SEAL_WRITE != 0 && self.has_writable_mapping() {
            self.seals.store(before, Ordering::SeqCst);
            return Err(Errno::EBUSY);
        }
        Ok(())
    }

    fn has_writable_mapping(&self) -> bool {
        self.mapping.load(Ordering::SeqCst) != 0
            || self.mapped.load(Ordering::SeqCst) && memory::may_store_to(&self.object)
    }

    /// Returns the object, for a mapping that allows stores.
    ///
    /// # Errors
    /// `EPERM`: the file is sealed.
    pub fn map_writable(inode: &Arc<Inode>) -> Result<AboutToMap> {
        let regular = inode.regular().ok_or(Errno::ENODEV)?;
        regular.mapping.fetch_add(1, Ordering::SeqCst);
        let about = AboutToMap(inode.clone());
        if regular.forbids_stores() {
            return Err(Errno::EPERM);
        }
        Ok(about)
    }

    /// Fails if any of `sealed` is set. `change` is held.
    fn refuse_if(&self, sealed: u32) -> Result<()> {
        if self.present_seals() & sealed == 0 { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// Copies up to `most` bytes from `offset` on to `to`, and returns the number of copied bytes.
    /// The caller has [fetched](Self::fetch) the pages.
    ///
    /// # Errors
    /// `EFAULT`; `EAGAIN`: the pages were evicted in between.
    pub fn read(&self, to: &mut Transfer<'_>, offset: u64, most: u64) -> Result {
        let end = self.length().min(offset.saturating_add(most));
        let mut at = offset;
        while at < end && to.left() != 0 {
            let part = (PAGE_SIZE - at % PAGE_SIZE).min(end - at);
            let cpu = percpu::cpu();
            let read = self.object.read_page(cpu, at >> PAGE_SHIFT, |page| match page {
                // SAFETY: the part lies within the borrowed page.
                Some(page) => unsafe { to.put(page.add((at % PAGE_SIZE) as usize), part) },
                None => to.put_zeros(part),
            });
            match read {
                Ok(read) => at += read,
                Err(_) if at != offset => break,
                Err(errno) => return Err(errno.into()),
            }
            // A large read takes long, and other CPUs may wait for a flush.
            cpu.serve_flushes();
        }
        to.result().map(|_| at.saturating_sub(offset))
    }

    /// Copies up to `most` bytes from `from` to `offset` or, without an offset, to the end; returns
    /// the start of the written bytes. No byte is written beyond the first `limit` bytes of the
    /// file. The caller has [fetched](Self::fetch_kept) the pages with kept bytes.
    ///
    /// # Errors
    /// `EFBIG`: the write would start at `limit` or beyond. `ENOSPC`, `EFAULT`, `EPERM`: the file
    /// is sealed. `EAGAIN`, as [`read`](Self::read).
    pub fn write(
        &self,
        from: &mut Transfer<'_>,
        offset: Option<u64>,
        most: u64,
        limit: u64,
    ) -> Result {
        let _change = self.change.lock();
        let length = self.length();
        let start = offset.unwrap_or(length);
        if from.left() == 0 {
            return Ok(start);
        }
        let limit = limit.min(MAX_LENGTH);
        if start >= limit {
            return Err(Errno::EFBIG);
        }
        self.refuse_if(NO_STORES)?;
        from.limit(limit - start);
        let mut end = start + from.left().min(most);
        if end > length && self.present_seals() & linux::F_SEAL_GROW != 0 {
            // As on Linux, whole pages within the file are written.
            end = length & !(PAGE_SIZE - 1);
            if end <= start {
                return Err(Errno::EPERM);
            }
            from.limit(end - start);
        }
        let before = from.moved();
        let mut at = start;
        let mut result = Ok(());
        // A mapping of the file becomes readable as the file grows: the write copies the readable
        // bytes, and checks again.
        while at < end {
            let readable = self.readable_to(from, at, end);
            let part_end = at + readable;
            if readable != 0 {
                result = self.write_range(from, &mut at, part_end);
            }
            if readable == 0 || at < part_end {
                break;
            }
        }
        // Frees pages that were added for bytes that could not be copied.
        self.shorten();
        match result {
            Err(errno) if from.moved() == before => Err(errno),
            _ if at == start => Err(Errno::EFAULT),
            _ => from.result().map(|_| start),
        }
    }

    /// Returns how many of the bytes for `at..end` can be read from `from` before the file grows: a
    /// mapping of the file beyond its end cannot be read. `change` is held.
    fn readable_to(&self, from: &Transfer<'_>, at: u64, end: u64) -> u64 {
        let len = end - at;
        if end > self.length() { from.readable(len) } else { len }
    }

    /// Copies bytes from `from` to `at..end`, and advances `at`. `change` is held.
    ///
    /// # Errors
    /// `ENOSPC`; `EAGAIN`, as [`read`](Self::read).
    fn write_range(&self, from: &mut Transfer<'_>, at: &mut u64, end: u64) -> Result<()> {
        let length = self.length();
        if end > length {
            self.grow(length, end)?;
        }
        let mut result = Ok(());
        while *at < end && from.left() != 0 && result.is_ok() {
            let part = (PAGE_SIZE - *at % PAGE_SIZE).min(end - *at);
            let cpu = percpu::cpu();
            result = self.may_grow_by_page(*at >> PAGE_SHIFT).and_then(|()| {
                *at += self.write_part(from, *at, part).map_err(no_page)?;
                Ok(())
            });
            cpu.serve_flushes();
        }
        self.length.fetch_max(*at, Ordering::Release);
        result
    }

    /// Copies `len` bytes from `from` to `at`, within one page; returns the number of copied bytes.
    /// `change` is held.
    fn write_part(
        &self,
        from: &mut Transfer<'_>,
        at: u64,
        len: u64,
    ) -> core::result::Result<u64, faultless::Errno> {
        let (cpu, index, to) = (percpu::cpu(), at >> PAGE_SHIFT, at % PAGE_SIZE);
        if to != 0 || len < (self.object.bytes() - at).min(PAGE_SIZE) {
            // SAFETY: the part lies within the borrowed page.
            let write = |page: *mut u8| unsafe { from.take(page.add(to as usize), len) };
            return self.object.write_page(cpu, index, write);
        }
        let before = from.progress();
        // SAFETY: as above.
        let write = |page: *mut u8| unsafe { from.take(page, len) } as usize;
        let stored = match self.object.overwrite_page(cpu, index, write) {
            Ok(stored) => stored,
            Err(errno) => {
                from.uncount(&before);
                return Err(errno);
            }
        };
        if stored != 0 {
            return Ok(stored as u64);
        }
        // The program's memory ends within the page: the bytes before the end are written.
        let readable = from.progress().since(&before);
        from.uncount(&before);
        if readable == 0 || self.object.is_stored() {
            return Ok(0);
        }
        from.resume();
        // SAFETY: as above.
        let write = |page: *mut u8| unsafe { from.take(page, readable) };
        let stored = self.object.write_page(cpu, index, write);
        from.limit(0);
        stored
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
        self.object.set_len(percpu::cpu(), end)?;
        Ok(())
    }

    /// Zeroes `from..to`, which lie in one page, if the page is resident.
    fn clear(&self, from: u64, to: u64) {
        let cpu = percpu::cpu();
        let index = from >> PAGE_SHIFT;
        if from < to && self.object.has_page(cpu, index) {
            let zero = |page: *mut u8| {
                // SAFETY: the part lies within the borrowed page.
                unsafe {
                    ptr::write_bytes(
                        page.add((from % PAGE_SIZE) as usize),
                        0,
                        (to - from) as usize,
                    );
                }
            };
            // A page that left the object in between is zero.
            let _ = self.object.write_page(cpu, index, zero);
        }
    }

    /// Sets the length. A file does not grow beyond `limit` bytes.
    ///
    /// # Errors
    /// `EFBIG`; `EPERM`: the file is sealed.
    pub fn truncate(&self, length: u64, limit: u64) -> Result<()> {
        let _change = self.change.lock();
        let before = self.length();
        if length > before && length > limit.min(MAX_LENGTH) {
            return Err(Errno::EFBIG);
        }
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

    /// Frees the pages beyond the end. `change` is held, so no page is added before all of these
    /// pages are unmapped everywhere.
    fn shorten(&self) {
        let (before, length) = (self.object.pages(), self.length());
        let pages = length.div_ceil(PAGE_SIZE);
        // The disk's data after the end must not come back, even in the last page.
        if pages < before || self.object.is_stored() && length < self.object.bytes() {
            // Shrinking never fails.
            let _ = self.object.set_len(percpu::cpu(), length);
        }
        if pages < before {
            self.revoke(pages..before, PrivateCopies::Drop);
        }
    }

    /// Allocates pages for `start..end`, and with `grow` extends the file over this range. A
    /// range beyond the end of the file must end within `limit` bytes. The caller holds no lock.
    ///
    /// # Errors
    /// `EFBIG`, `ENOSPC`; `EPERM`: the file is sealed. `EIO`, `EINTR`, as [`fetch`](Self::fetch).
    pub fn allocate(&self, start: u64, end: u64, grow: bool, limit: u64) -> Result<()> {
        self.fetch(start, end - start, None)?;
        let _change = self.change.lock();
        let length = self.length();
        // As on Linux, also if the length stays.
        if end > length {
            if end > limit.min(MAX_LENGTH) {
                return Err(Errno::EFBIG);
            }
            self.refuse_if(linux::F_SEAL_GROW)?;
        }
        let last = if grow { end } else { end.min(length) };
        let vm = percpu::vm();
        let absent = self.count(start, last, |cpu, index| !self.object.has_page(cpu, index));
        if absent > 0 && absent.saturating_add(frames_left_to_others()) > vm.free_frames() {
            return Err(Errno::ENOSPC);
        }
        let room = vm.knobs().file_limit().saturating_sub(vm.charged_pages());
        if self.uncharged(start, end) > room {
            return Err(Errno::ENOSPC);
        }
        if last > length {
            self.grow(length, last)?;
        }
        for index in start >> PAGE_SHIFT..last.div_ceil(PAGE_SIZE) {
            let made = self.object.write_page(percpu::cpu(), index, |_| ());
            made.map_err(no_page)?;
            percpu::cpu().serve_flushes();
        }
        self.length.fetch_max(last, Ordering::Release);
        Ok(())
    }

    /// Returns the number of pages of `start..end` that stores would charge.
    fn uncharged(&self, start: u64, end: u64) -> u64 {
        self.count(start, end, |cpu, index| match self.object.is_stored() {
            true => !self.object.is_dirty(cpu, index),
            false => !self.object.has_page(cpu, index),
        })
    }

    /// Returns the number of pages of `start..end` that are `counted`. The number of all pages is
    /// returned if it exceeds the machine's memory.
    fn count(&self, start: u64, end: u64, counted: impl Fn(&Cpu<'_, Bare>, u64) -> bool) -> u64 {
        let cpu = percpu::cpu();
        let pages = start >> PAGE_SHIFT..end.div_ceil(PAGE_SIZE);
        let all = pages.end.saturating_sub(pages.start);
        if all > percpu::vm().total_frames() {
            return all;
        }
        pages.filter(|index| counted(cpu, *index)).count() as u64
    }

    /// Zeroes `start..end`, and frees the pages that lie wholly in this range. Private copies of
    /// programs stay.
    ///
    /// # Errors
    /// `EPERM`: the file is sealed. `EOPNOTSUPP`: the file lies on the disk.
    pub fn punch(&self, start: u64, end: u64) -> Result<()> {
        if self.object.is_stored() {
            return Err(Errno::EOPNOTSUPP);
        }
        let end = end.min(MAX_LENGTH);
        let (first, last) = (start.div_ceil(PAGE_SIZE), end >> PAGE_SHIFT);
        let _change = self.change.lock();
        self.refuse_if(NO_STORES)?;
        self.clear(start, end.min(first << PAGE_SHIFT));
        if last >= first {
            self.clear(last << PAGE_SHIFT, end);
        }
        if first < last {
            self.object.free_pages(percpu::cpu(), first..last);
            self.revoke(first..last, PrivateCopies::Keep);
        }
        Ok(())
    }

    /// Returns the first byte from `offset` on in a resident page, or, unless `there`, in a hole.
    /// The end of the file is a hole. A very long hole is reported in parts, as if separated by
    /// data.
    ///
    /// # Errors
    /// `ENXIO`: there is no such byte.
    pub fn seek(&self, offset: u64, there: bool) -> Result {
        /// The maximum number of pages checked by one call.
        const LONGEST: u64 = 1 << 18;
        let length = self.length();
        if offset >= length {
            return Err(Errno::ENXIO);
        }
        if self.object.is_stored() {
            // As on a file system without holes.
            return Ok(if there { offset } else { length });
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
    fn revoke(&self, pages: Range<u64>, copies: PrivateCopies) {
        if self.mapped.load(Ordering::SeqCst) {
            memory::revoke(&self.object, pages, copies);
        }
    }
}
