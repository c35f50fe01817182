//! The short step in which VMAs are split, created, merged and removed.
//!
//! A [`Step`] runs under the lock of the tree, or of the [shard](super::tree) of the tree that
//! contains the place of the step. A step reads the current tree, and publishes the next
//! [version](super::versions) of the tree or shard, or nothing. A step changes VMAs and their tree,
//! and no entries. A VMA is *write-locked* while its sequence is odd. Protocol, for each range that
//! is replaced:
//!
//! 1. **Write-lock.** The step makes the sequences of the VMAs that it will replace odd, and seals
//!    their anon_vma slots. These are the VMAs that overlap the range, and adjacent VMAs that merge
//!    with the new VMA. A replaced VMA is *detached*: its sequence stays odd. One full fence
//!    follows. From here on no fault installs an entry in these VMAs, except a fault that already
//!    holds its entry busy; the visit of the entries waits for that fault.
//! 2. **Make.** The step splits off the head and tail VMAs outside the range, which are unlocked at
//!    once: their pages do not change. The new VMA in the range is unlocked at once if its pages
//!    have no entries yet, or keep their entries. Otherwise the new VMA is write-locked until the
//!    writer has changed the entries.
//! 3. **Publish.** Publishing can fail, so this part comes before any change of an entry. On
//!    failure, the step unlocks the old VMAs, and nothing has changed.
//!
//! *Invariant (under change):* a VMA in the tree whose sequence is odd is under change: a writer
//! has made the VMA write-locked, and will unlock the VMA. No other writer, even one that changes
//! pages beside the VMA, merges with, write-locks or replaces the VMA.
//!
//! A VMA under change has exactly the pages whose entries its writer changes, so faults on other
//! pages proceed. The writer merges the VMA with its neighbours in a second step, when the writer
//! [finishes](super::finish); of two concurrent writers, the last to finish merges. If there is no
//! memory for that step, the VMAs stay separate. A VMA that is made beside a VMA under change, or
//! is under change itself, records with which neighbours its merge is deferred ([`Vma::merges`]).
//! No other neighbours merge in the second step: VMAs that were separate before stay separate. VMAs
//! that will merge must share one anon_vma. So a fault that needs to make an anon_vma waits while
//! its VMA is to merge with a VMA under change.
//!
//! *Invariant (deferred merges):* from two VMAs whose merge is deferred, a chain of VMAs with
//! deferred merges leads to a VMA under change, whose writer will merge them all. A step that cuts
//! a VMA might break such a chain, so the step first merges the remaining part of the VMA with the
//! neighbours that are not under change.
//!
//! While no other CPU runs the space, the step merges at once, and needs no second step. If another
//! CPU starts to use the space at that time, and changes pages of such a VMA that its writer has
//! not claimed, the CPU waits, without holding anything that the writer needs, and starts its step
//! again. A writer that owns the space does none of this, but edits the tree and VMAs [in
//! place](super::alone).
//!
//! Which new VMAs are write-locked:
//!
//! | step | the new VMA |
//! |---|---|
//! | `mmap` of free pages, `brk`, growth, `mlock`, advice | unlocked: there are no entries, or they stay |
//! | `mprotect` that only grants permissions, or only revokes some | unlocked: faults make entries with the new permissions, and a fault without the permission waits for the claim |
//! | `mprotect` that does both | write-locked: no CPU may use a new permission while another still uses an old one |
//! | `mmap` over a mapping, `mremap` | write-locked: the entries belong to another mapping |

use super::alone::Alone;
use super::made::State;
use super::versions::Versions;
use super::vma::{Piece, Vma};
use super::write::{Refused, Writing};
use crate::addr::VirtRange;
use crate::error::{Errno, OutOfMemory};
use crate::machine::Machine;
use crate::space::tree::{EVERYWHERE, View};

/// An atomic change of VMAs, which takes effect completely or not at all.
pub(super) enum Step<'s, 'w, 'a, 'v, M: Machine> {
    /// In place.
    Alone(Alone<'w, 'a, 'v, M>),
    /// In the next version of the tree.
    Versions(&'s mut Versions<'w, 'a, 'v, M>),
}

impl<'a, 'v, M: Machine> Writing<'a, 'v, M> {
    /// Runs one step in `place`; no other step changes VMAs there during the step. `place` covers
    /// the pages that the step replaces, and the page on either side of the mapped pages, with
    /// whose VMA the new VMA may merge. `build` replaces at most one range, as its last action.
    /// `build` reads the current tree in [`Step::view`], and runs again after a wait for another
    /// writer.
    ///
    /// # Errors
    /// The error of `build`, and `ENOMEM` if the heap is exhausted, or the space has too many VMAs.
    /// Nothing has changed.
    #[inline(always)]
    pub(super) fn step<R>(
        &self,
        mut place: VirtRange,
        mut build: impl FnMut(&mut Step<'_, '_, '_, '_, M>) -> Result<R, Refused>,
    ) -> Result<R, Errno> {
        loop {
            // Only one call of `build`, so that the compiler inlines `build` into its caller.
            let mut versions = None;
            let built = build(&mut if self.owns() {
                Step::Alone(Alone::new(self))
            } else {
                Step::Versions(self.begin_versions(&mut versions, place)?)
            });
            let Some(versions) = versions else { return built.map_err(Refused::errno) };
            if let Some(built) = self.end_versions(versions, built, &mut place)? {
                return Ok(built);
            }
        }
    }

    /// [`step`](Self::step) that may replace two ranges, and makes a version even if the tree may
    /// be changed in place.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    #[inline(never)]
    pub(super) fn step_versions<R>(
        &self,
        mut place: VirtRange,
        mut build: impl FnMut(&mut Versions<'_, '_, '_, M>) -> Result<R, Refused>,
    ) -> Result<R, Errno> {
        loop {
            let mut step = Versions::begin(self, place)?;
            let built = build(&mut step);
            if let Some(built) = self.end_versions(step, built, &mut place)? {
                return Ok(built);
            }
        }
    }

    /// Begins a step that makes a version, in `versions`.
    #[inline(never)]
    fn begin_versions<'s, 'w>(
        &'w self,
        versions: &'s mut Option<Versions<'w, 'a, 'v, M>>,
        place: VirtRange,
    ) -> Result<&'s mut Versions<'w, 'a, 'v, M>, OutOfMemory> {
        Ok(versions.insert(Versions::begin(self, place)?))
    }

    /// Publishes the version that `step` has built, and returns the result. `None`: the step is to
    /// run again, in `place`.
    #[inline(never)]
    fn end_versions<R>(
        &self,
        step: Versions<'_, '_, '_, M>,
        built: Result<R, Refused>,
        place: &mut VirtRange,
    ) -> Result<Option<R>, Errno> {
        let built = built.and_then(|built| step.check_count().map(|()| built));
        let refused = match built {
            Ok(built) => {
                step.publish();
                return Ok(Some(built));
            }
            Err(refused) => refused,
        };
        let unmerged = step.unmerged();
        step.undo();
        match (refused, unmerged) {
            (Refused::With(errno), _) => return Err(errno),
            (_, Some(addr)) => drop(self.merge_two(addr)?),
            (Refused::Busy(addr), None) => self.await_others(addr),
            (Refused::Crowded, None) => *place = EVERYWHERE,
        }
        Ok(None)
    }
}

impl<M: Machine> Step<'_, '_, '_, '_, M> {
    /// Returns the tree, as the step has changed the tree.
    #[inline(always)]
    pub(super) fn view(&self) -> View<'_, Vma> {
        match self {
            Self::Alone(step) => step.view(),
            Self::Versions(step) => step.view(),
        }
    }

    /// Returns `range` as its VMA has it. From now on no fault sets another anon_vma. `range` must be
    /// claimed, and must be replaced next.
    ///
    /// # Errors
    /// `EFAULT`: nothing is mapped there.
    #[inline(always)]
    pub(super) fn take(&mut self, range: VirtRange) -> Result<Piece, Refused> {
        match self {
            Self::Alone(step) => step.take(range),
            Self::Versions(step) => step.take(range),
        }
    }

    /// [`take`](Self::take) of the VMA that has `range`, which the owner of the space already
    /// knows.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    #[inline(always)]
    pub(super) fn take_known(&mut self, range: VirtRange, vma: &Vma) -> Result<Piece, Refused> {
        match self {
            Self::Alone(_) => Ok(vma.part(range)),
            Self::Versions(step) => step.take(range),
        }
    }

    /// Replaces `range` by `piece`, splits off the head and tail VMAs outside of `range`, and
    /// merges `piece` with adjacent VMAs if possible. `range` must be claimed.
    ///
    /// # Errors
    /// `ENOMEM`; the step is over.
    #[inline(always)]
    pub(super) fn replace(
        &mut self,
        range: VirtRange,
        piece: Piece,
        state: State,
    ) -> Result<(), Refused> {
        match self {
            Self::Alone(step) => step.replace(range, Some(piece)),
            Self::Versions(step) => step.replace(range, Some(piece), state),
        }
    }

    /// [`replace`](Self::replace) by nothing.
    ///
    /// # Errors
    /// As [`replace`](Self::replace).
    #[inline(always)]
    pub(super) fn remove(&mut self, range: VirtRange) -> Result<(), Refused> {
        match self {
            Self::Alone(step) => step.replace(range, None),
            Self::Versions(step) => step.replace(range, None, State::Unlocked),
        }
    }

    /// Extends the VMA at `stack` down to `addr`. The range between must be free. The VMA merges
    /// with no VMA.
    ///
    /// # Errors
    /// `ENOMEM`; the step is over.
    pub(super) fn extend_down(&mut self, stack: u64, addr: u64) -> Result<(), Refused> {
        match self {
            Self::Alone(step) => step.extend_down(stack, addr),
            Self::Versions(step) => step.extend_down(stack, addr),
        }
    }
}
