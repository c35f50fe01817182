//! Which VMAs are one, as Linux has it.

use super::vma::{Area, Vma};
use crate::rmap::{Root, RootRef};
use crate::space::tree::View;

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

/// Whether two VMAs, the first right below the second, are one once neither is under change: that they merge was put off.
pub(super) fn merge_later(lower: &Vma, upper: &Vma) -> bool {
    let at = upper.area.range.start;
    (lower.merges[1] || upper.merges[0])
        && lower.area.range.end == at
        && agree(&lower.area, &upper.area, at)
        && roots_merge(lower.root.peek(), upper.root.peek())
}

/// Whether something that is under change in `view` will be one with `vma`.
pub(crate) fn joins_a_change(view: &View<'_, Vma>, vma: &Vma) -> bool {
    // SAFETY: VMAs in a view live as long as its section.
    let near = |addr| view.at(addr).map(|entry| unsafe { entry.value.as_ref() });
    let changing = |vma: &Vma| vma.sequence.read().is_none();
    let above = |vma: &Vma| near(vma.area.range.end).filter(|above| merge_later(vma, above));
    let below = |vma: &Vma| {
        let addr = vma.area.range.start.checked_sub(1)?;
        near(addr).filter(|below| merge_later(below, vma))
    };
    core::iter::successors(above(vma), |vma| above(vma)).any(changing)
        || core::iter::successors(below(vma), |vma| below(vma)).any(changing)
}

/// Whether two areas that meet at `at` may be in one VMA.
pub(super) fn agree(a: &Area, b: &Area, at: u64) -> bool {
    a.prot == b.prot && a.agrees(b, at)
}
