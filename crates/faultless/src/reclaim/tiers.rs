//! Memory in tiers: pages that are not used move to slower nodes, and pages that are used come back.
//!
//! A machine tells what an access to each node [costs](Machine::node_cost). A new page comes to the node that is nearest to the CPU as long as that has frames, whatever the
//! page will be used for. So somebody has to make room there, and to bring back what turns out to be used: [`Cpu::balance`], which a kernel calls in the background.
//!
//! - *Demotion* is reclaim of a node that has slower ones below it: where fewer than one frame in 16 is free, the [hand](super::clock) goes
//!   over the node's frames, and pages whose time has come [move](super::migrate) to the next slower node that has room, until two in 16 are free. They stay
//!   mapped. Only where no slower node has room are pages of files evicted. CPUs that
//!   call [`Cpu::balance`] at the same time share the work: each stops when the node has enough free frames, whoever freed them.
//! - *Promotion*: the hand goes over some frames of slower nodes. A page that was found used at two looks in a row moves to the CPU's node, if that keeps
//!   one in 32 free: so what comes makes the node short, and others make room. How many frames it looks at, and how many pages may move, is limited: a page that moves costs a copy, and the
//!   program waits for it meanwhile.
//!
//! Both look at accessed bits. Linux unmaps pages instead, to see who comes to them (hinting faults). That costs a fault for each page that is
//! looked at and used, and an interrupt of other CPUs for each batch; a bit that is cleared costs neither, and is enough where each CPU has one fast node.
//! A page that moves while its mappings are read-only interrupts nobody either, in both directions.

use super::clock::{Over, Purpose};
use super::migrate::Moving;
use super::taken::BATCH;
use crate::addr::FrameNumber;
use crate::error::Errno;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::vm::Cpu;

/// A node is short when less than one part in so many of its frames is free.
const SHORT: u64 = 16;
/// How many pages one call demotes, at most, so that it takes some milliseconds however large the node is. That holds as long as slower nodes have free frames. Where
/// they have none, pages are evicted instead, and a call may look at all of memory to find them; if it finds none, later calls [back off](super::backoff).
const MOST_DEMOTED: u64 = 256;
/// A call looks at frames of its node for them three times as often, at most.
const MOST_LOOKED_AT: u64 = 1 << 14;
/// How many frames of slower nodes are looked at for each page that may move to a faster one.
const LOOKS: u64 = 8;

/// What a call of [`Cpu::balance`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balanced {
    /// Pages that moved to slower nodes.
    pub demoted: u64,
    /// Pages that moved to the CPU's node.
    pub promoted: u64,
    /// Frames that were freed where no slower node had room.
    pub evicted: u64,
}

impl<M: Machine> Cpu<'_, M> {
    /// Frees frames of the CPU's nearest node if less than 1/16 of them is free, by moving pages that are not used to slower nodes, about 256 at most, until
    /// 2/16 are free; and moves at most `promoted` pages that are used from slower nodes to it, as long as that leaves 1/32 free. It looks at eight frames of slower nodes for each of
    /// `promoted`, of which few may be used: mostly fewer move. For a thread of the kernel that runs in the background on a CPU near the node, again and again: `promoted` pages each time is the
    /// rate. Costs nothing where there is one node.
    ///
    /// Not inside a closure that lists areas, nor in a store's call.
    pub fn balance(&self, promoted: u64) -> Balanced {
        let near = self.vm().machine().nearest_node(self.id());
        let mut balanced = Balanced::default();
        if self.slower_than(near).next().is_none() {
            self.collect_ahead();
            return balanced;
        }
        self.settle_ahead();
        self.age_translations();
        if self.missing_on(near, 1) != 0 {
            self.collect_owed();
            // This CPU may keep what seems to be missing, or it waits for a flush, which is one for all that is demoted meanwhile.
            let frames = &self.vm().frames;
            frames.drain(self.local(), self);
            self.demote(near, &mut balanced);
            // What was freed is seen by others that look, and not kept for this CPU.
            frames.drain(self.local(), self);
            let missing = self.missing_on(near, 1);
            if missing != 0 && frames.owed_on(near) >= missing {
                // As long as there are frames, CPUs flush when it suits them.
                self.vm().deferred.ask();
                if self.spare_on(near, 2 * SHORT) == 0 {
                    self.settle_some();
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
                |due| self.move_to(due, near),
            );
        }
        self.state().counts.add(Counter::Demoted, balanced.demoted);
        self.state().counts.add(Counter::Promoted, balanced.promoted);
        balanced
    }

    /// Moves pages that are not used from `node` to slower ones, as long as it lacks free frames.
    fn demote(&self, node: u8, balanced: &mut Balanced) {
        let Some(backoff) = self.vm().clock.demotion.get(usize::from(node)) else { return };
        // What other CPUs move meanwhile is not lacking any more.
        let lacking = || self.missing_on(node, 2).saturating_sub(self.vm().frames.owed_on(node));
        let pages = lacking().min(MOST_DEMOTED);
        if pages == 0 || backoff.leaves_out() {
            return;
        }
        for slower in self.slower_than(node) {
            let left = pages.saturating_sub(balanced.demoted);
            let lack = left.saturating_sub(self.spare_on(slower, SHORT));
            if lack != 0 && self.vm().frames.owed_on(slower) >= lack {
                self.vm().deferred.ask();
                if lack == left {
                    self.settle_some();
                }
            }
            let room = self.spare_on(slower, SHORT).min(left);
            // A page that was used is looked at three times before its time has come: all are, where one in 16 is missing.
            let looks = (lacking() * SHORT).min(self.frames_of(Over::Node(node)));
            balanced.demoted += self.go_over(
                Over::Node(node),
                3 * looks.min(MOST_LOOKED_AT),
                |demoted, found| demoted + found >= room || lacking() <= found,
                Purpose::Demote,
                |due| {
                    let moved = self.move_to(due, slower);
                    // Others that demote see what it gave, and stop.
                    self.vm().frames.drain(self.local(), self);
                    moved
                },
            );
        }
        // Pages need not leave memory for frames that wait for a flush: those will be free.
        let coming: u64 =
            self.slower_than(node).map(|slower| self.vm().frames.owed_on(slower)).sum();
        let missing = pages.saturating_sub(balanced.demoted + coming).min(lacking());
        if missing != 0 && self.slower_than(node).all(|slower| self.spare_on(slower, SHORT) == 0) {
            balanced.evicted += self.reclaim(missing);
        }
        // Others may have been faster, or are at work.
        let others = lacking() == 0 || self.swaps_elsewhere();
        backoff.tried(*balanced != Balanced::default() || others);
    }

    /// Moves pages to `node`, and drops the references to their frames that the caller has. Returns how many moved; `None`: the node has no frame. No flush is
    /// done to have more of them.
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

    /// The nodes with memory that cost more than `node`, the cheapest first.
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

    /// How many frames are missing until `parts` in 16 of a node are free.
    fn missing_on(&self, node: u8, parts: u64) -> u64 {
        let wanted = parts * self.frames_of(Over::Node(node)) / SHORT;
        wanted.saturating_sub(self.vm().frames.free_on(node, self))
    }

    /// How many frames of a node may be taken so that one in `part` is still free.
    fn spare_on(&self, node: u8, part: u64) -> u64 {
        let kept = self.frames_of(Over::Node(node)) / part;
        self.vm().frames.free_on(node, self).saturating_sub(kept)
    }
}
