//! Streams of `perf record -o -`, whose records describe the events.
//!
//! A stream has a header of 16 bytes, and no sections. Records of the kinds from 64 on describe the
//! events: HEADER_ATTR has an attribute, EVENT_UPDATE the name of an event, HEADER_TRACING_DATA the
//! layouts of tracepoints, and HEADER_FEATURE the contents of a feature section.
//!
//! [`to_file`] converts a stream to a file, which is read like every other file. The converted file
//! contains the records of the stream in one piece, so that errors can name the place in the
//! stream.

use super::hidden::is_stopped;
use super::scan::{EVENT_DESC, HEADER, RECORD_COMPRESSED, RECORD_COMPRESSED2, attr_size, refused};
use super::{damaged, format};
use crate::error::{Error, Place};
use crate::event::Trace;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// The size of the header of a stream, in bytes.
const PIPE_HEADER: u64 = 16;
/// The most events that a stream can describe. A recording has at most some dozens.
pub(super) const MAX_EVENTS: usize = 4096;
/// The most bytes that describe the events.
pub(super) const MAX_DESCRIPTION: usize = 64 << 20;
/// Records between two reports of progress.
pub(super) const BETWEEN: u64 = 1 << 16;

const HEADER_ATTR: u32 = 64;
/// The kind of the records that replace the layouts of tracepoints, which are not records.
const HEADER_EVENT_TYPE: u32 = 65;
const HEADER_TRACING_DATA: u32 = 66;
const HEADER_BUILD_ID: u32 = 67;
const EVENT_UPDATE: u32 = 78;
const HEADER_FEATURE: u32 = 80;
/// The first kind of records that perf creates, and not the kernel.
const FIRST_OF_PERF: u32 = 64;
/// EVENT_UPDATE records with this number have the name of an event.
const UPDATE_NAME: u64 = 2;
/// `PERF_TYPE_TRACEPOINT`.
pub(super) const TRACEPOINT: u32 = 2;
const TRACING_DATA: u32 = 1;
const BUILD_ID: u32 = 2;
/// The end of the numbers of perf's features.
const FEATURES: u64 = 128;

/// Returns whether `start` begins a stream of a little-endian machine.
pub(crate) fn is_stream(start: &[u8]) -> bool {
    let size = start.get(8..16).map(|size| size == PIPE_HEADER.to_le_bytes());
    start.starts_with(b"PERFILE2") && size == Some(true)
}

/// A converted stream, or another source that was converted to a file.
pub(super) struct Stream {
    /// The place of the first record in the source. The converted file has this record after its
    /// header.
    pub(super) begin: u64,
    /// The end of the records in the converted file.
    pub(super) end: u64,
    /// The note about records at the end that are missing.
    pub(super) cut: Option<String>,
}

impl Stream {
    /// Returns whether the end of the source is missing.
    pub(super) fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// Returns the result of reading the converted file with the places of the source.
    pub(super) fn of(&self, read: Result<Trace, Error>) -> Result<Trace, Error> {
        let mut trace = read.map_err(|error| {
            let place = match error.place {
                Place::Offset(at) if (HEADER..self.end).contains(&at) => {
                    Place::Offset(at - HEADER + self.begin)
                }
                Place::Offset(_) => Place::File,
                other => other,
            };
            Error { place, ..error }
        })?;
        if let Some(cut) = &self.cut {
            // Faults of a program can be in the missing part.
            trace.header.notes.retain(|note| !is_stopped(note));
            trace.header.notes.push(cut.clone());
        }
        Ok(trace)
    }
}

/// Converts the stream in `source`, from its first byte on, to a file in `sink`. `path` is the name
/// of the stream in errors. Reports progress to `continues`, and stops with the reason
/// [`crate::STOPPED`] if `continues` returns `false`.
///
/// # Errors
/// A record is damaged, the stream ends before its first event, or `sink` cannot be written.
pub(super) fn to_file(
    path: &Path,
    source: impl Read,
    sink: &mut (impl Write + Seek),
    continues: &mut dyn FnMut() -> bool,
) -> Result<Stream, Error> {
    let mut walk = Walk { path, source, sink, at: PIPE_HEADER, header: Description::default() };
    let mut start = [0; PIPE_HEADER as usize];
    walk.fill(&mut start)?;
    // The final header is known at the end.
    walk.write(&[0; HEADER as usize])?;
    let cut = walk.records(continues)?;
    let (end, header) = (walk.at - PIPE_HEADER + HEADER, walk.header);
    let kept = |error| Error::temporary(path, &error);
    sections(&header, end, sink).map_err(kept)?;
    Ok(Stream { begin: PIPE_HEADER, end, cut })
}

/// The records that describe the events.
#[derive(Default)]
pub(super) struct Description {
    /// The attributes, each with its identifiers.
    pub(super) attrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// The names of events by identifier.
    names: HashMap<u64, Vec<u8>>,
    /// The names of tracepoints by number, without those of the tracing data.
    pub(super) tracepoints: HashMap<u64, String>,
    pub(super) features: BTreeMap<u32, Vec<u8>>,
    /// The number of bytes of all fields.
    pub(super) size: usize,
}

struct Walk<'a, R, W> {
    path: &'a Path,
    source: R,
    sink: &'a mut W,
    /// The place in the stream.
    at: u64,
    header: Description,
}

impl<R: Read, W: Write> Walk<'_, R, W> {
    fn wrong<T>(&self, at: u64, reason: impl Into<String>) -> Result<T, Error> {
        Err(Error::at(self.path, at, reason))
    }

    /// Reads as many bytes as the stream has, and returns their number.
    fn fill(&mut self, into: &mut [u8]) -> Result<usize, Error> {
        let mut filled = 0;
        while filled < into.len() {
            match self.source.read(&mut into[filled..]) {
                Ok(0) => break,
                Ok(more) => filled += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io(self.path, &error)),
            }
        }
        Ok(filled)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.sink.write_all(bytes).map_err(|error| Error::temporary(self.path, &error))
    }

    /// Copies all records. Returns the note about the last record if the stream ends within it.
    fn records(&mut self, continues: &mut dyn FnMut() -> bool) -> Result<Option<String>, Error> {
        let mut record = vec![0; usize::from(u16::MAX)];
        let mut events = false;
        let mut cut = None;
        for number in 0_u64.. {
            if number % BETWEEN == 0 && !continues() {
                return Err(Error::new(self.path, Place::File, crate::STOPPED));
            }
            let begun = self.fill(&mut record[..8])?;
            if begun < 8 {
                cut = (begun > 0).then_some(begun);
                break;
            }
            let [k0, k1, k2, k3, m0, m1, s0, s1] =
                *record.first_chunk::<8>().expect("65,535 bytes");
            let kind = u32::from_le_bytes([k0, k1, k2, k3]);
            let size = usize::from(u16::from_le_bytes([s0, s1]));
            if record.starts_with(b"PERFILE2") {
                let why = "a second recording begins here. Remedy: keep each recording in a file";
                return self.wrong(self.at, why);
            }
            if size < 8 {
                let why = format!(
                    "a record of {size} bytes: the stream is damaged. Remedy: save the output of \
                     perf record -o - unchanged, or record to a file"
                );
                return self.wrong(self.at, why);
            }
            let whole = 8 + self.fill(&mut record[8..size])?;
            if whole < size {
                cut = Some(whole);
                break;
            }
            if kind < FIRST_OF_PERF || matches!(kind, RECORD_COMPRESSED | RECORD_COMPRESSED2) {
                events = true;
            } else {
                // The length of a build identifier matters for records of the kernel alone.
                refused(kind, u16::from_le_bytes([m0, m1]), Some(0))
                    .or_else(|(within, why)| self.wrong(self.at + within, why))?;
                self.describe(kind, &record[..size])?;
            }
            self.write(&record[..size])?;
            self.at += size as u64;
            if kind == HEADER_TRACING_DATA
                && let Some(missing) = self.tracing_data(&record[..size])?
            {
                cut = Some(missing);
                break;
            }
        }
        let at = self.at;
        match cut {
            _ if !events => self.wrong(
                at,
                "the stream ends before its first event. Remedy: record again, and let perf record \
                 end before its reader",
            ),
            Some(left) => Ok(Some(format!(
                "the stream ends within the record at offset {at:#x}: its {left} bytes and all \
                 later records are missing. Remedy: record again, and let perf record end before \
                 its reader"
            ))),
            None => Ok(None),
        }
    }

    /// Reads the layouts of tracepoints, which follow `record`. Writes records of the same length
    /// in their place. Returns the number of bytes if the stream ends within them.
    fn tracing_data(&mut self, record: &[u8]) -> Result<Option<usize>, Error> {
        let at = self.at;
        let Some(len) = word32(record, 8) else {
            return self.wrong(at, damaged(&"a record of tracing data without its size"));
        };
        if len % 8 != 0 {
            let why = format_args!("tracing data of {len} bytes; want a multiple of 8");
            return self.wrong(at, damaged(&why));
        }
        self.reserve(len as usize)?;
        let mut data = Vec::new();
        let copied = (&mut self.source).take(u64::from(len)).read_to_end(&mut data);
        let copied = copied.map_err(|error| Error::io(self.path, &error))?;
        if copied < len as usize {
            return Ok(Some(copied));
        }
        let mut left = len as usize;
        while left > 0 {
            let size = left.min(usize::from(u16::MAX) & !7);
            let mut padding = vec![0; size];
            padding[..4].copy_from_slice(&HEADER_EVENT_TYPE.to_le_bytes());
            padding[6..8].copy_from_slice(&(size as u16).to_le_bytes());
            self.write(&padding)?;
            left -= size;
        }
        self.header.features.insert(TRACING_DATA, data);
        self.at += u64::from(len);
        Ok(None)
    }

    /// Keeps the description in `record`, of this kind.
    fn describe(&mut self, kind: u32, record: &[u8]) -> Result<(), Error> {
        let at = self.at;
        match kind {
            HEADER_ATTR => {
                let own = word32(record, 12).map(u64::from).unwrap_or(0);
                attr_size(own).or_else(|why| self.wrong(at + 12, why))?;
                let Some((attr, ids)) = record[8..].split_at_checked(own as usize) else {
                    let why = format_args!("an event attribute of {own} bytes");
                    return self.wrong(at + 12, damaged(&why));
                };
                if ids.len() % 8 != 0 {
                    return self
                        .wrong(at, damaged(&"the identifiers of an event are not complete"));
                }
                if self.header.attrs.len() >= MAX_EVENTS {
                    return self.wrong(at, damaged(&format_args!("more than {MAX_EVENTS} events")));
                }
                self.reserve(record.len())?;
                self.header.attrs.push((attr.to_vec(), ids.to_vec()));
            }
            EVENT_UPDATE => {
                if let (Some(UPDATE_NAME), Some(id)) = (word(record, 8), word(record, 16)) {
                    self.reserve(record.len())?;
                    self.header.names.insert(id, text(&record[24..]).to_vec());
                }
            }
            HEADER_FEATURE => {
                // The last of these records marks their end, and has no contents.
                if let Some(feature @ 0..FEATURES) = word(record, 8)
                    && record.len() > 16
                {
                    self.reserve(record.len())?;
                    self.header.features.insert(feature as u32, record[16..].to_vec());
                }
            }
            HEADER_BUILD_ID => {
                self.reserve(record.len())?;
                self.header.features.entry(BUILD_ID).or_default().extend_from_slice(record);
            }
            _ => {}
        }
        Ok(())
    }

    /// Counts `more` bytes of the description.
    fn reserve(&mut self, more: usize) -> Result<(), Error> {
        self.header.size += more;
        if self.header.size > MAX_DESCRIPTION {
            let why = "the description of the events has more than 64 MiB";
            return self.wrong(self.at, damaged(&why));
        }
        Ok(())
    }
}

/// Writes the sections of the features after the records, which end at `end`, and the header of the
/// file.
pub(super) fn sections(
    header: &Description,
    end: u64,
    sink: &mut (impl Write + Seek),
) -> io::Result<()> {
    let mut features = header.features.clone();
    features.insert(EVENT_DESC, event_desc(header));
    let mut words = [0_u64; 4];
    let mut at = end + 16 * features.len() as u64;
    for (feature, contents) in &features {
        words[*feature as usize / 64] |= 1 << (feature % 64);
        sink.write_all(&at.to_le_bytes())?;
        sink.write_all(&(contents.len() as u64).to_le_bytes())?;
        at += contents.len() as u64;
    }
    for contents in features.values() {
        sink.write_all(contents)?;
    }
    // The attributes are in EVENT_DESC alone.
    let attrs = [HEADER, 0];
    let file = [HEADER, 128 + 16, attrs[0], attrs[1], HEADER, end - HEADER, 0, 0];
    sink.seek(SeekFrom::Start(0))?;
    sink.write_all(b"PERFILE2")?;
    for word in file.into_iter().chain(words) {
        sink.write_all(&word.to_le_bytes())?;
    }
    sink.flush()
}

/// Returns the section EVENT_DESC: each attribute with its name and its identifiers.
fn event_desc(header: &Description) -> Vec<u8> {
    let described = header.features.get(&EVENT_DESC).map(|section| names(section));
    let described = described.unwrap_or_default();
    let tracepoints = header.features.get(&TRACING_DATA).map(|section| format::names(section));
    let mut tracepoints = tracepoints.unwrap_or_default();
    tracepoints.extend(header.tracepoints.clone());
    let size = header.attrs.iter().map(|(attr, _)| attr.len()).max().unwrap_or(64);
    let mut section = Vec::new();
    section.extend((header.attrs.len() as u32).to_le_bytes());
    section.extend((size as u32).to_le_bytes());
    for (attr, ids) in &header.attrs {
        let first = word(ids, 0);
        let named = |names: &HashMap<u64, Vec<u8>>| names.get(&first?).cloned();
        let traced = match (word32(attr, 0), word(attr, 8)) {
            (Some(TRACEPOINT), Some(number)) => tracepoints.get(&number),
            _ => None,
        };
        // perf before Linux 4.6 writes no names.
        let traced = traced.map(|name| name.clone().into_bytes());
        let mut name = traced.or_else(|| named(&header.names)).or_else(|| named(&described));
        let name = name.get_or_insert_default();
        name.push(0);
        section.extend(attr);
        section.resize(section.len() + size - attr.len(), 0);
        section.extend((ids.len() as u32 / 8).to_le_bytes());
        section.extend((name.len() as u32).to_le_bytes());
        section.extend(&*name);
        section.extend(ids);
    }
    section
}

/// Returns the names in the section EVENT_DESC by the first identifier of the event, up to the
/// first error in the section.
fn names(section: &[u8]) -> HashMap<u64, Vec<u8>> {
    let mut names = HashMap::new();
    let mut walk = || {
        let (count, size) = (word32(section, 0)?, word32(section, 4)? as usize);
        let mut at = 8_usize;
        for _ in 0..count {
            at = at.checked_add(size)?;
            let (ids, len) = (word32(section, at)? as usize, word32(section, at + 4)? as usize);
            let name = section.get(at + 8..at + 8 + len)?;
            at += 8 + len;
            if ids > 0 {
                names.insert(word(section, at)?, text(name).to_vec());
            }
            at += 8 * ids;
        }
        Some(())
    };
    let _ = walk();
    names
}

/// Returns the bytes before the first zero.
fn text(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or(&[])
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_le_bytes)
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::super::hidden::STOPPED_NOTE;
    use super::*;

    #[test]
    fn missing_end_can_contain_the_faults_of_a_program() {
        let notes = |cut: Option<&str>| {
            let mut trace = Trace::default();
            trace.header.notes = vec![format!("{STOPPED_NOTE} (setuid)"), "another".to_owned()];
            let stream = Stream { begin: 16, end: 200, cut: cut.map(str::to_owned) };
            stream.of(Ok(trace)).unwrap().header.notes
        };
        assert_eq!(notes(None).len(), 2);
        assert_eq!(notes(Some("cut")), ["another", "cut"]);
    }
}
