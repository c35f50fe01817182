//! Files of a perf that was killed: the records up to the end are read, and a note reports the
//! missing parts.

mod made;

use faultless_trace::error::Place;
use faultless_trace::plan::Plan;
use faultless_trace::{Error, Trace, compact, parse, read};
use made::{Made, Packing, VERSIONS};
use std::fs;
use std::path::Path;

const PACKINGS: [Packing; 3] = [Packing::None, Packing::First, Packing::Second];

fn of(bytes: &[u8]) -> Result<Trace, Error> {
    parse(Path::new("some.data"), bytes)
}

/// Returns the note about the missing end.
fn note(trace: &Trace) -> Option<&String> {
    let start = "perf ended before it completed the file";
    trace.header.notes.iter().find(|note| note.starts_with(start))
}

/// Returns the word of the header at `at`.
fn word(file: &[u8], at: usize) -> usize {
    u64::from_le_bytes(*file[at..].first_chunk().unwrap()) as usize
}

#[test]
fn unended_file_has_the_events_of_a_complete_file() {
    for version in VERSIONS {
        for packing in PACKINGS {
            let made = Made::of_faults(version);
            let (whole, trace) =
                (of(&made.file(packing)).unwrap(), of(&made.unended(packing)).unwrap());
            assert_eq!(whole.summary().user_faults, 4, "{version:?}");
            assert_eq!(trace.events, whole.events, "{version:?} {packing:?}");
            assert_eq!((trace.processes.len(), trace.threads.len()), (2, 2));
            assert_eq!((note(&whole), &*trace.header.kernel, trace.header.cpus), (None, "", 0));
            let note = note(&trace).unwrap();
            let count =
                if packing == Packing::None { "12 records are read" } else { "records are" };
            assert!(note.contains(count) && !note.contains("no whole record"), "{note}");
            for missing in ["the end of the recording", "the number of CPUs", "build identifiers"] {
                assert!(note.contains(missing), "{note}");
            }
            Plan::new(&trace).unwrap();
        }
    }
}

#[test]
fn unended_file_is_read_up_to_its_last_whole_record() {
    for packing in PACKINGS {
        let made = Made::of_faults(VERSIONS[1]);
        let (whole, file) = (of(&made.file(packing)).unwrap(), made.unended(packing));
        let (begin, mut most) = (word(&file, 40), 0);
        for len in 0..file.len() {
            match of(&file[..len]) {
                Ok(trace) => {
                    let events = trace.events.len();
                    assert!(trace.events.iter().eq(whole.events.iter().take(events)), "{len}");
                    assert!(events >= most, "{len}: {events} events after {most}");
                    assert!(note(&trace).is_some(), "{len}");
                    most = events;
                }
                Err(error) => {
                    assert!(
                        matches!(error.place, Place::Offset(at) if at <= len as u64),
                        "{error}"
                    );
                    assert!(len < begin + 300, "{len}: {error}");
                }
            }
        }
        assert!(most + 3 >= whole.events.len(), "{packing:?}: {most}");
        let error = of(&file[..begin]).unwrap_err().to_string();
        assert!(error.contains("the file has no records: perf record was killed"), "{error}");
    }
}

#[test]
fn process_lives_until_its_last_thread_ends() {
    let trace = of(&Made::of_threads(VERSIONS[1]).file(Packing::None)).unwrap();
    // The two processes of the run, and one with three threads.
    assert_eq!((trace.processes.len(), trace.threads.len()), (3, 5));
}

#[test]
fn recording_is_cut_at_the_most_threads() {
    let of = |count| of(&Made::of_processes(VERSIONS[1], count).file(Packing::None)).unwrap();
    let cut = |trace: &Trace| trace.header.notes.iter().any(|note| note.contains("is cut at"));
    // The run itself has two processes.
    let below = of(65_533);
    assert_eq!((below.threads.len(), cut(&below), below.summary().user_faults), (65_535, false, 5));
    let beyond = of(65_600);
    assert_eq!((beyond.threads.len(), cut(&beyond)), (65_536, true));
    assert_eq!(beyond.summary().user_faults, 4, "the last fault is missing");
    compact::encode(Path::new("some.fltrace"), &beyond).unwrap();
}

#[test]
fn long_note_is_shortened_in_the_portable_form() {
    let path = Path::new("some.fltrace");
    let mut trace = of(&Made::of_faults(VERSIONS[1]).file(Packing::None)).unwrap();
    trace.header.notes.push("é".repeat(4_000));
    let read = parse(path, &compact::encode(path, &trace).unwrap()).unwrap();
    assert_eq!(read.header.notes.last().map(String::len), Some(4_096));
}

#[test]
fn bytes_after_the_last_record_are_omitted() {
    let made = Made::of_faults(VERSIONS[0]);
    let (whole, file) = (of(&made.file(Packing::None)).unwrap(), made.unended(Packing::None));
    // A record that perf has not written in whole, and blocks that the file system has not written.
    for rest in [&made.records[..20], &[0; 8192], &[0xff; 100], &[0; 7], &[0, 0, 0, 0, 0, 0, 8, 0]]
    {
        let trace = of(&[&file[..], rest].concat()).unwrap();
        assert_eq!(trace.events, whole.events);
        let part = format!("The last {} bytes, from offset {:#x} on,", rest.len(), file.len());
        assert!(note(&trace).unwrap().contains(&part), "{:?}", trace.header.notes);
    }
}

#[test]
fn unended_file_on_a_disk_is_read_like_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for packing in PACKINGS {
        let bytes = Made::of_faults(VERSIONS[0]).unended(packing);
        let file = dir.path().join("some.data");
        fs::write(&file, &bytes).unwrap();
        assert_eq!(read(&file).unwrap(), of(&bytes).unwrap());
    }
}

/// The names of tracepoints are in a section that is missing.
#[test]
fn tracepoints_that_the_running_kernel_lacks_are_refused() {
    let mut file = Made::new(VERSIONS[0]).unended(Packing::None);
    let config = word(&file, 24) + 8;
    file[config..config + 8].copy_from_slice(&60_001u64.to_le_bytes());
    let error = of(&file).unwrap_err();
    assert_eq!(error.place, Place::Offset(24));
    for part in ["the running kernel has other numbers", "on the machine of the recording"] {
        assert!(error.reason.contains(part), "{error}");
    }
}

#[test]
fn damaged_attributes_of_an_unended_file_are_named_with_their_place() {
    let whole = Made::of_faults(VERSIONS[0]).unended(Packing::None);
    let attrs = word(&whole, 24);
    let ids = attrs + VERSIONS[0].attr;
    for (at, value, place, why) in [
        (16, 70, 16, "event attributes of 54 bytes"),
        (attrs + 4, 60, attrs + 4, "an event attribute of 60 bytes"),
        (ids + 8, 7, ids, "identifiers of 7 bytes"),
        (ids + 14, 1, ids, "reaches beyond the file's end"),
    ] {
        let mut file = whole.clone();
        file[at] = value;
        let error = of(&file).unwrap_err();
        assert_eq!(error.place, Place::Offset(place as u64), "{error}");
        assert!(error.reason.contains(why), "{error}");
    }
}
