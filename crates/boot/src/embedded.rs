//! What was built together with this crate: the kernel and the guest programs.

use crate::error::BootError;

include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// The kernel's image.
pub(crate) fn kernel() -> Result<&'static [u8], BootError> {
    KERNEL.map_err(|why| BootError::NotBuilt { what: "the kernel".into(), why })
}

/// A static Linux program that comes along.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    /// Its name.
    pub name: &'static str,
    /// The file.
    pub bytes: &'static [u8],
}

/// All programs that come along, or why there are none.
pub fn guests() -> Result<impl Iterator<Item = Guest>, BootError> {
    let programs =
        GUESTS.map_err(|why| BootError::NotBuilt { what: "the guest programs".into(), why })?;
    Ok(programs.iter().map(|&(name, bytes)| Guest { name, bytes }))
}

/// The program of this name that comes along.
pub fn guest(name: &str) -> Result<Guest, BootError> {
    let found = guests()?.find(|guest| guest.name == name);
    found.ok_or_else(|| BootError::NotBuilt {
        what: format!("the guest program {name:?}"),
        why: "no source has that name",
    })
}
