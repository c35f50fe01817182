//! Files that exist while somebody looks at them: what a directory in memory is told of them.

use super::directory::{Directory, Item};
use super::inode::{Inode, Name, Target};
use super::transfer::Transfer;
use crate::errno::Result;
use core::fmt::Debug;
use faultless_collections::{Arc, Vec};

/// A file, directory or link whose contents are asked of the kernel when somebody looks.
pub trait Live: Debug + Send + Sync {
    /// Its type, as bits of a mode.
    fn kind(&self) -> u32;

    /// Its name in its directory.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn name(&self) -> Result<Name>;

    /// The directory that holds it, unless it is the uppermost of its kind.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn parent(&self) -> Result<Option<Arc<Inode>>>;

    /// What it holds that is always there.
    fn fixed(&self) -> Option<&Directory>;

    /// Where it leads, as a link.
    ///
    /// # Errors
    /// `EINVAL`: it is none. `ENOENT`: what it is of has gone. `ENOMEM`.
    fn target(&self) -> Result<Target>;

    /// What `name` leads to in it.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`.
    fn lookup(&self, name: &[u8]) -> Result<Arc<Inode>>;

    /// Adds its entries to `items`.
    ///
    /// # Errors
    /// `ENOENT`: what it is of has gone. `ENOTDIR`, `ENOMEM`.
    fn list(&self, items: &mut Vec<Item>) -> Result<()>;

    /// Its text.
    ///
    /// # Errors
    /// `ESRCH`: what it is of has gone. `EINVAL`: it has none. `ENOMEM`.
    fn text(&self) -> Result<Vec<u8>>;

    /// Reads from `offset` on where it is no text, but made piece by piece.
    fn read(&self, to: &mut Transfer<'_>, offset: u64) -> Option<Result>;

    /// Takes what is written to it.
    ///
    /// # Errors
    /// `EINVAL`, `EFAULT`, `ESRCH`, `ERANGE`, `EPERM`, `ENOMEM`.
    fn write(&self, from: &mut Transfer<'_>) -> Result;
}
