//! Collects accessed bits of the pages beside a used page.
//!
//! Most of the cost of checking a page is the walk to its entry. Programs use pages in runs, and
//! the entries beside a found entry are in the same table. So when a hand finds that a private page
//! was used, the scan also clears the accessed bits of the following and preceding entries, and
//! *marks* their frames. The scan stops at the first entry without an access, or with an unsuitable
//! frame. When a hand reaches a marked frame, the mark replaces the accessed bit, without a walk.
//! (Linux's multi-generational LRU also looks around a used page.)
//!
//! Only pages with one mapping are marked, because further mappings mean further entries to check.
//! Only frames that the hand reaches within [1/32](PART) of its round are marked, so the time
//! between two checks of a page varies by at most this amount.
//!
//! A mark is a hint, like the [use count](super::clock). A lost mark costs a walk. If a frame gets
//! a new page before the hand arrives, the frame keeps the mark, and the page counts as used once.

use super::clock::PART;
use crate::frame::{FrameMeta, FrameUse, Kind};
use crate::machine::Machine;
use crate::rmap::walk::Found;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::{Entry, node};
use crate::vm::Cpu;
use core::ops::ControlFlow;

/// The mark, stored with the use count.
const MARK: u8 = 1 << 7;

impl FrameMeta {
    /// Returns the use count of the page, and whether the page is marked as used.
    pub(super) fn use_count(&self) -> (u8, bool) {
        let use_count = self.use_count.load(Ordering::Relaxed);
        (use_count & !MARK, use_count & MARK != 0)
    }

    fn mark(&self, seen: Entry) {
        // A concurrent update by another CPU makes no important difference.
        let use_count = if seen.is_aged() { self.use_count().0 } else { 0 };
        self.use_count.store(use_count | MARK, Ordering::Relaxed);
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// Marks the frames of used pages beside the used page that was `found`, if a hand over `total`
    /// frames reaches them soon.
    pub(super) fn scan_around(&self, found: &Found<'_>, total: u64) {
        let Some(table) = found.table else { return };
        let place = node::index(found.addr, node::LAST);
        let next = found.seen.frame().0.saturating_add(1);
        let soon = next..next.saturating_add((total / PART) as u32);
        let is_private =
            |meta: &FrameMeta| meta.kind() == Kind::Used(FrameUse::Anon) && meta.is_sole();
        let mut mark = |slot: &AtomicU64| {
            let seen = node::load(slot);
            let frame = seen.frame();
            if seen.is_counted_page()
                && soon.contains(&frame.0)
                && let Some(meta) = self.vm().frames.table().find(frame)
                && is_private(meta)
                && meta.get_ref_unless_zero()
            {
                let used = self.take_accessed(slot, seen);
                if used {
                    meta.mark(seen);
                }
                // SAFETY: drops the reference just taken, which never was a mapping.
                unsafe { self.put_unmapped(frame) };
                if used {
                    return ControlFlow::Continue(());
                }
            }
            ControlFlow::Break(())
        };
        let _ = table[place + 1..].iter().try_for_each(&mut mark);
        let _ = table[..place].iter().rev().try_for_each(&mut mark);
    }
}
