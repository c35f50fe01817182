//! Truncated, changed and artificial files result in a trace or an error, never in a panic, and
//! never in a large allocation.

mod made;

use faultless_trace::error::Place;
use faultless_trace::plan::Plan;
use faultless_trace::{Kind, Trace, compact, parse, recordings};
use made::{Made, Packing, VERSIONS};
use proptest::prelude::*;
use ruzstd::decoding::StreamingDecoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The largest allocation so far.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Watch;

// SAFETY: every call goes to the system's allocator unchanged; the counter is only written.
unsafe impl GlobalAlloc for Watch {
    // SAFETY: as `System`.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as `System`.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on; `alloc` returned a pointer of `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watch = Watch;

const FULL: &[u8] = include_bytes!("data/fixture.perf.data");
const PACKED: &[u8] = include_bytes!("data/fixture-faults-z.perf.data");

/// Reads and plans. Allocations must stay small, and an error must be meaningful.
fn survive(bytes: &[u8]) {
    match parse(Path::new("some.data"), bytes) {
        Ok(trace) => {
            let _ = (trace.summary(), Plan::new(&trace));
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with("some.data: ") && text.len() > 20, "{text}");
            assert!(!text.contains("parser failed"), "{text}");
            // The remedy, or what is accepted.
            let helps = ["again", "emedy", "record with", "understood", "want", "limit", "neither"];
            let of_perf = bytes.starts_with(b"PERF");
            assert!(!of_perf || helps.iter().any(|word| text.contains(word)), "{text}");
        }
    }
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < 48 << 20, "an allocation of {largest} bytes");
}

fn changed(bytes: &[u8], changes: &[(usize, u8)]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (at, value) in changes {
        let at = at % bytes.len();
        bytes[at] = *value;
    }
    bytes
}

fn changes() -> impl Strategy<Value = Vec<(usize, u8)>> {
    let value = prop_oneof![Just(0), Just(1), Just(0x7f), Just(0x80), Just(0xff), any::<u8>()];
    proptest::collection::vec((any::<usize>(), value), 1..6)
}

#[test]
fn any_byte_of_the_structure_does_not_panic() {
    for file in [FULL, PACKED] {
        let word = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap()) as usize;
        let after_data = word(40) + word(48);
        // The header, the attributes, the first records, the table of sections and their contents.
        let attrs = 104..word(40) + 64;
        let table = after_data..after_data + 31 * 16;
        let event_desc = (0..file.len() - 8).find(|at| {
            // Its start: the count of events, then the size of an attribute.
            matches!(file[*at], 1 | 15) && file[at + 1..at + 8] == [0, 0, 0, 128, 0, 0, 0]
        });
        let event_desc = event_desc.unwrap();
        for at in (0..104).chain(attrs).chain(table).chain(event_desc..event_desc + 400) {
            for value in [0, 0xff, file[at] ^ 0x10] {
                survive(&changed(file, &[(at, value)]));
            }
        }
    }
}

#[test]
fn any_byte_of_a_stream_does_not_panic() {
    for (version, packing) in [(VERSIONS[0], Packing::Second), (VERSIONS[5], Packing::None)] {
        let file = Made::new(version).stream(packing);
        for at in 0..file.len() {
            for value in [0, 0xff, file[at] ^ 0x10] {
                survive(&changed(&file, &[(at, value)]));
            }
        }
    }
}

#[test]
fn any_byte_of_an_unended_file_does_not_panic() {
    for (version, packing) in [(VERSIONS[0], Packing::None), (VERSIONS[2], Packing::First)] {
        let file = Made::of_faults(version).unended(packing);
        for at in 0..file.len() {
            for value in [0, 0xff, file[at] ^ 0x10] {
                survive(&changed(&file, &[(at, value)]));
            }
        }
    }
}

#[test]
fn truncated_file_is_rejected_with_its_offset() {
    for file in [FULL, PACKED] {
        for len in (0..file.len()).step_by(97) {
            let error = parse(Path::new("cut"), &file[..len]).unwrap_err();
            assert!(matches!(error.place, Place::Offset(_)), "{error}");
        }
    }
    let file = recordings::find("sort").unwrap().bytes;
    for len in (0..file.len()).step_by(31) {
        let error = parse(Path::new("cut"), &file[..len]).unwrap_err();
        assert!(matches!(error.place, Place::Offset(_)), "{error}");
    }
}

#[test]
fn compact_file_with_a_flipped_bit_is_rejected() {
    let file = recordings::find("redis").unwrap().bytes;
    for bit in (0..file.len() * 8).step_by(61) {
        let mut bytes = file.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        // If zstd ignores a bit, the trace must be unchanged.
        if let Ok(trace) = parse(Path::new("bit"), &bytes) {
            assert_eq!(trace, compact::parse(Path::new("whole"), file).unwrap(), "bit {bit}");
        }
    }
}

#[test]
fn truncated_file_has_a_remedy() {
    let file = recordings::find("sort").unwrap().bytes;
    for len in [12, 30, file.len() / 2] {
        let error = compact::parse(Path::new("cut"), &file[..len]).unwrap_err();
        assert!(error.reason.ends_with(": copy the file again, or record again"), "{error}");
    }
}

#[test]
fn decompression_bomb_is_rejected() {
    // A body larger than its claimed size, and a body smaller than its claimed size.
    let zeros = packed(&vec![0; 8 << 20]);
    for len in [16u64, 200 << 20, u64::MAX] {
        let mut bytes = compact::MAGIC.to_vec();
        bytes.extend(compact::VERSION.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(&zeros);
        survive(&bytes);
        assert!(parse(Path::new("bomb"), &bytes).is_err());
    }
}

fn packed(body: &[u8]) -> Vec<u8> {
    compress_to_vec(body, CompressionLevel::Fastest)
}

/// Returns a compact file with a correct checksum around any body.
/// Returns the file with `body`, in the version of the bundled recordings.
fn sealed(body: &[u8]) -> Vec<u8> {
    sealed_as(3, body)
}

fn sealed_as(version: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = compact::MAGIC.to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(crc32fast::hash(body).to_le_bytes());
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(packed(body));
    bytes
}

fn body_of(name: &str) -> Vec<u8> {
    let bytes = recordings::find(name).unwrap().bytes;
    let mut body = Vec::new();
    StreamingDecoder::new(&bytes[24..]).unwrap().read_to_end(&mut body).unwrap();
    body
}

/// Returns the body of a recording with one fault, whose fields after the page are `rest`.
/// `recorded` are the bits of the header.
fn one_fault(recorded: u64, rest: &[u8]) -> Vec<u8> {
    // Four empty strings, pages of 4,096 bytes, one CPU, no event lost, no note, one process, one
    // thread, one event.
    let mut body =
        vec![0, 0, 0, 0, 0x80, 0x20, 1, recorded as u8 & 0x7f | 0x80, (recorded >> 7) as u8];
    body.extend([0, 0, 1, 0, 1, 0, 0, 1, 0x40, 0, 2]);
    body.extend(rest);
    body
}

/// Returns the single event of `trace`.
fn only(trace: &Trace) -> Kind {
    assert_eq!(trace.events.len(), 1);
    trace.events.iter().next().unwrap().kind
}

#[test]
fn instruction_offset_is_checked_and_needs_version_2() {
    let (with, without) = (1 | 1 << 11, 1);
    let read = |version, body: &[u8]| parse(Path::new("one"), &sealed_as(version, body));
    let instruction = |version, body: &[u8]| match only(&read(version, body).unwrap()) {
        Kind::Fault { page: 4096, instruction, .. } => instruction,
        other => panic!("{other:?}"),
    };
    assert_eq!(instruction(1, &one_fault(without, &[])), None);
    assert_eq!(instruction(2, &one_fault(without, &[])), None);
    assert_eq!(instruction(2, &one_fault(with, &[0])), None);
    assert_eq!(instruction(2, &one_fault(with, &[1])), Some(0));
    assert_eq!(instruction(2, &one_fault(with, &[0x80, 0x20])), Some(4095));
    for (version, body, why) in [
        (1, one_fault(with, &[1]), "version 1 has no instructions"),
        (2, one_fault(with, &[0x81, 0x20]), "the instruction lies beyond the end of a page"),
        (2, one_fault(with, &[0x81, 0x80, 0x04]), "an instruction lies beyond the end of a page"),
        (2, one_fault(with, &[]), "the body ends within an item"),
        (2, one_fault(without, &[1]), "bytes follow the last event"),
        (7, one_fault(with, &[1]), "version 7; this reads versions 1 to 6"),
        (0, one_fault(without, &[]), "version 0; this reads versions 1 to 6"),
    ] {
        let error = read(version, &body).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn resident_pages_are_checked_and_need_version_3() {
    let event = |extra: u8, pages: &[u8]| {
        let mut body = one_fault(1, pages);
        let tag = body.len() - pages.len() - 3;
        body[tag] = 12 | extra << 5;
        body
    };
    let read = |version, body: &[u8]| parse(Path::new("one"), &sealed_as(version, body));
    for (extra, written) in [(0, false), (1, true)] {
        let trace = read(3, &event(extra, &[5])).unwrap();
        let resident = Kind::Resident { start: 4096, len: 5 * 4096, written };
        assert_eq!(only(&trace), resident);
    }
    for (version, body, why) in [
        (2, event(0, &[5]), "unknown event code 12"),
        (2, event(1, &[5]), "event code 12 has no extra bits"),
        (3, event(2, &[5]), "event code 12 has no extra bits"),
        (3, event(0, &[0]), "a range is not aligned, is empty or wraps"),
        (3, event(0, &[0x81, 0x80, 0x80, 0x10]), "more resident pages than the limit"),
    ] {
        let error = read(version, &body).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn call_stacks_are_checked_and_need_version_4() {
    use faultless_trace::Kind;
    use faultless_trace::event::StackId;
    // A function `f` of the module `m` without a file, and the frames given here.
    let body = |frames: &[u8], stack: u8| {
        let functions = [1, 1, b'f', 1, b'm', 0];
        let mut fault = one_fault(1 | 1 << 12, &[stack]);
        // No fault is omitted.
        fault.insert(10, 0);
        let at = fault.len() - 5;
        [&fault[..at], &functions, frames, &fault[at..]].concat()
    };
    // The second frame is called by the first, in line 9.
    let two = [2, 0, 0, 7, 1, 0, 9];
    let read = |version, body: &[u8]| parse(Path::new("one"), &sealed_as(version, body));
    let trace = read(4, &body(&two, 2)).unwrap();
    let Kind::Fault { stack, .. } = trace.events.iter().next().unwrap().kind else { panic!() };
    let lines: Vec<_> =
        trace.stacks.of(stack).map(|(frame, function)| (frame.line, function.label())).collect();
    assert_eq!(lines, [(9, "f"), (7, "f")]);
    let again = compact::encode(Path::new("one"), &trace).unwrap();
    assert_eq!(parse(Path::new("one"), &again).unwrap(), trace);
    let none = read(4, &body(&[0], 0)).unwrap();
    let Kind::Fault { stack, .. } = none.events.iter().next().unwrap().kind else { panic!() };
    assert_eq!(stack, StackId::NONE);
    for (version, body, why) in [
        (3, body(&two, 2), "version 3 has no call stacks"),
        (4, body(&two, 3), "the call stack is not in the table"),
        (4, body(&[1, 0, 1, 7], 1), "a function that does not exist"),
        (4, body(&[1, 1, 0, 7], 1), "a frame lies before the frame that called it"),
        (4, body(&[9], 0), "9 frames; there can be at most 5"),
        (3, one_fault(1, &[1]), "bytes follow the last event"),
    ] {
        let error = read(version, &body).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let mut undeclared = trace;
    undeclared.header.recorded -= faultless_trace::event::Recorded::STACKS;
    let error = compact::encode(Path::new("one"), &undeclared).unwrap_err().to_string();
    assert!(error.contains("a recording without call stacks"), "{error}");
}

#[test]
fn callers_and_process_numbers_need_version_5() {
    use faultless_trace::event::StackId;
    // The process has no parent. A function `f`, and its frame; the event *caller* replaces the
    // fault.
    let body = |pid: &[u8], stack: u8| {
        let mut body = one_fault(1 | 1 << 12, &[stack]);
        body.insert(10, 0);
        let event = body.len() - 5;
        let functions = [1, 1, b'f', 1, b'm', 0, 1, 0, 0, 7];
        let mut body = [&body[..event], &functions, &body[event..]].concat();
        let tag = body.len() - 4;
        body[tag] = 13;
        // The page of the fault.
        body.remove(tag + 2);
        // Behind the count of notes and of processes, and the parent.
        body.splice(14..14, pid.iter().copied());
        body
    };
    let read = |version, body: &[u8]| parse(Path::new("one"), &sealed_as(version, body));
    for (number, pid) in [(0, None), (8, Some(7))] {
        let trace = read(5, &body(&[number], 1)).unwrap();
        assert_eq!(only(&trace), Kind::Caller { stack: StackId::new(1) });
        assert_eq!(trace.processes[0].pid, pid);
        let again = compact::encode(Path::new("one"), &trace).unwrap();
        assert_eq!(parse(Path::new("one"), &again).unwrap(), trace);
    }
    for (version, body, why) in [
        (4, body(&[], 1), "unknown event code 13"),
        (5, body(&[0], 2), "the call stack is not in the table"),
    ] {
        let error = read(version, &body).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn processor_time_is_read_from_version_6() {
    let mut trace = parse(Path::new("one"), &sealed(&one_fault(1, &[]))).unwrap();
    assert_eq!(trace.header.processor_us, 0);
    trace.header.processor_us = 1_234_567;
    let written = compact::encode(Path::new("one"), &trace).unwrap();
    assert_eq!(parse(Path::new("one"), &written).unwrap(), trace);
}

#[test]
fn trace_with_instructions_is_marked_and_checked() {
    use faultless_trace::event::Recorded;
    let mut trace = parse(Path::new("one"), &sealed(&one_fault(1 | 1 << 11, &[1]))).unwrap();
    let mut refused = |place, recorded| {
        trace.header.recorded = recorded;
        trace.events.retain_mut(|event| {
            let Kind::Fault { instruction, .. } = &mut event.kind else { panic!() };
            *instruction = Some(place);
            true
        });
        compact::encode(Path::new("one"), &trace).err().map(|error| error.to_string())
    };
    let all = Recorded::all();
    assert_eq!(refused(4095, all), None);
    assert!(refused(4096, all).is_some_and(|why| why.contains("beyond the end of a page")));
    assert!(
        refused(1, all - Recorded::INSTRUCTIONS)
            .is_some_and(|why| why.contains("declares a recording without instructions"))
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn changed_perf_data_does_not_panic(changes in changes()) {
        survive(&changed(FULL, &changes));
        survive(&changed(PACKED, &changes));
    }

    #[test]
    fn arbitrary_perf_records_do_not_panic(changes in changes()) {
        // In the data section, which contains the records.
        let word = |at: usize| u64::from_le_bytes(FULL[at..at + 8].try_into().unwrap()) as usize;
        let (start, len) = (word(40), word(48));
        let inside: Vec<_> = changes.iter().map(|(at, v)| (start + at % len, *v)).collect();
        survive(&changed(FULL, &inside));
    }

    #[test]
    fn changed_files_and_streams_of_all_versions_do_not_panic(
        changes in changes(),
        which in 0..VERSIONS.len(),
        packing in prop_oneof![Just(Packing::None), Just(Packing::First), Just(Packing::Second)],
        cut in any::<usize>(),
    ) {
        let made = Made::new(VERSIONS[which]);
        let unended = Made::of_faults(VERSIONS[which]).unended(packing);
        for bytes in [made.file(packing), made.stream(packing), unended] {
            let changed = changed(&bytes, &changes);
            survive(&changed);
            survive(&changed[..cut % bytes.len()]);
        }
    }

    #[test]
    fn arbitrary_compact_body_does_not_panic(changes in changes(), cut in any::<usize>()) {
        let body = body_of("redis");
        survive(&sealed(&changed(&body, &changes)));
        survive(&sealed(&body[..cut % body.len()]));
    }

    #[test]
    fn noise_is_rejected(noise in proptest::collection::vec(any::<u8>(), 0..512)) {
        survive(&noise);
        survive(&sealed(&noise));
        for header in [104u64, 16] {
            survive(&[b"PERFILE2".as_slice(), &header.to_le_bytes(), &noise].concat());
        }
    }
}

/// Walks over a recording take the time of its events, not of the ranges that it names.
#[test]
fn huge_ranges_are_walked_quickly() {
    use faultless_trace::event::{
        Access, Backing, Event, Header, ProcessInfo, Prot, Recorded, ThreadInfo,
    };
    let (start, len) = (1u64 << 40, 1u64 << 60);
    let (prot, backing) = (Prot::READ | Prot::WRITE, Backing::Anon);
    let kinds = [
        Kind::Map { start, len, prot, flags: 0x22, backing },
        Kind::first(start + 4096, Access::Write),
        Kind::Advise { start, len, advice: 4 },
        Kind::first(start + 8192, Access::Write),
        Kind::Remap { old: start, old_len: len, new: start + len, new_len: len, flags: 3 },
        Kind::first(start + len, Access::Write),
        Kind::Unmap { start: start + len, len },
    ];
    let trace = Trace {
        header: Header { page_size: 4096, recorded: Recorded::all(), ..Header::default() },
        processes: vec![ProcessInfo { parent: None, pid: None }],
        threads: vec![ThreadInfo { process: 0, name: String::new() }],
        events: kinds.into_iter().map(|kind| Event { time_us: 0, thread: 0, kind }).collect(),
        ..Trace::default()
    };
    assert_eq!(faultless_trace::discard::Discards::of(&trace).unwrap().pages, 1);
    assert_eq!(faultless_trace::fork::Forks::of(&trace).unwrap().forks, 0);
    assert_eq!(faultless_trace::blocks::Blocks::of(&trace).unwrap().collapsed(511).blocks, 0);
    assert_eq!(faultless_trace::files::Files::of(&trace, 0.9).unwrap().large, 0);
    let mut pages = 0;
    faultless_trace::footprint::changes(&trace, |change| pages += change.pages);
    assert_eq!(pages, 0);
}
