use super::*;
use faultless::{Locking, Setting};
use faultless_native::{Checked, Config};
use faultless_trace::event::Backing;
use faultless_trace::event::{Access as Traced, Header, Prot as TracedProt, Recorded};
use faultless_trace::event::{Birth, Event, Kind, ProcessInfo, ThreadInfo, Trace};
use faultless_trace::recordings;

/// Creates a machine on which each touched page is a fault.
fn native(cpus: usize, memory_bytes: u64) -> Native {
    let checked = Checked::Panic;
    let native = Native::new(Config { memory_bytes, cpus, checked, ..Config::default() }).unwrap();
    native.vm().set(Setting::PrefaultMaxOrder(0));
    native
}

fn never() -> bool {
    false
}

/// Creates a plan of these `(thread, kind)` events, by threads of these processes.
fn plan(processes: &[u32], events: &[(u32, Kind)]) -> Plan {
    Plan::new(&source(processes, events)).unwrap()
}

fn source(processes: &[u32], events: &[(u32, Kind)]) -> Trace {
    let count = processes.iter().max().map_or(0, |last| last + 1);
    let thread = |&process| ThreadInfo { process, name: "t".into() };
    let event = |(time_us, &(thread, kind)): (u64, &(u32, Kind))| Event { time_us, thread, kind };
    Trace {
        header: Header { page_size: 4096, recorded: Recorded::all(), ..Header::default() },
        processes: (0..count).map(|_| ProcessInfo { parent: None, pid: None }).collect(),
        threads: processes.iter().map(thread).collect(),
        events: (0..).zip(events).map(event).collect(),
        ..Trace::default()
    }
}

fn map(start: u64, pages: u64, backing: Backing) -> Kind {
    let prot = TracedProt::READ | TracedProt::WRITE;
    Kind::Map { start, len: pages * 4096, prot, flags: 0x22, backing }
}

#[test]
fn replayed_operations_change_memory_as_recorded() {
    const A: u64 = 0x10_0000;
    const B: u64 = 0x20_0000;
    const HEAP: u64 = 0x40_0000;
    const STACK: u64 = 0x7fff_0000_0000;
    let write = |page| (0, Kind::first(page, Traced::Write));
    let none = TracedProt::empty();
    let plan = plan(
        &[0, 0, 1, 2],
        &[
            (0, map(A, 4, Backing::Anon)),
            write(A),
            (0, Kind::first(A + 4096, Traced::Read)),
            (0, Kind::Protect { start: A + 8192, len: 4096, prot: none }),
            (0, Kind::Remap { old: A, old_len: 8192, new: B, new_len: 16384, flags: 3 }),
            write(B + 8192),
            (0, Kind::Advise { start: B, len: 4096, advice: 4 }),
            write(B),
            (0, Kind::Advise { start: B, len: 4096, advice: 250 }),
            (0, Kind::Brk { end: HEAP + 100 }),
            (0, Kind::Brk { end: HEAP + 8192 + 100 }),
            write(HEAP + 8192),
            (0, Kind::Brk { end: HEAP + 100 }),
            (0, map(STACK, 2, Backing::Stack)),
            write(STACK - 4096),
            (0, Kind::Spawn { child: 1, birth: Birth::Thread }),
            (1, Kind::first(B + 4096, Traced::Write)),
            (0, Kind::Spawn { child: 2, birth: Birth::Fork }),
            (2, Kind::first(B, Traced::Write)),
            (2, Kind::Exec),
            (2, map(A, 1, Backing::Anon)),
            (2, Kind::first(A, Traced::Write)),
            (2, Kind::Exit),
            (0, Kind::Spawn { child: 3, birth: Birth::Vfork }),
            (3, Kind::Exec),
            (3, map(B, 1, Backing::SharedAnon)),
            (3, Kind::first(B, Traced::Read)),
            (3, Kind::Exit),
            (1, Kind::Exit),
            (0, Kind::Unmap { start: B, len: 16384 }),
            (0, Kind::Exit),
        ],
    );
    for locking in Locking::ALL {
        let native = native(4, 8 << 20);
        native.vm().set(Setting::Locking(locking));
        let replayed = replay(&native, &plan, never).unwrap();
        assert!(replayed.complete);
        assert_eq!(replayed.sample.operations, plan.op_count() as u64);
        assert_eq!(replayed.advice_ignored, 1);
        let count = |counter| replayed.sample.counter(counter).unwrap();
        assert_eq!(count(Counter::StackGrowth), 1);
        assert_eq!(count(Counter::ZeroPage), 1);
        // Two copies: the zero page after a write, and a page of the parent, written by the
        // forked child before its exec. The second is a reuse without a copy if the parent has
        // already unmapped the page, since no wait orders these operations.
        assert!(count(Counter::CowCopy) >= 1);
        assert_eq!(count(Counter::CowCopy) + count(Counter::CowReuse), 2);
        assert_eq!(count(Counter::SharedPage), 1);
        native.audit(&[]).unwrap();
    }
}

#[test]
fn fewer_cpus_than_threads_do_not_deadlock() {
    for name in ["cargo", "redis"] {
        let trace = recordings::find(name).unwrap().trace().unwrap();
        let plan = Plan::new(&trace).unwrap();
        for cpus in [1, 3] {
            let native = native(cpus, 512 << 20);
            assert!(replay(&native, &plan, never).unwrap().complete);
            native.audit(&[]).unwrap();
        }
    }
}

#[test]
fn failed_operation_ends_all_threads_and_is_named() {
    let native = native(8, 512 << 20);
    native.vm().set(Setting::FrameLimit(500));
    let trace = recordings::find("javac").unwrap().trace().unwrap();
    let error = replay(&native, &Plan::new(&trace).unwrap(), never).unwrap_err();
    assert!(error.to_string().contains("out of memory at 0x"), "{error}");
    native.vm().set(Setting::FrameLimit(u64::MAX));
    native.audit(&[]).unwrap();
}

/// Memory that represents a file is not prefaulted, and resident pages are counted at their
/// peak.
#[test]
fn only_anonymous_memory_is_prefaulted() {
    const AT: u64 = 0x10_0000;
    for (backing, ahead) in [(Backing::Anon, true), (Backing::File, false)] {
        let touches = (0..20).map(|page| (0, Kind::first(AT + page * 4096, Traced::Write)));
        let mut events = vec![(0, map(AT, 64, backing))];
        events.extend(touches);
        events.push((0, Kind::Unmap { start: AT, len: 64 << 12 }));
        events.push((0, Kind::Exit));
        let plan = plan(&[0], &events);
        let native = native(1, 8 << 20);
        native.vm().set(Setting::PrefaultMaxOrder(3));
        let gauged = replay_gauged(&native, &plan, never).unwrap();
        let Gauged { replayed, peak: most, done, resident } = gauged;
        assert_eq!((done.len(), resident.len()), (plan.op_count(), plan.op_count()));
        // No page remains after munmap, or after the end of the process.
        assert_eq!(resident.iter().max(), Some(&(most as u32)));
        assert_eq!((resident[1], resident[21], resident[22]), (1, 0, 0));
        let faults = done.iter().filter(|done| done.took() != Took::Nothing).count() as u64;
        assert_eq!(faults, replayed.sample.faults);
        let count = |counter| replayed.sample.counter(counter).unwrap();
        let (mapped, wasted) = (count(Counter::PrefaultPage), count(Counter::PrefaultWasted));
        assert_eq!((mapped > 0, wasted > 0), (ahead, ahead), "{backing:?}");
        assert_eq!((replayed.sample.faults + mapped, most - wasted), (most, 20), "{backing:?}");
        native.audit(&[]).unwrap();
    }
}

/// Pages from before the recording are restored before the measurement, and cause no fault.
#[test]
fn resident_pages_are_restored_without_faults() {
    const AT: u64 = 0x10_0000;
    let area = |start, backing| {
        let prot = TracedProt::READ | TracedProt::WRITE;
        (0, Kind::Area { start, len: 64 << 12, prot, backing })
    };
    let resident = |page: u64, pages: u64, written| {
        let start = AT + page * 4096;
        (0, Kind::Resident { start, len: pages << 12, written })
    };
    let store = |page: u64| Kind::first(AT + page * 4096, Traced::Write);
    let events = [
        area(AT, Backing::Anon),
        area(AT + (1 << 20), Backing::Heap),
        resident(0, 8, true),
        resident(8, 4, false),
        resident(256, 2, true),
        (0, store(3)),
        (1, store(9)),
        (0, store(20)),
        (0, Kind::Brk { end: AT + (1 << 20) + (32 << 12) }),
        (0, Kind::Exit),
        (1, Kind::Exit),
    ];
    let plan = plan(&[0, 0], &events);
    // A mapping, the two breaks of the heap, and three ranges.
    assert_eq!(plan.threads()[0].restoring(), 6);
    for gauged in [false, true] {
        let native = native(2, 8 << 20);
        let replayed = if gauged {
            let in_turn = Plan::in_turn(&source(&[0, 0], &events)).unwrap();
            let gauged = replay_gauged(&native, &in_turn, never).unwrap();
            // The zero page does not count.
            assert_eq!((gauged.resident[5], gauged.peak), (10, 12));
            gauged.replayed
        } else {
            replay(&native, &plan, never).unwrap()
        };
        assert!(replayed.complete);
        let count = |counter| replayed.sample.counter(counter).unwrap();
        // The store to the zero page, and the store to an absent page.
        assert_eq!(replayed.sample.faults, 2);
        assert_eq!((count(Counter::CowCopy), count(Counter::ZeroPage)), (1, 0));
        native.audit(&[]).unwrap();
    }
    let profile = faultless_virtual::Profile::bundled("two-socket").unwrap();
    let config =
        faultless_virtual::Config { cpus: 2, memory_bytes: 64 << 20, slow_bytes: 0, seed: 0 };
    let system = faultless_virtual::Virtual::new(&profile, config).unwrap();
    system.set("prefault_max_order=0").unwrap();
    let sample = super::super::simulated::replay(&system, &plan).unwrap();
    assert_eq!((sample.faults, sample.counter(Counter::CowCopy)), (2, Some(1)));
    system.audit(&[]).unwrap();
}

#[test]
fn interrupted_replay_is_incomplete() {
    let native = native(2, 64 << 20);
    let plan = plan(&[0], &[(0, map(0x10_0000, 1, Backing::Anon)), (0, Kind::Exit)]);
    let replayed = replay(&native, &plan, || true).unwrap();
    assert!(!replayed.complete);
    assert_eq!(replayed.sample.operations, 0);
}
