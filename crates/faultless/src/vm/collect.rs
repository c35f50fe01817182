//! Frees what calls have retired, when no reader can see it any more, and [ends](crate::ended) what was dropped.

use super::Cpu;
use crate::addr::FrameNumber;
use crate::ended::Left;
use crate::error::Errno;
use crate::file::{Object, StoreError};
use crate::frame::FrameMeta;
use crate::frame::zeroed::RUN;
use crate::machine::Machine;
use crate::space::Space;
use crate::space::tree::{self, RETIRE_SHARD, RETIRE_TREE_NODE};
use crate::space::vma::{Memory, RETIRE_VMA, Vma};
use crate::sync::grace::{RetireChain, RetireLink};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{GracePeriod, Reclaim};
use crate::table::range;
use alloc::boxed::Box;
use core::ptr::NonNull;

/// Retired objects beyond which a call tries to free some. Every try looks at all CPUs' marks, and every
/// step of the epoch sends faults to the tree again that had a hint; so not too often. A few tens of
/// KiB for each CPU that changes mappings wait meanwhile.
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

    /// The last action of a call, which holds no lock any more. If much has been retired, it frees what no reader can see. With the
    /// knob `zero_on_free` it zeroes as many frames as the call freed.
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
    /// The objects are VMAs that no CPU can reach any more, and nothing else uses their links.
    pub(crate) unsafe fn leave_gone(&self, mut objects: RetireChain) {
        // SAFETY: the caller's promise, for those before as well.
        unsafe { objects.prepend(self.state.gone.take()) };
        self.state.gone.set(objects);
    }

    #[inline]
    fn free_gone(&self) {
        if self.state.gone.get().is_empty() {
            return;
        }
        // The end of an object, whose store may panic, may come with a VMA: the others stay to be freed.
        while let Some(link) = self.pop_gone() {
            // SAFETY: ours alone; see `leave_gone`. It comes out once.
            unsafe { self.free_retired(link) };
        }
    }

    fn pop_gone(&self) -> Option<NonNull<RetireLink>> {
        let mut gone = self.state.gone.take();
        // SAFETY: ours alone; see `leave_gone`.
        let link = unsafe { gone.pop() };
        self.state.gone.set(gone);
        link
    }

    #[cold]
    pub(crate) fn collect_now(&self) {
        self.end_dropped();
        self.free_gone();
        for link in self.vm.grace.collect(&self.local) {
            // SAFETY: the grace period of the link is over, and it comes out once.
            unsafe { self.free_retired(link) };
        }
    }

    /// Waits until everything that this CPU retired is free: VMAs, tree nodes and tables that other CPUs may still have been reading.
    /// A kernel that frees memory at leisure need not call it: each call frees what has become free. Not inside a grace section.
    pub fn settle_retired(&self) {
        self.local.order().before::<GracePeriod>();
        self.end_dropped();
        self.free_gone();
        while self.vm.grace.pending(&self.local) != 0 {
            self.vm.grace.synchronize(&self.local, self);
            self.collect_now();
        }
    }

    /// Gives the CPU's stock of free frames back, after [`settle_retired`](Self::settle_retired) and
    /// [`end_dropped`](Self::end_dropped). For a CPU that goes idle for long or offline, and before an audit.
    pub fn drain(&self) {
        self.settle_retired();
        self.settle_owed();
        self.vm.frames.drain(&self.local, self);
    }

    /// # Safety
    /// `link` came out of the grace period, once.
    pub(crate) unsafe fn free_retired(&self, link: NonNull<RetireLink>) {
        // SAFETY: the object that holds the link is alive until it is freed here.
        match unsafe { link.as_ref() }.kind() {
            RETIRE_VMA => {
                // SAFETY: a link of this kind is the first field of a VMA made by `heap::try_box`;
                // no reader is left.
                let vma = unsafe { Box::from_raw(link.cast::<Vma>().as_ptr()) };
                self.drop_vma(vma);
            }
            RETIRE_TREE_NODE | RETIRE_SHARD => {
                // SAFETY: retired by the tree as its node or shard; no reader is left.
                unsafe { tree::free_retired(link) };
            }
            kind => {
                debug_assert_eq!(kind, FrameMeta::RETIRE_KIND);
                // That of the entry it was in. A copying fault that saw the frame in an earlier life
                // may have another, for the moment until it looks again; then the frame is its to
                // free.
                // SAFETY: unlinked and flushed before its grace period, which is over.
                unsafe { self.put_table(self.vm.frames.table().of_link(link)) };
            }
        }
    }

    /// Frees a VMA that no reader can see, and the object behind it when it was the last to use it.
    pub(crate) fn drop_vma(&self, mut vma: Box<Vma>) {
        let memory = core::mem::replace(&mut vma.area.get_mut().memory, Memory::Anonymous);
        drop(vma);
        if let Memory::Object(object) = memory {
            Object::release(object, self);
        }
    }

    /// Frees a table and every table below it.
    ///
    /// # Safety
    /// No other CPU can reach `table`, which is of `level`; and every CPU has flushed what it cached
    /// of it.
    pub(crate) unsafe fn free_tables(&self, table: FrameNumber, level: u32) {
        // SAFETY: handed on.
        unsafe {
            range::free_all(&self.vm.machine, table, level, &mut |number| {
                // As in `free_retired`.
                self.put_table(number);
            });
        }
    }

    /// Ends the spaces and objects that were dropped, and returns how many. The functions that make a space or an object, or end a
    /// space, do the same, and so do [`zero_ahead`](Self::zero_ahead), [`drain`](Self::drain) and a CPU that is out of memory. A
    /// kernel calls this where it wants the memory back at once, or where the CPU has time. Not inside a closure that lists areas.
    ///
    /// # Panics
    /// In builds with debug assertions, where something is to be ended inside such a closure. It stays to be ended.
    #[inline]
    pub fn end_dropped(&self) -> usize {
        if self.vm().ended.is_empty() { 0 } else { self.end_left() }
    }

    #[cold]
    #[inline(never)]
    fn end_left(&self) -> usize {
        // Nothing may be taken off the list by a CPU that must not wait.
        self.local.order().before::<Reclaim>();
        let mut count = 0;
        // What a space leaves may hold the last share of an object, which is released with it.
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
