//! New pages of VMAs with a [policy](crate::MemPolicy): their frames come from its nodes. So do those of a child's copies of pinned pages.
//!
//! A frame is prepared where the VMA is looked up, before the fault's path begins. VMAs with a policy are never remembered as the last that a CPU used, so a
//! fault that finds its VMA there does not even look for one.

use super::Access;
use crate::addr::FrameNumber;
use crate::fault::prepared::Prepared;
use crate::frame::{Clean, Frame};
use crate::machine::Machine;
use crate::space::MemPolicy;
use crate::space::vma::{Vma, VmaFlags};
use crate::vm::Cpu;

/// Prepares a frame of a node that the policy of `vma` names for `page`, if it has a policy, no frame is prepared yet, and one of these nodes has a free
/// one. Otherwise the frame comes from where all others do. One that turns out not to be needed goes back with the end of the fault.
#[inline]
pub(super) fn place<M: Machine>(
    cpu: &Cpu<'_, M>,
    vma: &Vma,
    page: u64,
    access: Access,
    prepared: &mut Prepared,
) {
    if access == Access::Write && has_policy(vma) {
        prepare(cpu, vma, page, prepared);
    }
}

/// Whether a VMA has a policy.
#[inline]
pub(super) fn has_policy(vma: &Vma) -> bool {
    vma.area.flags.intersects(VmaFlags::POLICY)
}

/// The same for a page that comes back from the swap area, by any access.
#[cold]
#[inline(never)]
pub(super) fn prepare<M: Machine>(cpu: &Cpu<'_, M>, vma: &Vma, page: u64, prepared: &mut Prepared) {
    if !prepared.is_nothing() {
        return;
    }
    if let Some(frame) = frame_for(cpu, vma.area.mem_policy(), page) {
        prepared.keep_clean(frame);
    }
}

/// A frame of a node that `policy` names for `page`, if one has a free one.
pub(crate) fn frame_for<M: Machine>(
    cpu: &Cpu<'_, M>,
    policy: MemPolicy,
    page: u64,
) -> Option<Frame<Clean>> {
    let vm = cpu.vm();
    let mut nodes = policy.nodes_for(page);
    while let Some(node) = nodes.iter().min_by_key(|node| vm.machine().node_cost(*node)) {
        let mut room = [FrameNumber(0)];
        if let Some(frame) = vm.frames.take_from(node, &mut room, cpu).pop() {
            return Some(frame);
        }
        nodes = nodes.without(node);
    }
    None
}
