//! Errors in a recording, and their place.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The largest file to read into memory, in bytes.
pub const MAX_FILE: u64 = 4 << 30;

/// The place of an error in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The file as a whole.
    File,
    /// The byte at this offset in the file.
    Offset(u64),
    /// The byte at this offset in the decompressed body of the file.
    BodyOffset(u64),
    /// The record with this number, from zero, in order of time.
    Record(u64),
    /// The event with this number, from zero.
    Event(u64),
    /// The line with this number, from one.
    Line(u64),
}

/// A recording that cannot be read, written or interpreted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The file.
    pub file: PathBuf,
    /// The most precise known place in the file.
    pub place: Place,
    /// The description of the error.
    pub reason: String,
}

impl Error {
    /// Creates an error in `file` at `place`.
    pub fn new(file: &Path, place: Place, reason: impl Into<String>) -> Self {
        Self { file: file.to_owned(), place, reason: reason.into() }
    }

    /// Creates an error of the host about `file`.
    pub(crate) fn io(file: &Path, error: &std::io::Error) -> Self {
        Self::new(file, Place::File, error.to_string())
    }

    /// Creates an error of the temporary file with the contents of `file`.
    pub(crate) fn temporary(file: &Path, error: &std::io::Error) -> Self {
        let dir = std::env::temp_dir();
        let why = format!(
            "a copy in a temporary file in {} failed: {error}. Remedy: set TMPDIR to a directory \
             with free space",
            dir.display()
        );
        Self::new(file, Place::File, why)
    }

    /// Creates an error of the byte at `offset` of `file`.
    pub fn at(file: &Path, offset: u64, reason: impl Into<String>) -> Self {
        Self::new(file, Place::Offset(offset), reason)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file.display())?;
        match self.place {
            Place::File => {}
            Place::Offset(at) => write!(f, "offset {at:#x}: ")?,
            Place::BodyOffset(at) => write!(f, "offset {at:#x} of the decompressed body: ")?,
            Place::Record(n) => write!(f, "record {n}: ")?,
            Place::Event(n) => write!(f, "event {n}: ")?,
            Place::Line(n) => write!(f, "line {n}: ")?,
        }
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Error {}

/// Opens the file at `path`. A directory written by perf has a specific error.
pub(crate) fn open(path: &Path) -> Result<std::fs::File, Error> {
    if path.is_dir() {
        let data = path.join("data");
        let why = if path.join("data.0").exists() {
            "a directory of perf record --threads, with a file for each thread; record without \
             --threads"
                .to_owned()
        } else if data.exists() {
            format!("a directory of perf; the recording is the file {}", data.display())
        } else {
            "a directory, not a recording".to_owned()
        };
        return Err(Error::new(path, Place::File, why));
    }
    std::fs::File::open(path).map_err(|error| Error::io(path, &error))
}

/// Reads the rest of `file`, at most [`MAX_FILE`] bytes.
pub(crate) fn load_from(path: &Path, file: impl Read) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    // Uses `take` and not the length reported by the file system, because a pipe or /dev/zero has
    // no length.
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|error| Error::io(path, &error))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(Error::at(path, MAX_FILE, "the file is larger than 4 GiB"));
    }
    Ok(bytes)
}
