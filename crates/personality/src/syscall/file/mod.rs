//! System calls on files. The work is done in [`fs`](crate::fs).

pub mod descriptor;
pub mod lock;
pub mod meta;
pub mod names;
pub mod open;
pub mod poll;
pub mod range;
pub mod rw;
pub mod socket;
pub mod special;

use super::{Args, Errno, Result};
use crate::fs::file::Kind;
use crate::fs::walk::{Found, Links, Start, walk};
use crate::fs::{File, Inode, ProcessFiles, path};
use crate::task::{Current, current};
use core::ops::Deref;
use faultless_bare::arch::user;
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as nr;

/// As a directory descriptor: the working directory.
pub const AT_FDCWD: i32 = nr::AT_FDCWD;

/// The files of the running thread's process.
struct Files(Current);

impl Deref for Files {
    type Target = ProcessFiles;

    fn deref(&self) -> &ProcessFiles {
        self.0.process.files()
    }
}

fn files() -> Files {
    Files(current())
}

/// The file of a descriptor.
fn file(fd: u64) -> Result<Arc<File>> {
    files().get(fd as i32)
}

/// Returns the file of a descriptor that was not opened with `O_PATH`.
fn opened(fd: u64) -> Result<Arc<File>> {
    let file = file(fd)?;
    if let Kind::Path = file.kind { Err(Errno::EBADF) } else { Ok(file) }
}

/// The path at `addr` in the program's memory.
fn path(addr: u64) -> Result<Vec<u8>> {
    if faultless_bare::heap::tight() {
        return Err(Errno::ENOMEM);
    }
    user::string(addr, path::PATH_MAX)?.ok_or(Errno::ENAMETOOLONG)
}

/// Returns the start directories for `path`, relative to the directory `fd`.
fn start(fd: u64, path: &[u8]) -> Result<Start> {
    let mut start = files().start();
    if fd as i32 != AT_FDCWD && path.first() != Some(&b'/') {
        start.here = file(fd)?.inode.clone();
        if !path.is_empty() && !start.here.is_directory() {
            return Err(Errno::ENOTDIR);
        }
    }
    Ok(start)
}

/// Walks the program's path at `addr`, from the directory `fd`.
fn find(fd: u64, addr: u64, links: Links) -> Result<Found> {
    let path = path(addr)?;
    walk(&start(fd, &path)?, &path, links)
}

/// Returns the inode of the program's path at `addr`, relative to the directory `fd`; the inode of
/// `fd` itself for an empty path, if `flags` allow this.
fn find_at(fd: u64, addr: u64, flags: u64) -> Result<Arc<Inode>> {
    let flags = flags as u32;
    let path = match addr {
        // As in newer kernels, a null path is an empty path.
        0 if flags & nr::AT_EMPTY_PATH != 0 => Vec::new(),
        _ => path(addr)?,
    };
    let start = start(fd, &path)?;
    if path.is_empty() && flags & nr::AT_EMPTY_PATH != 0 {
        return Ok(start.here);
    }
    let links = if flags & nr::AT_SYMLINK_NOFOLLOW != 0 { Links::KeepLast } else { Links::Follow };
    walk(&start, &path, links)?.existing()
}

/// The inode of `path`, from the working directory.
fn find_existing(addr: u64, links: Links) -> Result<Arc<Inode>> {
    find(AT_FDCWD as u64, addr, links)?.existing()
}
