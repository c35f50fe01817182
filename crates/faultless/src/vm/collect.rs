//! Frees retired objects that no reader can see any more, and [ends](crate::ended) dropped spaces
//! and objects.

use super::Cpu;
use crate::addr::FrameNumber;
use crate::ended::Left;
use crate::error::Errno;
use crate::file::{Object, StoreError};
use crate::frame::FrameMeta;
use crate::frame::zeroed::RUN;
use crate::machine::Machine;
use crate::space::Space;
use crate::space::area::PageSource;
use crate::space::tree::{self, RETIRE_SHARD, RETIRE_TREE_NODE};
use crate::space::vma::{RETIRE_VMA, Vma};
use crate::sync::grace::{RetireChain, RetireLink};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{GracePeriod, Reclaim};
use crate::table::range;
use core::ptr::NonNull;

/// The number of retired objects above which a call tries to free some. Every try reads the state
/// of all CPUs, so tries must be rare. Meanwhile a few tens of KiB wait for each CPU that changes
/// mappings.
const COLLECT_ABOVE: usize = if cfg!(loom) { 0 } else { 128 };

const _: () = {
    let kinds = [FrameMeta::RETIRE_KIND, RETIRE_TREE_NODE, RETIRE_VMA, RETIRE_SHARD];
    let mut at = 0;
    while at < kinds.len() {
        assert!(kinds[at] as usize == at, "kinds differ");
        at += 1;
    }
};

impl<M: Machine> Cpu<'_, M> {
    /// Passes unlinked tables to the grace period.
    ///
    /// # Safety
    /// New readers cannot find the tables; the links are those of their frames, and retired once.
    pub(crate) unsafe fn retire_all(&self, mut tables: RetireChain) {
        if lost(Mutant::TableGrace) {
            // SAFETY: only this CPU has the chain; each link is retired once.
            while let Some(link) = unsafe { tables.pop() } {
                // SAFETY: retired once.
                unsafe { self.free_retired(link) };
            }
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { self.vm.grace.retire_all(&self.local, tables) };
    }

    /// The last step of a call, after releasing all locks. If many objects are retired, frees the
    /// objects without readers. With the knob `zero_on_free`, zeroes as many frames as the call
    /// freed.
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

    /// Keeps the objects removed by the owner of a space, to be freed at the end of the call.
    ///
    /// # Safety
    /// The objects are VMAs that no CPU can reach any more, and nothing else uses their links.
    pub(crate) unsafe fn leave_gone(&self, mut objects: RetireChain) {
        // SAFETY: the caller's promise, also for the earlier objects.
        unsafe { objects.prepend(self.state.gone.take()) };
        self.state.gone.set(objects);
    }

    /// Frees the kept objects.
    #[inline]
    pub(crate) fn free_gone(&self) {
        if self.state.gone.get().is_empty() {
            return;
        }
        // Freeing a VMA may end an object, whose store may panic: the other VMAs then stay in the
        // chain.
        while let Some(link) = self.pop_gone() {
            // SAFETY: only this CPU has the chain; see `leave_gone`. Each link is popped once.
            unsafe { self.free_retired(link) };
        }
    }

    fn pop_gone(&self) -> Option<NonNull<RetireLink>> {
        let mut gone = self.state.gone.take();
        // SAFETY: only this CPU has the chain; see `leave_gone`.
        let link = unsafe { gone.pop() };
        self.state.gone.set(gone);
        link
    }

    #[cold]
    pub(crate) fn collect_now(&self) {
        self.end_dropped();
        self.free_gone();
        for link in self.vm.grace.collect(&self.local) {
            // SAFETY: the grace period of the link is over, and the link is returned once.
            unsafe { self.free_retired(link) };
        }
    }

    /// Waits until all objects retired by this CPU are free: VMAs, tree nodes and tables that other
    /// CPUs may still have been reading. Calling this function is optional: each call frees objects
    /// whose grace period has ended. Not allowed inside a grace section.
    pub fn wait_grace(&self) {
        self.local.order().before::<GracePeriod>();
        self.end_dropped();
        self.free_gone();
        while self.vm.grace.pending(&self.local) != 0 {
            self.vm.grace.synchronize(&self.local, self);
            self.collect_now();
        }
    }

    /// Returns the CPU's stock of free frames and VMAs, after [`wait_grace`](Self::wait_grace) and
    /// [`end_dropped`](Self::end_dropped). For a CPU that goes idle for long or offline, and before
    /// an audit.
    pub fn drain(&self) {
        self.wait_grace();
        self.flush_deferred_if_any();
        self.state.free_vmas.drain(&self.vm.free_vmas, self);
        self.vm.frames.drain(&self.local, self);
    }

    /// Frees a retired object.
    ///
    /// # Safety
    /// `link` was returned by the grace period, once.
    pub(crate) unsafe fn free_retired(&self, link: NonNull<RetireLink>) {
        // SAFETY: the object that holds the link is alive until it is freed here.
        match unsafe { link.as_ref() }.kind() {
            RETIRE_VMA => {
                // SAFETY: a link of this kind is the first field of a VMA; no reader is left.
                unsafe { self.free_vma(link.cast::<Vma>()) };
            }
            RETIRE_TREE_NODE | RETIRE_SHARD => {
                // SAFETY: retired by the tree as its node or shard; no reader is left.
                unsafe { tree::free_retired(link) };
            }
            kind => {
                debug_assert_eq!(kind, FrameMeta::RETIRE_KIND);
                // Drops the reference of the entry that linked the table. A copying fault that saw
                // the frame in an earlier use may briefly have another reference, until it reads
                // the entry again; then that fault frees the frame. SAFETY: unlinked and flushed
                // before its grace period, which is over.
                unsafe { self.put_table(self.vm.frames.table().of_link(link)) };
            }
        }
    }

    /// Frees a VMA, and releases its object, which is freed if this was the last use.
    ///
    /// # Safety
    /// No other CPU reaches `vma`, except by a hint; its sequence is odd; and `vma` is freed once.
    pub(crate) unsafe fn free_vma(&self, vma: NonNull<Vma>) {
        // SAFETY: the caller's promise.
        if let PageSource::Object(object) = unsafe { self.end_vma(vma) } {
            Object::release(object, self);
        }
    }

    /// Frees a table and every table below it.
    ///
    /// # Safety
    /// No other CPU can reach `table`, which is of `level`; and every CPU has flushed its cached
    /// translations of the table.
    pub(crate) unsafe fn free_tables(&self, table: FrameNumber, level: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            range::free_all(&self.vm.machine, table, level, &mut |number| {
                // As in `free_retired`.
                self.put_table(number);
            });
        }
    }

    /// Ends the spaces and objects that were dropped, and returns their number. The functions that
    /// make a space or an object, or end a space, do the same, and so do
    /// [`zero_ahead`](Self::zero_ahead), [`drain`](Self::drain) and a CPU that is out of memory. A
    /// kernel calls this function to get the memory back at once, or when the CPU is idle. Not
    /// allowed inside a closure that lists areas.
    ///
    /// # Panics
    /// In builds with debug assertions, if an object or space would be ended inside such a closure.
    /// The list stays unchanged.
    #[inline]
    pub fn end_dropped(&self) -> usize {
        if self.vm().ended.is_empty() { 0 } else { self.end_left() }
    }

    #[cold]
    #[inline(never)]
    fn end_left(&self) -> usize {
        // A CPU that must not wait must not take an element off the list.
        self.local.order().before::<Reclaim>();
        let mut count = 0;
        // The remains of a space may hold the last share of an object, which is then released with
        // them.
        for left in self.vm().ended.take() {
            match left {
                Left::Space(remains) => Space::from_remains(remains).end(self),
                // SAFETY: the last share was dropped, and the tables are unreachable.
                Left::Object(parts) => unsafe { parts.end(self) },
                Left::Reading(unread) => {
                    unread.end(self, Err(StoreError { done: 0, errno: Errno::EIO }));
                }
            }
            count += 1;
        }
        count
    }
}
