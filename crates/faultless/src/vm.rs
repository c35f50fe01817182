//! The subsystem as a whole, and the [CPU](cpu) that a call runs on.

mod background;
mod block;
mod collect;
mod cpu;
mod flush;
mod state;
mod zero;

pub use background::Background;
pub use block::Block;
pub use cpu::Cpu;

use crate::addr::{FrameNumber, is_page_aligned};
use crate::ended::Ended;
use crate::error::Errno;
use crate::fault::prefault::Predictor;
use crate::file::Charge;
use crate::frame::{Census, FrameMeta, FrameUse, Frames, Imbalance, Kind};
use crate::heap::Shared;
use crate::identity::Identity;
use crate::knob::{Knobs, Setting};
use crate::machine::{CpuId, MAX_CPUS, MAX_NODES, Machine, SpaceId};
use crate::reclaim::clock::Clock;
use crate::reclaim::compact::Compaction;
use crate::reclaim::lazy_list;
use crate::reclaim::swap::SwapCell;
use crate::rmap::anchor::Anchors;
use crate::space::stock::{SharedVmaStock, VmaUsage};
use crate::stat::{Totals, Trace};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::grace::Grace;
use crate::sync::percpu::{Local, PerCpu};
use crate::sync::range::ClaimSlots;
use crate::sync::wait::Spin;
use crate::table::Entry;
use crate::table::format::{CacheMode, USER_END};
use crate::tlb::deferred::Deferred;
use crate::tlb::shootdown::Inbox;
use core::fmt;
use state::CpuState;

/// The virtual-memory subsystem over one machine.
pub struct Vm<M: Machine> {
    machine: M,
    pub(crate) frames: Frames,
    pub(crate) grace: Grace,
    /// The free VMAs that all CPUs share.
    pub(crate) free_vmas: SharedVmaStock,
    pub(crate) claims: ClaimSlots,
    pub(crate) inboxes: PerCpu<Inbox>,
    pub(crate) deferred: Deferred,
    pub(crate) cpus: PerCpu<CpuState>,
    pub(crate) zero: FrameNumber,
    /// The initial state of new threads' predictors.
    pub(crate) defaults: <M::Predictor as Predictor>::Defaults,
    /// The knobs, and the subsystem's identity.
    pub(crate) knobs: Knobs,
    /// The trace points.
    pub trace: Trace,
    /// The spaces that may contain lazily freed pages.
    pub(crate) lazy: lazy_list::Spaces,
    /// The pages that are charged against the knob `file_limit`.
    pub(crate) charge: Charge,
    /// The clock hands, which choose the pages to evict.
    pub(crate) clock: Clock,
    /// The position of compaction.
    pub(crate) compaction: Compaction,
    /// The swap area.
    pub(crate) swap: SwapCell,
    /// The roots of the reverse map.
    pub(crate) anchors: Shared<Anchors>,
    /// Whether any CPU has walked the reverse map. Until then, spaces that end need not wait for
    /// walks.
    pub(crate) walked: AtomicBool,
    /// Spaces and objects that were dropped.
    pub(crate) ended: Ended,
    next_space: AtomicU64,
}

impl<M: Machine> fmt::Debug for Vm<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm").field("cpus", &self.machine.cpus()).finish_non_exhaustive()
    }
}

/// Checks that the parameters of `machine` are within the limits.
fn check(machine: &impl Machine) -> Result<(), Errno> {
    let cpus = (1..=MAX_CPUS).contains(&machine.cpus());
    let lowest = machine.lowest_address();
    let lowest = is_page_aligned(lowest) && lowest < USER_END;
    let regions = machine.regions().iter().all(|region| {
        usize::from(region.node) < MAX_NODES && region.first.0.checked_add(region.frames).is_some()
    });
    if cpus && lowest && regions { Ok(()) } else { Err(Errno::EINVAL) }
}

impl<M: Machine> Vm<M> {
    /// Creates the subsystem over `machine`, with all its memory free.
    ///
    /// # Errors
    /// `ENOMEM` if the heap cannot hold the metadata (64 bytes a frame) and the CPUs' state (up to
    /// 33 KiB each), or no frame is left for the zero page; `EINVAL` if the machine has no CPU or
    /// more than [`MAX_CPUS`](crate::MAX_CPUS), a region in no node of
    /// [`MAX_NODES`](crate::MAX_NODES) or beyond the last frame number, or a [lowest
    /// address](Machine::lowest_address) that is not a page of user space.
    pub fn new(machine: M) -> Result<Self, Errno> {
        check(&machine)?;
        let cpus = machine.cpus();
        let nearest = |cpu| machine.nearest_node(CpuId(cpu as u16));
        // SAFETY: by the promise of `Machine`, no other code uses the memory of its regions. The
        // machine stays in this `Vm`, so the frames see no other machine.
        let frames = unsafe { Frames::try_new(cpus, machine.regions(), nearest) }?;
        // SAFETY: the subsystem is under construction, so no other `Local` exists; this one is
        // dropped before `cpu` can be called.
        let boot = unsafe { Local::claim(CpuId(0)) };
        let zero = frames.alloc(&boot, &Spin).ok_or(Errno::ENOMEM)?;
        let zero = frames.publish(zero.zero(&machine), FrameUse::Zero, 0, 0);
        let total = frames.total();
        Ok(Self {
            frames,
            zero,
            defaults: Default::default(),
            grace: Grace::try_new(cpus)?,
            free_vmas: SharedVmaStock::default(),
            claims: ClaimSlots::try_new(cpus, |_| Default::default())?,
            inboxes: PerCpu::try_new(cpus, |_| Inbox::new())?,
            deferred: Deferred::try_new(cpus)?,
            cpus: PerCpu::try_new_with(cpus, |_| CpuState::try_new(total))?,
            knobs: Knobs::new(Identity::new()),
            trace: Trace::default(),
            lazy: lazy_list::Spaces::default(),
            charge: Charge::default(),
            clock: Clock::try_new(total)?,
            compaction: Compaction::new(),
            swap: SwapCell::new(),
            anchors: Shared::try_new(Anchors::try_new()?)?,
            walked: AtomicBool::new(false),
            ended: Ended::try_new()?,
            next_space: AtomicU64::new(1),
            machine,
        })
    }

    /// Returns the machine.
    #[inline(always)]
    pub const fn machine(&self) -> &M {
        &self.machine
    }

    /// Returns the current values of the knobs.
    #[inline]
    pub const fn knobs(&self) -> &Knobs {
        &self.knobs
    }

    /// Changes a knob, effective immediately.
    pub fn set(&self, setting: Setting) {
        match setting {
            Setting::FrameLimit(limit) => self.frames.set_limit(limit),
            // The arenas' locks are last in the lock order: their holder does not wait.
            Setting::ZeroedPool(frames) => self.frames.set_zeroed_pool(frames, &Spin),
            other => self.knobs.set(other),
        }
    }

    /// Returns the sum of all CPUs' counters.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        self.cpus.iter().for_each(|state| totals.include(&state.counts));
        totals
    }

    /// Returns the counters of CPU `id`, one of the machine's.
    pub fn totals_of(&self, id: CpuId) -> Totals {
        let mut totals = Totals::default();
        totals.include(&self.cpus.remote(id).counts);
        totals
    }

    /// Returns the number of the current ownership of `frame`; it changes whenever the frame is
    /// freed. Always 0 for a frame outside the machine's regions.
    #[inline]
    pub fn frame_owner(&self, frame: FrameNumber) -> u64 {
        self.frames.table().find(frame).map_or(0, FrameMeta::owner)
    }

    /// Returns the number of frames on the allocators' lists and in the CPUs' reserves, including
    /// zeroed frames. Frames in the CPUs' lists (at most one MiB each) are not included.
    pub fn free_frames(&self) -> u64 {
        self.frames.free_count() + self.frames.reserved_count()
    }

    /// Returns the part of [`free_frames`](Self::free_frames) on memory node `node`.
    pub fn free_frames_on(&self, node: u8) -> u64 {
        // As in `set`.
        self.frames.free_on(node, &Spin) + self.frames.reserved_on(node)
    }

    /// Returns the number of zeroed frames among [`free_frames`](Self::free_frames).
    pub fn zeroed_frames(&self) -> u64 {
        self.frames.zeroed_count()
    }

    /// Returns the number of frames of memory.
    pub const fn total_frames(&self) -> u64 {
        self.frames.total()
    }

    /// Counts all frames by use, and checks the counts against the allocators: law 6. Call it only
    /// at a quiet moment, when no call is in progress.
    ///
    /// # Errors
    /// The first imbalance found.
    pub fn census(&self, cpu: &Cpu<'_, M>) -> Result<Census, Imbalance> {
        self.frames.checked_census(cpu)
    }

    /// As [`census`](Self::census), at any time and without a check: a frame that changes its use
    /// during the count may be counted twice or not at all. The time is linear in the memory.
    pub fn usage(&self) -> Census {
        self.frames.census()
    }

    /// As [`usage`](Self::usage), for the frames of memory node `node`.
    pub fn usage_on(&self, node: u8) -> Census {
        self.frames.census_on(node)
    }

    /// Returns how often frames were freed since the machine started. The time is linear in the
    /// memory.
    pub fn frames_freed(&self) -> u64 {
        self.frames.freed()
    }

    /// Returns the memory of VMAs on the heap. The subsystem reuses this memory for other VMAs, and
    /// frees it when the `Vm` is dropped. Exact at a quiet moment, when no call is in progress.
    pub fn vma_usage(&self) -> VmaUsage {
        self.free_vmas.usage(self.cpus.iter().map(|state| state.free_vmas.allocated()).sum())
    }

    /// Returns the memory node of `frame`, if the frame belongs to the machine's regions.
    pub fn frame_node(&self, frame: FrameNumber) -> Option<u8> {
        // Holes between regions have metadata, too.
        let is_memory = |meta: &&FrameMeta| meta.kind() != Kind::Reserved;
        self.frames.table().find(frame).filter(is_memory).map(|_| self.frames.node(frame))
    }

    /// Returns whether `entry` maps the zero page.
    #[inline]
    pub(crate) const fn maps_zeros(&self, entry: Entry) -> bool {
        entry.is_special() && entry.frame().0 == self.zero.0
    }

    /// Returns the cache mode of the page that `entry` maps, if the page is device memory.
    #[inline]
    pub(crate) fn device(&self, entry: Entry) -> Option<CacheMode> {
        (entry.is_special() && !self.maps_zeros(entry)).then(|| entry.cache_mode())
    }

    pub(crate) fn new_space_id(&self) -> SpaceId {
        SpaceId(self.next_space.fetch_add(1, Ordering::Relaxed))
    }
}
