//! Folios of a file: 512 pages in contiguous frames, which a huge leaf can map.
//!
//! An object has entries of base pages only, whether the pages form a folio or not. A table of 512
//! pages is a folio's if the entries name contiguous frames, beginning with an aligned one. So a
//! folio needs no mark, and is never split in the object: each of its pages is stored to, written
//! back, cut off or dropped individually, and the frames [stay](crate::frame::folio) while a huge
//! leaf maps them. The cost is the table, 4 KiB for 2 MiB, which an entry for the whole folio would
//! have to reserve for its split anyway.
//!
//! A folio is made
//! - by one read of 2 MiB into new frames, if the object has none of the pages;
//! - or by copying the existing pages into new frames, once the object has all of them. Each page
//!   is copied individually: its entry is taken, the object's reference must be the only one, the
//!   bytes are copied, and the entry is changed to the new frame. So at no time are two copies
//!   reachable, or none. Pages that are mapped, pinned, in use or dirty stay in place, and then no
//!   folio is made.
//!
//! A fault or a collapse that [refers](Object::refer_to_folio) to a folio for a huge leaf reads all
//! entries again afterwards, as a fault that refers to a page reads its entry again. A page that is
//! cut off, or punched out, first leaves the object, and is then revoked in all spaces. So either
//! the page is missing at the second read, or the revocation finds the leaf.

use super::object::{NoPage, Object};
use super::read::{Fetched, Lack, Reach, State, table_bit};
use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::error::Errno;
use crate::fault::prepared::Preparing;
use crate::frame::{FrameUse, folio};
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
    /// Returns whether the object is long enough for a folio of the pages starting at `first`.
    pub(crate) fn spans_folio(&self, first: u64) -> bool {
        first.is_multiple_of(ENTRIES as u64)
            && first + ENTRIES as u64 <= Self::MAX_PAGES
            && (first + ENTRIES as u64) * PAGE_SIZE <= self.bytes()
    }

    /// Returns the first frame of the folio formed by the pages with the entries `names`, if they
    /// look like a folio (racy).
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

    /// Returns whether the page with entry `entry` may be moved, judged by the entry: present, not
    /// locked, and without a store to write back.
    pub(crate) fn may_move(entry: Entry) -> bool {
        entry.is_present() && !entry.is_dirty() && !entry.is_locked()
    }

    /// Returns whether the last attempt to make a folio of the pages starting at `first` failed.
    pub(crate) fn is_unfit(&self, first: u64) -> bool {
        self.unfit.load(Ordering::Relaxed) & table_bit(first) != 0
    }

    /// Records whether a folio of the pages starting at `first` could be made.
    fn note_fit(&self, first: u64, fit: bool) {
        // Faults of all programs read this word, so it is written only on changes.
        if self.is_unfit(first) != fit {
            return;
        }
        if fit {
            self.unfit.fetch_and(!table_bit(first), Ordering::Relaxed);
        } else {
            self.unfit.fetch_or(table_bit(first), Ordering::Relaxed);
        }
    }

    /// Counts one more huge leaf of the folio formed by the pages with the entries `names`, and
    /// returns its first frame. `None`: the pages are no folio.
    pub(crate) fn refer_to_folio<M: Machine>(
        cpu: &Cpu<'_, M>,
        names: &[AtomicU64; ENTRIES],
    ) -> Option<FrameNumber> {
        // The count of leaves may be read only with a reference to the first frame.
        let first = Self::refer_to_copy(cpu, &names[0])?;
        let counted = folio::is_first(first) && Self::add_leaf(cpu, names, first);
        // SAFETY: drops the reference taken above, which never was a mapping.
        unsafe { cpu.put_unmapped(first) };
        if counted && Self::folio(names) != Some(first) && !lost(Mutant::LeafLooksAgain) {
            // SAFETY: drops the leaf counted above, which never was a mapping.
            unsafe { cpu.put_leaf(first) };
            return None;
        }
        counted.then_some(first)
    }

    /// Counts a huge leaf of the folio that begins with `first`, to which the caller has a
    /// reference.
    fn add_leaf<M: Machine>(
        cpu: &Cpu<'_, M>,
        names: &[AtomicU64; ENTRIES],
        first: FrameNumber,
    ) -> bool {
        let meta = cpu.vm().frames.meta(first);
        while !meta.add_leaf() {
            let mut frames = folio::frames_of(first);
            // Takes a reference to each frame, through its entry.
            let taken = names.iter().take_while(|name| {
                let frame = Self::refer_to_map(cpu, name);
                let fits = frame == frames.next();
                if let Some(other) = frame.filter(|_| !fits) {
                    // SAFETY: drops the reference just taken, which never was a mapping.
                    unsafe { cpu.put_unmapped(other) };
                }
                fits
            });
            let taken = taken.count();
            if taken == ENTRIES && meta.add_first_leaf() {
                break;
            }
            for frame in folio::frames_of(first).take(taken) {
                // SAFETY: drops the references taken above, which never were mappings.
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
    /// Ensures that the pages starting at `first` are a folio or are being read; the object [spans
    /// a folio](Object::spans_folio) there. The caller holds no lock and is in no grace section.
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
        // Missing pages may still arrive.
        if names.iter().all(|name| load(name).is_present()) {
            self.note_fit(first, false);
        }
        Err(NoFolio)
    }

    /// Ensures that all pages of the folio range starting at `first` are present or being read: as
    /// one folio, if none is present. For an object without a store, the call reads nothing.
    ///
    /// # Errors
    /// `EAGAIN` if pages leave again, `EINVAL` if the object is too short; and errors of the read.
    pub(crate) fn fetch_missing<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        first: u64,
    ) -> Result<Fetched, Errno> {
        // Each iteration reads at least one page.
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
                // Do not read pages for a folio which could not be made.
                Err(Lack::Memory)
            };
            match fetched {
                Ok(Fetched::There) => {}
                Ok(pending) => return Ok(pending),
                // The object was shortened.
                Err(Lack::Beyond) => return Err(Errno::EINVAL),
                Err(lack) => return Err(lack.into()),
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Returns whether the pages starting at `first` are a folio.
    pub(crate) fn has_folio<M: Machine>(&self, cpu: &Cpu<'_, M>, first: u64) -> bool {
        self.slots(cpu, first).is_some_and(Self::is_folio)
    }

    fn is_folio(names: &[AtomicU64; ENTRIES]) -> bool {
        Object::folio(names).is_some()
    }

    /// Begins one read of all pages starting at `first`, whose entries `names` were empty, into the
    /// frames of a new folio. If another CPU has begun to read some of the pages, reads only the
    /// pages before. A page that could not be read is an error.
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
        // A missing page may have been dropped again. A read in progress reports its own outcome.
        if matches!(fetched, Fetched::There) && state.has_failed() {
            Err(Lack::Store(Errno::EIO))
        } else {
            Ok(fetched)
        }
    }

    /// Copies the pages starting at `first`, all of them present, into the frames of a new folio.
    /// Returns whether all pages were moved.
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
            // If the object's reference is the only one, no CPU can take another from now on.
            if !meta(seen).put_sole() {
                held.revert();
                cpu.free(frame);
                break;
            }
            // SAFETY: the new frame is unpublished and belongs to this CPU, and so does the old
            // one, because it has no reference.
            unsafe { cpu.vm().machine().copy_frame(frame.number(), seen.frame()) };
            let frame = cpu.vm().frames.publish(frame, FrameUse::Shared, self.anchor(), index);
            held.commit(seen.with_frame(frame));
            // SAFETY: the last reference was the object's, and no entry names the frame. References
            // of mappings were dropped after a flush.
            let old = unsafe { cpu.vm().frames.reclaim(seen.frame()).assume_flushed() };
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
