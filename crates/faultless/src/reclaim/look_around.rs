//! Pages beside one that was used: reclaim collects their accessed bits together.
//!
//! Most of what a look at a page costs is the walk to its entry. Programs use pages in runs, and the entries beside one that was found are in the same table.
//! So where the hand finds that a private page was used, it also clears the accessed bits of the entries after and before it, and *marks* their frames. It stops
//! at the first entry that was not accessed, or whose frame is not to be marked. Where the hand comes to a marked frame, it takes the mark for the bit, and does
//! not walk. (Linux looks around a used page, too, in its multi-generational LRU.)
//!
//! Only pages with one mapping are marked: others have more entries to look at. And only frames that the hand reaches within [one part in
//! 32](PART) of its round: so the time from one look at a page to the next differs by no more than that.
//!
//! A mark is a hint, as [lives](super::clock) are. One that is lost costs a walk. A frame that gets a new page before the hand reaches it keeps the mark, and
//! the page counts as used once.

use super::clock::PART;
use crate::frame::{FrameMeta, Kind, Use};
use crate::machine::Machine;
use crate::rmap::walk::Found;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::{Entry, node};
use crate::vm::Cpu;
use core::ops::ControlFlow;

/// The mark, beside the number of lives.
const MARK: u8 = 1 << 7;

impl FrameMeta {
    /// How often reclaim spares the page, and whether it is marked as used.
    pub(super) fn lives(&self) -> (u8, bool) {
        let lives = self.lives.load(Ordering::Relaxed);
        (lives & !MARK, lives & MARK != 0)
    }

    fn mark(&self, seen: Entry) {
        // Another CPU that looks at the same time makes no difference that matters.
        let lives = if seen.is_aged() { self.lives().0 } else { 0 };
        self.lives.store(lives | MARK, Ordering::Relaxed);
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// Marks the frames of used pages beside the used page that was `found`, if a hand that goes over `total` frames reaches them soon.
    pub(super) fn look_around(&self, found: &Found<'_>, total: u64) {
        let Some(table) = found.table else { return };
        let place = node::index(found.addr, node::LAST);
        let next = found.seen.frame().0.saturating_add(1);
        let soon = next..next.saturating_add((total / PART) as u32);
        let is_private = |meta: &FrameMeta| meta.kind() == Kind::Used(Use::Anon) && meta.is_sole();
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
                // SAFETY: the reference just taken, which never was a mapping.
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
