//! What was evicted lately: it tells a page that is read again too soon from one that was gone for long.
//!
//! A page that is read again was evicted too early if fewer pages were evicted in between than memory has: had the pages that were kept instead been
//! evicted, it would be there still. This number is its *refault distance*, as on Linux. Linux keeps it in the page's place in its file. Here it is in a table of
//! the subsystem, by a hash of the object and the page: the newer of two that fall together is known. So it costs nothing but a few bytes for each frame, and a
//! look at one word for each page that is read.

use super::clock::MOST_LIVES;
use super::taken::Page;
use crate::addr::FrameNumber;
use crate::error::OutOfMemory;
use crate::file::Object;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, made};
use crate::vm::Cpu;
use alloc::vec::Vec;

/// Bits of a note that tell which page it is of; the others tell when it was evicted.
const TAG_BITS: u32 = 12;
const TAG: u32 = (1 << TAG_BITS) - 1;
/// Pages that are evicted in one tick of the clock of notes, at least.
const TICK: u64 = 16;

/// The notes.
#[derive(Debug)]
pub(super) struct Evicted {
    /// Pages that were evicted so far.
    count: AtomicU64,
    /// As many as a power of two.
    notes: Vec<AtomicU32>,
    /// log2 of how many pages are evicted in one tick.
    tick: u32,
    /// Frames of memory.
    frames: u64,
}

impl Evicted {
    /// For a machine of `frames` frames: it takes 4 to 8 bytes for each.
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

    /// Pages that were evicted so far.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn now(&self) -> u32 {
        (self.count.load(Ordering::Relaxed) >> self.tick) as u32 & (u32::MAX >> TAG_BITS)
    }

    /// The note of page `index` of the object of the anchor `id`, and its tag, which is not 0.
    fn place(&self, id: u64, index: u64) -> (&AtomicU32, u32) {
        // Fibonacci hashing: the upper bits of the product are the good ones.
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

    /// How many pages were evicted after this one, if it was evicted and is known still. It is known no more afterwards.
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
    /// Notes that a page, whose entries are taken, is evicted.
    pub(super) fn note_evicted(&self, page: &Page<'_>) {
        if let Some(object) = &page.object {
            let index = self.vm().frames.meta(page.frame).index.load(Ordering::Relaxed);
            self.vm().clock.evicted.note(object.anchor(), index);
        }
    }

    /// Gives a page that is read into `frame` its lives: more, if it was evicted too early.
    pub(crate) fn begin_lives(&self, object: &Shared<Object>, index: u64, frame: FrameNumber) {
        let evicted = &self.vm().clock.evicted;
        let mut lives = 0;
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
                lives = MOST_LIVES;
            }
        }
        self.vm().frames.meta(frame).lives.store(lives, Ordering::Relaxed);
    }
}
