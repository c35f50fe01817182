//! The page cache of the files on the disk: it gives frames back when few are free.
//!
//! The subsystem knows which pages were not used for long, and evicts those that nothing was stored to: the disk is only read.

use super::inode::next_tagged;
use super::regular::Regular;
use faultless::FrameNumber;
use faultless_bare::percpu;

/// Calls `then` for each file on the disk.
fn each_file(mut then: impl FnMut(&Regular)) {
    let mut at = 0;
    while let Some((tag, inode)) = next_tagged(at) {
        at = tag;
        let regular = inode.as_ref().and_then(|inode| inode.regular());
        if let Some(regular) = regular.filter(|regular| regular.is_stored()) {
            then(regular);
        }
        percpu::cpu().serve_flushes();
    }
}

/// Calls `tell` for each page of files on the disk that is in memory, with whether anything was stored to it.
pub fn each_page(mut tell: impl FnMut(FrameNumber, bool)) {
    each_file(|regular| regular.each_resident(&mut tell));
}

/// Drops all pages that are as on the disk, and that nobody maps or uses. The caller holds no lock.
pub fn drop_clean() {
    each_file(|regular| {
        regular.drop_clean_within(0, u64::MAX);
    });
}

/// Evicts pages if few frames are free: those that were not used for the longest time. The caller holds no lock.
pub fn make_room() {
    percpu::cpu().reclaim_ahead();
}
