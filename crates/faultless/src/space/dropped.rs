//! The remains of a dropped space.

use super::core::Core;
use super::tree::Tree;
use super::vma::Vma;
use crate::fault::prefault::history::HistoryCell;
use crate::heap::Shared;
use alloc::boxed::Box;

/// The remains of a dropped space, which no CPU runs.
///
/// Dropping a `DroppedSpace` frees only its memory on the heap: the subsystem of the frames is
/// gone.
#[derive(Debug)]
pub(crate) struct DroppedSpace {
    pub(super) tree: Tree<Vma>,
    pub(super) history: HistoryCell,
    pub(super) core: Shared<Core>,
    pub(super) locking: u64,
}

impl Drop for DroppedSpace {
    fn drop(&mut self) {
        each_vma(&mut self.tree, drop);
    }
}

/// Takes each VMA out of a tree that nothing else refers to.
pub(super) fn each_vma(tree: &mut Tree<Vma>, mut take: impl FnMut(Box<Vma>)) {
    let rest = &mut Rest { tree, next: 0 };
    for entry in rest.tree.view_mut().iter_from(0) {
        rest.next = entry.end;
        // SAFETY: the tree's only pointer to the VMA, which the tree does not follow; made by
        // `heap::try_box`.
        take(unsafe { Box::from_raw(entry.value.as_ptr()) });
    }
}

/// A tree without its VMAs below an address, which were taken out. The drop frees the tree and its
/// other VMAs. Some are left only if the end of a VMA panicked.
struct Rest<'t> {
    tree: &'t mut Tree<Vma>,
    next: u64,
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        for entry in self.tree.view_mut().iter_from(self.next) {
            // SAFETY: as in `each_vma`.
            drop(unsafe { Box::from_raw(entry.value.as_ptr()) });
        }
        self.tree.destroy();
    }
}
