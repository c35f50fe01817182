//! Which pages are evicted: a clock goes over the frames of memory.
//!
//! # Why there are no lists
//!
//! Linux keeps lists of pages, active and inactive, or by generation. A page that is faulted in goes on a list: that writes the list's line and the
//! links of its neighbours, in every fault, whether memory is ever short or not. Here a fault writes one shared line. So there is no list. A *hand*
//! goes over the metadata of frames, in the order of their numbers, and comes back to each after it has been at all others. What it costs
//! is paid by the CPU that needs memory. CPUs that reclaim at the same time look at different frames: each advances the hand by
//! some at once.
//!
//! The hand that evicts pages goes over all nodes. So whether a page leaves memory depends on when it was used, and not on the
//! node that it is in: a CPU that needs memory does not empty its own node of pages that are used, while pages that are not used stay in another.
//! [Demotion and promotion](super::tiers) have a hand for each node.
//!
//! # Lives
//!
//! Where the hand comes to a page of a file, or, if there is a [swap area](super::swap), to a private page, it looks whether the page was used since
//! it was there last: whether an entry that maps it has the accessed bit, or the entry in its object, where calls of the kernel note their reads. It clears
//! the bits that it finds, and marks the entries as [aged](Entry::aged), which tells them from those of private pages that were prefaulted and never used.
//! Translations that CPUs have cached stay, as on Linux: a page that is used through such a one all the time may seem unused. So a CPU that
//! [balances](Cpu::balance) memory drops its own twice in each round of a hand.
//!
//! | the page | its lives |
//! |---|---|
//! | was used | one more, at most [`MOST_LIVES`] |
//! | was not used, and has more than one | one less |
//! | was not used, and has one or none | it is evicted, or demoted |
//! | was read again soon after it was evicted ([`refault`](super::refault)) | [`MOST_LIVES`] |
//!
//! A fault on private memory stores no lives. A private page is new, with none, as long as none of its entries is aged. Where a page was used, its
//! [neighbours](super::look_around) are looked at, too.
//!
//! So pages that were read ahead and never mapped go at once, pages that were used once go when the hand comes again, and those that are used all the time
//! survive a scan through a large file. (A fault that maps pages around its own maps them as used, as Linux's does on x86.)

use super::backoff::Backoff;
use super::refault::Evicted;
use super::taken::{BATCH, FrameList};
use crate::addr::FrameNumber;
use crate::error::OutOfMemory;
use crate::file::Object;
use crate::frame::{FrameMeta, Kind, Use, folio};
use crate::heap::Shared;
use crate::machine::{MAX_NODES, Machine, MemoryRegion};
use crate::rmap::visits::Visits;
use crate::rmap::walker::Walk;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::Entry;
use crate::table::node;
use crate::vm::Cpu;
use core::ops::{ControlFlow, Range};

/// So many frames are worth a look at all of memory. Fewer are found where the swap area is full but for slots of pages that come back one by one.
const WORTH: u64 = BATCH as u64;
/// The most lives of a page.
pub(super) const MOST_LIVES: u8 = 2;
/// Frames by which a CPU advances a hand, at most.
const STRIDE: u64 = 64;
/// What part of a node's frames that is, at most.
pub(super) const PART: u64 = 32;
/// How often the hand goes over a node before reclaim gives up: a page that was used has no life left by then.
const ROUNDS: u64 = MOST_LIVES as u64 + 2;

/// The hands, and what was evicted.
#[derive(Debug)]
pub(crate) struct Clock {
    /// How many frames the hand of each node has gone over, and that of all nodes.
    hands: [AtomicU64; MAX_NODES],
    all: AtomicU64,
    pub(super) evicted: Evicted,
    /// Of [`reclaim_ahead`](Cpu::reclaim_ahead), and, for each node, of demotion.
    ahead: Backoff,
    /// The frames that the last reclaim in the background could make available at most; the largest
    /// number if it reached its goal.
    reach: AtomicU64,
    pub(super) demotion: [Backoff; MAX_NODES],
}

impl Clock {
    /// How many frames the hand of all nodes has passed.
    #[cfg(all(test, not(any(loom, shuttle))))]
    pub(crate) fn passed(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    /// The frames that reclaim in the background keeps available: `most`, but at most a quarter of
    /// those that it can make available. The rest is left to the pages that are in use: a goal
    /// above what is evictable would evict them again and again.
    fn goal(&self, most: u64) -> u64 {
        most.min(self.reach.load(Ordering::Relaxed) / 4)
    }

    /// For a machine of `frames` frames.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    pub(crate) fn try_new(frames: u64) -> Result<Self, OutOfMemory> {
        let hands = core::array::from_fn(|_| AtomicU64::new(0));
        let evicted = Evicted::try_new(frames)?;
        let (ahead, demotion) = (Backoff::new(), core::array::from_fn(|_| Backoff::new()));
        let reach = AtomicU64::new(u64::MAX);
        Ok(Self { hands, all: AtomicU64::new(0), evicted, ahead, reach, demotion })
    }
}

/// What a hand goes over frames for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Pages of files leave memory.
    Evict,
    /// Pages move to slower memory: any but those of no object and no space.
    Demote,
    /// Pages that are used move to faster memory.
    Promote,
}

/// The frames that a hand goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Those of all nodes.
    All,
    /// Those of one node.
    Node(u8),
}

impl Over {
    fn contains(self, node: u8) -> bool {
        self == Self::All || self == Self::Node(node)
    }
}

/// What a hand looks at frames with.
struct Sight<'w> {
    walk: &'w Walk<'w>,
    visits: Visits<'w>,
    purpose: Purpose,
    /// How many frames it goes over in a round.
    total: u64,
}

impl<M: Machine> Cpu<'_, M> {
    /// Evicts pages of files that were not used for the longest time, about `pages` of them, in batches of up to 32: clean ones are dropped, dirty ones written to their store
    /// first. Private pages are among them if there is a [swap area](Self::swap_on) to which no other CPU is writing. Returns how many frames that gave, which are free at once, or when
    /// their [deferred flushes](Self::settle_flushes) are done.
    ///
    /// A CPU that is out of frames does so itself. A kernel calls it where it wants to be ahead of that: for a thread in the background, see
    /// [`reclaim_ahead`](Self::reclaim_ahead), or to make a group of programs smaller. Not inside a closure that lists areas, nor in a store's call.
    pub fn reclaim(&self, pages: u64) -> u64 {
        self.reclaim_until(|freed, found| freed + found >= pages)
    }

    /// As [`reclaim`](Self::reclaim), until what it has freed, and what it has found besides, `is_enough`.
    fn reclaim_until(&self, is_enough: impl FnMut(u64, u64) -> bool) -> u64 {
        if self.state().evicting.get() {
            return 0;
        }
        let looks = self.frames_of(Over::All) * ROUNDS;
        self.go_over(Over::All, looks, is_enough, Purpose::Evict, |due| {
            let freed = self.evict(due);
            // Others would stay, too, and seem unused the next time.
            let goes_on = freed != 0 || self.state().awaits_turn.get() || !self.swaps_elsewhere();
            goes_on.then_some(freed)
        })
    }

    /// Reclaims in the background if memory will be short soon: if less than 3/32 (9 %) of all
    /// memory, or of the knob `frame_limit`, is free. It stops when 1/8 is free, frames included
    /// that wait for a deferred flush, or when nothing more can be evicted. If the rest of memory
    /// cannot be evicted, a quarter of the evictable and free frames takes the place of 1/8. CPUs
    /// flush when it suits them, unless less than 1/16 is free. Returns how many frames that gave.
    /// For a thread of the kernel that runs when other work does not, as often as it likes.
    pub fn reclaim_ahead(&self) -> u64 {
        let frames = &self.vm().frames;
        let mut freed = 0;
        self.collect_ahead();
        let clock = &self.vm().clock;
        if frames.missing() == 0 {
            clock.reach.store(u64::MAX, Ordering::Relaxed);
        }
        let goal = clock.goal(frames.goal());
        if frames.available() >= goal - goal / 4 {
            if frames.is_short() {
                self.collect_owed();
                self.settle_some();
            }
            return 0;
        }
        self.age_translations();
        self.collect_owed();
        // One flush is for the frames that wait, and for those that pages leave now. What other CPUs free meanwhile is not missing any more.
        let missing = || goal.saturating_sub(frames.available());
        let is_enough = |found| missing() <= frames.owed_count() + found;
        loop {
            let backoff = &clock.ahead;
            let mut got = 0;
            if !is_enough(0) && !backoff.leaves_out() {
                let before = frames.available() + frames.owed_count();
                got = self.reclaim_until(|_, found| is_enough(found));
                if got >= WORTH && before + got < goal && !self.swaps_elsewhere() {
                    // It went over all of memory. Other CPUs cannot have taken what was never free.
                    clock.reach.store(before + got, Ordering::Relaxed);
                }
                // Others may have been faster, or are at work.
                backoff.tried(got >= WORTH || is_enough(0) || self.swaps_elsewhere());
            }
            freed += got;
            // As long as there are frames, CPUs flush when it suits them.
            self.vm().deferred.ask();
            if frames.is_short() {
                self.settle_some();
            }
            if got < WORTH || is_enough(0) {
                return freed;
            }
        }
    }

    /// The numbers of the nodes, of which some may have no memory.
    pub(super) fn nodes(&self) -> impl Iterator<Item = u8> + use<M> {
        let last = self.vm().machine().regions().iter().map(|region| region.node).max();
        0..=last.unwrap_or(0)
    }

    /// How many frames a hand goes over in one round.
    pub(super) fn frames_of(&self, over: Over) -> u64 {
        self.regions_of(over).map(|region| u64::from(region.frames)).sum()
    }

    fn regions_of(&self, over: Over) -> impl Iterator<Item = &MemoryRegion> {
        self.vm().machine().regions().iter().filter(move |region| over.contains(region.node))
    }

    /// Drops this CPU's translations if a hand has gone half a round since it last did.
    pub(super) fn age_translations(&self) {
        let (clock, state) = (&self.vm().clock, self.state());
        let half_rounds =
            |over, hand: &AtomicU64| 2 * hand.load(Ordering::Relaxed) / self.frames_of(over).max(1);
        let nodes = self.nodes().zip(&clock.hands);
        let nodes = nodes.map(|(node, hand)| half_rounds(Over::Node(node), hand));
        let now = nodes.sum::<u64>() + half_rounds(Over::All, &clock.all);
        if state.half_rounds.replace(now) != now {
            self.flush_own();
            self.count(Counter::FlushAged);
        }
    }

    /// Lets the hand of `over` go over at most `looks` frames, and `then` take those whose time has come, with a reference to each, in batches, until
    /// `is_enough` of as many as it has said that it did and those that are found besides, or it says `None`: it can take no more. Returns of how many it said
    /// so. Batches are full, but for the last: what a flush costs does not depend on how many pages it is for.
    pub(super) fn go_over(
        &self,
        over: Over,
        looks: u64,
        mut is_enough: impl FnMut(u64, u64) -> bool,
        purpose: Purpose,
        mut then: impl FnMut(&[FrameNumber]) -> Option<u64>,
    ) -> u64 {
        let (total, clock) = (self.frames_of(over), &self.vm().clock);
        let hand = match over {
            Over::All => Some(&clock.all),
            Over::Node(node) => clock.hands.get(usize::from(node)),
        };
        let Some(hand) = hand.filter(|_| total != 0) else { return 0 };
        // What is left of a stride when there is enough is passed over.
        let stride = (total / PART).min(STRIDE).min(looks).max(1);
        let _holds = self.hold_pages();
        let (mut left, mut done, mut due) = (looks, 0, FrameList::new());
        // What the hand goes over next, and where it was when the list was empty.
        let (mut places, mut first) = (0..0, 0);
        loop {
            let has_enough = is_enough(done, due.len() as u64);
            if places.is_empty() && left != 0 && !has_enough {
                let at = hand.fetch_add(stride, Ordering::Relaxed);
                (places, left) = (at..at + stride, left.saturating_sub(stride));
            }
            let is_last = places.is_empty() || has_enough;
            // A page that is met in the next round must not be in the list.
            let is_round = places.end - first > total;
            if due.is_full() || (is_last || is_round) && !due.is_empty() {
                match purpose {
                    Purpose::Evict => self.collect_ahead(),
                    Purpose::Demote | Purpose::Promote => self.settle_ahead(),
                }
                match then(&due.take()) {
                    Some(more) => done += more,
                    None => return done,
                }
            } else if is_last {
                return done;
            } else {
                if due.is_empty() {
                    first = places.start;
                }
                // A program waits for each page that is promoted. Of others a full batch costs less.
                let stops = |found| purpose == Purpose::Promote && is_enough(done, found);
                self.sweep(over, total, &mut places, purpose, &mut due, stops);
            }
        }
    }

    /// Looks at the frames of `over` that have the numbers `places` among them, modulo their `total`, until those whose time has come fill `due`, or are so
    /// many that it `stops`. What is left of `places` was not looked at.
    fn sweep(
        &self,
        over: Over,
        total: u64,
        places: &mut Range<u64>,
        purpose: Purpose,
        due: &mut FrameList,
        mut stops: impl FnMut(u64) -> bool,
    ) {
        let walk = self.walk();
        let mut sight = Sight { walk: &walk, visits: Visits::default(), purpose, total };
        while !places.is_empty() && !due.is_full() && !stops(due.len() as u64) {
            match self.frame_at(over, places.start % total) {
                Some(frame) => places.start += self.look(&mut sight, frame, due),
                None => places.start = places.end,
            }
            self.serve_flushes();
        }
    }

    /// The frame at place `at` of those of `over`.
    fn frame_at(&self, over: Over, mut at: u64) -> Option<FrameNumber> {
        for region in self.regions_of(over) {
            if at < u64::from(region.frames) {
                return Some(FrameNumber(region.first.0 + at as u32));
            }
            at -= u64::from(region.frames);
        }
        None
    }

    /// Looks at one frame, and adds it to `due` if its time has come. Returns how many frames the hand goes on.
    fn look<'w>(&'w self, sight: &mut Sight<'w>, frame: FrameNumber, due: &mut FrameList) -> u64 {
        let meta = self.vm().frames.meta(frame);
        let is_wanted = |kind: Kind| match kind {
            Kind::Used(Use::Shared) => true,
            Kind::Used(Use::Anon) => {
                sight.purpose != Purpose::Evict || self.swap_with_room().is_some()
            }
            _ => false,
        };
        match meta.kind() {
            // A block that moves meanwhile is of no importance: a page that is passed over is met again.
            Kind::Free | Kind::Zeroed => return 1 << meta.order(),
            kind if !is_wanted(kind) => return 1,
            _ => {}
        }
        if !meta.get_ref_unless_zero() {
            return 1;
        }
        if is_wanted(meta.kind()) && !meta.is_pinned() && self.is_due(sight, frame, meta) {
            due.push(frame);
        } else {
            // SAFETY: the reference just taken, which never was a mapping.
            unsafe { self.put_unmapped(frame) };
        }
        1
    }

    /// Whether the time of the page in `frame`, to which the caller has a reference, has come. Otherwise it has one life more or less.
    fn is_due<'w>(&'w self, sight: &mut Sight<'w>, frame: FrameNumber, meta: &FrameMeta) -> bool {
        let is_marked = meta.lives().1 && meta.kind() == Kind::Used(Use::Anon);
        let used = is_marked.then_some(true).or_else(|| self.was_used(sight, frame, meta));
        let Some(used) = used else { return false };
        self.count(Counter::PageScanned);
        // A page that nobody needs any more goes at once.
        if sight.purpose == Purpose::Evict && self.is_dead(sight, frame, meta) {
            return true;
        }
        let (lives, _) = meta.lives();
        let next = if used { (lives + 1).min(MOST_LIVES) } else { lives.saturating_sub(1) };
        // Another CPU that looks at the same time makes no difference that matters.
        meta.lives.store(next, Ordering::Relaxed);
        match sight.purpose {
            Purpose::Evict | Purpose::Demote => !used && lives <= 1,
            Purpose::Promote => used && lives != 0,
        }
    }

    /// Looks whether the page was used since the last look, and clears what tells so. `None`: it is not one that may go.
    fn was_used<'w>(
        &'w self,
        sight: &mut Sight<'w>,
        frame: FrameNumber,
        meta: &FrameMeta,
    ) -> Option<bool> {
        let (mut used, mut own) = (false, 1);
        if meta.kind() == Kind::Used(Use::Shared) {
            let purpose = sight.purpose;
            let was_read = |object: &Shared<Object>| self.was_read(purpose, frame, meta, object);
            (used, own) = (self.with_object(&mut sight.visits, frame, was_read)??, 2);
        }
        // The references of mappings. Of an object's page they may be fewer than entries: all huge leaves of a folio have one. A private page has no more
        // entries, and most have one, which the walk finds first.
        let mapped = meta.refs().saturating_sub(own);
        if mapped != 0 {
            let most = if own == 1 { mapped } else { u32::MAX };
            let (mut is_found, mut is_aged) = (false, false);
            self.each_mapping(sight.walk, &mut sight.visits, frame, most, |found| {
                used |= if found.seen.is_huge() && folio::first_of(frame) != frame {
                    // One entry maps all pages of the folio, of which the first tells: it has a life since it was used, and as long as it is spared.
                    let first = self.vm().frames.table().find(folio::first_of(frame));
                    first.is_none_or(|first| first.lives().0 != 0)
                } else {
                    is_found = true;
                    is_aged |= found.seen.is_aged();
                    let used = self.take_accessed(found.slot, found.seen);
                    if used && own == 1 {
                        self.look_around(&found, sight.total);
                    }
                    used
                };
                ControlFlow::Continue(())
            });
            // The lives are of the page that the frame had before.
            if own == 1 && is_found && !is_aged {
                meta.lives.store(0, Ordering::Relaxed);
            }
        }
        Some(used)
    }

    /// As [`was_used`](Self::was_used), by the entry of the page in its object.
    fn was_read(
        &self,
        purpose: Purpose,
        frame: FrameNumber,
        meta: &FrameMeta,
        object: &Object,
    ) -> Option<bool> {
        if purpose == Purpose::Evict && !object.is_stored() {
            return None;
        }
        let name = object.slot(self, meta.index.load(Ordering::Relaxed))?;
        let seen = node::load(name);
        names(seen, frame).then(|| self.take_accessed(name, seen))
    }

    /// Whether the page is one of the swap area whose slot no entry names any more.
    fn is_dead(&self, sight: &mut Sight<'_>, frame: FrameNumber, meta: &FrameMeta) -> bool {
        let Some(swap) = self.vm().swap.get() else { return false };
        self.with_object(&mut sight.visits, frame, |object| swap.is(object)) == Some(true)
            && swap.is_dead(meta.index.load(Ordering::Relaxed))
    }
}

/// Whether `entry` names `frame`, and no CPU has it.
fn names(entry: Entry, frame: FrameNumber) -> bool {
    entry.is_present() && !entry.is_locked() && entry.frame() == frame
}
