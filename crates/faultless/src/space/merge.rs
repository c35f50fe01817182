//! Splitting and merging, as Linux does it.

use super::vma::{Area, Vma};
use super::write::{NewVmas, Writing};
use crate::addr::VirtRange;
use crate::error::{Errno, OutOfMemory};
use crate::machine::Machine;
use crate::rmap::Root;

/// A VMA in the making.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) area: Area,
    pub(super) root: Option<Root>,
}

impl Piece {
    /// The part of a stopped `vma` inside `range`, if there is one. Its root is final: no fault
    /// makes a page under another any more.
    pub(super) fn of(vma: &Vma, range: VirtRange) -> Option<Self> {
        vma.area
            .range
            .overlaps(range)
            .then(|| Self { area: vma.area.part(range), root: vma.root.get() })
    }

    /// Whether this piece and `next`, right above it, may be one VMA.
    fn joins(&self, next: &Self) -> bool {
        self.area.continues_into(&next.area) && roots_merge(self.root.as_ref(), next.root.as_ref())
    }
}

/// Whether pages under the two roots may be in one VMA. One without a root takes the other's, unless
/// that came from a parent process: sharing it more widely would make reverse walks longer.
fn roots_merge(a: Option<&Root>, b: Option<&Root>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(root), None) | (None, Some(root)) => !root.is_inherited(),
        (Some(a), Some(b)) => a.same(b),
    }
}

/// `middle` joined with what is directly below and above it, where that is possible; what was joined
/// is taken out of its place.
fn join(mut middle: Piece, below: &mut Option<Piece>, above: &mut Option<Piece>) -> Piece {
    let left = below.take_if(|below| below.joins(&middle));
    let right = above.take_if(|above| {
        middle.joins(above)
            && left.as_ref().is_none_or(|l| roots_merge(l.root.as_ref(), above.root.as_ref()))
    });
    for part in [&left, &right].into_iter().flatten() {
        middle.area.range = middle.area.range.hull(part.area.range);
        middle.root = middle.root.or_else(|| part.root.clone());
    }
    if let Some(left) = left {
        middle.area.offset = left.area.offset;
    }
    middle
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Puts `middle` (or nothing) in the place of `range`, keeping what the VMAs there have outside
    /// of it, and merging with what is next to it where that is possible. The entries are left to
    /// the caller; everything involved is stopped until the writer finishes.
    ///
    /// # Errors
    /// `ENOMEM`; nothing has changed.
    pub(super) fn put(&self, range: VirtRange, middle: Option<Piece>) -> Result<(), Errno> {
        self.stop(range);
        let first = self.vma_at(range.start);
        let last = self.vma_at(range.end - 1);
        let mut left = first.and_then(|vma| Piece::of(vma, VirtRange::new(0, range.start)));
        let mut right = last.and_then(|vma| Piece::of(vma, VirtRange::new(range.end, u64::MAX)));
        let mut taken = [first, last]
            .into_iter()
            .flatten()
            .fold(range, |taken, vma| taken.hull(vma.area.range));
        let middle = middle.map(|middle| {
            // Where no rest is left, the neighbour itself may be joined, and is replaced then.
            let mut below = left.take().or_else(|| {
                self.vma_ending(range.start)
                    .filter(|vma| vma.area.continues_into(&middle.area))
                    .and_then(|vma| self.neighbour(vma))
            });
            let mut above = right.take().or_else(|| {
                self.vma_at(range.end)
                    .filter(|vma| middle.area.continues_into(&vma.area))
                    .and_then(|vma| self.neighbour(vma))
            });
            let joined = join(middle, &mut below, &mut above);
            left = below.filter(|below| taken.covers(below.area.range));
            right = above.filter(|above| taken.covers(above.area.range));
            taken = taken.hull(joined.area.range);
            joined
        });
        self.replace(taken, self.make_all([left, middle, right])?)
    }

    /// A neighbour as a piece, stopped, so that its root is final.
    fn neighbour(&self, vma: &Vma) -> Option<Piece> {
        self.stop(vma.area.range);
        Piece::of(vma, vma.area.range)
    }

    fn make_all(&self, pieces: [Option<Piece>; 3]) -> Result<NewVmas, OutOfMemory> {
        let mut new: NewVmas = [None, None, None];
        for (slot, piece) in new.iter_mut().zip(pieces) {
            if let Some(Piece { area, root }) = piece {
                *slot = Some(self.make(area, root)?);
            }
        }
        Ok(new)
    }
}
