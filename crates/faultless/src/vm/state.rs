//! What belongs to one CPU, and the VMA that its last fault found.

use crate::error::OutOfMemory;
use crate::file::PendingRead;
use crate::machine::SpaceId;
use crate::reclaim::holders::Holder;
use crate::rmap::walker::Walker;
use crate::space::Apart;
use crate::space::vma::Vma;
use crate::stat::Counts;
use crate::sync::atomic::AtomicU64;
use crate::sync::grace::{Grace, RetireChain, Section};
use crate::tlb::gather::Gather;
use core::cell::{Cell, RefCell};
use core::ptr;

/// One CPU's state, on lines of its own.
#[derive(Debug)]
pub(crate) struct CpuState {
    pub(crate) counts: Counts,
    pub(crate) gather: Gather,
    /// The space that this CPU runs.
    pub(crate) resident: Resident,
    pub(crate) hint: Hint,
    /// Frames that calls let go of since it was last looked at.
    pub(super) freed: Cell<usize>,
    /// VMAs that calls of this CPU removed as the owner of a space: no other CPU can reach them.
    pub(super) gone: Cell<RetireChain>,
    /// Calls that changed VMAs of a shared space.
    pub(crate) shared_calls: Cell<u32>,
    /// How this CPU maps in its own [region](crate::space).
    pub(crate) apart: Cell<Apart>,
    /// Whether the call that this CPU is in got no frame.
    pub(crate) starved: Cell<bool>,
    /// Whether it was refused because the space has as many VMAs as it may have.
    pub(crate) crowded: Cell<bool>,
    /// The calls in which it holds pages that others may need.
    pub(crate) holder: Holder,
    /// Its walks of the reverse map, for which spaces that end wait.
    pub(crate) walker: Walker,
    /// Whether this CPU is evicting pages: a store that it calls may need memory itself.
    pub(crate) evicting: Cell<bool>,
    /// Whether private pages stayed in memory since another CPU had the turn to write to the swap area.
    pub(crate) missed_turn: Cell<bool>,
    /// Whether this CPU waits for that turn.
    pub(crate) awaits_turn: Cell<bool>,
    /// The half rounds of all hands when it last dropped its translations so that accessed bits tell what is used ([`clock`](crate::reclaim)).
    pub(crate) half_rounds: Cell<u64>,
    /// The read for which this CPU's last fault or call is pending.
    pub(super) pending: RefCell<Option<PendingRead>>,
    /// The page that a fault could not read from its store: which fault of this CPU, the object's number, and the page's.
    pub(crate) unread: Cell<Option<(u64, u64, u64)>>,
    /// The first of the pages that a fault could not have as a folio: as `unread`.
    pub(crate) no_folio: Cell<Option<(u64, u64, u64)>>,
    /// Faults that did not try to make a folio, as it had failed before.
    pub(crate) folios_skipped: Cell<u32>,
    /// The `ThreadPredictor` of the thread that this CPU makes a call for, or null. Set by [`Cpu::for_thread`] alone, which keeps
    /// it alive until it puts back what was there.
    pub(super) thread: Cell<*const ()>,
}

impl CpuState {
    /// The state of a CPU of a machine of `frames` frames.
    pub(super) fn try_new(frames: u64) -> Result<Self, OutOfMemory> {
        Ok(Self {
            counts: Counts::default(),
            gather: Gather::try_new(frames)?,
            resident: Resident::default(),
            hint: Hint::default(),
            freed: Cell::new(0),
            gone: Cell::default(),
            shared_calls: Cell::new(0),
            apart: Cell::new(Apart::NOWHERE),
            starved: Cell::new(false),
            crowded: Cell::new(false),
            holder: Holder::default(),
            walker: Walker::default(),
            evicting: Cell::new(false),
            missed_turn: Cell::new(false),
            awaits_turn: Cell::new(false),
            half_rounds: Cell::new(0),
            pending: RefCell::new(None),
            unread: Cell::new(None),
            no_folio: Cell::new(None),
            folios_skipped: Cell::new(0),
            thread: Cell::new(ptr::null()),
        })
    }
}

/// The VMA that this CPU's last fault found: the next fault is often in it, and need not look at the
/// tree, which calls in other ranges change all the time.
///
/// *Invariant (a hint is alive):* while the space `space` exists, `vma` is alive in every section whose
/// steady epoch is `epoch`. It may have been replaced since: then its sequence is odd. (A space that
/// ended frees its VMAs at once, but its number is not used again, so no hint for it is looked up. The [owner](crate::sync::owner) of a space
/// frees VMAs at once, too, and forgets them; other CPUs have no hint then, since only those have one that run the space.)
#[derive(Debug)]
pub(crate) struct Hint {
    space: Cell<u64>,
    epoch: Cell<u64>,
    vma: Cell<*const Vma>,
}

impl Default for Hint {
    fn default() -> Self {
        // No space is numbered 0.
        Self { space: Cell::new(0), epoch: Cell::new(0), vma: Cell::new(ptr::null()) }
    }
}

impl Hint {
    /// The VMA that the last fault found in `space`, if it is known to be alive.
    #[inline(always)]
    pub(crate) fn get<'s>(
        &self,
        grace: &Grace,
        section: &'s Section<'_>,
        space: SpaceId,
    ) -> Option<&'s Vma> {
        if self.space.get() != space.0 || grace.steady_epoch(section) != Some(self.epoch.get()) {
            return None;
        }
        // SAFETY: a hint is alive.
        Some(unsafe { &*self.vma.get() })
    }

    /// Knows no VMA any more.
    pub(crate) fn forget(&self) {
        self.space.set(0);
    }

    /// Knows `vma` no more, which is freed without a grace period.
    #[inline]
    pub(crate) fn forget_vma(&self, vma: *const Vma) {
        if self.vma.get() == vma {
            self.forget();
        }
    }

    /// Remembers `vma`, which was found in `space` in this section.
    #[inline]
    pub(crate) fn set(&self, grace: &Grace, section: &Section<'_>, space: SpaceId, vma: &Vma) {
        if let Some(epoch) = grace.steady_epoch(section) {
            self.space.set(space.0);
            self.epoch.set(epoch);
            self.vma.set(vma);
        } else {
            self.space.set(0);
        }
    }
}

// SAFETY: the cells (`gather`, `hint`, `freed`, `gone`, `shared_calls`, `apart`, `starved`, `crowded`, `evicting`, `missed_turn`, `awaits_turn`, `half_rounds`, `pending`, `unread`, `no_folio`, `folios_skipped`, `thread`) are reached only through
// `Cpu::state`, with the CPU's `Local`; other CPUs read `counts`, `resident`, `holder` and `walker`, which are atomics.
unsafe impl Sync for CpuState {}
// SAFETY: as above; the hint's pointer is followed only as its invariant allows, on whichever thread is
// the CPU, and that of the thread is null but during a call.
unsafe impl Send for CpuState {}

/// Resident pages that a CPU counted for the space it runs, not yet added to the space's own count.
#[derive(Debug, Default)]
pub(crate) struct Resident {
    pub(crate) space: AtomicU64,
    pub(crate) pages: AtomicU64,
}
