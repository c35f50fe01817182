//! The laws of the machine, and the states that a scenario must reach.

use super::beside::object_of;
use super::state::leaf_of;
use super::*;

/// Entries below no mark show pages of their VMA, with permissions of the VMA.
pub const ENTRIES: &str = "an entry allows what its VMA allows";
/// Translations of pages below no mark show pages of their VMA, with permissions of the VMA.
pub const TRANSLATIONS: &str = "a translation allows what its VMA allows";
/// A translation leads to a frame of its page. A frame whose flush is deferred is only read.
pub const FRAMES_HELD: &str = "a translation leads to a frame of its page";
/// Each frame has one owner.
pub const ACCOUNTED: &str = "each frame is accounted for";
/// No page and no entry is in an unlinked table.
pub const LINKED: &str = "each page is in a linked table";
/// A fault relies on the VMA of its page alone.
pub const OWN: &str = "a fault uses the VMA of its page";
/// A page that is mapped all the time is never missing.
pub const MAPPED: &str = "a replaced page is never missing";
/// A page is reported as missing after its translations are gone.
pub const GONE: &str = "a missing page has no translation";
/// A call returns after the translations from before the call are gone.
pub const RETURNS: &str = "a call returns after its flush";
/// Index, ranges, counts and marks agree while the leaf is unlocked.
pub const CONSISTENT: &str = "an unlocked leaf is consistent";
/// Pieces that are one VMA are joined, and no other pieces.
pub const ONCE: &str = "each VMA is counted once";
/// Calls that span the bound are not overtaken.
pub const SERIAL: &str = "a spanning call is not overtaken";

/// Returns all properties.
pub(super) fn all(model: &Leaves) -> Vec<Property<Leaves>> {
    let mut all = vec![
        Property::always(ENTRIES, |_, state: &State| {
            (0..PAGES as u8).all(|page| match state.entries[usize::from(page)] {
                Slot::Page(frame, write) => state.is_allowed(page, frame, write),
                Slot::Empty | Slot::Busy => true,
                // A missing VMA would keep the evicted page for ever.
                Slot::Out => state.changer(page).is_some() || state.vma_at(page).is_some(),
            })
        }),
        Property::always(TRANSLATIONS, |_, state: &State| {
            state.translations().all(|(page, frame, write)| state.is_allowed(page, frame, write))
        }),
        Property::always(FRAMES_HELD, |_, state: &State| {
            state.translations().all(|(page, frame, write)| state.is_held(page, frame, write))
        }),
        Property::always(ACCOUNTED, |_, state: &State| state.is_accounted()),
        Property::always(LINKED, |_, state: &State| !state.lost),
        Property::always(OWN, |_, state: &State| !state.strange),
        Property::always(MAPPED, |_, state: &State| !state.denied),
        Property::always(GONE, |_, state: &State| !state.shown),
        Property::always(RETURNS, |_, state: &State| !state.hasty),
        Property::always(CONSISTENT, |_, state: &State| {
            (0..2).all(|leaf| state.leaves[leaf].lock.is_some() || state.is_consistent(leaf))
        }),
        Property::always(ONCE, |_, state: &State| {
            state.leaves.iter().any(|leaf| leaf.lock.is_some())
                || state.joined == state.is_alike_at_bound()
        }),
        Property::sometimes("a writer waits for a mark", |_, state: &State| {
            state.writers.iter().any(|writer| matches!(writer.at, At::Parked(_)))
        }),
        Property::sometimes("both writers change pages at once", |_, state: &State| {
            let changes = |at| matches!(at, At::Visits(..) | At::Posts(_) | At::Awaits);
            state.writers.iter().all(|writer| changes(writer.at))
        }),
    ];
    if model.ends_alike {
        all.push(Property::always(SERIAL, |model: &Leaves, state: &State| {
            !model.is_ended(state) || state.is_alike_at_bound()
        }));
    }
    if !model.touched.is_empty() {
        all.extend([
            Property::sometimes("a fault waits for a mark", |_, state: &State| {
                state.fault.stage == Stage::Parked
            }),
            Property::sometimes("a fault restores its entry", |_, state: &State| {
                state.fault.stage == Stage::Checked(false)
            }),
            Property::sometimes("a writer waits for a fault", |_, state: &State| {
                let visits = |writer: &Writer| match writer.at {
                    At::Visits(page, _) => state.entries[usize::from(page)] == Slot::Busy,
                    _ => false,
                };
                matches!(state.fault.stage, Stage::Held | Stage::Checked(_))
                    && state.writers.iter().any(visits)
            }),
        ]);
    }
    if model.strangers != 0 {
        all.push(Property::sometimes(
            "a fault finds a VMA of another space",
            |_, state: &State| {
                state.fault.stage == Stage::Counted
                    && state.vmas[usize::from(state.fault.vma)].space != 0
            },
        ));
    }
    if model.moved.is_some() {
        all.push(Property::sometimes("a migration sees a mark", |_, state: &State| {
            matches!(state.migration, Migration::Awaits(_, _, true))
        }));
    }
    all
}

impl State {
    /// Iterates over the translations in all TLBs: page, frame, and whether stores are allowed.
    fn translations(&self) -> impl Iterator<Item = (u8, Frame, bool)> {
        self.tlbs.iter().flat_map(|tlb| {
            let pages = tlb.iter().enumerate();
            pages.filter_map(|(page, to)| to.map(|(frame, write)| (page as u8, frame, write)))
        })
    }

    /// Returns whether `page` may lead to `frame`: a mark covers the page, or its VMA allows this.
    fn is_allowed(&self, page: u8, frame: Frame, write: bool) -> bool {
        self.changer(page).is_some() || self.allows(page, frame, write)
    }

    /// Returns whether the VMA of `page` allows that the page leads to `frame`.
    fn allows(&self, page: u8, frame: Frame, write: bool) -> bool {
        let object = object_of(self.frames[usize::from(frame)]);
        self.attributes_at(page).is_some_and(|attributes| {
            Some(attributes.object) == object && (attributes.write || !write)
        })
    }

    /// Returns whether a TLB has a translation of `page` that the VMA does not allow. With `later`,
    /// an armed mark of the page allows each translation.
    pub(super) fn has_old_translation(&self, page: u8, later: bool) -> bool {
        let is_marked = later && self.changer(page).is_some();
        let is_old = |(of, frame, write)| of == page && !self.allows(of, frame, write);
        !is_marked && self.translations().any(is_old)
    }

    /// Returns whether a translation of `page` may lead to `frame`.
    fn is_held(&self, page: u8, frame: Frame, write: bool) -> bool {
        match self.frames[usize::from(frame)] {
            Owner::Free => false,
            Owner::Page(_) => {
                // A moved page has its old translations until the flush.
                let moved = self.changer(page).is_some();
                let maps = |entry: &Slot| matches!(entry, Slot::Page(to, _) if *to == frame);
                maps(&self.entries[usize::from(page)])
                    || moved && self.entries.iter().any(maps)
                    || self.migrates(frame)
            }
            Owner::Owed(..) => true,
            Owner::Kept(_) => !write,
        }
    }

    /// Returns whether the migration has the entry of `frame`.
    fn migrates(&self, frame: Frame) -> bool {
        match self.migration {
            Migration::Idle | Migration::Done => false,
            Migration::Took(own, _) | Migration::Awaits(own, ..) | Migration::Defers(own) => {
                own == frame
            }
        }
    }

    /// Returns whether each frame is at the place named by its owner, and nowhere else.
    fn is_accounted(&self) -> bool {
        (0..FRAMES as Frame).all(|frame| {
            let maps = |entry: &&Slot| matches!(entry, Slot::Page(to, _) if *to == frame);
            let uses = self.entries.iter().filter(maps).count() + usize::from(self.migrates(frame));
            uses == usize::from(matches!(self.frames[usize::from(frame)], Owner::Page(_)))
        })
    }

    /// Returns whether index, ranges, counts and marks of `leaf` agree, and no two equal neighbours
    /// are apart.
    fn is_consistent(&self, leaf: usize) -> bool {
        let pages = || (0..PAGES as u8).filter(|page| leaf_of(*page) == leaf);
        let is_indexed = pages().all(|page| self.index[usize::from(page)] == self.vma_at(page));
        let is_counted = pages().all(|page| {
            self.vma_at(page).is_none_or(|vma| {
                let is_odd = self.vmas[usize::from(vma)].count & 1 == 1;
                is_odd == self.changer(page).is_some()
            })
        });
        let is_merged = pages().zip(pages().skip(1)).all(|(below, above)| {
            self.vma_at(below) == self.vma_at(above)
                || self.attributes_at(below) != self.attributes_at(above)
                || self.changer(below).is_some()
                || self.changer(above).is_some()
        });
        is_indexed && is_counted && is_merged
    }
}
