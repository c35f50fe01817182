//! Threads that load and store, and concurrently change the same space, on a machine that checks
//! each access, until the wanted number of accesses is checked.
//!
//! Each thread has its own pages with known words, which it moves, advises, unmaps, protects and
//! forks. All threads share common pages with unknown words, on which every thread runs every
//! operation. There may be more CPUs than host cores.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::{
    Advice, AnonVmaCheck, Counter, Locking, MapFlags, Prot, RemapFlags, Setting, Totals,
};
use faultless_native::{Checked, Config, Native, NativeCpu, Stop};

const PAGE: u64 = faultless::PAGE_SIZE;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);
const SHARED: MapFlags = MapFlags::SHARED.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

/// Pages of each thread: more than the first level of a TLB holds.
const OWN: u64 = 96;
const COMMON: u64 = 0x4000_0000 - 16 * PAGE;
const COMMON_PAGES: u64 = 32;
/// Accesses of a thread between two calls.
const BURST: u64 = 256;
/// The number of accesses checked under one setting.
const ROUND: u64 = 4_000_000;

/// The work done.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The number of checked accesses.
    pub accesses: u64,
    /// Accesses through a stale translation.
    pub violations: u64,
    /// The counters of the subsystem.
    pub totals: Totals,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |counter| self.totals.get(counter);
        write!(
            f,
            "{} accesses checked, {} violations; {} faults, {} flushes, {} shootdowns",
            self.accesses,
            self.violations,
            of(Counter::Faults),
            of(Counter::TlbFlush),
            of(Counter::TlbShootdownReceived)
        )
    }
}

struct Thread {
    at: u64,
    places: [u64; 2],
    words: Vec<u64>,
    random: fastrand::Rng,
}

impl Thread {
    fn new(cpu: &NativeCpu<'_, '_>, number: usize, seed: u64) -> Result<Self, Stop> {
        let place = 0x1_0000_0000 + number as u64 * 0x1000_0000;
        cpu.mmap(place, OWN * PAGE, RW, FIXED)?;
        Ok(Self {
            at: place,
            places: [place, place + 0x800_0000],
            words: vec![0; OWN as usize],
            random: fastrand::Rng::with_seed(seed << 16 | number as u64),
        })
    }

    /// Loads and stores, with known values for own words. Returns the number of accesses.
    fn access(&mut self, cpu: &NativeCpu<'_, '_>) -> Result<u64, Stop> {
        let mut done = 0;
        for _ in 0..BURST {
            let bits = self.random.u64(..);
            let page = (bits & 0xff) % OWN;
            let addr = self.at + page * PAGE;
            let common = COMMON + (bits >> 8) % COMMON_PAGES * PAGE + (bits >> 16 & 0x1ff) * 8;
            match bits >> 60 {
                0..3 => {
                    cpu.store(addr, bits)?;
                    self.words[page as usize] = bits;
                    done += 1;
                }
                3..10 => {
                    assert_eq!(cpu.load::<u64>(addr)?, self.words[page as usize], "{addr:#x}");
                    done += 1;
                }
                10..12 => done += u64::from(cpu.store(common, bits).is_ok()),
                _ => done += u64::from(cpu.load::<u64>(common).is_ok()),
            }
        }
        Ok(done)
    }

    /// Makes a call on the thread's own pages that changes only known bytes.
    fn call(&mut self, cpu: &mut NativeCpu<'_, '_>) -> Result<(), Stop> {
        let page = self.random.u64(0..OWN);
        let pages = self.random.u64(1..=(OWN - page).min(24));
        let (addr, len) = (self.at + page * PAGE, pages * PAGE);
        let words = &mut self.words[page as usize..(page + pages) as usize];
        match self.random.u32(0..12) {
            0 => {
                cpu.madvise(addr, len, Advice::DontNeed)?;
                words.fill(0);
            }
            1 => {
                cpu.munmap(addr, len)?;
                cpu.mmap(addr, len, RW, FIXED)?;
                words.fill(0);
            }
            2 | 3 => {
                cpu.mprotect(addr, len, Prot::READ)?;
                assert!(cpu.store(addr, 1u64).is_err(), "{addr:#x} is read-only");
                cpu.mprotect(addr, len, RW)?;
            }
            4 => {
                cpu.mprotect(addr, len, Prot::empty())?;
                assert!(cpu.load::<u64>(addr).is_err(), "{addr:#x} is inaccessible");
                cpu.mprotect(addr, len, RW)?;
            }
            5 => {
                let to = self.places[usize::from(self.at == self.places[0])];
                let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                // Refused while the range consists of several VMAs.
                if let Ok(moved) = cpu.mremap(self.at, OWN * PAGE, OWN * PAGE, flags, to) {
                    self.at = moved;
                }
            }
            6 => cpu.madvise(addr, len, Advice::Free)?,
            7 => {
                // One VMA again, so that it can move.
                cpu.mmap(self.at, OWN * PAGE, RW, FIXED)?;
                self.words.fill(0);
            }
            8 => self.fork(cpu)?,
            _ => self.tear(cpu),
        }
        Ok(())
    }

    /// Makes a call on the common pages. The call may be refused.
    fn tear(&mut self, cpu: &NativeCpu<'_, '_>) {
        let page = self.random.u64(0..COMMON_PAGES);
        let pages = self.random.u64(1..=COMMON_PAGES - page);
        let (addr, len) = (COMMON + page * PAGE, pages * PAGE);
        let _ = match self.random.u32(0..10) {
            0..3 => cpu.mmap(addr, len, RW, FIXED).map(drop),
            3 => cpu.mmap(COMMON, COMMON_PAGES * PAGE, RW, SHARED).map(drop),
            4 => cpu.munmap(addr, len),
            5 => cpu.mprotect(addr, len, Prot::READ),
            6 => cpu.mprotect(addr, len, RW),
            7 => cpu.madvise(addr, len, Advice::DontNeed),
            8 => cpu.madvise(addr, len, Advice::Free),
            _ => {
                let to = COMMON + self.random.u64(0..COMMON_PAGES) * PAGE;
                let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                cpu.mremap(addr, PAGE, PAGE, flags, to).map(drop)
            }
        };
    }

    fn fork(&mut self, cpu: &mut NativeCpu<'_, '_>) -> Result<(), Stop> {
        let child = cpu.fork()?;
        let (at, words) = (self.at, &self.words);
        let private = cpu.switch(&child, |cpu| {
            for (page, &word) in words.iter().enumerate() {
                assert_eq!(cpu.load::<u64>(at + page as u64 * PAGE)?, word, "in a child");
            }
            Ok(cpu.fill(at, OWN * PAGE, 0xcc)?)
        });
        cpu.exit(child);
        private
    }
}

/// Runs on `cpus` CPUs until `wanted` accesses were checked; reports to `progress` after each
/// setting. All locking policies are used in turn.
pub fn run(cpus: usize, wanted: u64, mut progress: impl FnMut(&Done)) -> Done {
    let config = Config {
        memory_bytes: 64 << 20,
        cpus,
        checked: Checked::Record,
        jitter: 64,
        ..Config::default()
    };
    let native = Native::new(config).expect("a machine of 64 MiB");
    let settings = Locking::ALL.into_iter().flat_map(|locking| {
        [AnonVmaCheck::Late, AnonVmaCheck::Early].map(|check| (locking, check))
    });
    let settings: Vec<_> = settings.collect();
    let mut accesses = 0;
    let mut round = 0;
    // Ensures that a short run uses all settings as well.
    let share = ROUND.min(wanted.div_ceil(settings.len() as u64));
    loop {
        let (locking, check) = settings[round as usize % settings.len()];
        native.vm().set(Setting::Locking(locking));
        native.vm().set(Setting::AnonVmaCheck(check));
        let process = native.process().expect("memory for a process");
        let mapped = process.run(|cpu| Ok(cpu.mmap(COMMON, COMMON_PAGES * PAGE, RW, FIXED)?));
        mapped.expect("memory for a mapping");
        let counted = AtomicU64::new(0);
        let ran = process.run_threads(cpus, |cpu, number| {
            let mut thread = Thread::new(cpu, number, round)?;
            while counted.load(Ordering::Relaxed) < share {
                // Sometimes in quick succession, sometimes far apart.
                for _ in 0..1 << thread.random.u32(0..7) {
                    counted.fetch_add(thread.access(cpu)?, Ordering::Relaxed);
                }
                thread.call(cpu)?;
            }
            Ok(())
        });
        ran.unwrap_or_else(|stop| panic!("{locking:?}, {check:?}: {stop}"));
        native.audit(&[&process]).unwrap_or_else(|error| panic!("{locking:?}: {error}"));
        process.exit();
        native.audit(&[]).unwrap_or_else(|error| panic!("{locking:?}: {error}"));
        accesses += counted.into_inner();
        round += 1;
        let violations = native.machine().violation_count();
        let done = Done { accesses, violations, totals: native.vm().totals() };
        progress(&done);
        if violations != 0 {
            native.machine().violations().iter().for_each(|violation| eprintln!("{violation}"));
        }
        if accesses >= wanted || violations != 0 {
            return done;
        }
    }
}
