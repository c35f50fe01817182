//! The interface between directories in memory and `/proc` and `/sys`, whose contents are made when they are read.

use super::directory::{Directory, Item};
use super::inode::{Inode, Name, Target};
use super::transfer::Transfer;
use crate::errno::Result;
use core::fmt::Debug;
use faultless_collections::{Arc, Vec};

/// A file, directory or link whose contents are made when they are read.
pub trait Live: Debug + Send + Sync {
    /// Its type, as bits of a mode.
    fn kind(&self) -> u32;

    /// Whether root may open it to read, or to write.
    ///
    /// # Errors
    /// `EACCES`.
    fn permit(&self, _reads: bool, _writes: bool) -> Result<()> {
        Ok(())
    }

    /// The process whose memory it is, if it is one's.
    fn memory_of(&self) -> Option<u32> {
        None
    }

    /// Its name in its directory.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn name(&self) -> Result<Name>;

    /// Its parent directory; none for `/proc` itself, and for what a directory in memory has.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn parent(&self) -> Result<Option<Arc<Inode>>>;

    /// Its permanent entries.
    fn fixed(&self) -> Option<&Directory>;

    /// Its target, if it is a link.
    ///
    /// # Errors
    /// `EINVAL`: it is no link. `ENOENT`: its process has ended. `ENOMEM`.
    fn target(&self) -> Result<Target>;

    /// The inode of `name` in it.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`.
    fn lookup(&self, name: &[u8]) -> Result<Arc<Inode>>;

    /// Adds its entries to `items`.
    ///
    /// # Errors
    /// `ENOENT`: its process has ended. `ENOTDIR`, `ENOMEM`.
    fn list(&self, items: &mut Vec<Item>) -> Result<()>;

    /// Its text.
    ///
    /// # Errors
    /// `ESRCH`: its process has ended. `EINVAL`: it has no text. `ENOMEM`.
    fn text(&self) -> Result<Vec<u8>>;

    /// Reads from `offset`, if it is not a text but made piece by piece.
    fn read(&self, to: &mut Transfer<'_>, offset: u64) -> Option<Result>;

    /// Writes to it.
    ///
    /// # Errors
    /// `EINVAL`, `EIO`, `EFAULT`, `ESRCH`, `ERANGE`, `EPERM`, `ENOMEM`.
    fn write(&self, from: &mut Transfer<'_>) -> Result;
}
