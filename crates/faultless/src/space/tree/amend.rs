//! A change of the present version itself, while no other CPU reads the tree.

use super::node::{Extent, Node, Slot, Slots};
use super::path::{Fit, Path};
use crate::addr::VirtRange;
use core::ptr::NonNull;

/// Removes every entry below `root` that overlaps `range`, of which it tells `gone`, and inserts `new` there, if all of that is in
/// one leaf, which is neither to be split nor joined. Returns whether it did: else nothing has changed.
///
/// # Safety
/// `root` leads to a version that is not read meanwhile, and to which no reference is left.
#[inline(always)]
pub(super) unsafe fn amend(
    root: NonNull<Node>,
    range: VirtRange,
    new: impl Slots,
    mut gone: impl FnMut(Slot),
) -> bool {
    let mut path = Path::new();
    path.lead(root, range.start);
    let (leaf, first) = (path.node(0), path.at(0));
    let mut end = first;
    while leaf.keys().0.get(end).is_some_and(|start| *start < range.end) {
        end += 1;
    }
    let ends_here = end < leaf.count() || path.above >= range.end;
    let (removed, added) = (end - first, new.len());
    let count = leaf.count() - removed + added;
    if !ends_here || count == 0 || !matches!(path.fit(0, count), Fit::Stays) {
        return false;
    }
    let (mut less, more) = (Extent { entries: removed, bytes: 0 }, new.extent());
    for at in first..end {
        let slot = leaf.slot(at);
        less.bytes += slot.end - slot.start;
        gone(slot);
    }

    let mut this = path.step(0).node;
    // SAFETY: no other CPU reads the nodes, and no other reference is in use.
    unsafe { this.as_mut() }.splice(first, removed, new);
    // What is said of it above.
    for level in 1..=path.top {
        // SAFETY: as above, one node after the other.
        let slot = unsafe { this.as_ref() }.summary(this);
        this = path.step(level).node;
        // SAFETY: as above.
        unsafe { this.as_mut() }.set(path.at(level), slot);
    }
    // SAFETY: as above.
    let root = unsafe { this.as_mut() };
    root.crown(root.extent().change(less, more));
    true
}
