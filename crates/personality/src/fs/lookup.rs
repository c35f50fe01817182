//! Lookup of paths, as seen by the running thread's process.

use super::inode::Inode;
use super::root::root;
use super::transfer::Transfer;
use super::walk::{Links, Start, walk};
use crate::errno::{Errno, Result};
use crate::task::current;
use crate::task::ids::EXECUTE;
use crate::task::thread::try_current;
use faultless_collections::{Arc, String, Vec};
use linux_raw_sys::general as linux;

/// Returns the start directories for paths of the running thread's process; the root if no process
/// runs yet.
fn start() -> Start {
    match try_current() {
        Some(thread) => thread.process.files().start(),
        None => Start { root: root().clone(), here: root().clone() },
    }
}

/// Returns the program at `path`, as seen by the running thread's process.
///
/// # Errors
/// `EACCES`: the file is not regular, or not executable. The errors of [`walk`](fn@walk).
pub fn program(path: &[u8]) -> Result<Arc<Inode>> {
    let inode = walk(&start(), path, Links::Follow)?.existing()?;
    if inode.regular().is_none() || !inode.is_executable() {
        return Err(Errno::EACCES);
    }
    inode.permit(EXECUTE)?;
    Ok(inode)
}

/// Returns all bytes of a regular file.
///
/// # Errors
/// `EINVAL`: the file is not regular; `ENOMEM`; `EIO`; the errors of [`walk`](fn@walk).
pub fn read_all(path: &[u8]) -> Result<Vec<u8>> {
    let inode = walk(&start(), path, Links::Follow)?.existing()?;
    let regular = inode.regular().ok_or(Errno::EINVAL)?;
    let len = usize::try_from(regular.length()).map_err(|_| Errno::ENOMEM)?;
    let mut bytes = Vec::try_filled(0, len)?;
    regular.fetch(0, len as u64, None)?;
    Transfer::to_kernel(&mut bytes, |to| regular.read(to, 0, u64::MAX))?;
    Ok(bytes)
}

/// Returns a path equivalent to `path` relative to the directory `fd`, for the `…at` calls.
///
/// # Errors
/// `EBADF`; `ENOENT`: the path is empty, without `AT_EMPTY_PATH`.
pub fn path_at(fd: i32, path: Vec<u8>, flags: u32) -> Result<Vec<u8>> {
    if path.first() == Some(&b'/') || fd == linux::AT_FDCWD {
        return Ok(path);
    }
    if path.is_empty() && flags & linux::AT_EMPTY_PATH == 0 {
        return Err(Errno::ENOENT);
    }
    current().process.files().get(fd)?;
    let mut from_directory = String::try_format(format_args!("/proc/self/fd/{fd}"))?.into_bytes();
    if !path.is_empty() {
        from_directory.try_push(b'/')?;
        from_directory.try_extend_from_slice(&path)?;
    }
    Ok(from_directory)
}
