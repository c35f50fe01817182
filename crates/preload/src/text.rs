//! Moves the text of the program and of its libraries to huge pages: before `main`, and for
//! libraries that the program opens later, at the program's next [`dlsym`](crate::dlsym).
//!
//! A segment is eligible if it contains at least one aligned range of 2 MiB, belongs to a file, and
//! is readable, executable and not writable. Two ways exist:
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
//! have changed such pages, and a copied uprobe would end the program by `SIGTRAP`. The pages are
//! checked before and after the copy.
//!
//! # Libraries opened later
//!
//! Other threads run at this time. The text is moved within a call of `dl_iterate_phdr`: glibc
//! holds the lock that `dlclose` takes before it unmaps a library, and musl never unmaps libraries.
//! An object in this list is mapped completely, and only relocations of text change its text later:
//! objects with such relocations are not copied. Libraries in other namespaces (`dlmopen`) stay in
//! place, and so do libraries without a later call of `dlsym`.
//!
//! The copy requires that the last step cannot fail after the kernel has unmapped the target, which
//! means strict accounting of memory (`vm.overcommit_memory=2`) must be off.
//!
//! This library's own text is smaller than a huge page, so the code below is never moved.

use crate::layout::{Count, Reason};
use crate::loaded::{Examined, HUGE, examine, forget_examined, large_text, relocates_text};
use crate::maps::{self, Mapping};
use crate::symbols::{self, Object};
use crate::{page, report, syscall};
use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The maximum number of mappings of a segment.
const MOST: usize = 8;
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
    Collapse = 1,
    /// A copy in anonymous memory if the file cannot have huge pages.
    Copy = 2,
}

/// The way, or 0 if the operation is off.
static WAY: AtomicU32 = AtomicU32::new(0);
/// The number of libraries that were opened and closed up to the last visit.
static CHANGES: AtomicU64 = AtomicU64::new(0);
/// The number of closed libraries.
static CLOSED: AtomicU64 = AtomicU64::new(0);
/// A thread visits the libraries.
static VISITING: AtomicBool = AtomicBool::new(false);

/// Moves all eligible segments to huge pages, and then those of libraries that are opened later.
pub fn start(way: Way) {
    WAY.store(way as u32, Ordering::Relaxed);
    visit(Visit { way, later: false, first: true });
}

/// Moves the eligible segments of libraries that were opened since the last call.
#[inline]
pub fn move_opened() {
    let way = match WAY.load(Ordering::Relaxed) {
        0 => return,
        1 => Way::Collapse,
        _ => Way::Copy,
    };
    visit(Visit { way, later: true, first: true });
}

/// A visit of the loaded objects.
struct Visit {
    way: Way,
    /// The program has started.
    later: bool,
    /// No object has been visited.
    first: bool,
}

/// Visits all objects, unless a thread visits them at this time: a signal handler can interrupt a
/// visit, and call `dlsym`.
fn visit(mut visit: Visit) {
    if !VISITING.swap(true, Ordering::Acquire) {
        symbols::visit_objects(visit_object, &mut visit);
        VISITING.store(false, Ordering::Release);
    }
}

/// Returns 1 to end the visit.
unsafe extern "C" fn visit_object(object: &Object, size: usize, visit: &mut Visit) -> c_int {
    if visit.first {
        visit.first = false;
        if size < size_of::<Object>() {
            return visit.later.into();
        }
        let changes = object.opened.wrapping_add(object.closed);
        if CHANGES.swap(changes, Ordering::Relaxed) == changes && visit.later {
            return 1;
        }
        if CLOSED.swap(object.closed, Ordering::Relaxed) != object.closed {
            forget_examined();
        }
    }
    for (start, end) in large_text(object) {
        match examine(start) {
            Examined::New => move_segment(start, end, object, visit),
            Examined::Before => {}
            Examined::Full => report::refuse(Reason::Segments, 0),
        }
    }
    0
}

/// Moves the eligible mappings of a segment.
fn move_segment(start: usize, end: usize, object: &Object, visit: &Visit) {
    let (start, end) = (start / page::size() * page::size(), end.next_multiple_of(page::size()));
    let (mut ranges, mut count) = ([(0, 0); MOST], 0);
    let visited = maps::visit(|mapping| {
        if start <= mapping.start
            && mapping.end <= end
            && let Some(range) = eligible(mapping)
            && let Some(place) = ranges.get_mut(count)
        {
            *place = range;
            count += 1;
        }
    });
    if let Err(code) = visited {
        report::refuse(Reason::Mappings, code);
    }
    for (start, end) in ranges.into_iter().take(count) {
        match move_range(start, end - start, object, visit.way) {
            Ok([segments, bytes]) => {
                report::add(segments, 1);
                report::add(bytes, end - start);
                if visit.later {
                    report::add(Count::LaterSegments, 1);
                }
            }
            Err((reason, code)) => report::refuse(reason, code),
        }
    }
}

/// Returns the range of whole huge pages in the text of a file.
fn eligible(mapping: Mapping) -> Option<(usize, usize)> {
    let start = mapping.start.next_multiple_of(HUGE);
    let end = mapping.end / HUGE * HUGE;
    (mapping.permissions == *b"r-xp" && mapping.of_file && start < end).then_some((start, end))
}

/// Moves a range of text to huge pages. Returns the counts of the way.
///
/// # Errors
/// The reason for which the text stays, and the error code of the kernel or 0.
fn move_range(
    start: usize,
    len: usize,
    object: &Object,
    way: Way,
) -> Result<[Count; 2], (Reason, c_int)> {
    // SAFETY: the advice discards no memory.
    match (unsafe { syscall::madvise(start, len, MADV_COLLAPSE) }, way) {
        (Ok(()), _) => return Ok([Count::CollapsedSegments, Count::CollapsedBytes]),
        (Err(code), Way::Collapse) => return Err((Reason::Collapse, code)),
        (Err(_), Way::Copy) => {}
    }
    if cfg!(not(target_arch = "x86_64")) {
        return Err((Reason::Processor, 0));
    }
    if accounts_strictly() {
        return Err((Reason::Accounting, 0));
    }
    if relocates_text(object) || !is_of_file_alone(start, start + len) {
        return Err((Reason::Changed, 0));
    }
    copy(start, len).map(|()| [Count::CopiedSegments, Count::CopiedBytes])
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

/// Puts a copy of the text in anonymous huge pages in its place.
///
/// # Errors
/// The reason for which the text stays, and the error code of the kernel or 0.
fn copy(start: usize, len: usize) -> Result<(), (Reason, c_int)> {
    // SAFETY: the kernel chooses the place of a new mapping.
    let reserved = unsafe {
        syscall::mmap(ptr::null_mut(), len + HUGE, PROT_READ | PROT_WRITE, MEMORY, -1, 0)
    };
    let reserved = reserved.map_err(|code| (Reason::Memory, code))? as usize;
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
        let huge = syscall::madvise(new, len, MADV_COLLAPSE);
        huge.map_err(|code| (Reason::Small, code)).and_then(|()| {
            let executable = syscall::mprotect(new, len, PROT_READ | PROT_EXEC);
            executable.map_err(|code| (Reason::Execution, code))
        })
    };
    syscall::name_memory(new, len, c"faultless huge text");
    let replaced = prepared.and_then(|()| {
        if !is_of_file_alone(start, start + len) {
            return Err((Reason::Changed, 0));
        }
        // SAFETY: the new pages have the contents and the permissions of the pages that they
        // replace.
        let replaced = unsafe { syscall::replace(new, len, start) };
        replaced.map_err(|code| (Reason::Place, code))
    });
    if replaced.is_err() {
        // SAFETY: the memory is the copy, to which no pointer exists.
        let _ = unsafe { syscall::munmap(new, len) };
    }
    replaced
}
