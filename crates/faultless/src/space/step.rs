//! The short step in which VMAs are split, created, merged and removed.
//!
//! A [`Step`] runs under the lock of the tree, sees the tree as it is, and publishes the next [version](super::versions) of it,
//! or nothing. It touches VMAs and their tree, and no entries. Protocol, for each range that is replaced:
//!
//! 1. **Stop.** The sequences of the VMAs that will be replaced become odd, for ever, and their anon_vma slots are sealed.
//!    These are the VMAs that overlap the range, and those next to it that become one with what comes there. One full fence
//!    follows. From here on no fault installs anything in them, but for those whose entries are busy, for which the
//!    visit of the entries waits.
//! 2. **Make.** What sticks out of the range stays, as a VMA of its own, usable at once: its pages are as they were. What
//!    comes into the range is *running* if it is usable at once, too: its pages have no entries yet, or keep
//!    them as they are. Else it is *stopped*, until the writer has changed the entries.
//! 3. **Publish.** This is what can fail, and so it comes before any entry is changed: if it fails, the old VMAs run again, and
//!    nothing has happened.
//!
//! *Invariant (under change):* a VMA in the tree whose sequence is odd is under change: a writer has made it stopped, and
//! will make it run. No other writer merges with it, stops it or replaces it: one that changes pages beside it leaves it
//! alone.
//!
//! What is under change has exactly the pages whose entries its writer changes, and faults beside them go on. It
//! merges with its neighbours when it is finished, in a second step: of two writers that are at work side by
//! side, the one that finishes last. Should there be no memory for that step, they stay two. Whatever is made beside it, or
//! is under change itself, says with whom it would have merged at once ([`Vma::merges`]). No others merge then: what was
//! apart before stays apart. A fault that is to make an anon_vma in what will be one with a VMA under change waits for that:
//! all of it has one anon_vma in the end.
//!
//! While no other CPU runs the space, nobody is there to be kept out. Then it merges at once, and the second step is saved.
//! A CPU that comes meanwhile, and changes pages of such a VMA that its writer has not claimed, waits, holding nothing that
//! the writer wants, and begins its step again. A writer that owns the space does none of this: it changes the tree, and VMAs,
//! [in place](super::alone).
//!
//! What is stopped, and what is not:
//!
//! | step | the new VMA |
//! |---|---|
//! | `mmap` of free pages, `brk`, growth, `mlock`, advice | running: there are no entries, or they stay |
//! | `mprotect` that only gives rights, or only takes some | running: a fault makes entries as the new VMA has it, and who is refused waits for the claim |
//! | `mprotect` that does both | stopped: nobody uses a new right while another CPU still uses an old one |
//! | `mmap` over something, `mremap` | stopped: the entries are another mapping's |

use super::alone::Alone;
use super::merge::Piece;
use super::versions::Versions;
use super::vma::{Area, Vma};
use super::write::Writing;
use crate::addr::VirtRange;
use crate::error::{Errno, OutOfMemory};
use crate::machine::Machine;
use crate::rmap::Root;
use crate::space::tree::View;

/// Whether what a step makes is used before its writer is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// At once.
    Running,
    /// Not before the writer has changed the entries.
    Stopped,
}

/// Why a step did not happen. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// This is what the caller is to be told.
    With(Errno),
    /// The VMA at this address is under change by another writer.
    Busy(u64),
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::With(errno)
    }
}

impl From<OutOfMemory> for Refused {
    fn from(oom: OutOfMemory) -> Self {
        Self::With(oom.into())
    }
}

/// A change of VMAs, which happens wholly or not at all.
pub(super) enum Step<'s, 'w, 'a, 'v, M: Machine> {
    /// In place.
    Alone(Alone<'w, 'a, 'v, M>),
    /// In the next version of the tree.
    Versions(&'s mut Versions<'w, 'a, 'v, M>),
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Does one step, as `build` says, which replaces one range at most, as the last that it does. It sees the present tree in
    /// [`Step::view`], and is run again after a wait for another writer.
    ///
    /// # Errors
    /// What `build` refuses, and `ENOMEM`: the heap is exhausted, or the space has too many VMAs. Nothing has changed.
    #[inline(always)]
    pub(super) fn step<R>(
        &self,
        mut build: impl FnMut(&mut Step<'_, '_, '_, '_, M>) -> Result<R, Refused>,
    ) -> Result<R, Errno> {
        if !self.owns() {
            return self.step_versions(|step| build(&mut Step::Versions(step)));
        }
        loop {
            match build(&mut Step::Alone(Alone::new(self))) {
                Ok(built) => return Ok(built),
                Err(Refused::With(errno)) => return Err(errno),
                Err(Refused::Busy(addr)) => self.await_others(addr),
            }
        }
    }

    /// [`step`](Self::step) that may replace two ranges, and makes a version even where the tree may be changed in place.
    ///
    /// # Errors
    /// As there.
    #[inline(never)]
    pub(super) fn step_versions<R>(
        &self,
        mut build: impl FnMut(&mut Versions<'_, '_, '_, M>) -> Result<R, Refused>,
    ) -> Result<R, Errno> {
        loop {
            let mut step = Versions::begin(self);
            let built = build(&mut step).and_then(|built| step.check_count().map(|()| built));
            let refused = match built {
                Ok(built) => {
                    step.publish();
                    return Ok(built);
                }
                Err(refused) => refused,
            };
            step.undo();
            match refused {
                Refused::With(errno) => return Err(errno),
                Refused::Busy(addr) => self.await_others(addr),
            }
        }
    }
}

impl<M: Machine> Step<'_, '_, '_, '_, M> {
    /// The tree, as the step has changed it.
    #[inline(always)]
    pub(super) fn view(&self) -> View<'_, Vma> {
        match self {
            Self::Alone(step) => step.view(),
            Self::Versions(step) => step.view(),
        }
    }

    /// What the VMA over `range`, which is claimed and is replaced next, says of it; and its anon_vma: no fault
    /// sets another from now on.
    ///
    /// # Errors
    /// `EFAULT`: nothing is mapped there.
    #[inline(always)]
    pub(super) fn take(&mut self, range: VirtRange) -> Result<(Area, Option<Root>), Refused> {
        match self {
            Self::Alone(step) => step.take(range),
            Self::Versions(step) => step.take(range),
        }
    }

    /// Puts `piece` (or nothing) in the place of `range`, which is claimed, keeping what the VMAs there have outside of
    /// it, and merging it with what is next to it where that is possible.
    ///
    /// # Errors
    /// `ENOMEM`; the step is over.
    #[inline(always)]
    pub(super) fn replace(
        &mut self,
        range: VirtRange,
        piece: Option<Piece>,
        state: State,
    ) -> Result<(), Refused> {
        match self {
            Self::Alone(step) => step.replace(range, piece),
            Self::Versions(step) => step.replace(range, piece, state),
        }
    }

    /// Extends the VMA at `stack` down to `addr`, with nothing between. It merges with none.
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
