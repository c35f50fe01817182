//! Reads the `perf.data` files of stock `perf record`.
//!
//! Each step has a file: `pipe` converts a stream to a file, and `unended` completes the file of a
//! killed perf; `scan` walks the raw file and rejects data that could make the parser allocate
//! without bound, so that errors can name an offset; `packed` decompresses records; `format` reads
//! the layouts of tracepoints in the file; `chains` collects call stacks, and `unwind` unwinds
//! copies of stacks; `roles` determines the meaning of each perf event, and `architecture` the
//! meaning of the numbers of calls; `import` converts the sorted records to a [`Trace`], `hidden`
//! finds programs of which the kernel reports only a part, and `initial` adds the state of
//! processes that ran before the recording. The `linux-perf-data` crate sorts and decodes the
//! records.
//!
//! # Events used
//!
//! `exceptions:page_fault_user` and `_kernel`, or otherwise the software events `page-faults`,
//! `minor-faults` and `major-faults` recorded with `-d` (without the kind of access);
//! `syscalls:sys_enter_*` and `sys_exit_*` of mmap, munmap, mremap, mprotect, madvise and brk, or
//! `raw_syscalls:sys_enter` and `sys_exit`; `task:task_newtask`; the MMAP2, MMAP, FORK, EXIT and
//! COMM records of every file; and LOST records, which are counted. All other records are skipped.

mod architecture;
mod call;
mod chains;
mod format;
mod hidden;
mod import;
mod initial;
mod packed;
mod pipe;
mod roles;
mod scan;
mod unended;
mod unwind;

pub(crate) use architecture::Architecture;
pub(crate) use hidden::is_hidden;
pub(crate) use import::is_cut;
pub(crate) use pipe::is_stream;
pub(crate) use unended::is_unended;

use crate::error::{Error, Place};
use crate::event::Trace;
use crate::resident::Snapshot;
use crate::{STOPPED, Watch};
use linux_perf_data::{Endianness, PerfFileReader, PerfFileRecord};
use pipe::Stream;
use scan::{Scan, Window};
use std::fs::File;
use std::io::{BufReader, BufWriter, Cursor, Read, Seek, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Records between two reports of progress.
const BETWEEN: u64 = 1 << 16;

/// The size of a read of a file, in bytes.
const BUFFER: usize = 1 << 20;

/// Reads the `perf.data` file `bytes`, which came from the file `path` (used in errors only).
///
/// # Errors
/// The bytes are not a `perf.data` file of x86-64 or aarch64 written by `perf record` to a file or
/// a pipe, contain no page faults, or are truncated or corrupted. The file of a killed perf is read
/// up to the last whole record, with a note.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Trace, Error> {
    let mut file = Cursor::new(Vec::new());
    let scan = Scan { path, bytes: &bytes };
    let stream = if is_stream(bytes) {
        pipe::to_file(path, bytes, &mut file, &mut || true)?
    } else if unended::lacks_end(&scan) {
        unended::to_file(&scan, &mut file, unended::running_names, &mut || true)?
    } else {
        return parse_whole(path, bytes, false);
    };
    stream.of(parse_whole(path, file.get_ref(), stream.is_cut()))
}

/// Reads the file `bytes`, which lacks the end of the recording if `cut`.
fn parse_whole(path: &Path, bytes: &[u8], cut: bool) -> Result<Trace, Error> {
    let bytes = scan::check(path, bytes, cut)?;
    guarded(path, Cursor::new(&*bytes), None, &mut || true)
}

/// Reads like [`parse`], without holding the file in memory: a recording of millions of faults has
/// a gigabyte. Reports progress to `watch`. Returns `None` if the file is compressed, which
/// requires all bytes in memory.
pub(crate) fn parse_file(
    path: &Path,
    file: &File,
    watch: Watch<'_>,
) -> Result<Option<Trace>, Error> {
    match Converted::of_unended(path, file, watch)? {
        Some(converted) => converted.read(path, watch).map(Some),
        None => parse_complete(path, file, watch),
    }
}

/// Reads a complete file like [`parse_file`].
fn parse_complete(path: &Path, file: &File, watch: Watch<'_>) -> Result<Option<Trace>, Error> {
    let plain = scan::check_file(path, file)?;
    plain.then(|| in_parts(path, file, None, watch)).transpose()
}

/// Reads the stream of perf in `source`, which came from `path` (used in errors only), through a
/// temporary file. Reports progress to `watch`.
pub(crate) fn parse_stream(
    path: &Path,
    source: impl Read,
    watch: Watch<'_>,
) -> Result<Trace, Error> {
    let source = BufReader::with_capacity(BUFFER, source);
    let converted =
        Converted::new(path, |sink| pipe::to_file(path, source, sink, &mut || watch(0.0)))?;
    converted.read(path, watch)
}

/// Reads the recording in `path` of processes that were `running` before. Reports progress to
/// `watch`.
pub(crate) fn read_live(
    path: &Path,
    running: Running<'_>,
    watch: Watch<'_>,
) -> Result<Trace, Error> {
    let file = crate::error::open(path)?;
    // perf compresses nothing without a request.
    let mut read = |file: &File| {
        scan::check_file(path, file)?;
        in_parts(path, file, Some(running), watch)
    };
    match Converted::of_unended(path, &file, &mut |_| true)? {
        Some(Converted { file, stream }) => stream.of(read(&file)),
        None => read(&file),
    }
}

/// A source in a temporary file.
struct Converted {
    file: File,
    stream: Stream,
}

impl Converted {
    /// Creates the file, which `convert` writes.
    fn new(
        path: &Path,
        convert: impl FnOnce(&mut BufWriter<&File>) -> Result<Stream, Error>,
    ) -> Result<Self, Error> {
        let failed = |error| Error::temporary(path, &error);
        let file = tempfile::tempfile().map_err(failed)?;
        let mut sink = BufWriter::with_capacity(BUFFER, &file);
        let stream = convert(&mut sink)?;
        sink.flush().map_err(failed)?;
        drop(sink);
        Ok(Self { file, stream })
    }

    /// Converts `file` if perf has not completed it.
    fn of_unended(path: &Path, file: &File, watch: Watch<'_>) -> Result<Option<Self>, Error> {
        let bytes = Window::new(path, file)?;
        let scan = Scan { path, bytes: &bytes };
        let convert = |sink: &mut BufWriter<&File>| {
            unended::to_file(&scan, sink, unended::running_names, &mut || watch(0.0))
        };
        unended::lacks_end(&scan).then(|| Self::new(path, convert)).transpose()
    }

    /// Reads the file.
    fn read(&self, path: &Path, watch: Watch<'_>) -> Result<Trace, Error> {
        let read = parse_complete(path, &self.file, watch).and_then(|trace| match trace {
            Some(trace) => Ok(trace),
            None => {
                (&self.file).rewind().map_err(|error| Error::io(path, &error))?;
                let bytes = crate::error::load_from(path, &self.file)?;
                parse_whole(path, &bytes, self.stream.is_cut())
            }
        });
        self.stream.of(read)
    }
}

/// Reads the checked `file` in parts.
fn in_parts(
    path: &Path,
    file: &File,
    running: Option<Running<'_>>,
    watch: Watch<'_>,
) -> Result<Trace, Error> {
    let failed = |error| Error::io(path, &error);
    let bytes = file.metadata().map_err(failed)?.len();
    let mut reader = BufReader::with_capacity(BUFFER, file);
    reader.rewind().map_err(failed)?;
    // The parser owns the reader, but the position belongs to the file.
    guarded(path, reader, running, &mut || {
        let at = (&mut &*file).stream_position().unwrap_or(0);
        watch(at as f64 / bytes.max(1) as f64)
    })
}

/// The processes that ran before a recording.
#[derive(Clone, Copy)]
pub(crate) struct Running<'a> {
    /// Their mappings and resident pages.
    pub snapshots: &'a [Snapshot],
    /// The time from which calls and faults were recorded, in nanoseconds of `CLOCK_MONOTONIC`.
    pub enabled_ns: u64,
    /// The processes of the recorder, which are omitted.
    pub own: &'a [i32],
}

fn guarded(
    path: &Path,
    bytes: impl Read + Seek,
    running: Option<Running<'_>>,
    continues: &mut dyn FnMut() -> bool,
) -> Result<Trace, Error> {
    // The parser is an external crate. A panic on input accepted by the scan is reported as an
    // error in the file. Only the parser's own state is lost.
    let mut record = None;
    catch_unwind(AssertUnwindSafe(|| read(path, bytes, running, &mut record, continues)))
        .unwrap_or_else(|panic| {
            let why = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("unknown");
            let why = format!("the perf.data parser failed: {}", damaged(&why));
            Err(Error::new(path, place(record), why))
        })
}

fn place(record: Option<u64>) -> Place {
    record.map_or(Place::File, Place::Record)
}

/// Returns the reason of an `error` of the parser, with the remedy.
fn damaged(error: &impl std::fmt::Display) -> String {
    format!("{error}: {}", scan::DAMAGED)
}

/// Parses `bytes`, while `continues` returns `true`. Keeps the number of the current record in
/// `record`.
fn read(
    path: &Path,
    bytes: impl Read + Seek,
    running: Option<Running<'_>>,
    record: &mut Option<u64>,
    continues: &mut dyn FnMut() -> bool,
) -> Result<Trace, Error> {
    let whole = |reason: String| Error::new(path, Place::File, reason);
    let PerfFileReader { mut perf_file, mut record_iter } =
        PerfFileReader::parse_file(bytes).map_err(|e| whole(damaged(&e)))?;
    if perf_file.endian() != Endianness::LittleEndian {
        return Err(Error::at(
            path,
            0,
            "recorded on a big-endian machine; x86-64 and aarch64 are understood",
        ));
    }
    let mut import = import::Import::new(&perf_file, running).map_err(whole)?;
    for number in 0.. {
        *record = Some(number);
        let wrong = |reason: String| Error::new(path, Place::Record(number), reason);
        if number % BETWEEN == 0 && !continues() {
            return Err(whole(STOPPED.to_owned()));
        }
        let next = record_iter.next_record(&mut perf_file).map_err(|e| wrong(damaged(&e)))?;
        match next {
            Some(PerfFileRecord::EventRecord { .. }) if import.is_full() => {
                import.cut();
                break;
            }
            Some(PerfFileRecord::EventRecord { attr_index, record }) => {
                import.record(attr_index, &record).map_err(wrong)?;
            }
            Some(PerfFileRecord::UserRecord(_)) => {}
            None => break,
        }
    }
    *record = None;
    let trace = import.finish().map_err(whole)?;
    trace.check().map_err(|(event, reason)| {
        Error::new(path, event.map_or(Place::File, Place::Event), damaged(&reason))
    })?;
    Ok(trace)
}
