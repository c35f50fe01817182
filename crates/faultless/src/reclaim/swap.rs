//! Swap: private anonymous pages leave memory, and are read again.
//!
//! # The swap area
//!
//! The swap area is a [memory object](crate::file::object) with a [backing
//! store](crate::file::BackingStore). Page n of this object is *slot* n. A private page that leaves
//! memory first becomes a page of the object. The remaining steps are the same as for files:
//! [eviction](super::evict) writes and drops the page, the page is [read](crate::file::Reading)
//! once for any number of waiting faults, and errors of the store are handled in the same way. All
//! tables of the object are made with the area, since pages leave when no frame is free.
//!
//! A program's [*swapped*](crate::table::Entry::swapped) entry names a slot. Each slot has a
//! [count](super::slots) of these entries. The count is raised before an entry is stored, and
//! dropped after the entry was removed, by the CPU that removed it, without a wait. So while a CPU
//! holds a swapped entry, the slot cannot be reused.
//!
//! | count of the slot | page in the object | |
//! |---|---|---|
//! | 0 | no | free |
//! | 0 | yes | free; the page is *dead*: the next user of the slot or the clock drops it, and it is never written |
//! | n | no | n entries name it, and the store has the page |
//! | n | yes | n entries name it; the page in memory is current, and the store has the same contents if the page is not dirty |
//!
//! # Swapping out
//!
//! A batch of pages is [taken](super::isolate) from its programs: all entries are busy, there is no
//! other reference, and no CPU has a translation. For each page a free slot was reserved before.
//! Then
//!
//! 1. the slot's entry in the object is taken. A dead page there is dropped, and a read in progress
//!    for the earlier contents is abandoned, as when the kernel
//!    [overwrites](Shared::overwrite_page) a page that is being read;
//! 2. the frame is described as a page of the object, and the object's entry names the frame,
//!    dirty;
//! 3. the programs' entries become swapped entries. A fault on such an entry finds the page in the
//!    object;
//! 4. all but one of the mappings' references are dropped; the remaining one is the object's.
//!
//! # Swapping in
//!
//! A fault on a swapped entry searches the page in the object, and [reads](crate::fault) a missing
//! page. Then it takes the program's entry like any fault, and validates its ticket. The page found
//! is the right page if the object's entry still names it: the slot may have belonged to another
//! page before the entry was taken, and cannot afterwards. If this is the only entry of the slot,
//! and there is no other reference, the page leaves the object and becomes the program's again.
//! Otherwise the program gets a copy.
//!
//! # Other changes
//!
//! Only a CPU that has a claim on an address, or has validated a ticket, changes a swapped entry.
//! So an entry cannot change while a `fork`, which has a claim on the whole space, raises its
//! count.

use super::isolate::{BATCH, Batch, Mapping, Then};
use super::slots::Slots;
use crate::addr::{FrameNumber, PAGE_SHIFT};
use crate::error::{Errno, OutOfMemory};
use crate::fault::prepared::Preparing;
use crate::file::{Object, Store};
use crate::frame::{FrameUse, Kind};
use crate::heap::{Shared, try_box};
use crate::machine::Machine;
use crate::rmap::walk::Found;
use crate::space::core::Core;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::format::SLOTS;
use crate::table::node;
use crate::table::protocol::{self, Taken};
use crate::vm::{Cpu, Vm};
use alloc::boxed::Box;
use core::ptr::{self, NonNull};

/// The swap area.
#[derive(Debug)]
pub(crate) struct Swap {
    object: Shared<Object>,
    slots: Slots,
}

impl Swap {
    /// Returns a swap area in `store`, with tables for all of its pages.
    fn try_new<M: Machine>(cpu: &Cpu<'_, M>, store: Store) -> Result<Self, Errno> {
        let pages = store.len() >> PAGE_SHIFT;
        if pages == 0 || pages > SLOTS || store.is_read_only() {
            return Err(Errno::EINVAL);
        }
        // No page is evicted for tables that cannot fit into memory.
        if pages.div_ceil(node::ENTRIES as u64) > cpu.vm().total_frames() {
            return Err(Errno::ENOMEM);
        }
        let slots = Slots::try_new(pages)?;
        let object = Object::of_store(cpu, store, 0)?;
        let mut prepared = Preparing::new(cpu);
        let mut tables = (0..pages).step_by(node::ENTRIES);
        let all = tables.try_for_each(|at| object.table_or_wait(cpu, at, &mut prepared).map(drop));
        drop(prepared);
        if let Err(lack) = all {
            Object::release(object, cpu);
            return Err(lack.into());
        }
        Ok(Self { object, slots })
    }

    /// Returns the object whose pages are the slots.
    pub(crate) const fn object(&self) -> &Shared<Object> {
        &self.object
    }

    /// Returns whether `object` is the area's object.
    pub(crate) fn is(&self, object: &Shared<Object>) -> bool {
        self.object.same(object)
    }

    /// Returns whether page `index` of the area's object is dead, if present.
    pub(crate) fn is_dead(&self, index: u64) -> bool {
        self.count(index) == 0
    }

    /// Returns how many entries name a slot. For a CPU holding such an entry a result of 1 is
    /// stable.
    pub(crate) fn count(&self, slot: u64) -> u32 {
        self.slots.count(slot)
    }

    /// Returns the number of slots.
    pub(crate) const fn slots(&self) -> u64 {
        self.slots.len()
    }

    /// Returns whether the counts of free slots are right. For use while no CPU changes them.
    pub(crate) fn agrees(&self) -> bool {
        self.slots.agree()
    }

    /// Counts one more entry for the slot of an entry which the caller protects from changes.
    ///
    /// # Errors
    /// [`OutOfMemory`]: the count has reached its maximum.
    pub(crate) fn add(&self, slot: u64) -> Result<(), OutOfMemory> {
        self.slots.add(slot)
    }

    /// Drops the count of an entry that was removed.
    pub(crate) fn put(&self, slot: u64) {
        self.slots.put(slot);
    }

    /// Reserves the next free slot.
    fn reserve<'a, M: Machine>(&'a self, cpu: &Cpu<'a, M>) -> Option<Slot<'a>> {
        let slot = self.slots.reserve(|| cpu.serve_flushes())?;
        let name = self.object.slot(cpu, slot);
        debug_assert!(name.is_some(), "all tables exist");
        Some(Slot { swap: self, slot, name: name? })
    }
}

/// A reserved slot: no entry names it. The drop frees the slot.
struct Slot<'a> {
    swap: &'a Swap,
    slot: u64,
    /// The slot's entry in the area's object.
    name: &'a AtomicU64,
}

impl Slot<'_> {
    /// Ends the reservation: from now on `count` entries name the slot.
    fn keep(self, count: u32) -> u64 {
        self.swap.slots.set(self.slot, count);
        let slot = self.slot;
        core::mem::forget(self);
        slot
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.swap.put(self.slot);
    }
}

/// The cell that contains the swap area of the subsystem, if there is one.
#[derive(Debug)]
pub(crate) struct SwapCell(AtomicPtr<Swap>);

impl SwapCell {
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    #[inline]
    pub(crate) fn get(&self) -> Option<&Swap> {
        // SAFETY: a non-null pointer came from a box, which is freed only when this cell is
        // dropped.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Stores `swap`, if there is no area yet.
    fn set(&self, swap: Box<Swap>) -> Result<(), Box<Swap>> {
        let made = Box::into_raw(swap);
        let order = (Ordering::Release, Ordering::Relaxed);
        match self.0.compare_exchange(ptr::null_mut(), made, order.0, order.1) {
            Ok(_) => Ok(()),
            // SAFETY: the pointer came from a box just now, and no other CPU has it.
            Err(_) => Err(unsafe { Box::from_raw(made) }),
        }
    }
}

impl Drop for SwapCell {
    fn drop(&mut self) {
        if let Some(made) = NonNull::new(self.0.load(Ordering::Relaxed)) {
            // SAFETY: the pointer came from a box, and there are no references, because each
            // reference borrows this cell.
            drop(unsafe { Box::from_raw(made.as_ptr()) });
        }
    }
}

impl<M: Machine> Vm<M> {
    /// Returns whether memory and the swap area together hold `pages` pages: the limit of a single
    /// private mapping, as with Linux's `overcommit_memory` 0.
    #[inline]
    pub(crate) fn may_promise(&self, pages: u64) -> bool {
        pages <= self.total_frames() || self.holds_with_swap(pages)
    }

    #[cold]
    #[inline(never)]
    fn holds_with_swap(&self, pages: u64) -> bool {
        pages <= self.total_frames() + self.swap.get().map_or(0, Swap::slots)
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// Makes `store` the swap area: when memory is short, private pages are written to it, like
    /// pages of files to their store, and read again when needed. There is at most one area, which
    /// lives as long as the subsystem. The store's length determines the number of pages. The area
    /// takes a frame for each 512 pages, for tables, and about 4 bytes of the heap for each page.
    ///
    /// If a page cannot be written, the page stays in memory as a page of the area, even after
    /// leaving its program: its slot counts as in use, and the program's next access finds the page
    /// without a read. If a needed page cannot be read, the program gets SIGBUS.
    ///
    /// Pages that were read again stay in memory, as pages of the area, after their programs have
    /// ended, until memory is short: such pages count for no slot in use
    /// ([`swap_usage`](Self::swap_usage)), and [`reclaim`](Self::reclaim) drops them.
    ///
    /// # Errors
    /// `EBUSY`: there is an area already. `EINVAL`: the store is read-only, has no whole page, or
    /// more than 2^40. `EFBIG`: the store has more than [`MAX_PAGES`](Object::MAX_PAGES). `ENOMEM`:
    /// there are no frames for the tables, for example because memory is already exhausted, or the
    /// heap is exhausted.
    pub fn swap_on(&self, store: impl Into<Store>) -> Result<(), Errno> {
        let cell = &self.vm().swap;
        if cell.get().is_some() {
            return Err(Errno::EBUSY);
        }
        let swap = Swap::try_new(self, store.into())?;
        // If the heap is exhausted, the area's object is ended later.
        let swap = try_box(swap)?;
        cell.set(swap).map_err(|second| {
            Object::release(second.object, self);
            Errno::EBUSY
        })
    }

    /// Returns the number of pages of the swap area, and how many of them are in use.
    pub fn swap_usage(&self) -> (u64, u64) {
        let slots = self.vm().swap.get().map(|swap| &swap.slots);
        slots.map_or((0, 0), |slots| (slots.len(), slots.len().saturating_sub(slots.free())))
    }

    /// Calls `tell` with the frame of each page of the swap area in memory: an unwritten page after
    /// leaving its programs, or a page read again and not yet mapped, or a dead page.
    pub fn each_swap_cached(&self, mut tell: impl FnMut(FrameNumber)) {
        if let Some(swap) = self.vm().swap.get() {
            swap.object.each_resident(self, |frame, _| tell(frame));
        }
    }

    /// Returns the swap area, if it has a free slot.
    pub(super) fn swap_with_room(&self) -> Option<&Swap> {
        self.vm().swap.get().filter(|swap| swap.slots.free() != 0)
    }

    /// Drops the count of `old`, a swapped entry of the space of `core` that was removed.
    #[cold]
    #[inline(never)]
    pub(crate) fn drop_swapped(&self, core: &Core, old: Entry) {
        if let Some(swap) = self.vm().swap.get() {
            swap.put(old.slot());
            core.swapped.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns whether another CPU has the turn to write to the swap area: in this case no private
    /// page can leave.
    pub(super) fn swaps_elsewhere(&self) -> bool {
        self.vm().swap.get().is_some_and(|swap| swap.object.is_laundered())
    }

    /// Returns whether a frame contains an anonymous page.
    pub(super) fn is_anon(&self, frame: FrameNumber) -> bool {
        self.vm().frames.meta(frame).kind() == Kind::Used(FrameUse::Anon)
    }

    /// Turns the anonymous pages in `frames`, at most [`BATCH`], that can leave their programs into
    /// dirty pages of the swap area. The caller has a reference to each, and keeps it. Returns a
    /// bit mask of these pages by place. The caller is in no grace section and holds no lock.
    pub(super) fn swap_out(&self, swap: &Swap, frames: &[FrameNumber]) -> u32 {
        let mut anon = [(0, FrameNumber(0)); BATCH];
        let mut slots = [const { None }; BATCH];
        let mut count = 0;
        for (at, frame) in frames.iter().enumerate().filter(|(_, frame)| self.is_anon(**frame)) {
            slots[count] = swap.reserve(self);
            if slots[count].is_none() {
                break;
            }
            anon[count] = (at, *frame);
            count += 1;
        }
        // If the heap is exhausted, all pages stay.
        if count == 0 { 0 } else { self.swap_batch(swap, &anon[..count], &mut slots).unwrap_or(0) }
    }

    /// [`swap_out`](Self::swap_out) of pages, each with its place, for which slots are reserved.
    fn swap_batch(
        &self,
        swap: &Swap,
        frames: &[(usize, FrameNumber)],
        slots: &mut [Option<Slot<'_>>; BATCH],
    ) -> Result<u32, OutOfMemory> {
        let walk = self.walk();
        let mut batch = Batch::try_new(self, frames.len())?;
        frames.iter().for_each(|(_, frame)| batch.find(self, &walk, *frame));
        let mut names = [const { None }; BATCH];
        batch.take(self, |at, page, mappings| {
            if page.object.is_some() {
                return Err(Errno::EOPNOTSUPP);
            }
            if self.are_locked(mappings) {
                return Err(Errno::EPERM);
            }
            names[at] = slots[at].as_ref().and_then(|slot| self.take_name(slot.name));
            names[at].as_ref().map(|_| ()).ok_or(Errno::EBUSY)
        });
        if !lost(Mutant::SwapFlush) {
            batch.flush(self, Then::Stay);
        }
        let mut gone = 0;
        for (at, (place, _)) in frames.iter().enumerate() {
            let page = &batch.pages()[at];
            let (frame, count) = (page.frame, page.entries());
            let own = (names[at].take(), slots[at].take());
            if page.failed.is_none()
                && let (Some((name, dead)), Some(slot)) = own
            {
                let slot = slot.keep(count);
                let meta = self.vm().frames.meta(frame);
                meta.set_use(FrameUse::Shared);
                meta.anchor.store(swap.object.anchor(), Ordering::Relaxed);
                meta.index.store(slot, Ordering::Relaxed);
                let leaf = Entry::leaf(frame).unused().dirty();
                name.commit(leaf);
                let swapped = |found: &Found<'_>| {
                    self.add_resident_of(found.space, -1);
                    found.space.swapped.fetch_add(1, Ordering::Relaxed);
                    Entry::swapped(slot)
                };
                batch.store(at, swapped, |seen| seen);
                gone |= 1 << place;
                // The reference of one mapping now belongs to the object.
                batch.put_references(self, at, count - 1, |frame| self.free(frame));
                if let Some(dead) = dead {
                    // SAFETY: drops the object's reference, whose entry is gone, and which never
                    // was a mapping.
                    unsafe { self.put_unmapped(dead) };
                }
            }
        }
        batch.end(self);
        Ok(gone)
    }

    /// Takes the entry of a reserved slot in the area's object, with any value: a page named by it
    /// is dead. Returns the entry with the dead page, if there is one. `None`: another CPU holds
    /// the entry.
    fn take_name<'a>(&'a self, name: &'a AtomicU64) -> Option<(Taken<'a>, Option<FrameNumber>)> {
        let mut seen = node::load(name);
        while !seen.is_locked() {
            match protocol::take(name, seen, self) {
                // For a hidden entry the object has no reference: the read in progress frees the
                // frame.
                Ok(taken) => return Some((taken, seen.is_present().then(|| seen.frame()))),
                Err(now) => seen = now,
            }
        }
        None
    }

    /// Returns whether a locked VMA maps a page whose entries are all taken.
    pub(super) fn are_locked(&self, mappings: &[Mapping<'_>]) -> bool {
        let is_locked = |it: &Mapping<'_>| it.found.space.locked.contains(it.found.addr, self);
        mappings.iter().any(is_locked) && !lost(Mutant::EvictLooksAtLocks)
    }

    /// Counts pages that were read or written, if `object` is the swap area's.
    pub(crate) fn count_swapped(&self, object: &Shared<Object>, counter: Counter, pages: u64) {
        if self.vm().swap.get().is_some_and(|swap| swap.is(object)) {
            self.state().counts.add(counter, pages);
        }
    }
}
