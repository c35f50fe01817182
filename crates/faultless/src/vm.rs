//! The subsystem as a whole, and the CPU that a call runs on.

mod state;

use state::CpuState;

use crate::addr::FrameNumber;
use crate::error::Errno;
use crate::fault::prefault::{Habits, ThreadStreams};
use crate::file::Object;
use crate::frame::zeroed::{RUN, Supply};
use crate::frame::{Census, Clean, Frame, FrameMeta, Frames, Imbalance, Run, Use, Zeroed};
use crate::identity::Identity;
use crate::knob::{Knobs, Setting};
use crate::machine::{CpuId, Machine, SpaceId};
use crate::reclaim::lazy;
use crate::space::Space;
use crate::space::fixed::Core;
use crate::space::tree::{self, RETIRE_TREE_NODE};
use crate::space::vma::Vma;
use crate::stat::{Counter, Totals, Trace};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::grace::{Grace, RetireChain, RetireLink, Section};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{GracePeriod, Record};
use crate::sync::percpu::{Local, PerCpu};
use crate::sync::range::ClaimSlots;
use crate::sync::wait::{Spin, Wait};
use crate::table::range;
use crate::tlb::shootdown::Inbox;
use alloc::boxed::Box;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

/// Retired objects beyond which a call tries to free some. Every try looks at all CPUs' marks, and every
/// step of the epoch sends faults to the tree again that had a hint; so not too often. A few tens of
/// KiB for each CPU that changes mappings wait meanwhile.
const COLLECT_ABOVE: usize = if cfg!(loom) { 0 } else { 128 };

/// The kind of a VMA that waits for a grace period to end.
pub(crate) const RETIRE_VMA: u8 = 2;

/// How many calls that change VMAs a CPU makes in shared spaces before it looks whether it is alone there.
const CALLS_BEFORE_OWNING: u32 = 64;

const _: () = assert!(RETIRE_VMA != RETIRE_TREE_NODE && RETIRE_VMA != FrameMeta::RETIRE_KIND);

/// The virtual-memory subsystem over one machine.
pub struct Vm<M: Machine> {
    machine: M,
    pub(crate) frames: Frames,
    pub(crate) grace: Grace,
    pub(crate) claims: ClaimSlots,
    pub(crate) inboxes: PerCpu<Inbox>,
    pub(crate) cpus: PerCpu<CpuState>,
    pub(crate) zero: FrameNumber,
    /// Where threads begin.
    pub(crate) habits: Habits,
    /// What can be switched; and the subsystem's identity.
    pub(crate) knobs: Knobs,
    /// The trace points.
    pub trace: Trace,
    /// Where lazily freed pages may be.
    pub(crate) lazy: lazy::Spaces,
    next_space: AtomicU64,
}

impl<M: Machine> fmt::Debug for Vm<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm").field("cpus", &self.machine.cpus()).finish_non_exhaustive()
    }
}

impl<M: Machine> Vm<M> {
    /// The subsystem over `machine`, with all its memory free.
    ///
    /// # Errors
    /// `ENOMEM` when the heap cannot hold the metadata (64 bytes a frame) and the CPUs' state (up to 33 KiB each), or no frame is left for
    /// the zero page; `EINVAL` when the machine has no CPU or more than
    /// [`MAX_CPUS`](crate::MAX_CPUS).
    pub fn new(machine: M) -> Result<Self, Errno> {
        let cpus = machine.cpus();
        if !(1..=crate::machine::MAX_CPUS).contains(&cpus) {
            return Err(Errno::EINVAL);
        }
        // SAFETY: regions of a machine, by its promise memory that nothing else uses. No other machine is
        // given to these frames, which stay in here.
        let frames = unsafe { Frames::try_new(cpus, machine.regions()) }?;
        // SAFETY: nobody else has a `Local` of a subsystem that is being made; it is gone before
        // `cpu` can be called.
        let boot = unsafe { Local::claim(CpuId(0)) };
        let zero = frames.alloc(&boot, &Spin).ok_or(Errno::ENOMEM)?;
        let zero = frames.publish(zero.zero(&machine), Use::Zero, 0, 0);
        let total = frames.total();
        Ok(Self {
            frames,
            zero,
            habits: Habits::new(),
            grace: Grace::try_new(cpus)?,
            claims: ClaimSlots::try_new(cpus, |_| Default::default())?,
            inboxes: PerCpu::try_new(cpus, |_| Inbox::new())?,
            cpus: PerCpu::try_new_with(cpus, |_| CpuState::try_new(total))?,
            knobs: Knobs::new(Identity::new()),
            trace: Trace::default(),
            lazy: lazy::Spaces::default(),
            next_space: AtomicU64::new(1),
            machine,
        })
    }

    /// The machine beneath.
    #[inline(always)]
    pub const fn machine(&self) -> &M {
        &self.machine
    }

    /// The right to call the subsystem from CPU `id`.
    ///
    /// # Safety
    /// - There is at most one `Cpu` of each number at a time, and `id` is below `Machine::cpus()`.
    /// - It is used on CPU `id` only. It is `Send`, for on a machine whose CPUs are threads the CPU is whoever has
    ///   it; where CPUs are cores, whoever made it keeps it on its core, and lends references, which are not.
    /// - Nothing uses it in the middle of a call: not what interrupts its holder there, nor the heap that
    ///   the call allocates from. (Closures that a call is given may use it, as far as the call says.)
    pub unsafe fn cpu(&self, id: CpuId) -> Cpu<'_, M> {
        // SAFETY: handed on to the caller.
        let local = unsafe { Local::claim(id) };
        Cpu { vm: self, state: self.cpus.remote(id), local, not_sync: PhantomData }
    }

    /// The knobs' present values.
    #[inline]
    pub const fn knobs(&self) -> &Knobs {
        &self.knobs
    }

    /// Changes a knob, from now on.
    pub fn set(&self, setting: Setting) {
        match setting {
            Setting::FrameLimit(limit) => self.frames.set_limit(limit),
            // The nodes' locks are leaves: whoever holds one waits for nobody.
            Setting::ZeroedPool(frames) => self.frames.set_zeroed_pool(frames, &Spin),
            other => self.knobs.set(other),
        }
    }

    /// What all CPUs counted so far.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        self.cpus.iter().for_each(|state| totals.include(&state.counts));
        totals
    }

    /// What CPU `id`, one of the machine's, counted so far.
    pub fn totals_of(&self, id: CpuId) -> Totals {
        let mut totals = Totals::default();
        totals.include(&self.cpus.remote(id).counts);
        totals
    }

    /// Which ownership of `frame` this is; it changes whenever the frame is freed.
    #[inline]
    pub fn frame_owner(&self, frame: FrameNumber) -> u64 {
        self.frames.meta(frame).owner()
    }

    /// Frames on the allocators' lists, zeroed ones among them.
    pub fn free_frames(&self) -> u64 {
        self.frames.free_count()
    }

    /// Those of them that are zeroed.
    pub fn zeroed_frames(&self) -> u64 {
        self.frames.zeroed_count()
    }

    /// Frames of memory.
    pub const fn total_frames(&self) -> u64 {
        self.frames.total()
    }

    /// Counts every frame by what it is used for, and checks the counts against the allocators:
    /// law 6. Only at a quiet moment, when no call is under way.
    ///
    /// # Errors
    /// The first imbalance found.
    pub fn audit(&self, cpu: &Cpu<'_, M>) -> Result<Census, Imbalance> {
        self.frames.audit(cpu)
    }

    pub(crate) fn new_space_id(&self) -> SpaceId {
        SpaceId(self.next_space.fetch_add(1, Ordering::Relaxed))
    }
}

/// A CPU inside the subsystem: what every call takes first.
pub struct Cpu<'v, M: Machine> {
    vm: &'v Vm<M>,
    local: Local,
    /// This CPU's slot of `vm.cpus`.
    state: &'v CpuState,
    /// `CpuState` is `Sync` for those who read its atomics; the CPU itself is not.
    not_sync: PhantomData<Cell<()>>,
}

impl<M: Machine> fmt::Debug for Cpu<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu({})", self.local.id().0)
    }
}

/// Whoever waits, answers.
impl<M: Machine> Wait for Cpu<'_, M> {
    #[cold]
    fn wait(&self, looks: u32) {
        self.answer();
        self.vm.machine.relax(looks);
    }

    #[cold]
    fn park(&self) {
        // A request that comes after this look ends the parking.
        self.answer();
        self.vm.machine.park(self.id());
    }

    #[cold]
    fn wake(&self, cpu: CpuId) {
        self.vm.machine.wake(cpu);
    }

    #[inline(always)]
    fn order(&self) -> Option<&Record> {
        Some(self.local.order())
    }
}

impl<'v, M: Machine> Cpu<'v, M> {
    /// Serves flush requests in a wait.
    #[inline]
    fn answer(&self) {
        if !lost(Mutant::WaiterAnswers) {
            self.serve_flushes();
        }
    }

    /// The subsystem.
    #[inline(always)]
    pub const fn vm(&self) -> &'v Vm<M> {
        self.vm
    }

    /// The CPU's number.
    #[inline]
    pub const fn id(&self) -> CpuId {
        self.local.id()
    }

    #[inline(always)]
    pub(crate) const fn local(&self) -> &Local {
        &self.local
    }

    /// The identity of the subsystem.
    #[inline(always)]
    pub(crate) fn identity(&self) -> Identity {
        Identity::of(self.vm.knobs.locking_word())
    }

    #[inline(always)]
    pub(crate) const fn state(&self) -> &'v CpuState {
        self.state
    }

    /// Drops the translations that other CPUs asked this one to drop. A machine calls it when it was
    /// [interrupted](Machine::interrupt).
    pub fn serve_flushes(&self) {
        let served = self.vm.inboxes.get(&self.local).serve(&self.vm.machine, &self.local);
        if served != 0 {
            self.state().counts.add(Counter::TlbShootdownReceived, served);
        }
    }

    #[inline(always)]
    pub(crate) fn count(&self, counter: Counter) {
        self.state().counts.add(counter, 1);
    }

    /// Opens a grace section: what is reachable now stays readable until it closes.
    #[inline(always)]
    pub(crate) fn section(&self) -> Section<'_> {
        self.vm.grace.enter(&self.local)
    }

    /// Allocates a frame, or gives up without waiting.
    #[inline(always)]
    pub(crate) fn alloc(&self) -> Option<Frame<Clean>> {
        self.vm.frames.alloc(&self.local, self)
    }

    /// Allocates a frame of zeros, or gives up without waiting.
    #[inline(always)]
    pub(crate) fn alloc_zeroed(&self) -> Option<Frame<Zeroed>> {
        let count = |supply| {
            self.count(match supply {
                Supply::Pool => Counter::ZeroedPoolHit,
                Supply::Miss => Counter::ZeroedPoolMiss,
                Supply::Now => Counter::ZeroedInFault,
            });
        };
        self.vm.frames.alloc_zeroed(&self.local, &self.vm.machine, self, count)
    }

    /// Zeroes a frame that is needed now.
    #[inline(always)]
    pub(crate) fn zero(&self, frame: Frame<Clean>) -> Frame<Zeroed> {
        self.count(Counter::ZeroedInFault);
        frame.zero(&self.vm.machine)
    }

    /// Up to `to.len()` frames of zeros, as many as can be spared, without waiting. What is not used goes
    /// back by [`free_run`](Self::free_run).
    pub(crate) fn alloc_zeroed_run<'b>(&self, to: &'b mut [FrameNumber]) -> Run<'b, Zeroed> {
        let frames = &self.vm.frames;
        let pools = frames.zeroed_pool() != 0;
        let (run, hits) = frames.alloc_zeroed_run(&self.local, &self.vm.machine, to, self);
        let (hits, misses) = (hits as u64, (run.len() - hits) as u64);
        let counts = &self.state().counts;
        counts.add(Counter::ZeroedInFault, misses);
        if pools {
            counts.add(Counter::ZeroedPoolHit, hits);
            counts.add(Counter::ZeroedPoolMiss, misses);
        }
        run
    }

    /// Frees what is left of a run.
    pub(crate) fn free_run<S: crate::frame::Settled>(&self, run: Run<'_, S>) {
        self.vm.frames.free_run(&self.local, run, self);
    }

    /// Zeroes free frames into the pools of the nodes (knob `zeroed_pool`), at most about `budget`, as a
    /// CPU does that has nothing else to do. Returns how many; 0 when the pools are full or off, or memory
    /// is short: then there is nothing to do until something was allocated or freed.
    ///
    /// Flush requests are served after each [`RUN`](crate::frame::zeroed::RUN) frames; a CPU that has to
    /// be quick to answer something else gives a budget of so many, and calls again.
    ///
    /// It also frees what calls of this CPU retired, if that is more than a little.
    pub fn zero_ahead(&self, budget: usize) -> usize {
        self.collect_idle();
        self.zero_for(budget, Counter::ZeroedIdle)
    }

    /// Zeroes as many free frames as calls of this CPU freed, if the knob `zero_on_free` is set. They
    /// were told by [`note_freed`](Self::note_freed).
    #[cold]
    fn zero_freed(&self) {
        let freed = self.state.freed.take();
        if self.vm.knobs.zero_on_free() {
            self.zero_for(freed, Counter::ZeroedOnFree);
        }
    }

    /// Notes that a call let go of `frames` frames.
    #[inline]
    pub(crate) fn note_freed(&self, frames: usize) {
        self.state.freed.set(self.state.freed.get() + frames);
    }

    fn zero_for(&self, budget: usize, whom: Counter) -> usize {
        let mut done = 0;
        while done < budget {
            let run = self.vm.frames.zero_run(&self.vm.machine, budget - done, self);
            if run == 0 {
                break;
            }
            done += run;
            self.serve_flushes();
        }
        self.state().counts.add(whom, done as u64);
        done
    }

    pub(crate) fn free<S: crate::frame::Settled>(&self, frame: Frame<S>) {
        self.vm.frames.free(&self.local, frame, self);
    }

    /// Drops a reference of a mapping that was flushed, and frees the frame if it was the last. Returns
    /// whether it was.
    ///
    /// # Safety
    /// The caller had the reference; the mapping that it stood for is gone and has been flushed
    /// from every CPU that could hold it.
    pub(crate) unsafe fn put_unmapped(&self, number: FrameNumber) -> bool {
        let last = self.vm.frames.meta(number).put_ref() == 0;
        if last {
            // SAFETY: the last reference was ours. Every reference is put only after its mapping
            // was flushed (space::batch), so no CPU holds a translation.
            let frame = unsafe { self.vm.frames.reclaim(number).settle() };
            self.free(frame);
        }
        last
    }

    /// Hands unlinked tables to the grace period.
    ///
    /// # Safety
    /// New readers cannot find the tables; the links are those of their frames, and retired once.
    pub(crate) unsafe fn retire_all(&self, mut tables: RetireChain) {
        if lost(Mutant::TableGrace) {
            // SAFETY: ours alone; retired once.
            while let Some(link) = unsafe { tables.pop() } {
                // SAFETY: retired once.
                unsafe { self.free_retired(link) };
            }
            return;
        }
        // SAFETY: handed on.
        unsafe { self.vm.grace.retire_all(&self.local, tables) };
    }

    /// What a call does last, when it holds nothing any more: frees what no reader can see any more, when
    /// much has piled up, and zeroes as much as was freed, where that is asked for. Cheap otherwise.
    #[inline]
    pub(crate) fn collect(&self) {
        if self.state.freed.get() >= RUN {
            self.zero_freed();
        }
        self.free_gone();
        if self.vm.grace.pending(&self.local) > COLLECT_ABOVE {
            self.collect_now();
        }
    }

    /// Frees at the end of the call what it removed as the owner of a space.
    ///
    /// # Safety
    /// The objects are VMAs that nobody can see any more, and their links are theirs alone.
    pub(crate) unsafe fn leave_gone(&self, mut objects: RetireChain) {
        // SAFETY: the caller's promise, for those before as well.
        unsafe { objects.prepend(self.state.gone.take()) };
        self.state.gone.set(objects);
    }

    #[inline]
    fn free_gone(&self) {
        let mut gone = self.state.gone.take();
        // SAFETY: ours alone; see `leave_gone`.
        while let Some(link) = unsafe { gone.pop() } {
            // SAFETY: as above, and it comes out once.
            unsafe { self.free_retired(link) };
        }
    }

    /// Whether it is time to find out if this CPU is the only one to use a space that is shared: after so many calls that
    /// the look at all CPUs costs nothing.
    #[inline]
    pub(crate) fn is_time_to_own(&self) -> bool {
        let calls = self.state.shared_calls.get().wrapping_add(1);
        self.state.shared_calls.set(calls);
        calls.is_multiple_of(if cfg!(any(loom, shuttle)) { 1 } else { CALLS_BEFORE_OWNING })
    }

    #[cold]
    pub(crate) fn collect_now(&self) {
        self.free_gone();
        for link in self.vm.grace.collect(&self.local) {
            // SAFETY: the grace period of the link is over, and it comes out once.
            unsafe { self.free_retired(link) };
        }
    }

    /// Waits until everything that this CPU retired is free. Not inside a grace section.
    pub fn settle_retired(&self) {
        self.local.order().before::<GracePeriod>();
        self.free_gone();
        while self.vm.grace.pending(&self.local) != 0 {
            self.vm.grace.synchronize(&self.local, self);
            self.collect_now();
        }
    }

    /// Gives the CPU's stock of free frames back and frees what it retired, as before going idle for
    /// long, or before an audit.
    pub fn drain(&self) {
        self.settle_retired();
        self.vm.frames.drain(&self.local, self);
    }

    /// # Safety
    /// `link` came out of the grace period, once.
    pub(crate) unsafe fn free_retired(&self, link: NonNull<RetireLink>) {
        // SAFETY: the object that holds the link is alive until it is freed here.
        match unsafe { link.as_ref() }.kind() {
            RETIRE_TREE_NODE => {
                // SAFETY: retired by the tree as its node; no reader is left.
                unsafe { tree::free_retired(link) };
            }
            RETIRE_VMA => {
                // SAFETY: a link of this kind is the first field of a VMA made by `heap::try_box`;
                // no reader is left.
                let vma = unsafe { Box::from_raw(link.cast::<Vma>().as_ptr()) };
                self.drop_vma(vma);
            }
            kind => {
                debug_assert_eq!(kind, FrameMeta::RETIRE_KIND);
                // That of the entry it was in. A copying fault that saw the frame in an earlier life
                // may have another, for the moment until it looks again; then the frame is its to
                // free.
                // SAFETY: unlinked and flushed before its grace period, which is over.
                unsafe { self.put_unmapped(self.vm.frames.table().of_link(link)) };
            }
        }
    }

    /// Frees a VMA that no reader can see, and the object behind it when it was the last to use it.
    pub(crate) fn drop_vma(&self, mut vma: Box<Vma>) {
        let object = vma.area.get_mut().object.take();
        drop(vma);
        if let Some(object) = object {
            Object::release(object, self);
        }
    }

    /// Frees a table and every table below it.
    ///
    /// # Safety
    /// Nobody else can reach `table`, which is of `level`; and every CPU has flushed what it cached
    /// of it.
    pub(crate) unsafe fn free_tables(&self, table: FrameNumber, level: u32) {
        // SAFETY: handed on.
        unsafe {
            range::free_all(&self.vm.machine, table, level, &mut |number| {
                // As in `free_retired`.
                self.put_unmapped(number);
            });
        }
    }

    /// Makes `call`, one of a space's, for the thread that `thread` belongs to: what its faults prefaulted
    /// in the pages that the call takes away is judged before they go, while it can be seen whether they were
    /// used.
    pub fn for_thread<R>(&self, thread: &ThreadStreams, call: impl FnOnce() -> R) -> R {
        struct Restore<'c>(&'c Cell<*const ThreadStreams>, *const ThreadStreams);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                self.0.set(self.1);
            }
        }
        let slot = &self.state().thread;
        let _restore = Restore(slot, slot.replace(thread));
        call()
    }

    /// The thread that this CPU makes a call for, if it is known.
    pub(crate) fn thread(&self) -> Option<&ThreadStreams> {
        // SAFETY: `for_thread` has borrowed it until it returns; whoever asks is part of its call, and keeps no
        // reference beyond it.
        unsafe { self.state().thread.get().as_ref() }
    }

    /// Counts resident pages of `space`, on this CPU's own line while it runs that space.
    #[inline(always)]
    pub(crate) fn add_resident(&self, space: &Space<M>, pages: i64) {
        if !self.add_resident_here(space.id(), pages) {
            space.core.resident.fetch_add(pages as u64, Ordering::Relaxed);
        }
    }

    /// [`add_resident`](Self::add_resident) of a space of which only its core is known.
    pub(crate) fn add_resident_of(&self, core: &Core, pages: i64) {
        if !self.add_resident_here(core.id, pages) {
            core.resident.fetch_add(pages as u64, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn add_resident_here(&self, space: SpaceId, pages: i64) -> bool {
        let resident = &self.state().resident;
        let here = resident.space.load(Ordering::Relaxed) == space.0;
        if here {
            let now = resident.pages.load(Ordering::Relaxed).wrapping_add(pages as u64);
            resident.pages.store(now, Ordering::Relaxed);
        }
        here
    }
}
