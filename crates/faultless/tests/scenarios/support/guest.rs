//! Programs in spaces: their accesses, executed as by a CPU, and their calls, reported to the
//! oracle.
//!
//! An access is one instruction: check the interrupt line, translate by the TLB or by a walk, move
//! the word. The scheduler may run another CPU between any two steps. The last step, with the
//! checks of the oracle, is atomic.

use super::machine::{Board, Tlb, Translation, step};
use super::oracle::{Oracle, Page, Through, WORDS};
use super::{AT, PAGE, RW, Space, World};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::sync::observe::at_once;
use faultless::{
    Access, Advice, Backing, Cpu, Errno, FaultError, FaultKind, FrameNumber, Machine, MapFlags,
    Object, Prot, RemapFlags, Shared, SpaceId, ThreadStreams, VirtRange,
};
use std::sync::MutexGuard;

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const HUGE: u64 = 1 << 7;
const SPECIAL: u64 = 1 << 10;
const FRAME: u64 = ((1 << 40) - 1) << faultless::PAGE_SHIFT;

/// Returns the frame of an entry.
fn frame_of(entry: u64) -> FrameNumber {
    FrameNumber::from_phys(entry & FRAME).expect("a frame of the machine")
}

/// A program's thread on a CPU.
pub struct Guest<'a> {
    pub world: &'a World,
    pub cpu: &'a Cpu<'a, Board>,
    pub space: &'a Space,
    thread: ThreadStreams,
    /// The ownership of the root table.
    root: u64,
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the program has ended.
            unsafe { self.space.deactivate(self.cpu) };
        }
    }
}

/// An entry of a table, and its value at one moment.
struct Seen {
    slot: *mut u64,
    value: u64,
    /// The ownership of the frame named by the entry.
    owner: u64,
}

impl<'a> Guest<'a> {
    pub fn enter(world: &'a World, cpu: &'a Cpu<'a, Board>, space: &'a Space) -> Self {
        space.activate(cpu);
        let root = at_once(|| world.vm.frame_owner(space.root()));
        Self { world, cpu, space, thread: ThreadStreams::new(), root }
    }

    fn tlb(&self) -> MutexGuard<'_, Tlb> {
        self.world.vm.machine().tlb(self.cpu.id())
    }

    /// Takes a waiting interrupt.
    pub fn poll(&self) {
        if self.world.vm.machine().interrupted(self.cpu.id()) {
            self.cpu.serve_flushes();
        }
    }

    /// Panics, naming the page.
    fn wrong(&self, page: u64, what: &str) -> ! {
        let page = (page as i64 - AT as i64) / PAGE as i64;
        panic!("cpu {}, {:?}, page {page}: {what}", self.cpu.id().0, self.space.id());
    }

    fn owned(&self, page: u64, frame: FrameNumber, owner: u64, what: &str) {
        let now = self.world.vm.frame_owner(frame);
        if now != owner {
            self.wrong(page, &format!("law 1: {frame:?}, {what}, has another owner"));
        }
    }

    /// Loads the word at `addr`, one of the first words of its page.
    ///
    /// # Errors
    /// The program's signal.
    pub fn load(&self, addr: u64) -> Result<u64, FaultError> {
        self.access(addr, None)
    }

    /// Stores to the word at `addr`.
    ///
    /// # Errors
    /// The program's signal.
    pub fn store(&self, addr: u64, value: u64) -> Result<(), FaultError> {
        self.access(addr, Some(value)).map(drop)
    }

    fn access(&self, addr: u64, store: Option<u64>) -> Result<u64, FaultError> {
        let (id, page) = (self.space.id(), addr & !(PAGE - 1));
        let at = (addr - page) as usize / size_of::<u64>();
        let (access, right) = match store {
            Some(_) => (Access::Write, Prot::WRITE),
            None => (Access::Read, Prot::READ),
        };
        loop {
            self.poll();
            let cached = self.tlb().lookup(id, page).filter(|it| store.is_none() || it.stores);
            if let Some(found) = cached.or_else(|| self.walk(page, store.is_some())) {
                // The translation is in hand.
                step();
                return Ok(at_once(|| self.touch(found, at, store)));
            }
            self.tlb().forget(id, page);
            let claim = at_once(|| self.world.oracle().claim((id, page), right));
            let served = self.space.fault(self.cpu, &self.thread, addr, access);
            // A thread that needs a page during its read sleeps until the read ends.
            let pending = served == Ok(FaultKind::Pending);
            if pending && self.cpu.await_read().is_err() {
                return Err(FaultError::Bus);
            }
            if let Err(error) = served {
                if error == FaultError::OutOfMemory && self.world.scarce.load(Ordering::Relaxed) {
                    return Err(error);
                }
                if !self.world.watched {
                    return Err(error);
                }
                let refused = self.world.oracle().refused((id, page), right, claim);
                refused
                    .unwrap_or_else(|what| self.wrong(page, &format!("{error:?}: law 4: {what}")));
                return Err(error);
            }
        }
    }

    /// The access itself, which is atomic.
    fn touch(&self, through: Translation, at: usize, store: Option<u64>) -> u64 {
        let page = through.page;
        self.owned(page, through.frame, through.owner, "which the TLB maps");
        let word = self.world.vm.machine().frame_bytes(through.frame).cast::<u64>();
        assert!(at < WORDS, "the oracle does not track word {at}");
        // SAFETY: a word of the machine's memory; no other thread runs.
        let found = unsafe {
            let word = word.add(at);
            if let Some(value) = store {
                word.write(value);
            }
            word.read()
        };
        if !self.world.watched {
            return found;
        }
        // The old frame of a read-only page remains readable while its flush is deferred; the
        // loaded value counts.
        let moves = self.world.moves.load(Ordering::Relaxed);
        let left = moves && store.is_none() && !through.stores;
        let frame = (!through.zeros).then_some((through.frame, through.owner));
        let frame = if left { Through::Any } else { Through::Frame(frame) };
        let page_here = (self.space.id(), page);
        let checked = self.world.oracle().accessed(page_here, frame, at, store, found);
        checked.unwrap_or_else(|what| self.wrong(page, &format!("law 2: {what}")));
        found
    }

    /// Walks the tables and fills the TLB. Returns `None` if the access faults, or if an entry
    /// changed during the walk.
    fn walk(&self, page: u64, stores: bool) -> Option<Translation> {
        let id = self.space.id();
        let way = self.tlb().way(id, page);
        let (mut table, mut owner, mut level) = match way {
            Some(way) => (way.table, way.owner, 1),
            None => (self.space.root(), self.root, 4),
        };
        while level > 1 {
            let seen = self.entry(page, table, owner, level)?;
            if seen.value & HUGE != 0 {
                return self.walk_huge(page, &seen, stores);
            }
            self.mark(&seen, ACCESSED)?;
            (table, owner) = (frame_of(seen.value), seen.owner);
            level -= 1;
            if level == 1 {
                self.tlb().fill_way(id, page, table, owner);
            }
        }
        let seen = self.entry(page, table, owner, 1)?;
        if stores && seen.value & WRITE == 0 {
            return None;
        }
        self.mark(&seen, if stores { ACCESSED | DIRTY } else { ACCESSED })?;
        step();
        let found = Translation {
            space: id,
            page,
            frame: frame_of(seen.value),
            owner: seen.owner,
            stores: seen.value & WRITE != 0 && (stores || seen.value & DIRTY != 0),
            zeros: seen.value & SPECIAL != 0,
        };
        self.tlb().fill(found);
        Some(found)
    }

    /// The end of a walk at a huge leaf: the TLB gets the page alone.
    fn walk_huge(&self, page: u64, leaf: &Seen, stores: bool) -> Option<Translation> {
        assert!(leaf.value & WRITE == 0, "a huge leaf allows stores");
        if stores {
            return None;
        }
        let first = frame_of(leaf.value);
        assert!(first.0.is_multiple_of(512), "a huge leaf maps {first:?}");
        let frame = FrameNumber(first.0 + (page >> 12 & 511) as u32);
        let owner = self.world.vm.frame_owner(frame);
        // The owner is that of the leaf's time, if the leaf is still there.
        self.mark(leaf, ACCESSED)?;
        at_once(|| {
            // SAFETY: as in `entry`.
            let now = unsafe { AtomicU64::from_ptr(leaf.slot) }.load(Ordering::Acquire);
            (now & !ACCESSED == leaf.value & !ACCESSED).then_some(())
        })?;
        step();
        let found =
            Translation { space: self.space.id(), page, frame, owner, stores: false, zeros: false };
        self.tlb().fill(found);
        Some(found)
    }

    /// Reads the entry for `page` of a table, if it is present.
    fn entry(&self, page: u64, table: FrameNumber, owner: u64, level: u32) -> Option<Seen> {
        step();
        at_once(|| {
            self.owned(page, table, owner, "a table of the walk");
            let index = page >> (12 + 9 * (level - 1)) & 511;
            let slot = self.world.vm.machine().frame_bytes(table).cast::<u64>();
            // SAFETY: inside the frame.
            let slot = unsafe { slot.add(index as usize) };
            // SAFETY: an aligned word of the machine's memory.
            let value = unsafe { AtomicU64::from_ptr(slot) }.load(Ordering::Acquire);
            let owner =
                (value & PRESENT != 0).then(|| self.world.vm.frame_owner(frame_of(value)))?;
            Some(Seen { slot, value, owner })
        })
    }

    /// Sets bits of an entry if it still has the recorded value.
    fn mark(&self, seen: &Seen, bits: u64) -> Option<()> {
        if seen.value & bits == bits {
            return Some(());
        }
        step();
        // SAFETY: as in `entry`.
        let slot = unsafe { AtomicU64::from_ptr(seen.slot) };
        let marked = seen.value | bits;
        slot.compare_exchange(seen.value, marked, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        Some(())
    }

    // Calls

    /// Runs a call on the pages from `start` on, which gives programs the rights `after` (`None`:
    /// unchanged), and empties the pages if it `wipes`.
    pub fn change<R>(
        &self,
        range: (u64, u64),
        after: Option<Prot>,
        wipes: bool,
        call: impl FnOnce() -> R,
    ) -> R {
        self.change_of(self.space.id(), range, after, wipes, call)
    }

    /// As [`change`](Self::change), of pages of space `id`.
    pub fn change_of<R>(
        &self,
        id: SpaceId,
        (start, pages): (u64, u64),
        after: Option<Prot>,
        wipes: bool,
        call: impl FnOnce() -> R,
    ) -> R {
        self.poll();
        let all = (0..pages).map(|page| (id, start + page * PAGE));
        let began: Vec<_> = {
            let mut oracle = self.world.oracle();
            all.map(|page| (page, oracle.begin(page, after, wipes))).collect()
        };
        let result = self.cpu.for_thread(&self.thread, call);
        let mut oracle = self.world.oracle();
        began.into_iter().for_each(|(page, began)| oracle.end(page, after, wipes, began));
        result
    }

    /// Maps private memory exactly there.
    pub fn map(&self, start: u64, pages: u64, prot: Prot) {
        let flags = super::PRIVATE | MapFlags::FIXED;
        self.change((start, pages), Some(prot), true, || {
            self.space.mmap(self.cpu, start, pages * PAGE, prot, flags).unwrap();
        });
    }

    /// Maps private memory, and stores to its pages: 1, 2, …
    pub fn fill(&self, start: u64, pages: u64) {
        self.map(start, pages, RW);
        (0..pages).for_each(|at| self.store(start + at * PAGE, 1 + at).unwrap());
    }

    /// Maps `pages` pages of an object, from its first page on.
    pub fn map_object(
        &self,
        start: u64,
        pages: u64,
        object: &Shared<Object>,
        prot: Prot,
        kind: MapFlags,
    ) {
        let (flags, len) = (kind | MapFlags::FIXED, pages * PAGE);
        self.change((start, pages), Some(prot), false, || {
            let backing = Backing { object, first: 0, may_write: true };
            self.space.mmap_object(self.cpu, start, len, prot, flags, backing).unwrap();
        });
        if kind == MapFlags::PRIVATE {
            let mut oracle = self.world.oracle();
            (0..pages).for_each(|at| oracle.copies((self.space.id(), start + at * PAGE)));
        }
    }

    /// Informs the oracle that the first `there` pages at `AT` have the contents written by
    /// [`World::object`].
    pub fn written(&self, there: u64) {
        let mut oracle = self.world.oracle();
        (0..there).for_each(|at| oracle.renew((self.space.id(), super::page(at)), 7));
    }

    /// `move_pages` of all mappings: returns how many pages are in `node` afterwards.
    pub fn migrate(&self, start: u64, pages: u64, node: u8) -> usize {
        let addrs: Vec<_> = (0..pages).map(|page| start + page * PAGE).collect();
        let mut status = vec![Err(Errno::EIO); addrs.len()];
        self.world.moves.store(true, Ordering::Relaxed);
        self.poll();
        self.space.move_pages(self.cpu, &addrs, node, true, &mut status).unwrap();
        status.iter().filter(|status| **status == Ok(node)).count()
    }

    /// Evicts the mapped pages from `start` on, as far as possible.
    pub fn swap_out(&self, start: u64, pages: u64) {
        self.world.moves.store(true, Ordering::Relaxed);
        self.poll();
        self.space.evict(self.cpu, start, pages * PAGE).unwrap();
    }

    /// Evicts pages of a file, as far as possible.
    pub fn evict(&self, file: &Shared<Object>, pages: core::ops::Range<u64>) {
        self.world.moves.store(true, Ordering::Relaxed);
        self.poll();
        file.evict(self.cpu, pages);
    }

    /// `munmap`.
    pub fn unmap(&self, start: u64, pages: u64) {
        self.change((start, pages), Some(super::NONE), true, || {
            self.space.munmap(self.cpu, start, pages * PAGE).unwrap();
        });
    }

    /// Protects pages, all of which are mapped.
    pub fn protect(&self, start: u64, pages: u64, prot: Prot) {
        self.change((start, pages), Some(prot), false, || {
            self.space.mprotect(self.cpu, start, pages * PAGE, prot).unwrap();
        });
    }

    /// Gives advice on the pages, with possible holes.
    pub fn advise(&self, start: u64, pages: u64, advice: Advice) {
        let each = |tell: fn(&mut Oracle, Page)| {
            let mut oracle = self.world.oracle();
            let frees = (0..pages).filter(|_| advice == Advice::Free);
            frees.for_each(|at| tell(&mut oracle, (self.space.id(), start + at * PAGE)));
        };
        each(Oracle::begin_free);
        self.change((start, pages), None, advice == Advice::DontNeed, || {
            let done = self.space.madvise(self.cpu, start, pages * PAGE, advice);
            assert!(done.is_ok() || done.is_err_and(|refused| refused.errno == Errno::ENOMEM));
        });
        each(Oracle::end_free);
    }

    /// Empties the mapped pages.
    pub fn empty(&self, start: u64, pages: u64) {
        self.advise(start, pages, Advice::DontNeed);
    }

    /// From now on programs may be served there, or not.
    pub fn doubt(&self, start: u64, pages: u64) {
        let mut oracle = self.world.oracle();
        (0..pages).for_each(|at| oracle.doubtful((self.space.id(), start + at * PAGE), RW));
    }

    /// Returns the mapped ranges.
    pub fn areas(&self) -> Vec<VirtRange> {
        let mut ranges = Vec::new();
        self.space.areas(self.cpu, |area| ranges.push(area.range));
        ranges
    }

    /// Returns whether the entry of a page is dirty: the page must then be saved before its
    /// removal.
    pub fn is_dirty(&self, page: u64) -> bool {
        let (mut table, mut owner) = (self.space.root(), self.root);
        for level in (1..=4).rev() {
            let Some(seen) = self.entry(page, table, owner, level) else { return false };
            if level == 1 {
                return seen.value & DIRTY != 0;
            }
            (table, owner) = (frame_of(seen.value), seen.owner);
        }
        false
    }

    /// Moves pages, of which the oracle knows otherwise.
    pub fn remap(&self, from: u64, to: u64, pages: u64, more: RemapFlags) {
        let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED | more;
        let len = pages * PAGE;
        self.space.mremap(self.cpu, from, len, len, flags, to).unwrap();
    }

    /// Moves writable pages to `to`, a range without any stored words.
    pub fn relocate(&self, from: u64, to: u64, pages: u64) {
        let id = self.space.id();
        {
            let mut oracle = self.world.oracle();
            (0..pages).for_each(|page| {
                oracle.alias((id, from + page * PAGE), (id, to + page * PAGE));
            });
        }
        self.change((to, pages), Some(RW), false, || {
            self.change((from, pages), Some(super::NONE), false, || {
                self.remap(from, to, pages, RemapFlags::empty());
            });
        });
        let mut oracle = self.world.oracle();
        (0..pages).for_each(|page| oracle.renew((id, from + page * PAGE), 0));
    }

    /// Moves the contents of writable pages to `to`, an unmapped range without users until the
    /// return of this call. The old pages stay, empty.
    pub fn empty_into(&self, from: u64, to: u64, pages: u64) {
        let id = self.space.id();
        let each = |place: u64| (0..pages).map(move |page| (id, place + page * PAGE));
        let number = self.change((from, pages), None, true, || {
            let number = self.world.oracle().begin_copy(each(from), true);
            self.remap(from, to, pages, RemapFlags::DONTUNMAP);
            number
        });
        self.world.oracle().end_copy(number, each(from).zip(each(to)));
        self.change((to, pages), Some(RW), false, || {});
    }

    /// Forks a child; the pages selected by `shared` are the same in both spaces.
    pub fn fork(&self, shared: impl Fn(u64) -> bool) -> Space {
        self.try_fork(shared).expect("enough memory")
    }

    /// As [`fork`](Self::fork), if frames suffice.
    pub fn try_fork(&self, shared: impl Fn(u64) -> bool) -> Option<Space> {
        self.poll();
        let id = self.space.id();
        let number = self.world.oracle().begin_fork(id);
        let child = self.space.fork(self.cpu).ok();
        let into = child.as_ref().map(Space::id);
        self.world.oracle().end_fork(number, id, into, shared);
        child
    }

    /// Runs in another space on the same CPU for a while.
    pub fn switch<R>(&self, space: &Space, what: impl FnOnce(&Guest<'_>) -> R) -> R {
        self.poll();
        // SAFETY: the program continues when the CPU is back in the space.
        unsafe { self.space.deactivate(self.cpu) };
        let result = what(&Guest::enter(self.world, self.cpu, space));
        self.space.activate(self.cpu);
        result
    }
}
