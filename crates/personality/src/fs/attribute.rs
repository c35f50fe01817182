//! The files of `/proc/sys` and `/sys`, with one value each. The files lie in directories in
//! memory; the text is made on each read.
//!
//! As on Linux, opening a read-only file for writing fails: a program that changes a setting learns
//! that the setting has no effect.

use super::directory::{Directory, Item};
use super::inode::{Body, Inode, Name, Target};
use super::live::Live;
use super::proc::Text;
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use core::fmt::{self, Write};
use faultless::try_box;
use faultless_collections::{Arc, String, Vec};
use linux_raw_sys::general as linux;

/// The source of the text of a file.
#[derive(Debug)]
pub(super) enum Shown {
    /// The file cannot be read.
    Nothing,
    /// This text.
    Fixed(String),
    /// The text written by this function.
    Made(fn(&mut Text) -> fmt::Result),
    /// The text written by this function about a memory node.
    OfNode(fn(u8, &mut Text) -> fmt::Result, u8),
}

/// Consumes the bytes of a write.
pub(super) type Store = fn(&mut Transfer<'_>) -> Result;

/// A file with one value.
#[derive(Debug)]
pub(super) struct Attribute {
    pub shown: Shown,
    /// `None`: the file is read-only.
    pub store: Option<Store>,
}

impl Attribute {
    /// Returns a read-only file with the text `text`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn fixed(text: impl fmt::Display) -> Result<Arc<Inode>> {
        let text = String::try_format(format_args!("{text}\n"))?;
        Self { shown: Shown::Fixed(text), store: None }.inode()
    }

    /// Returns the inode, without a name.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn inode(self) -> Result<Arc<Inode>> {
        let mode = match (&self.shown, &self.store) {
            (_, None) => 0o444,
            (Shown::Nothing, Some(_)) => 0o200,
            (_, Some(_)) => 0o644,
        };
        Inode::try_new(Body::Proc(try_box(self)?), mode)
    }
}

impl Live for Attribute {
    fn kind(&self) -> u32 {
        linux::S_IFREG
    }

    fn permit(&self, reads: bool, writes: bool) -> Result<()> {
        let refused =
            reads && matches!(self.shown, Shown::Nothing) || writes && self.store.is_none();
        if refused { Err(Errno::EACCES) } else { Ok(()) }
    }

    /// The directory contains the name.
    fn name(&self) -> Result<Name> {
        Ok(Name::new())
    }

    /// As above.
    fn parent(&self) -> Result<Option<Arc<Inode>>> {
        Ok(None)
    }

    fn fixed(&self) -> Option<&Directory> {
        None
    }

    fn target(&self) -> Result<Target> {
        Err(Errno::EINVAL)
    }

    fn lookup(&self, _: &[u8]) -> Result<Arc<Inode>> {
        Err(Errno::ENOTDIR)
    }

    fn list(&self, _: &mut Vec<Item>) -> Result<()> {
        Err(Errno::ENOTDIR)
    }

    fn text(&self) -> Result<Vec<u8>> {
        Text::made(|text| match &self.shown {
            Shown::Nothing => Ok(()),
            Shown::Fixed(fixed) => text.write_str(fixed),
            Shown::Made(make) => make(text),
            Shown::OfNode(make, node) => make(*node, text),
        })
    }

    fn read(&self, _: &mut Transfer<'_>, _: u64) -> Option<Result> {
        None
    }

    fn write(&self, from: &mut Transfer<'_>) -> Result {
        self.store.map_or(Err(Errno::EACCES), |store| store(from))
    }
}
