//! New pages of VMAs with a [policy](crate::MemPolicy): their frames come from its nodes.

use super::Attempt;
use crate::addr::FrameNumber;
use crate::fault::prepared::Prepared;
use crate::machine::Machine;
use crate::space::vma::VmaFlags;

impl<M: Machine> Attempt<'_, '_, M> {
    /// Prepares a frame of a node that the VMA's policy names for this page, if it has a policy, no frame is prepared yet, and one of these nodes has a free
    /// one. Otherwise the frame comes from where all others do. One that turns out not to be needed goes back with the end of the fault.
    #[inline(always)]
    pub(super) fn place(self, prepared: &mut Prepared) {
        if self.vma.area.flags.intersects(VmaFlags::POLICY) {
            self.prepare_placed(prepared);
        }
    }

    #[cold]
    #[inline(never)]
    fn prepare_placed(self, prepared: &mut Prepared) {
        if !prepared.is_nothing() {
            return;
        }
        let vm = self.cpu.vm();
        let mut nodes = self.vma.area.mem_policy().nodes_for(self.page);
        while let Some(node) = nodes.iter().min_by_key(|node| vm.machine().node_cost(*node)) {
            let mut room = [FrameNumber(0)];
            if let Some(frame) = vm.frames.take_from(node, &mut room, self.cpu).pop() {
                prepared.keep_clean(frame);
                return;
            }
            nodes = nodes.without(node);
        }
    }
}
