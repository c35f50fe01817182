//! What a path leads to, as the running thread's process sees it.

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

/// Where paths of the running thread's process start; the root before there is one.
fn start() -> Start {
    match try_current() {
        Some(thread) => thread.process.files().start(),
        None => Start { root: root().clone(), here: root().clone() },
    }
}

/// The program at `path`, as the running thread's process sees it.
///
/// # Errors
/// `EACCES`: it is no regular file, or not executable. Those of [`walk`](fn@walk).
pub fn program(path: &[u8]) -> Result<Arc<Inode>> {
    let inode = walk(&start(), path, Links::Follow)?.existing()?;
    if inode.regular().is_none() || !inode.is_executable() {
        return Err(Errno::EACCES);
    }
    inode.permit(EXECUTE)?;
    Ok(inode)
}

/// All bytes of a regular file.
///
/// # Errors
/// `EINVAL`: it is no regular file; `ENOMEM`; `EIO`; those of [`walk`](fn@walk).
pub fn read_all(path: &[u8]) -> Result<Vec<u8>> {
    let inode = walk(&start(), path, Links::Follow)?.existing()?;
    let regular = inode.regular().ok_or(Errno::EINVAL)?;
    let len = usize::try_from(regular.length()).map_err(|_| Errno::ENOMEM)?;
    let mut bytes = Vec::try_filled(0, len)?;
    regular.fetch(0, len as u64, None)?;
    Transfer::to_kernel(&mut bytes, |to| regular.read(to, 0, u64::MAX))?;
    Ok(bytes)
}

/// A path that leads where `path` leads from the directory `fd`, for the `…at` calls.
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
