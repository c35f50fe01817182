//! Walks of the reverse map: find the entries that map a frame.

use super::visits::{Known, Visits};
use super::walker::Walk;
use crate::addr::{FrameNumber, PAGE_SHIFT};
use crate::file::Object;
use crate::frame::{FrameUse, Kind};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::core::Core;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::table::node::{self, ENTRIES, LAST};
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;
use core::ops::ControlFlow;

/// The number of places copied from a list at a time. Most pages have one place.
pub(super) const BATCH: usize = 8;

/// An entry that mapped the frame when it was read.
#[derive(Debug)]
pub(crate) struct Found<'s> {
    /// The space. It has no owner during the walk.
    pub(crate) space: &'s Core,
    /// The page's address in the space.
    pub(crate) addr: u64,
    /// The entry: of the last level, or of a huge leaf.
    pub(crate) slot: &'s AtomicU64,
    /// The value of the entry.
    pub(crate) seen: Entry,
    /// All entries of the table, if the entry is of the last level.
    pub(crate) table: Option<&'s [AtomicU64; ENTRIES]>,
}

/// The target of a walk.
#[derive(Clone, Copy, Debug)]
struct Sought {
    frame: FrameNumber,
    /// The word of its anchor.
    anchor: u64,
    index: u64,
}

impl<M: Machine> Cpu<'_, M> {
    /// Calls `each` with the entries that map `frame`, to which the caller has a reference, until
    /// `each` breaks or `most` entries have been found. Skips entries held by other CPUs. The path
    /// to the page stays in `visits`.
    ///
    /// Returns the object of the page, if any.
    ///
    /// The walk waits for the owners of spaces, so the CPU must hold no entry.
    pub(crate) fn each_mapping<'v, 's>(
        &'s self,
        walk: &'s Walk<'_>,
        visits: &'v mut Visits<'s>,
        frame: FrameNumber,
        mut most: u32,
        mut each: impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> Option<&'v Shared<Object>> {
        let seeks = most != 0;
        let mut each = |found| {
            most -= 1;
            each(found)?;
            if most == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let meta = self.vm().frames.meta(frame);
        let anchor = meta.anchor.load(Ordering::Relaxed);
        let sought = Sought { frame, anchor, index: meta.index.load(Ordering::Relaxed) };
        match meta.kind() {
            Kind::Used(FrameUse::Anon) if seeks => {
                let _ = self.in_family(walk, visits, sought, &mut each);
                None
            }
            Kind::Used(FrameUse::Shared) => {
                let known = self.known_of(visits, anchor)?;
                if seeks {
                    let _ = self.in_mappings(walk, sought, known, &mut each);
                }
                Some(&known.object)
            }
            _ => None,
        }
    }

    /// Returns the result of `look` for the object named by the page in `frame`, if any. The caller
    /// must check, by the object's entry, that the page belongs to the object. A share stays in
    /// `visits`.
    pub(crate) fn with_object<R>(
        &self,
        visits: &mut Visits<'_>,
        frame: FrameNumber,
        look: impl FnOnce(&Shared<Object>) -> R,
    ) -> Option<R> {
        let word = self.vm().frames.meta(frame).anchor.load(Ordering::Relaxed);
        self.known_of(visits, word).map(|known| look(&known.object))
    }

    /// Returns the object whose pages name its anchor by `word`.
    #[inline]
    fn known_of<'v, 'w>(&self, visits: &'v mut Visits<'w>, word: u64) -> Option<&'v mut Known<'w>> {
        visits.object(word, || self.vm().anchors.object(word, self))
    }

    /// Returns a share of the object named by the page in `frame`, which is not cached for later
    /// pages. Otherwise as [`with_object`](Self::with_object).
    pub(crate) fn object_of(&self, frame: FrameNumber) -> Option<Shared<Object>> {
        let anchor = self.vm().frames.meta(frame).anchor.load(Ordering::Relaxed);
        self.vm().anchors.object(anchor, self)
    }

    /// Walks to an anonymous page, in its space of origin and then in the remaining spaces of its
    /// family.
    fn in_family<'s>(
        &'s self,
        walk: &'s Walk<'_>,
        visits: &mut Visits<'s>,
        sought: Sought,
        each: &mut impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let anchors = &self.vm().anchors;
        let made = |space: &&Core| space.may_have_made(sought.anchor);
        let maker = visits.maker.filter(made);
        if let Some(maker) = maker.or_else(|| anchors.maker(sought.anchor, walk, self)) {
            visits.maker = Some(maker);
            self.in_member(walk, sought, maker, each)?;
        }
        let mut before = u64::MAX;
        loop {
            let mut members = [None; BATCH];
            let last = anchors.members(sought.anchor, before, walk, &mut members, self);
            for member in members.into_iter().flatten() {
                self.in_member(walk, sought, member, each)?;
            }
            match last {
                Some(last) => before = last,
                None => return ControlFlow::Continue(()),
            }
        }
    }

    fn in_member<'s>(
        &'s self,
        walk: &'s Walk<'_>,
        sought: Sought,
        space: &'s Core,
        each: &mut impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        self.at(walk, sought, space, sought.index << PAGE_SHIFT, each)?;
        let more = |addr| self.at(walk, sought, space, addr, each);
        space.moves.each(sought.index, self, more)
    }

    /// Walks to a page of an object, in the spaces of the VMAs that map the object.
    fn in_mappings<'s>(
        &'s self,
        walk: &'s Walk<'_>,
        sought: Sought,
        known: &mut Known<'s>,
        each: &mut impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut look = |(space, distance): &(&'s Core, u64)| {
            let page = sought.index.wrapping_add(*distance);
            // The VMA may not include the address that the page would have.
            if page < USER_END >> PAGE_SHIFT {
                self.at(walk, sought, space, page << PAGE_SHIFT, each)?;
            }
            ControlFlow::Continue(())
        };
        known.find(walk, self);
        known.places.iter().flat_map(|places| &**places).try_for_each(&mut look)?;
        let mut before = known.before;
        while let Some(number) = before {
            let mut places = [None; BATCH];
            let mut free = places.iter_mut();
            let add = |place| _ = free.next().map(|free| *free = Some(place));
            before = known.object.mappings.next(number, BATCH, walk, self, add);
            places.iter().flatten().try_for_each(&mut look)?;
        }
        ControlFlow::Continue(())
    }

    /// Checks the entry of the page at `addr`.
    fn at<'s>(
        &'s self,
        walk: &'s Walk<'_>,
        sought: Sought,
        space: &'s Core,
        addr: u64,
        each: &mut impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        if addr >= USER_END {
            // The frame has been reused, and the index has another meaning.
            return ControlFlow::Continue(());
        }
        self.count(Counter::RmapLook);
        // While the section is open, no other CPU changes the tables as the space's owner.
        space.enter(self.id(), self, walk.section());
        let place = node::index(addr, LAST);
        // SAFETY: a space that was not closed has its tables for the duration of the walk
        // ([`walker`](super::walker), step 2).
        let reached = unsafe { descend(self.vm().machine(), space.root, addr) };
        let (slot, seen, part, table) = match reached {
            Reached::Last(slots) => {
                let seen = node::load(&slots[place]);
                (&slots[place], seen, seen, Some(slots))
            }
            Reached::Above { slot, seen, .. } if seen.is_huge() => {
                (slot, seen, seen.part(place), None)
            }
            Reached::Above { .. } => return ControlFlow::Continue(()),
        };
        let maps = part.is_mapped() && !part.is_locked() && !part.is_special();
        if maps && part.frame() == sought.frame {
            return each(Found { space, addr, slot, seen, table });
        }
        ControlFlow::Continue(())
    }
}
