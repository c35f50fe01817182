//! The memory for each fault of a recording that is encoded, read, planned, replayed and counted.
//! The only test of its program, because other tests need memory, too.
//!
//! The memory of the replayed program is not counted: it comes from the host as a mapping.

use faultless_analysis::advise::findings::Findings;
use faultless_analysis::advise::program::Program;
use faultless_analysis::advise::sysfs::{Shmem, Sizes};
use faultless_analysis::replay::source::Source;
use faultless_trace::event::{
    Access, Backing, Birth, Event, Events, Header, Kind, ProcessInfo, Prot, Recorded, ThreadInfo,
};
use faultless_trace::{Trace, compact};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: u64 = 4096;
/// Pages that each of two threads touches in turn, and returns.
const PAGES: u64 = 2048;
const ROUNDS: u64 = 40;
const FAULTS: u64 = 2 * PAGES * ROUNDS;
/// Bytes for each fault that a recording of ten million faults may use of 1 GiB.
const MOST: u64 = (1 << 30) / 10_000_000;

/// Counts the allocated bytes, and their peak.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: each call is passed on unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the result of `work`, and its peak memory in bytes for each fault.
fn bytes_of<R>(work: impl FnOnce() -> R) -> (R, u64) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = work();
    (result, (PEAK.load(Ordering::Relaxed) - before) as u64 / FAULTS)
}

/// Returns the events of two threads that touch and return their memory in turn.
fn events() -> Events {
    let (prot, backing) = (Prot::READ | Prot::WRITE, Backing::Anon);
    let start = |thread: u32| (1 << 40) + u64::from(thread) * (1 << 30);
    let len = PAGES * PAGE;
    let mut time_us = 0;
    let mut events = Events::default();
    let mut push = |thread, kind| {
        time_us += 1;
        events.push(Event { time_us, thread, kind });
    };
    push(0, Kind::Spawn { child: 1, birth: Birth::Thread });
    for thread in 0..2 {
        push(thread, Kind::Map { start: start(thread), len, prot, flags: 0x22, backing });
    }
    for _ in 0..ROUNDS {
        for page in 0..PAGES {
            for thread in 0..2 {
                let page = start(thread) + page * PAGE;
                let mut fault = Kind::first(page, Access::Write);
                if let Kind::Fault { instruction, .. } = &mut fault {
                    *instruction = Some((page / PAGE) as u16 % 64);
                }
                push(thread, fault);
            }
        }
        for thread in 0..2 {
            push(thread, Kind::Advise { start: start(thread), len, advice: 4 });
        }
    }
    events
}

#[test]
fn ten_million_faults_fit_in_one_gib() {
    let (events, of_events) = bytes_of(events);
    let thread = ThreadInfo { process: 0, name: String::new() };
    let trace = Trace {
        header: Header { page_size: PAGE as u32, recorded: Recorded::all(), ..Header::default() },
        processes: vec![ProcessInfo { parent: None, pid: None }],
        threads: vec![thread.clone(), thread],
        events,
        ..Trace::default()
    };
    let path = Path::new("many.fltrace");
    let (file, to_encode) = bytes_of(|| compact::encode(path, &trace).expect("encoded"));
    let (trace, to_parse) = bytes_of(|| {
        drop(trace);
        compact::parse(path, &file).expect("decoded")
    });
    let (source, to_plan) = bytes_of(|| Source::new("many".into(), trace).expect("planned"));
    let program = Program::of(OsStr::new("many"), &source.trace);
    let (found, to_count) =
        bytes_of(|| Findings::of(&source, program, Sizes::read(), Shmem::read(), &()));
    let found = found.expect("counted");
    assert_eq!(found.census.zeroed, FAULTS);
    assert_eq!(found.prefault.expect("replayed").faults_off, FAULTS);
    let held = of_events + to_plan;
    println!(
        "bytes a fault: {of_events} events, {to_encode} to encode, {to_parse} to parse, {to_plan} \
         to plan, {to_count} to count"
    );
    assert!(of_events <= 16, "{of_events} bytes for each event");
    for (what, bytes) in [("encode", to_encode), ("parse", to_parse), ("count", to_count)] {
        assert!(
            held + bytes <= MOST,
            "{} bytes a fault to {what}; the most is {MOST}",
            held + bytes
        );
    }
}
