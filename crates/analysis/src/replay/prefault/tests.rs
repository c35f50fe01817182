use super::*;
use faultless::Setting;
use faultless_native::{Config, Native};
use faultless_trace::Trace;
use faultless_trace::event::{
    Access, Backing, Birth, Event, Header, Kind, ProcessInfo, Prot, Recorded, ThreadInfo,
};
use faultless_trace::recordings;
use proptest::prelude::*;

const PAGE: u64 = 4096;
/// Mappings straddle page tables at this address.
const BASE: u64 = (1 << 40) - 8 * PAGE;

#[test]
fn no_recording_saves_more_faults_than_the_bound() {
    for recording in recordings::all() {
        let source = Source::shipped(recording).unwrap();
        let regimes = [1, 3, 5, 9].map(|order| Regime { order, pool: 0 });
        let effects = effects(&source, &Settings::new(&[]), &regimes).unwrap().unwrap();
        for (at, effect) in effects.iter().enumerate() {
            let name = recording.name;
            assert!(effect.saved <= effect.bound, "{name}: {effect:?}");
            assert!(effect.bound <= effect.touches, "{name}: {effect:?}");
            // The bound is not trivial: windows of two pages save at most half.
            assert!(at > 0 || effect.bound <= effect.touches * 11 / 20, "{name}: {effect:?}");
            assert!(at == 0 || effect.bound >= effects[at - 1].bound, "{name}: {effect:?}");
            assert!(effect.peak >= effect.peak_off, "{name}: {effect:?}");
            assert!(effect.peak <= effect.peak_off + effect.mapped(), "{name}: {effect:?}");
        }
    }
}

#[test]
fn prefault_saves_faults_of_a_recording() {
    let source = Source::shipped(recordings::find("sort").unwrap()).unwrap();
    let regimes = [3, 5].map(|order| Regime { order, pool: 0 });
    let effects = effects(&source, &Settings::new(&[]), &regimes).unwrap().unwrap();
    for effect in &effects {
        assert!(effect.saved * 2 > effect.touches, "{effect:?}");
        // Each prefaulted page saved a fault, or was not used.
        let spared = effect.mapped() - effect.unused();
        assert!(effect.saved.abs_diff(spared) <= effect.touches / 100, "{effect:?}");
    }
    assert!(effects[0].saved < effects[1].saved);
}

#[test]
fn effects_on_many_processes_are_reproducible() {
    let source = Source::shipped(recordings::find("redis").unwrap()).unwrap();
    let regimes = [Regime { order: 5, pool: 0 }];
    let [first, again] =
        [(); 2].map(|()| effects(&source, &Settings::new(&[]), &regimes).unwrap().unwrap());
    assert_eq!(first, again);
}

/// A step of a random program.
#[derive(Clone, Debug)]
enum Step {
    /// Touches `count` pages from this page on, at distances of `stride` pages.
    Stream {
        page: u64,
        stride: u64,
        count: u64,
        write: bool,
    },
    /// `madvise(MADV_DONTNEED)`, `munmap`, `mmap` and `mprotect` of a range. Every second
    /// `mprotect` leaves the range read-only.
    Forget {
        page: u64,
        count: u64,
    },
    Unmap {
        page: u64,
        count: u64,
    },
    Map {
        page: u64,
        count: u64,
    },
    Protect {
        page: u64,
        count: u64,
    },
    /// `mremap` to the other half.
    Move {
        page: u64,
        count: u64,
    },
    Fork,
    /// The exit of a forked process.
    Exit,
}

/// The pages used by steps. `Move` uses the same number beyond these pages.
const PAGES: u64 = 96;

fn step() -> impl Strategy<Value = Step> {
    let part = || (0..PAGES, 1..24u64).prop_map(|(page, count)| (page, count.min(PAGES - page)));
    prop_oneof![
        12 => (part(), 1..17u64, any::<bool>())
            .prop_map(|((page, count), stride, write)| Step::Stream { page, stride, count, write }),
        1 => part().prop_map(|(page, count)| Step::Forget { page, count }),
        1 => part().prop_map(|(page, count)| Step::Unmap { page, count }),
        2 => part().prop_map(|(page, count)| Step::Map { page, count }),
        1 => part().prop_map(|(page, count)| Step::Protect { page, count }),
        1 => part().prop_map(|(page, count)| Step::Move { page, count }),
        1 => Just(Step::Fork),
        1 => Just(Step::Exit),
    ]
}

/// Returns the recording of a program that executes `steps`, each in one of its processes.
fn trace(steps: &[(usize, Step)]) -> Trace {
    let rw = Prot::READ | Prot::WRITE;
    let mut events = Vec::new();
    let mut alive = vec![0u32];
    let mut count = 1u32;
    let map = |start: u64, pages: u64| Kind::Map {
        start,
        len: pages * PAGE,
        prot: rw,
        flags: 0x22,
        backing: Backing::Anon,
    };
    events.push((0, map(BASE, 2 * PAGES)));
    for (turn, (who, step)) in steps.iter().enumerate() {
        let place = who % alive.len();
        let thread = alive[place];
        let at = |page: u64| BASE + page * PAGE;
        let mut add = |kind: Kind| events.push((thread, kind));
        match *step {
            Step::Stream { page, stride, count, write } => {
                let pages = (page..PAGES).step_by(stride as usize).take(count as usize);
                let access = if write { Access::Write } else { Access::Read };
                for page in pages {
                    let page = at(page);
                    add(Kind::first(page, access));
                }
            }
            Step::Forget { page, count } => {
                add(Kind::Advise { start: at(page), len: count * PAGE, advice: 4 });
            }
            Step::Unmap { page, count } => {
                add(Kind::Unmap { start: at(page), len: count * PAGE });
                // Otherwise a touch could hit a hole, for which the plan would invent a mapping.
                add(map(at(page), count));
            }
            Step::Map { page, count } => add(map(at(page), count)),
            Step::Protect { page, count } => {
                let (start, len) = (at(page), count * PAGE);
                add(Kind::Protect { start, len, prot: Prot::READ });
                if turn % 2 == 0 {
                    add(Kind::Protect { start, len, prot: rw });
                }
            }
            Step::Move { page, count } => {
                let (old, old_len) = (at(page), count * PAGE);
                let new = at(PAGES + page);
                add(Kind::Remap { old, old_len, new, new_len: old_len, flags: 3 });
                add(Kind::first(new, Access::Read));
                add(Kind::Remap { old: new, old_len, new: old, new_len: old_len, flags: 3 });
            }
            Step::Fork if count < 6 => {
                add(Kind::Spawn { child: count, birth: Birth::Fork });
                alive.push(count);
                count += 1;
            }
            Step::Exit if alive.len() > 1 => {
                add(Kind::Exit);
                alive.remove(place);
            }
            Step::Fork | Step::Exit => {}
        }
    }
    let thread = |process| ThreadInfo { process, name: String::new() };
    Trace {
        header: Header { page_size: 4096, recorded: Recorded::all(), ..Header::default() },
        processes: (0..count).map(|_| ProcessInfo { parent: None, pid: None }).collect(),
        threads: (0..count).map(thread).collect(),
        events: (0..)
            .zip(events)
            .map(|(time_us, (thread, kind))| Event { time_us, thread, kind })
            .collect(),
        ..Trace::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    /// Runs random programs on the subsystem.
    #[test]
    fn no_program_saves_more_faults_than_the_bound(
        steps in proptest::collection::vec((any::<usize>(), step()), 1..60),
        order in 1..=9u8,
    ) {
        let trace = trace(&steps);
        let plan = Plan::in_turn(&trace).unwrap();
        let gauged = |order| {
            let config = Config { memory_bytes: 16 << 20, cpus: 1, ..Config::default() };
            let native = Native::new(config).unwrap();
            native.vm().set(Setting::PrefaultMaxOrder(order));
            let gauged = replay_gauged(&native, &plan, || false).unwrap();
            native.audit(&[]).unwrap();
            gauged
        };
        let (off, with) = (gauged(0), gauged(order));
        let effect = effect(&plan, order, &off, &with);
        prop_assert!(effect.saved <= effect.bound, "{effect:?}");
        prop_assert!(effect.bound <= effect.touches, "{effect:?}");
        // Both executed the same operations, and prefault adds no fault.
        prop_assert_eq!(off.done.len(), with.done.len());
        for (off, with) in off.done.iter().zip(&with.done) {
            prop_assert_eq!(off.thread(), with.thread());
            prop_assert!(off.took() != Took::Nothing || with.took() == Took::Nothing);
        }
    }
}
