//! New pages of VMAs with a memory [policy](crate::MemPolicy), whose frames come from the nodes of
//! the policy. A child's copies of pinned pages use the same functions.
//!
//! A frame is prepared when the VMA is looked up, before the path of the fault begins. A VMA with a
//! policy is never stored as the last VMA used by a CPU, so a fault that uses the stored VMA does
//! not check for a policy.

use super::Access;
use crate::addr::FrameNumber;
use crate::fault::prepared::Prepared;
use crate::frame::{Clean, Frame};
use crate::machine::Machine;
use crate::space::MemPolicy;
use crate::space::area::VmaFlags;
use crate::space::vma::Vma;
use crate::vm::Cpu;

/// Prepares a frame of a node that the policy of `vma` names for `page`. Does nothing if the VMA
/// has no policy, if a frame is already prepared, or if no such node has a free frame; then the
/// frame comes from the usual source. An unneeded frame is freed at the end of the fault.
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

/// Returns whether a VMA has a policy.
#[inline]
pub(super) fn has_policy(vma: &Vma) -> bool {
    vma.flags().intersects(VmaFlags::POLICY)
}

/// Prepares a frame like [`place`], for a page that is swapped in by any access.
#[cold]
#[inline(never)]
pub(super) fn prepare<M: Machine>(cpu: &Cpu<'_, M>, vma: &Vma, page: u64, prepared: &mut Prepared) {
    if !prepared.is_nothing() {
        return;
    }
    if let Some(frame) = frame_for(cpu, vma.area().mem_policy(), page) {
        prepared.keep_clean(frame);
    }
}

/// Returns a frame of a node that `policy` names for `page`, if such a node has a free frame.
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
