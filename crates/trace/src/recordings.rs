//! The recordings that come with this crate: real programs, recorded on stock Linux.
//!
//! `recordings/README.md` says what each is and how it was made, and `recordings/make.sh` makes them
//! again.

use crate::compact;
use crate::error::Error;
use crate::event::Trace;
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
