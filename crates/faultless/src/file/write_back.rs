//! Write-back of dirty pages of a file to its [store](super::store).
//!
//! # Dirty pages
//!
//! The dirty bit of a page's entry in the object means that the store does not have the page's
//! current bytes. No MMU uses these entries, so only the subsystem sets the bit:
//!
//! - a fault that makes an entry of a shared mapping writable, while it holds this entry (*write
//!   notification*: such an entry is not writable before the first store);
//! - a call of the kernel, after storing to the page ([`write_page`](Shared::write_page)), while it
//!   has a reference.
//!
//! # Write-back of a page
//!
//! 1. The dirty bit is cleared, and a reference taken.
//! 2. The page is write-protected in every space that may map it
//!    ([`Space::write_protect`](crate::Space::write_protect)), and flushed.
//! 3. The store writes the page.
//! 4. If the write fails, the dirty bit is set again.
//!
//! A program's store before step 2 is included in the write of step 3. A later store faults, and
//! sets the dirty bit. A fault that has set the bit before step 1 holds the entry until it has made
//! it writable; step 2 waits for the entry, so it finds the entry writable and protects it. If step
//! 2 came before the fault took the entry, the bit is set after step 1. So no store is lost: each
//! is included in the write, or leaves the page dirty.
//!
//! A CPU that writes back takes the object's [`Turn`], so that older bytes are not written after
//! newer ones.

use super::object::{Object, Stored};
use super::root::Top;
use super::store::{BackingStore, Buffer, MOST_PAGES, WriteRun};
use crate::addr::{FrameNumber, PAGE_SHIFT, PAGE_SIZE};
use crate::error::{Errno, OutOfMemory};
use crate::heap::{Bounded, Shared};
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, StoreCall, StoreTurn};
use crate::sync::wait::{Wait, until};
use crate::table::Entry;
use crate::table::node;
use crate::table::protocol;
use crate::table::range::Leaves;
use crate::vm::Cpu;
use core::cell::UnsafeCell;
use core::ops::Range;

/// The exclusive right to change the store, and the list of the pages being written. A CPU holds
/// the turn while the store works, so other CPUs [`Wait`] for it.
#[derive(Debug)]
pub(super) struct Turn {
    taken: AtomicBool,
    /// Allocated with the object: write-back needs no heap, so no data is lost if the heap is
    /// exhausted.
    run: UnsafeCell<Bounded<Buffer>>,
}

// SAFETY: the list is accessed only through an `InTurn`, of which there is one at a time.
unsafe impl Sync for Turn {}

/// A [`Turn`] that is taken; the drop ends it.
pub(super) struct InTurn<'a> {
    turn: &'a Turn,
    _mark: order::Mark<'a>,
}

impl Turn {
    /// Returns a turn for runs of the number of pages preferred by `store`.
    pub(super) fn try_new(store: &dyn BackingStore) -> Result<Self, OutOfMemory> {
        let run = Bounded::try_new(store.preferred_pages().clamp(1, MOST_PAGES))?;
        Ok(Self { taken: AtomicBool::new(false), run: UnsafeCell::new(run) })
    }

    pub(super) fn take<'a>(&'a self, wait: &'a impl Wait) -> InTurn<'a> {
        order::before::<StoreTurn>(wait);
        until(wait, || self.is_taken_now() || lost(Mutant::TurnExcludes));
        InTurn { turn: self, _mark: order::hold::<StoreTurn>(wait) }
    }

    /// As [`take`](Self::take), if no other CPU has the turn.
    fn try_take<'a>(&'a self, wait: &'a impl Wait) -> Option<InTurn<'a>> {
        let taken = self.is_taken_now();
        taken.then(|| InTurn { turn: self, _mark: order::hold::<StoreTurn>(wait) })
    }

    /// Tries to take the turn; returns whether it succeeded.
    fn is_taken_now(&self) -> bool {
        let order = (Ordering::Acquire, Ordering::Relaxed);
        self.taken.compare_exchange(false, true, order.0, order.1).is_ok()
    }
}

impl InTurn<'_> {
    /// Returns the list of the pages being written.
    fn run(&mut self) -> &mut Bounded<Buffer> {
        // SAFETY: this value has the only access to the turn's list, and is borrowed mutably.
        unsafe { &mut *self.turn.run.get() }
    }
}

impl Drop for InTurn<'_> {
    fn drop(&mut self) {
        self.turn.taken.store(false, Ordering::Release);
    }
}

/// The errors of write-back: each is reported once to every open file, as on Linux. A word: the
/// number of errors, above the number of the last error.
#[derive(Debug, Default)]
pub(super) struct WriteErrors(AtomicU64);

const COUNT_SHIFT: u32 = 16;

impl WriteErrors {
    /// Records an error. The caller has the object's turn, so no other CPU records one
    /// concurrently.
    fn note(&self, errno: Errno) {
        let number = u64::from(errno.number().unsigned_abs());
        let count = (self.0.load(Ordering::Relaxed) >> COUNT_SHIFT) + 1;
        self.0.store(count << COUNT_SHIFT | number, Ordering::Release);
    }
}

/// The write-back errors that an open file has already received. A new value of a just opened
/// object includes all earlier errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeenErrors(u64);

/// The result of marking a page dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The page is dirty.
    Done,
    /// Another CPU has its entry in the object for a moment.
    Busy,
    /// The page has left the object.
    Left,
}

impl Object {
    /// Returns the state of a newly opened file, which has received all earlier errors.
    pub fn errors_seen(&self) -> SeenErrors {
        let errors = |stored: &Stored| stored.errors.0.load(Ordering::Acquire);
        SeenErrors(self.stored.as_deref().map_or(0, errors))
    }

    /// Returns the last write-back error, if there was one since `seen`, and updates `seen`: the
    /// result of `fsync` and `close`.
    pub fn write_error(&self, seen: &mut SeenErrors) -> Option<Errno> {
        let now = self.errors_seen();
        let number = (now.0 & ((1 << COUNT_SHIFT) - 1)) as i32;
        (core::mem::replace(seen, now) != now).then(|| Errno::of_number(number))
    }

    /// Marks the page at `index` dirty, if it still is the one in `frame`.
    pub(super) fn mark_dirty<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64, frame: FrameNumber) {
        if let Some(slot) = self.slot(cpu, index) {
            mark(cpu, slot, frame);
        }
    }

    /// Marks the page of `slot`, an entry of an object with a store, dirty, if it still is the page
    /// in `frame`. Does not wait, because the caller holds an entry.
    pub(crate) fn try_mark_dirty(slot: &AtomicU64, frame: FrameNumber) -> Mark {
        if lost(Mutant::FaultMarksDirty) {
            return Mark::Done;
        }
        loop {
            let now = node::load(slot);
            if now.is_locked() {
                return Mark::Busy;
            }
            if !now.is_present() || now.frame() != frame {
                return Mark::Left;
            }
            let order = (Ordering::AcqRel, Ordering::Relaxed);
            if now.is_dirty() {
                return Mark::Done;
            }
            if slot.compare_exchange(now.0, now.dirty().0, order.0, order.1).is_ok() {
                return Mark::Done;
            }
        }
    }

    /// Returns whether the page at `index` is dirty: stored to, and not written back since. Waits
    /// for a CPU that evicts or moves the page.
    pub fn is_dirty<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> bool {
        self.check_vm(cpu);
        self.is_stored() && self.slot(cpu, index).is_some_and(|slot| settled(cpu, slot).is_dirty())
    }

    /// Drops the pages of `range` that are neither mapped, in use nor dirty; they are read again
    /// when needed (`POSIX_FADV_DONTNEED`). Returns their number. An object without a store drops
    /// no page.
    pub fn drop_clean<M: Machine>(&self, cpu: &Cpu<'_, M>, range: Range<u64>) -> u64 {
        self.check_vm(cpu);
        let mut dropped = 0;
        if !self.is_stored() {
            return 0;
        }
        // SAFETY: the object's tables are unlinked only when no share is left.
        unsafe {
            each_page(cpu, self.top(), range, |_, slot| {
                let seen = node::load(slot);
                let clean = !seen.is_dirty() || lost(Mutant::DropsDirty);
                if !seen.is_present() || seen.is_locked() || !clean {
                    return;
                }
                let Ok(held) = protocol::take(slot, seen, cpu) else { return };
                // There is no reference except the object's, and from now on no CPU can take one.
                let meta = cpu.vm().frames.meta(seen.frame());
                let sole = if lost(Mutant::DropsSole) && meta.refs() == 1 {
                    meta.put_ref();
                    true
                } else {
                    meta.put_sole()
                };
                if sole {
                    held.commit(Entry::NONE);
                    // SAFETY: the last reference was the object's, and no entry names the frame.
                    // References of mappings were dropped after a flush.
                    let frame = cpu.vm().frames.reclaim(seen.frame()).assume_flushed();
                    cpu.free(frame);
                    dropped += 1;
                } else {
                    held.revert();
                }
            });
        }
        dropped
    }
}

impl Shared<Object> {
    /// Writes the dirty pages of `pages` back to the store, in order, and returns their number.
    /// `protect` must write-protect the pages of the given range in every space that may map the
    /// object ([`Space::write_protect`](crate::Space::write_protect)). Afterwards the store
    /// contains all stores from before the call, unless it is
    /// [read-only](BackingStore::is_read_only). An object without a store has no dirty pages.
    ///
    /// # Errors
    /// The first error of the store. Pages that were not written stay dirty; the remaining pages
    /// are still written. Open files also receive the error ([`write_error`](Object::write_error)).
    pub fn write_back<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        pages: Range<u64>,
        protect: impl FnMut(Range<u64>),
    ) -> Result<u64, Errno> {
        self.check_vm(cpu);
        match &self.stored {
            Some(stored) => stored.write_back(cpu, self.top(), pages, protect),
            None => Ok(0),
        }
    }

    /// Makes the [written back](Self::write_back) data durable.
    ///
    /// # Errors
    /// The store's error.
    pub fn sync(&self) -> Result<(), Errno> {
        self.store().map_or(Ok(()), BackingStore::sync)
    }

    /// Marks the present pages of `pages` dirty, after a device has stored to them. For an object
    /// with a read-only store the pages are charged, even beyond the limit.
    pub fn note_stored<M: Machine>(&self, cpu: &Cpu<'_, M>, pages: Range<u64>) {
        self.check_vm(cpu);
        if self.is_stored() {
            // SAFETY: the object's tables are unlinked only when no share is left.
            unsafe {
                each_page(cpu, self.top(), pages, |_, slot| {
                    if self.charged {
                        self.charge_always(cpu, slot);
                    } else {
                        let mark = |now: Entry| if now.is_present() { now.dirty() } else { now };
                        protocol::wait_and_replace(slot, cpu, mark);
                    }
                });
            }
        }
    }
}

impl Stored {
    /// See [`Shared::write_back`]; `top` is the root of the object's tables.
    pub(super) fn write_back<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        top: Top,
        pages: Range<u64>,
        mut protect: impl FnMut(Range<u64>),
    ) -> Result<u64, Errno> {
        if self.store.is_read_only() {
            return Ok(0);
        }
        let mut turn = self.turn.take(cpu);
        let (mut at, mut written, mut first_error) = (pages.start, 0, Ok(()));
        while at < pages.end {
            let run = turn.run();
            run.clear();
            // SAFETY: the object's tables are unlinked only when no share is left.
            let first = unsafe { gather(cpu, top, at..pages.end, run) };
            if run.is_empty() {
                break;
            }
            at = first + run.len() as u64;
            let run = Unwritten { cpu, top, first, pages: run, written: 0 };
            if !lost(Mutant::WriteBackProtects) {
                protect(first..at);
            }
            let (good, error) = self.write_cleaned(run);
            written += good;
            first_error = first_error.and(error);
        }
        first_error.map(|()| written)
    }

    /// Steps 3 and 4 for a run of pages that were marked clean. Returns how many pages were
    /// written. The caller has the turn.
    fn write_cleaned<M: Machine>(&self, mut run: Unwritten<'_, '_, M>) -> (u64, Result<(), Errno>) {
        let cpu = run.cpu;
        let done = self.write_run(cpu, run.first, run.pages);
        run.written = done.map_or_else(|(good, _)| good, |()| run.pages.len());
        if let Err((_, errno)) = done {
            self.errors.note(errno);
        }
        let good = run.written as u64;
        drop(run);
        cpu.state().counts.add(Counter::PageWritten, good);
        (good, done.map_err(|(_, errno)| errno))
    }

    /// Lets the store write the run that begins with page `first`. An error includes the number of
    /// pages written before.
    fn write_run<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        first: u64,
        run: &[Buffer],
    ) -> Result<(), (usize, Errno)> {
        let bytes = self.bytes.load(Ordering::Acquire).saturating_sub(first << PAGE_SHIFT);
        let bytes = bytes.min((run.len() as u64) << PAGE_SHIFT) as usize;
        if bytes == 0 {
            return Ok(());
        }
        let pages = &run[..bytes.div_ceil(PAGE_SIZE as usize)];
        order::before::<StoreCall>(cpu);
        cpu.count(Counter::StoreWrite);
        let unwinds = Unwinds(&self.errors);
        let written = self.store.write(&WriteRun { first, bytes, pages });
        core::mem::forget(unwinds);
        written.map_err(|error| (error.done.min(bytes) / PAGE_SIZE as usize, error.errno))
    }
}

/// A run of pages starting at page `first`, marked clean, with a reference to each. The drop marks
/// the unwritten pages dirty again, and drops the references. So no store is lost if the store or
/// the caller's closure panics.
struct Unwritten<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    /// The root of the object's tables.
    top: Top,
    first: u64,
    pages: &'a [Buffer],
    /// How many of the pages the store has written.
    written: usize,
}

impl<M: Machine> Drop for Unwritten<'_, '_, M> {
    fn drop(&mut self) {
        for (at, page) in self.pages.iter().enumerate() {
            if at >= self.written && !lost(Mutant::FailedStaysDirty) {
                mark_at(self.cpu, self.top, self.first + at as u64, page.frame);
            }
            // SAFETY: drops the reference held during the write, which never was a mapping.
            unsafe { self.cpu.put_unmapped(page.frame) };
        }
    }
}

/// A call of a store for a write. Its drop, after a panic of the store, reports an error to open
/// files.
struct Unwinds<'a>(&'a WriteErrors);

impl Drop for Unwinds<'_> {
    fn drop(&mut self) {
        self.0.note(Errno::EIO);
    }
}

/// Pages, each with its number and its frame, that are marked clean and not yet passed to the
/// store. The drop marks them dirty again. Their owner has a reference to each.
struct Cleaned<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    top: Top,
    pages: &'a [(u64, FrameNumber)],
}

impl<M: Machine> Drop for Cleaned<'_, '_, M> {
    fn drop(&mut self) {
        for (index, frame) in self.pages {
            mark_at(self.cpu, self.top, *index, *frame);
        }
    }
}

/// An object with a store, together with its turn to write, held by a CPU that evicts pages.
pub(crate) struct Laundry<'a> {
    object: &'a Object,
    stored: &'a Stored,
    turn: InTurn<'a>,
}

impl Object {
    /// Takes the turn to write pages of the object, if it has a writable store and no other CPU has
    /// the turn.
    pub(crate) fn try_launder<'a>(&'a self, wait: &'a impl Wait) -> Option<Laundry<'a>> {
        let stored = self.written()?;
        stored.turn.try_take(wait).map(|turn| Laundry { object: self, stored, turn })
    }

    /// As [`try_launder`](Self::try_launder), but waits for the turn. This CPU holds no turn.
    pub(crate) fn launder<'a>(&'a self, wait: &'a impl Wait) -> Option<Laundry<'a>> {
        let stored = self.written()?;
        Some(Laundry { object: self, stored, turn: stored.turn.take(wait) })
    }

    /// Returns the object's store, if it is writable.
    fn written(&self) -> Option<&Stored> {
        self.stored.as_deref().filter(|stored| !stored.store.is_read_only())
    }

    /// Returns whether a CPU has the turn to write pages of the object.
    pub(crate) fn is_laundered(&self) -> bool {
        self.stored.as_deref().is_some_and(|stored| stored.turn.taken.load(Ordering::Relaxed))
    }
}

impl Laundry<'_> {
    /// Writes `pages`, in ascending order with number and frame, to the store: steps 3 and 4. They
    /// are marked clean, and not mapped. The caller has a reference to each page, and keeps it.
    /// Pages that could not be written are dirty again. Returns how many pages were written.
    pub(crate) fn write<M: Machine>(
        &mut self,
        cpu: &Cpu<'_, M>,
        pages: &[(u64, FrameNumber)],
    ) -> u64 {
        let (mut written, top) = (0, self.object.top());
        let mut left = Cleaned { cpu, top, pages };
        while let Some((first, _)) = left.pages.first().copied() {
            let list = self.turn.run();
            list.clear();
            for ((index, frame), next) in left.pages.iter().zip(first..) {
                // The caller already has a reference. A further one is refused only at the maximum
                // count.
                if *index != next
                    || list.is_full()
                    || !cpu.vm().frames.meta(*frame).get_ref_unless_zero()
                {
                    break;
                }
                list.push(Buffer { frame: *frame, at: cpu.vm().machine().frame_bytes(*frame) });
            }
            if list.is_empty() {
                break;
            }
            left.pages = &left.pages[list.len()..];
            // Open files receive the errors.
            let run = Unwritten { cpu, top, first, pages: list, written: 0 };
            written += self.stored.write_cleaned(run).0;
        }
        written
    }
}

/// Marks the page of `slot` dirty, if it still is the one in `frame`.
fn mark<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64, frame: FrameNumber) {
    let is_it = |entry: Entry| entry.is_present() && entry.frame() == frame;
    protocol::wait_and_replace(slot, cpu, |now| if is_it(now) { now.dirty() } else { now });
}

/// Marks page `index` of the object with the root `top` dirty, if it still is the page in `frame`.
fn mark_at<M: Machine>(cpu: &Cpu<'_, M>, top: Top, index: u64, frame: FrameNumber) {
    // SAFETY: the object's tables are unlinked only when no share is left.
    unsafe {
        each_page(cpu, top, index..index + 1, |_, slot| {
            mark(cpu, slot, frame);
        });
    }
}

/// Returns the entry of an object after waiting until no CPU holds it: a CPU that evicts or moves
/// the page may restore the entry unchanged.
fn settled<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64) -> Entry {
    protocol::wait_and_replace(slot, cpu, |now| now).0
}

/// Clears the dirty bit of the page named by `slot`, if set, and takes a reference to the page,
/// which therefore stays until it is written.
fn clean<M: Machine>(cpu: &Cpu<'_, M>, slot: &AtomicU64) -> Option<FrameNumber> {
    loop {
        let seen =
            if lost(Mutant::WriteBackAwaits) { node::load(slot) } else { settled(cpu, slot) };
        if !seen.is_present() || !seen.is_dirty() {
            return None;
        }
        let meta = cpu.vm().frames.meta(seen.frame());
        if !meta.get_ref_unless_zero() {
            // The page has the maximum number of references, or the entry has changed.
            if meta.is_referred_to() && node::load(slot) == seen {
                return None;
            }
            continue;
        }
        let (old, _) =
            protocol::wait_and_replace(
                slot,
                cpu,
                |now| if now == seen { now.undirtied() } else { now },
            );
        if old == seen {
            return Some(seen.frame());
        }
        // SAFETY: drops the reference taken above, which never was a mapping.
        unsafe { cpu.put_unmapped(seen.frame()) };
    }
}

/// Clears the dirty bits of the next run of dirty pages in `pages`, as many as fit into `run`, and
/// takes a reference to each. Returns the number of the first page.
///
/// # Safety
/// As [`Top::visit`].
unsafe fn gather<M: Machine>(
    cpu: &Cpu<'_, M>,
    top: Top,
    pages: Range<u64>,
    run: &mut Bounded<Buffer>,
) -> u64 {
    let mut first = pages.start;
    let mut look = |index: u64, slot: &AtomicU64| -> Result<(), ()> {
        let ends = !run.is_empty() && index != first + run.len() as u64;
        if ends || run.is_full() {
            return Err(());
        }
        let Some(frame) = clean(cpu, slot) else { return Ok(()) };
        if run.is_empty() {
            first = index;
        }
        // The list is not full, as checked above.
        run.push(Buffer { frame, at: cpu.vm().machine().frame_bytes(frame) });
        Ok(())
    };
    let visit = |leaves: Leaves<'_>| {
        if let Leaves::Pages { start, slots } = leaves {
            let pages = start >> PAGE_SHIFT..;
            return pages.zip(slots).try_for_each(|(index, slot)| look(index, slot));
        }
        Ok(())
    };
    // SAFETY: the caller's promise.
    let _ended = unsafe { top.visit(cpu, pages, visit) };
    first
}

/// Calls `each` with the number and the entry of every page of `pages` whose table exists.
///
/// # Safety
/// As [`Top::visit`].
pub(super) unsafe fn each_page<M: Machine>(
    cpu: &Cpu<'_, M>,
    top: Top,
    pages: Range<u64>,
    mut each: impl FnMut(u64, &AtomicU64),
) {
    let visit = |leaves: Leaves<'_>| {
        if let Leaves::Pages { start, slots } = leaves {
            let first = start >> PAGE_SHIFT;
            (first..).zip(slots).for_each(|(index, slot)| each(index, slot));
        }
        Ok::<(), core::convert::Infallible>(())
    };
    // SAFETY: the caller's promise.
    let Ok(()) = unsafe { top.visit(cpu, pages, visit) };
}
