//! The interface between directories in memory and `/proc` and `/sys`, whose contents are made on
//! each read.

use super::directory::{Directory, Item};
use super::inode::{Inode, Name, Target};
use super::transfer::Transfer;
use crate::errno::Result;
use core::fmt::Debug;
use faultless_collections::{Arc, Vec};

/// A file, directory or link with contents made on each read.
pub trait Live: Debug + Send + Sync {
    /// Returns the type, as bits of a mode.
    fn kind(&self) -> u32;

    /// Checks whether root may open the file to read, or to write.
    ///
    /// # Errors
    /// `EACCES`.
    fn permit(&self, _reads: bool, _writes: bool) -> Result<()> {
        Ok(())
    }

    /// Returns whether the running process may use the directory regardless of its mode.
    fn is_always_permitted(&self) -> bool {
        false
    }

    /// Returns the process whose memory the file represents, if any.
    fn memory_of(&self) -> Option<u32> {
        None
    }

    /// Returns whether positions in the file represent addresses, which may be negative.
    fn is_by_address(&self) -> bool {
        false
    }

    /// Returns the name in the directory.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn name(&self) -> Result<Name>;

    /// Returns the parent directory; `None` for `/proc` itself, and for entries of a directory in
    /// memory.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn parent(&self) -> Result<Option<Arc<Inode>>>;

    /// Returns the permanent entries.
    fn fixed(&self) -> Option<&Directory>;

    /// Returns the target of a link.
    ///
    /// # Errors
    /// `EINVAL`: the file is no link. `ENOENT`: its process has ended. `ENOMEM`.
    fn target(&self) -> Result<Target>;

    /// Returns the inode of `name` in this directory.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`.
    fn lookup(&self, name: &[u8]) -> Result<Arc<Inode>>;

    /// Adds the entries to `items`.
    ///
    /// # Errors
    /// `ENOENT`: the process has ended. `ENOTDIR`, `ENOMEM`.
    fn list(&self, items: &mut Vec<Item>) -> Result<()>;

    /// Returns the text.
    ///
    /// # Errors
    /// `ESRCH`: the process has ended. `EINVAL`: the file has no text. `ENOMEM`.
    fn text(&self) -> Result<Vec<u8>>;

    /// Reads from `offset`, if the contents are made piece by piece instead of as a text.
    fn read(&self, to: &mut Transfer<'_>, offset: u64) -> Option<Result>;

    /// Writes to the file.
    ///
    /// # Errors
    /// `EINVAL`, `EIO`, `EFAULT`, `ESRCH`, `ERANGE`, `EPERM`, `ENOMEM`.
    fn write(&self, from: &mut Transfer<'_>) -> Result;
}
