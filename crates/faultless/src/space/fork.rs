//! `fork`: a copy of the space whose private pages are shared until one of the two spaces writes to them.
//!
//! [Pinned](crate::Space::pin) pages are copied at once, since a store must not move the parent away from a page that a device uses. They
//! become read-only like all others, and are copied after the flush. So no program stores meanwhile, and the child has all pages as
//! they were at one moment (but for what the device stores). The parent's next store to such a page reuses it.

use super::Space;
use super::brk::bounds::HeapBounds;
use super::made::State;
use super::made::make_vma;
use super::mbind::MemPolicy;
use super::pages::{each_run, last_table};
use super::vma::{Area, Vma, VmaFlags};
use super::write::{NOWHERE, Writing};
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::error::{Errno, Error, OutOfMemory};
use crate::fault::placed;
use crate::frame::{Kind, Use};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::rmap::AnonVma;
use crate::space::batch::FlushBatch;
use crate::space::fixed::Core;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, LAST};
use crate::table::protocol;
use crate::vm::Cpu;
use alloc::boxed::Box;
use core::ops::Range;
use core::ptr::NonNull;

impl<M: Machine> Space<M> {
    /// A copy of this space: the same VMAs, but for those that advice keeps out, and the same
    /// contents. Private pages are shared by both, read-only, until one of them writes.
    ///
    /// # Errors
    /// `ENOMEM`, also when a page has as many mappings as can be counted; then there is no child, and this space is as it was (pages that were writable may
    /// have to be made so again by faults).
    pub fn fork(&self, cpu: &Cpu<'_, M>) -> Result<Self, Error> {
        self.check_vm(cpu);
        let once = || -> Result<Self, Errno> {
            let mut child = Self::new_of(cpu, Some(self)).map_err(|error| error.errno)?;
            let stack_limit = self.core.stack_limit.load(Ordering::Relaxed);
            child.core.stack_limit.store(stack_limit, Ordering::Relaxed);
            if lost(Mutant::ForkCopiesMoves) {
                child.core.moves.copy_from(&self.core.moves, cpu)?;
            }
            // Let go of this space before the child ends, which takes locks of its own.
            let copied = self.write(cpu, [VirtRange::USER, NOWHERE], PAGE_SIZE).copy_to(&mut child);
            match copied {
                Ok(()) => Ok(child),
                Err(OutOfMemory) => {
                    child.exit(cpu);
                    Err(Errno::ENOMEM)
                }
            }
        };
        let child = cpu.with_memory(once);
        cpu.collect();
        child.map_err(|errno| Error { operation: "fork", range: VirtRange::USER, errno })
    }
}

impl<'v, M: Machine> Writing<'_, 'v, M> {
    fn copy_to(&self, child: &mut Space<M>) -> Result<(), OutOfMemory> {
        // Fork changes entries of every private VMA, so it is a writer of all of them. Their flush is
        // paid before any of them runs again: until then a CPU could store through an old translation
        // to a page that the child has.
        self.write_lock_all();
        child.heap = HeapBounds::new(self.space.heap.get());
        let mut batch = FlushBatch::new(self.cpu, self.space);
        let mut pinned = Pinned { first: None, policy: MemPolicy::Default };
        // After the claim: a move that ends before the copy is in the notes, and later moves wait.
        let moves = || child.core.moves.copy_from(&self.space.core.moves, self.cpu);
        let noted = if lost(Mutant::ForkCopiesMoves) { Ok(()) } else { moves() };
        let copied = noted.and_then(|()| self.copy_vmas(child, &mut batch, &mut pinned));
        if lost(Mutant::ForkCopiesAfterFlush) {
            self.copy_pinned(pinned.first.take());
        }
        batch.finish();
        // No CPU stores to the pages by an old translation any more.
        self.copy_pinned(pinned.first);
        if let Some(hull) = self.space.core.lazy.hull(self.cpu) {
            self.cpu.vm().lazy.note(self.cpu, &child.core, hull);
        }
        for entry in child.tree.snapshot(&self.cpu.section()).iter_from(0) {
            // SAFETY: the child's tree owns it, and no other CPU can reach the child.
            let vma = unsafe { entry.value.as_ref() };
            vma.anon_vma.unseal();
            vma.sequence.end_write();
        }
        copied
    }

    fn copy_vmas(
        &self,
        child: &mut Space<M>,
        batch: &mut FlushBatch<'_, '_, M>,
        pinned: &mut Pinned,
    ) -> Result<(), OutOfMemory> {
        let Space { tree, core, .. } = child;
        let grace = &self.cpu.vm().grace;
        // SAFETY: the subsystem has one grace period, in whose sections all trees are read.
        let mut edit = unsafe { tree.edit_mut(self.cpu.local(), grace) };
        let mut result = Ok(());
        for vma in self.vmas(VirtRange::USER) {
            if vma.area.flags.contains(VmaFlags::DONTFORK) {
                continue;
            }
            let copy = match self.copy_vma(vma, core) {
                Ok(copy) => copy,
                Err(oom) => {
                    result = Err(oom);
                    break;
                }
            };
            let VirtRange { start, end } = copy.area.range;
            // No box from here on: to move one is to claim that there is no other pointer.
            let copy = NonNull::from(Box::leak(copy));
            // The tree that has it is published even on failure, so that exit finds it.
            if let Err(oom) = edit.insert(start, end, copy) {
                // SAFETY: a box until just now, and the tree does not have it.
                self.cpu.drop_vma(unsafe { Box::from_raw(copy.as_ptr()) });
                result = Err(oom);
                break;
            }
            if !has_private_pages(vma) {
                continue;
            }
            pinned.policy = vma.area.mem_policy();
            if let Err(oom) = self.share_pages(core, vma.area.range, batch, pinned) {
                result = Err(oom);
                break;
            }
        }
        edit.publish();
        result
    }

    /// The VMA of the child of `core`, with an anon_vma of its own.
    fn copy_vma(&self, vma: &Vma, core: &Shared<Core>) -> Result<Box<Vma>, OutOfMemory> {
        let root = if has_private_pages(vma) { Some(AnonVma::try_new(true)?) } else { None };
        // Locks are not inherited.
        let flags = vma.area.flags - VmaFlags::ANY_LOCK;
        make_vma(Area { flags, ..vma.area.clone() }, core, root, State::WriteLocked, [false; 2])
    }

    /// Maps the pages of `range` in the child too, read-only in both. In the place of pinned ones it maps frames that are to be
    /// [filled](Self::copy_pinned), and makes each the first of the list of `pinned`.
    fn share_pages(
        &self,
        child: &Core,
        range: VirtRange,
        batch: &mut FlushBatch<'_, '_, M>,
        pinned: &mut Pinned,
    ) -> Result<(), OutOfMemory> {
        let mut shared = 0;
        let share = |start: u64, slots: &[AtomicU64]| {
            self.share_table(child, start, slots, &mut shared, batch, pinned)
        };
        // SAFETY: the range is locked.
        let result = unsafe { each_run(self.cpu, self.space.root(), range, share) };
        child.resident.fetch_add(shared, Ordering::Relaxed);
        result
    }

    /// [`share_pages`](Self::share_pages) of the pages from `start` on, which have their entries `slots` in one table. Adds how many are
    /// resident in the child to `shared`.
    #[inline(never)]
    fn share_table(
        &self,
        child: &Core,
        start: u64,
        slots: &[AtomicU64],
        shared: &mut u64,
        batch: &mut FlushBatch<'_, '_, M>,
        pinned: &mut Pinned,
    ) -> Result<(), OutOfMemory> {
        let mut run = Run { ours: slots, theirs: &[], at: 0, resident: 0, stored: NONE };
        let mut result = Ok(());
        while let Some(slot) = slots.get(run.at) {
            let seen = node::load(slot);
            if !seen.is_none() {
                result = self.share_entry(child, start, seen, &mut run, pinned);
                if result.is_err() {
                    break;
                }
            }
            run.at += 1;
            // Mostly nobody else changes the page, and the next ones.
            if !run.theirs.is_empty() {
                self.share_run(&mut run);
            }
        }
        *shared += run.resident;
        if !run.stored.is_empty() && !lost(Mutant::ForkFlush) {
            let addr = |at: usize| start + at as u64 * PAGE_SIZE;
            batch.flush(VirtRange::new(addr(run.stored.start), addr(run.stored.end)));
        }
        result
    }

    /// Shares the entry at `run.at`, which was `seen`. Makes the child's table if there is none yet.
    fn share_entry(
        &self,
        child: &Core,
        start: u64,
        seen: Entry,
        run: &mut Run<'_, 'v>,
        pinned: &mut Pinned,
    ) -> Result<(), OutOfMemory> {
        if run.theirs.is_empty() {
            // SAFETY: the child is this call's own.
            let table = unsafe { last_table(self.cpu, child.root, start, |_, _| {}) }?;
            run.theirs = &table[node::index(start, LAST)..][..run.ours.len()];
        }
        let (slot, their) = (&run.ours[run.at], &run.theirs[run.at]);
        let shared = match self.share_at_once(slot, seen) {
            Some(new) => Ok((seen.is_writable(), new)),
            None => self.share_at_length(slot, start + run.at as u64 * PAGE_SIZE, pinned),
        };
        // On failure the entry may be read-only by now.
        let (stored, new) = shared.unwrap_or((true, Entry::NONE));
        if stored {
            run.add_stored();
        }
        if new.is_mapped() {
            run.resident += u64::from(!new.is_special());
            // Unused prefaulted pages count for the parent.
            their.store(new.used().0, Ordering::Release);
        } else if new.is_swapped() {
            child.swapped.fetch_add(1, Ordering::Relaxed);
            their.store(new.0, Ordering::Release);
        }
        shared.map(drop)
    }

    /// Shares the pages from `run.at` on until there is one that is not shared [at once](Self::share_at_once). A function of its own that
    /// calls nothing: its loop needs all registers.
    #[inline(never)]
    fn share_run(&self, run: &mut Run<'_, '_>) {
        let pairs = run.ours.iter().zip(run.theirs).enumerate().skip(run.at);
        let (mut first, mut behind, mut resident) =
            (run.stored.start, run.stored.end, run.resident);
        let mut at_end = run.ours.len();
        let mut to_put = None;
        for (at, (slot, their)) in pairs {
            let seen = node::load(slot);
            if seen.is_none() {
                continue;
            }
            if !self.refer(seen) {
                at_end = at;
                break;
            }
            let new = seen.read_only();
            if protocol::try_settle(slot, seen, new).is_err() {
                (at_end, to_put) = (at, Some(seen.frame()));
                break;
            }
            if seen.is_writable() {
                first = first.min(at);
                behind = at + 1;
            }
            resident += 1;
            their.store(new.used().0, Ordering::Release);
        }
        (run.at, run.resident, run.stored) = (at_end, resident, first..behind);
        if let Some(frame) = to_put {
            // SAFETY: the reference just taken, which never was a mapping.
            unsafe { self.cpu.put_unmapped(frame) };
        }
    }

    /// Takes a reference to the page of an entry that was `seen`, for the child's mapping. Returns whether it has: not where the page is
    /// pinned, or no program may reach it, which is shared at length, as are pages that are not counted.
    #[inline(always)]
    fn refer(&self, seen: Entry) -> bool {
        seen.is_counted_page() && self.cpu.vm().frames.meta(seen.frame()).try_get_mapping_unpinned()
    }

    /// Takes a reference to the page of an entry that was `seen`, for the child's mapping, and makes the entry read-only. Returns what both have
    /// then. `None`: nothing has changed, as the entry has, or is none of a page that can be shared so.
    ///
    /// The reference comes first, and the entry is looked at afterwards: the page may move to another frame meanwhile.
    #[inline(always)]
    fn share_at_once(&self, slot: &AtomicU64, seen: Entry) -> Option<Entry> {
        if !self.refer(seen) {
            return None;
        }
        let new = seen.read_only();
        if protocol::try_settle(slot, seen, new).is_err() {
            // SAFETY: the reference just taken, which never was a mapping.
            unsafe { self.cpu.put_unmapped(seen.frame()) };
            return None;
        }
        Some(new)
    }

    /// The same for any entry, once no CPU holds it. Returns whether the entry
    /// allowed stores, which is all that is taken away, and what the child's is to be, if it has one.
    #[cold]
    #[inline(never)]
    fn share_at_length(
        &self,
        slot: &AtomicU64,
        page: u64,
        pinned: &mut Pinned,
    ) -> Result<(bool, Entry), OutOfMemory> {
        let mut stored = false;
        loop {
            let seen = protocol::look(slot, self.cpu);
            if seen.is_swapped() {
                // It stays so: a fault that has taken it since is not valid, and nobody else has a claim.
                if let Some(swap) = self.cpu.vm().swap.get()
                    && !lost(Mutant::ForkCountsSlots)
                {
                    swap.add(seen.slot())?;
                }
                return Ok((stored, seen));
            }
            if !seen.is_mapped() {
                return Ok((stored, Entry::NONE));
            }
            if let Some(new) = self.share_at_once(slot, seen) {
                return Ok((stored || seen.is_writable(), new));
            }
            let new = seen.read_only();
            if seen.is_locked() || protocol::try_settle(slot, seen, new).is_err() {
                continue;
            }
            // It may have to be looked at again, and is read-only by then.
            stored |= seen.is_present() && seen.is_writable();
            if new.is_special() {
                return Ok((stored, new));
            }
            let Some(shown) = self.share_seldom(new, page, pinned)? else { continue };
            if protocol::try_settle(slot, new, new).is_ok() {
                return Ok((stored, shown));
            }
            if shown != new {
                self.unlist(pinned);
                continue;
            }
            // SAFETY: the reference just taken, which never was a mapping.
            unsafe { self.cpu.put_unmapped(new.frame()) };
        }
    }
}

/// No entry.
const NONE: Range<usize> = Range { start: usize::MAX, end: 0 };

/// How far the entries of one table have been shared.
struct Run<'a, 'v> {
    ours: &'a [AtomicU64],
    /// The child's; none until there is one to be made.
    theirs: &'v [AtomicU64],
    /// The next one.
    at: usize,
    /// How many of the child's are resident.
    resident: u64,
    /// The hull of those that allowed stores.
    stored: Range<usize>,
}

impl Run<'_, '_> {
    /// The present one allowed stores.
    fn add_stored(&mut self) {
        self.stored = self.stored.start.min(self.at)..self.at + 1;
    }
}

/// The child's frames in the place of pinned pages.
struct Pinned {
    /// The first of the list of those that are to be filled.
    first: Option<FrameNumber>,
    /// The policy of the VMA whose pages are shared.
    policy: MemPolicy,
}

/// What a frame of the child holds until it is filled: the list of such frames needs no memory of its own.
struct ToFill {
    /// The parent's page.
    from: FrameNumber,
    /// The next frame to be filled.
    next: Option<FrameNumber>,
}

impl<M: Machine> Writing<'_, '_, M> {
    /// The child's entry for the page of `entry`, the parent's, which is pinned, or has as many mappings as can be counted. A page
    /// that is pinned for the parent alone gets another frame, the first of the list `pinned`. The caller looks at the entry again. `None`: the frame
    /// is another's by now.
    #[cold]
    #[inline(never)]
    fn share_seldom(
        &self,
        entry: Entry,
        page: u64,
        pinned: &mut Pinned,
    ) -> Result<Option<Entry>, OutOfMemory> {
        let frames = &self.cpu.vm().frames;
        let meta = frames.meta(entry.frame());
        // The range is locked, so this space pins no page meanwhile, and a pinned page stays in its frame. A pin of another space, which
        // is about to go, costs a copy.
        let own = meta.kind() == Kind::Used(Use::Anon);
        if !own || !meta.is_pinned() || lost(Mutant::ForkLooksAtPins) {
            // A pinned page of an object, or one that no program may reach; or it has as many mappings as can be counted.
            if meta.is_full() {
                return Err(OutOfMemory);
            }
            let refers = meta.get_mapping_unless_zero();
            return Ok(refers.then_some(entry));
        }
        // Until it is copied: the pin may go meanwhile, and the page move.
        if !meta.get_ref_unless_zero() {
            return Ok(None);
        }
        let placed = placed::frame_for(self.cpu, pinned.policy, page);
        let Some(frame) = placed.or_else(|| self.cpu.alloc()) else {
            // SAFETY: the reference just taken, which never was a mapping.
            unsafe { self.cpu.put_unmapped(entry.frame()) };
            self.cpu.note_starved();
            return Err(OutOfMemory);
        };
        let anchor = meta.anchor.load(Ordering::Relaxed);
        let index = meta.index.load(Ordering::Relaxed);
        // With a reference of the list's: until it is filled, reclaim leaves it.
        let refs = if lost(Mutant::FilledIsReferredTo) { 1 } else { 2 };
        let copy = frames.publish_shared(frame, Use::Anon, anchor, index, refs);
        let to_fill = ToFill { from: entry.frame(), next: pinned.first.replace(copy) };
        // SAFETY: a frame of the child's, which no program can reach yet; aligned to a page.
        unsafe { self.to_fill(copy).write(to_fill) };
        Ok(Some(entry.with_frame(copy)))
    }

    /// Takes the first frame off the list again: the entry has changed.
    fn unlist(&self, pinned: &mut Pinned) {
        let Some(first) = pinned.first.take() else { return };
        // SAFETY: written when it was put into the list.
        let ToFill { from, next } = unsafe { self.to_fill(first).read() };
        pinned.first = next;
        // SAFETY: a frame that is mapped nowhere, with the mapping's and the list's reference, and the reference taken for the copy.
        unsafe {
            self.cpu.put_unmapped(first);
            self.put_filled(first);
            self.cpu.put_unmapped(from);
        }
    }

    /// Where `frame` holds what it is to be filled with.
    fn to_fill(&self, frame: FrameNumber) -> *mut ToFill {
        self.cpu.vm().machine().frame_bytes(frame).cast()
    }

    /// Copies the pages for which the child has frames of its own, from the first in the list on. No program can store to them.
    fn copy_pinned(&self, first: Option<FrameNumber>) {
        let mut next = first;
        while let Some(to) = next {
            // SAFETY: written when it was put into the list.
            let to_fill = unsafe { self.to_fill(to).read() };
            next = to_fill.next;
            // SAFETY: the child's frame, which nobody else knows; the parent's mapping stays.
            unsafe { self.cpu.vm().machine().copy_frame(to, to_fill.from) };
            // SAFETY: the reference taken for the copy, and the list's, which never were mappings.
            unsafe {
                self.cpu.put_unmapped(to_fill.from);
                self.put_filled(to);
            }
        }
    }

    /// Drops the reference that the list has to the child's frame `to`.
    ///
    /// # Safety
    /// It is dropped once.
    unsafe fn put_filled(&self, to: FrameNumber) {
        if !lost(Mutant::FilledIsReferredTo) {
            // SAFETY: the caller's promise; it never was a mapping.
            unsafe { self.cpu.put_unmapped(to) };
        }
    }
}

/// Whether a child needs the pages: what was never written it can fault in itself.
fn has_private_pages(vma: &Vma) -> bool {
    vma.area.is_private()
        && vma.anon_vma.peek().is_some()
        && !vma.area.flags.contains(VmaFlags::WIPEONFORK)
}
