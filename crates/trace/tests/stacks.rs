//! Call stacks of recordings of stock `perf record`, of the program in `data/stacks.c`.

use faultless_trace::event::{Kind, Recorded, Trace};
use faultless_trace::{compact, parse};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

const PROGRAM: &[u8] = include_bytes!("data/stacks");
/// The same program without frame pointers.
const WITHOUT_POINTERS: &[u8] = include_bytes!("data/stacks-tables");
const BY_FRAME_POINTERS: &[u8] = include_bytes!("data/stacks-fp.perf.data");
const BY_TABLES: &[u8] = include_bytes!("data/stacks-dwarf.perf.data");
/// The program in the recordings, and the bytes of its name with the padding.
const RECORDED: &[u8; 16] = b"/tmp/st/stacks\0\0";

/// Returns the faults of each stack of `trace`, named from the innermost frame on.
fn stacks(trace: &Trace) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for event in &trace.events {
        if let Kind::Fault { stack, .. } = event.kind {
            let labels: Vec<_> =
                trace.stacks.of(stack).map(|(_, function)| function.label()).collect();
            *counts.entry(labels.join(" ")).or_default() += 1;
        }
    }
    counts
}

/// Reads `recording` of the program in the file `program`.
fn read(recording: &[u8], program: &Path) -> Trace {
    let mut name = [0; 16];
    let path = program.as_os_str().as_encoded_bytes();
    assert!(path.len() < name.len(), "{}", program.display());
    name[..path.len()].copy_from_slice(path);
    let mut bytes = recording.to_vec();
    let places: Vec<_> =
        (0..bytes.len() - 16).filter(|at| bytes[*at..].starts_with(RECORDED)).collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at..at + 16].copy_from_slice(&name);
    }
    parse(Path::new("stacks.perf.data"), &bytes).unwrap()
}

#[test]
fn frames_have_the_names_of_their_functions() {
    for (recording, contents) in [(BY_FRAME_POINTERS, PROGRAM), (BY_TABLES, WITHOUT_POINTERS)] {
        // The length of a name in the recording limits the length of the name here.
        let mut program = tempfile::Builder::new().prefix("f").tempfile_in("/tmp").unwrap();
        program.write_all(contents).unwrap();
        let trace = read(recording, program.path());
        assert!(trace.header.recorded.contains(Recorded::STACKS));
        let stacks = stacks(&trace);
        let of = |inner: &str| -> usize {
            stacks
                .iter()
                .filter(|(stack, _)| stack.starts_with(inner))
                .map(|(_, count)| count)
                .sum()
        };
        assert_eq!((of("touch eight _start"), of("touch one _start")), (8, 1), "{stacks:?}");
        let bytes = compact::encode(Path::new("stacks.fltrace"), &trace).unwrap();
        assert_eq!(compact::parse(Path::new("stacks.fltrace"), &bytes).unwrap(), trace);
    }
}

#[test]
fn frames_of_a_missing_program_have_its_name() {
    let missing = Path::new("/tmp/no/such");
    let trace = read(BY_FRAME_POINTERS, missing);
    let stacks = stacks(&trace);
    let deepest = stacks.keys().map(|stack| stack.split(' ').count()).max();
    assert!(deepest >= Some(3), "{stacks:?}");
    assert!(stacks.keys().any(|stack| stack.starts_with("such such such")), "{stacks:?}");
    // Tables are read from the program, so only the innermost frames can be found.
    let trace = read(BY_TABLES, missing);
    assert!(self::stacks(&trace).keys().any(|stack| stack.starts_with("such")));
}

#[test]
fn file_that_is_no_program_gives_no_names() {
    let mut program = tempfile::Builder::new().prefix("f").tempfile_in("/tmp").unwrap();
    program.write_all(&PROGRAM[..200]).unwrap();
    let name = program.path().file_name().unwrap().to_string_lossy().into_owned();
    for recording in [BY_FRAME_POINTERS, BY_TABLES] {
        let stacks = stacks(&read(recording, program.path()));
        assert!(stacks.keys().any(|stack| stack.starts_with(&name)), "{stacks:?}");
    }
    fs::write(program.path(), b"").unwrap();
    assert!(!stacks(&read(BY_TABLES, program.path())).is_empty());
}
