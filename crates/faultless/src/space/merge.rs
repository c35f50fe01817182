//! Which VMAs are one, as Linux has it.

use super::vma::{Area, Vma};
use crate::addr::VirtRange;
use crate::rmap::{Root, RootRef};
use crate::space::tree::View;
use crate::sync::mutant::{Mutant, lost};

/// A VMA in the making.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) area: Area,
    pub(super) root: Option<Root>,
}

/// A VMA that sticks out of a range, or touches it.
#[derive(Clone, Copy)]
pub(super) struct Neighbour<'a> {
    pub(super) vma: &'a Vma,
    pub(super) root: Option<RootRef<'a>>,
}

impl<'a> Neighbour<'a> {
    pub(super) fn new(vma: &'a Vma) -> Self {
        Self { vma, root: vma.root.peek() }
    }
}

/// Whether pages under the two roots may be in one VMA. One without a root takes the other's, unless
/// that came from a parent process: sharing it more widely would make reverse walks longer.
pub(super) fn roots_merge(a: Option<RootRef<'_>>, b: Option<RootRef<'_>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(root), None) | (None, Some(root)) => !root.anon_vma().is_inherited(),
        (Some(a), Some(b)) => a.id() == b.id(),
    }
}

/// Which of `below` and `above`, which are like `piece` and next to it, are one with it. The lower one, where only one can be.
/// If it is to `adopt` a root, `piece` has theirs then.
#[inline(always)]
pub(super) fn join(
    piece: &mut Piece,
    below: Option<&Vma>,
    above: Option<&Vma>,
    adopt: bool,
) -> [bool; 2] {
    let own = piece.root.as_ref().map(RootRef::of);
    let of_lower = below.map(|vma| vma.root.peek()).filter(|of| roots_merge(*of, own));
    let of_upper = above
        .map(|vma| vma.root.peek())
        .filter(|of| roots_merge(*of, own) && of_lower.is_none_or(|lower| roots_merge(lower, *of)));
    let joins = [of_lower.is_some(), of_upper.is_some()];
    if own.is_none() && adopt {
        piece.root = of_lower.flatten().or(of_upper.flatten()).map(RootRef::get);
    }
    joins
}

/// Whether two VMAs, the first right below the second, are one once neither is under change: that they merge was put off.
pub(super) fn merge_later(lower: &Vma, upper: &Vma) -> bool {
    let at = upper.area.range.start;
    (lower.merges[1] || upper.merges[0])
        && lower.area.range.end == at
        && agree(&lower.area, &upper.area, at)
        && roots_merge(lower.root.peek(), upper.root.peek())
}

/// All that will be one with `vma` in `view`: those below, from it downwards, and then those above.
fn one_later<'v>(view: View<'v, Vma>, vma: &'v Vma) -> impl Iterator<Item = &'v Vma> {
    // SAFETY: VMAs in a view live as long as its section.
    let near = move |addr| view.at(addr).map(|entry| unsafe { entry.value.as_ref() });
    let above =
        move |vma: &&'v Vma| near(vma.area.range.end).filter(|above| merge_later(vma, above));
    let below = move |vma: &&'v Vma| {
        let addr = vma.area.range.start.checked_sub(1)?;
        near(addr).filter(|below| merge_later(below, vma))
    };
    core::iter::successors(below(&vma), below).chain(core::iter::successors(above(&vma), above))
}

/// Where the VMA will lie that `vma` of `view` is to be a part of: all of that counts as one already.
pub(super) fn range_later(view: View<'_, Vma>, vma: &Vma) -> VirtRange {
    one_later(view, vma).fold(vma.area.range, |all, vma| all.hull(vma.area.range))
}

/// Whether something that is under change in `view` will be one with `vma`.
pub(crate) fn joins_a_change(view: View<'_, Vma>, vma: &Vma) -> bool {
    one_later(view, vma).any(|vma| vma.sequence.read().is_none())
}

/// `vma` of `view`, and all that will be one with it.
fn group<'v>(view: View<'v, Vma>, vma: &'v Vma) -> impl Iterator<Item = &'v Vma> {
    core::iter::once(vma).chain(one_later(view, vma))
}

/// Keeps faults from making an anon_vma for what will be one with `vma` of `view`, so that a step finds which there is. All
/// of it has that one, then. Under the lock of the tree, until [`unseal_group`].
#[cold]
pub(super) fn seal_group(view: View<'_, Vma>, vma: &Vma) {
    // What is under change is sealed by its writer.
    let running = group(view, vma).filter(|vma| vma.sequence.read().is_some());
    running.filter(|_| !lost(Mutant::SealsGroup)).for_each(|vma| vma.root.seal());
    if let Some(root) = group(view, vma).find_map(|vma| vma.root.peek()) {
        group(view, vma).for_each(|vma| vma.root.give(root));
    }
}

/// Gives `root`, if there is one, to what was [sealed](seal_group), as if it were one with what comes beside it already.
#[cold]
pub(super) fn unseal_group(view: View<'_, Vma>, vma: &Vma, root: Option<RootRef<'_>>) {
    for vma in group(view, vma) {
        if let Some(root) = root {
            vma.root.give(root);
        }
        if vma.sequence.read().is_some() {
            vma.root.unseal();
        }
    }
}

/// Whether two areas that meet at `at` may be in one VMA.
pub(super) fn agree(a: &Area, b: &Area, at: u64) -> bool {
    a.prot == b.prot && a.agrees(b, at)
}
