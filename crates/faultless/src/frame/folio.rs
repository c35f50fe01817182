//! Folios: contiguous, aligned frames, as many as a huge leaf maps.
//!
//! The frames of a folio are single frames with separate references. Their location alone makes
//! them a folio: in a file's page cache, in the order of its pages. So a page of a folio is mapped,
//! copied, pinned, written back and dropped like any other page.
//!
//! A huge leaf would need a reference to each frame. Instead, all huge leaves of a folio share
//! their references: the first frame's metadata counts the leaves, and while the count is not zero,
//! the leaves together have one reference to each frame. A CPU that adds the first leaf takes these
//! references before it counts the leaf; a CPU that drops the last leaf drops the references after
//! it has counted. If two CPUs concurrently add the first leaf, both take references, and the CPU
//! that counts second drops its own again.
//!
//! *Invariant (the count of leaves):* the count is zero in every unused frame, and in every frame
//! except the first of a folio mapped by huge leaves. It shares its field with a link of the free
//! lists, which is reset to zero when the frame leaves the list. So only CPUs with a reference to
//! the frame may read the count.

use super::meta::FrameMeta;
use super::owned::{Clean, Frame};
use super::{Frames, meta};
use crate::addr::FrameNumber;
use crate::sync::atomic::Ordering;
use crate::sync::percpu::Local;
use crate::sync::wait::Wait;
use crate::table::node::{ENTRIES, HUGE_ORDER};

/// The unused frames of a new folio, in ascending order.
#[must_use = "dropped frames are lost"]
#[derive(Debug)]
pub struct NewFolio {
    next: u32,
    end: u32,
}

impl NewFolio {
    /// Takes the next frame, if any remains.
    pub fn pop(&mut self) -> Option<Frame<Clean>> {
        let number = FrameNumber(self.next);
        (self.next != self.end).then(|| {
            self.next += 1;
            Frame::new(number, 0)
        })
    }
}

/// Iterates over the frames of the folio that begins with `first`.
pub fn frames_of(first: FrameNumber) -> impl Iterator<Item = FrameNumber> {
    (first.0..).take(ENTRIES).map(FrameNumber)
}

/// Returns the first frame of the folio that contains `frame`, if `frame` belongs to a folio.
pub const fn first_of(frame: FrameNumber) -> FrameNumber {
    FrameNumber(frame.0 & !(ENTRIES as u32 - 1))
}

/// Returns whether a folio may begin with `first`.
pub const fn is_first(first: FrameNumber) -> bool {
    (first.0 as usize).is_multiple_of(ENTRIES)
}

impl Frames {
    /// Allocates the frames of a folio without waiting; `None` if no block is free.
    pub fn alloc_folio(&self, local: &Local, wait: &impl Wait) -> Option<NewFolio> {
        let first = self.alloc_order(local, HUGE_ORDER, wait)?.into_number();
        frames_of(first).for_each(|number| self.meta(number).make_single());
        Some(NewFolio { next: first.0, end: first.0 + ENTRIES as u32 })
    }
}

impl FrameMeta {
    /// Returns how many huge leaves map the folio that begins with this frame.
    pub fn leaves(&self) -> u32 {
        self.next.load(Ordering::Acquire)
    }

    /// Counts one more leaf, if the count is not zero.
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

    /// Counts the first leaf, for which the caller has taken a reference to each frame. False:
    /// another CPU was faster, and the caller keeps the references.
    #[must_use]
    pub fn add_first_leaf(&self) -> bool {
        self.next.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Uncounts a leaf. True: this was the last leaf, and the references belong to the caller.
    #[must_use]
    pub fn drop_leaf(&self) -> bool {
        let before = self.next.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before != 0, "a huge leaf dropped twice");
        before == 1
    }
}
