//! Splitting and merging, as Linux does it.

use super::vma::{Area, Vma};
use super::write::{NewVmas, Writing};
use crate::addr::VirtRange;
use crate::error::{Errno, OutOfMemory};
use crate::machine::Machine;
use crate::rmap::{Root, RootRef};
use crate::space::tree::View;
use crate::sync::sequence::Sequence;

/// A VMA in the making.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) area: Area,
    pub(super) root: Option<Root>,
}

/// VMAs to be put in the place of all that overlap a range, which lie wholly inside it.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) taken: VirtRange,
    pub(super) new: NewVmas,
}

/// A VMA that sticks out of a range, or touches it.
#[derive(Clone, Copy)]
struct Beside<'a> {
    vma: &'a Vma,
    /// Whether it might be one with what comes into the range, but for their anon_vmas.
    like: bool,
    root: Option<RootRef<'a>>,
}

impl<'a> Beside<'a> {
    fn new((vma, like): (&'a Vma, bool)) -> Self {
        Self { vma, like, root: vma.root.peek() }
    }
}

/// Whether pages under the two roots may be in one VMA. One without a root takes the other's, unless
/// that came from a parent process: sharing it more widely would make reverse walks longer.
fn roots_merge(a: Option<RootRef<'_>>, b: Option<RootRef<'_>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(root), None) | (None, Some(root)) => !root.anon_vma().is_inherited(),
        (Some(a), Some(b)) => a.id() == b.id(),
    }
}

/// Whether two areas that meet at `at` may be in one VMA.
fn agree(a: &Area, b: &Area, at: u64) -> bool {
    a.prot == b.prot && a.agrees(b, at)
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Puts `middle` (or nothing) in the place of `range`, keeping what the VMAs there have outside
    /// of it, and merging with what is next to it where that is possible. The entries are left to
    /// the caller; everything involved is stopped until the writer finishes.
    ///
    /// # Errors
    /// `ENOMEM`; nothing has changed.
    pub(super) fn put(&self, range: VirtRange, middle: Option<Piece>) -> Result<(), Errno> {
        let Plan { taken, new } = self.plan(&self.view(), range, middle)?;
        self.replace(taken, new)
    }

    /// What [`put`](Self::put) would replace in `view`, the tree or what is to become of it, and by
    /// what.
    #[inline(always)]
    pub(super) fn plan(
        &self,
        view: &View<'_, Vma>,
        range: VirtRange,
        middle: Option<Piece>,
    ) -> Result<Plan, OutOfMemory> {
        // What sticks out at either end, or is next to it and like what comes there.
        let (mut below, mut above) = (None, None);
        let like =
            |vma: &Vma, at| middle.as_ref().is_some_and(|new| agree(&vma.area, &new.area, at));
        let mut near = view.iter_from(range.start.saturating_sub(1));
        while let Some(entry) = near.next()
            && entry.start <= range.end
        {
            let (vma, own) = (self.vma(entry), entry.range());
            let (low, high) = (own.start < range.start, own.end > range.end);
            let like_low = low && like(vma, range.start);
            let like_high = high && like(vma, range.end);
            if (own.end == range.start && !like_low) || (own.start == range.end && !like_high) {
                continue;
            }
            if low {
                below = Some((vma, like_low));
            }
            if high {
                above = Some((vma, like_high));
            }
            self.stop_one(vma);
        }
        Sequence::writer_fence();
        let (mut below, mut above) = (below.map(Beside::new), above.map(Beside::new));

        let mut taken = range;
        let mut new: NewVmas = [None, None, None];
        if let Some(Piece { mut area, mut root }) = middle {
            let own = root.as_ref().map(RootRef::of);
            let lower = below.take_if(|lower| lower.like && roots_merge(lower.root, own));
            let upper = above.take_if(|upper| {
                upper.like
                    && roots_merge(upper.root, own)
                    && lower.is_none_or(|lower| roots_merge(lower.root, upper.root))
            });
            if let Some(Beside { vma, root: of_lower, .. }) = lower {
                area.offset = vma.area.offset;
                area.range.start = vma.area.range.start;
                root = root.or_else(|| of_lower.map(RootRef::get));
            }
            if let Some(Beside { vma, root: of_upper, .. }) = upper {
                area.range.end = vma.area.range.end;
                root = root.or_else(|| of_upper.map(RootRef::get));
            }
            taken = area.range;
            new[1] = Some(self.make(area, root)?);
        }
        let rests =
            [(below, VirtRange::new(0, range.start)), (above, VirtRange::new(range.end, u64::MAX))];
        for (slot, (beside, outside)) in [0, 2].into_iter().zip(rests) {
            // Not those that are merely next to the range.
            let split = beside.filter(|beside| beside.vma.area.range.overlaps(range));
            if let Some(Beside { vma, root, .. }) = split {
                taken = taken.hull(vma.area.range);
                new[slot] = Some(self.make(vma.area.part(outside), root.map(RootRef::get))?);
            }
        }
        Ok(Plan { taken, new })
    }
}
