//! Memory to probe: mappings without Rust references.
//!
//! Loads and stores are single instructions in inline assembly. So the compiler does not drop,
//! merge or move them, and a faulting access only causes a signal.

use crate::sys::{self, Errno, call};
use std::arch::asm;
use std::mem::ManuallyDrop;
use std::ops::{Deref, Range};
use std::ptr::with_exposed_provenance_mut;

/// The size of a page, in bytes.
pub const PAGE: u64 = 4096;
/// Readable.
pub const READ: i32 = libc::PROT_READ;
/// Readable and writable.
pub const WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
/// Not accessible.
pub const NONE: i32 = libc::PROT_NONE;

/// Loads the 8 bytes at `addr`.
#[inline(always)]
pub fn load(addr: u64) -> u64 {
    let value;
    // SAFETY: reads only; the caller interprets the value.
    unsafe {
        asm!("mov {}, [{}]", out(reg) value, in(reg) addr, options(nostack, readonly, preserves_flags));
    }
    value
}

/// Stores 8 bytes at `addr`.
///
/// # Safety
/// The address contains no Rust object.
#[inline(always)]
pub unsafe fn store(addr: u64, value: u64) {
    // SAFETY: by the caller's contract.
    unsafe {
        asm!("mov [{}], {}", in(reg) addr, in(reg) value, options(nostack, preserves_flags));
    }
}

/// A mapping of this process without Rust objects; dropping the region unmaps the memory.
#[derive(Debug)]
pub struct Region {
    start: u64,
    len: u64,
}

impl Region {
    /// Maps `len` bytes at an address chosen by the kernel, from `offset` of the file `fd` if the
    /// flags select a file.
    ///
    /// # Errors
    /// `mmap`'s.
    pub fn map(len: u64, prot: i32, flags: i32, fd: i32, offset: u64) -> sys::Result<Self> {
        assert_eq!(flags & libc::MAP_FIXED, 0, "would be anywhere");
        let args = [0, len, prot as u64, flags as u64, fd as u64, offset];
        // SAFETY: a new mapping in unused address space.
        let start = unsafe { call(libc::SYS_mmap, args)? };
        Ok(Self { start, len: len.next_multiple_of(PAGE) })
    }

    /// Maps `len` bytes of private anonymous memory, writable.
    ///
    /// # Errors
    /// `mmap`'s.
    pub fn anonymous(len: u64) -> sys::Result<Self> {
        Self::map(len, WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Maps `len` bytes shared with forked children, writable.
    ///
    /// # Errors
    /// `mmap`'s.
    pub fn shared(len: u64) -> sys::Result<Self> {
        Self::map(len, WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Returns the start address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the region is empty, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of byte `at`, after a check that the region contains `len` bytes from
    /// there.
    fn within(&self, at: u64, len: u64) -> u64 {
        assert!(at <= self.len && len <= self.len - at, "{at:#x}+{len:#x} of {:#x}", self.len);
        self.start + at
    }

    /// Returns the offsets of the pages.
    pub fn pages(&self) -> impl DoubleEndedIterator<Item = u64> + use<> {
        (0..self.len / PAGE).map(|page| page * PAGE)
    }

    /// Loads the 8 bytes at `at`.
    #[inline]
    pub fn load(&self, at: u64) -> u64 {
        load(self.within(at, 8))
    }

    /// Stores 8 bytes at `at`.
    #[inline]
    pub fn store(&self, at: u64, value: u64) {
        // SAFETY: a region contains no Rust objects.
        unsafe { store(self.within(at, 8), value) }
    }

    /// Makes a system call that copies 8 bytes between `value` and `at`, without a translation of
    /// this process.
    fn copy_outside(&self, number: i64, at: u64, value: &mut u64) -> sys::Result<()> {
        let pieces = [(&raw mut *value) as u64, 8, self.within(at, 8), 8];
        let (here, there) = (pieces.as_ptr() as u64, pieces[2..].as_ptr() as u64);
        let pid = u64::from(std::process::id());
        // SAFETY: the pieces belong to a local and to this region.
        unsafe { call(number, [pid, here, 1, there, 1, 0]) }.map(|_| ())
    }

    /// Loads the 8 bytes at `at` as another process would, by the kernel's view of the page.
    ///
    /// # Errors
    /// `process_vm_readv`'s.
    pub fn load_outside(&self, at: u64) -> sys::Result<u64> {
        let mut value = 0;
        self.copy_outside(libc::SYS_process_vm_readv, at, &mut value).map(|()| value)
    }

    /// Stores 8 bytes at `at` as another process would.
    ///
    /// # Errors
    /// `process_vm_writev`'s.
    pub fn store_outside(&self, at: u64, mut value: u64) -> sys::Result<()> {
        self.copy_outside(libc::SYS_process_vm_writev, at, &mut value)
    }

    /// Stores `value` to each page.
    pub fn fill(&self, value: u64) {
        for at in self.pages() {
            self.store(at, value);
        }
    }

    /// Makes the system call `number` for `len` bytes from `at` with one more argument.
    fn ask(&self, number: i64, at: u64, len: u64, more: u64) -> sys::Result<()> {
        // SAFETY: the call changes bytes of this region, which contains no Rust objects.
        unsafe { call(number, [self.within(at, len), len, more]) }.map(|_| ())
    }

    /// Returns the pages in memory: for a file, in its page cache.
    ///
    /// # Errors
    /// `mincore`'s.
    pub fn in_core(&self) -> sys::Result<Vec<bool>> {
        let mut pages = vec![0u8; (self.len / PAGE) as usize];
        // SAFETY: there is a byte for each page.
        unsafe { call(libc::SYS_mincore, [self.start, self.len, pages.as_mut_ptr() as u64]) }?;
        Ok(pages.iter().map(|page| page & 1 != 0).collect())
    }

    /// Changes the protection of `len` bytes from `at`.
    ///
    /// # Errors
    /// `mprotect`'s.
    pub fn protect(&self, at: u64, len: u64, prot: i32) -> sys::Result<()> {
        self.ask(libc::SYS_mprotect, at, len, prot as u64)
    }

    /// Gives advice about `len` bytes from `at`.
    ///
    /// # Errors
    /// `madvise`'s.
    pub fn advise(&self, at: u64, len: u64, advice: i32) -> sys::Result<()> {
        self.ask(libc::SYS_madvise, at, len, advice as u64)
    }

    /// Unmaps `len` bytes from `at`: later accesses fault. The region keeps the range, and unmaps
    /// it again when dropped: until then, other threads must not map memory there.
    ///
    /// # Errors
    /// `munmap`'s.
    pub fn unmap(&self, at: u64, len: u64) -> sys::Result<()> {
        self.ask(libc::SYS_munmap, at, len, 0)
    }

    /// Unmaps the whole region, once.
    ///
    /// # Errors
    /// `munmap`'s.
    pub fn end(self) -> sys::Result<()> {
        let gone = ManuallyDrop::new(self);
        gone.unmap(0, gone.len)
    }

    /// Maps `len` bytes from `at` again, replacing the present mapping.
    ///
    /// # Errors
    /// `mmap`'s.
    pub fn replace(
        &self,
        at: u64,
        len: u64,
        prot: i32,
        flags: i32,
        fd: i32,
        offset: u64,
    ) -> sys::Result<()> {
        let flags = flags | libc::MAP_FIXED;
        let args = [self.within(at, len), len, prot as u64, flags as u64, fd as u64, offset];
        // SAFETY: the replaced memory belongs to this region.
        unsafe { call(libc::SYS_mmap, args) }.map(|_| ())
    }

    /// Changes the length, and moves the region if necessary.
    ///
    /// # Errors
    /// `mremap`'s; the region is unchanged.
    pub fn resize(&mut self, len: u64) -> sys::Result<()> {
        let args = [self.start, self.len, len, libc::MREMAP_MAYMOVE as u64];
        // SAFETY: the memory moves to unused address space, and no Rust reference points to it.
        self.start = unsafe { call(libc::SYS_mremap, args)? };
        self.len = len.next_multiple_of(PAGE);
        Ok(())
    }

    /// Moves the pages of `from` onto `len` bytes at `at` of this region. `from` is consumed.
    ///
    /// # Errors
    /// `mremap`'s, with all its effects.
    pub fn take(&self, at: u64, from: Self) -> sys::Result<()> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let to = self.within(at, from.len);
        let from = ManuallyDrop::new(from);
        // SAFETY: both are regions, without Rust objects.
        unsafe { call(libc::SYS_mremap, [from.start, from.len, from.len, flags as u64, to]) }
            .map(|_| ())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Parts of the region may already be unmapped, which is no error.
        let _ = self.unmap(0, self.len);
    }
}

/// The number of the system call's error, or 0.
pub fn errno<T>(result: sys::Result<T>) -> i32 {
    result.err().map_or(0, |Errno(number)| number)
}

/// A value shared with forked children. The value is never unmapped.
#[derive(Debug)]
pub struct Shared<T: Sync + 'static>(&'static T);

impl<T: Sync> Shared<T> {
    /// Shares `value`, which must not contain pointers to memory that children do not share.
    ///
    /// # Errors
    /// `mmap`'s.
    pub fn new(value: T) -> sys::Result<Self> {
        let region = ManuallyDrop::new(Region::shared(size_of::<T>().max(1) as u64)?);
        let place = with_exposed_provenance_mut::<T>(region.start as usize);
        // SAFETY: the region is long enough, page-aligned, used only for this value and never
        // unmapped.
        unsafe {
            place.write(value);
            Ok(Self(&*place))
        }
    }
}

impl<T: Sync> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

/// Returns the range and the permissions of the line of `lines` (in the format of
/// `/proc/self/maps`) that contains `addr`.
pub fn find_mapping(lines: &str, addr: u64) -> Option<(Range<u64>, &str)> {
    lines.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let parse = |text| u64::from_str_radix(text, 16).ok();
        let range = parse(start)?..parse(end)?;
        range.contains(&addr).then_some((range, fields.next()?))
    })
}
