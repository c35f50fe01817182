//! One table: a frame viewed as [`ENTRIES`] entries, and the address ranges that entries span.
//! Levels count from the last level, 1.

use super::format::{Entry, INDEX_BITS, LEVELS, USER_ROOT_ENTRIES};
use crate::addr::{FrameNumber, PAGE_SHIFT, VirtRange};
use crate::machine::Machine;
use crate::sync::atomic::{AtomicU64, Ordering};

pub use super::format::ENTRIES;

/// The level of the tables whose entries map base pages.
pub const LAST: u32 = 1;
/// The level of the root table.
pub const ROOT: u32 = LEVELS;

/// The level of the tables whose leaves are huge: 2 MiB on x86-64.
pub const HUGE: u32 = LAST + 1;
/// log2 of the pages that a huge leaf maps.
pub const HUGE_ORDER: u8 = INDEX_BITS as u8;

#[cfg(not(loom))]
const _: () = assert!(ENTRIES * size_of::<u64>() == 1 << PAGE_SHIFT);

/// Returns log2 of the bytes spanned by an entry of a table of `level`.
#[inline]
const fn entry_shift(level: u32) -> u32 {
    PAGE_SHIFT + INDEX_BITS * (level - LAST)
}

/// Returns the bytes spanned by an entry of a table of `level`: 4 KiB, 2 MiB, 1 GiB, 512 GiB on
/// x86-64.
#[inline]
pub const fn entry_span(level: u32) -> u64 {
    1 << entry_shift(level)
}

/// Returns the bytes that a whole table of `level` spans.
#[inline]
pub const fn table_span(level: u32) -> u64 {
    entry_span(level) << INDEX_BITS
}

/// The bytes that a last-level table spans.
pub const TABLE_ALIGN: u64 = table_span(LAST);

/// Returns whether `range` covers the whole span of some last-level table.
#[inline]
pub const fn holds_table(range: VirtRange) -> bool {
    let span = table_span(LAST);
    match range.start.checked_next_multiple_of(span) {
        Some(start) => start < range.end && range.end - start >= span,
        None => false,
    }
}

/// Returns the index of `addr` in its table of `level`.
#[inline]
pub const fn index(addr: u64, level: u32) -> usize {
    (addr >> entry_shift(level)) as usize & (ENTRIES - 1)
}

/// Returns the entries of the table in `frame`.
///
/// # Safety
/// `frame` holds a table, and remains a table for `'a`: the caller is in a grace section opened
/// before the table was unlinked (*tables outlive walkers*), or holds the range lock over its span,
/// or is the only remaining user.
#[inline(always)]
pub unsafe fn entries<M: Machine>(machine: &M, frame: FrameNumber) -> &[AtomicU64; ENTRIES] {
    // SAFETY: the machine's contract makes the frame a valid, aligned page for its whole life; the
    // caller's promise makes the frame a table, which is only accessed through atomics.
    unsafe { &*machine.frame_bytes(frame).cast::<[AtomicU64; ENTRIES]>() }
}

/// Returns the entries of the table of `level` in `frame` that belong to the subsystem: all
/// entries, but in a root only those of user space.
///
/// # Safety
/// As [`entries`].
#[inline]
pub unsafe fn user_entries<M: Machine>(
    machine: &M,
    frame: FrameNumber,
    level: u32,
) -> &[AtomicU64] {
    // SAFETY: the caller's promise.
    let slots = unsafe { entries(machine, frame) };
    if level == ROOT { &slots[..USER_ROOT_ENTRIES] } else { slots }
}

/// Returns the slot of `addr` in the table of `level` in `frame`.
///
/// # Safety
/// As [`entries`].
#[inline(always)]
pub unsafe fn slot<M: Machine>(
    machine: &M,
    frame: FrameNumber,
    addr: u64,
    level: u32,
) -> &AtomicU64 {
    // SAFETY: the caller's promise.
    unsafe { &entries(machine, frame)[index(addr, level)] }
}

/// Slots in one cache line, if they are aligned.
const LINE: usize = 8;

/// Returns whether all of `slots` are empty, each at the time of its read.
#[inline(always)]
pub fn are_none(slots: &[AtomicU64]) -> bool {
    let (lines, rest) = slots.as_chunks::<LINE>();
    for line in lines {
        if line.each_ref().map(load).iter().fold(0, |any, entry| any | entry.0) != 0 {
            return false;
        }
    }
    let mut any = 0;
    for slot in rest {
        any |= load(slot).0;
    }
    any == 0
}

/// Returns the bits common to all of `slots`, each at the time of its read.
#[inline(always)]
pub fn common(slots: &[AtomicU64]) -> Entry {
    let (lines, rest) = slots.as_chunks::<LINE>();
    let mut all = !0;
    for line in lines {
        all &= line.each_ref().map(load).iter().fold(!0, |all, entry| all & entry.0);
    }
    for slot in rest {
        all &= load(slot).0;
    }
    Entry(all)
}

/// Loads the value of a slot, for a walk: later loads through it see the initial zeros of a
/// published table.
#[inline(always)]
pub fn load(slot: &AtomicU64) -> Entry {
    Entry(slot.load(Ordering::Acquire))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn are_none_and_common_read_every_slot() {
        for length in 0..=3 * LINE {
            let slots: [_; 3 * LINE] = core::array::from_fn(|_| AtomicU64::new(0));
            let slots = &slots[..length];
            assert!(are_none(slots));
            for slot in slots {
                slot.store(1 << 63, Ordering::Relaxed);
                assert!(!are_none(slots), "of {length}");
                slot.store(0, Ordering::Relaxed);
            }
            slots.iter().for_each(|slot| slot.store(0b110, Ordering::Relaxed));
            let all = if length == 0 { !0 } else { 0b110 };
            assert_eq!(common(slots), Entry(all));
            for slot in slots {
                slot.store(0b011, Ordering::Relaxed);
                assert_eq!(common(slots), Entry(if length == 1 { 0b011 } else { 0b010 }));
                slot.store(0b110, Ordering::Relaxed);
            }
        }
    }
}
