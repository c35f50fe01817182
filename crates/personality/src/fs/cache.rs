//! The page cache of the files on the disk: it gives frames back when few are free.
//!
//! The subsystem knows which pages were not used for long, and evicts those that nothing was stored to: the disk is only read.

use super::inode::next_tagged;
use faultless_bare::percpu;

/// The pages of files on the disk that are in memory.
pub fn resident() -> u64 {
    let (mut at, mut pages) = (0, 0);
    while let Some((tag, inode)) = next_tagged(at) {
        at = tag;
        if let Some(regular) = inode.as_ref().and_then(|inode| inode.regular()) {
            pages += regular.cached();
        }
        percpu::cpu().serve_flushes();
    }
    pages
}

/// Evicts pages if few frames are free: those that were not used for the longest time. The caller holds no lock.
pub fn make_room() {
    percpu::cpu().reclaim_ahead();
}
