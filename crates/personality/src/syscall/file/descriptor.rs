//! System calls on descriptors.

use super::{Args, Errno, Result, file, files};
use crate::fs::File;
use crate::fs::file::Kind;
use crate::fs::inode::Body;
use crate::syscall::args::{Entry, calls};
use faultless_bare::arch::user;
use faultless_collections::Arc;
use linux_raw_sys::{general as nr, ioctl};

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_close, close),
    (nr::__NR_close_range, close_range),
    (nr::__NR_dup, dup),
    (nr::__NR_dup2, dup2),
    (nr::__NR_dup3, dup3),
    (nr::__NR_fcntl, fcntl),
    (nr::__NR_ioctl, control),
];

/// `close(fd)`.
pub fn close(args: Args<'_>) -> Result {
    files().close(args.a() as i32)?;
    Ok(0)
}

/// `close_range(first, last, flags)`.
pub fn close_range(args: Args<'_>) -> Result {
    /// `CLOSE_RANGE_UNSHARE`
    const UNSHARE: u32 = 2;
    /// `CLOSE_RANGE_CLOEXEC`
    const CLOEXEC: u32 = 4;
    let (first, last, flags) = (args.a() as u32, args.b() as u32, args.c() as u32);
    if first > last || flags & !(UNSHARE | CLOEXEC) != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & UNSHARE != 0 {
        files().unshare(true, false)?;
    }
    let mark = flags & CLOEXEC != 0;
    files().close_range(first as usize, last as usize, mark);
    Ok(0)
}

/// `dup(fd)`.
pub fn dup(args: Args<'_>) -> Result {
    files().add(file(args.a())?, false, 0)
}

/// `dup2(old, new)`.
pub fn dup2(args: Args<'_>) -> Result {
    let old = file(args.a())?;
    if args.a() as i32 == args.b() as i32 {
        return Ok(u64::from(args.b() as u32));
    }
    files().set(args.b() as i32, old, false)
}

/// `dup3(old, new, flags)`.
pub fn dup3(args: Args<'_>) -> Result {
    let flags = args.c() as u32;
    if flags & !nr::O_CLOEXEC != 0 || args.a() as i32 == args.b() as i32 {
        return Err(Errno::EINVAL);
    }
    files().set(args.b() as i32, file(args.a())?, flags & nr::O_CLOEXEC != 0)
}

/// `fcntl(fd, command, argument)`.
pub fn fcntl(args: Args<'_>) -> Result {
    let (fd, command, argument) = (args.a() as i32, args.b() as u32, args.c());
    let file = files().get(fd)?;
    if let Kind::Path = file.kind
        && !matches!(
            command,
            nr::F_DUPFD | nr::F_DUPFD_CLOEXEC | nr::F_GETFD | nr::F_SETFD | nr::F_GETFL
        )
    {
        return Err(Errno::EBADF);
    }
    match command {
        nr::F_DUPFD | nr::F_DUPFD_CLOEXEC => {
            let least = usize::try_from(argument as i32).map_err(|_| Errno::EINVAL)?;
            files().add(file, command == nr::F_DUPFD_CLOEXEC, least)
        }
        nr::F_GETFD => Ok(u64::from(files().closes_on_exec(fd)?)),
        nr::F_SETFD => {
            files().set_close_on_exec(fd, argument as u32 & nr::FD_CLOEXEC != 0)?;
            Ok(0)
        }
        nr::F_GETFL => Ok(file.flags().into()),
        nr::F_SETFL => {
            file.set_flags(argument as u32);
            Ok(0)
        }
        nr::F_GETLK
        | nr::F_SETLK
        | nr::F_SETLKW
        | nr::F_OFD_GETLK
        | nr::F_OFD_SETLK
        | nr::F_OFD_SETLKW => super::lock::range(&file, command, argument),
        nr::F_GETOWN | nr::F_GETSIG | nr::F_GETLEASE => Ok(0),
        nr::F_SETOWN | nr::F_SETSIG => Ok(0),
        nr::F_GETPIPE_SZ => Ok(pipe(&file)?.capacity() as u64),
        nr::F_SETPIPE_SZ => Ok(pipe(&file)?.set_capacity(argument as u32 as usize)? as u64),
        nr::F_ADD_SEALS => {
            if !file.writes() {
                return Err(Errno::EPERM);
            }
            let regular = file.inode.regular().ok_or(Errno::EINVAL)?;
            regular.seal(argument as u32, || file.inode.is_executable())?;
            Ok(0)
        }
        nr::F_GET_SEALS => Ok(file.inode.regular().ok_or(Errno::EINVAL)?.seals().into()),
        _ => Err(Errno::EINVAL),
    }
}

fn pipe(file: &File) -> Result<&Arc<crate::fs::pipe::Pipe>> {
    match &file.inode.body {
        Body::Pipe(pipe) => Ok(pipe),
        _ => Err(Errno::EBADF),
    }
}

/// `ioctl(fd, request, argument)`.
pub fn control(args: Args<'_>) -> Result {
    let file = file(args.a())?;
    if let Kind::Path = file.kind {
        return Err(Errno::EBADF);
    }
    match args.b() as u32 {
        ioctl::FIONREAD => {
            let count = match &file.kind {
                Kind::Stream(stream) => stream.queued()?,
                Kind::Regular => {
                    let position = file.seek(0, nr::SEEK_CUR)?;
                    file.inode.length().saturating_sub(position)
                }
                _ => return Err(Errno::ENOTTY),
            };
            user::write(args.c(), &(count.min(i32::MAX as u64) as i32))?;
            Ok(0)
        }
        ioctl::FIONBIO => {
            let on: i32 = user::read(args.c())?;
            let bit = if on != 0 { nr::O_NONBLOCK } else { 0 };
            file.set_flags(file.flags() & !nr::O_NONBLOCK | bit);
            Ok(0)
        }
        ioctl::FIOCLEX | ioctl::FIONCLEX => {
            files().set_close_on_exec(args.a() as i32, args.b() as u32 == ioctl::FIOCLEX)?;
            Ok(0)
        }
        // The console is no terminal, and other devices have no requests.
        _ => Err(Errno::ENOTTY),
    }
}
