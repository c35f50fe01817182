//! Common parts of the stress tests: machines with jitter, the settings, the duration, the required
//! events, and the possible contents of a page.
//!
//! `FAULTLESS_STRESS_SECONDS` sets the duration of each test; the default is a second or two. A
//! test runs longer, within limits, until the overlaps it targets were seen.

use super::PAGE;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use faultless::{AnonVmaCheck, Counter, Locking, Setting, Totals};
use faultless_native::{Checked, Config, Native, NativeCpu, Process, Signal, Stop};
use std::time::{Duration, Instant};

/// The settings of the machine during a storm.
#[derive(Clone, Copy, Debug)]
pub enum Mode {
    /// One setting.
    Fixed(Locking, AnonVmaCheck),
    /// All settings in turn, each for a fraction of a millisecond.
    Switching,
}

/// All modes.
pub fn modes() -> impl Iterator<Item = Mode> {
    Locking::ALL
        .into_iter()
        .flat_map(|locking| {
            [AnonVmaCheck::Late, AnonVmaCheck::Early].map(|check| Mode::Fixed(locking, check))
        })
        .chain([Mode::Switching])
}

/// Creates a machine that panics on a stale access and prolongs a third of its critical moments.
pub fn machine(cpus: usize, memory_bytes: u64) -> Native {
    let checked = Checked::Panic;
    let config = Config { memory_bytes, cpus, checked, jitter: 3, ..Config::default() };
    Native::new(config).unwrap()
}

/// The end time of a storm.
pub struct Clock {
    end: Instant,
    over: AtomicBool,
}

impl Clock {
    /// Returns whether to continue. Cheap enough for every step.
    pub fn goes_on(&self) -> bool {
        if Instant::now() >= self.end {
            self.over.store(true, Ordering::Relaxed);
        }
        !self.over.load(Ordering::Relaxed)
    }
}

/// Ends the storm for the other threads when one thread fails.
struct Alarm<'c>(&'c Clock);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

/// Runs `guest` on `threads` threads of `process` under `mode`.
pub fn storm<'n>(
    process: &Process<'n>,
    threads: usize,
    mode: Mode,
    length: Duration,
    guest: impl Fn(&mut NativeCpu<'_, 'n>, usize, &Clock) -> Result<(), Stop> + Sync,
) {
    let clock = Clock { end: Instant::now() + length, over: AtomicBool::new(false) };
    let vm = process.native().vm();
    std::thread::scope(|scope| {
        match mode {
            Mode::Fixed(locking, check) => {
                vm.set(Setting::Locking(locking));
                vm.set(Setting::AnonVmaCheck(check));
                vm.set(Setting::PrefaultMaxOrder(0));
            }
            Mode::Switching => {
                scope.spawn(|| {
                    let fixed = modes().filter_map(|mode| match mode {
                        Mode::Fixed(locking, check) => Some((locking, check)),
                        Mode::Switching => None,
                    });
                    let fixed = fixed.collect::<Vec<_>>().into_iter().cycle();
                    for ((locking, check), order) in fixed.zip((0..=7).cycle()) {
                        vm.set(Setting::Locking(locking));
                        vm.set(Setting::AnonVmaCheck(check));
                        vm.set(Setting::PrefaultMaxOrder(order));
                        std::thread::sleep(Duration::from_micros(300));
                        if !clock.goes_on() {
                            break;
                        }
                    }
                });
            }
        }
        let alarm = Alarm(&clock);
        process
            .run_threads(threads, |cpu, number| {
                let _alarm = Alarm(&clock);
                guest(cpu, number, &clock)
            })
            .unwrap_or_else(|stop| panic!("{mode:?}: {stop}"));
        drop(alarm);
    });
}

/// Repeats `round`, which receives the duration of a storm, under every mode. The repetitions last
/// for the requested time and until each of `must` was counted. Between storms, every frame must be
/// free except the zero page and earlier allocations.
pub fn weather(native: &Native, must: &[Counter], mut round: impl FnMut(Mode, Duration)) -> Totals {
    let asked = std::env::var("FAULTLESS_STRESS_SECONDS").ok();
    let seconds = asked.map_or(1.5, |text| text.parse().expect("FAULTLESS_STRESS_SECONDS=NUMBER"));
    let length = Duration::from_secs_f64(seconds);
    let start = Instant::now();
    let before = native.audit(&[]).unwrap_or_else(|error| panic!("{error}")).taken();
    loop {
        for mode in modes() {
            round(mode, Duration::from_millis(100).max(length / 50));
            assert_eq!(
                native.machine().violation_count(),
                0,
                "{:?}",
                native.machine().violations()
            );
            let census = native.audit(&[]).unwrap_or_else(|error| panic!("{mode:?}: {error}"));
            assert_eq!((census.taken(), census.zero), (before, 1), "{mode:?}: {census:?}");
        }
        let totals = native.vm().totals();
        let missing: Vec<_> =
            must.iter().filter(|&&counter| totals.get(counter) == 0).map(|c| c.name()).collect();
        if missing.is_empty() && start.elapsed() >= length {
            return totals;
        }
        let patience = length * 20 + Duration::from_secs(20);
        assert!(start.elapsed() < patience, "never seen: {missing:?}\n{totals}");
    }
}

/// The content of a page: the number of the page, and the generation of the stored value. The value
/// is at both ends of the page, to detect a partial copy. Zeros are generation 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(pub u64);

const MAGIC: u64 = 0xfa17;
/// The offset of the second copy of the value.
const LAST_WORD: u64 = PAGE - 8;

impl Value {
    pub const ZERO: Self = Self(0);

    pub fn new(page: u64, generation: u64) -> Self {
        Self(MAGIC << 48 | page << GENERATION_BITS | generation)
    }

    pub fn generation(self) -> u64 {
        self.0 & ((1 << GENERATION_BITS) - 1)
    }

    /// Returns whether this value may be found in `page`, whose latest generation is `latest`.
    pub fn may_be(self, page: u64, latest: u64) -> bool {
        self == Self::ZERO
            || (self == Self::new(page, self.generation())
                && (1..=latest).contains(&self.generation()))
    }

    /// Loads both words of the page at `addr`, and checks that they are `self`.
    pub fn check(self, cpu: &NativeCpu<'_, '_>, addr: u64) -> Result<(), Signal> {
        let found = [cpu.load::<u64>(addr)?, cpu.load::<u64>(addr + LAST_WORD)?];
        assert_eq!(found.map(Self), [self; 2], "at {addr:#x} on cpu {:?}", cpu.id());
        Ok(())
    }

    pub fn store(self, cpu: &NativeCpu<'_, '_>, addr: u64) -> Result<(), Signal> {
        cpu.store(addr, self.0)?;
        cpu.store(addr + LAST_WORD, self.0)
    }

    pub fn load(cpu: &NativeCpu<'_, '_>, addr: u64) -> Result<Self, Signal> {
        Ok(Self(cpu.load(addr)?))
    }
}

/// The knowledge that threads share of pages with a single storing thread.
pub struct Latest<const PAGES: usize> {
    /// The latest generation, published before its store.
    begun: [AtomicU64; PAGES],
    /// The generation that a page is known to have, or 0, and the number of such publications.
    settled: [AtomicU64; PAGES],
}

const GENERATION_BITS: u32 = 36;

impl<const PAGES: usize> Latest<PAGES> {
    pub fn new() -> Self {
        let zeros = || core::array::from_fn(|_| AtomicU64::new(0));
        Self { begun: zeros(), settled: zeros() }
    }

    /// The next value for `page`.
    pub fn next(&self, page: u64) -> Value {
        Value::new(page, self.begun[page as usize].fetch_add(1, Ordering::SeqCst) + 1)
    }

    pub fn of(&self, page: u64) -> u64 {
        self.begun[page as usize].load(Ordering::SeqCst)
    }

    /// Publishes, as the owner of `page`, that every later load returns `value` or a later value,
    /// until the next publication; zero means unknown.
    pub fn settle(&self, page: u64, value: Value) {
        let settled = &self.settled[page as usize];
        let told = (settled.load(Ordering::SeqCst) >> GENERATION_BITS) + 1;
        settled.store(told << GENERATION_BITS | value.generation(), Ordering::SeqCst);
    }

    /// Loads from `page` by `load`, and checks the public knowledge: the value belongs to the page,
    /// is not from the future, and is not older than a generation settled throughout the load.
    pub fn peep(
        &self,
        page: u64,
        load: impl FnOnce() -> Result<Value, Signal>,
    ) -> Result<Value, Signal> {
        let settled = &self.settled[page as usize];
        let before = settled.load(Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let value = load()?;
        fence(Ordering::SeqCst);
        assert!(value.may_be(page, self.of(page)), "page {page} holds {value:?}");
        if settled.load(Ordering::SeqCst) == before {
            let least = before & ((1 << GENERATION_BITS) - 1);
            assert!(value.generation() >= least, "page {page} holds {value:?}, {least} is old");
        }
        Ok(value)
    }
}
