//! The recordings that come with this crate: real programs, recorded on stock Linux.
//!
//! `recordings/README.md` says what each is and how it was made, and `recordings/make.sh` makes them
//! again.

use crate::compact;
use crate::error::Error;
use crate::event::Trace;
use crate::lackey::Addresses;
use std::path::Path;

/// A recording that comes with this crate.
#[derive(Clone, Copy, Debug)]
pub struct Recording {
    /// Its name, as in `replay:NAME`.
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

/// All of them, by name.
pub fn all() -> &'static [Recording] {
    &ALL
}

/// The traces of addresses, by name.
static ADDRESSES: [(&str, &[u8]); 2] = [
    ("cc1-addresses", include_bytes!("../recordings/cc1-addresses.lackey.zst")),
    ("ls-addresses", include_bytes!("../recordings/ls-addresses.lackey.zst")),
];

/// The trace of addresses called `name`.
pub fn addresses(name: &str) -> Option<Addresses> {
    let (name, bytes) = ADDRESSES.iter().find(|(known, _)| *known == name)?;
    Some(Addresses::of_bytes(Path::new(name), bytes))
}

/// The names of all that there is, recordings and traces of addresses.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|recording| recording.name).chain(ADDRESSES.iter().map(|(name, _)| *name))
}

/// The recording called `name`.
pub fn find(name: &str) -> Option<&'static Recording> {
    ALL.iter().find(|recording| recording.name == name)
}

impl Recording {
    /// Decodes it.
    ///
    /// # Errors
    /// None as shipped; the tests read each.
    pub fn trace(&self) -> Result<Trace, Error> {
        compact::parse(Path::new(self.name), self.bytes)
    }
}
