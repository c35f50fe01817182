//! Memory in tiers: unused pages move to slower nodes, and used pages move back.
//!
//! A machine defines the [cost](Machine::node_cost) of an access to each node. A new page gets a
//! frame of the node nearest to the CPU while this node has frames, whatever its later use. So the
//! kernel must make room on this node in the background, and move pages back that turn out to be
//! used, by calling [`Cpu::balance`].
//!
//! - *Demotion* is reclaim of a node that has slower nodes below it. If less than 1/16 of its
//!   frames are free, the [hand](super::clock) scans the node's frames, and chosen pages
//!   [move](super::migrate) to the next slower node with room, until 2/16 are free. The pages stay
//!   mapped. Pages of files are evicted only if no slower node has room. CPUs that call
//!   [`Cpu::balance`] concurrently share the work: each stops when the node has enough free frames,
//!   freed by any CPU.
//! - *Promotion*: the hand scans some frames of slower nodes. A page found used in two consecutive
//!   scans moves to the CPU's node, if 1/32 of this node stays free: so promotion makes the node
//!   short, and demotion makes room. The number of scanned frames, and of moved pages, is limited:
//!   a moved page costs a copy, and the program waits for it.
//!
//! Both use accessed bits. Linux unmaps pages instead, and observes the resulting faults (hinting
//! faults). This costs a fault for each scanned page in use, and an interrupt of other CPUs for
//! each batch; clearing a bit costs neither, and is sufficient if each CPU has one fast node.
//! Moving a page with only read-only mappings does not interrupt other CPUs either, in both
//! directions.

use super::clock::{Over, Purpose};
use super::isolate::BATCH;
use super::migrate::Moving;
use crate::addr::FrameNumber;
use crate::error::Errno;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::vm::Cpu;

/// A node is short if less than 1/`SHORT` of its frames are free.
const SHORT: u64 = 16;
/// The maximum number of pages demoted by one call, so that a call takes some milliseconds for any
/// size of the node. This holds while slower nodes have free frames. Otherwise pages are evicted
/// instead, and a call may scan all of memory to find them; after a scan without success, later
/// calls [back off](super::backoff).
const MOST_DEMOTED: u64 = 256;
/// A third of the maximum number of frames scanned by a call to demote pages.
const MOST_LOOKED_AT: u64 = 1 << 14;
/// The number of frames of slower nodes scanned for each page that may move to a faster node.
const LOOKS: u64 = 8;

/// The result of a call of [`Cpu::balance`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balanced {
    /// Pages that moved to slower nodes.
    pub demoted: u64,
    /// Pages that moved to the CPU's node.
    pub promoted: u64,
    /// Frames that were freed because no slower node had room.
    pub evicted: u64,
}

impl<M: Machine> Cpu<'_, M> {
    /// Frees frames of the CPU's nearest node if less than 1/16 of them are free, by moving unused
    /// pages to slower nodes, about 256 at most, until 2/16 are free. Also moves at most `promoted`
    /// used pages from slower nodes to this node, while this leaves 1/32 free. The call scans eight
    /// frames of slower nodes for each of `promoted`; few of them may be used, so usually fewer
    /// pages move. For a background kernel thread on a CPU near the node, with repeated calls:
    /// `promoted` pages each time is the rate. Costs nothing if there is only one node.
    ///
    /// Not allowed inside a closure that lists areas, nor in a store's call.
    pub fn balance(&self, promoted: u64) -> Balanced {
        let near = self.vm().machine().nearest_node(self.id());
        let mut balanced = Balanced::default();
        if self.slower_than(near).next().is_none() {
            self.collect_in_background();
            return balanced;
        }
        self.flush_in_background();
        self.age_translations();
        if self.missing_on(near, 1) != 0 {
            self.free_flushed();
            // The missing frames may be kept by this CPU, or may wait for a flush, which is done
            // once for all pages demoted meanwhile.
            let frames = &self.vm().frames;
            frames.drain(self.local(), self);
            self.demote(near, &mut balanced);
            // Freed frames become visible to other CPUs, and are not kept by this CPU.
            frames.drain(self.local(), self);
            let missing = self.missing_on(near, 1);
            if missing != 0 && frames.flush_pending_on(near) >= missing {
                // While there are frames, CPUs flush at a convenient time.
                self.vm().deferred.ask();
                if self.spare_on(near, 2 * SHORT) == 0 {
                    self.free_some_flush_pending();
                }
            }
        }
        for node in self.slower_than(near) {
            let room =
                self.spare_on(near, 2 * SHORT).min(promoted.saturating_sub(balanced.promoted));
            balanced.promoted += self.go_over(
                Over::Node(node),
                (room * LOOKS).min(self.frames_of(Over::Node(node))),
                |promoted, found| promoted + found >= room,
                Purpose::Promote,
                |chosen| self.move_to(chosen, near),
            );
        }
        self.state().counts.add(Counter::Demoted, balanced.demoted);
        self.state().counts.add(Counter::Promoted, balanced.promoted);
        balanced
    }

    /// Moves unused pages from `node` to slower nodes, while it lacks free frames.
    fn demote(&self, node: u8, balanced: &mut Balanced) {
        let Some(backoff) = self.vm().clock.demotion.get(usize::from(node)) else { return };
        // Pages moved by other CPUs in the meantime reduce the lack.
        let lacking =
            || self.missing_on(node, 2).saturating_sub(self.vm().frames.flush_pending_on(node));
        let pages = lacking().min(MOST_DEMOTED);
        if pages == 0 || backoff.leaves_out() {
            return;
        }
        for slower in self.slower_than(node) {
            let left = pages.saturating_sub(balanced.demoted);
            let lack = left.saturating_sub(self.spare_on(slower, SHORT));
            if lack != 0 && self.vm().frames.flush_pending_on(slower) >= lack {
                self.vm().deferred.ask();
                if lack == left {
                    self.free_some_flush_pending();
                }
            }
            let room = self.spare_on(slower, SHORT).min(left);
            // A used page is scanned three times before it is cold: all pages are scanned if 1/16
            // is missing.
            let looks = (lacking() * SHORT).min(self.frames_of(Over::Node(node)));
            balanced.demoted += self.go_over(
                Over::Node(node),
                3 * looks.min(MOST_LOOKED_AT),
                |demoted, found| demoted + found >= room || lacking() <= found,
                Purpose::Demote,
                |chosen| {
                    let moved = self.move_to(chosen, slower);
                    // Other demoting CPUs see the freed frames, and stop.
                    self.vm().frames.drain(self.local(), self);
                    moved
                },
            );
        }
        // Pages need not leave memory if enough frames wait for a flush, because these frames will
        // be free.
        let coming: u64 =
            self.slower_than(node).map(|slower| self.vm().frames.flush_pending_on(slower)).sum();
        let missing = pages.saturating_sub(balanced.demoted + coming).min(lacking());
        if missing != 0 && self.slower_than(node).all(|slower| self.spare_on(slower, SHORT) == 0) {
            balanced.evicted += self.reclaim(missing);
        }
        // Other CPUs may have been faster, or are working.
        let others = lacking() == 0 || self.swaps_elsewhere();
        backoff.tried(*balanced != Balanced::default() || others);
    }

    /// Moves pages to `node`, and drops the caller's references to their frames. Returns how many
    /// moved; `None`: the node has no free frame. Does no flush to get more frames.
    fn move_to(&self, frames: &[FrameNumber], node: u8) -> Option<u64> {
        let mut moving: [Moving; BATCH] = core::array::from_fn(|at| Moving {
            frame: frames.get(at).copied().unwrap_or(self.vm().zero),
            outcome: Err(Errno::EBUSY),
        });
        let moving = &mut moving[..frames.len()];
        let mut numbers = [FrameNumber(0); BATCH];
        let to = &mut numbers[..moving.len()];
        let to = self.vm().frames.alloc_on(self.local(), node, to, self);
        let room = to.len();
        self.migrate_to(moving, to, |frame| self.free(frame));
        let moved = moving.iter().filter(|moving| moving.outcome.is_ok()).count() as u64;
        (room != 0).then_some(moved)
    }

    /// Iterates over the nodes with memory whose cost is higher than that of `node`, the cheapest
    /// first.
    fn slower_than(&self, node: u8) -> impl Iterator<Item = u8> + use<'_, M> {
        let cost = |node| (self.vm().machine().node_cost(node), node);
        let has_memory = |node: &u8| self.frames_of(Over::Node(*node)) != 0;
        let mut last = (cost(node).0, u8::MAX);
        core::iter::from_fn(move || {
            let slower = self.nodes().filter(has_memory).map(cost).filter(|cost| *cost > last);
            last = slower.min()?;
            Some(last.1)
        })
    }

    /// Returns how many frames are missing until `parts`/16 of a node are free.
    fn missing_on(&self, node: u8, parts: u64) -> u64 {
        let wanted = parts * self.frames_of(Over::Node(node)) / SHORT;
        wanted.saturating_sub(self.vm().frames.free_on(node, self))
    }

    /// Returns how many frames of a node may be taken so that 1/`part` stays free.
    fn spare_on(&self, node: u8, part: u64) -> u64 {
        let kept = self.frames_of(Over::Node(node)) / part;
        self.vm().frames.free_on(node, self).saturating_sub(kept)
    }
}
