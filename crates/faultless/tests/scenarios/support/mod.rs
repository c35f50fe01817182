//! Scenarios of the whole subsystem under a scheduler that may run another thread before every
//! access to shared state: faults of some CPUs against calls of others, on a machine with real
//! TLBs.
//!
//! Each scenario runs under two thousand schedules, the same in every run: random schedules, sticky
//! schedules (see [`sticky`]) and PCT schedules. A quarter as many run in each of the other
//! [regimes](Regime): the baselines, a knob changed during the run, and prefaulted pages.
//! `FAULTLESS_SCHEDULES=100000` sets the number of schedules. A failure prints its schedule:
//! `FAULTLESS_REPLAY=91…` with the name of the test runs only this schedule, and so does
//! `FAULTLESS_REPLAY=@file`.
//!
//! Every access checks law 1 (the frame, and each table of the walk, has the same owner as at the
//! read of the entry), law 2 (the loaded value is permitted, see [`oracle`]), and law 4 (no
//! permitted access is refused). At the end, the audit must balance: laws 5 and 6. Freed heap
//! memory is overwritten, so that its later use fails.
//!
//! For each mutation point there is also a test that some scenario fails without the step:
//! [`needed`].

#![allow(dead_code, unused_imports, unused_macros, reason = "each test uses a part")]

pub mod disk;
pub mod guest;
pub mod heap;
pub mod machine;
pub mod oracle;
pub mod sticky;
pub mod world;

pub use guest::Guest;
pub use world::World;

use faultless::sync::mutant::{self, Mutant};
use faultless::{Locking, MapFlags, Prot};
use machine::Board;
use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::cell::Cell;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use sticky::StickyScheduler;

pub const PAGE: u64 = faultless::PAGE_SIZE;
pub const RW: Prot = Prot::READ.union(Prot::WRITE);
pub const NONE: Prot = Prot::empty();
pub const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);

/// The address of the scenarios' mappings: the start of a last-level table's range.
pub const AT: u64 = 0x4000_0000;

/// A space of the scenarios' machine.
pub type Space = faultless::Space<Board>;

/// Returns the address of a page mapped by scenarios.
pub const fn page(number: u64) -> u64 {
    AT + number * PAGE
}

/// A scenario: creates its world, runs CPUs in it, and checks the final state.
pub type Scenario = fn();

/// The synchronization of faults and calls during a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regime {
    /// One policy throughout.
    Always(Locking),
    /// Another CPU turns the knob, again and again.
    Changing,
    /// Without locks, and with prefault.
    Ahead,
}

pub const SPECULATIVE: Regime = Regime::Always(Locking::Speculative);
pub const PER_VMA: Regime = Regime::Always(Locking::PerVma);
pub const MMAP_LOCK: Regime = Regime::Always(Locking::MmapLock);
pub const AHEAD: Regime = Regime::Ahead;

thread_local! {
    /// The regime of the scenario run by this thread.
    static REGIME: Cell<Regime> = const { Cell::new(SPECULATIVE) };
}

/// The default number of schedules of each scenario.
const SCHEDULES: usize = 2000;

/// The limit of scheduling steps, after which a scenario counts as endless: about a hundred times
/// the usual number.
const STEPS: usize = 400_000;

pub fn schedules() -> usize {
    match std::env::var("FAULTLESS_SCHEDULES") {
        Ok(text) => text.parse().expect("FAULTLESS_SCHEDULES is a number of schedules"),
        Err(_) => SCHEDULES,
    }
}

fn run(scheduler: impl Scheduler + 'static, scenario: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    config.max_steps = MaxSteps::FailAfter(STEPS);
    config.ungraceful_shutdown_config.immediately_return_on_panic = true;
    Runner::new(scheduler, config).run(move || {
        BEGUN.fetch_add(1, Ordering::Relaxed);
        scenario();
    });
}

/// Runs a scenario in a regime, under the requested number of schedules.
pub fn explore(regime: Regime, scenario: Scenario) {
    explore_some(schedules(), regime, scenario);
}

/// Runs a scenario under `all` schedules, or under a quarter of them in a regime other than
/// [`SPECULATIVE`].
fn explore_some(all: usize, regime: Regime, scenario: Scenario) {
    let all = if regime == SPECULATIVE { all } else { all.div_ceil(4) };
    explore_under(regime, all, scenario);
}

/// Runs a scenario in a regime, under `all` schedules.
pub fn explore_under(
    regime: Regime,
    all: usize,
    scenario: impl Fn() + Clone + Send + Sync + 'static,
) {
    REGIME.set(regime);
    if let Ok(schedule) = std::env::var("FAULTLESS_REPLAY") {
        // The schedule of a run that does not end is too long for a variable.
        let schedule = match schedule.strip_prefix('@') {
            Some(file) => std::fs::read_to_string(file).expect("FAULTLESS_REPLAY names a file"),
            None => schedule,
        };
        let schedule: String = schedule.split_whitespace().collect();
        return run(ReplayScheduler::new_from_encoded(&schedule), scenario);
    }
    run(RandomScheduler::new_from_seed(1, all / 4), scenario.clone());
    run(StickyScheduler::new(2, all / 2), scenario.clone());
    // Few switches at the worst moments, few and not so few.
    run(PctScheduler::new_from_seed(3, 3, all / 8), scenario.clone());
    run(PctScheduler::new_from_seed(4, 6, all / 8), scenario);
}

/// The environment variable with the test whose step a process removes.
const WITHOUT: &str = "FAULTLESS_WITHOUT";
/// The time limit for a schedule of such a process: broken code may never end.
const PATIENCE: Duration = Duration::from_secs(60);
/// The text that such a process prints before the number of schedules.
const TOOK: &str = "schedules begun: ";
/// The number of begun schedules.
static BEGUN: AtomicU64 = AtomicU64::new(0);

/// Ends the process if a schedule does not end.
fn watch() {
    let mut last = 0;
    loop {
        std::thread::sleep(PATIENCE);
        let begun = BEGUN.load(Ordering::Relaxed);
        if begun == last {
            eprintln!("a schedule does not end");
            std::process::abort();
        }
        last = begun;
    }
}

/// Prints the number of schedules when dropped.
struct Told;

impl Drop for Told {
    fn drop(&mut self) {
        println!("{TOOK}{}", BEGUN.load(Ordering::Relaxed));
    }
}

/// Checks that one of `scenarios` fails in `regime` without the step of `mutant`. The check runs in
/// a separate process, which runs the test at `path` again, because broken code may break its
/// process.
pub fn needed(path: &str, mutant: Mutant, regime: Regime, scenarios: &[Scenario]) {
    let (_, name) = path.split_once("::").expect("a name that begins with the program");
    if std::env::var(WITHOUT).is_ok_and(|without| without == name) {
        std::thread::spawn(watch);
        let _told = Told;
        return mutant::with(mutant, || {
            // The process ends at the first failed schedule, so it may have many schedules.
            // Schedulers differ: an interleaving that is rare in one is frequent in another.
            // Therefore each scheduler first gets few schedules. Fewer schedules for scenarios do
            // not weaken this search: it always begins with SCHEDULES or more.
            let base = schedules().max(SCHEDULES);
            for times in [1, 4, 16, 40] {
                scenarios.iter().for_each(|&each| explore_some(times * base, regime, each));
            }
        });
    }
    let this = std::env::current_exe().expect("a test is a program");
    let mut command = Command::new(this);
    // The process panics. A backtrace is useless, and takes as long as many schedules.
    command.args([name, "--exact"]).env(WITHOUT, name).env("RUST_BACKTRACE", "0");
    let broken = command.output().unwrap();
    let out = String::from_utf8_lossy(&broken.stdout);
    assert!(out.contains("running 1 test"), "{name} is not a test: {out}");
    let noticed = out.lines().skip_while(|line| !line.contains("panicked at")).take(3);
    let took = out.lines().find_map(|line| line.strip_prefix(TOOK)).unwrap_or("unknown");
    let noticed = noticed.collect::<Vec<_>>().join(" ");
    println!("{mutant:?}: {}, after {took} schedules: {noticed}", broken.status);
    assert!(!broken.status.success(), "no schedule of no scenario fails without {mutant:?}");
}

/// Tests that each scenario, a function, holds in each regime.
macro_rules! holds {
    ($($scenario:ident),+ $(,)?) => { $(
        mod $scenario {
            use crate::support::{self, MMAP_LOCK, PER_VMA, Regime, SPECULATIVE};

            #[test]
            fn speculative() {
                support::explore(SPECULATIVE, super::super::$scenario);
            }

            #[test]
            fn per_vma() {
                support::explore(PER_VMA, super::super::$scenario);
            }

            #[test]
            fn mmap_lock() {
                support::explore(MMAP_LOCK, super::super::$scenario);
            }

            #[test]
            fn changing() {
                support::explore(Regime::Changing, super::super::$scenario);
            }

            #[test]
            fn ahead() {
                support::explore(Regime::Ahead, super::super::$scenario);
            }
        }
    )+ };
}

/// Tests that each step is needed: `test: Mutant in [scenarios]`, or
/// `test: Mutant in [scenarios] under REGIME`.
macro_rules! needs {
    (@regime) => { support::SPECULATIVE };
    (@regime $regime:ident) => { support::$regime };
    ($($test:ident: $mutant:ident in [$($scenario:ident),+] $(under $regime:ident)?),+ $(,)?) => { $(
        #[test]
        fn $test() {
            let name = concat!(module_path!(), "::", stringify!($test));
            let regime = needs!(@regime $($regime)?);
            support::needed(name, Mutant::$mutant, regime, &[$(super::$scenario),+]);
        }
    )+ };
}
