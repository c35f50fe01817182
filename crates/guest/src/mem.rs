//! Memory to probe: mappings that no Rust reference points into.
//!
//! Loads and stores are single instructions of ours, so the compiler neither drops, merges nor moves
//! them, and one that faults is a signal and nothing worse.

use crate::sys::{self, Errno, call};
use std::arch::asm;
use std::mem::ManuallyDrop;
use std::ops::{Deref, Range};
use std::ptr::with_exposed_provenance_mut;

/// The size of a page, in bytes.
pub const PAGE: u64 = 4096;
/// May be read.
pub const READ: i32 = libc::PROT_READ;
/// May be read and written.
pub const WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
/// May not be accessed.
pub const NONE: i32 = libc::PROT_NONE;

/// Loads the 8 bytes at `addr`.
#[inline(always)]
pub fn load(addr: u64) -> u64 {
    let value;
    // SAFETY: reads only; the value means what the caller knows of it.
    unsafe {
        asm!("mov {}, [{}]", out(reg) value, in(reg) addr, options(nostack, readonly, preserves_flags));
    }
    value
}

/// Stores 8 bytes at `addr`.
///
/// # Safety
/// Nothing that Rust knows of lies there.
#[inline(always)]
pub unsafe fn store(addr: u64, value: u64) {
    // SAFETY: handed on.
    unsafe {
        asm!("mov [{}], {}", in(reg) addr, in(reg) value, options(nostack, preserves_flags));
    }
}

/// A mapping of this process, with nothing of Rust's in it; it ends where it is dropped.
#[derive(Debug)]
pub struct Region {
    start: u64,
    len: u64,
}

impl Region {
    /// Maps `len` bytes where the kernel likes, from `offset` of the file `fd` if the flags say so.
    ///
    /// # Errors
    /// `mmap`'s.
    pub fn map(len: u64, prot: i32, flags: i32, fd: i32, offset: u64) -> sys::Result<Self> {
        assert_eq!(flags & libc::MAP_FIXED, 0, "would be anywhere");
        let args = [0, len, prot as u64, flags as u64, fd as u64, offset];
        // SAFETY: a new mapping, where nothing is.
        let start = unsafe { call(libc::SYS_mmap, args)? };
        Ok(Self { start, len: len.next_multiple_of(PAGE) })
    }

    /// Maps `len` bytes of private anonymous memory, to be written.
    ///
    /// # Errors
    /// `mmap`'s.
    pub fn anonymous(len: u64) -> sys::Result<Self> {
        Self::map(len, WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Maps `len` bytes that forked children share, to be written.
    ///
    /// # Errors
    /// `mmap`'s.
    pub fn shared(len: u64) -> sys::Result<Self> {
        Self::map(len, WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Where it begins.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// How long it is, in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes; it always has some.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of byte `at`, from which `len` bytes are within it.
    fn within(&self, at: u64, len: u64) -> u64 {
        assert!(at <= self.len && len <= self.len - at, "{at:#x}+{len:#x} of {:#x}", self.len);
        self.start + at
    }

    /// Offsets of its pages.
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
        // SAFETY: a region has nothing of Rust's in it.
        unsafe { store(self.within(at, 8), value) }
    }

    /// Makes a system call that copies 8 bytes between `value` and `at`, without a translation of this process.
    fn copy_outside(&self, number: i64, at: u64, value: &mut u64) -> sys::Result<()> {
        let pieces = [(&raw mut *value) as u64, 8, self.within(at, 8), 8];
        let (here, there) = (pieces.as_ptr() as u64, pieces[2..].as_ptr() as u64);
        let pid = u64::from(std::process::id());
        // SAFETY: the pieces are a local and this region's.
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

    /// Makes system call `number` for `len` bytes from `at` with one more argument.
    fn ask(&self, number: i64, at: u64, len: u64, more: u64) -> sys::Result<()> {
        // SAFETY: it changes this region's bytes, in which there is nothing of Rust's.
        unsafe { call(number, [self.within(at, len), len, more]) }.map(|_| ())
    }

    /// Which pages are in memory: of a file, in its page cache.
    ///
    /// # Errors
    /// `mincore`'s.
    pub fn in_core(&self) -> sys::Result<Vec<bool>> {
        let mut pages = vec![0u8; (self.len / PAGE) as usize];
        // SAFETY: there is a byte for each page.
        unsafe { call(libc::SYS_mincore, [self.start, self.len, pages.as_mut_ptr() as u64]) }?;
        Ok(pages.iter().map(|page| page & 1 != 0).collect())
    }

    /// Changes what may be done with `len` bytes from `at`.
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

    /// Unmaps `len` bytes from `at`: later accesses fault. The range stays this region's, and is unmapped
    /// again where the region is dropped: no other thread should map anything meanwhile.
    ///
    /// # Errors
    /// `munmap`'s.
    pub fn unmap(&self, at: u64, len: u64) -> sys::Result<()> {
        self.ask(libc::SYS_munmap, at, len, 0)
    }

    /// Unmaps all of it, once.
    ///
    /// # Errors
    /// `munmap`'s.
    pub fn end(self) -> sys::Result<()> {
        let gone = ManuallyDrop::new(self);
        gone.unmap(0, gone.len)
    }

    /// Maps anew `len` bytes from `at`, in place of what is there.
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
        // SAFETY: what it replaces is this region's.
        unsafe { call(libc::SYS_mmap, args) }.map(|_| ())
    }

    /// Changes its length, moving it where it must and may.
    ///
    /// # Errors
    /// `mremap`'s; it stays as it was.
    pub fn resize(&mut self, len: u64) -> sys::Result<()> {
        let args = [self.start, self.len, len, libc::MREMAP_MAYMOVE as u64];
        // SAFETY: it moves to where nothing is, and nothing of Rust's points to it.
        self.start = unsafe { call(libc::SYS_mremap, args)? };
        self.len = len.next_multiple_of(PAGE);
        Ok(())
    }

    /// Moves the pages of `from` onto `len` bytes at `at` of this one. `from` is gone.
    ///
    /// # Errors
    /// `mremap`'s, with whatever it did.
    pub fn take(&self, at: u64, from: Self) -> sys::Result<()> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let to = self.within(at, from.len);
        let from = ManuallyDrop::new(from);
        // SAFETY: both are regions, with nothing of Rust's in them.
        unsafe { call(libc::SYS_mremap, [from.start, from.len, from.len, flags as u64, to]) }
            .map(|_| ())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Parts of it may be unmapped already; that is no error.
        let _ = self.unmap(0, self.len);
    }
}

/// The number of the system call's error, or 0.
pub fn errno<T>(result: sys::Result<T>) -> i32 {
    result.err().map_or(0, |Errno(number)| number)
}

/// A value that forked children share. It is never unmapped.
#[derive(Debug)]
pub struct Shared<T: Sync + 'static>(&'static T);

impl<T: Sync> Shared<T> {
    /// Shares `value`, which has no pointers to memory that children do not share.
    ///
    /// # Errors
    /// `mmap`'s.
    pub fn new(value: T) -> sys::Result<Self> {
        let region = ManuallyDrop::new(Region::shared(size_of::<T>().max(1) as u64)?);
        let place = with_exposed_provenance_mut::<T>(region.start as usize);
        // SAFETY: the region is long enough, page-aligned, this value's alone and never unmapped.
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

/// The part of `lines` (as `/proc/self/maps` has them) that holds `addr`: its range and permissions.
pub fn find_mapping(lines: &str, addr: u64) -> Option<(Range<u64>, &str)> {
    lines.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let parse = |text| u64::from_str_radix(text, 16).ok();
        let range = parse(start)?..parse(end)?;
        range.contains(&addr).then_some((range, fields.next()?))
    })
}
