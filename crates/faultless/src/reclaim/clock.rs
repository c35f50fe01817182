//! The choice of pages to evict: a clock hand scans the frames of memory.
//!
//! # No lists
//!
//! Linux keeps lists of pages, active and inactive, or by generation. A fault adds the new page to
//! a list: this writes the list's line and the links of two pages, in every fault, even if memory
//! is never short. Here a fault writes one shared line. So there is no list. A *hand* scans the
//! metadata of frames, in the order of the frame numbers, and returns to each frame after visiting
//! all the rest. The CPU that needs memory bears the cost. CPUs that reclaim concurrently scan
//! different frames: each advances the hand by several frames at once.
//!
//! The hand that evicts pages scans all nodes. So the eviction of a page depends on the time of the
//! last use, and not on the node: a CPU that needs memory does not evict used pages from the CPU's
//! own node while unused pages stay in another. [Demotion and promotion](super::tiers) have a hand
//! for each node.
//!
//! # Use counts
//!
//! When the hand reaches a page of a file, or, if there is a [swap area](super::swap), a private
//! page, it checks whether the page was used since the last visit: whether an entry that maps the
//! page has the accessed bit, or the entry in the page's object, in which calls of the kernel
//! record reads. The hand clears these bits, and marks the entries as [aged](Entry::aged), which
//! distinguishes them from entries of prefaulted private pages without any use. Cached translations
//! of CPUs stay, as on Linux: a page that is continuously used through a cached translation may
//! seem unused. So a CPU that [balances](Cpu::balance) memory drops its own translations twice in
//! each round of a hand.
//!
//! | the page | its use count |
//! |---|---|
//! | was used | one more, at most [`MAX_USE_COUNT`] |
//! | was not used, count above one | one less |
//! | was not used, count of one or zero | the page is *cold*: evicted, or demoted |
//! | was read again soon after its eviction ([`refault`](super::refault)) | [`MAX_USE_COUNT`] |
//!
//! A fault on private memory stores no use count. A private page is new, with a count of zero,
//! while none of its entries is aged. If a page was used, its [neighbours](super::scan_around) are
//! also checked.
//!
//! So pages that were read ahead and never mapped are evicted at once, pages used once are evicted
//! when the hand returns, and pages in continuous use survive a scan through a large file. (A fault
//! that also maps neighbouring pages maps these pages as used, as Linux does on x86.)

use super::backoff::Backoff;
use super::isolate::{BATCH, FrameList};
use super::refault::Evicted;
use crate::addr::FrameNumber;
use crate::error::OutOfMemory;
use crate::file::Object;
use crate::frame::{FrameMeta, FrameUse, Kind, folio};
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

/// The number of frames that makes a scan of all memory worthwhile. Fewer are found if the swap
/// area is full except for slots of pages swapped in individually.
const WORTH: u64 = BATCH as u64;
/// The maximum use count of a page.
pub(super) const MAX_USE_COUNT: u8 = 2;
/// The maximum number of frames by which a CPU advances a hand.
const STRIDE: u64 = 64;
/// The same maximum as a part of a node's frames.
pub(super) const PART: u64 = 32;
/// The number of rounds over a node before reclaim fails: by then a used page has a use count of
/// zero.
const ROUNDS: u64 = MAX_USE_COUNT as u64 + 2;

/// The hands, and the record of evictions.
#[derive(Debug)]
pub(crate) struct Clock {
    /// The number of frames passed by the hand of each node, and by the hand of all nodes.
    hands: [AtomicU64; MAX_NODES],
    all: AtomicU64,
    pub(super) evicted: Evicted,
    /// The backoff of [`reclaim_ahead`](Cpu::reclaim_ahead), and, for each node, of demotion.
    ahead: Backoff,
    /// The maximum number of frames that the last background reclaim could make available; the
    /// largest number if the reclaim reached its goal.
    reach: AtomicU64,
    /// The start of the present round of the hand of all nodes, for a lowered `reach`.
    round: AtomicU64,
    /// The number of frames evicted in this round.
    evicted_in_round: AtomicU64,
    pub(super) demotion: [Backoff; MAX_NODES],
}

impl Clock {
    /// Returns how many frames the hand of all nodes has passed.
    #[cfg(all(test, not(any(loom, shuttle))))]
    pub(crate) fn passed(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    /// Returns the number of frames that background reclaim keeps available: `most`, but at most a
    /// quarter of the frames that can become available. The rest is left to pages in use: a goal
    /// above the evictable frames would evict used pages repeatedly.
    fn goal(&self, most: u64) -> u64 {
        most.min(self.reach.load(Ordering::Relaxed) / 4)
    }

    /// Lowers the reach to `frames`.
    fn lower_reach(&self, frames: u64) {
        self.reach.store(frames, Ordering::Relaxed);
        self.begin_round();
    }

    /// Begins a round of the hand.
    fn begin_round(&self) {
        self.round.store(self.all.load(Ordering::Relaxed), Ordering::Relaxed);
        self.evicted_in_round.store(0, Ordering::Relaxed);
    }

    /// Records the eviction of `frames` frames by the hand of all nodes, which scans `total` frames
    /// in a round. If one round evicts more frames than a lowered reach, more frames can become
    /// available by now: the next background reclaim has its full goal. Concurrent calls may lose
    /// or double some frames, which only changes the time of this.
    fn note_evicted(&self, frames: u64, total: u64) {
        let reach = self.reach.load(Ordering::Relaxed);
        if reach == u64::MAX {
            return;
        }
        let hand = self.all.load(Ordering::Relaxed);
        if hand.wrapping_sub(self.round.load(Ordering::Relaxed)) >= total {
            self.begin_round();
        } else if self.evicted_in_round.fetch_add(frames, Ordering::Relaxed) + frames > reach {
            self.reach.store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Returns the clock for a machine of `frames` frames.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(crate) fn try_new(frames: u64) -> Result<Self, OutOfMemory> {
        let hands = core::array::from_fn(|_| AtomicU64::new(0));
        let evicted = Evicted::try_new(frames)?;
        let (ahead, demotion) = (Backoff::new(), core::array::from_fn(|_| Backoff::new()));
        let [all, round, evicted_in_round] = core::array::from_fn(|_| AtomicU64::new(0));
        let reach = AtomicU64::new(u64::MAX);
        Ok(Self { hands, all, evicted, ahead, reach, round, evicted_in_round, demotion })
    }
}

/// The purpose of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Pages of files leave memory.
    Evict,
    /// Pages move to slower memory: any pages of an object or a space.
    Demote,
    /// Used pages move to faster memory.
    Promote,
}

/// The frames that a hand scans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// The frames of all nodes.
    All,
    /// The frames of one node.
    Node(u8),
}

impl Over {
    fn contains(self, node: u8) -> bool {
        self == Self::All || self == Self::Node(node)
    }
}

/// The state of a scan.
struct Sight<'w> {
    walk: &'w Walk<'w>,
    visits: Visits<'w>,
    purpose: Purpose,
    /// The number of frames of a round.
    total: u64,
}

impl<M: Machine> Cpu<'_, M> {
    /// Evicts pages of files that were unused for the longest time, about `pages` of them, in
    /// batches of up to 32: clean pages are dropped, dirty pages are first written to their store.
    /// Private pages are included if there is a [swap area](Self::swap_on) to which no other CPU is
    /// writing. Returns how many frames were released, which are free at once, or after their
    /// [deferred flushes](Self::flush_deferred).
    ///
    /// A CPU without a free frame does this itself. A kernel calls it to keep frames free in
    /// advance: in a background thread, use [`reclaim_ahead`](Self::reclaim_ahead). Another use is
    /// to shrink a group of programs. Not allowed inside a closure that lists areas, nor in a
    /// store's call.
    pub fn reclaim(&self, pages: u64) -> u64 {
        self.reclaim_until(|freed, found| freed + found >= pages)
    }

    /// As [`reclaim`](Self::reclaim), until the numbers of frames freed and of chosen pages found
    /// are enough for `is_enough`.
    fn reclaim_until(&self, is_enough: impl FnMut(u64, u64) -> bool) -> u64 {
        if self.state().evicting.get() {
            return 0;
        }
        let total = self.frames_of(Over::All);
        let evicted =
            self.go_over(Over::All, total * ROUNDS, is_enough, Purpose::Evict, |chosen| {
                let freed = self.evict(chosen);
                // Other private pages would stay, too, and seem unused the next time.
                let goes_on =
                    freed != 0 || self.state().awaits_turn.get() || !self.swaps_elsewhere();
                goes_on.then_some(freed)
            });
        self.vm().clock.note_evicted(evicted, total);
        evicted
    }

    /// Reclaims in the background if memory will be short soon: if less than 3/32 (9 %) of all
    /// memory, or of the knob `frame_limit`, is free. It stops when 1/8 is free, including frames
    /// that wait for a deferred flush, or when no more pages can be evicted. If the rest of memory
    /// cannot be evicted, a quarter of the evictable and free frames replaces the 1/8, until 1/8 is
    /// free, or one round over memory evicts more frames than this sum. CPUs flush at a convenient
    /// time, unless less than 1/16 is free. Returns how many frames were released. For a
    /// low-priority kernel thread, with calls at any rate.
    pub fn reclaim_ahead(&self) -> u64 {
        let frames = &self.vm().frames;
        let mut freed = 0;
        self.collect_in_background();
        let clock = &self.vm().clock;
        if frames.missing() == 0 {
            clock.reach.store(u64::MAX, Ordering::Relaxed);
        }
        let goal = clock.goal(frames.goal());
        if frames.available() >= goal - goal / 4 {
            if frames.is_short() {
                self.free_flushed();
                self.free_some_flush_pending();
            }
            return 0;
        }
        self.age_translations();
        self.free_flushed();
        // One flush covers the frames that already wait, and the frames of pages that leave now.
        // Frames freed by other CPUs in the meantime reduce the need.
        let missing = || goal.saturating_sub(frames.available());
        let is_enough = |found| missing() <= frames.flush_pending_count() + found;
        loop {
            let backoff = &clock.ahead;
            let mut got = 0;
            if !is_enough(0) && !backoff.leaves_out() {
                let before = frames.available() + frames.flush_pending_count();
                let mut found_enough = false;
                got = self.reclaim_until(|_, found| {
                    found_enough = is_enough(found);
                    found_enough
                });
                let covered = !found_enough && !self.swaps_elsewhere();
                if covered && got >= WORTH && before + got < goal {
                    // The scan covered all of memory. No CPU can have taken frames that were never
                    // free.
                    clock.lower_reach(before + got);
                }
                // Other CPUs may have been faster, or are working.
                backoff.tried(got >= WORTH || is_enough(0) || self.swaps_elsewhere());
            }
            freed += got;
            // While there are frames, CPUs flush at a convenient time.
            self.vm().deferred.ask();
            if frames.is_short() {
                self.free_some_flush_pending();
            }
            if got < WORTH || is_enough(0) {
                return freed;
            }
        }
    }

    /// Iterates over the numbers of the nodes, some of which may have no memory.
    pub(super) fn nodes(&self) -> impl Iterator<Item = u8> + use<M> {
        let last = self.vm().machine().regions().iter().map(|region| region.node).max();
        0..=last.unwrap_or(0)
    }

    /// Returns the number of frames that a hand scans in one round.
    pub(super) fn frames_of(&self, over: Over) -> u64 {
        self.regions_of(over).map(|region| u64::from(region.frames)).sum()
    }

    fn regions_of(&self, over: Over) -> impl Iterator<Item = &MemoryRegion> {
        self.vm().machine().regions().iter().filter(move |region| over.contains(region.node))
    }

    /// Drops this CPU's translations if a hand has advanced by half a round since the last time.
    pub(super) fn age_translations(&self) {
        let (clock, state) = (&self.vm().clock, self.state());
        let half_rounds =
            |over, hand: &AtomicU64| 2 * hand.load(Ordering::Relaxed) / self.frames_of(over).max(1);
        let nodes = self.nodes().zip(&clock.hands);
        let nodes = nodes.map(|(node, hand)| half_rounds(Over::Node(node), hand));
        let now = nodes.sum::<u64>() + half_rounds(Over::All, &clock.all);
        if state.half_rounds.replace(now) != now {
            self.flush_local();
            self.count(Counter::FlushAged);
        }
    }

    /// Advances the hand of `over` by at most `looks` frames, and passes the chosen pages to `then`
    /// in batches, with a reference to each. `then` returns how many pages it processed, or `None`
    /// if it can process no more. The scan ends when `is_enough`, called with the sum of these
    /// numbers and the number of further pages found, returns true. Returns the sum. Batches are
    /// full, except the last, because the cost of a flush does not depend on the number of pages.
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
        // The rest of a stride is skipped if there is enough.
        let stride = (total / PART).min(STRIDE).min(looks).max(1);
        let _holds = self.hold_pages();
        let (mut left, mut done, mut chosen) = (looks, 0, FrameList::new());
        // The next places to scan, and the place at which the list was last empty.
        let (mut places, mut first) = (0..0, 0);
        loop {
            let has_enough = is_enough(done, chosen.len() as u64);
            if places.is_empty() && left != 0 && !has_enough {
                let at = hand.fetch_add(stride, Ordering::Relaxed);
                (places, left) = (at..at + stride, left.saturating_sub(stride));
            }
            let is_last = places.is_empty() || has_enough;
            // A page that is visited again in the next round must not be in the list.
            let is_round = places.end - first > total;
            if chosen.is_full() || (is_last || is_round) && !chosen.is_empty() {
                match purpose {
                    Purpose::Evict => self.collect_in_background(),
                    Purpose::Demote | Purpose::Promote => self.flush_in_background(),
                }
                match then(&chosen.take()) {
                    Some(more) => done += more,
                    None => return done,
                }
            } else if is_last {
                return done;
            } else {
                if chosen.is_empty() {
                    first = places.start;
                }
                // A program waits for each page that is promoted. For other pages a full batch
                // costs less.
                let stops = |found| purpose == Purpose::Promote && is_enough(done, found);
                self.sweep(over, total, &mut places, purpose, &mut chosen, stops);
            }
        }
    }

    /// Scans the frames of `over` with the numbers `places`, modulo their `total`, until the chosen
    /// pages fill `chosen`, or `stops` returns true for their number. The remaining `places` were
    /// not scanned.
    fn sweep(
        &self,
        over: Over,
        total: u64,
        places: &mut Range<u64>,
        purpose: Purpose,
        chosen: &mut FrameList,
        mut stops: impl FnMut(u64) -> bool,
    ) {
        let walk = self.walk();
        let mut sight = Sight { walk: &walk, visits: Visits::default(), purpose, total };
        while !places.is_empty() && !chosen.is_full() && !stops(chosen.len() as u64) {
            match self.frame_at(over, places.start % total) {
                Some(frame) => places.start += self.scan_frame(&mut sight, frame, chosen),
                None => places.start = places.end,
            }
            self.serve_flushes();
        }
    }

    /// Returns the frame at place `at` among the frames of `over`.
    fn frame_at(&self, over: Over, mut at: u64) -> Option<FrameNumber> {
        for region in self.regions_of(over) {
            if at < u64::from(region.frames) {
                return Some(FrameNumber(region.first.0 + at as u32));
            }
            at -= u64::from(region.frames);
        }
        None
    }

    /// Scans one frame, and adds the frame to `chosen` if the page is chosen. Returns by how many
    /// frames the hand advances.
    fn scan_frame<'w>(
        &'w self,
        sight: &mut Sight<'w>,
        frame: FrameNumber,
        chosen: &mut FrameList,
    ) -> u64 {
        let meta = self.vm().frames.meta(frame);
        let is_wanted = |kind: Kind| match kind {
            Kind::Used(FrameUse::Shared) => true,
            Kind::Used(FrameUse::Anon) => {
                sight.purpose != Purpose::Evict || self.swap_with_room().is_some()
            }
            _ => false,
        };
        match meta.kind() {
            // A concurrent change of the block does not matter: a skipped page is visited again.
            Kind::Free | Kind::Zeroed => return 1 << meta.order(),
            kind if !is_wanted(kind) => return 1,
            _ => {}
        }
        if !meta.get_ref_unless_zero() {
            return 1;
        }
        if is_wanted(meta.kind()) && !meta.is_pinned() && self.is_chosen(sight, frame, meta) {
            chosen.push(frame);
        } else {
            // SAFETY: drops the reference just taken, which never was a mapping.
            unsafe { self.put_unmapped(frame) };
        }
        1
    }

    /// Returns whether the page in `frame`, to which the caller has a reference, is chosen. Updates
    /// the use count of the page.
    fn is_chosen<'w>(
        &'w self,
        sight: &mut Sight<'w>,
        frame: FrameNumber,
        meta: &FrameMeta,
    ) -> bool {
        let is_marked = meta.use_count().1 && meta.kind() == Kind::Used(FrameUse::Anon);
        let used = is_marked.then_some(true).or_else(|| self.was_used(sight, frame, meta));
        let Some(used) = used else { return false };
        self.count(Counter::PageScanned);
        // A dead page is cold at once.
        if sight.purpose == Purpose::Evict && self.is_dead(sight, frame, meta) {
            return true;
        }
        let (use_count, _) = meta.use_count();
        let next =
            if used { (use_count + 1).min(MAX_USE_COUNT) } else { use_count.saturating_sub(1) };
        // A concurrent update by another CPU makes no important difference.
        meta.use_count.store(next, Ordering::Relaxed);
        match sight.purpose {
            Purpose::Evict | Purpose::Demote => !used && use_count <= 1,
            Purpose::Promote => used && use_count != 0,
        }
    }

    /// Returns whether the page was used since the last scan, and clears the bits that record this.
    /// `None`: the page may not leave.
    fn was_used<'w>(
        &'w self,
        sight: &mut Sight<'w>,
        frame: FrameNumber,
        meta: &FrameMeta,
    ) -> Option<bool> {
        let (mut used, mut own) = (false, 1);
        if meta.kind() == Kind::Used(FrameUse::Shared) {
            let purpose = sight.purpose;
            let was_read = |object: &Shared<Object>| self.was_read(purpose, frame, meta, object);
            (used, own) = (self.with_object(&mut sight.visits, frame, was_read)??, 2);
        }
        // The number of mapping references. For a page of an object this may be lower than the
        // number of entries: all huge leaves of a folio share one. A private page has no more
        // entries than references, and usually one entry, which the walk finds first.
        let mapped = meta.refs().saturating_sub(own);
        if mapped != 0 {
            let most = if own == 1 { mapped } else { u32::MAX };
            let (mut is_found, mut is_aged) = (false, false);
            self.each_mapping(sight.walk, &mut sight.visits, frame, most, |found| {
                used |= if found.seen.is_huge() && folio::first_of(frame) != frame {
                    // One entry maps all pages of the folio, and the first page stands for all: the
                    // use count is nonzero after a use, until the folio is no longer spared.
                    let first = self.vm().frames.table().find(folio::first_of(frame));
                    first.is_none_or(|first| first.use_count().0 != 0)
                } else {
                    is_found = true;
                    is_aged |= found.seen.is_aged();
                    let used = self.take_accessed(found.slot, found.seen);
                    if used && own == 1 {
                        self.scan_around(&found, sight.total);
                    }
                    used
                };
                ControlFlow::Continue(())
            });
            // The use count belongs to the previous page of the frame.
            if own == 1 && is_found && !is_aged {
                meta.use_count.store(0, Ordering::Relaxed);
            }
        }
        Some(used)
    }

    /// As [`was_used`](Self::was_used), for the page's entry in its object.
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

    /// Returns whether the page belongs to the swap area and no entry names its slot any more.
    fn is_dead(&self, sight: &mut Sight<'_>, frame: FrameNumber, meta: &FrameMeta) -> bool {
        let Some(swap) = self.vm().swap.get() else { return false };
        self.with_object(&mut sight.visits, frame, |object| swap.is(object)) == Some(true)
            && swap.is_dead(meta.index.load(Ordering::Relaxed))
    }
}

/// Returns whether `entry` names `frame`, and no CPU holds the entry.
fn names(entry: Entry, frame: FrameNumber) -> bool {
    entry.is_present() && !entry.is_locked() && entry.frame() == frame
}
