//! The preloaded library (`crates/preload`), as a file for `LD_PRELOAD`, and the variables that
//! request its operations.

use crate::error::Error;
use memchr::memmem;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use tempfile::NamedTempFile;

include!(concat!(env!("OUT_DIR"), "/preload.rs"));

/// The variable with the size in bytes from which the library populates mappings.
pub const BYTES: &str = "FAULTLESS_POPULATE";
/// The variable with the size in bytes from which the library populates mappings of files.
pub const FILES: &str = "FAULTLESS_POPULATE_FILES";
/// The start of the version in each file of the library. The version ends with a zero byte.
const VERSION: &[u8] = b"faultless-preload ";
/// The variable with the bytes by which the library populates blocks ahead of their use.
pub const AHEAD: &str = "FAULTLESS_PREFAULT_AHEAD";
/// The variable that requests huge pages for text.
pub const TEXT: &str = "FAULTLESS_HUGE_TEXT";
/// The variable with the path of a report, or with the identifier of a process that prints refused
/// operations on standard error, at its start and at its end.
pub const REPORT: &str = "FAULTLESS_REPORT";
/// The variables that request operations.
pub const VARIABLES: [&str; 4] = [BYTES, AHEAD, FILES, TEXT];
/// The variable with the libraries to preload.
pub const LIBRARIES: &str = "LD_PRELOAD";
/// The use of the library, for messages.
const PURPOSE: &str = "the library to preload";

/// The library in a file, which is removed when this is dropped.
#[derive(Debug)]
pub struct Preload(NamedTempFile);

impl Preload {
    /// Writes the file.
    ///
    /// # Errors
    /// The library could not be built with this command, or the file cannot be written.
    pub fn new() -> Result<Self, Error> {
        let failed = |error| Error::host(PURPOSE, error);
        let mut file = tempfile::Builder::new().suffix(".so").tempfile().map_err(failed)?;
        file.write_all(contents()?).map_err(failed)?;
        Ok(Self(file))
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Returns the contents of the library.
///
/// # Errors
/// The library could not be built with this command.
pub fn contents() -> Result<&'static [u8], Error> {
    LIBRARY.map_err(|why| Error::run(PURPOSE, why))
}

/// Returns the version in the contents of a library, or `None` if the file is another file.
pub fn version(contents: &[u8]) -> Option<&str> {
    let at = memmem::find(contents, VERSION)? + VERSION.len();
    let text = contents[at..].split(|byte| *byte == 0).next()?;
    std::str::from_utf8(text).ok()
}

/// The operations of the library, as requested for one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// The size in bytes from which blocks and mappings are populated when they are made.
    pub populate: Option<u64>,
    /// The size in bytes from which mappings of files are populated when they are made.
    pub files: Option<u64>,
    /// Large blocks are populated ahead of their use, by at most this number of bytes.
    pub ahead: Option<u64>,
    /// Text is moved to huge pages at the start, in this way.
    pub huge_text: Option<HugeText>,
}

/// The way in which the library moves text to huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugeText {
    /// Huge pages of the file, if the kernel and the file system provide them.
    Collapse,
    /// Huge pages of the file, or else a copy in anonymous memory.
    Copy,
}

impl HugeText {
    /// All ways.
    pub const ALL: [Self; 2] = [Self::Collapse, Self::Copy];

    /// Returns the word for the way in the variable, and in a file of advice.
    pub fn word(self) -> &'static str {
        match self {
            Self::Collapse => "collapse",
            Self::Copy => "copy",
        }
    }
}

impl Operations {
    /// Returns whether the process needs the library.
    pub fn any(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the variables that request the operations.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let populate = self.populate.map(|bytes| (BYTES, bytes.to_string()));
        let text = self.huge_text.map(|way| (TEXT, way.word().to_owned()));
        let ahead = self.ahead.map(|bytes| (AHEAD, bytes.to_string()));
        let files = self.files.map(|bytes| (FILES, bytes.to_string()));
        populate.into_iter().chain(ahead).chain(files).chain(text).collect()
    }

    /// Returns the environment with which the library in the file `library` serves a program.
    /// Libraries already in `LD_PRELOAD` stay.
    pub fn environment(&self, library: &Path) -> Vec<(&'static str, OsString)> {
        let mut libraries = library.as_os_str().to_owned();
        if let Some(others) = std::env::var_os(LIBRARIES).filter(|others| !others.is_empty()) {
            libraries.push(":");
            libraries.push(others);
        }
        let variables = self.variables().into_iter().map(|(name, value)| (name, value.into()));
        variables.chain([(LIBRARIES, libraries)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memmap2::MmapMut;
    use object::elf::FileHeader64;
    use object::read::elf::ElfFile;
    use object::{Endianness, Object, ObjectSection, ObjectSymbol};
    use std::process::Command;
    use std::{env, fs, hint};

    /// The tag of a needed library.
    const DT_NEEDED: u64 = 1;
    const MIB: usize = 1 << 20;

    /// Returns the resident bytes of the process, without pages of files: the program's own text
    /// becomes resident at any time.
    fn resident() -> usize {
        let statm = fs::read_to_string("/proc/self/statm").expect("Linux has it");
        let pages: Vec<usize> =
            statm.split(' ').map_while(|field| field.trim().parse().ok()).collect();
        // The second number is the resident pages, the third the resident pages of files and of
        // shared memory.
        (pages[1] - pages[2]) * 4096
    }

    fn block(bytes: usize) -> Vec<u8> {
        hint::black_box(Vec::with_capacity(bytes))
    }

    /// Returns the result of `make`, and the MiB that became resident during the call.
    fn grows<T>(make: impl FnOnce() -> T) -> (T, usize) {
        let before = resident();
        let made = make();
        (made, (resident().saturating_sub(before) + MIB / 2) / MIB)
    }

    /// The checks in a process that has the library.
    fn preloaded() {
        let (_small, grown) = grows(|| block(MIB - 8192));
        assert_eq!(grown, 0, "smaller than the populated size");
        let (_mapping, grown) = grows(|| MmapMut::map_anon(32 * MIB).expect("memory"));
        assert_eq!(grown, 32);
        let (large, grown) = grows(|| block(16 * MIB));
        assert_eq!(grown, 16);
        // From here on glibc's heap serves blocks up to this size.
        drop(large);

        // The heap grows for this block, without a new mapping.
        let (heap, grown) = grows(|| block(8 * MIB));
        assert_eq!(grown, 0, "a block of the heap");
        drop(heap);
        // Only the last part has been written.
        let mut parts: Vec<_> = (0..8).map(|_| block(MIB / 2)).collect();
        parts[7].resize(MIB / 2, 1);
        let at = parts[0].as_ptr();
        drop(parts);
        let (again, grown) = grows(|| block(4 * MIB - 65536));
        assert_eq!(again.as_ptr(), at, "malloc reuses the freed block");
        assert_eq!(grown, 0, "the last page was resident");
        let (_new, grown) = grows(|| block(40 * MIB));
        assert_eq!(grown, 40);
    }

    #[test]
    fn library_needs_no_other_library_and_no_symbol_of_one_c_library() {
        let contents = contents().expect("a built library");
        assert_eq!(version(contents), Some(env!("CARGO_PKG_VERSION")));
        let file = ElfFile::<FileHeader64<Endianness>>::parse(contents).expect("an ELF file");
        let section = file.section_by_name(".dynamic").expect("a shared object");
        let words: Vec<_> = section
            .data()
            .expect("in the file")
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")))
            .collect();
        assert!(words.len() > 8 && words.chunks_exact(2).all(|pair| pair[0] != DT_NEEDED));
        // Both C libraries have these functions. All other symbols are weak.
        let both = ["bcmp", "memcmp", "memcpy", "memmove", "memset", "strlen"];
        for symbol in file.dynamic_symbols().filter(|symbol| symbol.is_undefined()) {
            let name = symbol.name().expect("text");
            assert!(name.is_empty() || symbol.is_weak() || both.contains(&name), "{name}");
        }
    }

    #[test]
    fn preload_populates_large_blocks_unless_resident() {
        if env::var_os(BYTES).is_some() {
            return preloaded();
        }
        let preload = Preload::new().expect("a built library");
        let operations = Operations { populate: Some(MIB as u64), ..Operations::default() };
        let (_, module) = module_path!().split_once("::").expect("a first argument");
        let test = format!("{module}::preload_populates_large_blocks_unless_resident");
        let own = env::current_exe().expect("the path of this test");
        // The test runs in a thread with a separate heap, which has no other freed memory.
        let ran = Command::new(own)
            .args(["--exact", &test, "--test-threads", "2"])
            .envs(operations.environment(preload.path()))
            .output()
            .expect("a program that starts");
        let printed = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && printed.contains("1 passed"), "{printed}");
    }
}
