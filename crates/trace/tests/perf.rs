//! Variants of a `perf.data` file that hold less than they seem to, or that other versions of perf
//! write: refused with a remedy, or read with a count of what is missing.

use faultless_trace::lackey::Addresses;
use faultless_trace::{Error, Trace, open, parse};
use std::fs;
use std::path::Path;

const FULL: &[u8] = include_bytes!("data/fixture.perf.data");

const SAMPLE_PERIOD: usize = 16;
const FLAGS: usize = 40;
const FREQUENCY: u8 = 1 << 2;
const ATTR: usize = 128;
const LOST: u8 = 2;
const EXIT: u8 = 4;
const THROTTLE: u8 = 5;
const SAMPLE: u8 = 9;
const GUEST_USER: u8 = 5;

fn word(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

fn read(bytes: &[u8]) -> Result<Trace, Error> {
    parse(Path::new("some.data"), bytes)
}

fn reason(bytes: &[u8]) -> String {
    read(bytes).unwrap_err().to_string()
}

fn faults(trace: &Trace) -> usize {
    let summary = trace.summary();
    summary.user_faults + summary.kernel_faults
}

/// The place of the attribute that describes the event `name` in the description of the events.
fn attribute(bytes: &[u8], name: &str) -> usize {
    // After the attribute: the count of identifiers, the length of the name, the name.
    let padded = [name.as_bytes(), b"\0"].concat();
    let at = bytes.windows(padded.len()).rposition(|window| window == padded).unwrap();
    at - 8 - ATTR
}

/// The places of the records of type `kind`.
fn records(bytes: &[u8], kind: u8) -> Vec<usize> {
    let (mut at, mut found) = (word(bytes, 40), Vec::new());
    let end = at + word(bytes, 48);
    while at < end {
        if bytes[at..at + 4] == [kind, 0, 0, 0] {
            found.push(at);
        }
        at += usize::from(u16::from_le_bytes([bytes[at + 6], bytes[at + 7]]));
    }
    found
}

#[test]
fn a_sampled_recording_is_refused_with_the_right_command() {
    for name in ["exceptions:page_fault_user", "syscalls:sys_enter_mmap", "task:task_newtask"] {
        let attr = attribute(FULL, name);
        assert_eq!(word(FULL, attr + SAMPLE_PERIOD), 1, "{name}");
        for (period, frequency, part) in [
            (28, false, "one in 28 of its events"),
            (0, false, "none of its events"),
            (4000, true, "some 4000 of its events in a second"),
        ] {
            let mut bytes = FULL.to_vec();
            bytes[attr + SAMPLE_PERIOD..attr + SAMPLE_PERIOD + 8]
                .copy_from_slice(&u64::to_le_bytes(period));
            if frequency {
                bytes[attr + FLAGS + 1] |= FREQUENCY;
            }
            let why = reason(&bytes);
            assert!(why.contains(name) && why.contains(part), "{why}");
            assert!(why.contains("`perf record -c 1 -d -e page-faults`"), "{why}");
        }
    }
}

#[test]
fn lost_events_and_throttling_are_counted() {
    let exit = *records(FULL, EXIT).last().unwrap();
    let mut bytes = FULL.to_vec();
    bytes[exit] = LOST;
    bytes[exit + 16..exit + 24].copy_from_slice(&7u64.to_le_bytes());
    assert_eq!(read(&bytes).unwrap().header.lost, 7);
    let mut bytes = FULL.to_vec();
    bytes[exit] = THROTTLE;
    let header = read(&bytes).unwrap().header;
    assert_eq!(header.lost, 1);
    assert!(header.notes.iter().any(|note| note.contains("throttled events 1 times")));
}

#[test]
fn samples_of_guests_are_left_out() {
    let all = faults(&read(FULL).unwrap());
    let mut bytes = FULL.to_vec();
    let samples = records(FULL, SAMPLE);
    for sample in &samples {
        bytes[sample + 4] = bytes[sample + 4] & !7 | GUEST_USER;
    }
    let trace = read(&bytes).unwrap();
    assert!(all > 0 && faults(&trace) == 0);
    let note = format!("{} records of virtual machines' guests are left out", samples.len());
    assert!(trace.header.notes.contains(&note), "{:?}", trace.header.notes);
}

/// perf up to Linux 3.10 writes a table of event names besides the description of the events.
#[test]
fn a_file_of_perf_3_8_is_read() {
    let mut bytes = FULL.to_vec();
    let mut table = 7u64.to_le_bytes().to_vec();
    table.extend(b"page-faults");
    table.resize(72, 0);
    bytes[56..64].copy_from_slice(&(FULL.len() as u64).to_le_bytes());
    bytes[64..72].copy_from_slice(&(table.len() as u64).to_le_bytes());
    bytes.extend(table);
    assert_eq!(read(&bytes).unwrap(), read(FULL).unwrap());
    // Its place is checked.
    bytes.pop();
    assert!(reason(&bytes).contains("reaches beyond the file's end"));
}

#[test]
fn other_formats_of_perf_are_named() {
    for (magic, what) in [
        (b"2ELIFREP", "a perf.data file of a big-endian machine"),
        (b"PERFFILE", "a perf.data file of the first format"),
    ] {
        let mut bytes = FULL.to_vec();
        bytes[..8].copy_from_slice(magic);
        let why = reason(&bytes);
        assert!(why.contains(what), "{why}");
    }
    let dir = tempfile::tempdir().unwrap();
    let why = || open(dir.path()).unwrap_err().to_string();
    assert!(why().ends_with("a directory, not a recording"), "{}", why());
    fs::write(dir.path().join("data"), FULL).unwrap();
    assert!(why().contains("its recording is the file") && why().ends_with("/data"), "{}", why());
    fs::write(dir.path().join("data.0"), FULL).unwrap();
    assert!(why().contains("record without --threads"), "{}", why());
}

#[test]
fn a_lackey_log_of_two_processes_is_refused() {
    let log = b"==7== Lackey, an example Valgrind tool\nI  0401ab70,3\n==8== \nI  0401ab73,3\n";
    let read = |log| Addresses::of_bytes(Path::new("t"), log).accesses().unwrap().count();
    let mut addresses = Addresses::of_bytes(Path::new("t"), log);
    let error = addresses.accesses().unwrap().find_map(Result::err).unwrap().to_string();
    assert!(error.contains("line 3: ") && error.contains("the processes 7 and 8"), "{error}");
    assert!(error.contains("--log-file=NAME.%p"), "{error}");
    // With times, and with lines of a tool that have no process.
    let log = b"==00:00:00:00.000 7== Lackey\nI  0,1\n==00:00:00:00.012 7== end\n==\n--7-- x\n";
    assert_eq!(read(log), 1);
}
