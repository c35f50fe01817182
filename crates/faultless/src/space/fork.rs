//! `fork`: a copy of the space, which shares private pages until one of the two spaces writes to
//! them.
//!
//! [Pinned](crate::Space::pin) pages are copied at once, since a store must not move the parent
//! away from a page in use by a device. They become read-only like all others, and are copied after
//! the flush. So no program stores to them meanwhile, and the child has all pages as of one moment
//! (except the device's stores). The parent's next store to such a page reuses the page.

use super::Space;
use super::area::VmaFlags;
use super::brk::bounds::HeapBounds;
use super::made::State;
use super::made::make_vma;
use super::mbind::MemPolicy;
use super::pages::{each_run, last_table};
use super::vma::{Piece, Vma};
use super::write::{NOWHERE, Writing};
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::error::{Errno, Error, OutOfMemory};
use crate::fault::mem_policy;
use crate::frame::{FrameUse, Kind};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::batch::FlushBatch;
use crate::space::core::Core;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, LAST};
use crate::table::protocol;
use crate::vm::Cpu;
use core::ops::Range;
use core::ptr::NonNull;

impl<M: Machine> Space<M> {
    /// Returns a copy of this space: the same VMAs, except those excluded by advice, and the same
    /// contents. Both spaces share private pages, read-only, until one of them writes.
    ///
    /// # Errors
    /// `ENOMEM`, also if a page has the maximum number of mappings; then there is no child, and
    /// this space is unchanged (except that faults may have to make pages writable again).
    pub fn fork(&self, cpu: &Cpu<'_, M>) -> Result<Self, Error> {
        self.check_vm(cpu);
        let once = || -> Result<Self, Errno> {
            let mut child = Self::new_of(cpu, Some(self)).map_err(|error| error.errno)?;
            let stack_limit = self.core.stack_limit.load(Ordering::Relaxed);
            child.core.stack_limit.store(stack_limit, Ordering::Relaxed);
            if lost(Mutant::ForkCopiesMoves) {
                child.core.moves.copy_from(&self.core.moves, cpu)?;
            }
            // This space's claim is released before the child ends, which takes its own locks.
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
        // Fork changes entries of every private VMA, so it is a writer of all of them. The flush
        // completes before any of them runs again: until then a CPU could store through an old
        // translation to a page that the child has.
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
        // No CPU stores to the pages through an old translation any more.
        self.copy_pinned(pinned.first);
        if let Some(hull) = self.space.core.lazy.hull(self.cpu) {
            self.cpu.vm().lazy.note(self.cpu, &child.core, hull);
        }
        for entry in child.tree.snapshot(&self.cpu.section()).iter_from(0) {
            let vma = entry.get();
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
            if vma.flags().contains(VmaFlags::DONTFORK) {
                continue;
            }
            let copy = match self.copy_vma(vma, core) {
                Ok(copy) => copy,
                Err(oom) => {
                    result = Err(oom);
                    break;
                }
            };
            let VirtRange { start, end } = vma.range();
            // The tree with the VMA is published even on failure, so that exit finds the VMA.
            if let Err(oom) = edit.insert(start, end, copy) {
                // SAFETY: made just now, and not in the tree.
                unsafe { self.cpu.free_vma(copy) };
                result = Err(oom);
                break;
            }
            if !has_private_pages(vma) {
                continue;
            }
            pinned.policy = vma.area().mem_policy();
            if let Err(oom) = self.share_pages(core, vma.range(), batch, pinned) {
                result = Err(oom);
                break;
            }
        }
        edit.publish();
        result
    }

    /// Returns the VMA of the child of `core`, with its own anon_vma.
    fn copy_vma(&self, vma: &Vma, core: &Shared<Core>) -> Result<NonNull<Vma>, OutOfMemory> {
        let root = has_private_pages(vma).then(|| self.cpu.make_anon_vma(true));
        // Locks are not inherited.
        let flags = vma.flags() - VmaFlags::ANY_LOCK;
        let mut piece = Piece { root, ..vma.part(vma.range()) };
        piece.attributes.flags = flags;
        make_vma(self.cpu, piece, core, State::WriteLocked, [false; 2])
    }

    /// Maps the pages of `range` in the child too, read-only in both spaces. In place of pinned
    /// pages, maps frames to be [filled](Self::copy_pinned) later, and puts each at the front of
    /// the list of `pinned`.
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

    /// [`share_pages`](Self::share_pages) for the pages starting at `start`, with the entries
    /// `slots` in one table. Adds the number of pages resident in the child to `shared`.
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
            // Usually no other CPU changes this page and the next ones.
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

    /// Shares the entry at `run.at`, which was `seen`. Makes the child's table if necessary.
    fn share_entry(
        &self,
        child: &Core,
        start: u64,
        seen: Entry,
        run: &mut Run<'_, 'v>,
        pinned: &mut Pinned,
    ) -> Result<(), OutOfMemory> {
        if run.theirs.is_empty() {
            // SAFETY: the child belongs to this call.
            let table = unsafe { last_table(self.cpu, child.root, start, |_, _| {}) }?;
            run.theirs = &table[node::index(start, LAST)..][..run.ours.len()];
        }
        let (slot, their) = (&run.ours[run.at], &run.theirs[run.at]);
        let shared = match self.share_at_once(slot, seen) {
            Some(new) => Ok((seen.is_writable(), new)),
            None => self.share_at_length(slot, start + run.at as u64 * PAGE_SIZE, pinned),
        };
        // After a failure the entry may already be read-only.
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

    /// Shares the pages starting at `run.at` until one cannot be shared [at
    /// once](Self::share_at_once). A separate function without calls, because its loop needs all
    /// registers.
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
            if protocol::try_replace(slot, seen, new).is_err() {
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
            // SAFETY: drops the reference just taken, which never was a mapping.
            unsafe { self.cpu.put_unmapped(frame) };
        }
    }

    /// Takes a reference to the page of the entry `seen`, for the child's mapping. Returns `false`
    /// for pinned pages, hidden pages and pages without a reference count: the slow path shares
    /// or copies these pages.
    #[inline(always)]
    fn refer(&self, seen: Entry) -> bool {
        seen.is_counted_page() && self.cpu.vm().frames.meta(seen.frame()).try_get_mapping_unpinned()
    }

    /// Takes a reference to the page of an entry that was `seen`, for the child's mapping, and
    /// makes the entry read-only. Returns the new entry of both spaces. `None`: no change, because
    /// the entry has changed, or cannot be shared in this way.
    ///
    /// The reference is taken first, and the entry is read afterwards, because the page may move to
    /// another frame meanwhile.
    #[inline(always)]
    fn share_at_once(&self, slot: &AtomicU64, seen: Entry) -> Option<Entry> {
        if !self.refer(seen) {
            return None;
        }
        let new = seen.read_only();
        if protocol::try_replace(slot, seen, new).is_err() {
            // SAFETY: drops the reference just taken, which never was a mapping.
            unsafe { self.cpu.put_unmapped(seen.frame()) };
            return None;
        }
        Some(new)
    }

    /// [`share_at_once`](Self::share_at_once) for any entry, after waiting until no CPU holds it.
    /// Returns whether the entry allowed stores, the only permission removed, and the child's
    /// entry, if any.
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
            let seen = protocol::wait_and_load(slot, self.cpu);
            if seen.is_swapped() {
                // The entry stays swapped: a fault that has taken it since has an invalid ticket,
                // and no other operation has a claim.
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
            if seen.is_locked() || protocol::try_replace(slot, seen, new).is_err() {
                continue;
            }
            // The entry may have to be read again, and is read-only by then.
            stored |= seen.is_present() && seen.is_writable();
            if new.is_special() {
                return Ok((stored, new));
            }
            let Some(shown) = self.share_seldom(new, page, pinned)? else { continue };
            if protocol::try_replace(slot, new, new).is_ok() {
                return Ok((stored, shown));
            }
            if shown != new {
                self.unlist(pinned);
                continue;
            }
            // SAFETY: drops the reference just taken, which never was a mapping.
            unsafe { self.cpu.put_unmapped(new.frame()) };
        }
    }
}

/// No entry.
const NONE: Range<usize> = Range { start: usize::MAX, end: 0 };

/// The progress of sharing the entries of one table.
struct Run<'a, 'v> {
    ours: &'a [AtomicU64],
    /// The child's entries; empty until the child needs a table.
    theirs: &'v [AtomicU64],
    /// The next entry.
    at: usize,
    /// The number of the child's resident pages.
    resident: u64,
    /// The hull of the entries that allowed stores.
    stored: Range<usize>,
}

impl Run<'_, '_> {
    /// Records that the current entry allowed stores.
    fn add_stored(&mut self) {
        self.stored = self.stored.start.min(self.at)..self.at + 1;
    }
}

/// The child's frames in place of pinned pages.
struct Pinned {
    /// The first frame of the list of frames to fill.
    first: Option<FrameNumber>,
    /// The policy of the VMA whose pages are shared.
    policy: MemPolicy,
}

/// The contents of a frame of the child until it is filled: so the list of such frames needs no
/// other memory.
struct ToFill {
    /// The parent's page.
    from: FrameNumber,
    /// The next frame to fill.
    next: Option<FrameNumber>,
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Returns the child's entry for the page of `entry`, the parent's entry, if the page is
    /// pinned, or has the maximum number of mappings. A page pinned for the parent alone gets
    /// another frame, put at the front of the list `pinned`. The caller must read the entry again.
    /// `None`: the frame has been reused.
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
        // The range is locked, so this space cannot pin a page meanwhile, and a pinned page stays
        // in its frame. A pin of another space, which is about to be released, costs a copy.
        let own = meta.kind() == Kind::Used(FrameUse::Anon);
        if !own || !meta.is_pinned() || lost(Mutant::ForkLooksAtPins) {
            // A pinned page of an object, or a hidden page; or the page has the maximum number of
            // mappings.
            if meta.is_full() {
                return Err(OutOfMemory);
            }
            let refers = meta.get_mapping_unless_zero();
            return Ok(refers.then_some(entry));
        }
        // Held until the copy: the pin may be released meanwhile, and the page may move.
        if !meta.get_ref_unless_zero() {
            return Ok(None);
        }
        let placed = mem_policy::frame_for(self.cpu, pinned.policy, page);
        let Some(frame) = placed.or_else(|| self.cpu.alloc()) else {
            // SAFETY: drops the reference just taken, which never was a mapping.
            unsafe { self.cpu.put_unmapped(entry.frame()) };
            self.cpu.note_starved();
            return Err(OutOfMemory);
        };
        let anchor = meta.anchor.load(Ordering::Relaxed);
        let index = meta.index.load(Ordering::Relaxed);
        // The second reference belongs to the list: until the frame is filled, reclaim does not
        // take it.
        let refs = if lost(Mutant::FilledIsReferredTo) { 1 } else { 2 };
        let copy = frames.publish_shared(frame, FrameUse::Anon, anchor, index, refs);
        let to_fill = ToFill { from: entry.frame(), next: pinned.first.replace(copy) };
        // SAFETY: a frame of the child, which no program can reach yet; aligned to a page.
        unsafe { self.to_fill(copy).write(to_fill) };
        Ok(Some(entry.with_frame(copy)))
    }

    /// Removes the first frame from the list again, because the entry has changed.
    fn unlist(&self, pinned: &mut Pinned) {
        let Some(first) = pinned.first.take() else { return };
        // SAFETY: written when the frame was put into the list.
        let ToFill { from, next } = unsafe { self.to_fill(first).read() };
        pinned.first = next;
        // SAFETY: an unmapped frame, with the mapping's and the list's reference, and the reference
        // taken for the copy.
        unsafe {
            self.cpu.put_unmapped(first);
            self.put_filled(first);
            self.cpu.put_unmapped(from);
        }
    }

    /// Returns the address of the `ToFill` in `frame`.
    fn to_fill(&self, frame: FrameNumber) -> *mut ToFill {
        self.cpu.vm().machine().frame_bytes(frame).cast()
    }

    /// Copies the pages for which the child has separate frames, starting with the first in the
    /// list. No program can store to them.
    fn copy_pinned(&self, first: Option<FrameNumber>) {
        let mut next = first;
        while let Some(to) = next {
            // SAFETY: written when the frame was put into the list.
            let to_fill = unsafe { self.to_fill(to).read() };
            next = to_fill.next;
            // SAFETY: the child's frame, to which no other CPU has access; the parent's mapping
            // stays.
            unsafe { self.cpu.vm().machine().copy_frame(to, to_fill.from) };
            // SAFETY: drops the reference taken for the copy, and the list's, which never were
            // mappings.
            unsafe {
                self.cpu.put_unmapped(to_fill.from);
                self.put_filled(to);
            }
        }
    }

    /// Drops the list's reference to the child's frame `to`.
    ///
    /// # Safety
    /// The reference is dropped once.
    unsafe fn put_filled(&self, to: FrameNumber) {
        if !lost(Mutant::FilledIsReferredTo) {
            // SAFETY: the caller's promise; the reference never was a mapping.
            unsafe { self.cpu.put_unmapped(to) };
        }
    }
}

/// Returns whether a child needs copies of the entries: it can fault in pages that were never
/// written itself.
fn has_private_pages(vma: &Vma) -> bool {
    vma.is_private() && vma.anon_vma.get().is_some() && !vma.flags().contains(VmaFlags::WIPEONFORK)
}
