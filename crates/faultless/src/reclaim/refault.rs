//! Recent evictions: distinguishes pages read again too soon from pages gone for long.
//!
//! A page was evicted too early if it is read again and fewer pages were evicted in between than
//! there are frames of memory: had the retained pages been evicted instead, the page would still be
//! present. This number is its *refault distance*, as on Linux. Linux stores this distance in the
//! page's slot in its file. Here a table of the subsystem stores the distance, by a hash of the
//! object and the page: of two colliding pages the newer is known. So the record costs only a few
//! bytes for each frame, and a read of one word for each page read.

use super::clock::MAX_USE_COUNT;
use super::isolate::Page;
use crate::addr::FrameNumber;
use crate::error::OutOfMemory;
use crate::file::Object;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, made};
use crate::vm::Cpu;
use alloc::vec::Vec;

/// The bits of a note that identify the page; the other bits contain the time of the eviction.
const TAG_BITS: u32 = 12;
const TAG: u32 = (1 << TAG_BITS) - 1;
/// The minimum number of pages evicted in one tick of the clock of notes.
const TICK: u64 = 16;

/// The notes.
#[derive(Debug)]
pub(super) struct Evicted {
    /// The number of pages evicted so far.
    count: AtomicU64,
    /// The length is a power of two.
    notes: Vec<AtomicU32>,
    /// log2 of the number of pages evicted in one tick.
    tick: u32,
    /// The number of frames of memory.
    frames: u64,
}

impl Evicted {
    /// Returns the notes for a machine of `frames` frames, which take 4 to 8 bytes for each frame.
    pub(super) fn try_new(frames: u64) -> Result<Self, OutOfMemory> {
        let frames = if cfg!(loom) { 0 } else { frames };
        let len = frames.next_power_of_two() as usize;
        let mut notes = Vec::new();
        notes.try_reserve_exact(len).map_err(|_| OutOfMemory)?;
        made(notes.as_ptr(), len);
        notes.resize_with(len, || AtomicU32::new(0));
        // A distance of all memory is far within the range of the clock.
        let tick = (frames >> (u32::BITS - TAG_BITS - 3)).max(TICK).ilog2();
        Ok(Self { count: AtomicU64::new(0), notes, tick, frames })
    }

    /// Returns the number of pages evicted so far.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn now(&self) -> u32 {
        (self.count.load(Ordering::Relaxed) >> self.tick) as u32 & (u32::MAX >> TAG_BITS)
    }

    /// Returns the note of page `index` of the object of the anchor `id`, and its tag, which is not
    /// 0.
    fn place(&self, id: u64, index: u64) -> (&AtomicU32, u32) {
        // Fibonacci hashing: the upper bits of the product are well distributed.
        let hash = (id ^ index.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = (hash ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let at = (hash >> 32) as usize & (self.notes.len() - 1);
        (&self.notes[at], hash as u32 & TAG | 1)
    }

    fn note(&self, id: u64, index: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let (note, tag) = self.place(id, index);
        note.store(self.now() << TAG_BITS | tag, Ordering::Relaxed);
    }

    /// Returns how many pages were evicted after this page, if its eviction is still recorded.
    /// Removes the record.
    fn take(&self, id: u64, index: u64) -> Option<u64> {
        let (note, tag) = self.place(id, index);
        let seen = note.load(Ordering::Relaxed);
        if seen & TAG != tag {
            return None;
        }
        note.store(0, Ordering::Relaxed);
        let since = self.now().wrapping_sub(seen >> TAG_BITS) & (u32::MAX >> TAG_BITS);
        Some(u64::from(since) << self.tick)
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// Records the eviction of a page whose entries are taken.
    pub(super) fn note_evicted(&self, page: &Page<'_>) {
        if let Some(object) = &page.object {
            let index = self.vm().frames.meta(page.frame).index.load(Ordering::Relaxed);
            self.vm().clock.evicted.note(object.anchor(), index);
        }
    }

    /// Sets the initial use count of a page that is read into `frame`: the maximum, if the page was
    /// evicted too early.
    pub(crate) fn begin_use_count(&self, object: &Shared<Object>, index: u64, frame: FrameNumber) {
        let evicted = &self.vm().clock.evicted;
        let mut use_count = 0;
        if let Some(distance) = evicted.take(object.anchor(), index) {
            let is_anon = self.vm().swap.get().is_some_and(|swap| swap.is(object));
            let [refault, activate] = if is_anon {
                [Counter::WorkingsetRefaultAnon, Counter::WorkingsetActivateAnon]
            } else {
                [Counter::WorkingsetRefault, Counter::WorkingsetActivate]
            };
            self.count(refault);
            if distance < evicted.frames {
                self.count(activate);
                use_count = MAX_USE_COUNT;
            }
        }
        self.vm().frames.meta(frame).use_count.store(use_count, Ordering::Relaxed);
    }
}
