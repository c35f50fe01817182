//! Copies of text in anonymous huge pages.
//!
//! The last step, [`Copied::replace`], must not fail after the kernel has unmapped the text. So
//! strict accounting of memory (`vm.overcommit_memory=2`) must be off.

use crate::layout::Reason;
use crate::{discard, page, syscall};
use core::ffi::c_int;
use core::ptr;

const MADV_HUGEPAGE: c_int = 14;
const MADV_POPULATE_READ: c_int = 22;
const MADV_COLLAPSE: c_int = 25;
const PROT_READ: c_int = 1;
const PROT_WRITE: c_int = 2;
const PROT_EXEC: c_int = 4;
/// `MAP_PRIVATE`, `MAP_ANONYMOUS` and `MAP_NORESERVE`: memory without accounting.
const MEMORY: c_int = 2 | 0x20 | 0x4000;

/// Returns whether the kernel accounts memory strictly. An unreadable setting counts as strict.
pub fn accounts_strictly() -> bool {
    let mut setting = [b'2'];
    if let Ok(file) = syscall::open(c"/proc/sys/vm/overcommit_memory") {
        let _ = syscall::read(file, &mut setting);
        syscall::close(file);
    }
    setting == *b"2"
}

/// Returns whether the range has no private page.
pub fn is_of_file_alone(start: usize, end: usize) -> bool {
    let Ok(file) = syscall::open(c"/proc/self/pagemap") else { return false };
    let all = has_no_private_page(file, start, end);
    syscall::close(file);
    all
}

fn has_no_private_page(file: c_int, start: usize, end: usize) -> bool {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;
    let page = page::size();
    let mut words = [0_u64; 256];
    let mut at = start;
    while at < end {
        let wanted = ((end - at) / page).min(words.len());
        let Some(words) = words.get_mut(..wanted) else { return false };
        let bytes = size_of_val(words);
        if syscall::read_words(file, words, at / page * size_of::<u64>()) != Ok(bytes) {
            return false;
        }
        let private =
            |word: &u64| word & SWAPPED != 0 || word & PRESENT != 0 && word & OF_FILE == 0;
        if words.iter().any(private) {
            return false;
        }
        at += wanted * page;
    }
    true
}

/// A copy of text in executable huge pages. The memory is unmapped when the copy is dropped.
#[derive(Debug)]
pub struct Copied {
    /// The address of the text.
    text: usize,
    /// The address of the copy.
    copy: usize,
    len: usize,
}

impl Copied {
    /// Copies the text at `start`. If other threads can unmap the text, the kernel makes the copy
    /// (`by_kernel`).
    ///
    /// # Errors
    /// The reason for which the text stays, and the error code of the kernel or 0.
    pub fn of(start: usize, len: usize, by_kernel: bool) -> Result<Self, (Reason, c_int)> {
        let huge = page::huge();
        // SAFETY: the kernel chooses the place of a new mapping.
        let reserved = unsafe {
            syscall::mmap(ptr::null_mut(), len + huge, PROT_READ | PROT_WRITE, MEMORY, -1, 0)
        };
        let reserved = reserved.map_err(|code| (Reason::Memory, code))? as usize;
        let copied = Self { text: start, copy: reserved.next_multiple_of(huge), len };
        let (copy, end) = (copied.copy, copied.copy + len);
        // SAFETY: the memory is new, and no other code knows its address.
        unsafe {
            if copy > reserved {
                let _ = syscall::munmap(reserved, copy - reserved);
            }
            let _ = syscall::munmap(end, reserved + huge - copy);
            let _ = syscall::madvise(copy, len, MADV_HUGEPAGE);
            // Maps the text in one call, in place of a fault for every few pages.
            let _ = syscall::madvise(start, len, MADV_POPULATE_READ);
        }
        if by_kernel {
            // SAFETY: the memory is new.
            let read = unsafe { syscall::read_own_memory(start, copy, len) };
            read.map_err(|code| (Reason::Opened, code))?;
        } else {
            // SAFETY: the text is readable, and no other thread unmaps it. The memory is new.
            unsafe { ptr::copy_nonoverlapping(start as *const u8, copy as *mut u8, len) };
        }
        // SAFETY: the memory is new. The first call fails if a page is not huge, and cannot be made
        // huge.
        unsafe {
            let huge = syscall::madvise(copy, len, MADV_COLLAPSE);
            huge.map_err(|code| (Reason::Small, code))?;
            let executable = syscall::mprotect(copy, len, PROT_READ | PROT_EXEC);
            executable.map_err(|code| (Reason::Execution, code))?;
        }
        syscall::name_memory(copy, len, c"faultless huge text");
        Ok(copied)
    }

    /// Puts the copy in the place of the text, which is mapped, and stays mapped during the call.
    ///
    /// # Errors
    /// The reason for which the text stays, and the error code of the kernel or 0.
    pub fn replace(self) -> Result<(), (Reason, c_int)> {
        if !is_of_file_alone(self.text, self.text + self.len) {
            return Err((Reason::Changed, 0));
        }
        let end = self.text + self.len;
        // From now on advice of the program discards no page of the range.
        if !discard::add(self.text, end) {
            return Err((Reason::Segments, 0));
        }
        // SAFETY: the new pages have the contents and the permissions of the pages that they
        // replace.
        let replaced = unsafe { syscall::replace(self.copy, self.len, self.text) };
        if let Err(code) = replaced {
            discard::forget(self.text, end);
            return Err((Reason::Place, code));
        }
        // The memory of the copy is in its new place.
        core::mem::forget(self);
        Ok(())
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        // SAFETY: the memory is the copy, to which no pointer exists.
        let _ = unsafe { syscall::munmap(self.copy, self.len) };
    }
}
