//! Reading pages of a file in, from its [backing store](super::store).
//!
//! # Protocol
//!
//! The page's entry in the object is the lock here, too. A page that is being read has a *hidden* entry: it names the frame that is being
//! filled, and nobody uses it. Whoever needs a page that is not there holds no lock and no section, and then
//!
//! 1. takes the entry of that page, and those of neighbours that are empty, one after the other, and makes each of them hidden. Like
//!    any CPU that adds a page it reads the object's length again while it has the entry; and it looks whether the page is being
//!    [cut off](super::length);
//! 2. asks the store for all of them at once;
//! 3. completes: makes each hidden entry present, if it still names the frame, or empties it where the page was not read. A truncation,
//!    or a hole that is punched, may have emptied the entry meanwhile, or the kernel may have [overwritten](super::overwrite) the page; then the
//!    frame is freed.
//!
//! So a page is read once, however many faults ask for it: a fault that finds the entry hidden waits for the read that is under way. The
//! frame's metadata says which one: its anon_vma, of which a page of an object has none, is the [`State`] of the read. The fault takes the
//! entry, so that the read cannot end meanwhile, takes a share of the state, and puts the entry back.
//!
//! The outcome is stored after the entries. So a fault that finds the read over, and without an error, looks at the page again like any other
//! access.
//!
//! # Errors
//!
//! A store that fails says how many bytes it has read before. The whole pages among them are there; of the others none is. The error is that of
//! the first page that is missing, and only the faults that wait for that page are told of it; nobody is where the page is no longer the
//! read's. Faults that wait for a page behind it look
//! again, and begin a read with their own page. From then on [reads near the page](Object::has_failed) begin with the page that is asked
//! for and not with the block around it, so one bad page does not make its neighbours unreadable.

use super::object::{NoPage, Object, Stored};
use super::store::{Buffer, MOST_PAGES, ReadRun, StoreError, wanted};
use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::ended::{Left, Place};
use crate::error::Errno;
use crate::fault::prepared::{Prepared, Preparing};
use crate::frame::{Clean, Frame, Use};
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

/// The outcome of a read that is under way.
const UNDER_WAY: u64 = u64::MAX;
/// Where an outcome has the number of an error, above the count of pages.
const ERRNO_SHIFT: u32 = 32;

/// A read that is under way, or was: what those who wait for it share.
#[derive(Debug)]
pub(crate) struct State {
    /// The first page of those that are read together; known when the outcome is.
    first: AtomicU64,
    /// [`UNDER_WAY`]; or the number of pages from the first on that are there, and why the next is not.
    outcome: AtomicU64,
}

impl State {
    /// That of a read that begins, of the pages from `index` on or around it.
    pub(super) fn under_way(index: u64) -> Self {
        Self { first: AtomicU64::new(index), outcome: AtomicU64::new(UNDER_WAY) }
    }

    fn end(&self, first: u64, pages: usize, errno: Option<Errno>) {
        self.first.store(first, Ordering::Relaxed);
        let errno = errno.map_or(0, |errno| u64::from(errno.number().unsigned_abs()));
        self.outcome.store(pages as u64 | errno << ERRNO_SHIFT, Ordering::Release);
    }

    /// Whether it has ended, and some page could not be read.
    pub(super) fn has_failed(&self) -> bool {
        let outcome = self.outcome.load(Ordering::Acquire);
        outcome != UNDER_WAY && outcome >> ERRNO_SHIFT != 0
    }
}

/// A page that is being read: what a thread waits for whose access was pending.
#[derive(Clone, Debug)]
pub struct PendingRead {
    state: Shared<State>,
    /// The page whose error is one; none for a caller that only looks what is there.
    index: Option<u64>,
}

impl PendingRead {
    /// Names the read, for the threads that wait for it and for the code that [completes](Reading::complete) it. No two reads that are under way have the same name.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.state.id()
    }

    /// How the read of the page ended; `None` while it is under way. After `Ok` the access is to be tried again. An error is that of the page
    /// itself: a fault that waits for a page behind the one that failed tries again, and begins a read with its own page.
    ///
    /// A kernel that puts the thread to sleep puts it on its list first, and then looks here.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<(), Errno>> {
        let outcome = self.state.outcome.load(Ordering::Acquire);
        let (pages, errno) = (outcome & u64::from(u32::MAX), outcome >> ERRNO_SHIFT);
        (outcome != UNDER_WAY).then(|| {
            let failed = self.state.first.load(Ordering::Relaxed) + pages;
            #[cfg(shuttle)]
            assert!(
                errno != 0 || self.index.is_none_or(|at| at < failed && at + pages >= failed),
                "a share of the read of other pages"
            );
            match Errno::of_number(errno as i32) {
                _ if errno == 0 || self.index != Some(failed) => Ok(()),
                Errno::EAGAIN => Ok(()),
                errno => Err(errno),
            }
        })
    }

    /// The same read, of which no error is one.
    pub(crate) fn for_any(mut self) -> Self {
        self.index = None;
        self
    }
}

/// Pages that a store took along to read them. It ends with [`complete`](Self::complete); one that is dropped ends as if nothing could
/// be read (`EIO`), once a CPU finds the time ([`Cpu::end_dropped`](crate::Cpu::end_dropped)). As with any error, faults on the first page
/// are told of it, and faults on the others begin a read of their own.
#[derive(Debug)]
pub struct Reading {
    unread: Option<Unread>,
    place: Place,
}

/// What there is to a read.
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
            self.place.leave(|| Left::Reading(unread));
        }
    }
}

impl Reading {
    /// The name of the read, by which those who wait for it know it: [`PendingRead::id`].
    #[must_use]
    pub fn id(&self) -> u64 {
        self.unread.as_ref().map_or(0, |unread| unread.state.id())
    }

    /// The number of the first page in the file.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.unread.as_ref().map_or(0, |unread| unread.first)
    }

    /// How many bytes of the file are wanted.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts().1
    }

    /// The memory of the pages, in order, for a device.
    #[must_use]
    pub fn buffers(&self) -> &[Buffer] {
        self.parts().0
    }

    pub(super) fn parts(&self) -> (&[Buffer], usize) {
        self.unread.as_ref().map_or((&[], 0), |unread| (&unread.pages, unread.bytes))
    }

    /// The memory of the pages with the bytes that are wanted, in order. It is there as long as the subsystem, which `cpu` borrows.
    ///
    /// # Panics
    /// Where `cpu` is of another subsystem.
    pub fn memory<'a, M: Machine>(
        &'a mut self,
        cpu: &'a Cpu<'_, M>,
    ) -> impl Iterator<Item = &'a mut [u8]> {
        if let Some(unread) = &self.unread {
            unread.object.check_vm(cpu);
        }
        let (pages, bytes) = self.parts();
        // SAFETY: the frames are the read's alone until it ends, which takes it; and the machine is there during `'a`.
        wanted(pages, bytes).map(|(at, len)| unsafe { core::slice::from_raw_parts_mut(at, len) })
    }

    /// Ends the read: `read` says how many bytes there were, as what [`BackingStore::read`](super::BackingStore::read) returns. The caller then
    /// wakes the threads that wait for it, by its [`id`](Self::id).
    ///
    /// # Panics
    /// Where `cpu` is of another subsystem. The read then ends as one that is dropped.
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
        // Whole pages alone are there after an error; otherwise what is missing is zeros.
        let good = if errno.is_some() { done / PAGE_SIZE as usize } else { pages.len() };
        let mut errno = errno;
        for (at, page) in pages.iter().enumerate() {
            let there = at < good;
            if there {
                let len = done.saturating_sub(at * PAGE_SIZE as usize).min(PAGE_SIZE as usize);
                // SAFETY: the frame is the read's alone until its entry is present.
                unsafe { page.at.add(len).write_bytes(0, PAGE_SIZE as usize - len) };
            }
            let ended = object.end_read(cpu, first + at as u64, page.frame, there);
            if at == good && !ended && !lost(Mutant::OverwrittenIsNoError) {
                // Whoever waits for it looks again.
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

/// Which pages are read together with one that is needed, as far as they are empty.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reach {
    /// Those of the block that the store prefers, and at least those up to this one.
    Block(u64),
    /// Those behind it up to this one, and no other.
    Only(u64),
}

/// How it stands with a page that is needed.
pub(crate) enum Fetched {
    /// It is there; or was, a moment ago.
    There,
    /// It is being read.
    Pending(PendingRead),
}

/// Why a page cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lack {
    Beyond,
    /// No frame is left.
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
    /// Makes sure that the page at `index` is there or being read. If a read begins, it is one of the pages in `reach`. The caller
    /// holds no lock and is in no section.
    ///
    /// # Errors
    /// Why there is no page.
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
            let seen = protocol::look(slot, cpu);
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
                    // The allocator has frames again: the prepared one goes back to it.
                    core::mem::take(&mut *prepared).finish(cpu);
                }
                Err(lack) => return Err(lack),
            }
        }
    }

    /// The last-level table of the page at `index`, made if it was not there, with a wait for the frame if need be. The caller holds no
    /// lock and is in no section.
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

    /// Begins to read those of `pages` that are not there, in runs as large as the store takes: `POSIX_FADV_WILLNEED`, `readahead`, or a
    /// kernel's own policy. Of an object without a store, nothing is to be read. A store that reads at once has read them when this
    /// returns; others complete later.
    ///
    /// # Errors
    /// The store's first error, or `ENOMEM`. The pages before are there or being read.
    pub fn read_ahead<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: Range<u64>) -> Result<(), Errno> {
        let reach = Reach::Block(pages.end);
        self.read_missing(cpu, pages, reach)
    }

    /// As [`read_ahead`](Self::read_ahead), of no other page besides: for an open file that is read at random (`POSIX_FADV_RANDOM`).
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

    /// Begins to read those of `pages` that are not there, and with them those in `reach`.
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
                    // It was shortened.
                    Err(Lack::Beyond) => break,
                    Err(lack) => return Err(lack.into()),
                }
            }
        }
        Ok(())
    }

    /// A share of the read that is under way for the page at `index`, whose entry `slot` was `seen`, hidden. `None`: look again.
    fn join<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        slot: &AtomicU64,
        seen: Entry,
        index: u64,
    ) -> Option<PendingRead> {
        let free = lost(Mutant::JoinHoldsEntry);
        let held = if free { None } else { Some(protocol::take(slot, seen, cpu).ok()?) };
        let state = cpu.vm().frames.meta(seen.frame()).anchor.load(Ordering::Relaxed);
        // SAFETY: while the entry is hidden, its read has a share, which `begin` has put into the metadata; it gives that up after it has
        // had this entry, which is held.
        let state = NonNull::new(state as *mut ()).map(|raw| unsafe { Shared::clone_raw(raw) });
        if let Some(held) = held {
            held.revert();
        }
        state.map(|state| PendingRead { state, index: Some(index) })
    }

    /// How many pages the store prefers to read at once.
    pub(crate) fn block(&self) -> u64 {
        let pages = self.store().map_or(1, |store| store.preferred_pages());
        pages.clamp(1, MOST_PAGES) as u64
    }

    /// The rounded log2 of that.
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
        // The others are dispensable.
        let more = |at| page(at).ok().flatten();
        // The list has the capacity of the run.
        (run.start..index).rev().map_while(more).all(|page| pages.push(page));
        pages.reverse();
        let first = index + 1 - pages.len() as u64;
        (index + 1..run.end).map_while(more).all(|page| pages.push(page));
        Ok(Some(self.reading(place, state, first, pages)))
    }

    /// The read of `pages`, whose entries are hidden, from page `first` of the object on.
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

    /// The pages that are read together with the one at `index`: in its table, empty at a glance, and in `reach`.
    fn run_around(&self, slots: &[AtomicU64; ENTRIES], index: u64, reach: Reach) -> Range<u64> {
        let table = index - index % ENTRIES as u64;
        let most = index + MOST_PAGES as u64;
        let (start, end) = match reach {
            Reach::Only(end) => (index, end.min(most)),
            Reach::Block(end) => {
                let block = self.block();
                // Where a page could not be read, each is read from itself on: it hears of its own errors alone.
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

    /// Makes the empty entry of the page at `index` hidden, with `frame`, a new one. `None`: it is not empty any more.
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
        let frame = cpu.vm().frames.publish(frame, Use::Shared, state, index);
        cpu.begin_lives(self, index, frame);
        held.commit(Entry::leaf(frame).with_hidden(true));
        Ok(Some(Buffer { frame, at: cpu.vm().machine().frame_bytes(frame) }))
    }

    /// Takes the entry of the page at `index`, of which there is none: it was `seen` empty or hidden. `None`: it is another by now, or the page is
    /// being cut off.
    pub(super) fn take_absent<'a, M: Machine>(
        &self,
        cpu: &'a Cpu<'_, M>,
        slot: &'a AtomicU64,
        index: u64,
        seen: Entry,
    ) -> Result<Option<Taken<'a>>, Lack> {
        let Ok(held) = protocol::take(slot, seen, cpu) else { return Ok(None) };
        // The length is the sequence; and see `length` for what is being cut off.
        let beyond = index >= self.pages() && !lost(Mutant::ReadLooksAgain);
        if beyond || self.is_cut(index) && !lost(Mutant::ReadLooksForCut) {
            held.revert();
            return if beyond { Err(Lack::Beyond) } else { Ok(None) };
        }
        Ok(Some(held))
    }

    /// Step 2 of the protocol, and step 3 where the store has ended the read.
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
        // A read takes many times as long.
        cpu.flush_if_asked();
        let read = store.read(&mut run);
        if let Some(reading) = run.reading {
            reading.complete(cpu, read);
        } else {
            // Whether it was dropped at once.
            cpu.end_dropped();
        }
        match pending.outcome() {
            None => Ok(Fetched::Pending(pending)),
            Some(Ok(())) => Ok(Fetched::There),
            Some(Err(errno)) => Err(Lack::Store(errno)),
        }
    }
}

/// The bit of a page, and of all others of its table, among 64.
pub(super) const fn table_bit(index: u64) -> u64 {
    1 << (index / ENTRIES as u64 % 64)
}

impl Object {
    /// Notes that the page at `index` could not be read.
    fn note_failed(&self, index: u64) {
        if let Some(stored) = &self.stored {
            stored.failed.fetch_or(table_bit(index), Ordering::Relaxed);
        }
    }

    /// Whether a page near `index` could not be read once.
    pub(crate) fn has_failed(&self, index: u64) -> bool {
        let failed = |stored: &Stored| stored.failed.load(Ordering::Relaxed);
        self.stored.as_deref().map_or(0, failed) & table_bit(index) != 0
    }

    /// Step 3 of the protocol for the page at `index`, which was read into `frame`, or was not read. Returns whether it still was the read's.
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
                // Who joins the read has the entry for a moment.
                if protocol::look(slot, cpu) != hidden {
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
            // SAFETY: the reference that publishing made, of which no entry is left: it never was a mapping.
            unsafe { cpu.put_unmapped(frame) };
        }
        named
    }
}
