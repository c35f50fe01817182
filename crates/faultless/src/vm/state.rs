//! The state of one CPU, and its hint: the VMA found by its last fault.

use crate::error::OutOfMemory;
use crate::file::PendingRead;
use crate::machine::SpaceId;
use crate::reclaim::holders::Holder;
use crate::rmap::AnonVmas;
use crate::rmap::walker::Walker;
use crate::space::Apart;
use crate::space::stock::VmaStock;
use crate::space::vma::Vma;
use crate::stat::Counts;
use crate::sync::atomic::AtomicU64;
use crate::sync::grace::{RetireChain, Section};
use crate::tlb::gather::Gather;
use core::cell::{Cell, RefCell};
use core::ptr;

/// One CPU's state, on separate cache lines.
#[derive(Debug)]
pub(crate) struct CpuState {
    pub(crate) counts: Counts,
    pub(crate) gather: Gather,
    /// The space that this CPU runs.
    pub(crate) resident: Resident,
    pub(crate) hint: Hint,
    /// The anon_vmas made by this CPU.
    pub(super) anon_vmas: AnonVmas,
    /// The number of frames freed by calls since the last zeroing of freed frames.
    pub(super) freed: Cell<usize>,
    /// The free VMAs of this CPU.
    pub(crate) free_vmas: VmaStock,
    /// VMAs removed by calls of this CPU as the owner of a space: only this CPU can reach these
    /// VMAs.
    pub(super) gone: Cell<RetireChain>,
    /// The number of calls that changed VMAs of a shared space.
    pub(crate) shared_calls: Cell<u32>,
    /// How this CPU maps in its own [region](crate::space).
    pub(crate) apart: Cell<Apart>,
    /// Whether an allocation of the current call failed for lack of frames.
    pub(crate) starved: Cell<bool>,
    /// Whether a call was refused because the space has the maximum number of VMAs.
    pub(crate) crowded: Cell<bool>,
    /// The calls in which this CPU holds pages possibly needed elsewhere.
    pub(crate) holder: Holder,
    /// This CPU's walks of the reverse map; ending spaces wait for them.
    pub(crate) walker: Walker,
    /// Whether this CPU is evicting pages: a store called by this CPU may itself need memory.
    pub(crate) evicting: Cell<bool>,
    /// Whether private pages stayed in memory because another CPU had the turn to write to the swap
    /// area.
    pub(crate) missed_turn: Cell<bool>,
    /// Whether this CPU waits for the turn to write to the swap area.
    pub(crate) awaits_turn: Cell<bool>,
    /// The number of half rounds of all hands at the last time this CPU dropped its translations to
    /// make accessed bits reliable ([`clock`](crate::reclaim)).
    pub(crate) half_rounds: Cell<u64>,
    /// The read for which this CPU's last fault or call is pending.
    pub(super) pending: RefCell<Option<PendingRead>>,
    /// The page that a fault could not read from its store: the number of the fault on this CPU, of
    /// the object, and of the page.
    pub(crate) unread: Cell<Option<(u64, u64, u64)>>,
    /// The first page of a folio that a fault could not make, in the format of `unread`.
    pub(crate) no_folio: Cell<Option<(u64, u64, u64)>>,
    /// Faults that did not try to make a folio, because an earlier attempt had failed.
    pub(crate) folios_skipped: Cell<u32>,
    /// The `ThreadPredictor` of the thread on whose behalf this CPU makes a call, or null. Set only
    /// by [`Cpu::for_thread`], which keeps the predictor alive until it restores the old value.
    pub(super) thread: Cell<*const ()>,
}

impl CpuState {
    /// Returns the state of a CPU of a machine of `frames` frames.
    pub(super) fn try_new(frames: u64) -> Result<Self, OutOfMemory> {
        Ok(Self {
            counts: Counts::default(),
            gather: Gather::try_new(frames)?,
            resident: Resident::default(),
            hint: Hint::default(),
            anon_vmas: AnonVmas::default(),
            freed: Cell::new(0),
            free_vmas: VmaStock::default(),
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

/// The VMA found by this CPU's last fault. The next fault is often in the same VMA, and need not
/// read the tree, which calls in other ranges change frequently.
///
/// *Invariant (a hint is checked):* `vma` is null, or VMA memory of this subsystem, which is
/// [stable](crate::space::stock); `seen` was the sequence when `vma` was found in `space`. While
/// the sequence is `seen`, `vma` is this VMA, and other CPUs free it only after a grace period: it
/// is alive in a section that was open at the check. (The [owner](crate::sync::owner) of a space
/// frees VMAs at once. But only CPUs that run the space have a hint, so no other CPU has a hint
/// then.)
#[derive(Debug)]
pub(crate) struct Hint {
    space: Cell<u64>,
    seen: Cell<u64>,
    vma: Cell<*const Vma>,
}

impl Default for Hint {
    fn default() -> Self {
        // No space has the number 0.
        Self { space: Cell::new(0), seen: Cell::new(0), vma: Cell::new(ptr::null()) }
    }
}

impl Hint {
    /// Returns the VMA that the last fault found in `space`, and its sequence, if the VMA has not
    /// changed since.
    #[inline(always)]
    pub(crate) fn get<'s>(
        &self,
        _section: &'s Section<'_>,
        space: SpaceId,
    ) -> Option<(&'s Vma, u64)> {
        if self.space.get() != space.0 {
            return None;
        }
        let (vma, seen) = (self.vma.get(), self.seen.get());
        // SAFETY: VMA memory is stable. The memory may now be of another VMA, which another CPU
        // writes, but for the sequence, which is atomic.
        let sequence = unsafe { &(*vma).sequence };
        if !sequence.is_still(seen) {
            return None;
        }
        // SAFETY: a hint is checked.
        Some((unsafe { &*vma }, seen))
    }

    /// Forgets the VMA.
    pub(crate) fn forget(&self) {
        self.space.set(0);
    }

    /// Stores `vma`, which was found in `space` in an open section, with the sequence `seen`.
    #[inline]
    pub(crate) fn set(&self, space: SpaceId, vma: &Vma, seen: u64) {
        self.space.set(space.0);
        self.seen.set(seen);
        self.vma.set(vma);
    }
}

// SAFETY: the cells (`gather`, `hint`, `anon_vmas`, `freed`, `free_vmas`, `gone`, `shared_calls`,
// `apart`, `starved`, `crowded`, `evicting`, `missed_turn`, `awaits_turn`, `half_rounds`,
// `pending`, `unread`, `no_folio`, `folios_skipped`, `thread`) are accessed only through
// `Cpu::state`, with the CPU's `Local`; other CPUs read `counts`, `resident`, `holder`, `walker`
// and the count in `free_vmas`, which are atomics.
unsafe impl Sync for CpuState {}
// SAFETY: as above; the hint's pointer is dereferenced only as its invariant allows, on whichever
// thread is the CPU, and the pointer to the thread is null except during a call.
unsafe impl Send for CpuState {}

/// Resident pages that a CPU counted for the space it runs, not yet added to the space's own count.
#[derive(Debug, Default)]
pub(crate) struct Resident {
    pub(crate) space: AtomicU64,
    pub(crate) pages: AtomicU64,
}
