//! Traces of addresses: every fetch, load and store of a program, as written by valgrind's tool
//! lackey.
//!
//! ```text
//! $ valgrind --tool=lackey --trace-mem=yes --log-file=ls.lackey ls
//!
//! ==20332== Lackey, an example Valgrind tool
//! I  0401ab70,3
//!  S 1fff0006e8,8
//!  L 04027b28,8
//!  M 04027b40,4
//! ```
//!
//! A line is an instruction fetch, a load, a store, or a load and a store of the same bytes
//! (modify), with the address in hexadecimal and the size in bytes. Lines of valgrind itself begin
//! with `==` or `--`. The file may be compressed with zstd.
//!
//! Such a trace has no mappings. The code is [inferred](text) from the fetched pages. A trace can
//! be [read](Addresses::accesses) line by line any number of times, and is never held in memory.

pub mod text;

use crate::error::{Error, Place};
use crate::zstd;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

/// The first bytes of a zstd frame.
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// The size of a read, in bytes.
const BUFFER: usize = 64 << 10;

/// The longest line to read, in bytes. Valgrind's own lines have less than 100 bytes, except for
/// the command.
const MAX_LINE: u64 = 64 << 10;

/// The largest access: valgrind writes at most 512, and instructions have at most 15 bytes.
const MAX_SIZE: u64 = 4096;

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An instruction is fetched.
    Fetch,
    /// A load.
    Load,
    /// A store.
    Store,
    /// A load and then a store of the same bytes.
    Modify,
}

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The kind of the access.
    pub kind: Kind,
    /// The first byte.
    pub addr: u64,
    /// Bytes, from 1 to 4096.
    pub size: u64,
}

/// The kind of a line.
enum Line {
    Access(Access),
    /// A line of valgrind, with the number of its process, if present.
    Valgrind(Option<u64>),
    /// An empty line.
    Empty,
}

impl Line {
    fn parse(line: &[u8]) -> Result<Self, &'static str> {
        let line = line.trim_ascii_end();
        if line.is_empty() {
            return Ok(Self::Empty);
        }
        if line.starts_with(b"==") || line.starts_with(b"--") {
            return Ok(Self::Valgrind(process(line)));
        }
        let form = "expected `I  ADDRESS,SIZE`, ` L ADDRESS,SIZE`, ` S ...` or ` M ...`";
        let (kind, rest) = line.split_first_chunk::<3>().ok_or(form)?;
        let kind = match kind {
            b"I  " => Kind::Fetch,
            b" L " => Kind::Load,
            b" S " => Kind::Store,
            b" M " => Kind::Modify,
            _ => return Err(form),
        };
        let comma = rest.iter().position(|&byte| byte == b',').ok_or(form)?;
        let addr = number(&rest[..comma], 16)
            .ok_or("the address is not a hexadecimal number of 64 bits")?;
        let size = number(&rest[comma + 1..], 10).filter(|size| (1..=MAX_SIZE).contains(size));
        let size = size.ok_or("the size is not a number from 1 to 4096")?;
        if addr.checked_add(size - 1).is_none() {
            return Err("the access goes beyond the last address");
        }
        Ok(Self::Access(Access { kind, addr, size }))
    }
}

/// Returns the process that wrote a line of valgrind: `==PID== text`, or `==TIME PID== text`.
fn process(line: &[u8]) -> Option<u64> {
    let (mark, rest) = line.split_at_checked(2)?;
    let end = rest.windows(2).position(|pair| pair == mark)?;
    number(rest[..end].rsplit(|byte| *byte == b' ').next()?, 10)
}

/// Parses `digits` in base `radix`.
fn number(digits: &[u8], radix: u32) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |number, &digit| {
        let digit = char::from(digit).to_digit(radix)?;
        number.checked_mul(radix.into())?.checked_add(digit.into())
    })
}

/// Returns whether a file that begins with `start` is such a trace.
pub fn recognise(start: &[u8]) -> bool {
    if !start.starts_with(ZSTD) {
        return recognise_text(start);
    }
    let mut text = Vec::new();
    // A truncated or damaged file may still have the start of a trace.
    let _ = zstd::Frames::new(start).take(start.len() as u64).read_to_end(&mut text);
    recognise_text(&text)
}

fn recognise_text(start: &[u8]) -> bool {
    let mut lines = start.split_inclusive(|&byte| byte == b'\n');
    let valgrind = |line: &&[u8]| line.starts_with(b"==") || line.starts_with(b"--");
    if lines.clone().next().is_some_and(|line| valgrind(&line)) {
        let tool = b"Lackey";
        return lines.any(|line| valgrind(&line) && line.windows(tool.len()).any(|it| it == tool));
    }
    // A file of one line may lack its end.
    lines.next().is_some_and(|line| matches!(Line::parse(line), Ok(Line::Access(_))))
}

/// A trace of addresses, which can be read repeatedly.
pub struct Addresses {
    path: PathBuf,
    bytes: Bytes,
}

enum Bytes {
    Shipped(&'static [u8]),
    File(File),
}

impl fmt::Debug for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Addresses").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Addresses {
    /// Creates a trace from `bytes`. `path` is the name in errors.
    pub fn of_bytes(path: &Path, bytes: &'static [u8]) -> Self {
        Self { path: path.to_owned(), bytes: Bytes::Shipped(bytes) }
    }

    /// Creates a trace from `file`, which must support seeking. `path` is the name in errors.
    pub fn of_file(path: &Path, file: File) -> Self {
        Self { path: path.to_owned(), bytes: Bytes::File(file) }
    }

    /// Returns all accesses, starting at the first.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn accesses(&mut self) -> Result<Reader<'_>, Error> {
        let path = self.path.as_path();
        match &mut self.bytes {
            Bytes::Shipped(bytes) => read(path, *bytes),
            Bytes::File(file) => {
                file.rewind().map_err(|error| Error::io(path, &error))?;
                read(path, BufReader::with_capacity(BUFFER, file))
            }
        }
    }
}

/// Returns the accesses in `source`, which may be compressed. `path` is the name in errors.
///
/// # Errors
/// The source cannot be read.
pub fn read<'a>(path: &'a Path, source: impl BufRead + 'a) -> Result<Reader<'a>, Error> {
    let mut source: Box<dyn BufRead + 'a> = Box::new(source);
    if source.fill_buf().map_err(|error| Error::io(path, &error))?.starts_with(ZSTD) {
        source = Box::new(BufReader::with_capacity(BUFFER, zstd::Frames::new(source)));
    }
    Ok(Reader { path, source, line: Vec::new(), number: 0, process: None })
}

/// Reads a trace line by line.
pub struct Reader<'a> {
    path: &'a Path,
    source: Box<dyn BufRead + 'a>,
    line: Vec<u8>,
    /// The line read last, from 1.
    number: u64,
    /// The process that wrote the lines of valgrind.
    process: Option<u64>,
}

impl fmt::Debug for Reader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("line", &self.number).finish_non_exhaustive()
    }
}

impl Reader<'_> {
    fn wrong(&self, reason: impl Into<String>) -> Error {
        Error::new(self.path, Place::Line(self.number), reason)
    }

    fn next_access(&mut self) -> Result<Option<Access>, Error> {
        loop {
            self.line.clear();
            self.number += 1;
            let read = (&mut self.source).take(MAX_LINE).read_until(b'\n', &mut self.line);
            match read {
                Err(error) => return Err(self.wrong(error.to_string())),
                Ok(0) => return Ok(None),
                Ok(_) if self.line.len() as u64 == MAX_LINE => {
                    return Err(self.wrong("the line is longer than 64 KiB"));
                }
                Ok(_) => {}
            }
            match Line::parse(&self.line) {
                Ok(Line::Access(access)) => return Ok(Some(access)),
                Ok(Line::Valgrind(Some(process))) => {
                    let first = *self.process.get_or_insert(process);
                    if first != process {
                        return Err(self.wrong(format!(
                            "the log mixes accesses of the processes {first} and {process}, \
                             which cannot be distinguished: write one log for each process, with \
                             --log-file=NAME.%p"
                        )));
                    }
                }
                Ok(Line::Valgrind(None) | Line::Empty) => {}
                Err(reason) => {
                    let text = String::from_utf8_lossy(&self.line[..self.line.len().min(40)]);
                    return Err(self.wrong(format!("{reason}; the line is {:?}", text.trim_end())));
                }
            }
        }
    }
}

/// Ends after the first error.
impl Iterator for Reader<'_> {
    type Item = Result<Access, Error>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.next_access().transpose();
        if let Some(Err(_)) = next {
            self.source = Box::new(&b""[..]);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = "==7== Lackey, an example Valgrind tool\n==7== \nI  0401ab70,3\n S 1fff0006e8,8\n\
                        \n--7-- a word\n L 04027b28,16\n M 04027b40,4\n==7== Executed:\n";

    fn read(bytes: &'static [u8]) -> Result<Vec<Access>, Error> {
        Addresses::of_bytes(Path::new("t"), bytes).accesses()?.collect()
    }

    fn leaked(text: impl Into<Vec<u8>>) -> &'static [u8] {
        text.into().leak()
    }

    #[test]
    fn valgrind_lines_are_no_accesses() {
        let access = |kind, addr, size| Access { kind, addr, size };
        let expected = [
            access(Kind::Fetch, 0x0401_ab70, 3),
            access(Kind::Store, 0x1f_ff00_06e8, 8),
            access(Kind::Load, 0x0402_7b28, 16),
            access(Kind::Modify, 0x0402_7b40, 4),
        ];
        assert_eq!(read(GOOD.as_bytes()).unwrap(), expected);
        let packed = leaked(zstd::pack(GOOD.as_bytes()));
        assert_eq!(read(packed).unwrap(), expected);
        // Two frames are one text, even if they split a line.
        let (head, tail) = GOOD.as_bytes().split_at(50);
        let parts = leaked([zstd::pack(head), zstd::pack(tail)].concat());
        assert_eq!(read(parts).unwrap(), expected);
        for start in [GOOD.as_bytes(), packed, parts, b"I  0,1", b" L 0,1\nwhat"] {
            assert!(recognise(start), "{start:?}");
        }
        for start in [&b""[..], b"==7== Memcheck", b"PERFILE2", b"I 0,1", b"I  0,0\n", ZSTD] {
            assert!(!recognise(start), "{start:?}");
        }
    }

    #[test]
    fn accesses_restart_from_the_first() {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, GOOD.as_bytes()).unwrap();
        let mut addresses = Addresses::of_file(Path::new("t"), file);
        for _ in 0..2 {
            assert_eq!(addresses.accesses().unwrap().count(), 4);
        }
    }

    #[test]
    fn errors_contain_the_line() {
        for (line, reason) in [
            ("I 0,1", "expected `I  ADDRESS,SIZE`"),
            (" X 0,1", "expected `I  ADDRESS,SIZE`"),
            ("I  0", "expected `I  ADDRESS,SIZE`"),
            ("I  ,1", "not a hexadecimal number"),
            ("I  +1,1", "not a hexadecimal number"),
            ("I  10000000000000000,1", "not a hexadecimal number"),
            (" L 0,0", "from 1 to 4096"),
            (" L 0,4097", "from 1 to 4096"),
            (" L 0,0x1", "from 1 to 4096"),
            (" S ffffffffffffffff,2", "beyond the last address"),
        ] {
            let error = read(leaked(format!("{GOOD}{line}\n I was never read\n"))).unwrap_err();
            assert_eq!(error.place, Place::Line(10), "{line}");
            assert!(error.reason.contains(reason), "{line}: {error}");
            assert!(error.reason.contains(line), "{line}: {error}");
        }
        let error = read(leaked(vec![b'='; 1 << 17])).unwrap_err();
        assert_eq!(
            (error.place, error.reason.as_str()),
            (Place::Line(1), "the line is longer than 64 KiB")
        );
        let packed = zstd::pack(GOOD.repeat(1000).as_bytes());
        let error = read(leaked(&packed[..packed.len() - 5])).unwrap_err();
        assert!(
            matches!(error.place, Place::Line(_)) && error.reason.contains("truncated"),
            "{error}"
        );
        let error = read(leaked([packed, b"more".to_vec()].concat())).unwrap_err();
        assert_eq!(
            (error.place, error.reason.as_str()),
            (Place::Line(9001), "no compressed data (a zstd frame) begins here")
        );
        let mut reader = Addresses::of_bytes(Path::new("t"), b"bad\nI  0,1\n");
        let mut reader = reader.accesses().unwrap();
        assert!(reader.next().is_some_and(|first| first.is_err()) && reader.next().is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            recognise(&bytes);
            let _ = read(leaked(bytes));
        }

        #[test]
        fn numbers_round_trip(addr in 0u64..u64::MAX - 4096, size in 1u64..=4096) {
            let read = read(leaked(format!(" M {addr:08x},{size}\n"))).unwrap();
            prop_assert_eq!(read, [Access { kind: Kind::Modify, addr, size }]);
        }
    }
}
