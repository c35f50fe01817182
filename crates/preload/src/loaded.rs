//! The text of the objects that the loader knows.

use crate::next::headers;
use crate::page;
use crate::symbols::{Object, ProgramHeader};
use core::sync::atomic::{AtomicUsize, Ordering};

/// The maximum number of segments.
const MOST: usize = 64;

/// The first addresses of the examined segments.
static EXAMINED: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];

/// The result of [`examine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Examined {
    /// The segment was examined for the first time.
    New,
    /// The segment was examined before.
    Before,
    /// No further segment can be examined.
    Full,
}

/// Adds a segment, by its first address, to the examined segments.
pub fn examine(start: usize) -> Examined {
    for place in &EXAMINED {
        match place.load(Ordering::Relaxed) {
            0 => {
                place.store(start, Ordering::Relaxed);
                return Examined::New;
            }
            known if known == start => return Examined::Before,
            _ => {}
        }
    }
    Examined::Full
}

/// Forgets the examined segments: the program has closed libraries, whose addresses other libraries
/// can get.
pub fn forget_examined() {
    for place in &EXAMINED {
        place.store(0, Ordering::Relaxed);
    }
}

/// Returns the segments of text with at least one whole huge page: the first address, and the
/// address after the last.
pub fn large_text(object: &Object) -> impl Iterator<Item = (usize, usize)> {
    let huge = page::huge();
    text(object).filter(move |(start, end)| start.next_multiple_of(huge) < end / huge * huge)
}

/// Returns the segments of text: the first address, and the address after the last.
pub fn text(object: &Object) -> impl Iterator<Item = (usize, usize)> {
    headers(object).iter().filter_map(|header| {
        const LOAD: u32 = 1;
        const EXECUTE: u32 = 1;
        const WRITE: u32 = 2;
        if header.kind != LOAD || header.flags & (EXECUTE | WRITE) != EXECUTE {
            return None;
        }
        let start = object.base.wrapping_add(header.address);
        Some((start, start.checked_add(header.size)?))
    })
}

/// Returns whether the loader changes the text of an object, by relocations.
pub fn relocates_text(object: &Object) -> bool {
    const DYNAMIC: u32 = 2;
    const TEXTREL: usize = 22;
    const FLAGS: usize = 30;
    const FLAG_TEXTREL: usize = 4;
    let is_dynamic = |header: &&ProgramHeader| header.kind == DYNAMIC;
    let Some(header) = headers(object).iter().find(is_dynamic) else { return false };
    let mut entry = object.base.wrapping_add(header.address) as *const [usize; 2];
    // SAFETY: the dynamic section is a list of pairs that ends with the tag zero.
    unsafe {
        while (*entry)[0] != 0 {
            let [tag, value] = *entry;
            if tag == TEXTREL || tag == FLAGS && value & FLAG_TEXTREL != 0 {
                return true;
            }
            entry = entry.add(1);
        }
    }
    false
}
