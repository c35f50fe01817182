//! The root of all names.

use super::directory::Directory;
use super::inode::{Body, Inode};
use crate::errno::Result;
use alloc::boxed::Box;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use faultless::try_box;
use faultless_collections::Arc;

static ROOT: AtomicPtr<Arc<Inode>> = AtomicPtr::new(ptr::null_mut());

/// The root of all names. Not before [`mount`](super::mount).
pub fn root() -> &'static Arc<Inode> {
    let root = ROOT.load(Ordering::Acquire);
    assert!(!root.is_null(), "no file system yet");
    // SAFETY: a leaked box, set once.
    unsafe { &*root }
}

pub(super) fn set_root(root: Arc<Inode>) -> Result<()> {
    ROOT.store(Box::leak(try_box(root)?), Ordering::Release);
    Ok(())
}

/// Drops all files, when the machine ends and no process is left.
pub fn unmount() {
    // Without recursion, as trees may be deeper than the stack, and without a list, which would
    // need memory.
    fn directory(inode: &Inode) -> Option<&Directory> {
        match &inode.body {
            Body::Directory(entries) => Some(entries),
            Body::Proc(node) => node.fixed(),
            _ => None,
        }
    }
    let entries_of = |inode: &Inode| directory(inode)?.first();
    while entries_of(root()).is_some() {
        let (mut here, mut next) = (root().clone(), entries_of(root()));
        while let Some(below) = next {
            next = entries_of(&below);
            match &next {
                Some(_) => here = below,
                None => drop(directory(&here).and_then(Directory::take_first)),
            }
        }
    }
}
