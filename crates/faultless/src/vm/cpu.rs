//! The CPU that a call runs on: the first argument of every call.

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
use crate::rmap::AnonVma;
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

/// A CPU inside the subsystem: the first argument of every call.
pub struct Cpu<'v, M: Machine> {
    pub(super) vm: &'v Vm<M>,
    pub(super) local: Local,
    /// This CPU's slot of `vm.cpus`.
    pub(super) state: &'v CpuState,
    /// `CpuState` is `Sync` because other CPUs read its atomics; `Cpu` itself must not be.
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
        self.serve_requests();
        self.vm.machine.relax(looks);
    }

    #[cold]
    fn park(&self) {
        // A request that arrives after this call ends the parking.
        self.serve_requests();
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
    /// Returns the right to call the subsystem from CPU `id`.
    ///
    /// # Safety
    /// - There is at most one `Cpu` of each number at a time, and `id` is below `Machine::cpus()`.
    /// - The `Cpu` is used on CPU `id` only. It is `Send`: if CPUs are threads, the thread that has
    ///   the `Cpu` is the CPU. If CPUs are cores, the `Cpu` must stay on its core; references to it
    ///   are not `Send`.
    /// - The `Cpu` is not used in the middle of a call, neither by interrupt handlers nor by the
    ///   heap used by the call. (Closures passed to a call may use it, as far as the call's
    ///   documentation allows.)
    pub unsafe fn cpu(&self, id: CpuId) -> Cpu<'_, M> {
        // SAFETY: the caller's promise.
        let local = unsafe { Local::claim(id) };
        Cpu { vm: self, state: self.cpus.remote(id), local, not_sync: PhantomData }
    }
}

impl<'v, M: Machine> Cpu<'v, M> {
    /// Serves flush requests in a wait.
    #[inline]
    fn serve_requests(&self) {
        if !lost(Mutant::WaiterServes) {
            self.serve_flushes();
        }
    }

    /// Returns the subsystem.
    #[inline(always)]
    pub const fn vm(&self) -> &'v Vm<M> {
        self.vm
    }

    /// Returns the CPU's number.
    #[inline]
    pub const fn id(&self) -> CpuId {
        self.local.id()
    }

    #[inline(always)]
    pub(crate) const fn local(&self) -> &Local {
        &self.local
    }

    /// Returns the identity of the subsystem.
    #[inline(always)]
    pub(crate) fn identity(&self) -> Identity {
        Identity::of(self.vm.knobs.locking_word())
    }

    #[inline(always)]
    pub(crate) const fn state(&self) -> &'v CpuState {
        self.state
    }

    /// Serves the flush requests of CPUs: drops the requested translations. A machine calls this
    /// function when the CPU is [interrupted](Machine::interrupt).
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

    /// Makes an anon_vma: a new one of a space, or the replacement of a parent's anon_vma in a
    /// forked child (`inherited`).
    #[inline(always)]
    pub(crate) fn make_anon_vma(&self, inherited: bool) -> AnonVma {
        self.state.anon_vmas.make(self.id(), inherited)
    }

    /// Opens a grace section: objects that are reachable now stay readable until the section
    /// closes.
    #[inline(always)]
    pub(crate) fn section(&self) -> Section<'_> {
        self.vm.grace.enter(&self.local)
    }

    /// Allocates a frame without waiting; `None` if no frame is available.
    #[inline(always)]
    pub(crate) fn alloc(&self) -> Option<Frame<Clean>> {
        self.vm.frames.alloc(&self.local, self)
    }

    /// Allocates a frame of zeros without waiting; `None` if no frame is available.
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

    /// Allocates a frame of zeros for a page table without waiting; `None` if no frame is
    /// available.
    pub(crate) fn alloc_table(&self) -> Option<Frame<Zeroed>> {
        match self.vm.frames.alloc_for_table(&self.local, self) {
            Some(frame) => Some(self.zero(frame)),
            None => self.alloc_zeroed(),
        }
    }

    /// Zeroes a frame for immediate use.
    #[inline(always)]
    pub(crate) fn zero(&self, frame: Frame<Clean>) -> Frame<Zeroed> {
        self.count(Counter::ZeroedInFault);
        frame.zero(&self.vm.machine)
    }

    /// Allocates up to `to.len()` frames of zeros without waiting, as many as can be spared. Unused
    /// frames are returned by [`free_bulk`](Self::free_bulk).
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

    /// Frees the rest of a run.
    pub(crate) fn free_bulk<S: crate::frame::Flushed>(&self, run: Bulk<'_, S>) {
        self.vm.frames.free_bulk(&self.local, run, self);
    }

    pub(crate) fn free<S: crate::frame::Flushed>(&self, frame: Frame<S>) {
        self.vm.frames.free(&self.local, frame, self);
    }

    /// Drops a reference of a mapping that was flushed, and frees the frame if the reference was
    /// the last. Returns whether it was.
    ///
    /// # Safety
    /// The caller owned the reference; its mapping has been removed and flushed from every CPU that
    /// could hold it.
    #[inline(always)]
    pub(crate) unsafe fn put_unmapped(&self, number: FrameNumber) -> bool {
        let last = self.vm.frames.meta(number).put_ref() == 0;
        if last {
            // SAFETY: this was the last reference. Every reference is dropped only after its
            // mapping was flushed (space::batch), or while its page is flush-free
            // (reclaim::flush_free). So no CPU holds a translation.
            let frame = unsafe { self.vm.frames.reclaim(number).assume_flushed() };
            self.free(frame);
        }
        last
    }

    /// [`put_unmapped`](Self::put_unmapped) of each of `numbers`, single frames.
    ///
    /// # Safety
    /// As [`put_unmapped`](Self::put_unmapped).
    pub(crate) unsafe fn put_gathered(&self, numbers: &[Cell<u32>]) {
        // SAFETY: the caller's promise.
        unsafe { self.vm.frames.put_all(&self.local, numbers, self) };
    }

    /// Drops the reference of the entry that linked a table, and frees the table's frame if the
    /// reference was the last.
    ///
    /// # Safety
    /// As [`put_unmapped`](Self::put_unmapped).
    #[inline(never)]
    pub(crate) unsafe fn put_table(&self, number: FrameNumber) {
        if self.vm.frames.meta(number).put_ref() == 0 {
            // SAFETY: as in `put_unmapped`.
            let frame = unsafe { self.vm.frames.reclaim(number).assume_flushed() };
            self.vm.frames.free_table(&self.local, frame, self);
        }
    }

    /// Drops a huge leaf, which was flushed, of the folio that begins with `first`. With the last
    /// leaf of the folio, also drops the references held by the leaves.
    ///
    /// # Safety
    /// As [`put_unmapped`](Self::put_unmapped).
    pub(crate) unsafe fn put_leaf(&self, first: FrameNumber) {
        if self.vm.frames.meta(first).drop_leaf() {
            for number in folio::frames_of(first) {
                // SAFETY: drops the references of the leaves; no leaf is left, and each was
                // flushed.
                unsafe { self.put_unmapped(number) };
            }
        }
    }

    pub(crate) fn set_pending(&self, pending: PendingRead) {
        self.state().pending.replace(Some(pending));
    }

    /// Returns the read that this CPU's last [pending](crate::FaultKind::Pending) fault, or last
    /// call refused with `EAGAIN`, waits for. Each read is returned once.
    pub fn pending_read(&self) -> Option<PendingRead> {
        self.state().pending.take()
    }

    /// Waits for the read returned by [`pending_read`](Self::pending_read), for a kernel whose CPUs
    /// have no other work. The read must be [completed](crate::Reading::complete) by another CPU,
    /// or in [`Machine::poll_reads`]. Returns at once if no read is pending.
    ///
    /// # Errors
    /// The store's error: the page could not be read. The kernel reports SIGBUS to the program.
    pub fn await_read(&self) -> Result<(), Errno> {
        let Some(pending) = self.pending_read() else { return Ok(()) };
        let mut outcome = None;
        until(self, || {
            // A dropped read is ended by any CPU that calls this.
            self.end_dropped();
            self.vm.machine().poll_reads(self.id());
            outcome = pending.outcome();
            outcome.is_some()
        });
        outcome.unwrap_or(Ok(()))
    }

    /// Makes `call`, a call on a space, on behalf of the thread that `thread` belongs to. Before
    /// the call unmaps pages that the thread's faults prefaulted, the predictor reads their
    /// accessed bits, which the unmap discards, and learns which pages were used.
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

    /// Returns the thread on whose behalf this CPU makes a call, if known.
    pub(crate) fn thread(&self) -> Option<&ThreadPredictor<M>> {
        // SAFETY: a `for_thread` of a CPU of this machine has stored the pointer, and borrows the
        // thread until it returns; the caller is part of its call, and keeps no reference beyond
        // it.
        unsafe { self.state().thread.get().cast::<ThreadPredictor<M>>().as_ref() }
    }
}
