//! Migration: moves pages to new frames while programs use the pages.
//!
//! A batch of pages is [taken](super::isolate) from its programs. Then the bytes are copied, and
//! the new frames described; the new entries differ from the old ones only in the frame; and the
//! old frames are freed.

use super::isolate::{BATCH, Batch, Then};
use crate::addr::FrameNumber;
use crate::error::{Errno, OutOfMemory};
use crate::frame::{Bulk, Clean, Frame, FrameUse};
use crate::machine::Machine;
use crate::rmap::walker::Walk;
use crate::stat::Counter;
use crate::sync::atomic::Ordering;
use crate::sync::mutant::{Mutant, lost};
use crate::vm::Cpu;

/// A page to move.
#[derive(Debug)]
pub(crate) struct Moving {
    /// The frame of the page, to which the batch has a reference.
    pub(crate) frame: FrameNumber,
    /// The new frame, or the reason why the page did not move.
    pub(crate) outcome: Result<FrameNumber, Errno>,
}

impl<M: Machine> Cpu<'_, M> {
    /// Moves the pages of `moving`, at most [`BATCH`], to frames of node `node`, and drops the
    /// caller's reference to each frame. The caller is in no grace section and holds no lock.
    pub(crate) fn migrate(&self, moving: &mut [Moving], node: u8) {
        let mut numbers = [FrameNumber(0); BATCH];
        let to = &mut numbers[..moving.len()];
        let mut frames = self.vm().frames.alloc_on(self.local(), node, to, self);
        if frames.len() < moving.len() && self.flush_deferred_if_any() {
            self.free_bulk(frames);
            let to = &mut numbers[..moving.len()];
            frames = self.vm().frames.alloc_on(self.local(), node, to, self);
        }
        self.migrate_to(moving, frames, |frame| self.free(frame));
    }

    /// As [`migrate`](Self::migrate), to `frames`. Pages without a frame do not move, and remaining
    /// frames are freed. The old frames are passed to `free`, except frames that wait for a flush.
    pub(crate) fn migrate_to(
        &self,
        moving: &mut [Moving],
        frames: Bulk<'_, Clean>,
        free: impl FnMut(Frame<Clean>),
    ) {
        {
            let walk = self.walk();
            match Batch::try_new(self, moving.len()) {
                Ok(batch) => self.migrate_in(&walk, batch, moving, frames, free),
                Err(OutOfMemory) => {
                    self.free_bulk(frames);
                    moving.iter_mut().for_each(|moving| moving.outcome = Err(Errno::ENOMEM));
                }
            }
        }
        for moving in moving.iter() {
            if moving.outcome.is_ok() {
                self.count(Counter::MigrateSuccess);
                continue;
            }
            self.count(Counter::MigrateFail);
            // SAFETY: drops the batch's own reference, which never was a mapping. References of
            // mappings were dropped after a flush.
            unsafe { self.put_unmapped(moving.frame) };
        }
    }

    fn migrate_in<'s>(
        &'s self,
        walk: &'s Walk<'_>,
        mut batch: Batch<'s>,
        moving: &mut [Moving],
        mut frames: Bulk<'_, Clean>,
        mut free: impl FnMut(Frame<Clean>),
    ) {
        for (at, moving) in moving.iter().enumerate() {
            if at < frames.len() {
                batch.find(self, walk, moving.frame);
            } else {
                batch.fail(moving.frame, Errno::ENOMEM);
            }
        }
        batch.take(self, |_, _, _| Ok(()));
        if !lost(Mutant::MigrateFlush) {
            batch.flush(self, Then::Move);
        }
        for (at, moving) in moving.iter_mut().enumerate() {
            moving.outcome = match (batch.pages()[at].failed, frames.pop()) {
                (None, Some(to)) => Ok(self.complete(&mut batch, at, to, &mut free)),
                (failed, to) => {
                    to.into_iter().for_each(|frame| self.free(frame));
                    Err(failed.unwrap_or(Errno::ENOMEM))
                }
            };
        }
        batch.end(self);
        self.free_bulk(frames);
    }

    /// Copies a page whose entries are all taken and flushed to the frame `to`, stores the new
    /// entries, and drops the references to the old frame. Returns the new frame.
    fn complete(
        &self,
        batch: &mut Batch<'_>,
        at: usize,
        to: Frame<Clean>,
        free: impl FnOnce(Frame<Clean>),
    ) -> FrameNumber {
        let page = &batch.pages()[at];
        let (from, refs) = (page.frame, page.entries());
        let meta = self.vm().frames.meta(from);
        // SAFETY: the new frame is unpublished and belongs to this CPU, and the old one is
        // referenced.
        unsafe { self.vm().machine().copy_frame(to.number(), from) };
        let usage = if page.name_of_object().is_some() { FrameUse::Shared } else { FrameUse::Anon };
        let anchor = meta.anchor.load(Ordering::Relaxed);
        let index = meta.index.load(Ordering::Relaxed);
        let to = self.vm().frames.publish_shared(to, usage, anchor, index, refs);
        self.vm()
            .frames
            .meta(to)
            .use_count
            .store(meta.use_count.load(Ordering::Relaxed), Ordering::Relaxed);
        // A CPU may still have a translation from the address to the old frame. See `flush_free`.
        if !lost(Mutant::MigrateKeepsStamp) {
            let aged = meta.aged.load(Ordering::Relaxed);
            self.vm().frames.meta(to).aged.store(aged, Ordering::Relaxed);
        }
        batch.store(at, |found| found.seen.with_frame(to), |seen| seen.with_frame(to));
        // Including the batch's own.
        batch.put_references(self, at, refs + 1, free);
        to
    }
}
