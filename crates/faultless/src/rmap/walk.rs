//! A walk of the reverse map: finds the entries that map a frame.

use crate::addr::{FrameNumber, PAGE_SHIFT};
use crate::file::Object;
use crate::frame::{Kind, Use};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::fixed::Entered;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::grace::Section;
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::table::node::{self, ENTRIES, LAST};
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;
use core::ops::ControlFlow;

/// Places that are copied from a list at a time. Most pages have one.
const BATCH: usize = 4;

/// An entry that mapped the frame when it was looked at.
#[derive(Debug)]
pub(crate) struct Found<'s> {
    /// The space, which does not end before this is dropped, and has no owner as long as the section of the walk is open.
    pub(crate) space: Entered,
    /// The page's address there.
    pub(crate) addr: u64,
    /// The entry: of the last level, or a huge leaf's.
    pub(crate) slot: &'s AtomicU64,
    /// Its value.
    pub(crate) seen: Entry,
    /// All entries of its table, if it is of the last level.
    pub(crate) table: Option<&'s [AtomicU64; ENTRIES]>,
}

/// What a walk looks for.
#[derive(Clone, Copy, Debug)]
struct Sought {
    frame: FrameNumber,
    /// The word of its anchor.
    anchor: u64,
    index: u64,
}

impl<M: Machine> Cpu<'_, M> {
    /// Calls `each` with the entries that map `frame`, to which the caller has a reference, until it breaks off, or `most` have been
    /// found. Entries that other CPUs hold are left out.
    ///
    /// Returns the object of the page, if it is one's.
    ///
    /// The walk waits for the owners of spaces, so the CPU must hold no entry.
    pub(crate) fn each_mapping<'s>(
        &'s self,
        section: &'s Section<'_>,
        frame: FrameNumber,
        mut most: u32,
        mut each: impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> Option<Shared<Object>> {
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
            Kind::Used(Use::Anon) if seeks => {
                let _ = self.in_family(section, sought, &mut each);
                None
            }
            Kind::Used(Use::Shared) => {
                let object = self.object_of(frame)?;
                if seeks {
                    let _ = self.in_mappings(section, sought, &object, &mut each);
                }
                Some(object)
            }
            _ => None,
        }
    }

    /// The object that the page in `frame` names, if it names one. Whether the page is the object's is the caller's to check, by the object's
    /// entry.
    pub(crate) fn object_of(&self, frame: FrameNumber) -> Option<Shared<Object>> {
        let anchor = self.vm().frames.meta(frame).anchor.load(Ordering::Relaxed);
        self.vm().anchors.object(anchor, self)
    }

    /// An anonymous page, in the space that made it and then in the others of its family.
    fn in_family<'s>(
        &'s self,
        section: &'s Section<'_>,
        sought: Sought,
        each: &mut impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let anchors = &self.vm().anchors;
        if let Some(maker) = anchors.maker(sought.anchor, self) {
            self.in_member(section, sought, maker, each)?;
        }
        let mut before = u64::MAX;
        loop {
            let mut members = [const { None }; BATCH];
            let last = anchors.members(sought.anchor, before, &mut members, self);
            for member in members.iter_mut().filter_map(Option::take) {
                self.in_member(section, sought, member, each)?;
            }
            match last {
                Some(last) => before = last,
                None => return ControlFlow::Continue(()),
            }
        }
    }

    fn in_member<'s>(
        &'s self,
        section: &'s Section<'_>,
        sought: Sought,
        space: Entered,
        each: &mut impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let core = space.share();
        self.at(section, sought, space, sought.index << PAGE_SHIFT, each)?;
        core.moves.each(sought.index, self, |addr| {
            let Some(space) = Entered::new(&core) else { return ControlFlow::Continue(()) };
            self.at(section, sought, space, addr, each)
        })
    }

    /// A page of an object, in the spaces of the VMAs that map the object.
    fn in_mappings<'s>(
        &'s self,
        section: &'s Section<'_>,
        sought: Sought,
        object: &Object,
        each: &mut impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut before = u64::MAX;
        loop {
            let mut places = [const { None }; BATCH];
            let last = object.mappings.next(sought.index, before, &mut places, self);
            for (space, page) in places.iter_mut().filter_map(Option::take) {
                // A VMA may be far from where it would have the page.
                if page < USER_END >> PAGE_SHIFT {
                    self.at(section, sought, space, page << PAGE_SHIFT, each)?;
                }
            }
            match last {
                Some(last) => before = last,
                None => return ControlFlow::Continue(()),
            }
        }
    }

    /// Looks at the entry of the page at `addr`.
    fn at<'s>(
        &'s self,
        section: &'s Section<'_>,
        sought: Sought,
        space: Entered,
        addr: u64,
        each: &mut impl FnMut(Found<'s>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        if addr >= USER_END {
            // The index of a frame that is something else by now.
            return ControlFlow::Continue(());
        }
        self.count(Counter::RmapLook);
        // No other CPU changes the tables as the space's owner while the section is open.
        space.enter(self.id(), self, section);
        let place = node::index(addr, LAST);
        // SAFETY: a space that was entered has its tables, and they stay as long as the section.
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
