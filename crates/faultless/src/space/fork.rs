//! `fork`: a copy of the space whose private pages are shared until one of the two spaces writes to them.
//!
//! [Pinned](crate::Space::pin) pages are copied at once, since a store must not move the parent away from a page that a device uses. They
//! become read-only like all others, and are copied after the flush. So no program stores meanwhile, and the child has all pages as
//! they were at one moment (but for what the device stores). The parent's next store to such a page reuses it.

use super::Space;
use super::brk::bounds::HeapBounds;
use super::made::State;
use super::made::make_vma;
use super::pages::{each_run, last_table};
use super::vma::{Area, Vma, VmaFlags};
use super::write::{NOWHERE, Writing};
use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::error::{Errno, Error, OutOfMemory};
use crate::frame::{Kind, Use};
use crate::machine::Machine;
use crate::heap::Shared;
use crate::rmap::AnonVma;
use crate::space::fixed::Core;
use crate::space::batch::FlushBatch;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, LAST};
use crate::table::protocol;
use crate::vm::Cpu;
use alloc::boxed::Box;
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
            child.core.moves.copy_from(&self.core.moves, cpu)?;
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

impl<M: Machine> Writing<'_, '_, M> {
    fn copy_to(&self, child: &mut Space<M>) -> Result<(), OutOfMemory> {
        // Fork changes entries of every private VMA, so it is a writer of all of them. Their flush is
        // paid before any of them runs again: until then a CPU could store through an old translation
        // to a page that the child has.
        self.write_lock_all();
        child.heap = HeapBounds::new(self.space.heap.get());
        let mut batch = FlushBatch::new(self.cpu, self.space);
        let mut pinned = None;
        let copied = self.copy_vmas(child, &mut batch, &mut pinned);
        if lost(Mutant::ForkCopiesAfterFlush) {
            self.copy_pinned(pinned.take());
        }
        batch.finish();
        // No CPU stores to the pages by an old translation any more.
        self.copy_pinned(pinned);
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
        pinned: &mut Option<FrameNumber>,
    ) -> Result<(), OutOfMemory> {
        let Space { tree, root, core, .. } = child;
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
            if has_private_pages(vma)
                && let Err(oom) =
                    self.share_pages((*root, &core.resident), vma.area.range, batch, pinned)
            {
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
    /// [filled](Self::copy_pinned), and makes each the first of the list `pinned`. The child has a root table and a count of resident
    /// pages.
    fn share_pages(
        &self,
        (child_root, resident): (FrameNumber, &AtomicU64),
        range: VirtRange,
        batch: &mut FlushBatch<'_, '_, M>,
        pinned: &mut Option<FrameNumber>,
    ) -> Result<(), OutOfMemory> {
        let mut shared = 0;
        let share = |start: u64, slots: &[AtomicU64]| {
            self.share_table(child_root, start, slots, &mut shared, batch, pinned)
        };
        // SAFETY: the range is locked.
        let result = unsafe { each_run(self.cpu, self.space.root(), range, share) };
        resident.fetch_add(shared, Ordering::Relaxed);
        result
    }

    /// [`share_pages`](Self::share_pages) of the pages from `start` on, which have their entries `slots` in one table. Adds how many are
    /// resident in the child to `shared`. A function of its own: its loop needs all registers.
    #[inline(never)]
    fn share_table(
        &self,
        child_root: FrameNumber,
        start: u64,
        slots: &[AtomicU64],
        shared: &mut u64,
        batch: &mut FlushBatch<'_, '_, M>,
        pinned: &mut Option<FrameNumber>,
    ) -> Result<(), OutOfMemory> {
        let frames = &self.cpu.vm().frames;
        // The child's entries; none until there is one to be made.
        let mut theirs: &[AtomicU64] = &[];
        let (mut first, mut behind) = (usize::MAX, 0);
        let (mut resident, mut result) = (0, Ok(()));
        for (at, slot) in slots.iter().enumerate() {
            let mut old = node::load(slot);
            if old.is_none() {
                continue;
            }
            let their = match theirs.get(at) {
                Some(their) => their,
                // SAFETY: the child is this call's own.
                None => match unsafe { last_table(self.cpu, child_root, start, |_, _| {}) } {
                    Ok(table) => {
                        theirs = &table[node::index(start, LAST)..][..slots.len()];
                        &theirs[at]
                    }
                    Err(oom) => {
                        result = Err(oom);
                        break;
                    }
                },
            };
            // The reference first, and then the entry: a page may move to another frame meanwhile, and is looked at again.
            let new = loop {
                if old.is_locked() {
                    old = protocol::look(slot, self.cpu);
                }
                if !old.is_mapped() {
                    break Ok(Entry::NONE);
                }
                let counted = !old.is_special();
                let refers = counted && frames.meta(old.frame()).get_mapping_unpinned();
                let new = old.read_only();
                match protocol::try_settle(slot, old, new) {
                    Ok(()) if refers || !counted => break Ok(new),
                    Ok(()) => match self.share_seldom(new, pinned) {
                        Ok(None) => old = node::load(slot),
                        Ok(Some(shown)) => break Ok(shown),
                        Err(oom) => break Err(oom),
                    },
                    Err(now) => {
                        if refers {
                            // SAFETY: the reference just taken, which never was a mapping.
                            unsafe { self.cpu.put_unmapped(old.frame()) };
                        }
                        old = now;
                    }
                }
            };
            if old.is_mapped() && old.read_only().needs_flush(old) {
                first = first.min(at);
                behind = at + 1;
            }
            match new {
                Ok(new) if new.is_none() => {}
                // Unused prefaulted pages count for the parent.
                Ok(new) => {
                    resident += u64::from(!new.is_special());
                    their.store(new.used().0, Ordering::Release);
                }
                Err(oom) => {
                    result = Err(oom);
                    break;
                }
            }
        }
        *shared += resident;
        if behind != 0 && !lost(Mutant::ForkFlush) {
            let addr = |at: usize| start + at as u64 * PAGE_SIZE;
            batch.flush(VirtRange::new(addr(first), addr(behind)));
        }
        result
    }
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
    /// that is pinned for the parent alone gets another frame, the first of the list `pinned`. `None`: the entry is to be looked at again.
    #[cold]
    #[inline(never)]
    fn share_seldom(
        &self,
        entry: Entry,
        pinned: &mut Option<FrameNumber>,
    ) -> Result<Option<Entry>, OutOfMemory> {
        let frames = &self.cpu.vm().frames;
        let meta = frames.meta(entry.frame());
        // The range is locked, so this space pins no page meanwhile, and a pinned page stays in its frame. A pin of another space, which
        // is about to go, costs a copy.
        let own = meta.kind() == Kind::Used(Use::Anon);
        if !own || !meta.is_pinned() || lost(Mutant::ForkLooksAtPins) {
            // A pinned page of an object, or one with as many mappings as can be counted; or the frame is another's by now.
            if meta.is_full() {
                return Err(OutOfMemory);
            }
            let refers = meta.is_pinned() && meta.get_mapping_unless_zero();
            return Ok(refers.then_some(entry));
        }
        let Some(frame) = self.cpu.alloc() else {
            self.cpu.note_starved();
            return Err(OutOfMemory);
        };
        let anon_vma = meta.anchor.load(Ordering::Relaxed);
        let index = meta.index.load(Ordering::Relaxed);
        let copy = frames.publish(frame, Use::Anon, anon_vma, index);
        let to_fill = ToFill { from: entry.frame(), next: pinned.replace(copy) };
        // SAFETY: a frame of the child's, which no program can reach yet; aligned to a page.
        unsafe { self.to_fill(copy).write(to_fill) };
        Ok(Some(entry.with_frame(copy)))
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
        }
    }
}

/// Whether a child needs the pages: what was never written it can fault in itself.
fn has_private_pages(vma: &Vma) -> bool {
    vma.area.is_private()
        && vma.anon_vma.peek().is_some()
        && !vma.area.flags.contains(VmaFlags::WIPEONFORK)
}
