//! Operations on all entries of a range, table by table, so that a batch of neighbouring entries
//! costs one walk.

use super::format::Entry;
use super::node::{self, ENTRIES, LAST, ROOT};
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::machine::Machine;
use crate::sync::atomic::AtomicU64;
use crate::sync::wait::Wait;
use crate::table::protocol;

/// Leaf entries found by a visit.
#[derive(Debug)]
pub enum Leaves<'a> {
    /// Neighbouring entries of one last-level table, for the pages from `start` upwards.
    Pages {
        /// Address of the first entry's page.
        start: u64,
        /// The entries.
        slots: &'a [AtomicU64],
    },
    /// A huge leaf, of the pages from `start` upwards.
    Huge {
        /// Address of its first page.
        start: u64,
        /// The entry, above the last level.
        slot: &'a AtomicU64,
        /// Whether the range covers all of its pages.
        whole: bool,
    },
}

/// Visits the leaf entries in `range` for which tables exist, table by table, in ascending order,
/// until `visit` returns an error. Waits, as `wait` does, for faults that are publishing a table
/// there. If `visit` splits a huge leaf, the new table is visited next.
///
/// # Errors
/// The error returned by `visit`.
///
/// # Panics
/// Builds with debug assertions: if `range` does not consist of whole pages.
///
/// # Safety
/// `root` is the root of a live space whose tables over `range` cannot be unlinked during the call:
/// the caller holds the range lock over it, or is in a grace section.
#[inline]
pub unsafe fn visit<'m, M: Machine, E>(
    machine: &'m M,
    root: FrameNumber,
    range: VirtRange,
    wait: &impl Wait,
    visit: impl FnMut(Leaves<'m>) -> Result<(), E>,
) -> Result<(), E> {
    // A caller's range may extend beyond user space, where no page is mapped and the tables belong
    // to the kernel.
    let range = range.intersect(VirtRange::USER);
    // SAFETY: the caller's promise.
    unsafe { visit_from(machine, root, ROOT, range, wait, visit) }
}

/// As [`visit`], from a table `root` of level `top` whose span contains all of `range`.
///
/// # Errors
/// The error returned by `visit`.
///
/// # Safety
/// As [`visit`].
#[inline]
pub unsafe fn visit_from<'m, M: Machine, E>(
    machine: &'m M,
    root: FrameNumber,
    top: u32,
    range: VirtRange,
    wait: &impl Wait,
    mut visit: impl FnMut(Leaves<'m>) -> Result<(), E>,
) -> Result<(), E> {
    // With a partial page the loop would never end, because a part of a page has no entry.
    debug_assert!(
        (range.start | range.end).is_multiple_of(PAGE_SIZE),
        "{range:?} is not of whole pages"
    );
    let (mut addr, mut met) = (range.start, None);
    while addr < range.end {
        let mut table = root;
        let mut level = top;
        loop {
            let span = node::entry_span(level);
            // SAFETY: reached from the root under the caller's lock or section.
            let slots = unsafe { node::entries(machine, table) };
            let at = node::index(addr, level);
            let leaves = if level == LAST {
                let start = addr;
                let pages = ((range.end - start) / PAGE_SIZE).min((ENTRIES - at) as u64);
                addr += pages * PAGE_SIZE;
                Leaves::Pages { start, slots: &slots[at..at + pages as usize] }
            } else {
                // Wait for a fault that is publishing a table: the fault may have validated its
                // ticket before a writer stopped the VMA, and the writer must see the table.
                let seen = protocol::wait_and_load(&slots[at], wait);
                if seen.is_table() {
                    table = seen.frame();
                    level -= 1;
                    continue;
                }
                let start = addr & !(span - 1);
                if !seen.is_mapped() || met == Some(start) {
                    // There is no table below, or a huge leaf that was visited. A fault that takes
                    // the entry from now on finds its VMA stopped, if the caller has stopped the
                    // VMA, and reverts. Large ranges are often empty, so neighbouring entries are
                    // checked without another walk.
                    let rest = ((range.end - start - 1) / span).min((ENTRIES - 1 - at) as u64);
                    let empty = slots[at + 1..=at + rest as usize].iter();
                    let empty = empty.take_while(|slot| node::load(slot).is_none()).count() as u64;
                    addr = start + (1 + empty) * span;
                    break;
                }
                met = Some(start);
                let whole = range.covers(VirtRange { start, end: start + span });
                Leaves::Huge { start, slot: &slots[at], whole }
            };
            visit(leaves)?;
            break;
        }
    }
    Ok(())
}

/// Unlinks every table whose whole span lies in `hull`, and passes the frame and level of each to
/// `retire`, which frees the table after a grace period.
///
/// # Safety
/// The caller holds the range lock over `hull`, no VMA is left in it, and its last-level entries
/// are clear.
pub unsafe fn prune<M: Machine>(
    machine: &M,
    root: FrameNumber,
    hull: VirtRange,
    wait: &impl Wait,
    retire: &mut impl FnMut(FrameNumber, u32),
) {
    // SAFETY: the caller's promise.
    unsafe { prune_below(machine, root, ROOT, 0, hull, wait, retire) }
}

/// [`prune`] for the entries of one table of `level` that starts at `base`.
///
/// # Safety
/// As [`prune`]; `table` was reached from the root.
unsafe fn prune_below<M: Machine>(
    machine: &M,
    table: FrameNumber,
    level: u32,
    base: u64,
    hull: VirtRange,
    wait: &impl Wait,
    retire: &mut impl FnMut(FrameNumber, u32),
) {
    let span = node::entry_span(level);
    let here = VirtRange { start: base, end: base + node::table_span(level) }.intersect(hull);
    if here.is_empty() {
        return;
    }
    // SAFETY: reached from the root under the range lock.
    let slots = unsafe { node::entries(machine, table) };
    let first = node::index(here.start, level);
    let last = node::index(here.end - 1, level);
    for (at, slot) in slots.iter().enumerate().take(last + 1).skip(first) {
        let start = base + at as u64 * span;
        let whole = hull.covers(VirtRange { start, end: start + span });
        if !whole {
            let seen = node::load(slot);
            if seen.is_table() && level - 1 > LAST {
                // SAFETY: the table below is linked, and only this CPU could unlink it.
                unsafe { prune_below(machine, seen.frame(), level - 1, start, hull, wait, retire) };
            }
            continue;
        }
        if node::load(slot).is_none() {
            continue;
        }
        // A busy entry belongs to a fault that is publishing a table for a VMA which is already
        // detached: it reverts.
        let (old, _) = protocol::wait_and_replace(slot, wait, |_| Entry::NONE);
        if old.is_table() {
            // SAFETY: unlinked just now, and freed by `retire` after a grace period at the
            // earliest.
            unsafe { each_table(machine, old.frame(), level - 1, wait, retire) };
        }
    }
}

/// Passes every table below `table`, and `table` itself, to `retire`.
///
/// # Safety
/// `table`, of `level`, is unlinked, and no VMA is left over its span; no table is freed before
/// this returns.
unsafe fn each_table<M: Machine>(
    machine: &M,
    table: FrameNumber,
    level: u32,
    wait: &impl Wait,
    retire: &mut impl FnMut(FrameNumber, u32),
) {
    if level > LAST {
        // SAFETY: the caller's promise.
        for slot in unsafe { node::entries(machine, table) } {
            // A busy entry belongs to a fault that is publishing a table for a VMA which is already
            // detached: it reverts.
            let seen = if node::load(slot).is_none() {
                Entry::NONE
            } else {
                protocol::wait_and_load(slot, wait)
            };
            if seen.is_table() {
                // SAFETY: reached only through `table`.
                unsafe { each_table(machine, seen.frame(), level - 1, wait, retire) };
            }
        }
    }
    retire(table, level);
}

/// Passes every table below `table`, and `table` itself, to `free`.
///
/// # Safety
/// No other CPU can reach `table`: it was unlinked a grace period ago, or its space is gone.
pub unsafe fn free_all<M: Machine>(
    machine: &M,
    table: FrameNumber,
    level: u32,
    free: &mut impl FnMut(FrameNumber),
) {
    if level > LAST {
        // SAFETY: no other CPU can reach the table.
        for slot in unsafe { node::user_entries(machine, table, level) } {
            let seen = node::load(slot);
            if seen.is_table() {
                // SAFETY: reachable only through `table`.
                unsafe { free_all(machine, seen.frame(), level - 1, free) };
            }
        }
    }
    free(table);
}
