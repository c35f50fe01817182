//! The CPU that a call runs on: what every call takes first.

use super::Vm;
use super::state::CpuState;
use crate::addr::FrameNumber;
use crate::error::Errno;
use crate::fault::prefault::ThreadPredictor;
use crate::file::PendingRead;
use crate::frame::zeroed::Supply;
use crate::frame::{Bulk, Clean, Frame, Zeroed, folio};
use crate::identity::Identity;
use crate::machine::{CpuId, Machine, SpaceId};
use crate::stat::Counter;
use crate::sync::atomic::Ordering;
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::Record;
use crate::sync::percpu::Local;
use crate::sync::wait::{Wait, until};
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;

/// A CPU inside the subsystem: what every call takes first.
pub struct Cpu<'v, M: Machine> {
    pub(super) vm: &'v Vm<M>,
    pub(super) local: Local,
    /// This CPU's slot of `vm.cpus`.
    pub(super) state: &'v CpuState,
    /// `CpuState` is `Sync` because other CPUs read its atomics; the CPU itself is not.
    not_sync: PhantomData<Cell<()>>,
}

impl<M: Machine> fmt::Debug for Cpu<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu({})", self.local.id().0)
    }
}

/// A CPU serves flush requests while it waits.
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

impl<M: Machine> Vm<M> {
    /// The right to call the subsystem from CPU `id`.
    ///
    /// # Safety
    /// - There is at most one `Cpu` of each number at a time, and `id` is below `Machine::cpus()`.
    /// - It is used on CPU `id` only. It is `Send`: where CPUs are threads, the thread that has it is
    ///   the CPU. Where CPUs are cores, it must stay on its core; references to it are not `Send`.
    /// - Nothing uses it in the middle of a call: not what interrupts its holder there, nor the heap that
    ///   the call allocates from. (Closures that a call is given may use it, as far as the call's documentation allows.)
    pub unsafe fn cpu(&self, id: CpuId) -> Cpu<'_, M> {
        // SAFETY: handed on to the caller.
        let local = unsafe { Local::claim(id) };
        Cpu { vm: self, state: self.cpus.remote(id), local, not_sync: PhantomData }
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
        let served = {
            let runs = SpaceId(self.state.resident.space.load(Ordering::Relaxed));
            let Vm { inboxes, machine, deferred, .. } = self.vm;
            inboxes.get(&self.local).serve(machine, &self.local, runs, deferred)
        };
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

    /// Allocates a frame of zeros for a page table, or gives up without waiting.
    pub(crate) fn alloc_table(&self) -> Option<Frame<Zeroed>> {
        match self.vm.frames.alloc_for_table(&self.local, self) {
            Some(frame) => Some(self.zero(frame)),
            None => self.alloc_zeroed(),
        }
    }

    /// Zeroes a frame that is needed now.
    #[inline(always)]
    pub(crate) fn zero(&self, frame: Frame<Clean>) -> Frame<Zeroed> {
        self.count(Counter::ZeroedInFault);
        frame.zero(&self.vm.machine)
    }

    /// Up to `to.len()` frames of zeros, as many as can be spared, without waiting. What is not used goes
    /// back by [`free_bulk`](Self::free_bulk).
    #[inline(always)]
    pub(crate) fn alloc_zeroed_bulk<'b>(&self, to: &'b mut [FrameNumber]) -> Bulk<'b, Zeroed> {
        let frames = &self.vm.frames;
        let pools = frames.zeroed_pool() != 0;
        let (run, hits) = frames.alloc_zeroed_bulk(&self.local, &self.vm.machine, to, self);
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
    pub(crate) fn free_bulk<S: crate::frame::Settled>(&self, run: Bulk<'_, S>) {
        self.vm.frames.free_bulk(&self.local, run, self);
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
    #[inline(always)]
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

    /// [`put_unmapped`](Self::put_unmapped) of each of `numbers`, single frames.
    ///
    /// # Safety
    /// As [`put_unmapped`](Self::put_unmapped).
    pub(crate) unsafe fn put_gathered(&self, numbers: &[Cell<u32>]) {
        // SAFETY: handed on.
        unsafe { self.vm.frames.put_all(&self.local, numbers, self) };
    }

    /// Drops the reference of the entry that a table was in, and frees its frame if it was the last.
    ///
    /// # Safety
    /// As [`put_unmapped`](Self::put_unmapped).
    #[inline(never)]
    pub(crate) unsafe fn put_table(&self, number: FrameNumber) {
        if self.vm.frames.meta(number).put_ref() == 0 {
            // SAFETY: as in `put_unmapped`.
            let frame = unsafe { self.vm.frames.reclaim(number).settle() };
            self.vm.frames.free_table(&self.local, frame, self);
        }
    }

    /// Drops a huge leaf of the folio that begins with `first`, which was flushed, and with the last one the references that leaves have.
    ///
    /// # Safety
    /// As [`put_unmapped`](Self::put_unmapped).
    pub(crate) unsafe fn put_leaf(&self, first: FrameNumber) {
        if self.vm.frames.meta(first).drop_leaf() {
            for number in folio::frames_of(first) {
                // SAFETY: the references of the leaves, of which none is left, and each was flushed.
                unsafe { self.put_unmapped(number) };
            }
        }
    }

    pub(crate) fn set_pending(&self, pending: PendingRead) {
        self.state().pending.replace(Some(pending));
    }

    /// What this CPU's last fault that was [pending](crate::FaultKind::Pending), or call that was refused with `EAGAIN`, waits for. It is
    /// handed out once.
    pub fn pending_read(&self) -> Option<PendingRead> {
        self.state().pending.take()
    }

    /// Waits for what [`pending_read`](Self::pending_read) would hand out, for a kernel whose CPUs have nothing else to do. The read must be
    /// [completed](crate::Reading::complete) by another CPU, or in [`Machine::poll_reads`]. Returns at once if nothing is pending.
    ///
    /// # Errors
    /// The store's: the page could not be read. A program is told SIGBUS.
    pub fn await_read(&self) -> Result<(), Errno> {
        let Some(pending) = self.pending_read() else { return Ok(()) };
        let mut outcome = None;
        until(self, || {
            // A read that was dropped ends on some CPU.
            self.end_dropped();
            self.vm.machine().poll_reads(self.id());
            outcome = pending.outcome();
            outcome.is_some()
        });
        outcome.unwrap_or(Ok(()))
    }

    /// Makes `call`, one of a space's, for the thread that `thread` belongs to. Before the call unmaps pages that the thread's faults
    /// prefaulted, the predictor learns which of them were used, as the accessed bits tell; afterwards these are gone.
    pub fn for_thread<R>(&self, thread: &ThreadPredictor<M>, call: impl FnOnce() -> R) -> R {
        struct Restore<'c>(&'c Cell<*const ()>, *const ());
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                self.0.set(self.1);
            }
        }
        let slot = &self.state().thread;
        let _restore = Restore(slot, slot.replace(core::ptr::from_ref(thread).cast()));
        call()
    }

    /// The thread that this CPU makes a call for, if it is known.
    pub(crate) fn thread(&self) -> Option<&ThreadPredictor<M>> {
        // SAFETY: a `for_thread` of a CPU of this machine has stored it, and has borrowed it until it returns; the caller is part
        // of its call, and keeps no
        // reference beyond it.
        unsafe { self.state().thread.get().cast::<ThreadPredictor<M>>().as_ref() }
    }
}
