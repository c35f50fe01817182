//! The list of the initial files on the disk.
//!
//! The archive contains the names and modes of such files, but no contents. Its file `.boot/disk`
//! has a line for each file: the number of the first page on the disk, the file's length in bytes,
//! and its path in the archive.

use cpio_reader::iter_files;
use faultless::PAGE_SIZE;
use faultless_bare::report;
use faultless_collections::Map;
use faultless_disk::Extent;

/// The path of the list.
const LIST: &str = ".boot/disk";

/// The files on the disk: the first page and the length of each, by their paths.
#[derive(Debug)]
pub struct Listing<'a>(Map<&'a [u8], (u64, u64)>);

impl<'a> Listing<'a> {
    /// Reads the list in `archive`. Without a list, no file is on the disk.
    ///
    /// # Errors
    /// A malformed line, or a range beyond the disk; the problem is reported. Out of memory.
    pub fn read(archive: &'a [u8]) -> Result<Self, &'static str> {
        let mut files = Map::new();
        let list = iter_files(archive).find(|entry| entry.name() == LIST);
        let text = list.map_or(&[][..], |entry| entry.file());
        let pages = faultless_disk::pages();
        for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
            let Some((first, bytes, path)) = entry(line) else {
                report!("message {LIST} has the invalid line {:?}", line.escape_ascii());
                return Err("the list of files on the disk is damaged");
            };
            if first.checked_add(bytes.div_ceil(PAGE_SIZE)).is_none_or(|end| end > pages) {
                report!("message {} is not on the disk, of {pages} pages", path.escape_ascii());
                return Err("listed files are not on the disk");
            }
            files.try_insert(path, (first, bytes)).map_err(|_| "out of memory")?;
        }
        Ok(Self(files))
    }

    /// The contents of the file at `path`, if they are on the disk.
    ///
    /// # Errors
    /// There is no memory.
    pub fn extent(&self, path: &[u8]) -> Result<Option<Extent>, faultless::OutOfMemory> {
        self.0.get(path).map(|&(first, bytes)| Extent::try_new(first, bytes)).transpose()
    }
}

/// The first page, the length, and the path in a line.
fn entry(line: &[u8]) -> Option<(u64, u64, &[u8])> {
    let mut words = line.splitn(3, |&byte| byte == b' ');
    let mut number = || str::from_utf8(words.next()?).ok()?.parse().ok();
    let (first, bytes) = (number()?, number()?);
    Some((first, bytes, words.next()?))
}
