//! A region: pages that each process maps at one of three addresses.
//!
//! The three addresses belong to the region alone, so an address shows data of the region or has no
//! mapping. A thread that accesses a page tries the three addresses. One thread at a time moves the
//! pages of a region; in the meantime, other threads access, protect and evict the pages, and fork
//! the process.

use super::plan::RegionKind;
use super::words::{Contents, Look, Reader};
use super::world::File;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::SeqCst};
use faultless::{Backing, Cpu, Error, MapFlags, PAGE_SIZE, Prot, Space, VirtRange};
use faultless_native::{NativeCpu, NativeMachine, Signal};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// Places of each region.
pub const SLOTS: usize = 3;

/// The state of one page of a region.
#[derive(Debug, Default)]
struct Seat {
    /// Odd if the page may be mapped nowhere.
    hole: AtomicU64,
    /// The last known slot of the page.
    slot: AtomicU8,
}

/// A region of one process.
#[derive(Debug)]
pub struct Region {
    pub kind: RegionKind,
    pub contents: Arc<Contents>,
    seats: Vec<Seat>,
    bases: [u64; SLOTS],
    /// Odd while pages move.
    moves: AtomicU64,
    mover: Mutex<()>,
}

/// The result of an access, with or without reaching the page.
#[derive(Debug, PartialEq, Eq)]
pub enum Reached<R> {
    Done(R),
    /// The page may be unmapped, or has moved too often.
    Missing,
    /// The protection forbids the access.
    Forbidden,
    Signal(Signal),
}

impl Region {
    /// Region `number`, which is mapped nowhere.
    pub fn new(number: usize, kind: RegionKind, contents: Arc<Contents>, near: bool) -> Self {
        let len = contents.len() as u64 * PAGE_SIZE;
        let (start, apart) = match near {
            // Neighbours in the same page tables, with a page between.
            true => (0x2000_0000 + number as u64 * (4 * len), len + PAGE_SIZE),
            // A page has a different index in its table in each slot.
            false => (0x2000_0000 + number as u64 * (16 << 30), (4 << 30) + 37 * PAGE_SIZE),
        };
        let bases = core::array::from_fn(|slot| start + slot as u64 * apart);
        let seat = || Seat { hole: 1.into(), slot: 0.into() };
        let seats = (0..contents.len()).map(|_| seat()).collect();
        Self { kind, contents, seats, bases, moves: 0.into(), mover: Mutex::new(()) }
    }

    /// The region in a child; `there` is whether each page has certainly been mapped at the fork.
    pub fn child(&self, contents: Arc<Contents>, there: impl Iterator<Item = bool>) -> Self {
        let seat = |(seat, there): (&Seat, bool)| Seat {
            hole: u64::from(!there).into(),
            slot: seat.slot.load(SeqCst).into(),
        };
        let seats = self.seats.iter().zip(there).map(seat).collect();
        let Self { kind, bases, .. } = *self;
        Self { kind, contents, seats, bases, moves: 0.into(), mover: Mutex::new(()) }
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.seats.len()
    }

    /// Returns whether the pages are private.
    pub fn is_private(&self) -> bool {
        !matches!(self.kind, RegionKind::Shared(_))
    }

    /// Returns the number of the mapped file.
    pub fn file(&self) -> Option<usize> {
        match self.kind {
            RegionKind::Anonymous => None,
            RegionKind::Shared(file) | RegionKind::Private(file) => Some(file),
        }
    }

    pub fn addr(&self, slot: usize, page: usize) -> u64 {
        self.bases[slot] + page as u64 * PAGE_SIZE
    }

    /// The addresses of `pages` in `slot`.
    pub fn range(&self, slot: usize, pages: &Range<usize>) -> VirtRange {
        VirtRange::new(self.addr(slot, pages.start), self.addr(slot, pages.end))
    }

    /// Returns the last known slot of `page`.
    pub fn slot(&self, page: usize) -> usize {
        self.seats[page].slot.load(SeqCst).into()
    }

    /// Returns the state changed by a hole of `page`, and whether there may be a hole.
    pub fn hole(&self, page: usize) -> (u64, bool) {
        let hole = self.seats[page].hole.load(SeqCst);
        (hole, !hole.is_multiple_of(2))
    }

    /// The states of all holes, for a fork.
    pub fn holes(&self) -> Vec<u64> {
        self.seats.iter().map(|seat| seat.hole.load(SeqCst)).collect()
    }

    /// Begins or ends a hole of `pages`.
    pub fn toggle_holes(&self, pages: Range<usize>) {
        for seat in &self.seats[pages] {
            seat.hole.fetch_add(1, SeqCst);
        }
    }

    /// Runs `access` at the present address of `page`.
    ///
    /// # Errors
    /// The page is unmapped, but must be mapped.
    pub fn access<R>(
        &self,
        cpu: &NativeCpu<'_, '_>,
        page: usize,
        access: impl Fn(u64) -> Result<R, Signal>,
    ) -> Result<Reached<R>, String> {
        for _ in 0..64 {
            let (moves, hole) = (self.moves.load(SeqCst), self.hole(page));
            let first = self.slot(page);
            for slot in (first..SLOTS).chain(0..first) {
                match access(self.addr(slot, page)) {
                    Ok(done) => {
                        self.seats[page].slot.store(slot as u8, SeqCst);
                        return Ok(Reached::Done(done));
                    }
                    Err(Signal::Segv { mapped: false, .. }) => {}
                    Err(Signal::Segv { mapped: true, .. }) => return Ok(Reached::Forbidden),
                    Err(signal) => return Ok(Reached::Signal(signal)),
                }
            }
            if hole.1 || self.hole(page) != hole {
                return Ok(Reached::Missing);
            }
            if moves % 2 == 0 && self.moves.load(SeqCst) == moves {
                return Err(format!("page {page} of {:?} is mapped nowhere", self.kind));
            }
            cpu.poll();
        }
        Ok(Reached::Missing)
    }

    /// Loads the word of `writer` and checks it. Returns whether the word was there.
    ///
    /// # Errors
    /// The value is wrong, or the page is lost.
    pub fn load(
        &self,
        cpu: &NativeCpu<'_, '_>,
        page: usize,
        writer: usize,
        reader: Reader,
    ) -> Result<Reached<Look>, String> {
        let loaded = self.access(cpu, page, |addr| {
            let look = self.contents.look(page, writer);
            Ok((look, cpu.load::<u64>(addr + 8 * writer as u64)?))
        })?;
        Ok(match loaded {
            Reached::Done((look, found)) => {
                self.contents.judge(page, writer, look, found, reader)?;
                Reached::Done(look)
            }
            Reached::Missing => Reached::Missing,
            Reached::Forbidden => Reached::Forbidden,
            Reached::Signal(signal) => Reached::Signal(signal),
        })
    }

    /// Stores a new value to the word of `writer`.
    ///
    /// # Errors
    /// The page is lost.
    pub fn store(
        &self,
        cpu: &NativeCpu<'_, '_>,
        page: usize,
        writer: usize,
    ) -> Result<Reached<()>, String> {
        let attempt = self.contents.begin(page, writer);
        let store = |addr| cpu.store(addr + 8 * writer as u64, attempt.value);
        let stored = self.access(cpu, page, store)?;
        self.contents.finish(page, writer, attempt, stored == Reached::Done(()));
        Ok(stored)
    }

    /// Makes the caller the only thread that moves pages; returns `None` if another thread does.
    pub fn mover(&self) -> Option<Mover<'_>> {
        let guard = self.mover.try_lock().ok()?;
        Some(Mover { region: self, _guard: guard })
    }
}

/// The right to move the pages of a region.
pub struct Mover<'r> {
    region: &'r Region,
    _guard: MutexGuard<'r, ()>,
}

impl Mover<'_> {
    /// Finds the slot of `page` from the mappings of the space. Returns `None` if the page has no
    /// slot, or more than one.
    ///
    /// # Errors
    /// The page is unmapped, but must be mapped; or it is mapped twice.
    pub fn locate(
        &self,
        cpu: &Cpu<'_, NativeMachine>,
        space: &Space<NativeMachine>,
        page: usize,
    ) -> Result<Option<usize>, String> {
        let region = self.region;
        let mapped = |slot: &usize| space.is_mapped(cpu, region.range(*slot, &(page..page + 1)));
        let mut slots = (0..SLOTS).filter(mapped);
        let (first, second) = (slots.next(), slots.next());
        if let Some(second) = second {
            // A call that keeps the old address may have failed in the middle.
            if region.hole(page).1 {
                return Ok(None);
            }
            return Err(format!("page {page} is mapped in slots {first:?} and {second}"));
        }
        match first {
            Some(slot) => region.seats[page].slot.store(slot as u8, SeqCst),
            None if !region.hole(page).1 => {
                return Err(format!("page {page} of {:?} has no mapping", region.kind));
            }
            None => {}
        }
        Ok(first)
    }

    /// Returns at most `most` pages from `page` on that are mapped in one slot, and the slot.
    ///
    /// # Errors
    /// As [`locate`](Self::locate).
    pub fn run(
        &self,
        cpu: &Cpu<'_, NativeMachine>,
        space: &Space<NativeMachine>,
        page: usize,
        most: usize,
    ) -> Result<Option<(usize, Range<usize>)>, String> {
        let end = self.region.len().min(page + most);
        let solid = |page: usize| -> Result<_, String> {
            Ok(self.locate(cpu, space, page)?.filter(|_| !self.region.hole(page).1))
        };
        let Some(slot) = solid(page)? else { return Ok(None) };
        let mut last = page + 1;
        while last < end && solid(last)? == Some(slot) {
            last += 1;
        }
        Ok(Some((slot, page..last)))
    }

    /// Moves pages by `call`, and finds all `pages` again.
    ///
    /// # Errors
    /// A page is lost.
    pub fn moving<R>(
        &self,
        cpu: &Cpu<'_, NativeMachine>,
        space: &Space<NativeMachine>,
        pages: Range<usize>,
        call: impl FnOnce() -> R,
    ) -> Result<R, String> {
        self.region.moves.fetch_add(1, SeqCst);
        let result = call();
        for page in pages {
            self.locate(cpu, space, page)?;
        }
        self.region.moves.fetch_add(1, SeqCst);
        Ok(result)
    }

    /// Unmaps `pages`, which have holes, in all slots.
    pub fn clear(
        &self,
        cpu: &Cpu<'_, NativeMachine>,
        space: &Space<NativeMachine>,
        pages: &Range<usize>,
    ) -> Result<(), Error> {
        for slot in 0..SLOTS {
            let range = self.region.range(slot, pages);
            space.munmap(cpu, range.start, range.len())?;
        }
        Ok(())
    }

    /// Maps `pages`, which are mapped nowhere, in `slot`.
    pub fn map(
        &self,
        cpu: &Cpu<'_, NativeMachine>,
        space: &Space<NativeMachine>,
        files: &[File],
        slot: usize,
        pages: &Range<usize>,
    ) -> Result<(), Error> {
        let region = self.region;
        let range = region.range(slot, pages);
        let flags = MapFlags::FIXED | MapFlags::NORESERVE;
        let (at, len) = (range.start, range.len());
        let kind = match region.is_private() {
            true => MapFlags::PRIVATE,
            false => MapFlags::SHARED,
        };
        match region.file() {
            None => space.mmap(cpu, at, len, Prot::RW, flags | kind | MapFlags::ANONYMOUS)?,
            Some(file) => {
                let object = &files[file].object;
                let backing = Backing { object, first: pages.start as u64, may_write: true };
                space.mmap_object(cpu, at, len, Prot::RW, flags | kind, backing)?
            }
        };
        for seat in &region.seats[pages.clone()] {
            seat.slot.store(slot as u8, SeqCst);
        }
        Ok(())
    }
}
