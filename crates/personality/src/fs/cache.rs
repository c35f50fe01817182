//! The page cache of the files on the disk: it gives frames back when few are free.
//!
//! Pages that nobody maps and nothing was stored to are dropped, file after file, and read again when they are needed. Which files come
//! first says nothing about their use: a hand goes round, and stops where enough is free.

use super::inode::{Body, next_tagged};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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

/// Drops pages if few frames are free. The caller holds no lock.
pub fn make_room() {
    /// The file that was the last one.
    static HAND: AtomicU64 = AtomicU64::new(0);
    static BUSY: AtomicBool = AtomicBool::new(false);
    let vm = percpu::vm();
    let enough = || vm.free_frames() >= vm.total_frames() / 8;
    if enough() || BUSY.swap(true, Ordering::Acquire) {
        return;
    }
    let start = HAND.load(Ordering::Relaxed);
    let (mut at, mut wrapped) = (start, false);
    let wanted = vm.total_frames() / 16;
    let mut dropped = 0;
    while dropped < wanted && !(wrapped && at >= start) {
        match next_tagged(at) {
            Some((tag, inode)) => {
                at = tag;
                if let Some(Body::Regular(regular)) = inode.as_deref().map(|inode| &inode.body) {
                    dropped += regular.drop_clean();
                }
            }
            None if wrapped => break,
            None => (at, wrapped) = (0, true),
        }
        percpu::cpu().serve_flushes();
    }
    HAND.store(at, Ordering::Relaxed);
    BUSY.store(false, Ordering::Release);
}
