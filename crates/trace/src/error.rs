//! What can be wrong with a recording, and where in it.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The largest file that is read into memory, in bytes.
pub const MAX_FILE: u64 = 4 << 30;

/// Where in a file something is wrong.
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

/// A recording that cannot be read, written or understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The file.
    pub file: PathBuf,
    /// Where in the file, as well as it is known.
    pub place: Place,
    /// What is wrong there.
    pub reason: String,
}

impl Error {
    /// Something wrong with `file` at `place`.
    pub fn new(file: &Path, place: Place, reason: impl Into<String>) -> Self {
        Self { file: file.to_owned(), place, reason: reason.into() }
    }

    /// What the host says of `file`.
    pub(crate) fn io(file: &Path, error: &std::io::Error) -> Self {
        Self::new(file, Place::File, error.to_string())
    }

    /// Something wrong with the byte at `offset` of `file`.
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

/// Opens the file at `path`. The error for a directory that perf wrote says so.
pub(crate) fn open(path: &Path) -> Result<std::fs::File, Error> {
    if path.is_dir() {
        let data = path.join("data");
        let why = if path.join("data.0").exists() {
            "a directory of perf record --threads, with a file for each thread; record without \
             --threads"
                .to_owned()
        } else if data.exists() {
            format!("a directory of perf; its recording is the file {}", data.display())
        } else {
            "a directory, not a recording".to_owned()
        };
        return Err(Error::new(path, Place::File, why));
    }
    std::fs::File::open(path).map_err(|error| Error::io(path, &error))
}

/// What is left of `file`, at most [`MAX_FILE`] bytes.
pub(crate) fn load_from(path: &Path, file: impl Read) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    // `take` and not the length that the file system gives: a pipe or /dev/zero has none.
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|error| Error::io(path, &error))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(Error::at(path, MAX_FILE, "the file is larger than 4 GiB"));
    }
    Ok(bytes)
}
