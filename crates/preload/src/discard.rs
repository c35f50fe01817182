//! Advice of the program that discards pages of copied text.
//!
//! The kernel reads discarded pages of a file again, and fills discarded anonymous pages with
//! zeros. Copied text is anonymous, so the hooks of [`advice`](crate::advice) skip such advice
//! there, and report success. The hooks know the copied ranges. A range counts only while a loaded
//! object has text there: the loader unmaps libraries without a call of the hooks.

use crate::loaded::large_text;
use crate::symbols::{self, Object};
use core::ffi::c_int;
use core::sync::atomic::{AtomicUsize, Ordering};

/// The maximum number of ranges.
const RANGES: usize = 128;

/// A range of addresses. The end is 0 if the place is free.
struct Range {
    start: AtomicUsize,
    end: AtomicUsize,
}

static COPIED: [Range; RANGES] =
    [const { Range { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; RANGES];
/// The number of places in use, or more.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Returns whether the advice discards pages, or moves them out of memory: `MADV_DONTNEED`,
/// `MADV_FREE`, `MADV_REMOVE`, `MADV_WIPEONFORK`, `MADV_COLD`, `MADV_PAGEOUT` and
/// `MADV_DONTNEED_LOCKED`.
fn discards(advice: c_int) -> bool {
    matches!(advice, 4 | 8 | 9 | 18 | 20 | 21 | 24)
}

/// Adds a range of text before the copy is put in place. Returns false without a free place. Only
/// one thread at a time moves text.
pub fn add(start: usize, end: usize) -> bool {
    forget(start, end);
    put(start, end)
}

/// Writes a range to a free place. Returns false without a free place.
fn put(start: usize, end: usize) -> bool {
    for (index, range) in COPIED.iter().enumerate() {
        if range.end.load(Ordering::Relaxed) == 0 {
            range.start.store(start, Ordering::Relaxed);
            range.end.store(end, Ordering::Release);
            USED.fetch_max(index + 1, Ordering::Release);
            return true;
        }
    }
    false
}

/// Removes addresses from the ranges: the program maps or unmaps pages there.
#[inline]
pub fn forget(start: usize, end: usize) {
    if USED.load(Ordering::Acquire) != 0 {
        remove(start, end);
    }
}

#[cold]
fn remove(start: usize, end: usize) {
    for range in &COPIED {
        let (first, last) =
            (range.start.load(Ordering::Relaxed), range.end.load(Ordering::Acquire));
        if last == 0 || end <= first || last <= start {
            continue;
        }
        if first < start {
            range.end.store(start, Ordering::Release);
            if end < last {
                put(end, last);
            }
        } else if end < last {
            range.start.store(end, Ordering::Release);
        } else {
            range.end.store(0, Ordering::Release);
        }
    }
}

/// Returns the first part of a range of addresses that is copied text.
fn copied(start: usize, end: usize) -> Option<(usize, usize)> {
    let mut first: Option<(usize, usize)> = None;
    for range in COPIED.iter().take(USED.load(Ordering::Acquire)) {
        let last = range.end.load(Ordering::Acquire);
        let from = range.start.load(Ordering::Relaxed);
        if last == 0 || end <= from || last <= start {
            continue;
        }
        if !is_text(from, last) {
            range.end.store(0, Ordering::Release);
        } else if first.is_none_or(|(known, _)| from < known) {
            first = Some((from, last));
        }
    }
    first.map(|(from, last)| (from.max(start), last.min(end)))
}

/// A search for text of a loaded object.
struct Search {
    start: usize,
    end: usize,
    found: bool,
}

/// Returns whether the text of a loaded object contains the range.
fn is_text(start: usize, end: usize) -> bool {
    let mut search = Search { start, end, found: false };
    symbols::visit_objects(find, &mut search);
    search.found
}

/// Returns 1 to end the search.
unsafe extern "C" fn find(object: &Object, _: usize, search: &mut Search) -> c_int {
    search.found = large_text(object).any(|(start, end)| {
        start <= search.start && search.end <= crate::page::around(start, end).1
    });
    search.found.into()
}

/// Returns whether the advice discards pages, and the program has copied text.
pub fn can_meet_text(advice: c_int) -> bool {
    USED.load(Ordering::Acquire) != 0 && discards(advice)
}

/// Gives the advice for the range of addresses by `give`, except for copied text if the advice
/// discards pages. Returns the first result other than 0.
pub fn advise(
    start: usize,
    len: usize,
    advice: c_int,
    give: impl Fn(usize, usize) -> c_int,
) -> c_int {
    let Some(end) = start.checked_add(len) else { return give(start, len) };
    if !can_meet_text(advice) {
        return give(start, len);
    }
    let (mut at, mut skipped) = (start, false);
    while at < end
        && let Some((from, last)) = copied(at, end)
    {
        if at < from {
            let result = give(at, from - at);
            if result != 0 {
                return result;
            }
        }
        (at, skipped) = (last, true);
    }
    if skipped && at == end { 0 } else { give(at, end - at) }
}
