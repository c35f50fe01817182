//! Moves the text of the program and of its libraries to huge pages, before `main`.
//!
//! A segment is eligible if it contains at least one aligned range of 2 MiB, belongs to a file, and
//! is readable, executable and not writable. Libraries that the program opens later are not moved.
//! Two ways exist:
//!
//! - [`Way::Collapse`]: `MADV_COLLAPSE` (Linux 6.1) replaces pages of the file by huge pages of the
//!   file. This way requires a file system with huge pages (tmpfs), or a kernel with
//!   `CONFIG_READ_ONLY_THP_FOR_FS`. The mapping stays a mapping of the file.
//! - [`Way::Copy`] tries the first way. If the kernel refuses, the text is copied to anonymous huge
//!   pages, which `mremap` puts in place of the file's pages in one step: the kernel holds the lock
//!   of the address space, so a thread that executes the text continues in either the old or the
//!   new pages. Only for x86-64; other processors need their instruction caches flushed.
//!
//! Addresses and contents stay, so symbols by addresses, unwinding and debuggers that know the
//! loaded libraries work as before. A tool that reads `/proc/PID/maps` finds anonymous memory in
//! the middle of the library, with the name `[anon:faultless huge text]` if the kernel has
//! `CONFIG_ANON_VMA_NAME`. `perf record -- PROGRAM` reports symbols: perf gets no event for the
//! move, and keeps the mapping of the file. `perf record --pid` reads `maps`, and reports no
//! symbols.
//!
//! Segments with private pages are not copied. Breakpoints of a debugger, uprobes and relocations
//! have changed such pages, and a copied uprobe would end the program by `SIGTRAP`.
//!
//! The copy requires that the last step cannot fail after the kernel has unmapped the target, which
//! means strict accounting of memory (`vm.overcommit_memory=2`) must be off.
//!
//! This library's own text is smaller than a huge page, so the code below is never moved.

use crate::maps::{self, Mapping};
use crate::syscall;
use core::ffi::c_int;
use core::ptr;

/// The size of a huge page.
const HUGE: usize = 2 << 20;
/// The maximum number of segments. A program with more has the first segments moved.
const MOST: usize = 64;
const MADV_HUGEPAGE: c_int = 14;
const MADV_POPULATE_READ: c_int = 22;
const MADV_COLLAPSE: c_int = 25;
const PROT_READ: c_int = 1;
const PROT_WRITE: c_int = 2;
const PROT_EXEC: c_int = 4;
/// `MAP_PRIVATE`, `MAP_ANONYMOUS` and `MAP_NORESERVE`: memory without accounting.
const MEMORY: c_int = 2 | 0x20 | 0x4000;

/// The permitted ways to huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Huge pages of the file alone.
    Collapse,
    /// A copy in anonymous memory if the file cannot have huge pages.
    Copy,
}

/// Moves all eligible segments to huge pages.
pub fn move_to_huge_pages(way: Way) {
    let (mut segments, mut count) = ([(0, 0); MOST], 0);
    maps::visit(|mapping| {
        if let Some(range) = eligible(mapping)
            && let Some(place) = segments.get_mut(count)
        {
            *place = range;
            count += 1;
        }
    });
    let copies = way == Way::Copy && cfg!(target_arch = "x86_64") && !accounts_strictly();
    for (start, end) in segments.into_iter().take(count) {
        // SAFETY: the advice discards no memory.
        let collapsed = unsafe { syscall::madvise(start, end - start, MADV_COLLAPSE) };
        if collapsed.is_err() && copies && is_of_file_alone(start, end) {
            copy(start, end - start);
        }
    }
}

/// Returns the range of whole huge pages in the text of a file.
fn eligible(mapping: Mapping) -> Option<(usize, usize)> {
    let start = mapping.start.next_multiple_of(HUGE);
    let end = mapping.end / HUGE * HUGE;
    (mapping.permissions == *b"r-xp" && mapping.of_file && start < end).then_some((start, end))
}

/// Returns whether the kernel accounts memory strictly. An unreadable setting counts as strict.
fn accounts_strictly() -> bool {
    let mut setting = [b'2'];
    if let Ok(file) = syscall::open(c"/proc/sys/vm/overcommit_memory") {
        let _ = syscall::read(file, &mut setting);
        syscall::close(file);
    }
    setting == *b"2"
}

/// Returns whether the range has no private page.
fn is_of_file_alone(start: usize, end: usize) -> bool {
    let Ok(file) = syscall::open(c"/proc/self/pagemap") else { return false };
    let all = has_no_private_page(file, start, end);
    syscall::close(file);
    all
}

fn has_no_private_page(file: c_int, start: usize, end: usize) -> bool {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;
    let page = crate::page::size();
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

/// Puts a copy of the text in anonymous huge pages in its place. Without huge pages the text stays.
fn copy(start: usize, len: usize) {
    // SAFETY: the kernel chooses the place of a new mapping.
    let reserved = unsafe {
        syscall::mmap(ptr::null_mut(), len + HUGE, PROT_READ | PROT_WRITE, MEMORY, -1, 0)
    };
    let Ok(reserved) = reserved else { return };
    let reserved = reserved as usize;
    let new = reserved.next_multiple_of(HUGE);
    // SAFETY: the memory is new, and no other code knows its address. The text is readable.
    let prepared = unsafe {
        if new > reserved {
            let _ = syscall::munmap(reserved, new - reserved);
        }
        let _ = syscall::munmap(new + len, reserved + HUGE - new);
        let _ = syscall::madvise(new, len, MADV_HUGEPAGE);
        // Maps the text in one call, in place of a fault for every few pages.
        let _ = syscall::madvise(start, len, MADV_POPULATE_READ);
        ptr::copy_nonoverlapping(start as *const u8, new as *mut u8, len);
        // Fails if a page is not huge, and cannot be made huge.
        syscall::madvise(new, len, MADV_COLLAPSE)
            .and_then(|()| syscall::mprotect(new, len, PROT_READ | PROT_EXEC))
    };
    syscall::name_memory(new, len, c"faultless huge text");
    // SAFETY: the new pages have the contents and the permissions of the pages that they replace.
    if prepared.is_err() || unsafe { syscall::replace(new, len, start) }.is_err() {
        // SAFETY: the memory is the copy, to which no pointer exists.
        let _ = unsafe { syscall::munmap(new, len) };
    }
}
