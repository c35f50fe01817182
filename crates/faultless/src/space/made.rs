//! The VMAs that a [step](super::step) makes.

use super::area::PageSource;
use super::vma::{Piece, Vma};
use crate::error::OutOfMemory;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::rmap::mapping::Mapping;
use crate::space::core::Core;
use crate::vm::Cpu;
use core::fmt;
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
///
/// # Errors
/// [`OutOfMemory`] if the heap is exhausted.
#[inline(always)]
pub(super) fn make_vma<M: Machine>(
    cpu: &Cpu<'_, M>,
    piece: Piece,
    core: &Shared<Core>,
    state: State,
    merges: [bool; 2],
) -> Result<NonNull<Vma>, OutOfMemory> {
    let mapping = Mapping::try_new(&piece, core)?;
    let vma = cpu.state().free_vmas.take(&cpu.vm().free_vmas, cpu)?;
    // SAFETY: free, and taken just now.
    let new = unsafe {
        Vma::reuse(vma, piece, merges, mapping);
        vma.as_ref()
    };
    match state {
        State::Unlocked => new.sequence.end_write(),
        // Otherwise a fault under a claim of another of its pages could set an anon_vma that the
        // writer does not see.
        State::WriteLocked => new.anon_vma.seal(),
    }
    Ok(vma)
}

impl<M: Machine> Cpu<'_, M> {
    /// Frees `vma`, and returns the source of its pages.
    ///
    /// # Safety
    /// `vma` was made by [`make_vma`] and not freed since, its sequence is odd, and no other CPU
    /// reaches it, except by a hint.
    #[inline(always)]
    pub(crate) unsafe fn end_vma(&self, vma: NonNull<Vma>) -> PageSource {
        // SAFETY: the caller's promise.
        unsafe {
            let memory = Vma::make_free(vma);
            self.state().free_vmas.give(vma, &self.vm().free_vmas, self);
            memory
        }
    }
}

/// VMAs outside published trees, at most two rests and a piece for each of two ranges. They are
/// freed if they are never published.
pub(super) struct Made<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    pub(super) vmas: [Option<NonNull<Vma>>; 6],
    /// The number of used places; places of freed VMAs stay empty.
    pub(super) used: usize,
}

impl<M: Machine> fmt::Debug for Made<'_, '_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a, 'v, M: Machine> Made<'a, 'v, M> {
    /// Returns an empty list of VMAs that `cpu` makes.
    pub(super) const fn new(cpu: &'a Cpu<'v, M>) -> Self {
        Self { cpu, vmas: [None; 6], used: 0 }
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
        // SAFETY: made by `make_vma`, and in no published tree, because published VMAs are removed
        // from the list.
        unsafe {
            vma.as_ref().sequence.detach();
            drop(self.cpu.end_vma(vma));
        }
        true
    }
}

impl<M: Machine> Drop for Made<'_, '_, M> {
    fn drop(&mut self) {
        for vma in self.iter() {
            // SAFETY: as in `free`.
            unsafe {
                vma.as_ref().sequence.detach();
                drop(self.cpu.end_vma(vma));
            }
        }
    }
}
