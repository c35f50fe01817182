//! Threads own interleaved pages of one region and run all operations on their own pages, while the
//! other threads protect, advise, fork and disturb the surrounding ranges.
//!
//! A page has one owner, the only thread that stores to, unmaps and moves the page, so the owner
//! knows its exact content. Operations of other threads change no byte. A separate region without
//! owners is used by all threads with all operations.

use crate::common::stress::{Clock, Latest, Value, machine, storm, weather};
use crate::common::{PAGE, PRIVATE, RW};
use faultless::{Access, Advice, Counter, MapFlags, Prot, RemapFlags};
use faultless_native::{NativeCpu, Signal, Stop};
use std::time::Duration;

const THREADS: usize = 3;
const FIXED: MapFlags = PRIVATE.union(MapFlags::FIXED);

/// The region of owned pages: two tables' worth of neighbours, around the border of two tables.
const PAGES: usize = 48;
const REGION: u64 = 0x4000_0000 - 24 * PAGE;
/// The address for pages put aside: a separate table for each thread, so that tables are created
/// and freed.
const ASIDE: u64 = 0x8000_0000;
const ASIDE_STEP: u64 = 2 << 20;

/// The region without owners, which spans the boundary of two tables and 1 GiB of their parent.
const COMMON: u64 = 0x1_0000_0000 - 8 * PAGE;
const COMMON_PAGES: u64 = 16;
/// The page number in values of this region, used by no other region.
const COMMON_PAGE: u64 = 0x7ff;

fn at(page: usize) -> u64 {
    REGION + page as u64 * PAGE
}

struct Owner<'l> {
    number: usize,
    latest: &'l Latest<PAGES>,
    /// The contents of this owner's pages; zero for other pages.
    pages: [Value; PAGES],
    /// The last observed contents of other owners' pages.
    seen: [u64; PAGES],
    heap: Vec<Value>,
    random: fastrand::Rng,
}

impl<'l> Owner<'l> {
    fn new(number: usize, latest: &'l Latest<PAGES>, seed: u64) -> Self {
        Self {
            number,
            latest,
            pages: [Value::ZERO; PAGES],
            seen: [0; PAGES],
            heap: Vec::new(),
            random: fastrand::Rng::with_seed(seed),
        }
    }

    fn own(&mut self) -> usize {
        self.random.usize(0..PAGES / THREADS) * THREADS + self.number
    }

    /// Runs `access` on the owner's `page`, whose protection other threads change.
    fn insist<R>(
        &self,
        cpu: &NativeCpu<'_, '_>,
        page: usize,
        access: impl Fn() -> Result<R, Signal>,
    ) -> Result<R, Stop> {
        loop {
            match access() {
                Ok(done) => return Ok(done),
                // Law 4: only the owner unmaps the page.
                Err(Signal::Segv { mapped: true, .. }) => cpu.mprotect(at(page), PAGE, RW)?,
                Err(signal) => panic!("page {page} of {}: {signal}", self.number),
            }
        }
    }

    fn check(&self, cpu: &NativeCpu<'_, '_>, page: usize) -> Result<(), Stop> {
        self.insist(cpu, page, || self.pages[page].check(cpu, at(page)))
    }

    fn store(&mut self, cpu: &NativeCpu<'_, '_>, page: usize) -> Result<(), Stop> {
        let value = self.latest.next(page as u64);
        self.insist(cpu, page, || value.store(cpu, at(page)))?;
        self.pages[page] = value;
        self.latest.settle(page as u64, value);
        Ok(())
    }

    /// Runs an operation permitted only to the owner of a page.
    fn rule(&mut self, cpu: &NativeCpu<'_, '_>) -> Result<(), Stop> {
        let page = self.own();
        let addr = at(page);
        self.check(cpu, page)?;
        let what = self.random.u32(0..16);
        if what >= 7 {
            self.latest.settle(page as u64, Value::ZERO);
        }
        match what {
            0..7 => self.store(cpu, page)?,
            7 | 8 => {
                cpu.madvise(addr, PAGE, Advice::DontNeed)?;
                self.pages[page] = Value::ZERO;
            }
            9 => {
                cpu.munmap(addr, PAGE)?;
                let gone = Signal::Segv { addr, mapped: false };
                assert_eq!(cpu.load::<u64>(addr), Err(gone));
                assert_eq!(cpu.store(addr, 1u64), Err(gone));
                cpu.mmap(addr, PAGE, RW, FIXED)?;
                self.pages[page] = Value::ZERO;
            }
            10 => {
                cpu.mmap(addr, PAGE, RW, FIXED)?;
                self.pages[page] = Value::ZERO;
            }
            11 => cpu.madvise(addr, PAGE, Advice::Free)?,
            12 => {
                cpu.mprotect(addr, PAGE, Prot::READ)?;
                match cpu.store(addr, self.pages[page].0) {
                    // Another thread has already restored the right.
                    Ok(()) => {}
                    Err(signal) => assert_eq!(signal, Signal::Segv { addr, mapped: true }),
                }
            }
            13 | 14 => self.put_aside(cpu, page)?,
            _ => self.heap(cpu)?,
        }
        self.latest.settle(page as u64, self.pages[page]);
        self.check(cpu, page)
    }

    /// Moves a page away and back, with its content.
    fn put_aside(&mut self, cpu: &NativeCpu<'_, '_>, page: usize) -> Result<(), Stop> {
        let aside = ASIDE + self.number as u64 * ASIDE_STEP + self.random.u64(0..4) * PAGE;
        let to = RemapFlags::MAYMOVE | RemapFlags::FIXED;
        let keep = self.random.bool();
        let flags = if keep { to | RemapFlags::DONTUNMAP } else { to };
        cpu.mremap(at(page), PAGE, PAGE, flags, aside)?;
        if keep {
            self.insist(cpu, page, || Value::ZERO.check(cpu, at(page)))?;
        }
        // No thread protects pages here, but the page may have arrived protected.
        cpu.mprotect(aside, PAGE, RW)?;
        self.pages[page].check(cpu, aside)?;
        if self.random.bool() {
            let value = self.latest.next(page as u64);
            value.store(cpu, aside)?;
            self.pages[page] = value;
        }
        cpu.mremap(aside, PAGE, PAGE, to, at(page))?;
        Ok(())
    }

    /// The first owner has the heap.
    fn heap(&mut self, cpu: &NativeCpu<'_, '_>) -> Result<(), Stop> {
        if self.number != 0 {
            return Ok(());
        }
        let start = cpu.running().space().heap_range().start;
        let page = |index: usize| start + index as u64 * PAGE;
        for (index, value) in self.heap.iter().enumerate() {
            value.check(cpu, page(index))?;
        }
        let len = self.random.usize(0..6);
        assert_eq!(cpu.brk(page(len)), page(len));
        self.heap.resize(len, Value::ZERO);
        for (index, value) in self.heap.iter_mut().enumerate() {
            value.check(cpu, page(index))?;
            *value = Value::new(0x800 + index as u64, self.random.u64(1..1 << 30));
            value.store(cpu, page(index))?;
        }
        Ok(())
    }

    /// Runs an operation that changes no byte, and interferes with all threads.
    fn meddle(&mut self, cpu: &NativeCpu<'_, '_>) {
        let first = self.random.usize(0..PAGES);
        let len = self.random.u64(1..=(PAGES - first).min(12) as u64) * PAGE;
        // The call fails midway if an owner has unmapped a page.
        let _ = match self.random.u32(0..8) {
            0 => cpu.mprotect(at(first), len, Prot::READ),
            1 => cpu.mprotect(at(first), len, RW),
            2 => cpu.mprotect(at(first), len, Prot::empty()),
            3 => cpu.mprotect(at(first), len, RW | Prot::EXEC),
            4 => cpu.madvise(at(first), len, Advice::Free),
            5 => cpu.madvise(at(first), len, Advice::Sequential),
            6 => cpu.madvise(at(first), len, Advice::Normal),
            _ => cpu.madvise(at(first), len, Advice::PopulateWrite),
        };
    }

    /// Reads another owner's page.
    fn peep(&mut self, cpu: &NativeCpu<'_, '_>) {
        let page = self.random.usize(0..PAGES);
        if let Ok(value) = self.latest.peep(page as u64, || Value::load(cpu, at(page)))
            && value != Value::ZERO
        {
            assert!(value.generation() >= self.seen[page], "{page}: {value:?} is an old value");
            self.seen[page] = value.generation();
        }
    }

    /// A child sees the contents at the time of the fork until its end, and its changes stay
    /// private.
    fn fork(&mut self, cpu: &mut NativeCpu<'_, '_>) -> Result<(), Stop> {
        for _ in 0..4 {
            let page = self.own();
            self.store(cpu, page)?;
        }
        let child = cpu.fork()?;
        let later: Vec<u64> = (0..PAGES).map(|page| self.latest.of(page as u64)).collect();
        // Before the child has looked.
        let page = self.own();
        let before = self.pages[page];
        self.store(cpu, page)?;
        let now = core::mem::replace(&mut self.pages[page], before);
        cpu.switch(&child, |cpu| {
            let mut first = Vec::new();
            for (page, &later) in later.iter().enumerate() {
                // An owner may have had the page unmapped; no other thread runs in the child.
                first.push(if cpu.mprotect(at(page), PAGE, RW).is_err() {
                    None
                } else if page % THREADS == self.number {
                    self.pages[page].check(cpu, at(page))?;
                    Some(self.pages[page])
                } else {
                    let value = Value::load(cpu, at(page))?;
                    assert!(value.may_be(page as u64, later), "later: {page}: {value:?}");
                    Some(value)
                });
            }
            for (page, value) in first.into_iter().enumerate() {
                let Some(value) = value else { continue };
                assert_eq!(Value::load(cpu, at(page))?, value, "page {page} of a child changed");
                cpu.fill(at(page), PAGE, 0xcc)?;
            }
            Ok(())
        })?;
        cpu.exit(child);
        self.pages[page] = now;
        self.check(cpu, page)
    }

    /// Runs any operation on the common memory, of which only the set of possible values is known.
    fn tear(&mut self, cpu: &NativeCpu<'_, '_>) {
        let page = self.random.u64(0..COMMON_PAGES);
        let pages = self.random.u64(1..=COMMON_PAGES - page);
        let (addr, len) = (COMMON + page * PAGE, pages * PAGE);
        let all = COMMON_PAGES * PAGE;
        // Any of these may be refused, but for lack of memory there is no reason.
        let _ = match self.random.u32(0..32) {
            0 => cpu.mmap(COMMON, all, RW, FIXED).map(drop),
            1 => cpu.mmap(addr, len, RW, FIXED).map(drop),
            2 => cpu.munmap(addr, len),
            3 => cpu.munmap(COMMON, all),
            4 => cpu.mprotect(addr, len, Prot::READ),
            5 => cpu.mprotect(addr, len, RW),
            6 => cpu.madvise(addr, len, Advice::DontNeed),
            7 => cpu.madvise(addr, len, Advice::Free),
            8 | 9 => {
                let other = COMMON + self.random.u64(0..COMMON_PAGES) * PAGE;
                let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                let keep = if self.random.bool() { RemapFlags::DONTUNMAP } else { flags };
                cpu.mremap(addr, PAGE, PAGE, flags | keep, other).map(drop)
            }
            10 => cpu.mincore(addr, len, drop),
            11 => {
                let _ = cpu.touch(addr, Access::Execute);
                Ok(())
            }
            12..22 => {
                let value = Value::new(COMMON_PAGE, self.random.u64(1..1 << 30));
                let _ = cpu.store(addr + 8 * self.random.u64(0..512), value.0);
                Ok(())
            }
            _ => {
                if let Ok(value) = Value::load(cpu, addr + 8 * self.random.u64(0..512)) {
                    assert!(value.may_be(COMMON_PAGE, u64::MAX), "{value:?} at {addr:#x}");
                }
                Ok(())
            }
        };
    }

    fn live(&mut self, cpu: &mut NativeCpu<'_, '_>, clock: &Clock) -> Result<(), Stop> {
        let mut steps = 0u64;
        while clock.goes_on() {
            steps += 1;
            self.rule(cpu)?;
            self.meddle(cpu);
            (0..4).for_each(|_| self.peep(cpu));
            (0..6).for_each(|_| self.tear(cpu));
            if steps % 32 == self.number as u64 * 8 {
                self.fork(cpu)?;
            }
        }
        (0..PAGES / THREADS).try_for_each(|own| self.check(cpu, own * THREADS + self.number))
    }
}

/// The counters that these storms must increment.
const MUST: &[Counter] = &[
    Counter::SpfVmaChanged,
    Counter::SpfVmaNoanon,
    Counter::SpfVmaAccess,
    Counter::SpfPmdChanged,
    Counter::TrylockFailed,
    Counter::VmaLockSuccess,
    Counter::VmaLockAbort,
    Counter::VmaLockRetry,
    Counter::VmaLockMiss,
    Counter::RangeLockFault,
    Counter::RangeLockWrite,
    Counter::MmapLockRead,
    Counter::MmapLockWrite,
    Counter::CowCopy,
    Counter::CowReuse,
    Counter::Spurious,
    Counter::TablePruned,
    Counter::TlbShootdownSent,
    Counter::TlbShootdownReceived,
];

#[test]
fn owners_find_their_stores() {
    let native = machine(THREADS, 32 << 20);
    let mut seed = 0;
    let totals = weather(&native, MUST, |mode, length: Duration| {
        let latest = Latest::new();
        let process = native.process().unwrap();
        process.run(|cpu| Ok(cpu.mmap(REGION, PAGES as u64 * PAGE, RW, FIXED)?)).unwrap();
        seed += 1;
        storm(&process, THREADS, mode, length, |cpu, number, clock| {
            Owner::new(number, &latest, seed << 8 | number as u64).live(cpu, clock)
        });
        native.audit(&[&process]).unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        process.exit();
    });
    println!("{totals}");
}
