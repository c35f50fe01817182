//! The files of a run, created before the run and removed after it.

use crate::system::Failure;
use faultless::{PAGE_SIZE, VirtRange};
use std::fs::File;
use std::io::{Error, Write};

/// An unnamed file of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSpec {
    /// The length in bytes, in whole pages.
    pub bytes: u64,
    /// The contents.
    pub contents: Contents,
}

/// The contents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeros: a single hole.
    Zeros,
    /// Each page starts with its number in the file, a word of 8 bytes, followed by zeros. Pages
    /// are read on demand, and evicted when memory is short.
    Numbers,
    /// Code. Each page starts with its number in the file, a word of 8 bytes. Every multiple of
    /// [`FUNCTION`] after the word contains a function that returns at once.
    Code,
}

/// Bytes from one function of [`Contents::Code`] to the next: a cache line.
pub const FUNCTION: u64 = 64;

/// The number of functions in a page of code.
pub(crate) const FUNCTIONS: u64 = PAGE_SIZE / FUNCTION - 1;

/// The instruction that returns from a function, if known for this processor.
const RETURN: Option<&[u8]> = if cfg!(target_arch = "x86_64") {
    Some(&[0xc3])
} else if cfg!(target_arch = "aarch64") {
    Some(&[0xc0, 0x03, 0x5f, 0xd6])
} else {
    None
};

/// Whether [`Contents::Code`] runs on this processor. If not, its functions can be fetched, but not
/// called.
pub(crate) const RUNS: bool = RETURN.is_some();

impl FileSpec {
    /// Creates the file in the directory for temporary files.
    pub(crate) fn make(&self) -> Result<File, Failure> {
        let mut file = tempfile::tempfile().map_err(|error| self.failed("open", &error))?;
        match self.contents {
            Contents::Zeros => {
                file.set_len(self.bytes).map_err(|error| self.failed("ftruncate", &error))?;
            }
            Contents::Numbers => {
                self.write(&mut file, &[0]).map_err(|error| self.failed("write", &error))?;
            }
            Contents::Code => {
                let code = RETURN.unwrap_or(&[0]);
                self.write(&mut file, code).map_err(|error| self.failed("write", &error))?;
            }
        }
        Ok(file)
    }

    /// Writes pages that start with their numbers, followed by copies of `code`.
    fn write(&self, file: &mut File, code: &[u8]) -> Result<(), Error> {
        /// Pages per write.
        const RUN: usize = 256;
        let pages = VirtRange::new(0, self.bytes).pages();
        let mut run: Vec<u8> =
            code.iter().copied().cycle().take(RUN * PAGE_SIZE as usize).collect();
        for first in (0..pages).step_by(RUN) {
            let count = (pages - first).min(RUN as u64);
            for (page, at) in (first..first + count).zip((0..).step_by(PAGE_SIZE as usize)) {
                run[at..at + 8].copy_from_slice(&page.to_ne_bytes());
            }
            file.write_all(&run[..(count * PAGE_SIZE) as usize])?;
        }
        Ok(())
    }

    fn failed(&self, call: &'static str, error: &Error) -> Failure {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        Failure::Refused { call, addr: 0, len: self.bytes, errno }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn pages_of_code_have_their_number_and_functions() {
        let pages = 300;
        let spec = FileSpec { bytes: pages * PAGE_SIZE, contents: Contents::Code };
        let file = spec.make().expect("a small file");
        assert_eq!(file.metadata().expect("an open file").len(), spec.bytes);
        let mut page = [0; PAGE_SIZE as usize];
        for index in 0..pages {
            file.read_exact_at(&mut page, index * PAGE_SIZE).expect("a readable page");
            assert_eq!(page[..8], index.to_ne_bytes());
            for function in 1..=FUNCTIONS {
                let at = (function * FUNCTION) as usize;
                assert!(
                    RETURN.is_none_or(|code| page[at..].starts_with(code)),
                    "{index}, {function}"
                );
            }
        }
        let zeros = FileSpec { bytes: 64 << 20, contents: Contents::Zeros };
        let file = zeros.make().expect("a hole");
        assert_eq!(file.metadata().expect("an open file").len(), 64 << 20);
    }
}
