//! The bundled recordings: real programs, recorded on stock Linux.
//!
//! `recordings/README.md` describes each recording and its origin, and `recordings/make.sh` creates
//! the recordings again.

use crate::compact;
use crate::error::Error;
use crate::event::Trace;
use crate::lackey::Addresses;
use std::path::Path;

/// A bundled recording.
#[derive(Clone, Copy, Debug)]
pub struct Recording {
    /// The name, as in `replay:NAME`.
    pub name: &'static str,
    /// The compact form.
    pub bytes: &'static [u8],
}

macro_rules! recordings {
    ($($name:literal),*) => {
        [$(Recording {
            name: $name,
            bytes: include_bytes!(concat!("../recordings/", $name, ".fltrace")),
        }),*]
    };
}

static ALL: [Recording; 7] =
    recordings!["cargo", "gcc", "java", "javac", "python", "redis", "sort"];

/// Returns all recordings, by name.
pub fn all() -> &'static [Recording] {
    &ALL
}

/// The traces of addresses, by name.
static ADDRESSES: [(&str, &[u8]); 2] = [
    ("cc1-addresses", include_bytes!("../recordings/cc1-addresses.lackey.zst")),
    ("ls-addresses", include_bytes!("../recordings/ls-addresses.lackey.zst")),
];

/// Returns the trace of addresses called `name`.
pub fn addresses(name: &str) -> Option<Addresses> {
    let (name, bytes) = ADDRESSES.iter().find(|(known, _)| *known == name)?;
    Some(Addresses::of_bytes(Path::new(name), bytes))
}

/// Returns the names of all bundled recordings and traces of addresses.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|recording| recording.name).chain(ADDRESSES.iter().map(|(name, _)| *name))
}

/// Returns the recording called `name`.
pub fn find(name: &str) -> Option<&'static Recording> {
    ALL.iter().find(|recording| recording.name == name)
}

impl Recording {
    /// Decodes the recording.
    ///
    /// # Errors
    /// No error for the bundled files; the tests read each of them.
    pub fn trace(&self) -> Result<Trace, Error> {
        compact::parse(Path::new(self.name), self.bytes)
    }
}
