//! The library that populates a program's large blocks (`crates/preload`), as a file for `LD_PRELOAD`.

use crate::error::CliError;
use std::ffi::OsString;
use std::io::Write;
use tempfile::NamedTempFile;

include!(concat!(env!("OUT_DIR"), "/preload.rs"));

/// The library in a file, which is removed when this is dropped.
#[derive(Debug)]
pub struct Preload(NamedTempFile);

impl Preload {
    /// Writes the file.
    ///
    /// # Errors
    /// It could not be built with this command, or the file cannot be written.
    pub fn new() -> Result<Self, CliError> {
        let doing = "the library to preload";
        let bytes = LIBRARY.map_err(|why| CliError::failed(doing, why))?;
        let failed = |error| CliError::failed(doing, error);
        let mut file = tempfile::Builder::new().suffix(".so").tempfile().map_err(failed)?;
        file.write_all(bytes).map_err(failed)?;
        Ok(Self(file))
    }

    /// What populates a program's blocks of `bytes` and more; what is preloaded already stays.
    pub fn environment(&self, bytes: u64) -> [(&'static str, OsString); 2] {
        let mut libraries = self.0.path().as_os_str().to_owned();
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            libraries.push(":");
            libraries.push(others);
        }
        [("LD_PRELOAD", libraries), ("FAULTLESS_POPULATE", bytes.to_string().into())]
    }
}
