//! The memory of this process that a replay without times needs. The only test of its program,
//! because other tests need memory, too.

use faultless_analysis::replay::prefault::effects;
use faultless_analysis::replay::source::Source;
use faultless_analysis::settings::{Regime, Settings};
use faultless_trace::Trace;
use faultless_trace::event::{
    Access, Backing, Birth, Event, Header, Kind, ProcessInfo, Prot, Recorded, ThreadInfo,
};
use std::fs;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
/// The pages that each process touches.
const PAGES: u64 = 16 * MIB / PAGE;
const CHILDREN: u32 = 24;

/// Returns the recording of a program that starts its children one after another.
fn children_in_sequence() -> Trace {
    let mut events = Vec::new();
    for child in 1..=CHILDREN {
        events.push((0, Kind::Spawn { child, birth: Birth::Fork }));
        let (start, prot) = (1 << 40, Prot::READ | Prot::WRITE);
        let (len, backing) = (PAGES * PAGE, Backing::Anon);
        events.push((child, Kind::Map { start, len, prot, flags: 0x22, backing }));
        events.extend((0..PAGES).map(|page| {
            let page = start + page * PAGE;
            (child, Kind::first(page, Access::Write))
        }));
        events.push((child, Kind::Exit));
    }
    let thread = |process| ThreadInfo { process, name: String::new() };
    Trace {
        header: Header { page_size: PAGE as u32, recorded: Recorded::all(), ..Header::default() },
        processes: (0..=CHILDREN).map(|_| ProcessInfo { parent: None, pid: None }).collect(),
        threads: (0..=CHILDREN).map(thread).collect(),
        events: (0..)
            .zip(events)
            .map(|(time_us, (thread, kind))| Event { time_us, thread, kind })
            .collect(),
        ..Trace::default()
    }
}

/// Returns the peak resident memory of this process in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("a process has a status");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("a peak");
    let kib: u64 = line.split_whitespace().nth(1).expect("a number").parse().expect("a number");
    kib << 10
}

#[test]
fn counted_replay_of_processes_needs_the_memory_of_one() {
    let source = Source::new("children".into(), children_in_sequence()).expect("consistent");
    let all = u64::from(CHILDREN) * PAGES * PAGE;
    assert!(source.memory() > all, "the machine has room for all at once");
    let before = peak();
    let regime = Regime { order: 5, pool: 0 };
    let effects = effects(&source, &Settings::new(&[]), &[regime]).expect("replayed");
    let [effect] = effects.expect("complete")[..] else { panic!("one effect") };
    assert_eq!(effect.faults_off, u64::from(CHILDREN) * PAGES);
    let needed = peak() - before;
    assert!(needed < all / 2, "{} MiB", needed / MIB);
}
