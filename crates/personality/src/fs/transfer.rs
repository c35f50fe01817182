//! The memory that a call reads to or writes from: pieces of the program's, or one of the kernel's.
//!
//! A transfer remembers how far it came. Memory of the program that is not there ends it: what was moved
//! before counts, and only if that is nothing is the call in error.

use crate::errno::{Errno, Result};
use core::marker::PhantomData;
use core::ptr;
use faultless::PAGE_SIZE;
use faultless_bare::arch::user;

/// Linux's `iovec`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Piece {
    /// Where it starts.
    pub base: u64,
    /// Its bytes.
    pub len: u64,
}

/// The most bytes that a call moves, as on Linux.
pub const MAX_BYTES: u64 = 0x7fff_f000;

/// A cursor over [`Piece`]s.
#[derive(Debug)]
pub struct Transfer<'a> {
    pieces: &'a [Piece],
    /// Bytes of the first of `pieces` that are done.
    done: u64,
    left: u64,
    moved: u64,
    stopped: bool,
    of_kernel: bool,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Transfer<'a> {
    /// To or from memory of the program that runs.
    pub fn of_user(pieces: &'a [Piece]) -> Self {
        let left = pieces.iter().map(|piece| piece.len).sum::<u64>().min(MAX_BYTES);
        Self {
            pieces,
            done: 0,
            left,
            moved: 0,
            stopped: false,
            of_kernel: false,
            memory: PhantomData,
        }
    }

    /// Calls `then` with a transfer to `bytes`.
    pub fn to_kernel<R>(bytes: &mut [u8], then: impl FnOnce(&mut Transfer<'_>) -> R) -> R {
        Self::of_kernel(bytes.as_mut_ptr() as u64, bytes.len(), then)
    }

    /// Calls `then` with a transfer from `bytes`, which it must only take from.
    pub fn from_kernel<R>(bytes: &[u8], then: impl FnOnce(&mut Transfer<'_>) -> R) -> R {
        Self::of_kernel(bytes.as_ptr() as u64, bytes.len(), then)
    }

    fn of_kernel<R>(base: u64, len: usize, then: impl FnOnce(&mut Transfer<'_>) -> R) -> R {
        let pieces = [Piece { base, len: len as u64 }];
        then(&mut Transfer { of_kernel: true, ..Transfer::of_user(&pieces) })
    }

    /// Bytes still to move.
    pub const fn left(&self) -> u64 {
        if self.stopped { 0 } else { self.left }
    }

    /// Bytes moved so far.
    pub const fn moved(&self) -> u64 {
        self.moved
    }

    /// Moves no more than `most` from here on.
    pub fn limit(&mut self, most: u64) {
        self.left = self.left.min(most);
    }

    /// The same again, to look at what comes without moving on.
    pub const fn ahead(&self) -> Transfer<'_> {
        Transfer { pieces: self.pieces, memory: PhantomData, ..*self }
    }

    /// What the call gives.
    pub const fn result(&self) -> Result {
        if self.moved == 0 && self.stopped { Err(Errno::EFAULT) } else { Ok(self.moved) }
    }

    /// Puts up to `len` bytes at `from` into it. Less than `len` and what was left, and it has stopped.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes.
    pub unsafe fn put(&mut self, from: *const u8, len: u64) -> u64 {
        self.each(len, |transfer, at, offset, len| {
            // SAFETY: within the bytes that the caller vouches for.
            let from = unsafe { from.add(offset as usize) };
            if transfer.of_kernel {
                // SAFETY: the piece is a slice that lives as long as the transfer and is ours.
                unsafe { ptr::copy_nonoverlapping(from, at as *mut u8, len as usize) };
                return true;
            }
            // SAFETY: as above.
            unsafe { user::copy_out(at, from, len as usize) }.is_ok()
        })
    }

    /// Puts the bytes of a slice into it.
    pub fn put_bytes(&mut self, bytes: &[u8]) -> u64 {
        // SAFETY: a slice is valid for its length.
        unsafe { self.put(bytes.as_ptr(), bytes.len() as u64) }
    }

    /// Puts up to `len` zeros into it.
    pub fn put_zeros(&mut self, len: u64) -> u64 {
        self.each(len, |transfer, at, _, len| {
            if transfer.of_kernel {
                // SAFETY: as in `put`.
                unsafe { ptr::write_bytes(at as *mut u8, 0, len as usize) };
                return true;
            }
            user::zero_out(at, len as usize).is_ok()
        })
    }

    /// Takes up to `len` bytes from it to `to`. Less than `len` and what was left, and it has stopped.
    ///
    /// # Safety
    /// `to` is valid for writes of `len` bytes.
    pub unsafe fn take(&mut self, to: *mut u8, len: u64) -> u64 {
        self.each(len, |transfer, at, offset, len| {
            // SAFETY: within the bytes that the caller vouches for.
            let to = unsafe { to.add(offset as usize) };
            if transfer.of_kernel {
                // SAFETY: as in `put`.
                unsafe { ptr::copy_nonoverlapping(at as *const u8, to, len as usize) };
                return true;
            }
            // SAFETY: as above.
            unsafe { user::copy_in(to, at, len as usize) }.is_ok()
        })
    }

    /// Takes bytes from it into a slice.
    pub fn take_bytes(&mut self, bytes: &mut [u8]) -> u64 {
        // SAFETY: a slice is valid for its length.
        unsafe { self.take(bytes.as_mut_ptr(), bytes.len() as u64) }
    }

    /// Passes over up to `len` bytes, as if they had been taken.
    pub fn skip(&mut self, len: u64) -> u64 {
        self.each(len, |_, _, _, _| true)
    }

    /// Moves up to `len` bytes: `go(address, offset, bytes)` says whether it could. Where it could not,
    /// the bytes up to the next page of the program are tried, so that nothing that is there is missed.
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
