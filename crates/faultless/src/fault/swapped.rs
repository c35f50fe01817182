//! Faults on a page in the [swap area](crate::reclaim::swap).
//!
//! A page that is not in memory is first read by a fault that holds no locks: see
//! [`absent`](super::absent). The code here runs when the page is in memory, as a page of the
//! area's object.

use super::{Attempt, FaultKind, mem_policy};
use crate::addr::{FrameNumber, PAGE_SHIFT};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::{Abort, why_invalid};
use crate::file::Object;
use crate::frame::{Clean, Frame, FrameMeta, FrameUse};
use crate::machine::Machine;
use crate::reclaim::swap::Swap;
use crate::space::area::Prot;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node;
use crate::table::protocol::{self, Taken};

impl<M: Machine> Attempt<'_, '_, M> {
    /// Maps the page whose entry was `seen`, a swapped entry. Maps the page itself if it has no
    /// other user, or else a copy. `None`: another CPU was faster.
    pub(super) fn map_swapped(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
        seen: Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        let cpu = self.cpu;
        // The area and its table exist, because a swapped entry exists.
        let swap = cpu.vm().swap.get().ok_or(Abort::Absent)?;
        let name = swap.object().slot(cpu, seen.slot()).ok_or(Abort::Absent)?;
        self.prepare_anon_vma()?;
        // This reference keeps the page in its frame.
        let source = Object::refer_settled(cpu, name).ok_or(Abort::Absent)?;
        let put = || {
            // SAFETY: drops the reference just taken, once on each path except the path on which it
            // becomes the mapping's. The reference was never a mapping's before.
            unsafe { cpu.put_unmapped(source) };
        };
        let meta = cpu.vm().frames.meta(source);
        let own = is_own(swap, seen, meta) && !self.is_misplaced(source, prepared);
        let frame = if own {
            None
        } else {
            let Some(frame) = prepared.clean(cpu) else {
                put();
                return Err(Abort::NoMemory);
            };
            // SAFETY: the new frame is unpublished and belongs to this fault; the source is
            // referenced.
            unsafe { cpu.vm().machine().copy_frame(frame.number(), source) };
            Some(frame)
        };
        let give_up = |frame: Option<Frame<Clean>>, prepared: &mut Prepared| {
            put();
            frame.into_iter().for_each(|frame| prepared.keep_clean(frame));
        };
        let Ok(held) = protocol::take(slot, seen, cpu) else {
            give_up(frame, prepared);
            return self.entry_changed();
        };
        if !self.ticket.is_valid() {
            held.revert();
            give_up(frame, prepared);
            return Err(why_invalid(cpu, self.space, self.page, slot));
        }
        // From here the slot cannot be reused. It may have belonged to another page when the fault
        // read the area's object.
        let now = node::load(name);
        let same = now.is_present() && !now.is_locked() && now.frame() == source;
        if !same && !lost(Mutant::SwapInLooksAgain) {
            held.revert();
            give_up(frame, prepared);
            return Ok(None);
        }
        let kind = match frame {
            Some(frame) => {
                let entry = self.private_leaf(frame.number());
                self.publish(frame);
                held.commit(entry);
                put();
                FaultKind::Copy
            }
            None => match self.adopt(swap, seen, (name, now), meta) {
                Some(taken) => {
                    taken.commit(Entry::NONE);
                    // The page keeps the use count from before the swap.
                    held.commit(self.private_leaf(source).aged().used());
                    FaultKind::Swapped
                }
                None => {
                    held.revert();
                    put();
                    return Ok(None);
                }
            },
        };
        swap.put(seen.slot());
        self.space.core.swapped.fetch_sub(1, Ordering::Relaxed);
        cpu.add_resident(self.space, 1);
        cpu.count(Counter::SwapPage);
        Ok(Some(kind))
    }

    /// Removes the page from the area's object, in which its entry `name` was `now`, and describes
    /// the page as this fault's. The fault holds the program's entry and a reference, which becomes
    /// the mapping's. Returns the object's entry, for the caller to empty; or `None` if the page
    /// has another user or another CPU holds the entry.
    fn adopt<'n>(
        &'n self,
        swap: &Swap,
        seen: Entry,
        (name, now): (&'n AtomicU64, Entry),
        meta: &FrameMeta,
    ) -> Option<Taken<'n>> {
        let taken = protocol::take(name, now, self.cpu).ok()?;
        // From here no CPU can take a reference through either entry.
        if !is_own(swap, seen, meta) {
            taken.revert();
            return None;
        }
        meta.set_use(FrameUse::Anon);
        meta.anchor.store(self.space.anchor(), Ordering::Relaxed);
        meta.index.store(self.page >> PAGE_SHIFT, Ordering::Relaxed);
        // Drops the reference of the area's object.
        let left = meta.put_ref();
        debug_assert!(left != 0, "the fault holds a reference");
        Some(taken)
    }

    /// Returns whether the VMA has a policy, the page was read into a frame of another node, and
    /// `prepared` contains a frame of the policy's node.
    fn is_misplaced(self, source: FrameNumber, prepared: &Prepared) -> bool {
        let is_elsewhere = || {
            let nodes = self.vma.area().mem_policy().nodes_for(self.page);
            !nodes.is_empty() && !nodes.contains(self.cpu.vm().frames.node(source))
        };
        mem_policy::has_policy(self.vma) && !prepared.is_nothing() && is_elsewhere()
    }

    /// Returns a leaf for `frame`, which belongs to this space alone, for any access. The leaf is
    /// dirty, because the swap area has no copy of the page any longer.
    fn private_leaf(self, frame: crate::FrameNumber) -> Entry {
        let leaf = self.leaf(frame);
        let leaf = if lost(Mutant::SwappedIsDirty) { leaf.undirtied() } else { leaf.dirty() };
        if self.vma.area().allows(Prot::WRITE) { leaf.writable() } else { leaf }
    }
}

/// Returns whether the page named by the swapped entry `seen` has no other entry, and no references
/// except the object's and the fault's own.
fn is_own(swap: &Swap, seen: Entry, meta: &FrameMeta) -> bool {
    (swap.count(seen.slot()) == 1 || lost(Mutant::AdoptLooksAtCount))
        && meta.refs() == 2
        && !meta.is_pinned()
}
