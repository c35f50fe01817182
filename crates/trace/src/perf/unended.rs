//! Files that perf has not completed, because perf was killed or its disk was full.
//!
//! perf writes the header and the attributes of the events at its start, with an empty section of
//! records, and completes the header at its end, after the feature sections. The records between
//! have their places already. [`to_file`] copies the records up to the first one that is not whole,
//! and describes the events by their attributes.
//!
//! The names of the events are in a missing section. Software events need no names. The kernel
//! numbers its tracepoints at its start, so their names are taken from the running kernel if it has
//! a known tracepoint for each number in the file.

use super::pipe::{
    BETWEEN, Description, MAX_DESCRIPTION, MAX_EVENTS, Stream, TRACEPOINT, sections,
};
use super::roles::CALLS;
use super::scan::{Bytes, DAMAGED, HEADER, MIN_ATTR, NO_RECORDS, Scan, attr_size};
use crate::error::{Error, Place};
use crate::record::TRACEFS;
use std::collections::HashMap;
use std::fs;
use std::io::{Seek, Write};
use std::path::Path;

/// The start of the note about a missing end.
const UNENDED: &str = "perf ended before it completed the file";
/// The feature section with the name of the architecture.
const ARCH: u32 = 6;
/// `PERF_TYPE_SOFTWARE`, and the numbers of its page faults: all, minor and major.
const SOFTWARE: u32 = 1;
const PAGE_FAULTS: [u64; 3] = [2, 5, 6];
/// The end of the kinds of records.
const KINDS: u32 = 128;
/// The bytes of the place of the identifiers, after each attribute.
const PLACE: u64 = 16;

/// The names of tracepoints by number.
pub(super) type Names = HashMap<u64, String>;

/// Returns whether `note` reports a missing end.
pub(crate) fn is_unended(note: &str) -> bool {
    note.starts_with(UNENDED)
}

/// Returns whether perf has not completed the file, and the file has bytes of records.
pub(super) fn lacks_end<B: Bytes>(scan: &Scan<'_, B>) -> bool {
    let header = (scan.array::<8>(0), scan.u64(8), scan.u64(40), scan.u64(48));
    match header {
        (Ok(magic), Ok(HEADER), Ok(begin), Ok(0)) => {
            magic == *b"PERFILE2" && (HEADER..scan.bytes.len()).contains(&begin)
        }
        _ => false,
    }
}

/// Converts the file in `scan`, which [`lacks_end`], to a whole file in `sink`. `names` returns the
/// names of the tracepoints. Reports progress to `continues`, and stops with the reason
/// [`crate::STOPPED`] if `continues` returns `false`.
///
/// # Errors
/// The file has no whole record, its attributes are damaged, its faults are tracepoints without
/// names, or `sink` cannot be written.
pub(super) fn to_file<B: Bytes>(
    scan: &Scan<'_, B>,
    sink: &mut (impl Write + Seek),
    names: impl FnOnce() -> Names,
    continues: &mut dyn FnMut() -> bool,
) -> Result<Stream, Error> {
    let mut header = described(scan)?;
    let named = name_tracepoints(&mut header, names).or_else(|why| scan.wrong(24, why))?;
    let kept = |error| Error::temporary(scan.path, &error);
    // The final header is known at the end.
    sink.write_all(&[0; HEADER as usize]).map_err(kept)?;
    let begin = scan.u64(40)?;
    let (stop, count) = copied(scan, begin, sink, continues)?;
    if count == 0 {
        return scan.wrong(begin, NO_RECORDS);
    }
    let end = HEADER + (stop - begin);
    sections(&header, end, sink).map_err(kept)?;
    let records = if count == 1 { "1 record is".into() } else { format!("{count} records are") };
    let rest = match scan.bytes.len() - stop {
        0 => String::new(),
        left => format!(" The last {left} bytes, from offset {stop:#x} on, are no whole record."),
    };
    let note = format!(
        "{UNENDED} (it was killed, or its disk was full): {records} read, and the end of the \
         recording is missing.{rest} The sections that perf writes last are missing, too: the \
         versions of perf and of the kernel, the number of CPUs, and the build identifiers by \
         which files with symbols are checked. {named}Remedy: record again, and end perf record by \
         Ctrl-C or SIGTERM"
    );
    Ok(Stream { begin, end, cut: Some(note) })
}

/// Returns the attributes of the events, with their identifiers.
fn described<B: Bytes>(scan: &Scan<'_, B>) -> Result<Description, Error> {
    let mut header = Description::default();
    let (size, attrs) = (scan.u64(16)?, scan.section(24)?);
    attr_size(size.saturating_sub(PLACE)).or_else(|why| scan.wrong(16, why))?;
    if attrs.size / size > MAX_EVENTS as u64 {
        return scan.wrong(24, format!("more than {MAX_EVENTS} events: {DAMAGED}"));
    }
    for number in 0..attrs.size / size {
        let at = attrs.offset + number * size;
        let own = u64::from(scan.u32(at + 4)?);
        if !(MIN_ATTR..=size - PLACE).contains(&own) {
            return scan.wrong(at + 4, format!("an event attribute of {own} bytes: {DAMAGED}"));
        }
        let place = at + size - PLACE;
        let ids = scan.section(place)?;
        header.size = header.size.saturating_add(own as usize).saturating_add(ids.size as usize);
        if ids.size % 8 != 0 || header.size > MAX_DESCRIPTION {
            return scan.wrong(place, format!("identifiers of {} bytes: {DAMAGED}", ids.size));
        }
        let bytes = |at, len: u64| -> Result<Vec<u8>, Error> {
            let mut bytes = vec![0; len as usize];
            let copied = scan.bytes.copy(at, &mut bytes);
            copied.map_err(|error| Error::at(scan.path, at, error.to_string()))?;
            Ok(bytes)
        };
        header.attrs.push((bytes(at, own)?, bytes(ids.offset, ids.size)?));
    }
    Ok(header)
}

/// Names the tracepoints of `header`. Returns a sentence about the names.
///
/// # Errors
/// A tracepoint has no name, and the file has no other event of page faults.
fn name_tracepoints(
    header: &mut Description,
    names: impl FnOnce() -> Names,
) -> Result<&'static str, String> {
    let events = header.attrs.iter().map(|(attr, _)| {
        let word = |at: usize| {
            let bytes = attr[at..at + 8].iter().rev();
            bytes.fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
        };
        (word(0) as u32, word(8))
    });
    let events: Vec<_> = events.collect();
    let traced = |event: &&(u32, u64)| event.0 == TRACEPOINT;
    if !events.iter().any(|event| traced(&event)) {
        return Ok("");
    }
    let names = names();
    if events.iter().filter(traced).all(|(_, number)| names.contains_key(number)) {
        header.tracepoints = names;
        // The kernel of the recording is this one.
        let mut text = std::env::consts::ARCH.as_bytes().to_vec();
        text.push(0);
        let len = text.len() as u32;
        header.features.insert(ARCH, [&len.to_le_bytes()[..], &text].concat());
        return Ok("The names of its tracepoints are those of the running kernel. ");
    }
    let faults = |(kind, number): &(u32, u64)| *kind == SOFTWARE && PAGE_FAULTS.contains(number);
    if events.iter().any(faults) {
        return Ok("The running kernel has no names for its tracepoints, so calls are missing. ");
    }
    Err("perf was killed before it wrote the names of the tracepoints, and the running kernel has \
         other numbers. Remedy: read the file as root (tracefs) on the machine of the recording, \
         before another kernel starts there, or record again"
        .to_owned())
}

/// Copies the whole records from `begin` on. Returns the place after the last, and their number.
fn copied<B: Bytes>(
    scan: &Scan<'_, B>,
    begin: u64,
    sink: &mut impl Write,
    continues: &mut dyn FnMut() -> bool,
) -> Result<(u64, u64), Error> {
    let mut record = vec![0; usize::from(u16::MAX)];
    let (mut at, mut count) = (begin, 0);
    loop {
        if count % BETWEEN == 0 && !continues() {
            return Err(Error::new(scan.path, Place::File, crate::STOPPED));
        }
        let left = scan.bytes.len() - at;
        if left < 8 {
            return Ok((at, count));
        }
        let [k0, k1, k2, k3, _, _, s0, s1] = scan.array(at)?;
        let kind = u32::from_le_bytes([k0, k1, k2, k3]);
        let size = u16::from_le_bytes([s0, s1]);
        if !(1..KINDS).contains(&kind) || size < 8 || u64::from(size) > left {
            return Ok((at, count));
        }
        let record = &mut record[..usize::from(size)];
        let read = scan.bytes.copy(at, record);
        read.map_err(|error| Error::at(scan.path, at, error.to_string()))?;
        sink.write_all(record).map_err(|error| Error::temporary(scan.path, &error))?;
        at += u64::from(size);
        count += 1;
    }
}

/// Returns the names of the tracepoints that a recording can have, from the running kernel.
pub(super) fn running_names() -> Names {
    let dirs = TRACEFS.iter().map(Path::new);
    dirs.map(names_in).find(|names| !names.is_empty()).unwrap_or_default()
}

/// Returns the names of the tracepoints that a recording can have, from a directory of tracefs.
fn names_in(tracefs: &Path) -> Names {
    let calls = CALLS.iter().flat_map(|(_, call, _)| {
        ["enter", "exit"].map(|way| ("syscalls", format!("sys_{way}_{call}")))
    });
    let others = [
        ("exceptions", "page_fault_user"),
        ("exceptions", "page_fault_kernel"),
        ("raw_syscalls", "sys_enter"),
        ("raw_syscalls", "sys_exit"),
        ("task", "task_newtask"),
    ];
    let others = others.map(|(system, name)| (system, name.to_owned()));
    let all = calls.chain(others).filter_map(|(system, name)| {
        let id = tracefs.join("events").join(system).join(&name).join("id");
        let number = fs::read_to_string(id).ok()?.trim().parse().ok()?;
        Some((number, format!("{system}:{name}")))
    });
    all.collect()
}

#[cfg(all(test, target_arch = "x86_64"))]
#[path = "../../tests/made/mod.rs"]
mod made;

// The numbers of calls in the recordings are those of x86-64.
#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::parse_whole;
    use super::made::{Made, Packing, VERSIONS};
    use super::*;
    use crate::Trace;
    use std::io::Cursor;

    fn of(bytes: &[u8], names: Names) -> Result<Trace, Error> {
        let path = Path::new("some.data");
        let mut file = Cursor::new(Vec::new());
        let scan = Scan { path, bytes: &bytes };
        let stream = to_file(&scan, &mut file, || names, &mut || true)?;
        stream.of(parse_whole(path, file.get_ref(), stream.is_cut()))
    }

    #[test]
    fn running_kernel_names_the_tracepoints() {
        let dir = tempfile::tempdir().unwrap();
        for (event, number) in [
            ("exceptions/page_fault_user", 115),
            ("syscalls/sys_enter_mmap", 608),
            ("syscalls/sys_exit_mmap", 607),
            ("task/task_newtask", 140),
            ("raw_syscalls/sys_enter", 349),
            ("syscalls/sys_enter_read", 141),
        ] {
            let event = dir.path().join("events").join(event);
            fs::create_dir_all(&event).unwrap();
            fs::write(event.join("id"), format!("{number}\n")).unwrap();
        }
        let names = names_in(dir.path());
        assert_eq!(names.len(), 5);
        assert_eq!(names[&115], "exceptions:page_fault_user");
        for version in VERSIONS {
            let made = Made::new(version);
            let whole = parse_whole(Path::new("whole"), &made.file(Packing::None), false).unwrap();
            let trace = of(&made.unended(Packing::None), names.clone()).unwrap();
            assert_eq!(trace.events, whole.events, "{version:?}");
            assert_eq!(trace.header.recorded, whole.header.recorded);
            let note = trace.header.notes.iter().find(|note| is_unended(note)).unwrap();
            assert!(note.contains("names of its tracepoints are those of the running"), "{note}");
            let assumed = |note: &String| note.contains("does not name its architecture");
            assert!(!trace.header.notes.iter().any(assumed));
            // A kernel without one of the numbers is not the recorded one.
            let mut other = names.clone();
            other.remove(&607);
            let error = of(&made.unended(Packing::None), other).unwrap_err().to_string();
            assert!(error.contains("the running kernel has other numbers"), "{error}");
        }
    }
}
