//! The library that populates a program's large mappings (`crates/preload`), as a file for
//! `LD_PRELOAD`.

use crate::error::Error;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use tempfile::NamedTempFile;

include!(concat!(env!("OUT_DIR"), "/preload.rs"));

/// The variable with the size in bytes from which the library populates mappings.
pub const BYTES: &str = "FAULTLESS_POPULATE";
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

/// Returns the environment with which the library in the file `library` populates a program's
/// mappings of at least `bytes`. Libraries already in `LD_PRELOAD` stay.
pub fn environment(library: &Path, bytes: u64) -> [(&'static str, OsString); 2] {
    let mut libraries = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os(LIBRARIES).filter(|others| !others.is_empty()) {
        libraries.push(":");
        libraries.push(others);
    }
    [(LIBRARIES, libraries), (BYTES, bytes.to_string().into())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use memmap2::MmapMut;
    use std::process::Command;
    use std::{env, fs, hint};

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
    fn preload_populates_large_blocks_unless_resident() {
        if env::var_os(BYTES).is_some() {
            return preloaded();
        }
        let preload = Preload::new().expect("a built library");
        let (_, module) = module_path!().split_once("::").expect("a first argument");
        let test = format!("{module}::preload_populates_large_blocks_unless_resident");
        let own = env::current_exe().expect("the path of this test");
        // The test runs in a thread with a separate heap, which has no other freed memory.
        let ran = Command::new(own)
            .args(["--exact", &test, "--test-threads", "2"])
            .envs(environment(preload.path(), MIB as u64))
            .output()
            .expect("a program that starts");
        let printed = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && printed.contains("1 passed"), "{printed}");
    }
}
