//! What one operation owes: translations to drop, and frames to let go once they are dropped.
//!
//! A frame that an operation unmapped keeps the reference of the mapping until the flush is done;
//! only then is the reference put. So whoever puts the last one, in this space or another, knows
//! that every space that ever mapped the frame has flushed it: law 1.
//!
//! Only what the MMU could use is owed a flush: what it must still drop, not what was never there.
//!
//! A batch gathers the frames of many tables, for a flush interrupts every CPU that runs the space. What
//! is gathered is lost to everybody meanwhile, so a small memory gets small batches; and it takes time,
//! so the CPU answers the flush requests of others after each table.

use crate::addr::{FrameNumber, PAGE_SIZE, VirtRange};
use crate::machine::{Invalidate, Machine};
use crate::space::Space;
use crate::space::fixed::Core;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::mutant::{Mutant, lost};
use crate::table::entry::Entry;
use crate::table::node::ENTRIES;
use crate::tlb::shootdown;
use crate::vm::Cpu;

/// Ranges of more pages than this are flushed as a whole space, as Linux does
/// (`tlb_single_page_flush_ceiling`).
const SINGLE_PAGES: u64 = 33;

/// A flush batch of one space. [`finish`](FlushBatch::finish) pays all that it owes.
#[must_use = "a batch owes flushes and references until it is finished"]
#[derive(Debug)]
pub struct FlushBatch<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    space: &'a Space<M>,
    owed: Option<VirtRange>,
    frames: usize,
}

impl<'a, 'v, M: Machine> FlushBatch<'a, 'v, M> {
    /// An empty batch.
    ///
    /// # Panics
    /// When the CPU works on another: the two would gather frames in the same buffer.
    pub fn new(cpu: &'a Cpu<'v, M>, space: &'a Space<M>) -> Self {
        let busy = cpu.state().gather.busy.replace(true);
        assert!(!busy, "a CPU works on one flush batch at a time");
        Self { cpu, space, owed: None, frames: 0 }
    }

    /// Owes a flush of `range`.
    #[inline]
    pub fn flush(&mut self, range: VirtRange) {
        self.owed = Some(self.owed.map_or(range, |owed| owed.hull(range)));
    }

    /// Owes what `take` takes out of the entries of the pages from `start` on, which lie in one table: the
    /// flush of the pages that were mapped, and then the references of their mappings. Returns how many
    /// references that are.
    #[inline]
    pub fn unmap(
        &mut self,
        start: u64,
        slots: &[AtomicU64],
        mut take: impl FnMut(&AtomicU64) -> Entry,
    ) -> usize {
        self.cpu.serve_flushes();
        // What a table maps fits into an empty batch.
        if self.is_full_for(slots) {
            self.pay();
        }
        let gather = &self.cpu.state().gather.frames;
        let room = &gather[self.frames..];
        let (mut taken, mut first, mut behind, mut wasted) = (0, usize::MAX, 0, 0);
        for (at, slot) in slots.iter().enumerate() {
            let old = take(slot);
            if !old.is_mapped() {
                continue;
            }
            if Entry::NONE.needs_flush(old) {
                first = first.min(at);
                behind = at + 1;
            }
            wasted += u64::from(old.is_wasted());
            if !old.is_special() {
                room[taken].set(old.frame().0);
                taken += 1;
            }
        }
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

    /// Owes what `old` mapped at `addr`, for which [there is room](Self::is_full_for): its flush, and then the
    /// reference of its mapping. Returns how many references that are.
    #[inline]
    pub fn owe(&mut self, addr: u64, old: Entry) -> usize {
        if Entry::NONE.needs_flush(old) {
            self.flush(VirtRange::page(addr));
        }
        if old.is_wasted() {
            self.cpu.count(Counter::PrefaultWasted);
        }
        if !old.is_mapped() || old.is_special() {
            return 0;
        }
        self.cpu.state().gather.frames[self.frames].set(old.frame().0);
        self.frames += 1;
        1
    }

    /// Flushes what is owed and lets the gathered frames go; between the two, it runs `flushed`.
    #[inline]
    pub fn pay_and(&mut self, flushed: impl FnOnce()) {
        let owed = self.owed.take();
        if let Some(range) = owed.filter(|_| !lost(Mutant::FlushFirst)) {
            shoot(self.cpu, self.space, range);
        }
        flushed();
        self.put_gathered();
        if let Some(range) = owed.filter(|_| lost(Mutant::FlushFirst)) {
            shoot(self.cpu, self.space, range);
        }
    }

    /// Lets the gathered frames go, which are flushed.
    fn put_gathered(&mut self) {
        let gathered = &self.cpu.state().gather.frames[..core::mem::take(&mut self.frames)];
        self.cpu.note_freed(gathered.len());
        for frames in gathered.chunks(ENTRIES) {
            for frame in frames {
                // SAFETY: the mapping that this reference is of is gone, and flushed by now.
                unsafe { self.cpu.put_unmapped(FrameNumber(frame.get())) };
            }
            self.cpu.serve_flushes();
        }
    }

    /// Whether it owes neither a flush nor a reference.
    pub(super) fn is_empty(&self) -> bool {
        self.owed.is_none() && self.frames == 0
    }

    /// Whether what `slots` map would have to wait for a payment.
    pub(super) fn is_full_for(&self, slots: &[AtomicU64]) -> bool {
        slots.len() > self.cpu.state().gather.frames.len() - self.frames
    }

    /// Pays.
    #[inline]
    pub fn finish(self) {
        drop(self);
    }

    #[inline(never)]
    fn pay(&mut self) {
        self.pay_and(|| {});
    }
}

impl<M: Machine> Drop for FlushBatch<'_, '_, M> {
    fn drop(&mut self) {
        self.pay();
        self.cpu.state().gather.busy.set(false);
    }
}

/// Drops the space's translations of `range` on every CPU that may hold some, and waits for them.
pub fn shoot<M: Machine>(cpu: &Cpu<'_, M>, space: &Space<M>, range: VirtRange) {
    shoot_core(cpu, &space.core, range);
}

/// [`shoot`], by the core of the space.
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
