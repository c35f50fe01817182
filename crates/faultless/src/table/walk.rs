//! The walk of one address, without a lock: from the root to its last-level table.
//!
//! *Tables outlive walkers:* a table is unlinked only while every VMA over its span is being
//! written, and its frame is freed after a grace period. So a walker in a grace section may be in
//! an unlinked table. An entry installed there is rejected by the sequence of the VMA, which was
//! made odd before the table was unlinked.

use super::format::Entry;
use super::node::{self, ENTRIES, LAST, ROOT};
use crate::addr::FrameNumber;
use crate::machine::Machine;
use crate::sync::atomic::AtomicU64;

/// The result of a walk.
#[derive(Debug)]
pub enum Reached<'a> {
    /// The last-level table.
    Last(&'a [AtomicU64; ENTRIES]),
    /// An entry of `level` (above [`LAST`]) that points to no table. `seen` is none, busy or a huge
    /// leaf.
    Above {
        /// The entry.
        slot: &'a AtomicU64,
        /// The level of the table that contains the entry.
        level: u32,
        /// The value of the entry.
        seen: Entry,
    },
}

/// Returns the entry of `addr` in its table of `level`, if the table exists.
///
/// # Safety
/// As [`descend`].
pub unsafe fn slot_of<M: Machine>(
    machine: &M,
    root: FrameNumber,
    addr: u64,
    level: u32,
) -> Option<&AtomicU64> {
    let mut table = root;
    for above in (level + 1..=ROOT).rev() {
        // SAFETY: `table` was reached from the root inside the caller's section or lock.
        let seen = node::load(unsafe { node::slot(machine, table, addr, above) });
        if !seen.is_table() {
            return None;
        }
        table = seen.frame();
    }
    // SAFETY: as above.
    Some(unsafe { node::slot(machine, table, addr, level) })
}

/// Walks to the last-level table of `addr`.
///
/// # Safety
/// `root` is the root table of a live space, and the caller is in a grace section or holds the
/// range lock over `addr` while it uses the result.
#[inline(always)]
pub unsafe fn descend<M: Machine>(machine: &M, root: FrameNumber, addr: u64) -> Reached<'_> {
    // SAFETY: the caller's promise.
    unsafe { descend_from(machine, root, ROOT, addr) }
}

/// As [`descend`], from `table` of `level`, whose span contains `addr`.
///
/// # Safety
/// As [`descend`].
#[inline(always)]
pub unsafe fn descend_from<M: Machine>(
    machine: &M,
    mut table: FrameNumber,
    mut level: u32,
    addr: u64,
) -> Reached<'_> {
    while level > LAST {
        // SAFETY: `table` was reached from the root inside the caller's section or lock.
        let slot = unsafe { node::slot(machine, table, addr, level) };
        let seen = node::load(slot);
        if !seen.is_table() {
            return Reached::Above { slot, level, seen };
        }
        table = seen.frame();
        level -= 1;
    }
    // SAFETY: as above.
    Reached::Last(unsafe { node::entries(machine, table) })
}
