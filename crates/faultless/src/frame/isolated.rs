//! Isolated frames: free frames of one part of memory, removed from the free lists so that they
//! cannot be allocated.
//!
//! [Compaction](crate::reclaim::compact) empties a part of memory of 2^order frames, aligned to its
//! size. It first *surveys* the part, by the frames' metadata alone. Then it gathers the free
//! frames of the part, a few dozen under one acquisition of the arena's lock. These frames count as
//! taken, and have the kind `Pooled`, until their [`Isolated`] value frees them or is dropped.
//! Frames of the part freed by other CPUs in the meantime go to the free lists as usual, and are
//! gathered next time.
//!
//! A value stores its frames as a bitmap. The frames are blocks, as they were on the free lists; a
//! block is split only when single frames are taken from it. If all frames of the part are
//! isolated, they can be [joined](Isolated::join), and are freed as one block.

use super::arena::Lists;
use super::meta::{FrameUse, Kind};
use super::{Bulk, Clean, Frame, FrameNumber, Frames};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::{Spin, Wait};
use core::fmt;

/// log2 of the frames of the largest part: 2 MiB.
const MOST: u8 = 9;
const WORDS: usize = (1 << MOST) / BITS;
const BITS: usize = u64::BITS as usize;
/// The number of frames checked under one acquisition of the arena's lock.
const CHUNK: u32 = 64;

/// The numbers of frames of a part of memory by kind; each frame is read at a different time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// On free lists.
    pub free: u32,
    /// Pages of programs and objects without pins.
    pub movable: u32,
    /// All frames that stay in place: page tables, the kernel's own, pinned pages, frames in the
    /// CPUs' lists.
    pub fixed: u32,
}

/// Free frames of a part of memory, removed from the free lists. The drop frees them.
#[must_use = "the drop frees the frames"]
pub struct Isolated<'f> {
    frames: &'f Frames,
    first: FrameNumber,
    order: u8,
    /// Bit `n % BITS` of word `n / BITS`: frame `first + n` is isolated. The head of each
    /// block stores its order.
    own: [u64; WORDS],
}

impl Frames {
    /// Counts the 2^`order` frames starting at `first` by kind. `None`: not all of them are memory
    /// of `node`, or they belong to several arenas. Takes no lock.
    pub fn survey(&self, node: u8, first: FrameNumber, order: u8) -> Option<Survey> {
        let metas = self.table.run(first, 1 << order)?;
        let arena = metas.first()?.arena();
        if !self.layout.arenas_of(node).contains(&usize::from(arena)) {
            return None;
        }
        let (mut at, mut survey) = (0, Survey::default());
        while let Some(meta) = metas.get(at) {
            if meta.arena() != arena {
                return None;
            }
            let (count, frames) = match meta.kind() {
                Kind::Reserved => return None,
                Kind::Free | Kind::Zeroed => (&mut survey.free, (1 << meta.order().min(order))),
                Kind::Used(FrameUse::Anon | FrameUse::Shared) if !meta.is_pinned() => {
                    (&mut survey.movable, 1)
                }
                // Free as soon as all flushes are done.
                Kind::FlushPending => (&mut 0, 1),
                _ => (&mut survey.fixed, 1),
            };
            *count += frames;
            at += frames as usize;
        }
        Some(survey)
    }

    /// Returns an empty value for the 2^`order` frames starting at `first`, at most 2 MiB, which
    /// were [surveyed](Self::survey).
    pub const fn isolated(&self, first: FrameNumber, order: u8) -> Isolated<'_> {
        Isolated { frames: self, first, order, own: [0; WORDS] }
    }

    /// Returns how many blocks of 2^`order` frames, aligned to their size, are free; stops counting
    /// at `most`.
    pub fn free_blocks(&self, order: u8, most: u64, wait: &impl Wait) -> u64 {
        let mut found = 0;
        for arena in &self.arenas {
            if found >= most {
                break;
            }
            let count = |lists: &mut Lists| lists.free.blocks(&self.table, order, most - found);
            found += arena.locked(wait, count);
        }
        found.min(most)
    }
}

impl Isolated<'_> {
    const fn frames(&self) -> u32 {
        1 << self.order
    }

    /// Returns the number of isolated frames.
    pub fn len(&self) -> usize {
        self.own.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the first frame of the part at or after `frame` that is not isolated.
    pub fn next_missing(&self, frame: FrameNumber) -> Option<FrameNumber> {
        let at = self.next_from(frame.0.wrapping_sub(self.first.0), false)?;
        (at < self.frames()).then(|| FrameNumber(self.first.0 + at))
    }

    /// Marks the `count` frames starting at place `at` as isolated or not.
    fn set(&mut self, at: u32, count: u32, here: bool) {
        let (mut at, end) = (at as usize, (at + count) as usize);
        while at < end {
            let (word, from) = (at / BITS, at % BITS);
            let bits = (BITS - from).min(end - at);
            let mask = (u64::MAX >> (BITS - bits)) << from;
            let own = &mut self.own[word];
            *own = if here { *own | mask } else { *own & !mask };
            at += bits;
        }
    }

    /// Returns the place of the first frame at or after place `at` whose bit equals `here`.
    fn next_from(&self, at: u32, here: bool) -> Option<u32> {
        let bits_of = |word: u64| if here { word } else { !word };
        let mut word = at as usize / BITS;
        let mut bits = bits_of(*self.own.get(word)?) & (u64::MAX << (at as usize % BITS));
        while bits == 0 {
            word += 1;
            bits = bits_of(*self.own.get(word)?);
        }
        Some((word * BITS) as u32 + bits.trailing_zeros())
    }

    /// Returns the first isolated block at or after place `at`, and the place after the block.
    fn block_from(&self, at: u32) -> Option<(FrameNumber, u32)> {
        let at = self.next_from(at, true)?;
        let head = FrameNumber(self.first.0 + at);
        Some((head, at + (1 << self.frames.meta(head).order())))
    }

    /// Removes the free frames of the part from the free lists, if the limit allows taking them. A
    /// completely free part is not touched.
    pub fn gather(&mut self, wait: &impl Wait) {
        let missing = u64::from(self.frames()) - self.len() as u64;
        // The frames are reserved first; the reservation of frames that are not free is released
        // below. Memory is not short.
        if self.frames.reserve(missing.max(1), |_| missing).is_none() {
            return;
        }
        let (mut at, mut got) = (0, 0);
        while at < self.frames() {
            let end = at + CHUNK.min(self.frames());
            let arena = self.frames.arena_of(self.first);
            arena.locked(wait, |lists| {
                while let Some(next) = self.next_from(at, false).filter(|next| *next < end) {
                    let count = self.take_block(lists, next);
                    got += u64::from(count);
                    at = next + count.max(1);
                }
                at = at.max(end);
            });
        }
        self.frames.release(missing - got);
    }

    /// Takes the free block whose head is at place `at`, if there is one. Returns the number of its
    /// frames.
    fn take_block(&mut self, lists: &mut Lists, at: u32) -> u32 {
        let head = FrameNumber(self.first.0 + at);
        let table = &self.frames.table;
        let meta = table.meta(head);
        // A block on a list stays there while its arena is locked.
        let list = if meta.is(Kind::Free) {
            &mut lists.free
        } else if meta.is(Kind::Zeroed) {
            &mut lists.zeroed
        } else {
            return 0;
        };
        // Smaller than the part.
        let Some(order) = list.take(table, head, self.order.saturating_sub(1)) else { return 0 };
        self.set(at, 1 << order, true);
        1 << order
    }

    /// Adds a single free frame of the part.
    pub fn put(&mut self, frame: Frame<Clean>) {
        debug_assert_eq!(frame.order(), 0, "blocks are gathered");
        let number = frame.into_number();
        self.frames.meta(number).end_ownership();
        self.set(number.0 - self.first.0, 1, true);
    }

    /// Takes up to `to.len()` single frames, for the caller to use.
    pub fn take<'b>(&mut self, to: &'b mut [FrameNumber]) -> Bulk<'b, Clean> {
        let (mut got, mut at) = (0, 0);
        while got < to.len() {
            let Some((head, behind)) = self.block_from(at) else { break };
            let mut order = self.frames.meta(head).order();
            while order != 0 {
                order -= 1;
                for half in [head.0, head.0 + (1 << order)] {
                    let meta = self.frames.meta(FrameNumber(half));
                    meta.set_order(order);
                    meta.set_kind(Kind::Pooled);
                }
            }
            debug_assert!(behind > head.0 - self.first.0, "a block of no frames");
            at = head.0 - self.first.0;
            self.set(at, 1, false);
            to[got] = head;
            got += 1;
        }
        Bulk::new(&mut to[..got])
    }

    /// Makes one block of all frames of the part, if all are isolated. The block is freed as a
    /// whole.
    pub fn join(&mut self) -> bool {
        if self.len() != self.frames() as usize && !lost(Mutant::CompactLooksAgain) {
            return false;
        }
        for head in self.first.0..self.first.0 + self.frames() {
            self.frames.meta(FrameNumber(head)).set_kind(Kind::Tail);
        }
        self.set(0, self.frames(), true);
        let meta = self.frames.meta(self.first);
        meta.set_order(self.order);
        meta.set_kind(Kind::Pooled);
        true
    }
}

impl Drop for Isolated<'_> {
    fn drop(&mut self) {
        let Some(mut at) = self.next_from(0, true).filter(|_| !lost(Mutant::IsolatedGoBack)) else {
            return;
        };
        let frames = self.frames;
        while at < self.frames() {
            let end = at + CHUNK.min(self.frames());
            // An arena's lock is a leaf: its holder does not wait.
            frames.arena_of(self.first).locked(&Spin, |lists| {
                while let Some((head, behind)) = self.block_from(at).filter(|_| at < end) {
                    lists.free.free(&frames.table, head, frames.meta(head).order());
                    at = behind;
                }
                at = at.max(end);
            });
        }
        frames.release(self.len() as u64);
    }
}

impl fmt::Debug for Isolated<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Isolated({} of {} frames from {:?})", self.len(), self.frames(), self.first)
    }
}

#[cfg(test)]
mod tests;
