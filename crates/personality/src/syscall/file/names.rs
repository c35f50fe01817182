//! System calls that change and list names, and the process's directories.

use super::{AT_FDCWD, Args, Errno, Result, file, files, find_existing, path, start};
use crate::fs::Inode;
use crate::fs::device::Device;
use crate::fs::directory::{self, End, Item, Move, listed_type};
use crate::fs::file::Kind;
use crate::fs::inode::{Body, Target};
use crate::fs::pipe::{self, Pipe};
use crate::fs::walk::{Found, Links, walk};
use crate::syscall::args::{Entry, calls};
use crate::task::ids::{self, EXECUTE, WRITE, file_privileged, privileged};
use faultless_bare::arch::user;
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_mkdir, mkdir),
    (nr::__NR_mkdirat, mkdirat),
    (nr::__NR_mknod, mknod),
    (nr::__NR_mknodat, mknodat),
    (nr::__NR_symlink, symlink),
    (nr::__NR_symlinkat, symlinkat),
    (nr::__NR_link, link),
    (nr::__NR_linkat, linkat),
    (nr::__NR_unlink, unlink),
    (nr::__NR_unlinkat, unlinkat),
    (nr::__NR_rmdir, rmdir),
    (nr::__NR_rename, rename),
    (nr::__NR_renameat, renameat),
    (nr::__NR_renameat2, renameat2),
    (nr::__NR_readlink, readlink),
    (nr::__NR_readlinkat, readlinkat),
    (nr::__NR_getcwd, getcwd),
    (nr::__NR_chdir, chdir),
    (nr::__NR_fchdir, fchdir),
    (nr::__NR_chroot, chroot),
    (nr::__NR_umask, umask),
    (nr::__NR_getdents, getdents),
    (nr::__NR_getdents64, getdents64),
    (nr::__NR_mount, mount),
    (nr::__NR_umount2, umount),
];

const HERE: u64 = AT_FDCWD as u64;

/// The place of a new name.
fn place(fd: u64, addr: u64) -> Result<Found> {
    let found = find_name(fd, &path(addr)?)?;
    if found.inode.is_some() {
        return Err(Errno::EEXIST);
    }
    found.directory.permit(WRITE | EXECUTE)?;
    Ok(found)
}

/// Walks to the last name of `path`. As on Linux, a link with this name is not followed, even
/// before a slash.
fn find_name(fd: u64, path: &[u8]) -> Result<Found> {
    let end = without_slashes(path).len();
    let kept = if end == 0 { path } else { &path[..end] };
    let found = walk(&start(fd, path)?, kept, Links::KeepLast)?;
    Ok(Found { slash: end < path.len(), ..found })
}

/// The errors for paths to remove or move that end in no name.
#[derive(Clone, Copy)]
struct Unnamed {
    /// For `.`.
    dot: Errno,
    /// For `..`.
    dot_dot: Errno,
    /// For the root.
    root: Errno,
}

impl Unnamed {
    /// The same error for all these paths.
    const fn all(errno: Errno) -> Self {
        Self { dot: errno, dot_dot: errno, root: errno }
    }
}

/// The name to remove or to move.
fn named(fd: u64, addr: u64, unnamed: Unnamed) -> Result<Found> {
    let path = path(addr)?;
    let name = crate::fs::file_name(without_slashes(&path));
    let found = find_name(fd, &path)?;
    match (name, &*found.name) {
        (b".", _) => Err(unnamed.dot),
        (b"..", _) => Err(unnamed.dot_dot),
        (_, b"") => Err(unnamed.root),
        _ => Ok(found),
    }
}

/// Checks that the caller may remove `inode` from `directory`. In a sticky directory, the caller
/// must own the directory or the inode.
fn may_remove(directory: &Inode, inode: &Inode) -> Result<()> {
    directory.permit(WRITE | EXECUTE)?;
    let meta = directory.meta();
    if meta.mode & nr::S_ISVTX == 0 || ids::own(meta.uid).is_ok() {
        return Ok(());
    }
    ids::own(inode.meta().uid)
}

/// Returns `path` without the slashes at its end.
fn without_slashes(path: &[u8]) -> &[u8] {
    let len = path.iter().rposition(|&byte| byte != b'/').map_or(0, |at| at + 1);
    &path[..len]
}

/// `mkdir(path, mode)`.
pub fn mkdir(args: Args<'_>) -> Result {
    make_directory(HERE, args.a(), args.b())
}

/// `mkdirat(directory, path, mode)`.
pub fn mkdirat(args: Args<'_>) -> Result {
    make_directory(args.a(), args.b(), args.c())
}

fn make_directory(fd: u64, addr: u64, mode: u64) -> Result {
    let found = place(fd, addr)?;
    let mode = mode as u32 & 0o1777 & !files().umask();
    directory::make_directory(&found.directory, &found.name, mode)?;
    Ok(0)
}

/// `mknod(path, mode, device)`.
pub fn mknod(args: Args<'_>) -> Result {
    make_node(HERE, args.a(), args.b() as u32, args.c())
}

/// `mknodat(directory, path, mode, device)`.
pub fn mknodat(args: Args<'_>) -> Result {
    make_node(args.a(), args.b(), args.c() as u32, args.d())
}

fn make_node(fd: u64, addr: u64, mode: u32, device: u64) -> Result {
    let permissions = mode & 0o7777 & !files().umask();
    let body = match mode & nr::S_IFMT {
        nr::S_IFREG | 0 => None,
        nr::S_IFIFO => Some(Body::Pipe(Pipe::try_new(pipe::Kind::Named)?)),
        nr::S_IFCHR => {
            file_privileged()?;
            let (major, minor) = ((device >> 8) as u32 & 0xfff, device as u32 & 0xff);
            Some(Body::Device(Device::numbered(major, minor).ok_or(Errno::EPERM)?))
        }
        nr::S_IFDIR => return Err(Errno::EPERM),
        nr::S_IFBLK | nr::S_IFSOCK => return Err(Errno::EOPNOTSUPP),
        _ => return Err(Errno::EINVAL),
    };
    let found = place(fd, addr)?;
    if found.slash {
        return Err(Errno::ENOENT);
    }
    let inode = match body {
        Some(body) => Inode::try_new(body, permissions)?,
        None => Inode::try_new_regular(permissions)?,
    };
    inode.inherit_group(&found.directory);
    directory::link(&found.directory, &found.name, &inode)?;
    Ok(0)
}

/// `symlink(target, path)`.
pub fn symlink(args: Args<'_>) -> Result {
    make_link(args.a(), HERE, args.b())
}

/// `symlinkat(target, directory, path)`.
pub fn symlinkat(args: Args<'_>) -> Result {
    make_link(args.a(), args.b(), args.c())
}

fn make_link(target: u64, fd: u64, addr: u64) -> Result {
    let target = path(target)?;
    if target.is_empty() {
        return Err(Errno::ENOENT);
    }
    let found = place(fd, addr)?;
    if found.slash {
        return Err(Errno::ENOENT);
    }
    let inode = Inode::try_new(Body::Link(target), 0o777)?;
    inode.inherit_group(&found.directory);
    directory::link(&found.directory, &found.name, &inode)?;
    Ok(0)
}

/// `link(old, new)`.
pub fn link(args: Args<'_>) -> Result {
    link_at((HERE, args.a()), (HERE, args.b()), 0)
}

/// `linkat(old_directory, old, new_directory, new, flags)`.
pub fn linkat(args: Args<'_>) -> Result {
    link_at((args.a(), args.b()), (args.c(), args.d()), args.e() as u32)
}

fn link_at(old: (u64, u64), new: (u64, u64), flags: u32) -> Result {
    if flags & !(nr::AT_SYMLINK_FOLLOW | nr::AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let given = path(old.1)?;
    let inode = if given.is_empty() && flags & nr::AT_EMPTY_PATH != 0 {
        file(old.0)?.inode.clone()
    } else {
        let follow = flags & nr::AT_SYMLINK_FOLLOW != 0;
        let links = if follow { Links::Follow } else { Links::KeepLast };
        walk(&start(old.0, &given)?, &given, links)?.existing()?
    };
    let found = place(new.0, new.1)?;
    if found.slash {
        return Err(Errno::ENOENT);
    }
    directory::link_again(&found.directory, &found.name, &inode)?;
    Ok(0)
}

/// `unlink(path)`.
pub fn unlink(args: Args<'_>) -> Result {
    remove(HERE, args.a())
}

/// `rmdir(path)`.
pub fn rmdir(args: Args<'_>) -> Result {
    remove_directory(HERE, args.a())
}

/// `unlinkat(directory, path, flags)`.
pub fn unlinkat(args: Args<'_>) -> Result {
    match args.c() as u32 {
        0 => remove(args.a(), args.b()),
        nr::AT_REMOVEDIR => remove_directory(args.a(), args.b()),
        _ => Err(Errno::EINVAL),
    }
}

fn remove(fd: u64, addr: u64) -> Result {
    let found = named(fd, addr, Unnamed::all(Errno::EISDIR))?;
    let permit = |inode: &Inode| may_remove(&found.directory, inode);
    directory::unlink(&found.directory, &found.name, found.slash, permit)?;
    Ok(0)
}

fn remove_directory(fd: u64, addr: u64) -> Result {
    let unnamed = Unnamed { dot: Errno::EINVAL, dot_dot: Errno::ENOTEMPTY, root: Errno::EBUSY };
    let found = named(fd, addr, unnamed)?;
    let permit = |inode: &Inode| may_remove(&found.directory, inode);
    directory::remove_directory(&found.directory, &found.name, permit)?;
    Ok(0)
}

/// `rename(old, new)`.
pub fn rename(args: Args<'_>) -> Result {
    rename_at((HERE, args.a()), (HERE, args.b()), 0)
}

/// `renameat(old_directory, old, new_directory, new)`.
pub fn renameat(args: Args<'_>) -> Result {
    rename_at((args.a(), args.b()), (args.c(), args.d()), 0)
}

/// `renameat2(old_directory, old, new_directory, new, flags)`.
pub fn renameat2(args: Args<'_>) -> Result {
    rename_at((args.a(), args.b()), (args.c(), args.d()), args.e() as u32)
}

fn rename_at(old: (u64, u64), new: (u64, u64), flags: u32) -> Result {
    let how = match flags {
        0 => Move::Replace,
        nr::RENAME_NOREPLACE => Move::Keep,
        nr::RENAME_EXCHANGE => Move::Exchange,
        _ => return Err(Errno::EINVAL),
    };
    let exists = if how == Move::Keep { Errno::EEXIST } else { Errno::EBUSY };
    let from = named(old.0, old.1, Unnamed::all(Errno::EBUSY))?;
    let to = named(new.0, new.1, Unnamed::all(exists))?;
    if from.inode.is_none() {
        return Err(Errno::ENOENT);
    }
    let permit = |inode: &Inode, other: Option<&Inode>| {
        may_remove(&from.directory, inode)?;
        match other {
            Some(other) => may_remove(&to.directory, other),
            None => to.directory.permit(WRITE | EXECUTE),
        }
    };
    let [from_end, to_end] = [&from, &to].map(|found| End {
        directory: &found.directory,
        name: &found.name,
        slash: found.slash,
    });
    directory::rename(from_end, to_end, how, permit)?;
    Ok(0)
}

/// `readlink(path, buffer, length)`.
pub fn readlink(args: Args<'_>) -> Result {
    let inode = find_existing(args.a(), Links::KeepLast)?;
    tell_target(&inode, args.b(), args.c())
}

/// `readlinkat(directory, path, buffer, length)`.
pub fn readlinkat(args: Args<'_>) -> Result {
    if args.d() as i32 <= 0 {
        return Err(Errno::EINVAL);
    }
    let given = path(args.b())?;
    if given.is_empty() {
        let inode = super::start(args.a(), &given)?.here;
        return if inode.is_link() {
            tell_target(&inode, args.c(), args.d())
        } else {
            Err(Errno::ENOENT)
        };
    }
    let inode = walk(&start(args.a(), &given)?, &given, Links::KeepLast)?.existing()?;
    tell_target(&inode, args.c(), args.d())
}

fn tell_target(inode: &Inode, buffer: u64, len: u64) -> Result {
    if len as i32 <= 0 {
        return Err(Errno::EINVAL);
    }
    let target = match inode.target()? {
        Target::Path(path) => path,
        Target::Inode(inode) => Inode::path(&inode)?,
    };
    let told = target.len().min(len as usize);
    user::write_bytes(buffer, &target[..told])?;
    Ok(told as u64)
}

/// `getcwd(buffer, length)`.
pub fn getcwd(args: Args<'_>) -> Result {
    let start = files().start();
    let mut here = Inode::path(&start.here)?;
    let root = Inode::path(&start.root)?;
    // Relative to the process's root.
    if *root != *b"/" {
        let mut seen = Vec::new();
        match here.strip_prefix(root.as_slice()) {
            Some(b"") => seen.try_push(b'/')?,
            Some(inside) => seen.try_extend_from_slice(inside)?,
            None => {
                seen.try_extend_from_slice(b"(unreachable)")?;
                seen.try_extend_from_slice(&here)?;
            }
        }
        here = seen;
    }
    if here.ends_with(b" (deleted)") && Inode::parent(&start.here).is_err() {
        return Err(Errno::ENOENT);
    }
    here.try_push(0)?;
    if here.len() as u64 > args.b() {
        return Err(Errno::ERANGE);
    }
    user::write_bytes(args.a(), &here)?;
    Ok(here.len() as u64)
}

fn directory(inode: Arc<Inode>) -> Result<Arc<Inode>> {
    if inode.is_directory() { Ok(inode) } else { Err(Errno::ENOTDIR) }
}

/// `chdir(path)`.
pub fn chdir(args: Args<'_>) -> Result {
    let here = directory(find_existing(args.a(), Links::Follow)?)?;
    here.permit(EXECUTE)?;
    files().set_start(|start| start.here = here);
    Ok(0)
}

/// `fchdir(fd)`.
pub fn fchdir(args: Args<'_>) -> Result {
    let here = directory(file(args.a())?.inode.clone())?;
    here.permit(EXECUTE)?;
    files().set_start(|start| start.here = here);
    Ok(0)
}

/// `chroot(path)`.
pub fn chroot(args: Args<'_>) -> Result {
    let root = directory(find_existing(args.a(), Links::Follow)?)?;
    root.permit(EXECUTE)?;
    privileged()?;
    files().set_start(|start| start.root = root);
    Ok(0)
}

/// `umask(mask)`.
pub fn umask(args: Args<'_>) -> Result {
    Ok(files().set_umask(args.a() as u32).into())
}

/// The position of the type in a directory entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TypeAt {
    /// Before the name.
    Name,
    /// In the entry's last byte.
    End,
}

/// Writes an entry of a directory into `into`, if it fits. Returns the length of the entry.
fn encode(at: TypeAt, item: &Item, next: u64, into: &mut [u8]) -> Option<usize> {
    // Numbers and length are 18 bytes, the type one, and the NUL of the name another.
    let len = (18 + item.name.len() + 2).next_multiple_of(8);
    let into = into.get_mut(..len)?;
    into.fill(0);
    into[..8].copy_from_slice(&item.number.to_ne_bytes());
    into[8..16].copy_from_slice(&next.to_ne_bytes());
    into[16..18].copy_from_slice(&(len as u16).to_ne_bytes());
    let (kind, name) = match at {
        TypeAt::Name => (18, 19),
        TypeAt::End => (len - 1, 18),
    };
    into[name..name + item.name.len()].copy_from_slice(&item.name);
    into[kind] = listed_type(item.kind);
    Some(len)
}

/// `getdents64(fd, buffer, length)`.
pub fn getdents64(args: Args<'_>) -> Result {
    list(args, TypeAt::Name)
}

/// `getdents(fd, buffer, length)`.
pub fn getdents(args: Args<'_>) -> Result {
    list(args, TypeAt::End)
}

fn list(args: Args<'_>, at: TypeAt) -> Result {
    /// Bytes per step.
    const MOST: usize = 32 << 10;
    let file = file(args.a())?;
    if !matches!(file.kind, Kind::Path) && !file.inode.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    let room = usize::try_from(args.c() as u32).unwrap_or(MOST).min(MOST);
    let mut bytes = Vec::try_filled(0, room)?;
    let (mut any, mut used) = (false, 0);
    file.list(|item, next| {
        any = true;
        let len = encode(at, item, next, &mut bytes[used..]);
        used += len.unwrap_or(0);
        len.is_some()
    })?;
    if any && used == 0 {
        return Err(Errno::EINVAL);
    }
    user::write_bytes(args.b(), &bytes[..used])?;
    Ok(used as u64)
}

/// The file systems, with their mount points. Other file systems cannot be mounted.
const MOUNTED: &[(&[u8], &[u8])] = &[
    (b"rootfs", b"/"),
    (b"proc", b"/proc"),
    (b"sysfs", b"/sys"),
    (b"devtmpfs", b"/dev"),
    (b"tmpfs", b"/dev/shm"),
    (b"tmpfs", b"/tmp"),
];

/// `mount(source, target, type, flags, data)`: existing mounts are busy, and other mounts are
/// not supported.
pub fn mount(args: Args<'_>) -> Result {
    const CHANGES: u32 = nr::MS_REMOUNT
        | nr::MS_BIND
        | nr::MS_MOVE
        | nr::MS_SHARED
        | nr::MS_PRIVATE
        | nr::MS_SLAVE
        | nr::MS_UNBINDABLE;
    let target = find_existing(args.b(), Links::Follow)?;
    privileged()?;
    if args.d() as u32 & CHANGES != 0 || args.c() == 0 {
        return Err(Errno::EINVAL);
    }
    let (kind, place) = (path(args.c())?, Inode::path(&target)?);
    let is_it = |known: &&(&[u8], &[u8])| *known.0 == *kind && *known.1 == *place;
    Err(if MOUNTED.iter().any(|known| is_it(&known)) { Errno::EBUSY } else { Errno::ENODEV })
}

/// `umount2(target, flags)`: mounts are permanent.
pub fn umount(args: Args<'_>) -> Result {
    const KNOWN: u32 = nr::MNT_FORCE | nr::MNT_DETACH | nr::MNT_EXPIRE | nr::UMOUNT_NOFOLLOW;
    let flags = args.b() as u32;
    if flags & !KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    let links = if flags & nr::UMOUNT_NOFOLLOW != 0 { Links::KeepLast } else { Links::Follow };
    let place = Inode::path(&find_existing(args.a(), links)?)?;
    privileged()?;
    let mounted = MOUNTED.iter().any(|known| *known.1 == *place);
    Err(if mounted { Errno::EBUSY } else { Errno::EINVAL })
}
