//! Variants of a `perf.data` file with less contents than expected, or of other perf versions:
//! rejected with a remedy, or read with a count of missing data.

use faultless_trace::Kind;
use faultless_trace::census::Census;
use faultless_trace::event::Birth;
use faultless_trace::lackey::Addresses;
use faultless_trace::plan::Plan;
use faultless_trace::{Error, STOPPED, Trace, compact, open, parse, read_watched};
use std::fs;
use std::path::Path;

const FULL: &[u8] = include_bytes!("data/fixture.perf.data");
/// Faults alone, by the software event.
const FAULTS: &[u8] = include_bytes!("data/fixture-faults-z.perf.data");

const SAMPLE_PERIOD: usize = 16;
const FLAGS: usize = 40;
const FREQUENCY: u8 = 1 << 2;
const ATTR: usize = 128;
/// In the fourth byte of an attribute's flags.
const ATTR_COMM_EXEC: u8 = 1;
/// In the second byte of a record's `misc`.
const COMM_EXEC: u8 = 0x20;
const EVENT_DESC: u32 = 12;
const LOST: u8 = 2;
const COMM: u8 = 3;
const EXIT: u8 = 4;
const FORK: u8 = 7;
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

/// Returns the offset of the attribute of the event `name` in the description of the events.
fn attribute(bytes: &[u8], name: &str) -> usize {
    // After the attribute: the count of identifiers, the length of the name, the name.
    let padded = [name.as_bytes(), b"\0"].concat();
    let at = bytes.windows(padded.len()).rposition(|window| window == padded).unwrap();
    at - 8 - ATTR
}

/// Returns the offsets of the records of type `kind`.
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

/// Returns the offsets of all attributes: those in the section of attributes, and their
/// descriptions.
fn attributes(bytes: &[u8]) -> Vec<usize> {
    let (start, size, each) = (word(bytes, 24), word(bytes, 32), word(bytes, 16));
    let mut found: Vec<_> = (start..start + size).step_by(each).collect();
    // EVENT_DESC repeats each of them.
    for at in found.clone() {
        let attr = &bytes[at..at + ATTR];
        let starts = 0..bytes.len() - ATTR;
        found.extend(starts.filter(|start| &bytes[*start..start + ATTR] == attr));
    }
    found
}

#[test]
fn sampled_recording_is_rejected_with_the_right_command() {
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
            let advice = "`faultless record -- PROGRAM`; only recordings of this command have \
                          figures of prefault";
            assert!(why.contains(advice), "{why}");
            assert!(why.contains("`perf record -c 1 -d -e page-faults -- PROGRAM`"), "{why}");
        }
    }
}

/// Returns `bytes` with the period `period` of each event.
fn with_period(bytes: &[u8], period: u64) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    for attr in attributes(bytes) {
        changed[attr + SAMPLE_PERIOD..attr + SAMPLE_PERIOD + 8]
            .copy_from_slice(&period.to_le_bytes());
    }
    changed
}

#[test]
fn sample_of_faults_is_read_and_not_replayed() {
    let every = read(FAULTS).unwrap();
    assert_eq!((every.header.omitted, every.header.period()), (0, 1));
    let some = read(&with_period(FAULTS, 28)).unwrap();
    assert_eq!((some.header.omitted, some.header.period()), (27, 28));
    assert_eq!(some.events, every.events);
    assert!(some.header.notes.contains(&"one in 28 faults was recorded".to_owned()));
    let faults = 28 * faults(&every);
    let text = format!("one in 28 faults is recorded: about {faults} faults");
    assert!(some.summary().to_string().contains(&text), "{}", some.summary());
    // The portable form keeps the period.
    let path = Path::new("some.fltrace");
    let again = parse(path, &compact::encode(path, &some).unwrap()).unwrap();
    assert_eq!(again, some);
    let why = Plan::new(&again).unwrap_err().to_string();
    assert!(why.contains("one in 28 faults") && why.contains("--max-rate"), "{why}");
    assert!(Census::of(&again).is_err() && Plan::new(&every).is_ok());
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
fn samples_of_guests_are_excluded() {
    let all = faults(&read(FULL).unwrap());
    let mut bytes = FULL.to_vec();
    let samples = records(FULL, SAMPLE);
    for sample in &samples {
        bytes[sample + 4] = bytes[sample + 4] & !7 | GUEST_USER;
    }
    let trace = read(&bytes).unwrap();
    assert!(all > 0 && faults(&trace) == 0);
    let note = format!("{} records of virtual machines' guests are omitted", samples.len());
    assert!(trace.header.notes.contains(&note), "{:?}", trace.header.notes);
}

/// perf lists the parents of processes that run already. Their memory was copied long ago.
#[test]
fn listed_process_has_its_own_memory() {
    let roots = |bytes: &[u8]| {
        let trace = read(bytes).unwrap();
        let parents = trace.processes.iter().map(|process| process.parent);
        let forks = trace.events.iter().filter(|event| {
            matches!(event.kind, Kind::Spawn { birth: Birth::Fork | Birth::Vfork, .. })
        });
        (parents.filter(Option::is_none).count(), forks.count())
    };
    let (before, forks) = roots(FULL);
    assert!(forks > 0);
    let process = |at: &usize| FULL[at + 8..at + 12] != FULL[at + 12..at + 16];
    let fork = records(FULL, FORK).into_iter().find(process).unwrap();
    // The time is a field of the record, and of the sample that follows the fields.
    let time = word(FULL, fork + 24);
    let end = fork + usize::from(u16::from_le_bytes([FULL[fork + 6], FULL[fork + 7]]));
    let near = |at: &usize| word(FULL, *at).abs_diff(time) < 1_000_000;
    let at = (fork + 32..end).step_by(8).find(near).unwrap();
    let mut bytes = FULL.to_vec();
    bytes[at..at + 8].fill(0);
    assert_eq!(roots(&bytes), (before + 1, forks - 1));
}

/// Without a mark of `exec`, the processes look like those of `perf record -p`.
#[test]
fn recording_of_a_running_process_has_a_note() {
    let note = |bytes: &[u8]| {
        let header = read(bytes).unwrap().header;
        header.notes.iter().find(|note| note.contains("before the recording began")).cloned()
    };
    assert_eq!(note(FULL), None);
    let mut bytes = FULL.to_vec();
    for comm in records(FULL, COMM) {
        bytes[comm + 5] &= !COMM_EXEC;
    }
    let header = read(&bytes).unwrap().header;
    assert!(note(&bytes).unwrap().contains("perf record -p"), "{:?}", header.notes);
    assert!(!header.program.is_empty());
    // A kernel before 3.16 does not mark any.
    for at in attributes(&bytes) {
        bytes[at + FLAGS + 3] &= !ATTR_COMM_EXEC;
    }
    assert_eq!(note(&bytes), None);
}

/// Returns `bytes` with attributes of `size` bytes, like an older perf: without the last fields.
fn with_attributes_of(size: usize, bytes: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    let short = |at: usize| {
        let mut attr = bytes[at..at + size].to_vec();
        attr[4..8].copy_from_slice(&(size as u32).to_le_bytes());
        attr
    };
    let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let put = |out: &mut Vec<u8>, at: usize, value: usize| {
        out[at..at + 8].copy_from_slice(&(value as u64).to_le_bytes());
    };
    let (start, len, each) = (word(bytes, 24), word(bytes, 32), word(bytes, 16));
    let begin = out.len();
    for at in (start..start + len).step_by(each) {
        out.extend(short(at));
        out.extend(&bytes[at + each - 16..at + each]);
    }
    let len = out.len() - begin;
    put(&mut out, 16, size + 16);
    put(&mut out, 24, begin);
    put(&mut out, 32, len);
    // The description of the events repeats the attributes.
    let before = word(bytes, 72) & ((1 << EVENT_DESC) - 1);
    let entry = word(bytes, 40) + word(bytes, 48) + 16 * before.count_ones() as usize;
    let mut at = word(bytes, entry);
    let begin = out.len();
    let (count, full) = (half(at), half(at + 4));
    out.extend((count as u32).to_le_bytes());
    out.extend((size as u32).to_le_bytes());
    at += 8;
    for _ in 0..count {
        out.extend(short(at));
        at += full;
        let rest = 8 + half(at + 4) + 8 * half(at);
        out.extend(&bytes[at..at + rest]);
        at += rest;
    }
    let len = out.len() - begin;
    put(&mut out, entry, begin);
    put(&mut out, entry + 8, len);
    out
}

/// Linux 3.7 to 3.18 have attributes of 96 bytes.
#[test]
fn attributes_of_older_kernels_are_read() {
    for size in [112, 96, 72] {
        let trace = read(&with_attributes_of(size, FULL));
        assert_eq!(trace.as_ref(), read(FULL).as_ref(), "{size} bytes");
    }
    assert!(reason(&with_attributes_of(56, FULL)).contains("event attributes of 56 bytes"));
}

/// A file is read in parts from a disk, and as a whole from a pipe or if compressed.
#[test]
fn file_and_bytes_give_the_same_recording() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("some.data");
    for bytes in [FULL, &FULL[..FULL.len() - 100], &FULL[..64], &FULL[..5]] {
        fs::write(&path, bytes).unwrap();
        assert_eq!(faultless_trace::read(&path), parse(&path, bytes));
        let opened = match open(&path) {
            Ok(faultless_trace::Input::Recording(trace)) => Ok(trace),
            Ok(faultless_trace::Input::Addresses(_)) => panic!("a recording"),
            Err(error) => Err(error),
        };
        assert_eq!(opened, parse(&path, bytes));
    }
}

/// perf up to Linux 3.10 writes a table of event names besides the description of the events.
#[test]
fn file_of_perf_3_8_is_readable() {
    let mut bytes = FULL.to_vec();
    let mut table = 7u64.to_le_bytes().to_vec();
    table.extend(b"page-faults");
    table.resize(72, 0);
    bytes[56..64].copy_from_slice(&(FULL.len() as u64).to_le_bytes());
    bytes[64..72].copy_from_slice(&(table.len() as u64).to_le_bytes());
    bytes.extend(table);
    assert_eq!(read(&bytes).unwrap(), read(FULL).unwrap());
    // The location of the table is checked.
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
    assert!(why().contains("the recording is the file") && why().ends_with("/data"), "{}", why());
    fs::write(dir.path().join("data.0"), FULL).unwrap();
    assert!(why().contains("record without --threads"), "{}", why());
}

#[test]
fn lackey_log_of_two_processes_is_rejected() {
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

#[test]
fn watched_reading_reports_its_share_and_can_be_stopped() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/fixture.perf.data"));
    let mut shares = Vec::new();
    let mut watch = |share| {
        shares.push(share);
        true
    };
    assert_eq!(read_watched(path, &mut watch), read_watched(path, &mut |_| true));
    assert!(!shares.is_empty() && shares.iter().all(|share| (0.0..=1.0).contains(share)));
    let error = read_watched(path, &mut |_| false).unwrap_err();
    assert_eq!(error.reason, STOPPED);
}

/// Returns [`FULL`] as a kernel of `arch` would have written it, with `numbers` for mmap, mprotect,
/// munmap, brk, mremap and madvise.
fn of_architecture(arch: &[u8; 8], numbers: [u32; 6]) -> Vec<u8> {
    let mut bytes = FULL.to_vec();
    let at = bytes.windows(7).rposition(|window| window == b"x86_64\0").unwrap();
    bytes[at..at + 8].copy_from_slice(arch);
    for at in records(FULL, SAMPLE) {
        let len = usize::from(u16::from_le_bytes([bytes[at + 6], bytes[at + 7]]));
        let value =
            |from: usize| u32::from_le_bytes(bytes[from..from + 4].try_into().unwrap()) as usize;
        // The data of a tracepoint: their size, four bytes, the thread as before in the sample, and
        // the number of a call.
        let thread = value(at + 20);
        let data = (at + 24..at + len - 20).step_by(4).find(|from| {
            let size = value(*from);
            size >= 16 && from + 4 + size <= at + len && value(from + 8) == thread
        });
        let Some(number) = data.map(|from| from + 12) else { continue };
        let old = value(number);
        let known = [9, 10, 11, 12, 25, 28].iter().position(|known| *known == old);
        if let Some(which) = known {
            bytes[number..number + 4].copy_from_slice(&numbers[which].to_le_bytes());
        }
    }
    bytes
}

#[test]
fn recording_of_aarch64_has_the_same_events() {
    let original = read(FULL).unwrap();
    let arm = read(&of_architecture(b"aarch64\0", [222, 226, 215, 214, 216, 233])).unwrap();
    assert_eq!(arm.summary(), original.summary());
    assert!(arm.summary().maps > 2 && arm.summary().unmaps > 0);
    assert_eq!(arm.header.page_size, 4096);
    let other = of_architecture(b"aarch64\0", [9, 10, 11, 12, 25, 28]);
    let summary = read(&other).unwrap().summary();
    assert_eq!((summary.maps, summary.brks), (0, 0), "numbers of x86-64");
    let error = reason(&of_architecture(b"riscv64\0", [0; 6]));
    assert!(error.contains("recorded on riscv64; x86-64 and aarch64 are understood"), "{error}");
}
