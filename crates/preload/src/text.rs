//! Moves the text of the program and of its libraries to huge pages: before `main`, and for
//! libraries that the program opens later, at the program's next [`dlsym`](crate::dlsym).
//!
//! A segment is eligible if it contains at least one aligned [huge page](page::huge), belongs to a
//! file, and is readable, executable and not writable. The size of a huge page follows the size of
//! a page. If no segment contains a huge page, and a segment has at least [`LARGE`] bytes, a
//! refusal is counted. Two ways exist:
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
//! Other threads run at this time, and can close a library. So the kernel copies the text, by
//! `process_vm_readv`, which fails if the text is unmapped meanwhile. The copy is put in place
//! within a call of `dl_iterate_phdr`, if the same mapping of the file still exists: glibc holds
//! the lock that `dlclose` takes before it unmaps a library, and musl never unmaps libraries. The
//! lock is held for a short time, so a child of another thread's fork rarely inherits a held lock.
//! An object in this list is mapped completely, and only relocations of text change its text later:
//! objects with such relocations are not copied. If another thread closes the library during the
//! operation, the failure is not counted as a refusal: a call of `dl_iterate_phdr` confirms the
//! cause of each refusal. Libraries in other namespaces (`dlmopen`) and libraries without a later
//! call of `dlsym` stay in place.
//!
//! This library's own text is smaller than a huge page, so the code below is never moved.

use crate::copy::{self, Copied};
use crate::layout::{Count, Reason};
use crate::loaded::{Examined, examine, forget_examined, large_text, relocates_text, text};
use crate::maps::{self, Mapping};
use crate::symbols::{self, Object};
use crate::{page, report, stop, syscall};
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The size in bytes of the smallest segment whose user can expect a huge page: the size of the
/// smallest huge page.
const LARGE: usize = 2 << 20;
/// The maximum number of new segments in one visit. Further segments stay in place.
const SEGMENTS: usize = 64;
/// The maximum number of mappings of a segment.
const MAPPINGS: usize = 8;
const MADV_COLLAPSE: c_int = 25;
/// The error of a read from memory that is not mapped.
const UNMAPPED: c_int = 14;

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
/// A segment with a huge page was found, or the refusal for segments without one was counted.
static DECIDED: AtomicBool = AtomicBool::new(false);
/// A thread visits the libraries.
static VISITING: AtomicBool = AtomicBool::new(false);

/// Moves all eligible segments to huge pages, and then those of libraries that are opened later.
pub fn start(way: Way) {
    WAY.store(way as u32, Ordering::Relaxed);
    move_new(way, false);
}

/// Moves the eligible segments of libraries that were opened since the last call.
#[inline]
pub fn move_opened() {
    if stop::is_filtered() {
        return;
    }
    match WAY.load(Ordering::Relaxed) {
        0 => {}
        1 => move_new(Way::Collapse, true),
        _ => move_new(Way::Copy, true),
    }
}

/// A segment of text.
#[derive(Clone, Copy)]
struct Segment {
    /// The address of the first page.
    start: usize,
    /// The address after the last page.
    end: usize,
    /// The loader changes the text.
    is_relocated: bool,
}

/// A search for new segments.
struct Search {
    /// The program has started.
    later: bool,
    /// No object has been visited.
    first: bool,
    /// The new segments.
    segments: [Segment; SEGMENTS],
    count: usize,
    /// A segment of at least [`LARGE`] bytes was found.
    has_large: bool,
}

/// Moves the eligible segments that were not examined before, unless a thread does this already: a
/// signal handler can interrupt this function, and call `dlsym`.
fn move_new(way: Way, later: bool) {
    if VISITING.swap(true, Ordering::Acquire) {
        return;
    }
    let none = Segment { start: 0, end: 0, is_relocated: false };
    let mut search =
        Search { later, first: true, segments: [none; SEGMENTS], count: 0, has_large: false };
    symbols::visit_objects(find, &mut search);
    let decided = search.count > 0 || search.has_large;
    if decided && !DECIDED.swap(true, Ordering::Relaxed) && search.count == 0 {
        report::refuse(Reason::Short, (page::huge() >> 20) as c_int);
    }
    for segment in search.segments.iter().take(search.count) {
        move_segment(*segment, way, later);
    }
    VISITING.store(false, Ordering::Release);
}

/// Adds the new segments of an object to the search. Returns 1 to end the search.
unsafe extern "C" fn find(object: &Object, size: usize, search: &mut Search) -> c_int {
    if search.first {
        search.first = false;
        if size < size_of::<Object>() {
            return search.later.into();
        }
        let changes = object.opened.wrapping_add(object.closed);
        if CHANGES.swap(changes, Ordering::Relaxed) == changes && search.later {
            return 1;
        }
        if CLOSED.swap(object.closed, Ordering::Relaxed) != object.closed {
            forget_examined();
        }
    }
    search.has_large |= text(object).any(|(start, end)| end - start >= LARGE);
    for (start, end) in large_text(object) {
        let place = match examine(start) {
            Examined::Before => continue,
            Examined::New => search.segments.get_mut(search.count),
            Examined::Full => None,
        };
        let Some(place) = place else {
            report::refuse(Reason::Segments, 0);
            continue;
        };
        let (start, end) = page::around(start, end);
        *place = Segment { start, end, is_relocated: relocates_text(object) };
        search.count += 1;
    }
    0
}

/// Moves the eligible mappings of a segment.
fn move_segment(segment: Segment, way: Way, later: bool) {
    let (mut mappings, mut count) = ([Mapping::default(); MAPPINGS], 0);
    let visited = maps::visit(|mapping| {
        if segment.start <= mapping.start
            && mapping.end <= segment.end
            && is_eligible(&mapping)
            && let Some(place) = mappings.get_mut(count)
        {
            *place = mapping;
            count += 1;
        }
    });
    if let Err(code) = visited {
        report::refuse(Reason::Mappings, code);
    }
    for mapping in mappings.into_iter().take(count) {
        match move_mapping(mapping, segment.is_relocated, way, later) {
            Ok(Some([segments, bytes])) => {
                let (start, end) = range(&mapping);
                report::add(segments, 1);
                report::add(bytes, end - start);
                if later {
                    report::add(Count::LaterSegments, 1);
                }
            }
            Ok(None) => {}
            Err((reason, code)) => report::refuse(reason, code),
        }
    }
}

/// Returns the whole huge pages within a mapping: the first address and the address after the last.
fn range(mapping: &Mapping) -> (usize, usize) {
    let huge = page::huge();
    (mapping.start.next_multiple_of(huge), mapping.end / huge * huge)
}

/// Returns whether a mapping is text of a file with a whole huge page.
fn is_eligible(mapping: &Mapping) -> bool {
    let (start, end) = range(mapping);
    mapping.permissions == *b"r-xp" && mapping.inode != 0 && start < end
}

/// Moves a mapping of text to huge pages. Returns the counts of the way, or `None` if the program
/// has closed the library.
///
/// # Errors
/// The reason for which the text stays, and the error code of the kernel or 0.
fn move_mapping(
    mapping: Mapping,
    is_relocated: bool,
    way: Way,
    later: bool,
) -> Result<Option<[Count; 2]>, (Reason, c_int)> {
    let (start, end) = range(&mapping);
    // SAFETY: the advice changes no contents of memory, also if another mapping is there by now.
    match (unsafe { syscall::madvise(start, end - start, MADV_COLLAPSE) }, way) {
        (Ok(()), _) => return Ok(Some([Count::CollapsedSegments, Count::CollapsedBytes])),
        (Err(_), Way::Collapse) if later && !is_confirmed(mapping, |_| true) => return Ok(None),
        (Err(code), Way::Collapse) => return Err((Reason::Collapse, code)),
        (Err(_), Way::Copy) => {}
    }
    if cfg!(not(target_arch = "x86_64")) {
        return Err((Reason::Processor, 0));
    }
    if copy::accounts_strictly() {
        return Err((Reason::Accounting, 0));
    }
    if is_relocated {
        return Err((Reason::Changed, 0));
    }
    if has_private_page(&mapping) {
        let confirmed = !later || is_confirmed(mapping, has_private_page);
        return if confirmed { Err((Reason::Changed, 0)) } else { Ok(None) };
    }
    let copied = match Copied::of(start, end - start, later) {
        Err((Reason::Opened, UNMAPPED)) => return Ok(None),
        copied => copied?,
    };
    let mut placing = Placing { mapping, copied: Some(copied), result: Ok(None) };
    symbols::visit_objects(place, &mut placing);
    placing.result
}

fn has_private_page(mapping: &Mapping) -> bool {
    let (start, end) = range(mapping);
    !copy::is_of_file_alone(start, end)
}

/// Returns whether the mapping still exists and `fact` returns `true` for it. Both are checked
/// while no other thread can close the library: without this check `fact` could describe a later
/// mapping at the same address.
fn is_confirmed(mapping: Mapping, fact: fn(&Mapping) -> bool) -> bool {
    let mut confirming = Confirming { mapping, fact, confirmed: false };
    symbols::visit_objects(confirm, &mut confirming);
    confirming.confirmed
}

/// A fact to be confirmed.
struct Confirming {
    mapping: Mapping,
    fact: fn(&Mapping) -> bool,
    confirmed: bool,
}

/// Confirms the fact if the object contains the mapping. Returns 1 to end the visit.
unsafe extern "C" fn confirm(object: &Object, _: usize, confirming: &mut Confirming) -> c_int {
    if !contains(object, &confirming.mapping) {
        return 0;
    }
    confirming.confirmed = exists(&confirming.mapping) && (confirming.fact)(&confirming.mapping);
    1
}

/// Returns whether the large text of an object contains the mapping.
fn contains(object: &Object, mapping: &Mapping) -> bool {
    large_text(object).any(|(start, end)| {
        let (start, end) = page::around(start, end);
        start <= mapping.start && mapping.end <= end
    })
}

/// Returns whether the program has the mapping.
fn exists(mapping: &Mapping) -> bool {
    let mut exists = false;
    maps::visit(|known| exists |= known == *mapping).is_ok() && exists
}

/// A copy to be put in place.
struct Placing {
    /// The mapping of which the copy was made.
    mapping: Mapping,
    copied: Option<Copied>,
    result: Result<Option<[Count; 2]>, (Reason, c_int)>,
}

/// Puts the copy in place if the object contains the mapping. Returns 1 to end the visit.
unsafe extern "C" fn place(object: &Object, _: usize, placing: &mut Placing) -> c_int {
    if !contains(object, &placing.mapping) {
        return 0;
    }
    if exists(&placing.mapping)
        && let Some(copied) = placing.copied.take()
    {
        let counts = [Count::CopiedSegments, Count::CopiedBytes];
        placing.result = copied.replace().map(|()| Some(counts));
    }
    1
}
