//! Which VMAs merge, by Linux's rules.

use super::vma::{Area, Vma, VmaFlags};
use crate::addr::VirtRange;
use crate::rmap::{AnonVmaRef, SharedAnonVma};
use crate::space::tree::{Entry, View};
use crate::sync::mutant::{Mutant, lost};

/// A VMA to be made.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) area: Area,
    pub(super) root: Option<SharedAnonVma>,
}

/// A VMA that extends beyond a range, or is adjacent to it.
#[derive(Clone, Copy)]
pub(super) struct Neighbour<'a> {
    pub(super) vma: &'a Vma,
    pub(super) root: Option<AnonVmaRef<'a>>,
}

impl<'a> Neighbour<'a> {
    pub(super) fn new(vma: &'a Vma) -> Self {
        Self { vma, root: vma.anon_vma.peek() }
    }
}

/// Whether VMAs with these two anon_vmas may merge. A VMA without an anon_vma takes the other's, unless
/// that was inherited from a parent process: sharing it more widely would make reverse-map walks longer.
pub(super) fn roots_merge(a: Option<AnonVmaRef<'_>>, b: Option<AnonVmaRef<'_>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(root), None) | (None, Some(root)) => !root.anon_vma().is_inherited(),
        (Some(a), Some(b)) => a.id() == b.id(),
    }
}

/// Which of `below` and `above` merge with `piece`; both must be adjacent to it and agree with it. The lower one, if only one can merge.
/// With `adopt`, `piece` takes their anon_vma.
#[inline(always)]
pub(super) fn join(
    piece: &mut Piece,
    below: Option<&Vma>,
    above: Option<&Vma>,
    adopt: bool,
) -> [bool; 2] {
    let own = piece.root.as_ref().map(AnonVmaRef::of);
    let of_lower = below.map(|vma| vma.anon_vma.peek()).filter(|of| roots_merge(*of, own));
    let of_upper = above
        .map(|vma| vma.anon_vma.peek())
        .filter(|of| roots_merge(*of, own) && of_lower.is_none_or(|lower| roots_merge(lower, *of)));
    let joins = [of_lower.is_some(), of_upper.is_some()];
    if own.is_none() && adopt {
        piece.root = of_lower.flatten().or(of_upper.flatten()).map(AnonVmaRef::get);
    }
    joins
}

/// Whether two VMAs, the first directly below the second, merge once neither is under change: their merge was deferred.
pub(super) fn merge_later(lower: &Vma, upper: &Vma) -> bool {
    let at = upper.area.range.start;
    (lower.merges.above() || upper.merges.below())
        && lower.area.range.end == at
        && agree(&lower.area, &upper.area, at)
        && roots_merge(lower.anon_vma.peek(), upper.anon_vma.peek())
}

/// All VMAs that will merge with `vma` in `view`: those below, from it downwards, and then those above.
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

/// The range of the VMA that `vma` of `view` will merge into: all of it counts as one VMA already.
pub(super) fn range_later(view: View<'_, Vma>, vma: &Vma) -> VirtRange {
    one_later(view, vma).fold(vma.area.range, |all, vma| all.hull(vma.area.range))
}

/// Whether a VMA under change in `view` will merge with `vma`.
pub(crate) fn joins_a_change(view: View<'_, Vma>, vma: &Vma) -> bool {
    one_later(view, vma).any(|vma| vma.sequence.read().is_none())
}

/// `vma` of `view`, and all VMAs that will merge with it.
fn group<'v>(view: View<'v, Vma>, vma: &'v Vma) -> impl Iterator<Item = &'v Vma> {
    core::iter::once(vma).chain(one_later(view, vma))
}

/// Keeps faults from making an anon_vma for `vma` of `view` and the VMAs that will merge with it, so that a step can read which
/// one exists, and sets that one in all of them. The caller holds the lock of the tree, or of the shard that has them, until
/// [`unseal_group`].
#[cold]
pub(super) fn seal_group(view: View<'_, Vma>, vma: &Vma) {
    // Its writer has sealed a VMA under change.
    let running = group(view, vma).filter(|vma| vma.sequence.read().is_some());
    running.filter(|_| !lost(Mutant::SealsGroup)).for_each(|vma| vma.anon_vma.seal());
    if let Some(root) = group(view, vma).find_map(|vma| vma.anon_vma.peek()) {
        group(view, vma).for_each(|vma| vma.anon_vma.give(root));
    }
}

/// Sets the anon_vma `root`, if there is one, in the [sealed](seal_group) VMAs, as if they had merged with the new VMA already.
#[cold]
pub(super) fn unseal_group(view: View<'_, Vma>, vma: &Vma, root: Option<AnonVmaRef<'_>>) {
    for vma in group(view, vma) {
        if let Some(root) = root {
            vma.anon_vma.give(root);
        }
        if vma.sequence.read().is_some() {
            vma.anon_vma.unseal();
        }
    }
}

/// Whether two areas that touch at `at` may be in one VMA.
pub(super) fn agree(a: &Area, b: &Area, at: u64) -> bool {
    a.prot == b.prot && a.agrees(b, at)
}

/// The root of a neighbour in `view` that a VMA of `own` might merge with one day, the upper one first. A
/// root that came from a parent process stays with the VMA that has it.
pub(crate) fn mergeable_anon_vma(view: &View<'_, Vma>, own: &Area) -> Option<SharedAnonVma> {
    // SAFETY: VMAs in a view live as long as its section.
    let vma = |entry: Entry<Vma>| unsafe { entry.value.as_ref() };
    let above = view.at(own.range.end).map(vma).filter(|next| own.resembles(&next.area));
    let below =
        view.before(own.range.start).map(vma).filter(|previous| previous.area.resembles(own));
    [above, below]
        .into_iter()
        .flatten()
        .filter(|near| !near.area.flags.contains(VmaFlags::SHARED))
        .find_map(|near| near.anon_vma.get().filter(|root| !root.is_inherited()))
}
