//! Recordings of the memory operations of real programs, and their replay.
//!
//! A [`Trace`] is a program's page faults and address-space calls in order of time. It is read from
//! the `perf.data` of stock `perf record` ([`perf`]) or from the small portable format of the
//! bundled recordings ([`compact`], [`recordings`]), and created with [`record`]. A
//! [`Plan`](plan::Plan) turns a trace into lists of operations that real threads can replay
//! concurrently, always in an order in which the program could have run.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use faultless_trace::{plan::Plan, recordings};
//!
//! let recording = recordings::find("python").ok_or("no such recording")?;
//! let trace = recording.trace()?;
//! println!("{}", trace.summary());
//! let plan = Plan::new(&trace)?;
//! for assumption in plan.assumptions() {
//!     println!("replay assumes: {assumption}");
//! }
//! # Ok(()) }
//! ```
//!
//! A trace of *addresses*, written by valgrind's lackey ([`lackey`]), is not a recording of faults
//! and calls. It serves for TLB simulation. [`open`] distinguishes the two kinds.
//!
//! Input is never trusted: a file that is truncated, corrupted or malicious results in an [`Error`]
//! with the file, the place in the file and the reason.

pub mod anticipate;
pub mod blocks;
pub mod bound;
pub mod callers;
pub mod census;
pub mod commit;
pub mod compact;
pub mod discard;
pub mod error;
pub mod event;
pub mod files;
pub mod footprint;
pub mod fork;
pub mod keep;
pub mod lackey;
pub mod loan;
mod names;
mod page_set;
pub mod perf;
pub mod plan;
pub mod record;
pub mod recordings;
pub mod reserve;
pub mod resident;
mod symbols;
mod zstd;

use lackey::Addresses;
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek};
use std::path::Path;

pub use error::{Error, Place};
pub use event::{Event, Header, Kind, Trace};

/// The kinds of input files.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a command has one input")]
pub enum Input {
    /// A recording of faults and calls.
    Recording(Trace),
    /// A trace of addresses, not read yet.
    Addresses(Addresses),
}

/// Receives the share of a recording that has been read, from 0 to 1, and returns whether to
/// continue. A reader calls it several times a second.
pub type Watch<'a> = &'a mut dyn FnMut(f64) -> bool;

/// The reason of the error of a reader that was told to stop.
pub const STOPPED: &str = "the reading was interrupted";

/// Bytes that identify the kind of a file.
const START: u64 = 4096;

/// Opens the file at `path`, of either kind. Input from a pipe is kept in a temporary file if it
/// must be read more than once.
///
/// # Errors
/// The errors of [`read`]. A trace of addresses fails here only if it cannot be read at all,
/// because its contents are not examined yet.
pub fn open(path: &Path) -> Result<Input, Error> {
    open_watched(path, &mut |_| true)
}

/// Opens like [`open`], and reports progress to `watch`.
///
/// # Errors
/// As [`open`]. If `watch` returns `false`, the reason is [`STOPPED`].
pub fn open_watched(path: &Path, watch: Watch<'_>) -> Result<Input, Error> {
    let failed = |error: io::Error| Error::io(path, &error);
    let mut file = error::open(path)?;
    let mut start = Vec::new();
    (&mut file).take(START).read_to_end(&mut start).map_err(failed)?;
    if !lackey::recognise(&start) {
        return recording(path, &start, file, watch).map(Input::Recording);
    }
    if !file.metadata().map_err(failed)?.is_file() {
        let failed = |error| Error::temporary(path, &error);
        let mut kept = tempfile::tempfile().map_err(failed)?;
        io::copy(&mut (&*start).chain(file), &mut kept).map_err(failed)?;
        file = kept;
    }
    Ok(Input::Addresses(Addresses::of_file(path, file)))
}

/// Reads a recording from `path`: a `perf.data` file or a compact recording, distinguished by their
/// first bytes.
///
/// # Errors
/// The file cannot be read, is of neither kind, or is truncated or corrupted.
pub fn read(path: &Path) -> Result<Trace, Error> {
    read_watched(path, &mut |_| true)
}

/// Reads like [`read`], and reports progress to `watch`.
///
/// # Errors
/// As [`read`]. If `watch` returns `false`, the reason is [`STOPPED`].
pub fn read_watched(path: &Path, watch: Watch<'_>) -> Result<Trace, Error> {
    let mut file = error::open(path)?;
    let mut start = Vec::new();
    let read = (&mut file).take(START).read_to_end(&mut start);
    read.map_err(|error| Error::io(path, &error))?;
    recording(path, &start, file, watch)
}

/// Reads the recording that begins with `start`, which was read from `file`.
fn recording(path: &Path, start: &[u8], file: File, watch: Watch<'_>) -> Result<Trace, Error> {
    if !is_recording(start) {
        // The start is sufficient for the error, and a device such as /dev/zero has no end.
        return parse(path, start);
    }
    if perf::is_stream(start) {
        return perf::parse_stream(path, start.chain(file), watch);
    }
    let len = file.metadata().ok().filter(Metadata::is_file).map(|data| data.len());
    let fits = len.is_some_and(|len| len <= error::MAX_FILE);
    if fits
        && start.starts_with(b"PERFILE2")
        && let Some(trace) = perf::parse_file(path, &file, watch)?
    {
        return Ok(trace);
    }
    let mut file = file;
    // The walk over the file has moved its position.
    let at = file.seek(io::SeekFrom::Start(start.len() as u64));
    if fits {
        at.map_err(|error| Error::io(path, &error))?;
    }
    parse(path, &error::load_from(path, start.chain(file))?)
}

/// Reads a recording from `bytes`, which came from `path` (used in errors only).
///
/// # Errors
/// The bytes are neither a `perf.data` file nor a compact recording, or are truncated or corrupted.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Trace, Error> {
    if bytes.starts_with(compact::MAGIC) {
        compact::parse(path, bytes)
    } else if is_perf(bytes) {
        perf::parse(path, bytes)
    } else {
        let what = match bytes {
            [] => "the file is empty".to_owned(),
            _ if lackey::recognise(&bytes[..bytes.len().min(START as usize)]) => {
                "a trace of addresses (valgrind's lackey), which has no faults and calls".to_owned()
            }
            _ => format!(
                "neither a perf.data file (PERFILE2), nor a recording (FLTRACE), nor a trace of addresses (lines such as \"I  00401000,3\", \
                 of valgrind's lackey); {}",
                start(bytes)
            ),
        };
        Err(Error::at(path, 0, what))
    }
}

/// Returns whether `start` begins a recording of either kind.
fn is_recording(start: &[u8]) -> bool {
    start.starts_with(compact::MAGIC) || is_perf(start)
}

/// Returns whether `start` begins a file of perf.
fn is_perf(start: &[u8]) -> bool {
    [b"PERFILE2", b"2ELIFREP", b"PERFFILE"].iter().any(|magic| start.starts_with(*magic))
}

/// Describes the start of a file for messages: as text if it is text.
fn start(bytes: &[u8]) -> String {
    let start = &bytes[..bytes.len().min(16)];
    let text = str::from_utf8(start).ok().filter(|text| !text.contains(unprintable));
    match text {
        Some(text) => format!("the file begins with the text {text:?}"),
        None => format!("the file begins with the bytes {start:02x?}"),
    }
}

fn unprintable(char: char) -> bool {
    char.is_control() && !char.is_ascii_whitespace()
}
