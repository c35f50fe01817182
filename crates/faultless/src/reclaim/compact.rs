//! Compaction: makes free 2 MiB blocks out of scattered free frames.
//!
//! Two hands move over the blocks of a node: the lower hand upwards, over blocks to empty, and the
//! upper hand downwards, over blocks with *room*. As in Linux, used frames accumulate at the upper
//! end. The pass ends when the hands meet. For each block reached by the lower hand:
//!
//! 1. The block is [surveyed](crate::frame::isolated), by the metadata of its frames alone. The
//!    block is skipped if it contains an immovable frame: a page table, a frame of the kernel, a
//!    pinned page, or a frame in a CPU's list. It is also skipped if it is free, has no free frame,
//!    or has more used frames than the caller wants to move.
//! 2. Its free frames are isolated, so that no CPU allocates them.
//! 3. Its pages [move](super::migrate), in batches, to frames of the block at the upper hand, which
//!    are isolated as well. The old frames are isolated at once, except frames waiting for a flush.
//! 4. If some frames wait, all flushes are done at once, and the freed frames are isolated, too. If
//!    all frames of the block are isolated now, the frames are freed as one block. Otherwise,
//!    because a page could not move or another CPU keeps a frame, the blocks are freed unchanged.
//!
//! Between these steps the CPU holds only isolated frames, which are freed when their values are
//! dropped. So concurrent operations are not restricted; a page unmapped by a program in step 3
//! need not move. Isolated frames are not available for allocation: therefore compaction does not
//! run while memory is short, and only one CPU compacts at a time. For a second CPU the call does
//! nothing.
//!
//! The hands keep their positions between calls. So a background call may move only a few pages,
//! and the next call continues.

use super::backoff::Backoff;
use super::isolate::BATCH;
use super::migrate::Moving;
use crate::addr::FrameNumber;
use crate::error::Errno;
use crate::frame::isolated::Isolated;
use crate::machine::{MAX_NODES, Machine};
use crate::stat::Counter;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::table::node::HUGE_ORDER;
use crate::vm::Cpu;
use core::ops::Range;

/// The maximum number of blocks checked by a call in the background or for one block.
const LOOKS: u64 = 64;
/// The maximum number of pages moved by a call for one block: the pages of two blocks.
const DIRECT: u64 = 2 << HUGE_ORDER;
/// Background compaction keeps 1/`AHEAD` of memory in free blocks.
const AHEAD: u64 = 16;

/// The result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// 2 MiB blocks that have become free.
    pub blocks: u64,
    /// Pages that moved.
    pub moved: u64,
}

/// The positions of compaction.
#[derive(Debug)]
pub(crate) struct Compaction {
    /// Whether a CPU is compacting. Only this CPU moves the hands.
    busy: AtomicBool,
    /// By node: the next block to empty, and the end of the block that may have room next, as frame
    /// numbers.
    hands: [[AtomicU32; 2]; MAX_NODES],
    /// The calls in the background.
    ahead: Backoff,
}

impl Compaction {
    pub(crate) fn new() -> Self {
        let hands = core::array::from_fn(|_| [0; 2].map(AtomicU32::new));
        Self { busy: AtomicBool::new(false), hands, ahead: Backoff::new() }
    }

    /// Begins a compaction, unless another CPU is compacting.
    fn begin(&self) -> Option<Turn<'_>> {
        (!self.busy.swap(true, Ordering::Acquire)).then_some(Turn(self))
    }
}

/// A CPU's turn to compact; the drop ends the turn.
struct Turn<'c>(&'c Compaction);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}

/// The limits of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// log2 of the frames of a block, at most that of 2 MiB.
    pub(crate) order: u8,
    /// The number of wanted blocks.
    pub(crate) blocks: u64,
    /// The maximum number of pages to move.
    pub(crate) pages: u64,
    /// The maximum number of blocks to check.
    pub(crate) looks: u64,
    /// The maximum number of pages to move for one block.
    pub(crate) each: u32,
    /// Whether the call first does all deferred flushes and gives back the free frames of the CPU.
    pub(crate) gathers: bool,
}

impl Limits {
    const fn bounded(blocks: u64, pages: u64) -> Self {
        Self {
            order: HUGE_ORDER,
            blocks,
            pages,
            looks: LOOKS,
            each: 1 << (HUGE_ORDER - 1),
            gathers: true,
        }
    }
}

/// A compaction of a node.
struct Pass<'f> {
    node: u8,
    limits: Limits,
    /// The next block to empty, and the end of the block that may have room next.
    hands: [u32; 2],
    /// The remaining room in the block at the upper hand.
    room: Option<Isolated<'f>>,
    done: Compacted,
}

impl<M: Machine> Cpu<'_, M> {
    /// Makes at most `blocks` free blocks of 2 MiB out of scattered free frames, by moving pages
    /// within their node. Scans all memory if necessary, the nearest node first. Does nothing while
    /// memory is short, or another CPU is compacting.
    ///
    /// Not allowed inside a closure that lists areas, nor in a store's call.
    pub fn compact(&self, blocks: u64) -> Compacted {
        let each = (1 << HUGE_ORDER) - 1;
        self.compact_by(Limits {
            order: HUGE_ORDER,
            blocks,
            pages: u64::MAX,
            looks: u64::MAX,
            each,
            gathers: true,
        })
    }

    /// Continues compaction in the background: moves about `pages` pages at most, and checks a
    /// bounded number of blocks, unless 1/16 of memory is in free blocks of 2 MiB. For a
    /// low-priority kernel thread, which checks for other work between calls. Moves pages only if
    /// the gain is at least twice the memory moved. Does nothing if memory is short or has less
    /// than 32 MiB. After calls that move no page, up to 255 further calls return at once.
    ///
    /// Not allowed inside a closure that lists areas, nor in a store's call.
    pub fn compact_ahead(&self, pages: u64) -> Compacted {
        let frames = &self.vm().frames;
        let wanted = (frames.limit() / AHEAD) >> HUGE_ORDER;
        let missing = wanted - frames.free_blocks(HUGE_ORDER, wanted, self);
        let backoff = &self.vm().compaction.ahead;
        if missing == 0 || !frames.can_spare(2 << HUGE_ORDER) || backoff.leaves_out() {
            return Compacted::default();
        }
        let done = self.compact_by(Limits { gathers: false, ..Limits::bounded(missing, pages) });
        backoff.tried(done.moved != 0);
        done
    }

    /// Makes a free block of 2 MiB, if there is none and enough scattered frames are free in the
    /// blocks reached by the hands. The caller is in no grace section and holds no lock.
    pub(crate) fn compact_for_folio(&self) {
        let frames = &self.vm().frames;
        if frames.free_blocks(HUGE_ORDER, 1, self) != 0 || !frames.can_spare(2 << HUGE_ORDER) {
            return;
        }
        self.count(Counter::CompactStall);
        let done = self.compact_by(Limits::bounded(1, DIRECT));
        self.count(if done.blocks == 0 { Counter::CompactFail } else { Counter::CompactSuccess });
    }

    /// Compacts all memory, in blocks of 2^`order` frames: for checks on small machines.
    #[cfg(any(loom, shuttle))]
    pub fn compact_small(&self, order: u8) -> Compacted {
        let (blocks, pages, looks) = (u64::MAX, u64::MAX, u64::MAX);
        let each = (1 << order) - 1;
        self.compact_by(Limits { order, blocks, pages, looks, each, gathers: true })
    }

    /// Returns the number of free blocks of 2 MiB.
    pub fn free_huge_blocks(&self) -> u64 {
        self.vm().frames.free_blocks(HUGE_ORDER, u64::MAX, self)
    }

    /// Compacts within `limits`.
    pub(crate) fn compact_by(&self, limits: Limits) -> Compacted {
        let mut done = Compacted::default();
        let Some(turn) = self.vm().compaction.begin() else { return done };
        let _holds = self.hold_pages();
        if limits.gathers {
            self.gather_freed();
        } else {
            self.free_flushed();
        }
        let near = self.vm().machine().nearest_node(self.id());
        let mut limits = limits;
        for node in core::iter::once(near).chain(self.nodes().filter(|node| *node != near)) {
            let Some(hands) = turn.0.hands.get(usize::from(node)) else { continue };
            let places = [0, 1].map(|at| hands[at].load(Ordering::Relaxed));
            let mut pass = Pass { node, limits, hands: places, room: None, done };
            self.pass_over(&mut pass);
            // The block with remaining room will be visited again.
            if pass.room.take().is_some_and(|room| room.len() != 0) {
                pass.hands[1] += 1 << limits.order;
            }
            hands.iter().zip(pass.hands).for_each(|(hand, to)| hand.store(to, Ordering::Relaxed));
            (done, limits) = (pass.done, pass.limits);
        }
        self.state().counts.add(Counter::CompactBlock, done.blocks);
        done
    }

    /// Moves the hands of a node until they meet at the end of a pass that began in this call, or a
    /// limit is reached.
    fn pass_over<'v>(&'v self, pass: &mut Pass<'v>) {
        let Some(span) = self.span_of(pass.node, pass.limits.order) else { return };
        let size = 1 << pass.limits.order;
        // The first pass may belong to an earlier call, and have skipped blocks with frames freed
        // since.
        let mut begun_here = false;
        while pass.may_go_on() && self.vm().frames.can_spare(2 << pass.limits.order) {
            let [from, to] = pass.hands;
            if from >= to {
                if begun_here {
                    break;
                }
                begun_here = true;
                pass.room = None;
                pass.hands = [span.start, span.end];
                continue;
            }
            pass.limits.looks -= 1;
            if self.empty(pass, FrameNumber(from)) {
                pass.hands[0] += size;
            }
            self.serve_flushes();
        }
    }

    /// Returns the range from the first whole block of a node to the end of the last. The range may
    /// contain blocks of other nodes.
    fn span_of(&self, node: u8, order: u8) -> Option<Range<u32>> {
        let regions = self.vm().machine().regions().iter();
        let own = || regions.clone().filter(|region| region.node == node && region.frames != 0);
        let first =
            own().map(|region| region.first.0).min()?.checked_next_multiple_of(1 << order)?;
        let end = own().map(|region| region.first.0 + region.frames).max()? & !((1 << order) - 1);
        (first < end).then_some(first..end)
    }

    /// Frees frames that wait for a flush, and frames kept by this CPU.
    fn gather_freed(&self) {
        self.flush_deferred_if_any();
        self.vm().frames.drain(self.local(), self);
    }

    /// Empties the block at `first`, if possible. Returns whether the hand advances: it stays if no
    /// more pages may move now.
    fn empty<'v>(&'v self, pass: &mut Pass<'v>, first: FrameNumber) -> bool {
        let Limits { order, each, .. } = pass.limits;
        let frames = &self.vm().frames;
        self.state().counts.add(Counter::CompactMigrateScanned, 1 << order);
        let survey = frames.survey(pass.node, first, order);
        if !survey.is_some_and(|it| it.fixed == 0 && (1..=each).contains(&it.movable)) {
            return true;
        }
        let mut block = frames.isolated(first, order);
        block.gather(self);
        let mut next = block.next_missing(first);
        while next.is_some() {
            if pass.may_move() == 0 {
                return false;
            }
            let mut moving =
                [const { Moving { frame: FrameNumber(0), outcome: Err(Errno::EBUSY) } }; BATCH];
            let room = self.room(pass).min(BATCH).min(pass.may_move());
            let mut count = 0;
            while let Some(frame) = next.filter(|_| count < room) {
                if self.hold_movable(frame) {
                    moving[count].frame = frame;
                    count += 1;
                }
                next = block.next_missing(FrameNumber(frame.0 + 1));
            }
            let moving = &mut moving[..count];
            self.move_to_room(pass, moving, &mut block);
            if room == 0 || moving.iter().any(|moving| moving.outcome.is_err()) {
                // The hands have met; or a page is in use elsewhere.
                return true;
            }
        }
        if block.len() != 1 << order {
            self.gather_freed();
            block.gather(self);
        }
        pass.done.blocks += u64::from(block.join());
        true
    }

    /// Moves pages of `block` to frames of the room, which has enough frames.
    fn move_to_room(&self, pass: &mut Pass<'_>, moving: &mut [Moving], block: &mut Isolated<'_>) {
        let (Some(room), 1..) = (&mut pass.room, moving.len()) else { return };
        self.state().counts.add(Counter::CompactIsolated, moving.len() as u64);
        let mut numbers = [FrameNumber(0); BATCH];
        let to = room.take(&mut numbers[..moving.len()]);
        self.migrate_to(moving, to, |frame| block.put(frame));
        pass.done.moved += moving.iter().filter(|moving| moving.outcome.is_ok()).count() as u64;
    }

    /// Returns how many frames of room are available at once; 0: the hands have met.
    fn room<'v>(&'v self, pass: &mut Pass<'v>) -> usize {
        let order = pass.limits.order;
        let frames = &self.vm().frames;
        loop {
            if let Some(len @ 1..) = pass.room.as_ref().map(Isolated::len) {
                return len;
            }
            let [from, to] = pass.hands;
            // The block at the lower hand is being emptied.
            if to.saturating_sub(from) < 2 << order {
                pass.hands[1] = from;
                return 0;
            }
            pass.hands[1] = to - (1 << order);
            self.state().counts.add(Counter::CompactFreeScanned, 1 << order);
            let first = FrameNumber(pass.hands[1]);
            let has_room = |free| (1..1 << order).contains(&free);
            if frames.survey(pass.node, first, order).is_some_and(|survey| has_room(survey.free)) {
                let mut room = frames.isolated(first, order);
                room.gather(self);
                pass.room = Some(room);
            }
            self.serve_flushes();
        }
    }

    /// Takes a reference to the page in `frame`, if the page may move.
    fn hold_movable(&self, frame: FrameNumber) -> bool {
        let meta = self.vm().frames.meta(frame);
        let may_move = || meta.is_page() && !meta.is_pinned();
        if !may_move() || !meta.get_ref_unless_zero() {
            return false;
        }
        // The frame may have been reused by now.
        let holds = may_move();
        if !holds {
            // SAFETY: drops the reference just taken, which never was a mapping.
            unsafe { self.put_unmapped(frame) };
        }
        holds
    }
}

impl Pass<'_> {
    /// Returns how many more pages may move, at once.
    fn may_move(&self) -> usize {
        self.limits.pages.saturating_sub(self.done.moved).min(BATCH as u64) as usize
    }

    fn may_go_on(&self) -> bool {
        self.done.blocks < self.limits.blocks && self.may_move() != 0 && self.limits.looks != 0
    }
}
