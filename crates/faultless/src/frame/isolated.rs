//! Isolated frames: free frames of one part of memory, taken off the free lists so that nobody allocates them.
//!
//! [Compaction](crate::reclaim::compact) empties a part of memory of 2^order frames, aligned to its size. It *surveys* the part first, by
//! the frames' metadata alone. Then it gathers what is free there, a few dozen frames under one locking of the arena: these frames
//! count as taken, and are of the kind `Pooled`, until the [`Isolated`] value that has them gives them back or is dropped. What others free
//! in the part meanwhile goes to the free lists as ever, and is gathered next time.
//!
//! Which frames a value has is a bit each. They are blocks, as they were on the free lists; a block is cut up only where single frames are
//! taken from it. A part all of whose frames are here can be [joined](Isolated::join), and is given back as one block.

use super::arena::Lists;
use super::meta::{Kind, Use};
use super::{Bulk, Clean, Frame, FrameNumber, Frames};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::{Spin, Wait};
use core::fmt;

/// log2 of the frames of the largest part: 2 MiB.
const MOST: u8 = 9;
const WORDS: usize = (1 << MOST) / BITS;
const BITS: usize = u64::BITS as usize;
/// How many frames are looked at under one locking of the arena.
const CHUNK: u32 = 64;

/// What the frames of a part of memory are, as of some moment for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// On free lists.
    pub free: u32,
    /// Pages of programs and objects that no pin keeps.
    pub movable: u32,
    /// Anything else that does not go by itself: page tables, the kernel's own, pinned pages, what CPUs keep in their lists.
    pub fixed: u32,
}

/// Free frames of a part of memory that are off the free lists. They go back when this is dropped.
#[must_use = "the frames go back when this is dropped"]
pub struct Isolated<'f> {
    frames: &'f Frames,
    first: FrameNumber,
    order: u8,
    /// Bit `n % BITS` of word `n / BITS`: frame `first + n` is here. The head of each block says how large it is.
    own: [u64; WORDS],
}

impl Frames {
    /// What the 2^`order` frames from `first` on are. `None`: not all are memory of `node`, or they are of several arenas. Takes no lock.
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
                Kind::Used(Use::Anon | Use::Shared) if !meta.is_pinned() => {
                    (&mut survey.movable, 1)
                }
                // Free as soon as all flushes are done.
                Kind::Owed => (&mut 0, 1),
                _ => (&mut survey.fixed, 1),
            };
            *count += frames;
            at += frames as usize;
        }
        Some(survey)
    }

    /// None of the 2^`order` frames from `first` on yet, at most 2 MiB, of which there is a [survey](Self::survey).
    pub const fn isolated(&self, first: FrameNumber, order: u8) -> Isolated<'_> {
        Isolated { frames: self, first, order, own: [0; WORDS] }
    }

    /// How many blocks of 2^`order` frames, aligned to their size, are free; stops counting at `most`.
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

    /// How many frames are here.
    pub fn len(&self) -> usize {
        self.own.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The first frame of the part from `frame` on that is not here.
    pub fn next_missing(&self, frame: FrameNumber) -> Option<FrameNumber> {
        let at = self.next_from(frame.0.wrapping_sub(self.first.0), false)?;
        (at < self.frames()).then(|| FrameNumber(self.first.0 + at))
    }

    /// Notes whether the `count` frames from place `at` on are here.
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

    /// The place of the first frame from place `at` on that is here, or is not, as `here` says.
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

    /// The block here that begins at or after place `at`, and the place behind it.
    fn block_from(&self, at: u32) -> Option<(FrameNumber, u32)> {
        let at = self.next_from(at, true)?;
        let head = FrameNumber(self.first.0 + at);
        Some((head, at + (1 << self.frames.meta(head).order())))
    }

    /// Takes what is free in the part off the free lists, if so many frames may be taken. A part that is wholly free is left alone.
    pub fn gather(&mut self, wait: &impl Wait) {
        let missing = u64::from(self.frames()) - self.len() as u64;
        // Reserved first: what turns out not to be free is released below. Memory is not short.
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

    /// Takes the free block that the frame at place `at` heads, if it heads one. Returns how many frames that is.
    fn take_block(&mut self, lists: &mut Lists, at: u32) -> u32 {
        let head = FrameNumber(self.first.0 + at);
        let table = &self.frames.table;
        let meta = table.meta(head);
        // What is on a list stays there while its arena is locked.
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

    /// Adds a single frame of the part, which is free.
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

    /// Makes one block of all frames of the part, if all are here. It is given back as one.
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
            // An arena's lock is a leaf: its holder waits for nothing.
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
