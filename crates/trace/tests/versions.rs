//! Files and streams of perf of Linux 3.10 to 6.16: the same run is read in the same way, and parts
//! that are missing are reported.

mod made;

use faultless_trace::census::Census;
use faultless_trace::error::Place;
use faultless_trace::event::{Access, Birth, Prot, Recorded};
use faultless_trace::plan::Plan;
use faultless_trace::{Error, Kind, Trace, parse, read};
use made::{CODE, Made, Packing, START, VERSIONS, Version, record};
use std::fs;
use std::io::Write;
use std::path::Path;

const PACKINGS: [Packing; 3] = [Packing::None, Packing::First, Packing::Second];

fn of(bytes: &[u8]) -> Result<Trace, Error> {
    parse(Path::new("some.data"), bytes)
}

fn kinds(trace: &Trace) -> Vec<Kind> {
    trace.events.iter().map(|event| event.kind).collect()
}

/// Checks that `trace` is the run of `made`.
fn check(version: Version, trace: &Trace) {
    let fault = |page, access, present| {
        let Kind::Fault { instruction, stack, .. } = Kind::first(page, access) else { panic!() };
        let _ = instruction;
        Kind::Fault { page, access, kernel: false, present, instruction: Some(0), stack }
    };
    let map = kinds(trace).into_iter().find(|kind| matches!(kind, Kind::Map { .. }));
    let Some(Kind::Map { start: START, len: 0x4000, prot, flags: 0x22, .. }) = map else {
        panic!("{version:?}: {map:?}")
    };
    assert_eq!(prot, Prot::READ | Prot::WRITE);
    let got: Vec<_> =
        kinds(trace).into_iter().filter(|kind| matches!(kind, Kind::Fault { .. })).collect();
    let want = [
        fault(CODE, Access::Exec, false),
        fault(START, Access::Write, false),
        fault(START + 0x1000, Access::Write, false),
        fault(START, Access::Write, true),
    ];
    assert_eq!(got, want, "{version:?}");
    let births = trace
        .events
        .iter()
        .filter(|event| matches!(event.kind, Kind::Spawn { birth: Birth::Fork, .. }));
    assert_eq!(births.count(), 1);
    let count = |wanted: fn(&Kind) -> bool| kinds(trace).iter().filter(|kind| wanted(kind)).count();
    assert_eq!(count(|kind| matches!(kind, Kind::Exit)), 2, "{version:?}");
    assert_eq!(count(|kind| matches!(kind, Kind::Exec)), usize::from(version.comm_exec));
    assert_eq!(trace.processes.len(), 2);
    Plan::new(trace).unwrap();
}

#[test]
fn files_of_all_versions_have_the_same_events() {
    for version in VERSIONS {
        for packing in PACKINGS {
            let trace = of(&Made::new(version).file(packing)).unwrap();
            check(version, &trace);
            assert_eq!(trace.header.made, format!("perf record, perf {}", version.name));
            assert_eq!(trace.header.cpus, 4);
        }
    }
}

#[test]
fn streams_have_the_events_of_files() {
    for version in VERSIONS {
        let made = Made::new(version);
        let file = of(&made.file(Packing::None)).unwrap();
        for packing in PACKINGS {
            let trace = of(&made.stream(packing)).unwrap();
            check(version, &trace);
            assert_eq!(trace.events, file.events);
            // Streams of old versions do not name the version and the kernel.
            let named = if version.features { file.header.clone() } else { trace.header.clone() };
            assert_eq!(trace.header, named);
            assert_eq!(trace.header.recorded, file.header.recorded);
        }
    }
}

#[test]
fn call_stack_of_a_call_precedes_its_event() {
    let version = Version { chains: true, ..VERSIONS[0] };
    let trace = of(&Made::new(version).file(Packing::None)).unwrap();
    check(version, &trace);
    let kinds = kinds(&trace);
    let map = kinds.iter().position(|kind| matches!(kind, Kind::Map { .. })).unwrap();
    let Kind::Caller { stack } = kinds[map - 1] else { panic!("{kinds:?}") };
    // The file does not exist.
    let modules: Vec<_> = trace.stacks.of(stack).map(|(_, function)| &*function.module).collect();
    assert_eq!(modules, ["app", "app"]);
    assert!(trace.header.recorded.contains(Recorded::STACKS));
    let pids: Vec<_> = trace.processes.iter().map(|process| process.pid).collect();
    assert_eq!(pids, [Some(100), Some(101)]);
    let callers = Census::of(&trace).unwrap().callers;
    assert!(callers.is_empty(), "the faults have no call stacks");
    // The call that failed has neither an event nor a call stack, and a call that frees no page has
    // no call stack.
    let advised = |kind: &Kind| match kind {
        Kind::Advise { start, advice, .. } => Some(((*start - START) >> 12, *advice)),
        _ => None,
    };
    let after_stack: Vec<_> = kinds
        .windows(2)
        .filter(|pair| matches!(pair[0], Kind::Caller { .. }))
        .map(|pair| advised(&pair[1]))
        .collect();
    assert_eq!(after_stack, [None, Some((2, 4))]);
    let all: Vec<_> = kinds.iter().filter_map(advised).collect();
    assert_eq!(all, [(2, 4), (0, 14)]);
}

/// Names of events come from the tracing data, from EVENT_UPDATE or from EVENT_DESC.
#[test]
fn stream_with_one_source_of_names_is_read() {
    let [newest, ..] = VERSIONS;
    let unnamed = Version { names: false, ..newest };
    for (version, missing) in [(newest, [12, 1]), (unnamed, [12, 12]), (unnamed, [1, 1])] {
        let trace = of(&Made::new(version).without(&missing).stream(Packing::None)).unwrap();
        check(version, &trace);
    }
    let error = of(&Made::new(unnamed).without(&[1, 12]).stream(Packing::None)).unwrap_err();
    assert!(error.reason.contains("no page faults were recorded"), "{error}");
}

#[test]
fn file_without_optional_features_is_read() {
    for version in VERSIONS {
        // The host, the kernel, the version of perf, the architecture, the number of CPUs, and the
        // layouts of tracepoints.
        let made = Made::new(version).without(&[1, 3, 4, 5, 6, 7]);
        let trace = of(&made.file(Packing::None)).unwrap();
        check(version, &trace);
        assert_eq!((&*trace.header.kernel, trace.header.cpus), ("", 0));
        let note = "the file does not name its architecture; x86-64 is assumed";
        assert!(trace.header.notes.iter().any(|it| it == note), "{:?}", trace.header.notes);
    }
    let undescribed = Made::new(VERSIONS[2]).without(&[12]).file(Packing::None);
    let error = of(&undescribed).unwrap_err();
    assert!(error.reason.contains("does not name its events (EVENT_DESC)"), "{error}");
}

#[test]
fn all_sizes_of_attributes_are_read() {
    for attr in [64, 72, 80, 96, 104, 112, 120, 128, 136, 144] {
        let version = Version { attr, ..VERSIONS[4] };
        let made = Made::new(version);
        check(version, &of(&made.file(Packing::None)).unwrap());
        check(version, &of(&made.stream(Packing::None)).unwrap());
    }
}

/// Without times, the order of mappings, faults and ends of processes is unknown.
#[test]
fn file_with_records_without_times_is_rejected() {
    let version = Version { sample_id_all: false, ..VERSIONS[6] };
    for bytes in [Made::new(version).file(Packing::None), Made::new(version).stream(Packing::None)]
    {
        let error = of(&bytes).unwrap_err().to_string();
        let why = "mappings and processes have no times (sample_id_all is off)";
        assert!(error.contains(why) && error.contains("faultless record"), "{error}");
    }
}

#[test]
fn streams_of_other_kinds_are_named() {
    let mut big = b"2ELIFREP".to_vec();
    big.extend(16u64.to_be_bytes());
    assert!(of(&big).unwrap_err().reason.contains("of a big-endian machine"));
    let start = [b"PERFILE2".as_slice(), &16u64.to_le_bytes()].concat();
    let reason = |records: &[u8]| of(&[&start[..], records].concat()).unwrap_err().to_string();
    let empty = reason(&[]);
    assert!(empty.contains("offset 0x10: the stream ends before its first event"), "{empty}");
    // A trace of a processor, whose contents follow the record.
    let aux = reason(&record(71, 0, &[0; 40]));
    assert!(aux.contains("offset 0x10: holds a hardware trace"), "{aux}");
    let attr = reason(&record(64, 0, &[0; 80]));
    assert!(attr.contains("offset 0x1c: event attributes of 0 bytes"), "{attr}");
    // perf of two streams, one behind the other.
    let made = Made::new(VERSIONS[0]);
    let mut twice = made.stream(Packing::None);
    let second = twice.len();
    twice.extend(twice.clone());
    let error = of(&twice).unwrap_err();
    assert_eq!(error.place, Place::Offset(second as u64), "{error}");
    assert!(error.reason.contains("a second recording begins here"), "{error}");
}

#[test]
fn truncated_stream_has_a_note_about_its_end() {
    for packing in PACKINGS {
        let whole = Made::new(VERSIONS[1]).stream(packing);
        let mut read = 0;
        for len in 16..whole.len() {
            match of(&whole[..len]) {
                Ok(trace) => {
                    let cut = trace.header.notes.iter().find(|it| it.contains("ends within"));
                    read += usize::from(cut.is_some());
                }
                Err(error) => {
                    let Place::Offset(at) = error.place else { panic!("{len}: {error}") };
                    assert!(at <= len as u64, "{len}: {error}");
                }
            }
        }
        assert!(read > 50, "{packing:?}: {read}");
    }
}

/// A record keeps its place in errors, also if the layouts of tracepoints precede the record.
#[test]
fn error_in_a_stream_names_the_place_in_the_stream() {
    let whole = Made::new(VERSIONS[1]).stream(Packing::None);
    let exit = whole.len() - 8 - 64;
    assert_eq!(whole[exit], 4, "the last exit");
    let mut bytes = whole.clone();
    bytes[exit + 6..exit + 8].copy_from_slice(&3u16.to_le_bytes());
    let error = of(&bytes).unwrap_err();
    assert_eq!(error.place, Place::Offset(exit as u64));
    assert!(error.reason.contains("a record of 3 bytes: the stream is damaged"), "{error}");
    // Contents that are read from the converted file.
    let mut bytes = Made::new(VERSIONS[1]).stream(Packing::First);
    let frame = [0x28, 0xb5, 0x2f, 0xfd];
    let at = bytes.windows(4).position(|window| window == frame).unwrap();
    bytes[at] = 0;
    let error = of(&bytes).unwrap_err();
    assert_eq!(error.place, Place::Offset(at as u64 - 8), "{error}");
    assert!(error.reason.contains("no compressed data"), "{error}");
}

#[test]
fn stream_is_read_from_a_file_and_from_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    for packing in PACKINGS {
        let bytes = Made::new(VERSIONS[0]).stream(packing);
        let file = dir.path().join("stream.data");
        fs::write(&file, &bytes).unwrap();
        assert_eq!(read(&file).unwrap(), of(&bytes).unwrap());
        let (from, mut to) = std::io::pipe().unwrap();
        let writer = std::thread::spawn(move || to.write_all(&bytes).unwrap());
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&from));
        assert_eq!(read(Path::new(&path)).unwrap(), read(&file).unwrap());
        writer.join().unwrap();
    }
}

/// A stream cannot make the reader keep more than a bounded description.
#[test]
fn description_of_a_stream_is_bounded() {
    let start = [b"PERFILE2".as_slice(), &16u64.to_le_bytes()].concat();
    let feature = record(80, 0, &[&[3, 0, 0, 0, 0, 0, 0, 0][..], &vec![1; 65_000]].concat());
    let bytes = [start, feature.repeat(1100)].concat();
    let error = of(&bytes).unwrap_err().to_string();
    assert!(error.contains("the description of the events has more than 64 MiB"), "{error}");
}
