//! The VMAs that a [step](super::step) makes.

use super::vma::{Piece, Vma};
use crate::error::OutOfMemory;
use crate::heap::{self, Shared};
use crate::rmap::mapping::Mapping;
use crate::space::core::Core;
use alloc::boxed::Box;
use core::ptr::NonNull;

/// Whether a VMA made by a step is usable before its writer is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Usable at once.
    Unlocked,
    /// Not usable before the writer has changed the entries.
    WriteLocked,
}

/// Makes the VMA of `piece` in the space of `core`.
pub(super) fn make_vma(
    piece: Piece,
    core: &Shared<Core>,
    state: State,
    merges: [bool; 2],
) -> Result<Box<Vma>, OutOfMemory> {
    let mapping = Mapping::try_new(&piece, core)?;
    let vma = heap::try_box_with(|| Vma::new(piece, merges, mapping))?;
    if state == State::WriteLocked {
        vma.sequence.begin_write();
        // Otherwise a fault under a claim of another of its pages could set an anon_vma that the
        // writer does not see.
        vma.anon_vma.seal();
    }
    Ok(vma)
}

/// VMAs outside published trees, at most two rests and a piece for each of two ranges. They are
/// freed if they are never published.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) vmas: [Option<NonNull<Vma>>; 6],
    /// The number of used places; places of freed VMAs stay empty.
    pub(super) used: usize,
}

impl Made {
    /// Returns an empty list.
    pub(super) const fn new() -> Self {
        Self { vmas: [None; 6], used: 0 }
    }

    fn iter(&self) -> impl Iterator<Item = NonNull<Vma>> {
        self.vmas[..self.used].iter().copied().flatten()
    }

    pub(super) fn has(&self, vma: NonNull<Vma>) -> bool {
        self.iter().any(|made| made == vma)
    }

    pub(super) fn add(&mut self, vma: NonNull<Vma>) {
        // A step replaces at most two ranges, each by at most three VMAs.
        self.vmas[self.used] = Some(vma);
        self.used += 1;
    }

    /// Frees `vma`, if it is in the list. No CPU may use it. Returns whether it was freed.
    pub(super) fn free(&mut self, vma: NonNull<Vma>) -> bool {
        let Some(made) = self.vmas.iter_mut().find(|made| **made == Some(vma)) else {
            return false;
        };
        *made = None;
        // SAFETY: leaked from a box, and in no published tree, because published VMAs are removed
        // from the list.
        drop(unsafe { Box::from_raw(vma.as_ptr()) });
        true
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for vma in self.iter() {
            // SAFETY: as in `free`.
            drop(unsafe { Box::from_raw(vma.as_ptr()) });
        }
    }
}
