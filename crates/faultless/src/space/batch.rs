//! The pending flush of one operation: translations to drop, and then references to frames to drop.
//!
//! An unmapped frame keeps the reference of the mapping until the flush is complete. So when the
//! last reference is dropped, in this space or another, every space that mapped the frame has
//! flushed it: law 1.
//!
//! A flush is pending only for entries that the MMU could use.
//!
//! A batch gathers the frames of many tables, because a flush interrupts every CPU that runs the
//! space. No CPU can allocate gathered frames, so batches are small on a machine with little
//! memory. Gathering takes time, so the CPU serves other CPUs' flush requests after each table.

use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::machine::{Invalidate, Machine};
use crate::space::Space;
use crate::space::core::Core;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::mutant::{Mutant, lost};
use crate::table::node::{self, ENTRIES, TABLE_ALIGN};
use crate::table::{Entry, protocol};
use crate::tlb::shootdown;
use crate::vm::Cpu;

/// Larger ranges (in pages) are flushed as a whole space, as on Linux
/// (`tlb_single_page_flush_ceiling`).
const SINGLE_PAGES: u64 = 33;

/// A flush batch of one space. [`finish`](FlushBatch::finish) completes it.
#[must_use = "flushes and references are pending until the batch is finished"]
#[derive(Debug)]
pub struct FlushBatch<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    space: &'a Space<M>,
    pending: Option<VirtRange>,
    frames: usize,
    folios: usize,
}

impl<'a, 'v, M: Machine> FlushBatch<'a, 'v, M> {
    /// Returns an empty batch.
    ///
    /// # Panics
    /// If the CPU already has a batch: both would gather frames in the same buffer.
    pub fn new(cpu: &'a Cpu<'v, M>, space: &'a Space<M>) -> Self {
        let busy = cpu.state().gather.busy.replace(true);
        assert!(!busy, "a CPU works on one flush batch at a time");
        Self { cpu, space, pending: None, frames: 0, folios: 0 }
    }

    /// Adds a flush of `range`.
    #[inline]
    pub fn flush(&mut self, range: VirtRange) {
        self.pending = Some(self.pending.map_or(range, |pending| pending.hull(range)));
    }

    /// Adds the pages mapped by the entries `slots` of the pages starting at `start`, which lie in
    /// one table: the flush of the mapped pages, and the references of their mappings. Returns the
    /// number of references.
    ///
    /// Empties an entry of a [used page](Entry::is_used_page) itself. For each other entry that is
    /// not empty, calls `take` with its value; `take` empties the entry and returns its last value.
    #[inline(always)]
    pub fn unmap(
        &mut self,
        start: u64,
        slots: &[AtomicU64],
        mut take: impl FnMut(&AtomicU64, Entry) -> Entry,
    ) -> usize {
        self.cpu.serve_flushes();
        // The pages of one table fit into an empty batch.
        if self.is_full_for(slots) {
            self.flush_all();
        }
        let free = &self.cpu.state().gather.frames[self.frames..];
        let mut places = free.iter();
        let mut gather = |old: Entry| {
            if let Some(place) = places.next() {
                place.set(old.frame().0);
            }
        };
        let (mut first, mut behind, mut wasted) = (0, 0, 0);
        for (at, slot) in slots.iter().enumerate() {
            let seen = node::load(slot);
            if seen.is_none() {
                continue;
            }
            if seen.is_used_page() && protocol::try_replace(slot, seen, Entry::NONE).is_ok() {
                first = if behind == 0 { at } else { first };
                behind = at + 1;
                gather(seen);
                continue;
            }
            let old = take(slot, seen);
            if !old.is_mapped() {
                continue;
            }
            if Entry::NONE.needs_flush(old) {
                first = if behind == 0 { at } else { first };
                behind = at + 1;
            }
            wasted += u64::from(old.is_wasted());
            if !old.is_special() {
                gather(old);
            }
        }
        let taken = free.len() - places.len();
        if behind != 0 {
            let addr = |at: usize| start + at as u64 * PAGE_SIZE;
            self.flush(VirtRange::new(addr(first), addr(behind)));
        }
        if wasted != 0 {
            self.cpu.state().counts.add(Counter::PrefaultWasted, wasted);
        }
        self.frames += taken;
        taken
    }

    /// Adds the page mapped by `old` at `addr` to the batch, which must [not be
    /// full](Self::is_full_for): its flush, and the reference of its mapping. Drops the count of a
    /// swapped entry at once. Returns the number of references.
    #[inline]
    pub fn add(&mut self, addr: u64, old: Entry) -> usize {
        if Entry::NONE.needs_flush(old) {
            self.flush(VirtRange::page(addr));
        }
        if old.is_wasted() {
            self.cpu.count(Counter::PrefaultWasted);
        }
        if old.is_swapped() {
            self.cpu.drop_swapped(&self.space.core, old);
        }
        if !old.is_mapped() || old.is_special() {
            return 0;
        }
        self.cpu.state().gather.frames[self.frames].set(old.frame().0);
        self.frames += 1;
        1
    }

    /// Adds the huge leaf `old`, which was removed from the entry of the pages starting at `start`.
    #[cold]
    pub(super) fn unmap_folio(&mut self, start: u64, old: Entry) {
        let gather = &self.cpu.state().gather.folios;
        if self.folios == gather.len() {
            self.flush_all();
        }
        if Entry::NONE.needs_flush(old) {
            self.flush(VirtRange::new(start, start + TABLE_ALIGN));
        }
        gather[self.folios].set(old.frame().0);
        self.folios += 1;
    }

    /// Completes the pending flush, calls `flushed`, and drops the gathered references.
    #[inline]
    pub fn flush_and(&mut self, flushed: impl FnOnce()) {
        let pending = self.pending.take();
        if let Some(range) = pending.filter(|_| !lost(Mutant::FlushFirst)) {
            shoot(self.cpu, self.space, range);
        }
        flushed();
        self.drop_references();
        if let Some(range) = pending.filter(|_| lost(Mutant::FlushFirst)) {
            shoot(self.cpu, self.space, range);
        }
    }

    /// Drops the gathered references, whose pages are flushed.
    fn drop_references(&mut self) {
        if self.folios != 0 {
            self.drop_leaves();
        }
        let gathered = &self.cpu.state().gather.frames[..core::mem::take(&mut self.frames)];
        self.cpu.note_freed(gathered.len());
        for frames in gathered.chunks(ENTRIES) {
            // SAFETY: the mappings of these references are removed and flushed.
            unsafe { self.cpu.put_gathered(frames) };
            self.cpu.serve_flushes();
        }
    }

    /// Drops the gathered huge leaves, which are flushed.
    #[cold]
    fn drop_leaves(&mut self) {
        for first in &self.cpu.state().gather.folios[..core::mem::take(&mut self.folios)] {
            // SAFETY: the leaf is removed and flushed.
            unsafe { self.cpu.put_leaf(FrameNumber(first.get())) };
            self.cpu.serve_flushes();
        }
    }

    /// Returns whether neither a flush nor a reference is pending.
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_none() && self.frames == 0 && self.folios == 0
    }

    /// Returns whether the batch must be flushed before it can take the pages of `slots`.
    pub(super) fn is_full_for(&self, slots: &[AtomicU64]) -> bool {
        slots.len() > self.cpu.state().gather.frames.len() - self.frames
    }

    /// Completes the flush, and drops the references.
    #[inline(always)]
    pub fn finish(self) {}

    #[inline(never)]
    fn flush_all(&mut self) {
        self.flush_and(|| {});
    }
}

impl<M: Machine> Drop for FlushBatch<'_, '_, M> {
    #[inline]
    fn drop(&mut self) {
        if !self.is_empty() {
            self.flush_all();
        }
        // Evicted pages have left no entry that would be flushed here.
        if self.cpu.is_pending(&self.space.core.evicted) && !lost(Mutant::BatchSettlesEvicted) {
            self.cpu.do_deferred_flushes();
        }
        self.cpu.state().gather.busy.set(false);
    }
}

/// Drops the space's translations of `range` on every CPU that may hold some, and waits for
/// acknowledgements.
pub fn shoot<M: Machine>(cpu: &Cpu<'_, M>, space: &Space<M>, range: VirtRange) {
    shoot_core(cpu, &space.core, range);
}

/// [`shoot`], for the core of the space.
pub(crate) fn shoot_core<M: Machine>(cpu: &Cpu<'_, M>, space: &Core, range: VirtRange) {
    let what =
        if range.pages() > SINGLE_PAGES { Invalidate::All } else { Invalidate::Range(range) };
    cpu.count(Counter::TlbFlush);
    let vm = cpu.vm();
    let sent =
        shootdown::shoot(vm.machine(), &vm.inboxes, cpu.local(), cpu, space.id, &space.cpus, what);
    if sent != 0 {
        cpu.state().counts.add(Counter::TlbShootdownSent, sent);
    }
}
