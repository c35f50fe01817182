//! Compaction: makes free 2 MiB blocks out of free frames that lie scattered.
//!
//! Two hands go over the blocks of a node: one upwards, over blocks to be emptied, and one downwards, over blocks with *room*. As in Linux, what
//! is in use comes together at the upper end. Where the hands meet, the pass is over. For each block that the lower hand comes to:
//!
//! 1. it is [surveyed](crate::frame::isolated), by the metadata of its frames alone. One with a frame that cannot move is passed by: a page table, the kernel's own, a
//!    pinned page, a frame in a CPU's list. So is one that is free, or has no free frame, or more used ones than the caller wants to move for it;
//! 2. its free frames are isolated, so that nobody allocates there;
//! 3. its pages [move](super::migrate), in batches, to frames of the block that the upper hand is at, which are isolated as well;
//!    The frames that they leave are isolated at once, but for those that wait for a flush;
//! 4. if some do, all flushes are done at once, and what was freed in it is isolated, too. If these are all of its frames, they are
//!    given back as one block. If not, since a page could not move or another CPU keeps a frame, they are given back as they were.
//!
//! Nothing is held between these steps but isolated frames, which go back when their values are dropped. So whatever other CPUs do meanwhile they do as ever; a page
//! that a program unmaps in step 3 is one less to move. Isolated frames cannot be had by others: so there is no compaction while memory is short,
//! and one CPU at a time compacts. A second one is told that there was nothing to do.
//!
//! The hands stay where they are between calls. So a call in the background may move a few pages only, and the next one goes on.

use super::migrate::Moving;
use super::taken::BATCH;
use crate::addr::FrameNumber;
use crate::error::Errno;
use crate::frame::isolated::Isolated;
use crate::machine::{MAX_NODES, Machine};
use crate::stat::Counter;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::table::node::HUGE_ORDER;
use crate::vm::Cpu;
use core::ops::Range;

/// How many blocks a call in the background or for one block looks at, at most.
const LOOKS: u64 = 64;
/// How many pages a call for one block moves, at most: as many as two blocks have.
const DIRECT: u64 = 2 << HUGE_ORDER;
/// In the background, one part of memory in so many is to be in free blocks.
const AHEAD: u64 = 16;

/// What a compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// 2 MiB blocks that were not free before, and are now.
    pub blocks: u64,
    /// Pages that moved.
    pub moved: u64,
}

/// Where compaction goes on.
#[derive(Debug)]
pub(crate) struct Compaction {
    /// Whether a CPU compacts. It alone moves the hands.
    busy: AtomicBool,
    /// By node: the block that is emptied next, and the one behind that in which there may be room, as numbers of frames.
    hands: [[AtomicU32; 2]; MAX_NODES],
}

impl Compaction {
    pub(crate) fn new() -> Self {
        let hands = core::array::from_fn(|_| [0; 2].map(AtomicU32::new));
        Self { busy: AtomicBool::new(false), hands }
    }

    /// Begins to compact, unless another CPU does.
    fn begin(&self) -> Option<Turn<'_>> {
        (!self.busy.swap(true, Ordering::Acquire)).then_some(Turn(self))
    }
}

/// A CPU's turn to compact, up to its drop.
struct Turn<'c>(&'c Compaction);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}

/// How far a call goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// log2 of the frames of a block, at most that of 2 MiB.
    pub(crate) order: u8,
    /// Blocks that are wanted.
    pub(crate) blocks: u64,
    /// Pages that may move.
    pub(crate) pages: u64,
    /// Blocks that may be looked at.
    pub(crate) looks: u64,
    /// Pages that may move for one block.
    pub(crate) each: u32,
}

impl Limits {
    const fn bounded(blocks: u64, pages: u64) -> Self {
        Self { order: HUGE_ORDER, blocks, pages, looks: LOOKS, each: 1 << (HUGE_ORDER - 1) }
    }
}

/// A compaction of a node.
struct Pass<'f> {
    node: u8,
    limits: Limits,
    /// The block that is emptied next, and the one behind that in which there may be room.
    hands: [u32; 2],
    /// What is left of the room in the block that the upper hand is at.
    room: Option<Isolated<'f>>,
    done: Compacted,
}

impl<M: Machine> Cpu<'_, M> {
    /// Makes at most `blocks` free blocks of 2 MiB out of free frames that lie scattered, by moving pages to other frames of their node. Goes over
    /// all memory if need be; the nearest node is first. Does nothing while memory is short, or another CPU compacts.
    ///
    /// Not inside a closure that lists areas, nor in a store's call.
    pub fn compact(&self, blocks: u64) -> Compacted {
        let each = (1 << HUGE_ORDER) - 1;
        self.compact_by(Limits {
            order: HUGE_ORDER,
            blocks,
            pages: u64::MAX,
            looks: u64::MAX,
            each,
        })
    }

    /// Goes on to compact, in the background: moves about `pages` pages at most, and looks at a bounded number of blocks, unless one part of memory in 16
    /// is in free blocks of 2 MiB. For a thread of the kernel that runs when other work does not: it looks in between whether there is some. Moves only
    /// what gives twice the memory. Nothing is to be done where memory has less than 32 MiB.
    ///
    /// Not inside a closure that lists areas, nor in a store's call.
    pub fn compact_ahead(&self, pages: u64) -> Compacted {
        let frames = &self.vm().frames;
        let wanted = (frames.limit() / AHEAD) >> HUGE_ORDER;
        let missing = wanted - frames.free_blocks(HUGE_ORDER, wanted, self);
        if missing == 0 {
            Compacted::default()
        } else {
            self.compact_by(Limits::bounded(missing, pages))
        }
    }

    /// Makes a free block of 2 MiB, if there is none, and enough free frames are scattered where the hands come to. Not inside a grace section,
    /// and holding no lock.
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
        let each = (1 << order) - 1;
        self.compact_by(Limits { order, blocks: u64::MAX, pages: u64::MAX, looks: u64::MAX, each })
    }

    /// How many free blocks of 2 MiB there are.
    pub fn free_huge_blocks(&self) -> u64 {
        self.vm().frames.free_blocks(HUGE_ORDER, u64::MAX, self)
    }

    /// Compacts as far as `limits` say.
    pub(crate) fn compact_by(&self, limits: Limits) -> Compacted {
        let mut done = Compacted::default();
        let Some(turn) = self.vm().compaction.begin() else { return done };
        let _holds = self.hold_pages();
        self.gather_freed();
        let near = self.vm().machine().nearest_node(self.id());
        let mut limits = limits;
        for node in core::iter::once(near).chain(self.nodes().filter(|node| *node != near)) {
            let Some(hands) = turn.0.hands.get(usize::from(node)) else { continue };
            let places = [0, 1].map(|at| hands[at].load(Ordering::Relaxed));
            let mut pass = Pass { node, limits, hands: places, room: None, done };
            self.pass_over(&mut pass);
            // The room that is left is met again.
            if pass.room.take().is_some_and(|room| room.len() != 0) {
                pass.hands[1] += 1 << limits.order;
            }
            hands.iter().zip(pass.hands).for_each(|(hand, to)| hand.store(to, Ordering::Relaxed));
            (done, limits) = (pass.done, pass.limits);
        }
        self.state().counts.add(Counter::CompactBlock, done.blocks);
        done
    }

    /// Moves the hands of a node until they meet at the end of a pass that was begun here, or a limit is reached.
    fn pass_over<'v>(&'v self, pass: &mut Pass<'v>) {
        let Some(span) = self.span_of(pass.node, pass.limits.order) else { return };
        let size = 1 << pass.limits.order;
        // The first pass may be an earlier call's, and have passed by what was freed since.
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

    /// The numbers of frames from the first whole block of a node to the end of the last. Blocks of other nodes may lie between them.
    fn span_of(&self, node: u8, order: u8) -> Option<Range<u32>> {
        let regions = self.vm().machine().regions().iter();
        let own = || regions.clone().filter(|region| region.node == node && region.frames != 0);
        let first =
            own().map(|region| region.first.0).min()?.checked_next_multiple_of(1 << order)?;
        let end = own().map(|region| region.first.0 + region.frames).max()? & !((1 << order) - 1);
        (first < end).then_some(first..end)
    }

    /// Frees what waits for a flush, and what this CPU keeps.
    fn gather_freed(&self) {
        self.settle_owed();
        self.vm().frames.drain(self.local(), self);
    }

    /// Empties the block at `first`, if that can be. Returns whether the hand goes on: it stays if no more pages may move now.
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
                // The hands have met; or others use the page.
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

    /// Moves pages of `block` to frames of the room, of which there are enough.
    fn move_to_room(&self, pass: &mut Pass<'_>, moving: &mut [Moving], block: &mut Isolated<'_>) {
        let (Some(room), 1..) = (&mut pass.room, moving.len()) else { return };
        self.state().counts.add(Counter::CompactIsolated, moving.len() as u64);
        let mut numbers = [FrameNumber(0); BATCH];
        let to = room.take(&mut numbers[..moving.len()]);
        self.migrate_to(moving, to, |frame| block.put(frame));
        pass.done.moved += moving.iter().filter(|moving| moving.outcome.is_ok()).count() as u64;
    }

    /// How many frames there is room for at once; 0: the hands have met.
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

    /// Takes a reference to the page in `frame`, if it is one that may move.
    fn hold_movable(&self, frame: FrameNumber) -> bool {
        let meta = self.vm().frames.meta(frame);
        let may_move = || meta.is_page() && !meta.is_pinned();
        if !may_move() || !meta.get_ref_unless_zero() {
            return false;
        }
        // It may be another's by now.
        let holds = may_move();
        if !holds {
            // SAFETY: the reference just taken, which never was a mapping.
            unsafe { self.put_unmapped(frame) };
        }
        holds
    }
}

impl Pass<'_> {
    /// How many pages may move still, at once.
    fn may_move(&self) -> usize {
        self.limits.pages.saturating_sub(self.done.moved).min(BATCH as u64) as usize
    }

    fn may_go_on(&self) -> bool {
        self.done.blocks < self.limits.blocks && self.may_move() != 0 && self.limits.looks != 0
    }
}
