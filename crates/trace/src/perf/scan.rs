//! A walk over the raw bytes of a `perf.data` file, before the parser reads them.
//!
//! The parser trusts sizes and counts in the file: it allocates the given sizes, and adds them up.
//! The walk checks each value against the available bytes. A file can therefore use at most a small
//! multiple of its own size in memory (for compressed records, of their decompressed size, at most
//! 1 GiB). An error contains the offset of the rejected value. Compressed records are replaced by
//! their contents (`packed`), because the parser does not decompress.

use super::packed;
use crate::error::Error;
use std::borrow::Cow;
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The size of the header of a file, in bytes.
pub(super) const HEADER: u64 = 104;
/// The feature section that describes the events.
pub(super) const EVENT_DESC: u32 = 12;
/// Features from this number on belong to simpleperf.
const FIRST_FOREIGN: u32 = 128;
const NO_NAMES: &str = "the file does not name its events (EVENT_DESC): perf before Linux 3.2 wrote \
     it, or it is damaged. Remedy: record again";
const HARDWARE: &str = "holds a hardware trace (AUX), which is not understood. Remedy: record \
     without intel_pt and cs_etm";
const LONG_ID: &str = "a build identifier of more than 20 bytes: the file is damaged; copy or \
     record it again";
/// The reason for a file without a record.
pub(super) const NO_RECORDS: &str = "the file has no records: perf record was killed, or its disk \
     was full. Remedy: record again, and end perf record by Ctrl-C or SIGTERM";
/// The remedy for a file whose sizes and counts do not fit.
pub(super) const DAMAGED: &str = "the file is damaged; copy or record it again";
const RECORD_AUXTRACE: u32 = 71;
pub(super) const RECORD_COMPRESSED: u32 = 81;
pub(super) const RECORD_COMPRESSED2: u32 = 83;
const RECORD_MMAP2: u32 = 10;
const MISC_BUILD_ID: u16 = 1 << 14;
/// The offset of the length of the build identifier in an MMAP2 record.
pub(super) const BUILD_ID: u64 = 40;
/// The smallest `perf_event_attr`.
pub(super) const MIN_ATTR: u64 = 64;
/// A limit far above any kernel's `perf_event_attr`.
const MAX_ATTR: u64 = 4096;

/// The size of a read of a file, in bytes.
const WINDOW: usize = 256 << 10;

/// Rejects a file whose sizes and counts do not fit its bytes. Otherwise returns the file without
/// compressed records. If the recording is `cut`, the compressed contents may end early.
pub(super) fn check<'a>(path: &Path, bytes: &'a [u8], cut: bool) -> Result<Cow<'a, [u8]>, Error> {
    let Checked { data, table, packed } = Scan { path, bytes: &bytes }.file()?;
    if packed.is_empty() {
        return Ok(bytes.into());
    }
    let slice = |at: u64, len: u64| &bytes[at as usize..(at + len) as usize];
    let packed = packed.into_iter().map(|Place { at, size, from, len }| {
        let bytes = slice(from, len);
        Packed { at, size, bytes }
    });
    let records = slice(data.offset, data.size);
    let plain = packed::replaced(records, data.offset, &packed.collect::<Vec<_>>(), cut)
        .map_err(|(at, reason)| Error::at(path, at, reason))?;
    // The records are placed after the unchanged file, followed by the table of sections, which is
    // always located directly after the records. All other offsets stay valid.
    let mut file = bytes.to_vec();
    file[40..48].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    file[48..56].copy_from_slice(&(plain.len() as u64).to_le_bytes());
    file.extend(plain);
    file.extend(slice(table.offset, table.size));
    Ok(file.into())
}

/// Checks like [`check`], for a file read in parts. Returns whether the file has no compressed
/// records.
pub(super) fn check_file(path: &Path, file: &File) -> Result<bool, Error> {
    let bytes = Window::new(path, file)?;
    Ok(Scan { path, bytes: &bytes }.file()?.packed.is_empty())
}

/// The sections of a checked file.
struct Checked {
    data: Section,
    /// The table of the feature sections.
    table: Section,
    packed: Vec<Place>,
}

/// A compressed record of `size` bytes at `at`, whose compressed bytes are the `len` from `from`.
struct Place {
    at: u64,
    size: u64,
    from: u64,
    len: u64,
}

/// The bytes of a file, in memory or not.
pub(super) trait Bytes {
    fn len(&self) -> u64;
    /// Copies the bytes from `at` on, which are below the length.
    fn copy(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
}

impl Bytes for &[u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn copy(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self[at as usize..at as usize + into.len()]);
        Ok(())
    }
}

/// A file, partly in memory.
pub(super) struct Window<'a> {
    file: &'a File,
    len: u64,
    /// The offset of the part in memory, and its bytes.
    part: RefCell<(u64, Vec<u8>)>,
}

impl<'a> Window<'a> {
    pub(super) fn new(path: &Path, file: &'a File) -> Result<Self, Error> {
        let len = file.metadata().map_err(|error| Error::io(path, &error))?.len();
        Ok(Self { file, len, part: RefCell::default() })
    }
}

impl Bytes for Window<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn copy(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let (start, part) = &mut *self.part.borrow_mut();
        let end = at + into.len() as u64;
        if at < *start || end > *start + part.len() as u64 {
            *start = at;
            part.resize((self.len - at).min(WINDOW.max(into.len()) as u64) as usize, 0);
            self.file.read_exact_at(part, at)?;
        }
        let from = (at - *start) as usize;
        into.copy_from_slice(&part[from..from + into.len()]);
        Ok(())
    }
}

#[derive(Clone, Copy)]
pub(super) struct Section {
    /// The offset of this information in the file.
    told_at: u64,
    pub(super) offset: u64,
    pub(super) size: u64,
}

pub(super) struct Scan<'p, B> {
    pub(super) path: &'p Path,
    pub(super) bytes: &'p B,
}

impl<B: Bytes> Scan<'_, B> {
    pub(super) fn wrong<T>(&self, at: u64, reason: impl Into<String>) -> Result<T, Error> {
        Err(Error::at(self.path, at, reason))
    }

    /// Checks that the file contains the `len` bytes from `at` on.
    fn there(&self, at: u64, len: u64) -> Result<(), Error> {
        match at.checked_add(len).filter(|end| *end <= self.bytes.len()) {
            Some(_) => Ok(()),
            None => self.wrong(at, format!("the file ends before these {len} bytes: {DAMAGED}")),
        }
    }

    pub(super) fn array<const N: usize>(&self, at: u64) -> Result<[u8; N], Error> {
        self.there(at, N as u64)?;
        let mut bytes = [0; N];
        let copied = self.bytes.copy(at, &mut bytes);
        copied.map_err(|error| Error::at(self.path, at, error.to_string()))?;
        Ok(bytes)
    }

    pub(super) fn u32(&self, at: u64) -> Result<u32, Error> {
        self.array(at).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&self, at: u64) -> Result<u64, Error> {
        self.array(at).map(u64::from_le_bytes)
    }

    pub(super) fn section(&self, told_at: u64) -> Result<Section, Error> {
        let section = Section { told_at, offset: self.u64(told_at)?, size: self.u64(told_at + 8)? };
        let end = section.offset.checked_add(section.size);
        if end.is_none_or(|end| end > self.bytes.len()) {
            let Section { offset, size, .. } = section;
            return self.wrong(
                told_at,
                format!(
                    "a section of {size} bytes at {offset:#x} reaches beyond the file's end: the \
                     file is not complete; copy or record it again"
                ),
            );
        }
        Ok(section)
    }

    fn file(&self) -> Result<Checked, Error> {
        match &self.array::<8>(0)? {
            b"PERFILE2" => {}
            b"2ELIFREP" => {
                let why =
                    "a perf.data file of a big-endian machine; x86-64 and aarch64 are understood";
                return self.wrong(0, why);
            }
            b"PERFFILE" => {
                let why = "a perf.data file of the first format, of perf before Linux 3.5";
                return self.wrong(0, why);
            }
            _ => return self.wrong(0, "not a perf.data file"),
        }
        match self.u64(8)? {
            HEADER => {}
            other => {
                let why = format!("a header of {other} bytes; want {HEADER}: {DAMAGED}");
                return self.wrong(8, why);
            }
        }
        // The location of its identifiers, 16 bytes, follows each attribute.
        attr_size(self.u64(16)?).or_else(|why| self.wrong(16, why))?;
        let attrs = self.section(24)?;
        let data = self.section(40)?;
        // perf before Linux 3.11 writes a table of event names here. EVENT_DESC has the names, too.
        self.section(56)?;
        if data.size == 0 {
            return self.wrong(data.told_at, NO_RECORDS);
        }
        let table = self.features(data, attrs)?;
        let packed = self.records(data)?;
        Ok(Checked { data, table, packed })
    }

    /// Walks the table of the feature sections, and returns its location.
    fn features(&self, data: Section, attrs: Section) -> Result<Section, Error> {
        let start = data.offset + data.size;
        let mut told_at = start;
        let mut total = 0u64;
        let mut described = false;
        for feature in 0..256 {
            let word = self.u64(72 + u64::from(feature / 64) * 8)?;
            if word >> (feature % 64) & 1 == 0 {
                continue;
            }
            if feature >= FIRST_FOREIGN {
                let why = "written by simpleperf. Remedy: record with perf record";
                return self.wrong(72, why);
            }
            let section = self.section(told_at)?;
            total = total.saturating_add(section.size);
            if total > self.bytes.len() {
                return self.wrong(told_at, format!("the sections overlap: {DAMAGED}"));
            }
            if feature == EVENT_DESC {
                self.event_desc(section)?;
                described = true;
            }
            told_at += 16;
        }
        if !described {
            return self.wrong(attrs.told_at, NO_NAMES);
        }
        Ok(Section { told_at: data.told_at, offset: start, size: told_at - start })
    }

    /// Walks the description of the events: counts and lengths must fit the section.
    fn event_desc(&self, section: Section) -> Result<(), Error> {
        let end = section.offset + section.size;
        let mut at = section.offset;
        let mut take = |len: u64| {
            let from = at;
            match at.checked_add(len).filter(|to| *to <= end) {
                Some(to) => {
                    at = to;
                    Ok(from)
                }
                None => {
                    let why = format!("the description of the events ends too early: {DAMAGED}");
                    self.wrong(from, why)
                }
            }
        };
        let count = self.u32(take(4)?)?;
        let size_at = take(4)?;
        let attr_size = u64::from(self.u32(size_at)?);
        super::scan::attr_size(attr_size).or_else(|why| self.wrong(size_at, why))?;
        if u64::from(count) > section.size / attr_size {
            let why = format!("{count} events do not fit their section: {DAMAGED}");
            return self.wrong(section.offset, why);
        }
        for _ in 0..count {
            let attr = take(attr_size)?;
            let own = u64::from(self.u32(attr + 4)?);
            if !(MIN_ATTR..=attr_size).contains(&own) {
                let why = format!("an event attribute of {own} bytes: {DAMAGED}");
                return self.wrong(attr + 4, why);
            }
            let ids = u64::from(self.u32(take(4)?)?);
            let name = u64::from(self.u32(take(4)?)?);
            take(name)?;
            take(ids * 8)?;
        }
        Ok(())
    }

    /// Walks the records: sizes must lead exactly to the end. Returns the compressed records and
    /// the location of their contents.
    fn records(&self, data: Section) -> Result<Vec<Place>, Error> {
        let end = data.offset + data.size;
        let mut at = data.offset;
        let mut packed = Vec::new();
        while at < end {
            let [k0, k1, k2, k3, m0, m1, s0, s1] = self.array(at)?;
            let kind = u32::from_le_bytes([k0, k1, k2, k3]);
            let size = u64::from(u16::from_le_bytes([s0, s1]));
            if size < 8 || size > end - at {
                let left = end - at;
                return self.wrong(
                    at,
                    format!("a record of {size} bytes, but only {left} bytes remain: {DAMAGED}"),
                );
            }
            let misc = u16::from_le_bytes([m0, m1]);
            // The length of the build identifier, for an MMAP2 record.
            let id = match size {
                41.. => Some(self.array::<1>(at + BUILD_ID)?[0]),
                _ => None,
            };
            refused(kind, misc, id).or_else(|(within, why)| self.wrong(at + within, why))?;
            if kind == RECORD_COMPRESSED {
                packed.push(Place { at, size, from: at + 8, len: size - 8 });
            } else if kind == RECORD_COMPRESSED2 {
                let len = self.u64(at + 8)?;
                if size < 16 || len > size - 16 {
                    return self.wrong(
                        at + 8,
                        format!("more compressed bytes than the record has: {DAMAGED}"),
                    );
                }
                packed.push(Place { at, size, from: at + 16, len });
            }
            at += size;
        }
        Ok(packed)
    }
}

/// Returns an error for an attribute of `size` bytes that no perf writes.
pub(super) fn attr_size(size: u64) -> Result<(), String> {
    match size {
        MIN_ATTR..=MAX_ATTR => Ok(()),
        _ => Err(format!(
            "event attributes of {size} bytes; perf writes {MIN_ATTR} or more: {DAMAGED}"
        )),
    }
}

/// A compressed record of `size` bytes at `at` in the file, and its contents.
pub(super) struct Packed<'a> {
    pub(super) at: u64,
    pub(super) size: u64,
    pub(super) bytes: &'a [u8],
}

/// Returns an error for a record that the parser must not read: the offset of the error from the
/// start of the record, and the reason. `id` is the byte at [`BUILD_ID`], if the record is long
/// enough.
pub(super) fn refused(kind: u32, misc: u16, id: Option<u8>) -> Result<(), (u64, &'static str)> {
    match kind {
        RECORD_AUXTRACE => Err((0, HARDWARE)),
        RECORD_MMAP2 if misc & MISC_BUILD_ID != 0 && id.is_none_or(|len| len > 20) => {
            Err((BUILD_ID, LONG_ID))
        }
        _ => Ok(()),
    }
}
