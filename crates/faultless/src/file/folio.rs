//! Folios of a file: 512 pages in contiguous frames, which a huge leaf can map.
//!
//! An object has the entries of base pages only, whether they are a folio or not: its table of 512 pages is a folio's when the entries
//! name contiguous frames from an aligned one on. So a folio needs no mark, and is never split in the object: each of its pages is stored to,
//! written back, cut off or dropped by itself, and the frames [stay](crate::frame::folio) as long as a huge leaf maps them. What
//! it costs is the table, 4 KiB of 2 MiB, which an entry for the whole folio would have to keep for its split anyway.
//!
//! A folio is made
//! - by one read of 2 MiB into new frames, where the object has none of the pages;
//! - or by copying the pages that it has, once it has all of them, into new frames. Each page goes by itself: its entry is taken, the
//!   object's reference must be the only one, the bytes are copied, and the entry names the new frame. So there is no moment
//!   at which somebody can reach two copies, or neither. Pages that are mapped, pinned, in use or dirty stay where they are, and
//!   there is no folio.
//!
//! A fault or a collapse that [refers](Object::refer_to_folio) to a folio for a huge leaf reads all entries again afterwards, as a fault that
//! refers to a page reads its entry again. A page that is cut off, or punched out, leaves the object first, and is revoked in all spaces
//! afterwards. So it is missing at this look, or the revocation meets the leaf.

use super::object::{NoPage, Object};
use super::read::{Fetched, Lack, Reach, State, table_bit};
use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::error::Errno;
use crate::fault::prepared::Preparing;
use crate::frame::{Use, folio};
use crate::heap::{Bounded, Shared};
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::until;
use crate::table::Entry;
use crate::table::node::{ENTRIES, load};
use crate::table::protocol;
use crate::vm::Cpu;

/// There is no folio, and none can be made now.
pub(crate) struct NoFolio;

impl Object {
    /// Whether the object is long enough for a folio of the pages from `first` on.
    pub(crate) fn spans_folio(&self, first: u64) -> bool {
        first.is_multiple_of(ENTRIES as u64)
            && first + ENTRIES as u64 <= Self::MAX_PAGES
            && (first + ENTRIES as u64) * PAGE_SIZE <= self.bytes()
    }

    /// The first frame of the folio that the pages with the entries `names` are, if they are one at a glance.
    pub(crate) fn folio(names: &[AtomicU64; ENTRIES]) -> Option<FrameNumber> {
        let first = load(&names[0]);
        let names_it = |(name, frame): (&AtomicU64, FrameNumber)| {
            let entry = load(name);
            entry.is_present() && entry.frame() == frame
        };
        let is_first = first.is_present() && folio::is_first(first.frame());
        (is_first && names.iter().zip(folio::frames_of(first.frame())).all(names_it))
            .then(|| first.frame())
    }

    /// Whether the page with the entry `entry` may be moved, as far as its entry tells: no store to it is to be written back.
    pub(crate) fn may_move(entry: Entry) -> bool {
        entry.is_present() && !entry.is_dirty() && !entry.is_locked()
    }

    /// Whether no folio of the pages from `first` on could be made when it was last tried.
    pub(crate) fn is_unfit(&self, first: u64) -> bool {
        self.unfit.load(Ordering::Relaxed) & table_bit(first) != 0
    }

    /// Notes whether a folio of the pages from `first` on could be made.
    fn note_fit(&self, first: u64, fit: bool) {
        // Faults of all programs look at it.
        if self.is_unfit(first) != fit {
            return;
        }
        if fit {
            self.unfit.fetch_and(!table_bit(first), Ordering::Relaxed);
        } else {
            self.unfit.fetch_or(table_bit(first), Ordering::Relaxed);
        }
    }

    /// Counts one more huge leaf of the folio that the pages with the entries `names` are, and returns its first frame. `None`: they are none.
    pub(crate) fn refer_to_folio<M: Machine>(
        cpu: &Cpu<'_, M>,
        names: &[AtomicU64; ENTRIES],
    ) -> Option<FrameNumber> {
        // The count of leaves may be read with a reference to the first frame.
        let first = Self::refer_to_copy(cpu, &names[0])?;
        let counted = folio::is_first(first) && Self::add_leaf(cpu, names, first);
        // SAFETY: the reference taken above, which never was a mapping.
        unsafe { cpu.put_unmapped(first) };
        if counted && Self::folio(names) != Some(first) && !lost(Mutant::LeafLooksAgain) {
            // SAFETY: the leaf counted above, which never was a mapping.
            unsafe { cpu.put_leaf(first) };
            return None;
        }
        counted.then_some(first)
    }

    /// Counts a huge leaf of the folio that begins with `first`, to which the caller has a reference.
    fn add_leaf<M: Machine>(
        cpu: &Cpu<'_, M>,
        names: &[AtomicU64; ENTRIES],
        first: FrameNumber,
    ) -> bool {
        let meta = cpu.vm().frames.meta(first);
        while !meta.add_leaf() {
            let mut frames = folio::frames_of(first);
            // A reference to each frame, by its entry.
            let taken = names.iter().take_while(|name| {
                let frame = Self::refer_to_map(cpu, name);
                let fits = frame == frames.next();
                if let Some(other) = frame.filter(|_| !fits) {
                    // SAFETY: the reference just taken, which never was a mapping.
                    unsafe { cpu.put_unmapped(other) };
                }
                fits
            });
            let taken = taken.count();
            if taken == ENTRIES && meta.add_first_leaf() {
                break;
            }
            for frame in folio::frames_of(first).take(taken) {
                // SAFETY: the references taken above, which never were mappings.
                unsafe { cpu.put_unmapped(frame) };
            }
            if taken != ENTRIES {
                return false;
            }
        }
        true
    }
}

impl Shared<Object> {
    /// Makes sure that the pages from `first` on, where the object [spans a folio](Object::spans_folio), are one, or are being read.
    /// The caller holds no lock and is in no section.
    pub(crate) fn fetch_folio<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        first: u64,
    ) -> Result<Fetched, NoFolio> {
        match self.fetch_missing(cpu, first) {
            Ok(Fetched::There) => {}
            Ok(pending) => return Ok(pending),
            Err(_) => {
                self.note_fit(first, false);
                return Err(NoFolio);
            }
        }
        let names = self.slots(cpu, first).ok_or(NoFolio)?;
        if Self::is_folio(names) || self.gather(cpu, names, first) {
            return Ok(Fetched::There);
        }
        // Pages that are missing may come.
        if names.iter().all(|name| load(name).is_present()) {
            self.note_fit(first, false);
        }
        Err(NoFolio)
    }

    /// Makes sure that all pages from `first` on are there, or being read: as one folio, if none is there. Of an object without a
    /// store, nothing is to be read.
    ///
    /// # Errors
    /// Why not: `EAGAIN` where they leave again, `EINVAL` where the object is too short.
    pub(crate) fn fetch_missing<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        first: u64,
    ) -> Result<Fetched, Errno> {
        // Each look reads at least one page.
        for _ in 0..=ENTRIES {
            let mut prepared = Preparing::new(cpu);
            let names = self.table(cpu, first, &mut prepared);
            drop(prepared);
            let names = names.map_err(|lack| match lack {
                NoPage::OutOfMemory => Errno::ENOMEM,
                NoPage::Beyond | NoPage::Absent | NoPage::Full => Errno::EINVAL,
            })?;
            let missing = names.iter().position(|name| !load(name).is_present());
            let Some(missing) = missing.filter(|_| self.is_stored()) else {
                return Ok(Fetched::There);
            };
            let untouched = names.iter().all(|name| load(name).is_none());
            let fetched = if untouched {
                self.read_folio(cpu, names, first)
            } else if cpu.vm().frames.can_spare(2 * ENTRIES as u64) {
                self.fetch(cpu, first + missing as u64, Reach::Block(first + ENTRIES as u64))
            } else {
                // Not read for a folio that could not be made.
                Err(Lack::Memory)
            };
            match fetched {
                Ok(Fetched::There) => {}
                Ok(pending) => return Ok(pending),
                // It was shortened.
                Err(Lack::Beyond) => return Err(Errno::EINVAL),
                Err(lack) => return Err(lack.into()),
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Whether the pages from `first` on are a folio.
    pub(crate) fn has_folio<M: Machine>(&self, cpu: &Cpu<'_, M>, first: u64) -> bool {
        self.slots(cpu, first).is_some_and(Self::is_folio)
    }

    fn is_folio(names: &[AtomicU64; ENTRIES]) -> bool {
        Object::folio(names).is_some()
    }

    /// Begins one read of all pages from `first` on, whose entries `names` were empty, into the frames of a new folio. Where another CPU
    /// has begun to read some, it reads those before. A page that it could not read is an error.
    fn read_folio<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        names: &[AtomicU64; ENTRIES],
        first: u64,
    ) -> Result<Fetched, Lack> {
        let mut pages = Bounded::try_new(ENTRIES).map_err(|_| Lack::Heap)?;
        let place = cpu.vm().ended.place().map_err(|_| Lack::Heap)?;
        let state = Shared::try_new(State::under_way(first)).map_err(|_| Lack::Heap)?;
        until(cpu, || !self.is_cut(first));
        let frames = cpu.vm().frames.alloc_folio(cpu.local(), cpu);
        let mut frames = frames.ok_or(Lack::Memory)?;
        for (index, name) in (first..).zip(names) {
            let Some(frame) = frames.pop() else { break };
            match self.begin_page(cpu, name, index, &state, frame) {
                // The list has the capacity of a folio.
                Ok(Some(page)) => pages.push(page),
                _ => break,
            };
        }
        while let Some(frame) = frames.pop() {
            cpu.free(frame);
        }
        if pages.is_empty() {
            return Ok(Fetched::There);
        }
        if pages.is_full() {
            cpu.count(Counter::ThpFileAlloc);
        }
        let fetched = self.ask(cpu, self.reading(place, state.clone(), first, pages), first)?;
        // A page that is missing may have been dropped again. What is under way says itself how it ended.
        if matches!(fetched, Fetched::There) && state.has_failed() {
            Err(Lack::Store(Errno::EIO))
        } else {
            Ok(fetched)
        }
    }

    /// Copies the pages from `first` on, all of which are there, into the frames of a new folio. Returns whether all have moved.
    pub(crate) fn gather<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        names: &[AtomicU64; ENTRIES],
        first: u64,
    ) -> bool {
        let meta = |entry: Entry| cpu.vm().frames.meta(entry.frame());
        let may_move = |name: &AtomicU64| Some(load(name)).filter(|seen| Object::may_move(*seen));
        if !names.iter().all(|name| may_move(name).is_some_and(|entry| meta(entry).is_sole())) {
            return false;
        }
        let Some(mut frames) = cpu.vm().frames.alloc_folio(cpu.local(), cpu) else { return false };
        let mut moved = 0;
        for (index, name) in (first..).zip(names) {
            cpu.serve_flushes();
            let Some(seen) = may_move(name) else { break };
            let Ok(held) = protocol::take(name, seen, cpu) else { break };
            let Some(frame) = frames.pop() else {
                held.revert();
                break;
            };
            // If the object's reference is the only one, no CPU takes one from now on.
            if !meta(seen).put_sole() {
                held.revert();
                cpu.free(frame);
                break;
            }
            // SAFETY: the new frame is ours, and so is the old one: it has no reference.
            unsafe { cpu.vm().machine().copy_frame(frame.number(), seen.frame()) };
            let frame = cpu.vm().frames.publish(frame, Use::Shared, self.anchor(), index);
            held.commit(seen.with_frame(frame));
            // SAFETY: the last reference was the object's, and no entry has the frame. Mappings dropped theirs after a flush.
            let old = unsafe { cpu.vm().frames.reclaim(seen.frame()).settle() };
            cpu.free(old);
            moved += 1;
        }
        while let Some(frame) = frames.pop() {
            cpu.free(frame);
        }
        if moved == ENTRIES {
            cpu.count(Counter::ThpFileAlloc);
            self.note_fit(first, true);
        }
        moved == ENTRIES
    }
}
