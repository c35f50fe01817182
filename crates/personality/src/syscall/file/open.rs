//! System calls that open or create files.

use super::{AT_FDCWD, Args, Errno, Result, files, path, start};
use crate::fs::Inode;
use crate::fs::directory;
use crate::fs::epoll::Epoll;
use crate::fs::event::EventCounter;
use crate::fs::file::{File, Kind};
use crate::fs::inode::Body;
use crate::fs::pipe::{self, Pipe};
use crate::fs::regular::SEAL_EXEC;
use crate::fs::stream::{Stream, erase};
use crate::fs::walk::{Links, Start, walk};
use crate::syscall::args::{Entry, calls};
use crate::task::ids::{self, EXECUTE, READ, WRITE};
use faultless_bare::arch::user;
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_open, open),
    (nr::__NR_openat, openat),
    (nr::__NR_creat, creat),
    (nr::__NR_openat2, openat2),
    (nr::__NR_pipe, pipe),
    (nr::__NR_pipe2, pipe2),
    (nr::__NR_eventfd, eventfd),
    (nr::__NR_eventfd2, eventfd2),
    (nr::__NR_epoll_create, epoll_create),
    (nr::__NR_epoll_create1, epoll_create1),
    (nr::__NR_memfd_create, memfd_create),
];

/// The flags of `openat2`.
const KNOWN: u32 = nr::O_ACCMODE
    | nr::O_CREAT
    | nr::O_EXCL
    | nr::O_NOCTTY
    | nr::O_TRUNC
    | nr::O_APPEND
    | nr::O_NONBLOCK
    | nr::O_DSYNC
    | nr::FASYNC
    | nr::O_DIRECT
    | nr::O_LARGEFILE
    | nr::O_DIRECTORY
    | nr::O_NOFOLLOW
    | nr::O_NOATIME
    | nr::O_CLOEXEC
    | nr::O_SYNC
    | nr::O_PATH
    | nr::O_TMPFILE;

fn open_from(start: &Start, path: &[u8], links: Links, flags: u32, mode: u32) -> Result {
    // Unknown flags are ignored, as on Linux; with O_PATH most are.
    let mut flags = flags & KNOWN;
    if flags & nr::O_PATH != 0 {
        flags &= nr::O_PATH | nr::O_DIRECTORY | nr::O_NOFOLLOW | nr::O_CLOEXEC;
    }
    const NEW_DIRECTORY: u32 = nr::O_DIRECTORY | nr::O_CREAT;
    if flags & NEW_DIRECTORY == NEW_DIRECTORY {
        return Err(Errno::EINVAL);
    }
    let mode = mode & 0o7777 & !files().umask();
    let is_new_only = flags & (nr::O_CREAT | nr::O_EXCL) == nr::O_CREAT | nr::O_EXCL;
    let links = match links {
        Links::Follow if flags & nr::O_NOFOLLOW != 0 || is_new_only => Links::KeepLast,
        links => links,
    };
    let found = walk(start, path, links)?;
    if flags & nr::O_TMPFILE == nr::O_TMPFILE {
        return open_nameless(&*found.existing()?, flags, mode);
    }
    let inode = match found.inode {
        Some(_) if is_new_only => return Err(Errno::EEXIST),
        Some(inode) if flags & nr::O_CREAT != 0 && inode.is_directory() => {
            return Err(Errno::EISDIR);
        }
        Some(inode) => {
            inode.permit(wanted(flags))?;
            if flags & (nr::O_NOATIME | nr::O_PATH) == nr::O_NOATIME {
                ids::own(inode.meta().uid)?;
            }
            inode
        }
        None if flags & nr::O_CREAT == 0 => return Err(Errno::ENOENT),
        None if found.slash => return Err(Errno::EISDIR),
        None => {
            found.directory.permit(WRITE | EXECUTE)?;
            let made = Inode::try_new_regular(mode)?;
            made.inherit_group(&found.directory);
            match directory::link(&found.directory, &found.name, &made) {
                Ok(()) => made,
                // Another thread made the file first.
                Err(Errno::EEXIST) if !is_new_only => {
                    let there = found.directory.lookup(&found.name)?;
                    there.permit(wanted(flags))?;
                    there
                }
                Err(errno) => return Err(errno),
            }
        }
    };
    if flags & nr::O_DIRECTORY != 0 && !inode.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    let file = File::open(&inode, flags)?;
    files().add(file, flags & nr::O_CLOEXEC != 0, 0)
}

/// Returns the permissions required for opening with `flags`.
const fn wanted(flags: u32) -> u32 {
    let wanted = match flags & nr::O_ACCMODE {
        _ if flags & nr::O_PATH != 0 => return 0,
        nr::O_RDONLY => READ,
        nr::O_WRONLY => WRITE,
        _ => READ | WRITE,
    };
    if flags & nr::O_TRUNC != 0 { wanted | WRITE } else { wanted }
}

fn open_nameless(directory: &Inode, flags: u32, mode: u32) -> Result {
    if !directory.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    if flags & nr::O_ACCMODE == nr::O_RDONLY {
        return Err(Errno::EINVAL);
    }
    directory.permit(WRITE | EXECUTE)?;
    let inode = Inode::try_new_regular(mode)?;
    inode.inherit_group(directory);
    inode.change(|meta| meta.links = 0);
    inode.call(Vec::try_from_slice(b"tmp/#nameless")?, true);
    let flags = flags & !nr::O_TMPFILE;
    let file = File::open(&inode, flags & !nr::O_CREAT)?;
    files().add(file, flags & nr::O_CLOEXEC != 0, 0)
}

/// `open(path, flags, mode)`.
pub fn open(args: Args<'_>) -> Result {
    open_at(AT_FDCWD as u64, args.a(), args.b() as u32, args.c() as u32)
}

/// `openat(directory, path, flags, mode)`.
pub fn openat(args: Args<'_>) -> Result {
    open_at(args.a(), args.b(), args.c() as u32, args.d() as u32)
}

/// `creat(path, mode)`.
pub fn creat(args: Args<'_>) -> Result {
    let flags = nr::O_CREAT | nr::O_WRONLY | nr::O_TRUNC;
    open_at(AT_FDCWD as u64, args.a(), flags, args.b() as u32)
}

fn open_at(fd: u64, addr: u64, flags: u32, mode: u32) -> Result {
    let path = path(addr)?;
    open_from(&start(fd, &path)?, &path, Links::Follow, flags, mode)
}

/// `openat2(directory, path, how, size)`.
pub fn openat2(args: Args<'_>) -> Result {
    /// `RESOLVE_…` flags without an effect, as there is one file system without automounts.
    const HARMLESS: u64 = 1 | 2;
    const NO_SYMLINKS: u64 = 4;
    const IN_ROOT: u64 = 16;
    if args.d() < 24 {
        return Err(Errno::EINVAL);
    }
    let [flags, mode, resolve]: [u64; 3] = user::read(args.c())?;
    let flags = u32::try_from(flags).ok().filter(|flags| flags & !KNOWN == 0);
    let flags = flags.ok_or(Errno::EINVAL)?;
    let makes = flags & nr::O_CREAT != 0 || flags & nr::O_TMPFILE == nr::O_TMPFILE;
    if resolve & !(HARMLESS | NO_SYMLINKS | IN_ROOT) != 0
        || mode & !0o7777 != 0
        || !makes && mode != 0
    {
        return Err(Errno::EINVAL);
    }
    let path = path(args.b())?;
    let mut start = start(args.a(), path.strip_prefix(b"/").unwrap_or(&path))?;
    if resolve & IN_ROOT != 0 {
        start.root = start.here.clone();
    }
    let links = if resolve & NO_SYMLINKS != 0 { Links::Refuse } else { Links::Follow };
    open_from(&start, &path, links, flags, mode as u32)
}

/// Makes a descriptor of an anonymous inode.
pub(super) fn add(body: Body, stream: Arc<impl Stream>, flags: u32) -> Result {
    let inode = Inode::try_new(body, 0o600)?;
    let file = File::try_new(inode, Kind::Stream(erase(stream)), flags & !nr::O_CLOEXEC)?;
    files().add(file, flags & nr::O_CLOEXEC != 0, 0)
}

/// Makes descriptors of two files, and stores their numbers at `addr` in the program's memory.
pub(super) fn add_pair(files_of: [Arc<File>; 2], close_on_exec: bool, addr: u64) -> Result {
    let [first, second] = files_of;
    let first = files().add(first, close_on_exec, 0)? as i32;
    let taken = files().add(second, close_on_exec, 0).and_then(|second| {
        let second = second as i32;
        user::write(addr, &[first, second]).map_err(|fault| {
            let _ = files().close(second);
            fault.into()
        })
    });
    match taken {
        Ok(()) => Ok(0),
        Err(errno) => {
            let _ = files().close(first);
            Err(errno)
        }
    }
}

/// `pipe(ends)`.
pub fn pipe(args: Args<'_>) -> Result {
    make_pipe(args.a(), 0)
}

/// `pipe2(ends, flags)`.
pub fn pipe2(args: Args<'_>) -> Result {
    make_pipe(args.a(), args.b() as u32)
}

fn make_pipe(addr: u64, flags: u32) -> Result {
    if flags & !(nr::O_CLOEXEC | nr::O_NONBLOCK | nr::O_DIRECT) != 0 {
        return Err(Errno::EINVAL);
    }
    let pipe = Pipe::try_new(pipe::Kind::Anonymous)?;
    let inode = Inode::try_new(Body::Pipe(pipe.clone()), 0o600)?;
    let status = flags & nr::O_NONBLOCK;
    let end = |reads: bool| -> Result<Arc<File>> {
        let access = if reads { nr::O_RDONLY } else { nr::O_WRONLY };
        let end = erase(Pipe::end(&pipe, reads, !reads)?);
        File::try_new(inode.clone(), Kind::Stream(end), access | status)
    };
    add_pair([end(true)?, end(false)?], flags & nr::O_CLOEXEC != 0, addr)
}

/// `eventfd(count)`.
pub fn eventfd(args: Args<'_>) -> Result {
    make_event(args.a(), 0)
}

/// `eventfd2(count, flags)`.
pub fn eventfd2(args: Args<'_>) -> Result {
    make_event(args.a(), args.b() as u32)
}

fn make_event(count: u64, flags: u32) -> Result {
    if flags & !(nr::EFD_SEMAPHORE | nr::EFD_CLOEXEC | nr::EFD_NONBLOCK) != 0 {
        return Err(Errno::EINVAL);
    }
    let event = EventCounter::try_new(u64::from(count as u32), flags & nr::EFD_SEMAPHORE != 0)?;
    let flags = flags & !nr::EFD_SEMAPHORE;
    add(Body::Anonymous("[eventfd]"), event, nr::O_RDWR | flags)
}

/// `epoll_create(size)`.
pub fn epoll_create(args: Args<'_>) -> Result {
    if args.a() as i32 <= 0 {
        return Err(Errno::EINVAL);
    }
    make_epoll(0)
}

/// `epoll_create1(flags)`.
pub fn epoll_create1(args: Args<'_>) -> Result {
    make_epoll(args.a() as u32)
}

fn make_epoll(flags: u32) -> Result {
    if flags & !nr::EPOLL_CLOEXEC != 0 {
        return Err(Errno::EINVAL);
    }
    add(Body::Anonymous("[eventpoll]"), Epoll::try_new()?, nr::O_RDWR | flags)
}

/// `memfd_create(name, flags)`.
pub fn memfd_create(args: Args<'_>) -> Result {
    /// `MFD_…`
    const CLOEXEC: u32 = nr::MFD_CLOEXEC;
    const SEALING: u32 = nr::MFD_ALLOW_SEALING;
    const EXEC: u32 = nr::MFD_EXEC;
    const NOEXEC: u32 = nr::MFD_NOEXEC_SEAL;
    /// The maximum length of a name.
    const LONGEST: usize = 249;
    let flags = args.b() as u32;
    if flags & !(CLOEXEC | SEALING | EXEC | NOEXEC) != 0 || flags & (EXEC | NOEXEC) == EXEC | NOEXEC
    {
        return Err(Errno::EINVAL);
    }
    let given = user::string(args.a(), LONGEST + 1)?.ok_or(Errno::EINVAL)?;
    let mut name = Vec::try_from_slice(b"memfd:")?;
    name.try_extend_from_slice(&given)?;
    let inode = Inode::try_new_regular(if flags & NOEXEC != 0 { 0o666 } else { 0o777 })?;
    inode.change(|meta| meta.links = 0);
    inode.call(name, true);
    if let Some(regular) = inode.regular()
        && flags & (SEALING | NOEXEC) != 0
    {
        regular.allow_seals();
        if flags & NOEXEC != 0 {
            regular.seal(SEAL_EXEC, || inode.is_executable())?;
        }
    }
    let file = File::try_new(inode, Kind::Regular, nr::O_RDWR | nr::O_LARGEFILE)?;
    files().add(file, flags & CLOEXEC != 0, 0)
}
