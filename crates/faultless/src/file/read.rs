//! Reads pages of a file from its [backing store](super::store).
//!
//! # Protocol
//!
//! The page's entry in the object is the lock here, too. A page that is being read has a *hidden*
//! entry, which names the frame being filled; no CPU may use this frame. A CPU that needs a missing
//! page holds no lock and is in no grace section. It
//!
//! 1. takes the entry of the page, and the empty entries of neighbours, one after the other, and
//!    makes each of them hidden. Like any CPU that adds a page, it reads the object's length again
//!    while it holds the entry; and it checks whether the page is being [cut off](super::length);
//! 2. requests all these pages from the store at once;
//! 3. completes the read: makes each hidden entry present, if the entry still names the frame, or
//!    empties it if the page was not read. In the meantime a truncation or a punched hole may have
//!    emptied the entry, or the kernel may have [overwritten](super::overwrite) the page; then the
//!    frame is freed.
//!
//! So a page is read once, for any number of faults: a fault that finds the entry hidden waits for
//! the read in progress. The frame's metadata identifies the read: fields that are unused until the
//! page is present contain the address of the read's [`State`]. The fault takes the entry, so that
//! the read cannot end meanwhile, takes a share of the state, and restores the entry.
//!
//! The outcome is stored after the entries. So a fault that finds the read completed without an
//! error retries the page like any other access.
//!
//! # Errors
//!
//! A store that fails returns how many bytes it has read before. The whole pages among them are
//! present; the others are missing. The error belongs to the first missing page, and only the
//! faults that wait for this page receive it; no fault does if the page no longer belongs to the
//! read. Faults that wait for a later page retry, and begin a read with their own page. From then
//! on [reads near the page](Object::has_failed) begin with the requested page instead of its block,
//! so one bad page does not make its neighbours unreadable.

use super::object::{NoPage, Object, Stored};
use super::store::{Buffer, MOST_PAGES, ReadRun, StoreError, wanted};
use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::ended::{Left, Place};
use crate::error::Errno;
use crate::fault::prepared::{Prepared, Preparing};
use crate::frame::{Clean, Frame, FrameUse};
use crate::heap::{Bounded, Shared};
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, StoreCall};
use crate::sync::wait::until;
use crate::table::Entry;
use crate::table::node::{ENTRIES, load};
use crate::table::protocol::{self, Taken};
use crate::vm::Cpu;
use core::ops::Range;
use core::ptr::NonNull;

/// The outcome of a read in progress.
const UNDER_WAY: u64 = u64::MAX;
/// The position of the error number in an outcome, above the count of pages.
const ERRNO_SHIFT: u32 = 32;

/// The shared state of a read, in progress or completed, for the faults that wait for it.
#[derive(Debug)]
pub(crate) struct State {
    /// The first of the pages read together; known when the outcome is.
    first: AtomicU64,
    /// [`UNDER_WAY`]; or the number of pages read, from the first one, and the error of the next
    /// page.
    outcome: AtomicU64,
}

impl State {
    /// Returns the state of a new read, of the pages at or around `index`.
    pub(super) fn under_way(index: u64) -> Self {
        Self { first: AtomicU64::new(index), outcome: AtomicU64::new(UNDER_WAY) }
    }

    fn end(&self, first: u64, pages: usize, errno: Option<Errno>) {
        self.first.store(first, Ordering::Relaxed);
        let errno = errno.map_or(0, |errno| u64::from(errno.number().unsigned_abs()));
        self.outcome.store(pages as u64 | errno << ERRNO_SHIFT, Ordering::Release);
    }

    /// Returns whether the read has ended with an error.
    pub(super) fn has_failed(&self) -> bool {
        let outcome = self.outcome.load(Ordering::Acquire);
        outcome != UNDER_WAY && outcome >> ERRNO_SHIFT != 0
    }
}

/// A page that is being read, for threads whose access is pending.
#[derive(Clone, Debug)]
pub struct PendingRead {
    state: Shared<State>,
    /// The page whose error is reported; `None` for a caller that only needs to know when the read
    /// ends.
    index: Option<u64>,
}

impl PendingRead {
    /// Returns the identifier of the read, for the threads that wait for it and for the code that
    /// [completes](Reading::complete) it. Unique among the reads in progress.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.state.id()
    }

    /// Returns how the read of the page ended; `None` while in progress. After `Ok` the access
    /// should be retried. An error belongs to the page itself: a fault that waits for a page after
    /// the failed one retries, and begins a read with its own page.
    ///
    /// A kernel that puts the thread to sleep must first add the thread to its list, and then call
    /// this function.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<(), Errno>> {
        let outcome = self.state.outcome.load(Ordering::Acquire);
        let (pages, errno) = (outcome & u64::from(u32::MAX), outcome >> ERRNO_SHIFT);
        (outcome != UNDER_WAY).then(|| {
            let failed = self.state.first.load(Ordering::Relaxed) + pages;
            #[cfg(shuttle)]
            assert!(
                errno != 0 || self.index.is_none_or(|at| at < failed && at + pages >= failed),
                "a waiter for a read of other pages"
            );
            match Errno::of_number(errno as i32) {
                _ if errno == 0 || self.index != Some(failed) => Ok(()),
                Errno::EAGAIN => Ok(()),
                errno => Err(errno),
            }
        })
    }

    /// Returns the same read, but with all errors ignored.
    pub(crate) fn for_any(mut self) -> Self {
        self.index = None;
        self
    }
}

/// Pages that a store took along to read them asynchronously. The read ends with
/// [`complete`](Self::complete); a dropped value ends as if no page could be read (`EIO`), when a
/// CPU calls [`Cpu::end_dropped`](crate::Cpu::end_dropped) or another call that does the same. As
/// with any error, faults on the first page receive the error, and faults on the other pages begin
/// separate reads.
#[derive(Debug)]
pub struct Reading {
    unread: Option<Unread>,
    place: Place,
}

/// The parts of a read.
#[derive(Debug)]
pub(crate) struct Unread {
    object: Shared<Object>,
    state: Shared<State>,
    first: u64,
    bytes: usize,
    pages: Bounded<Buffer>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Some(unread) = self.unread.take() {
            self.place.push(|| Left::Reading(unread));
        }
    }
}

impl Reading {
    /// Returns the identifier of the read, as [`PendingRead::id`].
    #[must_use]
    pub fn id(&self) -> u64 {
        self.unread.as_ref().map_or(0, |unread| unread.state.id())
    }

    /// Returns the number of the first page in the file.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.unread.as_ref().map_or(0, |unread| unread.first)
    }

    /// Returns how many bytes of the file to read.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts().1
    }

    /// Returns the memory of the pages, in order, for a device.
    #[must_use]
    pub fn buffers(&self) -> &[Buffer] {
        self.parts().0
    }

    pub(super) fn parts(&self) -> (&[Buffer], usize) {
        self.unread.as_ref().map_or((&[], 0), |unread| (&unread.pages, unread.bytes))
    }

    /// Returns the memory of the pages to read, limited to the bytes to read, in order. The memory
    /// lives as long as the subsystem, which `cpu` borrows.
    ///
    /// # Panics
    /// If `cpu` belongs to another subsystem.
    pub fn memory<'a, M: Machine>(
        &'a mut self,
        cpu: &'a Cpu<'_, M>,
    ) -> impl Iterator<Item = &'a mut [u8]> {
        if let Some(unread) = &self.unread {
            unread.object.check_vm(cpu);
        }
        let (pages, bytes) = self.parts();
        // SAFETY: the frames belong to the read alone until it ends, which consumes the read; and
        // the machine lives during `'a`.
        wanted(pages, bytes).map(|(at, len)| unsafe { core::slice::from_raw_parts_mut(at, len) })
    }

    /// Ends the read: `read` is the number of bytes read, or an error, as returned by
    /// [`BackingStore::read`](super::BackingStore::read). The caller then wakes the threads that
    /// wait for the read, by its [`id`](Self::id).
    ///
    /// # Panics
    /// If `cpu` belongs to another subsystem. The read then ends like a dropped one.
    pub fn complete<M: Machine>(mut self, cpu: &Cpu<'_, M>, read: Result<usize, StoreError>) {
        if let Some(unread) = &self.unread {
            unread.object.check_vm(cpu);
        }
        self.place.vacate();
        if let Some(unread) = self.unread.take() {
            unread.end(cpu, read);
        }
    }
}

impl Unread {
    /// Step 3 of the protocol.
    pub(crate) fn end<M: Machine>(self, cpu: &Cpu<'_, M>, read: Result<usize, StoreError>) {
        let Self { object, state, first, bytes, pages } = self;
        let (done, errno) = match read {
            Ok(bytes) => (bytes, None),
            Err(StoreError { done, errno }) => (done, Some(errno)),
        };
        let done = done.min(bytes);
        // After an error only whole pages are valid; otherwise the missing bytes are zeros.
        let good = if errno.is_some() { done / PAGE_SIZE as usize } else { pages.len() };
        let mut errno = errno;
        for (at, page) in pages.iter().enumerate() {
            let there = at < good;
            if there {
                let len = done.saturating_sub(at * PAGE_SIZE as usize).min(PAGE_SIZE as usize);
                // SAFETY: the frame belongs to the read alone until its entry is present.
                unsafe { page.at.add(len).write_bytes(0, PAGE_SIZE as usize - len) };
            }
            let ended = object.end_read(cpu, first + at as u64, page.frame, there);
            if at == good && !ended && !lost(Mutant::OverwrittenIsNoError) {
                // Threads that wait for the page retry.
                errno = errno.and(Some(Errno::EAGAIN));
            }
        }
        cpu.state().counts.add(Counter::PageRead, good as u64);
        cpu.count_swapped(&object, Counter::SwapIn, good as u64);
        if errno.is_some() && !lost(Mutant::FailedIsNoted) {
            object.note_failed(first + good as u64);
        }
        state.end(first, good, errno);
        Object::release(object, cpu);
    }
}

/// Which empty pages are read together with a required page.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reach {
    /// The pages of the block that the store prefers, and at least the pages up to this one.
    Block(u64),
    /// Only the following pages up to this one.
    Only(u64),
}

/// The state of a required page.
pub(crate) enum Fetched {
    /// The page is present, or was a moment before.
    There,
    /// The page is being read.
    Pending(PendingRead),
}

/// The reason why a page is not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lack {
    Beyond,
    /// No frame is free.
    Memory,
    Heap,
    /// The store failed.
    Store(Errno),
}

impl From<Lack> for Errno {
    fn from(lack: Lack) -> Self {
        match lack {
            Lack::Beyond => Self::EFBIG,
            Lack::Memory | Lack::Heap => Self::ENOMEM,
            Lack::Store(errno) => errno,
        }
    }
}

impl Shared<Object> {
    /// Ensures that the page at `index` is present or being read. A new read also covers pages in
    /// `reach`. The caller holds no lock and is in no grace section.
    ///
    /// # Errors
    /// The reason why there is no page.
    pub(crate) fn fetch<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        reach: Reach,
    ) -> Result<Fetched, Lack> {
        let mut prepared = Preparing::new(cpu);
        loop {
            let slots = self.table_or_wait(cpu, index, &mut prepared)?;
            let slot = &slots[index as usize % ENTRIES];
            let seen = protocol::wait_and_load(slot, cpu);
            if seen.is_present() {
                return Ok(Fetched::There);
            }
            if seen.is_hidden() {
                match self.join(cpu, slot, seen, index) {
                    Some(pending) => return Ok(Fetched::Pending(pending)),
                    None => continue,
                }
            }
            until(cpu, || !self.is_cut(index));
            match self.begin(cpu, slots, index, reach) {
                Ok(Some(reading)) => return self.ask(cpu, reading, index),
                Ok(None) => {}
                Err(Lack::Memory) if prepared.wait_for_one(cpu) => {
                    // Frames are available again: return the prepared one to the allocator.
                    core::mem::take(&mut *prepared).finish(cpu);
                }
                Err(lack) => return Err(lack),
            }
        }
    }

    /// Returns the last-level table of the page at `index`, makes it if necessary, and waits for a
    /// frame if necessary. The caller holds no lock and is in no grace section.
    pub(crate) fn table_or_wait<'v, M: Machine>(
        &self,
        cpu: &Cpu<'v, M>,
        index: u64,
        prepared: &mut Prepared,
    ) -> Result<&'v [AtomicU64; ENTRIES], Lack> {
        loop {
            match self.table(cpu, index, prepared) {
                Ok(slots) => return Ok(slots),
                Err(NoPage::OutOfMemory) if prepared.wait_for_one(cpu) => {}
                Err(NoPage::OutOfMemory) => return Err(Lack::Memory),
                Err(_) => return Err(Lack::Beyond),
            }
        }
    }

    /// Begins to read the missing pages of `pages`, in runs as large as the store accepts:
    /// `POSIX_FADV_WILLNEED`, `readahead`, or a kernel's own policy. For an object without a store,
    /// the call does nothing. A synchronous store has read the pages when the call returns; other
    /// reads complete later.
    ///
    /// # Errors
    /// The store's first error, or `ENOMEM`. The pages before are present or being read.
    pub fn read_ahead<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: Range<u64>) -> Result<(), Errno> {
        let reach = Reach::Block(pages.end);
        self.read_missing(cpu, pages, reach)
    }

    /// As [`read_ahead`](Self::read_ahead), but reads only `pages`: for an open file with random
    /// access (`POSIX_FADV_RANDOM`).
    ///
    /// # Errors
    /// As [`read_ahead`](Self::read_ahead).
    pub fn read_exactly<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        pages: Range<u64>,
    ) -> Result<(), Errno> {
        let reach = Reach::Only(pages.end);
        self.read_missing(cpu, pages, reach)
    }

    /// Begins to read the missing pages of `pages`, together with the pages in `reach`.
    pub(super) fn read_missing<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        pages: Range<u64>,
        reach: Reach,
    ) -> Result<(), Errno> {
        self.check_vm(cpu);
        if !self.is_stored() {
            return Ok(());
        }
        let there = |index| self.slot(cpu, index).is_some_and(|slot| !load(slot).is_none());
        for index in pages.start..pages.end.min(self.pages()) {
            if !there(index) {
                match self.fetch(cpu, index, reach) {
                    Ok(_) => {}
                    // The object was shortened.
                    Err(Lack::Beyond) => break,
                    Err(lack) => return Err(lack.into()),
                }
            }
        }
        Ok(())
    }

    /// Returns a share of the read in progress for the page at `index`, whose entry `slot` was
    /// `seen`, hidden. `None`: retry.
    fn join<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
        seen: Entry,
        index: u64,
    ) -> Option<PendingRead> {
        let free = lost(Mutant::JoinHoldsEntry);
        let held = if free { None } else { Some(protocol::take(slot, seen, cpu).ok()?) };
        let state = cpu.vm().frames.meta(seen.frame()).read();
        // SAFETY: while the entry is hidden, its read has a share, which `begin` has stored in the
        // metadata; the read drops the share only after it has taken this entry, which is held
        // here.
        let state = NonNull::new(state as *mut ()).map(|raw| unsafe { Shared::clone_raw(raw) });
        if let Some(held) = held {
            held.revert();
        }
        state.map(|state| PendingRead { state, index: Some(index) })
    }

    /// Returns how many pages the store prefers to read at once.
    pub(crate) fn block(&self) -> u64 {
        let pages = self.store().map_or(1, |store| store.preferred_pages());
        pages.clamp(1, MOST_PAGES) as u64
    }

    /// Returns log2 of [`block`](Self::block), rounded down.
    pub(crate) fn block_order(&self) -> u8 {
        self.block().ilog2() as u8
    }

    /// Step 1 of the protocol. `None`: another CPU was faster.
    fn begin<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        slots: &[AtomicU64; ENTRIES],
        index: u64,
        reach: Reach,
    ) -> Result<Option<Reading>, Lack> {
        let run = self.run_around(slots, index, reach);
        let most = (run.end - run.start) as usize;
        let mut pages = Bounded::try_new(most).map_err(|_| Lack::Heap)?;
        let place = cpu.vm().ended.place().map_err(|_| Lack::Heap)?;
        let state = Shared::try_new(State::under_way(index)).map_err(|_| Lack::Heap)?;
        let page = |at: u64| {
            let frame = cpu.alloc().ok_or(Lack::Memory)?;
            self.begin_page(cpu, &slots[at as usize % ENTRIES], at, &state, frame)
        };
        let Some(own) = page(index)? else { return Ok(None) };
        pages.push(own);
        // The other pages are optional.
        let more = |at| page(at).ok().flatten();
        // The list has the capacity of the run.
        (run.start..index).rev().map_while(more).all(|page| pages.push(page));
        pages.reverse();
        let first = index + 1 - pages.len() as u64;
        (index + 1..run.end).map_while(more).all(|page| pages.push(page));
        Ok(Some(self.reading(place, state, first, pages)))
    }

    /// Returns the read of `pages`, whose entries are hidden, starting at page `first` of the
    /// object.
    pub(super) fn reading(
        &self,
        place: Place,
        state: Shared<State>,
        first: u64,
        pages: Bounded<Buffer>,
    ) -> Reading {
        let bytes = self.bytes().saturating_sub(first * PAGE_SIZE);
        let bytes = bytes.min(pages.len() as u64 * PAGE_SIZE) as usize;
        Reading { unread: Some(Unread { object: self.clone(), state, first, bytes, pages }), place }
    }

    /// Returns the pages to read together with the page at `index`: in its table, seemingly empty
    /// (racy), and in `reach`.
    fn run_around(&self, slots: &[AtomicU64; ENTRIES], index: u64, reach: Reach) -> Range<u64> {
        let table = index - index % ENTRIES as u64;
        let most = index + MOST_PAGES as u64;
        let (start, end) = match reach {
            Reach::Only(end) => (index, end.min(most)),
            Reach::Block(end) => {
                let block = self.block();
                // If a page could not be read, each read begins with its own page, so that it
                // receives only its own error.
                let start = if self.has_failed(index) { index } else { index - index % block };
                (start, (start + block).max(end.min(most)))
            }
        };
        let end = end.min(table + ENTRIES as u64).min(self.pages()).max(index + 1);
        let empty = |at: &u64| load(&slots[*at as usize % ENTRIES]).is_none();
        let below = (start.max(table)..index).rev().take_while(empty).count() as u64;
        let above = (index + 1..end).take_while(empty).count() as u64;
        index - below..index + 1 + above
    }

    /// Makes the empty entry of the page at `index` hidden, with `frame`, a new frame. `None`: the
    /// entry is no longer empty.
    pub(super) fn begin_page<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
        index: u64,
        state: &Shared<State>,
        frame: Frame<Clean>,
    ) -> Result<Option<Buffer>, Lack> {
        let held = match self.take_absent(cpu, slot, index, Entry::NONE) {
            Ok(Some(held)) => held,
            other => {
                cpu.free(frame);
                return other.map(|_| None);
            }
        };
        let state = state.as_raw().as_ptr() as u64;
        let frame = cpu.vm().frames.publish(frame, FrameUse::Shared, 0, index);
        cpu.vm().frames.meta(frame).set_read(state);
        cpu.begin_use_count(self, index, frame);
        held.commit(Entry::leaf(frame).with_hidden(true));
        Ok(Some(Buffer { frame, at: cpu.vm().machine().frame_bytes(frame) }))
    }

    /// Takes the entry of the missing page at `index`, which was `seen` empty or hidden. `None`:
    /// the entry has changed, or the page is being cut off.
    pub(super) fn take_absent<'a, M: Machine>(
        &self,
        cpu: &'a Cpu<'_, M>,
        slot: &'a AtomicU64,
        index: u64,
        seen: Entry,
    ) -> Result<Option<Taken<'a>>, Lack> {
        let Ok(held) = protocol::take(slot, seen, cpu) else { return Ok(None) };
        // The length is the sequence; for pages being cut off see `length`.
        let beyond = index >= self.pages() && !lost(Mutant::ReadLooksAgain);
        if beyond || self.is_cut(index) && !lost(Mutant::ReadLooksForCut) {
            held.revert();
            return if beyond { Err(Lack::Beyond) } else { Ok(None) };
        }
        Ok(Some(held))
    }

    /// Step 2 of the protocol, and step 3 if the store has completed the read.
    pub(super) fn ask<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        reading: Reading,
        index: u64,
    ) -> Result<Fetched, Lack> {
        let Some((store, unread)) = self.store().zip(reading.unread.as_ref()) else {
            return Ok(Fetched::There);
        };
        let pending = PendingRead { state: unread.state.clone(), index: Some(index) };
        let mut run = ReadRun { reading: Some(reading) };
        order::before::<StoreCall>(cpu);
        cpu.count(Counter::StoreRead);
        // A read takes many times as long as a flush.
        cpu.flush_if_asked();
        let read = store.read(&mut run);
        if let Some(reading) = run.reading {
            reading.complete(cpu, read);
        } else {
            // The read may have been dropped at once.
            cpu.end_dropped();
        }
        match pending.outcome() {
            None => Ok(Fetched::Pending(pending)),
            Some(Ok(())) => Ok(Fetched::There),
            Some(Err(errno)) => Err(Lack::Store(errno)),
        }
    }
}

/// Returns the bit, among 64, of a page and of all other pages of its table.
pub(super) const fn table_bit(index: u64) -> u64 {
    1 << (index / ENTRIES as u64 % 64)
}

impl Object {
    /// Records that the page at `index` could not be read.
    fn note_failed(&self, index: u64) {
        if let Some(stored) = &self.stored {
            stored.failed.fetch_or(table_bit(index), Ordering::Relaxed);
        }
    }

    /// Returns whether any read of a page near `index` has failed.
    pub(crate) fn has_failed(&self, index: u64) -> bool {
        let failed = |stored: &Stored| stored.failed.load(Ordering::Relaxed);
        self.stored.as_deref().map_or(0, failed) & table_bit(index) != 0
    }

    /// Step 3 of the protocol for the page at `index`, which was read into `frame` if `there`.
    /// Returns whether the page still belonged to the read.
    fn end_read<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        frame: FrameNumber,
        there: bool,
    ) -> bool {
        let hidden = Entry::leaf(frame).with_hidden(true);
        let next = if there { Entry::leaf(frame).unused() } else { Entry::NONE };
        let meta = cpu.vm().frames.meta(frame);
        let mut named = false;
        if let Some(slot) = self.slot(cpu, index) {
            loop {
                // A fault that joins the read briefly holds the entry.
                if protocol::wait_and_load(slot, cpu) != hidden {
                    break;
                }
                if let Ok(held) = protocol::take(slot, hidden, cpu) {
                    meta.anchor.store(self.anchor(), Ordering::Relaxed);
                    held.commit(next);
                    named = true;
                    break;
                }
            }
        }
        if !(named && there || lost(Mutant::EndFreesFrame)) {
            // SAFETY: drops the reference made by publishing, which no entry has: it never was a
            // mapping.
            unsafe { cpu.put_unmapped(frame) };
        }
        named
    }
}
