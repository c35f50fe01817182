//! The rules for merging VMAs, as on Linux.

use super::vma::{Piece, Vma};
use crate::addr::VirtRange;
use crate::rmap::AnonVma;
use crate::space::tree::View;
use crate::sync::mutant::{Mutant, lost};

/// A VMA that extends beyond a range, or is adjacent to it.
#[derive(Clone, Copy)]
pub(super) struct Neighbour<'a> {
    pub(super) vma: &'a Vma,
    pub(super) root: Option<AnonVma>,
}

impl<'a> Neighbour<'a> {
    pub(super) fn new(vma: &'a Vma) -> Self {
        Self { vma, root: vma.anon_vma.get() }
    }
}

/// Returns whether VMAs with these two anon_vmas may merge. A VMA without an anon_vma takes the
/// other's, unless this was inherited from a parent process: sharing it more widely would make
/// reverse-map walks longer.
pub(super) fn roots_merge(a: Option<AnonVma>, b: Option<AnonVma>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(root), None) | (None, Some(root)) => !root.is_inherited(),
        (Some(a), Some(b)) => a == b,
    }
}

/// Returns which of `below` and `above` merge with `piece`; both must be adjacent to `piece` and
/// agree with it. The lower one, if only one can merge. With `adopt`, `piece` takes their anon_vma.
#[inline(always)]
pub(super) fn join(
    piece: &mut Piece,
    below: Option<&Vma>,
    above: Option<&Vma>,
    adopt: bool,
) -> [bool; 2] {
    let own = piece.root;
    let of_lower = below.map(|vma| vma.anon_vma.get()).filter(|of| roots_merge(*of, own));
    let of_upper = above
        .map(|vma| vma.anon_vma.get())
        .filter(|of| roots_merge(*of, own) && of_lower.is_none_or(|lower| roots_merge(lower, *of)));
    let joins = [of_lower.is_some(), of_upper.is_some()];
    if own.is_none() && adopt {
        piece.root = of_lower.flatten().or(of_upper.flatten());
    }
    joins
}

/// Returns whether two VMAs, the first directly below the second, will merge when neither is under
/// change: their merge was deferred.
pub(super) fn merge_later(lower: &Vma, upper: &Vma) -> bool {
    let at = upper.start();
    (lower.merges.above() || upper.merges.below())
        && lower.end() == at
        && lower.attributes.agree(&upper.attributes)
        && roots_merge(lower.anon_vma.get(), upper.anon_vma.get())
}

/// Iterates over all VMAs that will merge with `vma` in `view`: first the VMAs below, downwards,
/// and then the VMAs above.
fn one_later<'v>(view: View<'v, Vma>, vma: &'v Vma) -> impl Iterator<Item = &'v Vma> {
    let near = move |addr| view.at(addr).map(|entry| entry.get());
    let above = move |vma: &&'v Vma| near(vma.end()).filter(|above| merge_later(vma, above));
    let below = move |vma: &&'v Vma| {
        let addr = vma.start().checked_sub(1)?;
        near(addr).filter(|below| merge_later(below, vma))
    };
    core::iter::successors(below(&vma), below).chain(core::iter::successors(above(&vma), above))
}

/// Returns the range of the VMA that `vma` of `view` will merge into: the whole range already
/// counts as one VMA.
pub(super) fn range_later(view: View<'_, Vma>, vma: &Vma) -> VirtRange {
    one_later(view, vma).fold(vma.range(), |all, vma| all.hull(vma.range()))
}

/// Returns whether a VMA under change in `view` will merge with `vma`.
pub(crate) fn joins_a_change(view: View<'_, Vma>, vma: &Vma) -> bool {
    one_later(view, vma).any(|vma| vma.sequence.read().is_none())
}

/// Iterates over `vma` of `view`, and all VMAs that will merge with it.
fn group<'v>(view: View<'v, Vma>, vma: &'v Vma) -> impl Iterator<Item = &'v Vma> {
    core::iter::once(vma).chain(one_later(view, vma))
}

/// Prevents faults from making an anon_vma for `vma` of `view` and the VMAs that will merge with
/// it, so that a step can read an existing anon_vma, and sets it in all of them. The caller holds
/// the lock of the tree, or of the shard with these VMAs, until [`unseal_group`].
#[cold]
pub(super) fn seal_group(view: View<'_, Vma>, vma: &Vma) {
    // A VMA under change was sealed by its writer.
    let running = group(view, vma).filter(|vma| vma.sequence.read().is_some());
    running.filter(|_| !lost(Mutant::SealsGroup)).for_each(|vma| vma.anon_vma.seal());
    if let Some(root) = group(view, vma).find_map(|vma| vma.anon_vma.get()) {
        group(view, vma).for_each(|vma| vma.anon_vma.give(root));
    }
}

/// Sets the anon_vma `root`, if there is one, in the [sealed](seal_group) VMAs, as if they had
/// already merged with the new VMA.
#[cold]
pub(super) fn unseal_group(view: View<'_, Vma>, vma: &Vma, root: Option<AnonVma>) {
    for vma in group(view, vma) {
        if let Some(root) = root {
            vma.anon_vma.give(root);
        }
        if vma.sequence.read().is_some() {
            vma.anon_vma.unseal();
        }
    }
}

/// Returns the anon_vma of a neighbour in `view` that the VMA `own` might merge with later, the
/// upper neighbour first. An anon_vma inherited from a parent process stays with its VMA.
pub(crate) fn mergeable_anon_vma(view: &View<'_, Vma>, own: &Vma) -> Option<AnonVma> {
    let (start, end) = (own.start(), own.end());
    let above = view.at(end).map(|above| above.get());
    let below = view.before(start).map(|below| below.get()).filter(|below| below.end() == start);
    [above, below]
        .into_iter()
        .flatten()
        .filter(|near| near.attributes.resemble(&own.attributes) && near.is_private())
        .find_map(|near| near.anon_vma.get().filter(|root| !root.is_inherited()))
}
