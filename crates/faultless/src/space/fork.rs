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
use crate::rmap::AnonVma;
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
            let mut child = Self::new(cpu).map_err(|error| error.errno)?;
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
            let copy = match self.copy_vma(vma) {
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

    /// The child's VMA, with an anon_vma of its own under the parent's.
    fn copy_vma(&self, vma: &Vma) -> Result<Box<Vma>, OutOfMemory> {
        let root = match vma.anon_vma.get() {
            Some(parent) if has_private_pages(vma) => Some(AnonVma::try_new(Some(parent))?),
            _ => None,
        };
        // Locks are not inherited.
        let flags = vma.area.flags - VmaFlags::ANY_LOCK;
        make_vma(Area { flags, ..vma.area.clone() }, root, State::WriteLocked, [false; 2])
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
            let seen = node::load(slot);
            if seen.is_none() {
                continue;
            }
            let (old, new) = protocol::settle_from(slot, seen, self.cpu, |entry| {
                if entry.is_mapped() { entry.read_only() } else { entry }
            });
            if !new.is_mapped() {
                continue;
            }
            if new.needs_flush(old) {
                first = first.min(at);
                behind = at + 1;
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
            let mut entry = new;
            if !new.is_special() {
                if !frames.meta(new.frame()).get_mapping_unpinned() {
                    match self.share_seldom(new, pinned) {
                        Ok(shown) => entry = shown,
                        Err(oom) => {
                            result = Err(oom);
                            break;
                        }
                    }
                }
                resident += 1;
            }
            // Unused prefaulted pages count for the parent.
            their.store(entry.used().0, Ordering::Release);
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
    /// that is pinned for the parent alone gets another frame, the first of the list `pinned`.
    #[cold]
    #[inline(never)]
    fn share_seldom(
        &self,
        entry: Entry,
        pinned: &mut Option<FrameNumber>,
    ) -> Result<Entry, OutOfMemory> {
        let frames = &self.cpu.vm().frames;
        let meta = frames.meta(entry.frame());
        // The range is locked, so the parent's mapping stays, and its reference with it; and this space pins no page
        // meanwhile. A pin of another space, which is about to go, costs a copy.
        let own = meta.kind() == Kind::Used(Use::Anon);
        if !own || !meta.is_pinned() || lost(Mutant::ForkLooksAtPins) {
            return if meta.get_mapping() { Ok(entry) } else { Err(OutOfMemory) };
        }
        let Some(frame) = self.cpu.alloc() else {
            self.cpu.note_starved();
            return Err(OutOfMemory);
        };
        let anon_vma = meta.anon_vma.load(Ordering::Relaxed);
        let index = meta.index.load(Ordering::Relaxed);
        let copy = frames.publish(frame, Use::Anon, anon_vma, index);
        let to_fill = ToFill { from: entry.frame(), next: pinned.replace(copy) };
        // SAFETY: a frame of the child's, which no program can reach yet; aligned to a page.
        unsafe { self.to_fill(copy).write(to_fill) };
        Ok(entry.with_frame(copy))
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
