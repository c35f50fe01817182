//! The remains of a dropped space.

use super::core::Core;
use super::tree::Tree;
use super::vma::Vma;
use crate::fault::prefault::history::HistoryCell;
use crate::heap::Shared;
use alloc::boxed::Box;
use core::ptr::NonNull;

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
        // SAFETY: made by `heap::try_box_with`. The subsystem is gone, and with it all hints.
        take_vmas(&mut self.tree, |vma| drop(unsafe { Box::from_raw(vma.as_ptr()) }));
    }
}

/// Takes all VMAs out of a tree that nothing else refers to, and frees the tree. `take` must not
/// panic.
pub(super) fn take_vmas(tree: &mut Tree<Vma>, mut take: impl FnMut(NonNull<Vma>)) {
    for entry in tree.view_mut().iter_from(0) {
        take(entry.value);
    }
    tree.destroy();
}
