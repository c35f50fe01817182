//! Frames with a [deferred](crate::tlb::deferred) flush: free, but not usable before the flush.
//!
//! Each arena keeps such frames in the order of their arrival, with their stamps. They are in
//! neither the buddy allocator nor a CPU's list. So none is split, merged, zeroed or allocated, and
//! no allocation reads a stamp. After their flushes are done, they all go to the buddy allocator at
//! once.

use super::arena::Arena;
use super::meta::{FrameMeta, FrameTable, Kind, NO_FRAME};
use super::owned::{FlushPending, Frame};
use super::percpu::BATCH;
use super::{FrameNumber, Frames};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::order::FlushPendingFrames;
use crate::sync::spin::SpinLock;
use crate::sync::wait::Wait;

/// At most 1/`PART` of memory may wait for a flush.
const PART: u64 = 16;

/// The waiting frames of an arena, linked by `next` in their metadata. Their stamps are in `index`.
#[derive(Debug)]
pub(super) struct FlushPendingList {
    list: SpinLock<List, FlushPendingFrames>,
    /// The number of frames, for callers that only check whether taking the lock is worthwhile.
    count: AtomicU64,
}

#[derive(Debug)]
struct List {
    first: u32,
    last: u32,
}

impl FlushPendingList {
    pub(super) fn new() -> Self {
        let list = SpinLock::ordered(List { first: NO_FRAME, last: NO_FRAME });
        Self { list, count: AtomicU64::new(0) }
    }

    /// Appends the frames of `run`.
    fn append(&self, table: &FrameTable, run: &FlushPendingRun, wait: &impl Wait) {
        let mut list = self.list.lock(wait);
        match list.last {
            NO_FRAME => list.first = run.first,
            last => table.meta(FrameNumber(last)).next.store(run.first, Ordering::Relaxed),
        }
        list.last = run.last;
        self.count.fetch_add(run.count, Ordering::Relaxed);
    }

    /// Takes the first frames whose stamps are at most `paid`, and returns their number.
    fn pop_paid(
        &self,
        table: &FrameTable,
        paid: u64,
        to: &mut [FrameNumber; BATCH],
        wait: &impl Wait,
    ) -> usize {
        if self.count.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let mut list = self.list.lock(wait);
        let mut got = 0;
        while got < BATCH && list.first != NO_FRAME {
            let number = FrameNumber(list.first);
            let meta = table.meta(number);
            if meta.index.load(Ordering::Relaxed) > paid {
                break;
            }
            list.first = meta.next.load(Ordering::Relaxed);
            // The field counts huge leaves while the frame is in use.
            meta.next.store(0, Ordering::Relaxed);
            to[got] = number;
            got += 1;
        }
        if list.first == NO_FRAME {
            list.last = NO_FRAME;
        }
        self.count.fetch_sub(got as u64, Ordering::Relaxed);
        got
    }
}

/// Frames of one arena that wait for the same flush and are not in the arena's list yet. The list
/// is locked once for all of them.
#[derive(Debug)]
#[must_use = "discarded frames are lost"]
pub struct FlushPendingRun {
    first: u32,
    last: u32,
    count: u64,
}

impl FlushPendingRun {
    /// Returns an empty run.
    pub const fn new() -> Self {
        Self { first: NO_FRAME, last: NO_FRAME, count: 0 }
    }
}

impl Frames {
    /// Adds a single frame, which waits for the flush with this stamp, to `run`; the caller must
    /// later call [`keep_flush_pending`](Self::keep_flush_pending) for the run. The contents of the
    /// frame do not change.
    #[inline]
    pub fn add_flush_pending(
        &self,
        run: &mut FlushPendingRun,
        frame: Frame<FlushPending>,
        stamp: u64,
        wait: &impl Wait,
    ) {
        debug_assert_eq!(frame.order(), 0, "blocks are not kept");
        let number = frame.into_number();
        let meta = self.meta(number);
        if run.count != 0 && self.meta(FrameNumber(run.last)).arena() != meta.arena() {
            self.keep_flush_pending(run, wait);
        }
        meta.set_kind(Kind::FlushPending);
        meta.index.store(stamp, Ordering::Relaxed);
        meta.next.store(NO_FRAME, Ordering::Relaxed);
        match run.count {
            0 => run.first = number.0,
            _ => self.meta(FrameNumber(run.last)).next.store(number.0, Ordering::Relaxed),
        }
        run.last = number.0;
        run.count += 1;
    }

    /// Keeps the frames of `run` until their flush is done.
    pub fn keep_flush_pending(&self, run: &mut FlushPendingRun, wait: &impl Wait) {
        if run.count != 0 {
            self.arena_of(FrameNumber(run.first)).flush_pending.append(&self.table, run, wait);
            *run = FlushPendingRun::new();
        }
    }

    /// Returns the frames whose stamps are at most `paid` to their arenas, and returns their
    /// number.
    ///
    /// # Safety
    /// All flushes with these stamps are done: no CPU has a translation to any of the frames.
    pub unsafe fn release_flushed(&self, paid: u64, wait: &impl Wait) -> u64 {
        let mut released = 0;
        for arena in &self.arenas {
            let mut batch = [FrameNumber(0); BATCH];
            while let got @ 1.. = arena.flush_pending.pop_paid(&self.table, paid, &mut batch, wait)
            {
                self.table.each(&batch[..got]).for_each(FrameMeta::end_ownership);
                self.give_back(&batch[..got], 0, false, wait);
                released += got as u64;
            }
        }
        released
    }

    /// Returns the number of frames that wait for their flush.
    pub fn flush_pending_count(&self) -> u64 {
        self.arenas
            .iter()
            .map(|Arena { flush_pending, .. }| flush_pending.count.load(Ordering::Relaxed))
            .sum()
    }

    /// Returns the number of frames of a node that wait for their flush.
    pub fn flush_pending_on(&self, node: u8) -> u64 {
        let arenas = self.layout.arenas_of(node).map(|number| &self.arenas[number]);
        arenas.map(|Arena { flush_pending, .. }| flush_pending.count.load(Ordering::Relaxed)).sum()
    }

    /// Returns whether at least 1/`part` of the deferral budget is used, and at least one frame.
    pub fn uses_budget(&self, part: u64) -> bool {
        self.flush_pending_count() >= (self.limit() / (part * PART)).max(1)
    }

    /// Returns whether the deferral budget is used up.
    pub fn budget_is_used_up(&self) -> bool {
        self.flush_pending_count() >= self.limit() / PART
    }
}
