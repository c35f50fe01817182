//! Threads want more memory than available, private and shared with their children: a refused
//! operation has changed no state, and no data is lost.

use crate::common::stress::{Clock, Latest, Value, machine, storm, weather};
use crate::common::{PAGE, PRIVATE, RW, SHARED};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::{Advice, Counter, Errno, MapFlags, Prot, RemapFlags, Setting};
use faultless_native::{NativeCpu, Signal, Stop};

const THREADS: usize = 3;
/// The frames of the machine, fewer than the threads want.
const FRAMES: u64 = 256;

/// The owned pages, interleaved.
const PAGES: usize = 240;
const REGION: u64 = 0x4000_0000 - 100 * PAGE;
/// The pages in which all threads and their children count.
const COUNTERS: u64 = 0x8000_0000;
const COUNTER_PAGES: usize = 12;
/// The address range in which every thread maps shared memory over existing mappings.
const CHURN: u64 = 0xc000_0000;
const CHURN_PAGES: u64 = 4;

fn at(page: usize) -> u64 {
    REGION + page as u64 * PAGE
}

/// Returns whether memory sufficed; other errors fail the test.
fn fits<R>(done: Result<R, Signal>) -> Option<R> {
    match done {
        Ok(done) => Some(done),
        Err(Signal::OutOfMemory { .. }) => None,
        Err(signal) => panic!("{signal}"),
    }
}

struct Owner<'l> {
    number: usize,
    latest: &'l Latest<PAGES>,
    /// The number of increments of each counter, by all threads.
    counted: &'l [AtomicU64; COUNTER_PAGES],
    pages: [Value; PAGES],
    random: fastrand::Rng,
}

impl Owner<'_> {
    fn own(&mut self) -> usize {
        self.random.usize(0..PAGES / THREADS) * THREADS + self.number
    }

    fn check(&self, cpu: &NativeCpu<'_, '_>, page: usize) {
        fits(self.pages[page].check(cpu, at(page)));
    }

    /// Stores to a page; if the second of two words fails, the page is discarded.
    fn store(&mut self, cpu: &NativeCpu<'_, '_>, page: usize) -> Result<bool, Stop> {
        self.check(cpu, page);
        let value = self.latest.next(page as u64);
        if fits(cpu.store(at(page), value.0)).is_none() {
            self.check(cpu, page);
            return Ok(false);
        }
        self.pages[page] = value;
        if fits(value.store(cpu, at(page))).is_none() {
            self.discard(cpu, page)?;
        }
        Ok(true)
    }

    fn discard(&mut self, cpu: &NativeCpu<'_, '_>, page: usize) -> Result<(), Stop> {
        cpu.madvise(at(page), PAGE, Advice::DontNeed)?;
        self.pages[page] = Value::ZERO;
        Ok(())
    }

    fn count(&mut self, cpu: &NativeCpu<'_, '_>, base: u64) {
        let page = self.random.usize(0..COUNTER_PAGES);
        if fits(cpu.fetch_add(base + page as u64 * PAGE, 1u64)).is_some() {
            self.counted[page].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn step(&mut self, cpu: &mut NativeCpu<'_, '_>) -> Result<(), Stop> {
        for _ in 0..4 {
            let page = self.own();
            if !self.store(cpu, page)? {
                for _ in 0..PAGES / THREADS / 2 {
                    let page = self.own();
                    self.discard(cpu, page)?;
                }
            }
            self.count(cpu, COUNTERS);
        }
        match self.random.u32(0..16) {
            0 => self.fork(cpu)?,
            1 => self.alias(cpu)?,
            2..5 => {
                let first = self.random.u64(0..COUNTER_PAGES as u64);
                let len = (COUNTER_PAGES as u64 - first) * PAGE;
                cpu.madvise(COUNTERS + first * PAGE, len, Advice::DontNeed)?;
            }
            5 | 6 => self.churn(cpu),
            7 => {
                let first = self.random.usize(0..PAGES);
                let prot = if self.random.bool() { RW } else { RW | Prot::EXEC };
                cpu.mprotect(at(first), (PAGES - first) as u64 * PAGE, prot)?;
            }
            8 => {
                let limit = self.random.u64(FRAMES / 2..FRAMES * 2);
                cpu.native().vm().set(Setting::FrameLimit(limit));
            }
            _ => {
                let page = self.own();
                self.discard(cpu, page)?;
            }
        }
        Ok(())
    }

    /// A child may lack memory for its creation or its stores; its parent's pages are unchanged.
    fn fork(&mut self, cpu: &mut NativeCpu<'_, '_>) -> Result<(), Stop> {
        let child = match cpu.fork() {
            Ok(child) => child,
            Err(error) => {
                assert_eq!(error.errno, Errno::ENOMEM);
                return Ok(());
            }
        };
        let done = cpu.switch(&child, |cpu| {
            for page in (self.number..PAGES).step_by(THREADS) {
                self.check(cpu, page);
            }
            self.count(cpu, COUNTERS);
            for page in 0..PAGES {
                if fits(cpu.store(at(page), u64::MAX)).is_none() {
                    break;
                }
            }
            Ok(())
        });
        cpu.exit(child);
        done?;
        (self.number..PAGES).step_by(THREADS).for_each(|page| self.check(cpu, page));
        Ok(())
    }

    /// A second mapping of the counters, which reaches beyond their end.
    fn alias(&mut self, cpu: &NativeCpu<'_, '_>) -> Result<(), Stop> {
        let len = COUNTER_PAGES as u64 * PAGE;
        let alias = match cpu.mremap(COUNTERS, 0, len + PAGE, RemapFlags::MAYMOVE, 0) {
            Ok(alias) => alias,
            Err(error) => {
                assert_eq!(error.errno, Errno::ENOMEM);
                return Ok(());
            }
        };
        for _ in 0..4 {
            self.count(cpu, alias);
            let addr = alias + len;
            match cpu.store(addr, 1u64) {
                Err(Signal::Bus { addr: reported }) => assert_eq!(reported, addr),
                // For a table.
                Err(Signal::OutOfMemory { .. }) => {}
                other => panic!("beyond the end: {other:?}"),
            }
        }
        Ok(cpu.munmap(alias, len + PAGE)?)
    }

    /// Objects whose last user is any thread.
    fn churn(&mut self, cpu: &NativeCpu<'_, '_>) {
        let len = self.random.u64(1..=CHURN_PAGES) * PAGE;
        let _ = cpu.mmap(CHURN, len, RW, SHARED | MapFlags::FIXED);
        let _ = cpu.store(CHURN, 1u64);
        if self.random.bool() {
            cpu.cpu().wait_grace();
        }
        let _ = cpu.munmap(CHURN, CHURN_PAGES * PAGE);
    }

    fn live(&mut self, cpu: &mut NativeCpu<'_, '_>, clock: &Clock) -> Result<(), Stop> {
        while clock.goes_on() {
            self.step(cpu)?;
        }
        (self.number..PAGES).step_by(THREADS).for_each(|page| self.check(cpu, page));
        Ok(())
    }
}

const MUST: &[Counter] = &[
    Counter::SpfNomem,
    Counter::SpfVmaNotsup,
    Counter::SpfVmaChanged,
    Counter::TrylockFailed,
    Counter::VmaLockRetry,
    Counter::Oom,
    Counter::Bus,
    Counter::SharedPage,
    Counter::CowCopy,
    Counter::TlbShootdownReceived,
];

#[test]
fn operations_without_memory_change_no_state() {
    let native = machine(THREADS, FRAMES * PAGE);
    let mut seed = 0;
    let totals = weather(&native, MUST, |mode, length| {
        let latest = Latest::new();
        let counted = [const { AtomicU64::new(0) }; COUNTER_PAGES];
        let process = native.process().unwrap();
        let map = |cpu: &mut NativeCpu<'_, '_>| {
            let noreserve = MapFlags::FIXED | MapFlags::NORESERVE;
            cpu.mmap(REGION, PAGES as u64 * PAGE, RW, PRIVATE | noreserve)?;
            Ok(cpu.mmap(COUNTERS, COUNTER_PAGES as u64 * PAGE, RW, SHARED | noreserve)?)
        };
        process.run(map).unwrap();
        seed += 1;
        storm(&process, THREADS, mode, length, |cpu, number, clock| {
            let random = fastrand::Rng::with_seed(seed << 8 | number as u64);
            let pages = [Value::ZERO; PAGES];
            Owner { number, latest: &latest, counted: &counted, pages, random }.live(cpu, clock)
        });
        native.vm().set(Setting::FrameLimit(u64::MAX));
        native.audit(&[&process]).unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        let sums = |cpu: &mut NativeCpu<'_, '_>| {
            cpu.madvise(REGION, PAGES as u64 * PAGE, Advice::DontNeed)?;
            for (page, counted) in counted.iter().enumerate() {
                let found = cpu.load::<u64>(COUNTERS + page as u64 * PAGE)?;
                assert_eq!(found, counted.load(Ordering::Relaxed), "{mode:?}: counter {page}");
            }
            Ok(())
        };
        process.run(sums).unwrap();
        process.exit();
    });
    println!("{totals}");
}
