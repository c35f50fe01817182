//! The page cache of the files on the disk, which frees frames when few are free.
//!
//! The subsystem tracks the use of pages, and evicts clean pages that have not been used recently:
//! the disk is only read.

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

/// Calls `tell` for each resident page of files on the disk, with a flag for pages that have been
/// stored to.
pub fn each_page(mut tell: impl FnMut(FrameNumber, bool)) {
    each_file(|regular| regular.each_resident(&mut tell));
}

/// Drops all clean pages that have no mapping and no user. The caller holds no lock.
pub fn drop_clean() {
    each_file(|regular| {
        regular.drop_clean_within(0, u64::MAX);
    });
}

/// Evicts the least recently used pages if few frames are free. The caller holds no lock.
pub fn make_room() {
    percpu::cpu().reclaim_ahead();
}
