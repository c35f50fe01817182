//! Swap: private anonymous pages leave memory, and come back.
//!
//! # The swap area
//!
//! The swap area is a [memory object](crate::file::object) with a [backing store](crate::file::BackingStore). Page n of it is *slot* n. A private page that
//! leaves memory becomes a page of this object first. What then has to be done is what files have already: the page is written and dropped by
//! [eviction](super::evict), it is [read](crate::file::Reading) once however many faults wait for it, and errors of the store are handled in the same way.
//! The object's tables are all made with the area, since pages leave when no frame is left.
//!
//! A program's entry that is [*swapped*](crate::table::Entry::swapped) names a slot. Each slot has a [count](super::slots) of these entries. The count is raised before an
//! entry is stored, and dropped after it was taken out, by who took it out, without a wait. So while a CPU
//! holds a swapped entry, the slot is not another's.
//!
//! | count of the slot | page in the object | |
//! |---|---|---|
//! | 0 | no | free |
//! | 0 | yes | free; the page is *dead*: whoever next uses the slot drops it, or the clock does, and nobody writes it |
//! | n | no | n entries name it, and the store has the page |
//! | n | yes | n entries name it; the page in memory counts, and the store has it too if the page is not dirty |
//!
//! # Out
//!
//! A batch of pages is [taken](super::taken) from its programs: all entries are busy, nobody else has a reference, and no CPU has a translation. For each page
//! a free slot was reserved before. Then
//!
//! 1. the slot's entry in the object is taken. A dead page there is dropped, and a read of what was there before is given up, as when the kernel
//!    [overwrites](Shared::overwrite_page) a page that is being read;
//! 2. the frame is described as a page of the object, and the object's entry names it, dirty;
//! 3. the programs' entries become swapped ones. A fault that finds such an entry finds the page in the object;
//! 4. the mappings' references are dropped but for one, which is the object's.
//!
//! # In
//!
//! A fault on a swapped entry looks for the page in the object, and [reads it in](crate::fault) if it is not there. Then it takes the program's entry
//! like any fault, and validates its ticket. The page that it has found is the right one if the object's entry still names it: the slot may have been
//! another's before the entry was taken, and is not afterwards. If this is the only entry of the slot, and nobody else has a reference, the page leaves the object and is the
//! program's again. Otherwise the program gets a copy.
//!
//! # Others
//!
//! Only who has a claim on an address, or has validated a ticket, changes a swapped entry. So an entry cannot change while a `fork`, which has a claim on the
//! whole space, raises its count.

use super::slots::Slots;
use super::taken::{BATCH, Batch, Mapping, Then};
use crate::addr::{FrameNumber, PAGE_SHIFT};
use crate::error::{Errno, OutOfMemory};
use crate::fault::prepared::Preparing;
use crate::file::{Object, Store};
use crate::frame::{Kind, Use};
use crate::heap::{Shared, try_box};
use crate::machine::Machine;
use crate::rmap::walk::Found;
use crate::space::fixed::Core;
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
    /// That `store`, with tables for all of its pages.
    fn try_new<M: Machine>(cpu: &Cpu<'_, M>, store: Store) -> Result<Self, Errno> {
        let pages = store.len() >> PAGE_SHIFT;
        if pages == 0 || pages > SLOTS || store.is_read_only() {
            return Err(Errno::EINVAL);
        }
        // No page is evicted for tables that there will not be.
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

    /// The object whose pages are the slots.
    pub(crate) const fn object(&self) -> &Shared<Object> {
        &self.object
    }

    /// Whether `object` is this one.
    pub(crate) fn is(&self, object: &Shared<Object>) -> bool {
        self.object.same(object)
    }

    /// Whether page `index` of the area's object is dead, if it is there.
    pub(crate) fn is_dead(&self, index: u64) -> bool {
        self.count(index) == 0
    }

    /// How many entries name a slot. For a CPU that holds one of them the answer 1 is final.
    pub(crate) fn count(&self, slot: u64) -> u32 {
        self.slots.count(slot)
    }

    /// How many slots there are.
    pub(crate) const fn slots(&self) -> u64 {
        self.slots.len()
    }

    /// Whether the counts of free slots are right. While nobody changes them.
    pub(crate) fn agrees(&self) -> bool {
        self.slots.agree()
    }

    /// Counts one more entry that names the slot of one that the caller keeps from changing.
    ///
    /// # Errors
    /// [`OutOfMemory`]: there are as many as can be counted.
    pub(crate) fn add(&self, slot: u64) -> Result<(), OutOfMemory> {
        self.slots.add(slot)
    }

    /// Drops the count of an entry that was taken out.
    pub(crate) fn put(&self, slot: u64) {
        self.slots.put(slot);
    }

    /// Reserves the next free slot.
    fn reserve<'a, M: Machine>(&'a self, cpu: &Cpu<'a, M>) -> Option<Slot<'a>> {
        let slot = self.slots.reserve(|| cpu.serve_flushes())?;
        let name = self.object.slot(cpu, slot);
        debug_assert!(name.is_some(), "there are all tables");
        Some(Slot { swap: self, slot, name: name? })
    }
}

/// A slot that is reserved: no entry names it. Dropping it gives it back.
struct Slot<'a> {
    swap: &'a Swap,
    slot: u64,
    /// Its entry in the area's object.
    name: &'a AtomicU64,
}

impl Slot<'_> {
    /// From now on `count` entries name it.
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

/// Where the subsystem has its swap area, once there is one.
#[derive(Debug)]
pub(crate) struct SwapCell(AtomicPtr<Swap>);

impl SwapCell {
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    #[inline]
    pub(crate) fn get(&self) -> Option<&Swap> {
        // SAFETY: a pointer that is not null came from a box, which is freed only when this is dropped.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Puts `swap` here, if there is none yet.
    fn set(&self, swap: Box<Swap>) -> Result<(), Box<Swap>> {
        let made = Box::into_raw(swap);
        let order = (Ordering::Release, Ordering::Relaxed);
        match self.0.compare_exchange(ptr::null_mut(), made, order.0, order.1) {
            Ok(_) => Ok(()),
            // SAFETY: it came from a box just now, and no other CPU has its address.
            Err(_) => Err(unsafe { Box::from_raw(made) }),
        }
    }
}

impl Drop for SwapCell {
    fn drop(&mut self) {
        if let Some(made) = NonNull::new(self.0.load(Ordering::Relaxed)) {
            // SAFETY: made from a box, and there are no references: those borrow this.
            drop(unsafe { Box::from_raw(made.as_ptr()) });
        }
    }
}

impl<M: Machine> Vm<M> {
    /// Whether all memory and the swap area hold so many pages: no one private mapping may promise more, as with Linux's `overcommit_memory` 0.
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
    /// Makes `store` the swap area: where memory is short, private pages are written there, as pages of files are to their store, and read
    /// again where they are needed. There is one area, and it stays as long as the subsystem. The store's length says how many pages it holds. Besides a
    /// frame for each 512 of them, for tables, it takes some 4 bytes of the heap for each.
    ///
    /// A page that cannot be written stays in memory, though it may have left its program, as a page of the area: its slot counts as in use, and the program's next access finds
    /// the page without a read. A program that needs a page which cannot be read gets SIGBUS.
    ///
    /// Pages that were read again stay in memory, as pages of the area, after their programs have ended, until memory is short: they count as in use by no slot
    /// ([`swap_usage`](Self::swap_usage)), and [`reclaim`](Self::reclaim) drops them.
    ///
    /// # Errors
    /// `EBUSY`: there is one already. `EINVAL`: the store is only read, has no whole page, or more than 2^40. `EFBIG`: it has more than
    /// [`MAX_PAGES`](Object::MAX_PAGES). `ENOMEM`: there are no frames for the tables, as
    /// where memory is out already, or the heap is exhausted.
    pub fn swap_on(&self, store: impl Into<Store>) -> Result<(), Errno> {
        let cell = &self.vm().swap;
        if cell.get().is_some() {
            return Err(Errno::EBUSY);
        }
        let swap = Swap::try_new(self, store.into())?;
        // Its object is ended later, where the heap is exhausted.
        let swap = try_box(swap)?;
        cell.set(swap).map_err(|second| {
            Object::release(second.object, self);
            Errno::EBUSY
        })
    }

    /// How many pages the swap area holds, and how many of these are in use.
    pub fn swap_usage(&self) -> (u64, u64) {
        let slots = self.vm().swap.get().map(|swap| &swap.slots);
        slots.map_or((0, 0), |slots| (slots.len(), slots.len().saturating_sub(slots.free())))
    }

    /// Calls `tell` with the frame of each page of the swap area that is in memory: it has left its programs and is not written yet, or it was read again
    /// and has not come to them, or it is of no use and will be dropped.
    pub fn each_swap_cached(&self, mut tell: impl FnMut(FrameNumber)) {
        if let Some(swap) = self.vm().swap.get() {
            swap.object.each_resident(self, |frame, _| tell(frame));
        }
    }

    /// The swap area, if it may take pages.
    pub(super) fn swap_with_room(&self) -> Option<&Swap> {
        self.vm().swap.get().filter(|swap| swap.slots.free() != 0)
    }

    /// Drops what `old`, a swapped entry of the space of `core` that was taken out, counts.
    #[cold]
    #[inline(never)]
    pub(crate) fn drop_swapped(&self, core: &Core, old: Entry) {
        if let Some(swap) = self.vm().swap.get() {
            swap.put(old.slot());
            core.swapped.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether another CPU has the turn to write to the swap area: no private page can leave meanwhile.
    pub(super) fn swaps_elsewhere(&self) -> bool {
        self.vm().swap.get().is_some_and(|swap| swap.object.is_laundered())
    }

    /// Whether a frame has an anonymous page.
    pub(super) fn is_anon(&self, frame: FrameNumber) -> bool {
        self.vm().frames.meta(frame).kind() == Kind::Used(Use::Anon)
    }

    /// Makes those of the anonymous pages in `frames`, at most [`BATCH`], that can leave their programs pages of the swap area, dirty. The caller has a
    /// reference to each, which it keeps. Returns which they are, a bit for each place. Not inside a grace section, and holding no lock.
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
        // Where the heap is exhausted, all stay.
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
                meta.set_use(Use::Shared);
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
                // One of them is the object's now.
                batch.leave(self, at, count - 1, |frame| self.free(frame));
                if let Some(dead) = dead {
                    // SAFETY: the object's reference, whose entry is gone, and which never was a mapping.
                    unsafe { self.put_unmapped(dead) };
                }
            }
        }
        batch.end(self);
        Ok(gone)
    }

    /// Takes the entry that a slot, which is reserved, has in the area's object, whatever is there: what it names is dead. Returns it with the dead
    /// page, if there is one. `None`: another CPU has it.
    fn take_name<'a>(&'a self, name: &'a AtomicU64) -> Option<(Taken<'a>, Option<FrameNumber>)> {
        let mut seen = node::load(name);
        while !seen.is_locked() {
            match protocol::take(name, seen, self) {
                // One that is hidden has no reference of the object's: the read that is under way frees its frame.
                Ok(taken) => return Some((taken, seen.is_present().then(|| seen.frame()))),
                Err(now) => seen = now,
            }
        }
        None
    }

    /// Whether a locked VMA has a page of which all entries are taken.
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
