//! The memory that a call reads to or writes from: pieces of user memory, of this process or
//! another, or one piece of kernel memory.
//!
//! A transfer records its progress. An inaccessible page of user memory ends the transfer: the
//! bytes copied before count, and the call fails only if there are no such bytes.

use crate::errno::{Errno, Result};
use core::marker::PhantomData;
use core::{ptr, slice};
use faultless::{PAGE_SIZE, Prot, Space, VirtRange};
use faultless_bare::arch::user;
use faultless_bare::machine::Bare;
use faultless_bare::percpu;

/// Linux's `iovec`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Piece {
    /// The start address.
    pub base: u64,
    /// The length in bytes.
    pub len: u64,
}

/// The maximum number of bytes of one call, as on Linux.
pub const MAX_BYTES: u64 = 0x7fff_f000;

/// The owner of the memory.
#[derive(Clone, Copy, Debug)]
enum Place<'a> {
    /// The running program's.
    Program,
    /// The kernel's.
    Kernel,
    /// A program in another space, which this CPU need not run.
    Other(&'a Space<Bare>),
}

/// A cursor over [`Piece`]s.
#[derive(Debug)]
pub struct Transfer<'a> {
    pieces: &'a [Piece],
    /// The number of completed bytes in the first of `pieces`.
    done: u64,
    left: u64,
    moved: u64,
    stopped: bool,
    place: Place<'a>,
    memory: PhantomData<&'a mut [u8]>,
}

/// Returns whether another process may be read at this address. As on Linux, write-only memory is
/// not readable, although the processor could read the page.
fn may_read(space: &Space<Bare>, at: u64, len: u64) -> bool {
    let mut may = true;
    let range = VirtRange::new(at, at.saturating_add(len));
    space.each_area(percpu::cpu(), range, |area| {
        may &= area.allows(Prot::READ);
        may
    });
    may
}

/// The progress of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    pieces: &'a [Piece],
    done: u64,
    moved: u64,
}

impl Progress<'_> {
    /// Returns the number of bytes moved after `before`.
    pub const fn since(&self, before: &Self) -> u64 {
        self.moved - before.moved
    }
}

impl<'a> Transfer<'a> {
    /// A transfer to or from memory of the running program.
    pub fn of_user(pieces: &'a [Piece]) -> Self {
        let left = pieces.iter().map(|piece| piece.len).sum::<u64>().min(MAX_BYTES);
        Self {
            pieces,
            done: 0,
            left,
            moved: 0,
            stopped: false,
            place: Place::Program,
            memory: PhantomData,
        }
    }

    /// A transfer to or from memory of the program in `space`.
    pub fn of_other(pieces: &'a [Piece], space: &'a Space<Bare>) -> Self {
        Self { place: Place::Other(space), ..Self::of_user(pieces) }
    }

    /// Calls `then` with a transfer to `bytes`.
    pub fn to_kernel<R>(bytes: &mut [u8], then: impl FnOnce(&mut Transfer<'_>) -> R) -> R {
        Self::of_kernel(bytes.as_mut_ptr() as u64, bytes.len(), then)
    }

    /// Calls `then` with a transfer from `bytes`, which may only be read.
    pub fn from_kernel<R>(bytes: &[u8], then: impl FnOnce(&mut Transfer<'_>) -> R) -> R {
        Self::of_kernel(bytes.as_ptr() as u64, bytes.len(), then)
    }

    fn of_kernel<R>(base: u64, len: usize, then: impl FnOnce(&mut Transfer<'_>) -> R) -> R {
        let pieces = [Piece { base, len: len as u64 }];
        then(&mut Transfer { place: Place::Kernel, ..Transfer::of_user(&pieces) })
    }

    /// Bytes still to move.
    pub const fn left(&self) -> u64 {
        if self.stopped { 0 } else { self.left }
    }

    /// Bytes moved so far.
    pub const fn moved(&self) -> u64 {
        self.moved
    }

    /// Limits the rest to `most` bytes.
    pub fn limit(&mut self, most: u64) {
        self.left = self.left.min(most);
    }

    /// A copy, to read ahead without consuming.
    pub const fn ahead(&self) -> Transfer<'_> {
        Transfer { pieces: self.pieces, memory: PhantomData, ..*self }
    }

    /// Takes back the count of the bytes moved since `before`. A stopped transfer remains stopped.
    pub const fn uncount(&mut self, before: &Progress<'a>) {
        (self.pieces, self.done) = (before.pieces, before.done);
        self.left += self.moved - before.moved;
        self.moved = before.moved;
    }

    /// Counts `len` bytes as moved, in a stopped transfer.
    pub const fn count(&mut self, len: u64) {
        self.moved += len;
        self.left -= len;
    }

    /// Continues a stopped transfer.
    pub const fn resume(&mut self) {
        self.stopped = false;
    }

    /// Returns the number of readable bytes among the next `len`, as far as known without a copy:
    /// one byte of each page is read.
    pub fn readable(&self, len: u64) -> u64 {
        if !matches!(self.place, Place::Program) {
            return len;
        }
        let mut ahead = self.ahead();
        ahead.limit(len);
        let mut byte = 0;
        while ahead.left() != 0 {
            let before = ahead.moved;
            // SAFETY: one byte.
            if unsafe { ahead.take(&raw mut byte, 1) } == 0 {
                return before - self.moved;
            }
            ahead.skip(ahead.left_in_page());
        }
        ahead.moved - self.moved
    }

    /// Returns the number of bytes up to the end of the current page or piece.
    fn left_in_page(&self) -> u64 {
        let Some(piece) = self.pieces.first().filter(|piece| self.done < piece.len) else {
            return 0;
        };
        let at = piece.base.wrapping_add(self.done);
        if at % PAGE_SIZE == 0 {
            return 0;
        }
        (piece.len - self.done).min(PAGE_SIZE - at % PAGE_SIZE)
    }

    /// Returns the progress.
    pub const fn progress(&self) -> Progress<'a> {
        Progress { pieces: self.pieces, done: self.done, moved: self.moved }
    }

    /// The result of the call.
    pub const fn result(&self) -> Result {
        if self.moved == 0 && self.stopped { Err(Errno::EFAULT) } else { Ok(self.moved) }
    }

    /// Copies up to `len` bytes from `from` into the transfer. The transfer has stopped if the
    /// result is less than `len` and less than the remaining size.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes.
    pub unsafe fn put(&mut self, from: *const u8, len: u64) -> u64 {
        self.each(len, |transfer, at, offset, len| {
            // SAFETY: within the `len` bytes of the contract.
            let from = unsafe { from.add(offset as usize) };
            let len = len as usize;
            match transfer.place {
                // SAFETY: as above.
                Place::Program => unsafe { user::copy_out(at, from, len) }.is_ok(),
                Place::Kernel => {
                    // SAFETY: the piece is a slice that exists as long as the transfer, which
                    // borrows the slice.
                    unsafe { ptr::copy_nonoverlapping(from, at as *mut u8, len) };
                    true
                }
                Place::Other(space) => {
                    // SAFETY: as above.
                    let bytes = unsafe { slice::from_raw_parts(from, len) };
                    space.write_bytes(percpu::cpu(), at, bytes).is_ok()
                }
            }
        })
    }

    /// Copies the bytes of a slice into the transfer.
    pub fn put_bytes(&mut self, bytes: &[u8]) -> u64 {
        // SAFETY: a slice is valid for its length.
        unsafe { self.put(bytes.as_ptr(), bytes.len() as u64) }
    }

    /// Writes up to `len` zeros into the transfer.
    pub fn put_zeros(&mut self, len: u64) -> u64 {
        self.each(len, |transfer, at, _, len| {
            match transfer.place {
                Place::Program => user::zero_out(at, len as usize).is_ok(),
                Place::Kernel => {
                    // SAFETY: as in `put`.
                    unsafe { ptr::write_bytes(at as *mut u8, 0, len as usize) };
                    true
                }
                Place::Other(_) => unreachable!("only bytes are copied to other processes"),
            }
        })
    }

    /// Copies up to `len` bytes from the transfer to `to`. The transfer has stopped if the result
    /// is less than `len` and less than the remaining size.
    ///
    /// # Safety
    /// `to` is valid for writes of `len` bytes.
    pub unsafe fn take(&mut self, to: *mut u8, len: u64) -> u64 {
        self.each(len, |transfer, at, offset, len| {
            // SAFETY: within the `len` bytes of the contract.
            let to = unsafe { to.add(offset as usize) };
            let len = len as usize;
            match transfer.place {
                // SAFETY: as above.
                Place::Program => unsafe { user::copy_in(to, at, len) }.is_ok(),
                Place::Kernel => {
                    // SAFETY: as in `put`.
                    unsafe { ptr::copy_nonoverlapping(at as *const u8, to, len) };
                    true
                }
                Place::Other(space) => {
                    // SAFETY: as above; bytes, of which each value is valid.
                    let bytes = unsafe { slice::from_raw_parts_mut(to, len) };
                    may_read(space, at, len as u64)
                        && space.read_bytes(percpu::cpu(), at, bytes).is_ok()
                }
            }
        })
    }

    /// Copies bytes from the transfer to a slice.
    pub fn take_bytes(&mut self, bytes: &mut [u8]) -> u64 {
        // SAFETY: a slice is valid for its length.
        unsafe { self.take(bytes.as_mut_ptr(), bytes.len() as u64) }
    }

    /// Skips up to `len` bytes.
    pub fn skip(&mut self, len: u64) -> u64 {
        self.each(len, |_, _, _, _| true)
    }

    /// Copies up to `len` bytes: `go(self, address, offset, bytes)` returns whether the copy
    /// succeeded. After a failure, a second call tries only the bytes up to the next page boundary,
    /// so that no accessible byte is missed.
    fn each(&mut self, len: u64, go: impl Fn(&Self, u64, u64, u64) -> bool) -> u64 {
        let len = len.min(self.left());
        let mut offset = 0;
        while offset < len {
            let piece = self.pieces[0];
            if self.done == piece.len {
                self.pieces = &self.pieces[1..];
                self.done = 0;
                continue;
            }
            let at = piece.base.wrapping_add(self.done);
            let mut part = (piece.len - self.done).min(len - offset);
            if !go(self, at, offset, part) {
                part = part.min(PAGE_SIZE - at % PAGE_SIZE);
                if !go(self, at, offset, part) {
                    self.stopped = true;
                    break;
                }
            }
            offset += part;
            self.done += part;
            self.left -= part;
            self.moved += part;
        }
        offset
    }
}
