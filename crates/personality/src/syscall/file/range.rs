//! System calls on the contents of files, whole or in ranges.

use super::{Args, Errno, Result, file, find_existing};
use crate::fs::file::Kind;
use crate::fs::regular::Regular;
use crate::fs::size;
use crate::fs::walk::Links;
use crate::fs::{File, Inode};
use crate::syscall::args::{Entry, calls};
use crate::task::ids::WRITE;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_truncate, truncate),
    (nr::__NR_ftruncate, ftruncate),
    (nr::__NR_fallocate, fallocate),
    (nr::__NR_fsync, sync),
    (nr::__NR_fdatasync, sync),
    (nr::__NR_syncfs, sync),
    (nr::__NR_sync_file_range, sync),
    (nr::__NR_fadvise64, advise),
    (nr::__NR_readahead, readahead),
];

fn length(value: u64) -> Result<u64> {
    if value > i64::MAX as u64 { Err(Errno::EINVAL) } else { Ok(value) }
}

fn truncate_inode(inode: &Inode, length: u64) -> Result {
    let regular = inode.regular().ok_or(Errno::EINVAL)?;
    size::within_limit(|limit| regular.truncate(length, limit))?;
    inode.touch();
    Ok(0)
}

/// `truncate(path, length)`.
pub fn truncate(args: Args<'_>) -> Result {
    let length = length(args.b())?;
    let inode = find_existing(args.a(), Links::Follow)?;
    // As on Linux, the kind of file is checked before the permission.
    if inode.is_directory() {
        return Err(Errno::EISDIR);
    }
    if inode.regular().is_none() {
        return Err(Errno::EINVAL);
    }
    inode.permit(WRITE)?;
    truncate_inode(&inode, length)
}

/// `ftruncate(fd, length)`.
pub fn ftruncate(args: Args<'_>) -> Result {
    let length = length(args.b())?;
    let file = file(args.a())?;
    if let Kind::Path = file.kind {
        return Err(Errno::EBADF);
    }
    if !file.writes() || file.inode.regular().is_none() {
        return Err(Errno::EINVAL);
    }
    truncate_inode(&file.inode, length)
}

/// Returns the inode of a regular file opened for writing.
fn writable(file: &File) -> Result<&Regular> {
    if !file.writes() {
        return Err(Errno::EBADF);
    }
    match file.inode.regular() {
        Some(regular) => Ok(regular),
        None if file.seekable() => Err(Errno::ENODEV),
        None => Err(Errno::ESPIPE),
    }
}

/// `fallocate(fd, mode, offset, length)`, with the modes of Linux's tmpfs.
pub fn fallocate(args: Args<'_>) -> Result {
    const PUNCH: u32 = nr::FALLOC_FL_PUNCH_HOLE | nr::FALLOC_FL_KEEP_SIZE;
    const KEEP: u32 = nr::FALLOC_FL_KEEP_SIZE;
    let file = file(args.a())?;
    let (mode, start, len) = (args.b() as u32, args.c(), args.d());
    if start > i64::MAX as u64 || len > i64::MAX as u64 || len == 0 {
        return Err(Errno::EINVAL);
    }
    let regular = writable(&file)?;
    let end = start.checked_add(len).filter(|&end| end <= i64::MAX as u64).ok_or(Errno::EFBIG)?;
    match mode {
        0 | KEEP => size::within_limit(|limit| regular.allocate(start, end, mode == 0, limit))?,
        PUNCH => regular.punch(start, end)?,
        _ => return Err(Errno::EOPNOTSUPP),
    }
    file.inode.touch();
    Ok(0)
}

/// `fsync(fd)`, `fdatasync(fd)`, `syncfs(fd)`, `sync_file_range(fd, …)`: no work for files in
/// memory.
pub fn sync(args: Args<'_>) -> Result {
    let file = file(args.a())?;
    match file.kind {
        Kind::Path => Err(Errno::EBADF),
        Kind::Stream(_) => Err(Errno::EINVAL),
        _ => Ok(0),
    }
}

/// `fadvise64(fd, offset, length, advice)`. With `POSIX_FADV_RANDOM`, reads of this open file
/// read only the needed pages; with `POSIX_FADV_NORMAL` and `POSIX_FADV_SEQUENTIAL`, also the pages
/// predicted to be needed next. `POSIX_FADV_WILLNEED` has the effect of [`readahead`], and
/// `POSIX_FADV_DONTNEED` drops whole clean pages of files on the disk.
pub fn advise(args: Args<'_>) -> Result {
    let file = file(args.a())?;
    if let Kind::Path = file.kind {
        return Err(Errno::EBADF);
    }
    if file.stream().is_some() && !file.seekable() {
        return Err(Errno::ESPIPE);
    }
    let (offset, len, advice) = (args.b(), args.c(), args.d());
    if advice > u64::from(nr::POSIX_FADV_NOREUSE) || len > i64::MAX as u64 {
        return Err(Errno::EINVAL);
    }
    // A length of 0 is the rest of the file.
    let len = if len == 0 { u64::MAX } else { len };
    let regular = file.inode.regular();
    match (advice as u32, regular) {
        (nr::POSIX_FADV_NORMAL | nr::POSIX_FADV_SEQUENTIAL, _) => file.read_at_random(false),
        (nr::POSIX_FADV_RANDOM, _) => file.read_at_random(true),
        (nr::POSIX_FADV_WILLNEED, Some(regular)) => regular.read_ahead(offset, len),
        (nr::POSIX_FADV_DONTNEED, Some(regular)) => {
            regular.drop_clean_within(offset, len);
        }
        _ => {}
    }
    Ok(0)
}

/// `readahead(fd, offset, length)`: begins to read pages that lie on the disk.
pub fn readahead(args: Args<'_>) -> Result {
    let file = file(args.a())?;
    if !file.reads() {
        return Err(Errno::EBADF);
    }
    file.inode.regular().ok_or(Errno::EINVAL)?.read_ahead(args.b(), args.c());
    Ok(0)
}
