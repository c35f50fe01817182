//! Folios: as many contiguous frames, aligned, as a huge leaf maps.
//!
//! The frames of a folio are single frames, each with references of its own. What makes them a folio is where they are: in a file's page
//! cache, in the order of its pages. So a page of a folio is mapped, copied, pinned, written back and dropped like any other.
//!
//! A huge leaf would need a reference to each frame. All huge leaves of one folio share these: the first frame's metadata counts the
//! leaves, and while there is any, one reference to each frame is theirs together. Who adds the first leaf takes these references, before
//! it counts; who drops the last gives them back, after it has counted. Two CPUs that add the first leaf at the same time both take
//! references, and the one that counts second gives its own back.
//!
//! *Invariant (the count of leaves):* it is zero in every frame that is not used, or not the first of a folio that huge leaves map. It has
//! its place where a free frame has a link of its free list, which is zero once the frame is off the list. So it is looked at by those alone
//! who have a reference to the frame.

use super::meta::FrameMeta;
use super::owned::{Clean, Frame};
use super::{Frames, meta};
use crate::addr::FrameNumber;
use crate::sync::atomic::Ordering;
use crate::sync::percpu::Local;
use crate::sync::wait::Wait;
use crate::table::node::{ENTRIES, HUGE_ORDER};

/// The frames of a new folio that are not used yet, in ascending order.
#[must_use = "frames that are dropped are lost"]
#[derive(Debug)]
pub struct NewFolio {
    next: u32,
    end: u32,
}

impl NewFolio {
    /// The next frame, if one is left.
    pub fn pop(&mut self) -> Option<Frame<Clean>> {
        let number = FrameNumber(self.next);
        (self.next != self.end).then(|| {
            self.next += 1;
            Frame::new(number, 0)
        })
    }
}

/// The frames of the folio that begins with `first`.
pub fn frames_of(first: FrameNumber) -> impl Iterator<Item = FrameNumber> {
    (first.0..).take(ENTRIES).map(FrameNumber)
}

/// The first frame of the folio that `frame` is in, if it is in one.
pub const fn first_of(frame: FrameNumber) -> FrameNumber {
    FrameNumber(frame.0 & !(ENTRIES as u32 - 1))
}

/// Whether a folio may begin with `first`.
pub const fn is_first(first: FrameNumber) -> bool {
    (first.0 as usize).is_multiple_of(ENTRIES)
}

impl Frames {
    /// Allocates the frames of a folio, or gives up without waiting.
    pub fn alloc_folio(&self, local: &Local, wait: &impl Wait) -> Option<NewFolio> {
        let first = self.alloc_order(local, HUGE_ORDER, wait)?.into_number();
        frames_of(first).for_each(|number| self.meta(number).make_single());
        Some(NewFolio { next: first.0, end: first.0 + ENTRIES as u32 })
    }
}

impl FrameMeta {
    /// How many huge leaves map the folio that begins with this frame.
    pub fn leaves(&self) -> u32 {
        self.next.load(Ordering::Acquire)
    }

    /// Counts one more leaf, if there is one already.
    #[must_use]
    pub fn add_leaf(&self) -> bool {
        let mut leaves = self.next.load(Ordering::Relaxed);
        while leaves != 0 && leaves < meta::MOST_LEAVES {
            let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            match self.next.compare_exchange_weak(leaves, leaves + 1, acquire, relaxed) {
                Ok(_) => return true,
                Err(now) => leaves = now,
            }
        }
        false
    }

    /// Counts the first leaf, for which the caller has taken a reference to each frame. False: another CPU was faster, and the references
    /// are the caller's still.
    #[must_use]
    pub fn add_first_leaf(&self) -> bool {
        self.next.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Counts one leaf less. True: it was the last, and the references are the caller's.
    #[must_use]
    pub fn drop_leaf(&self) -> bool {
        let before = self.next.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before != 0, "a huge leaf dropped twice");
        before == 1
    }
}
