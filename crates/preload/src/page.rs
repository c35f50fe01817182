//! The size of a page, and of a huge page.

use crate::symbols;
use core::sync::atomic::{AtomicUsize, Ordering};

/// The entry of the auxiliary vector with the size of a page.
const AT_PAGESZ: usize = 6;
const SMALLEST: usize = 4096;

/// The size, or 0 before the first use.
static PAGE: AtomicUsize = AtomicUsize::new(0);

/// Returns the size of a page in bytes.
pub fn size() -> usize {
    let known = PAGE.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: the function reads the auxiliary vector, and has no condition.
    let size = symbols::auxiliary().map_or(0, |read| unsafe { read(AT_PAGESZ) });
    let size = if size.is_power_of_two() { size.max(SMALLEST) } else { SMALLEST };
    PAGE.store(size, Ordering::Relaxed);
    size
}

/// Returns the size of a huge page in bytes: 2, 32 or 512 MiB for pages of 4, 16 or 64 KiB. One
/// entry maps as much as a table of pages, whose entries have 8 bytes.
pub fn huge() -> usize {
    const ENTRY: usize = 8;
    size() * (size() / ENTRY)
}

/// Returns the pages around a range: the first address and the address after the last.
pub fn around(start: usize, end: usize) -> (usize, usize) {
    let page = size();
    (start / page * page, end.next_multiple_of(page))
}

/// Returns the whole pages within a range: the first address and the address after the last.
pub fn whole(start: usize, bytes: usize) -> (usize, usize) {
    let page = size();
    let begin = start.next_multiple_of(page);
    let end = start.saturating_add(bytes) / page * page;
    (begin, end.max(begin))
}
