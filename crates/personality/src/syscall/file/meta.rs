//! System calls on the metadata of files.

use super::{AT_FDCWD, Args, Errno, Result, file, find_at, find_existing, opened};
use crate::abi::{Abi, SECOND};
use crate::fs::Inode;
use crate::fs::inode::Body;
use crate::fs::regular::SEAL_EXEC;
use crate::fs::regular::frames_left_to_others;
use crate::fs::walk::Links;
use crate::syscall::args::{Entry, calls};
use crate::task::ids::{self, WRITE};
use crate::wall;
use faultless::PAGE_SIZE;
use faultless_bare::arch::user;
use faultless_bare::percpu;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_stat, stat),
    (nr::__NR_lstat, lstat),
    (nr::__NR_fstat, fstat),
    (nr::__NR_newfstatat, fstatat),
    (nr::__NR_statx, statx),
    (nr::__NR_access, access),
    (nr::__NR_faccessat, faccessat),
    (nr::__NR_faccessat2, faccessat2),
    (nr::__NR_chmod, chmod),
    (nr::__NR_fchmod, fchmod),
    (nr::__NR_fchmodat, fchmodat),
    (nr::__NR_fchmodat2, fchmodat2),
    (nr::__NR_chown, chown),
    (nr::__NR_lchown, lchown),
    (nr::__NR_fchown, fchown),
    (nr::__NR_fchownat, fchownat),
    (nr::__NR_utimensat, utimensat),
    (nr::__NR_utimes, utimes),
    (nr::__NR_futimesat, futimesat),
    (nr::__NR_utime, utime),
    (nr::__NR_statfs, statfs),
    (nr::__NR_fstatfs, fstatfs),
];

const HERE: u64 = AT_FDCWD as u64;
/// The device number of the file system.
const DEVICE: u64 = 1;

fn tell(inode: &Inode, addr: u64) -> Result {
    let meta = inode.meta();
    let device = match &inode.body {
        Body::Device(device) => device.number(),
        _ => 0,
    };
    let stat = nr::stat {
        st_dev: DEVICE,
        st_ino: inode.number,
        st_nlink: meta.links.into(),
        st_mode: inode.kind() | meta.mode,
        st_uid: meta.uid,
        st_gid: meta.gid,
        __pad0: 0,
        st_rdev: device,
        st_size: inode.length() as i64,
        st_blksize: PAGE_SIZE as i64,
        st_blocks: inode.blocks() as i64,
        st_atime: meta.accessed / SECOND,
        st_atime_nsec: meta.accessed % SECOND,
        st_mtime: meta.modified / SECOND,
        st_mtime_nsec: meta.modified % SECOND,
        st_ctime: meta.changed / SECOND,
        st_ctime_nsec: meta.changed % SECOND,
        __unused: [0; 3],
    };
    user::write(addr, &Abi(stat))?;
    Ok(0)
}

/// `stat(path, stat)`.
pub fn stat(args: Args<'_>) -> Result {
    tell(&*find_existing(args.a(), Links::Follow)?, args.b())
}

/// `lstat(path, stat)`.
pub fn lstat(args: Args<'_>) -> Result {
    tell(&*find_existing(args.a(), Links::KeepLast)?, args.b())
}

/// `fstat(fd, stat)`.
pub fn fstat(args: Args<'_>) -> Result {
    tell(&file(args.a())?.inode, args.b())
}

/// `newfstatat(directory, path, stat, flags)`.
pub fn fstatat(args: Args<'_>) -> Result {
    const KNOWN: u32 = nr::AT_SYMLINK_NOFOLLOW | nr::AT_NO_AUTOMOUNT | nr::AT_EMPTY_PATH;
    if args.d() as u32 & !KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    tell(&*find_at(args.a(), args.b(), args.d())?, args.c())
}

/// Linux's `statx` without the zeros at its end. Times are seconds, nanoseconds and padding.
#[derive(Clone, Copy)]
#[repr(C)]
struct Statx {
    mask: u32,
    block_size: u32,
    attributes: u64,
    links: u32,
    uid: u32,
    gid: u32,
    mode: u16,
    gap: u16,
    number: u64,
    length: u64,
    blocks: u64,
    known_attributes: u64,
    accessed: [u64; 2],
    born: [u64; 2],
    changed: [u64; 2],
    modified: [u64; 2],
    /// Major and minor number: of a device file, and of the file system.
    devices: [[u32; 2]; 2],
    mount: u64,
    rest: [u64; 13],
}

const _: () = assert!(size_of::<Statx>() == 256);

// SAFETY: integers without padding.
unsafe impl user::Plain for Statx {}

/// `statx(directory, path, flags, mask, statx)`.
pub fn statx(args: Args<'_>) -> Result {
    const KNOWN: u64 = (nr::AT_SYMLINK_NOFOLLOW | nr::AT_NO_AUTOMOUNT | nr::AT_EMPTY_PATH) as u64
        | nr::AT_STATX_SYNC_TYPE as u64;
    let (flags, mask) = (args.c() & 0xffff_ffff, args.d() as u32);
    if flags & !KNOWN != 0 || mask & nr::STATX__RESERVED != 0 {
        return Err(Errno::EINVAL);
    }
    let inode = find_at(args.a(), args.b(), flags)?;
    let meta = inode.meta();
    let device = match &inode.body {
        Body::Device(device) => device.number() as u32,
        _ => 0,
    };
    let time = |time: u64| [time / SECOND, time % SECOND];
    let statx = Statx {
        mask: nr::STATX_BASIC_STATS | nr::STATX_BTIME,
        block_size: PAGE_SIZE as u32,
        attributes: 0,
        links: meta.links,
        uid: meta.uid,
        gid: meta.gid,
        mode: (inode.kind() | meta.mode) as u16,
        gap: 0,
        number: inode.number,
        length: inode.length(),
        blocks: inode.blocks(),
        known_attributes: 0,
        accessed: time(meta.accessed),
        born: time(meta.born),
        changed: time(meta.changed),
        modified: time(meta.modified),
        devices: [[device >> 8, device & 0xff], [0, DEVICE as u32]],
        mount: 1,
        rest: [0; 13],
    };
    user::write(args.e(), &statx)?;
    Ok(0)
}

/// `access(path, mode)`.
pub fn access(args: Args<'_>) -> Result {
    check(HERE, args.a(), args.b(), 0)
}

/// `faccessat(directory, path, mode)`.
pub fn faccessat(args: Args<'_>) -> Result {
    check(args.a(), args.b(), args.c(), 0)
}

/// `faccessat2(directory, path, mode, flags)`.
pub fn faccessat2(args: Args<'_>) -> Result {
    check(args.a(), args.b(), args.c(), args.d())
}

fn check(fd: u64, addr: u64, mode: u64, flags: u64) -> Result {
    const KNOWN: u64 = (nr::AT_SYMLINK_NOFOLLOW | nr::AT_EACCESS | nr::AT_EMPTY_PATH) as u64;
    /// `R_OK | W_OK | X_OK`, and `X_OK`.
    const ALL: u64 = 7;
    const EXECUTE: u64 = 1;
    if mode & !ALL != 0 || flags & !KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    let inode = find_at(fd, addr, flags)?;
    // Root may do everything, except execute a file without any execute permission.
    if mode & EXECUTE != 0 && !inode.is_directory() && !inode.is_executable() {
        return Err(Errno::EACCES);
    }
    let real = flags & u64::from(nr::AT_EACCESS) == 0;
    inode.permit_by(if real { ids::permit_real } else { ids::permit }, mode as u32)?;
    Ok(0)
}

fn set_mode(inode: &Inode, mode: u64) -> Result {
    if inode.is_link() {
        return Err(Errno::EOPNOTSUPP);
    }
    let change = |seals: u32| {
        inode.try_change(|meta| {
            ids::own(meta.uid)?;
            let mut mode = mode as u32 & 0o7777;
            if !ids::may_set_group_id(meta.gid) {
                mode &= !nr::S_ISGID;
            }
            if seals & SEAL_EXEC != 0 && (meta.mode ^ mode) & 0o111 != 0 {
                return Err(Errno::EPERM);
            }
            meta.mode = mode;
            Ok(())
        })
    };
    match inode.regular() {
        Some(regular) => regular.with_seals(change)?,
        None => change(0)?,
    }
    Ok(0)
}

/// `chmod(path, mode)`.
pub fn chmod(args: Args<'_>) -> Result {
    set_mode(&*find_existing(args.a(), Links::Follow)?, args.b())
}

/// `fchmod(fd, mode)`.
pub fn fchmod(args: Args<'_>) -> Result {
    set_mode(&opened(args.a())?.inode, args.b())
}

/// `fchmodat(directory, path, mode)`.
pub fn fchmodat(args: Args<'_>) -> Result {
    set_mode(&*find_at(args.a(), args.b(), 0)?, args.c())
}

/// `fchmodat2(directory, path, mode, flags)`.
pub fn fchmodat2(args: Args<'_>) -> Result {
    set_mode(&*find_at(args.a(), args.b(), args.d())?, args.c())
}

fn set_owner(inode: &Inode, uid: u64, gid: u64) -> Result {
    /// Does not change the id.
    const SAME: u32 = u32::MAX;
    let (uid, gid) = (uid as u32, gid as u32);
    let is_directory = inode.is_directory();
    inode.try_change(|meta| {
        let set_ids = if is_directory { 0 } else { meta.lost_set_ids() };
        let changes = (uid, gid, set_ids) != (SAME, SAME, 0);
        if changes && !ids::is_file_root() {
            // As on Linux, an owner may only change the group, to one of the owner's groups.
            ids::own(meta.uid)?;
            let is_own = gid == SAME || gid == meta.gid || ids::in_group(gid);
            if uid != SAME && uid != meta.uid || !is_own {
                return Err(Errno::EPERM);
            }
        }
        meta.uid = if uid == SAME { meta.uid } else { uid };
        meta.gid = if gid == SAME { meta.gid } else { gid };
        meta.mode &= !set_ids;
        Ok(())
    })?;
    Ok(0)
}

/// `chown(path, uid, gid)`.
pub fn chown(args: Args<'_>) -> Result {
    set_owner(&*find_existing(args.a(), Links::Follow)?, args.b(), args.c())
}

/// `lchown(path, uid, gid)`.
pub fn lchown(args: Args<'_>) -> Result {
    set_owner(&*find_existing(args.a(), Links::KeepLast)?, args.b(), args.c())
}

/// `fchown(fd, uid, gid)`.
pub fn fchown(args: Args<'_>) -> Result {
    set_owner(&opened(args.a())?.inode, args.b(), args.c())
}

/// `fchownat(directory, path, uid, gid, flags)`.
pub fn fchownat(args: Args<'_>) -> Result {
    set_owner(&*find_at(args.a(), args.b(), args.e())?, args.c(), args.d())
}

/// Returns a time to set; `None` does not change the time.
fn time([seconds, nanoseconds]: [i64; 2]) -> Result<Option<u64>> {
    match nanoseconds as u64 {
        now if now == u64::from(nr::UTIME_NOW) => Ok(Some(wall::now())),
        omit if omit == u64::from(nr::UTIME_OMIT) => Ok(None),
        part if part < SECOND => {
            // Times before 1970 and after 2554 are clamped.
            let seconds = u64::try_from(seconds).unwrap_or(0);
            Ok(Some(seconds.saturating_mul(SECOND).saturating_add(part)))
        }
        _ => Err(Errno::EINVAL),
    }
}

fn set_times(inode: &Inode, times: Option<[[i64; 2]; 2]>) -> Result {
    let are_now =
        |times: [[i64; 2]; 2]| times.iter().all(|time| time[1] as u64 == u64::from(nr::UTIME_NOW));
    let [accessed, modified] = match times {
        Some([accessed, modified]) => [time(accessed)?, time(modified)?],
        None => [Some(wall::now()); 2],
    };
    inode.try_change(|meta| {
        let owner = ids::own(meta.uid);
        match times {
            _ if owner.is_ok() => {}
            Some(times) if !are_now(times) => owner?,
            // A user who may write to the file may set the present time.
            _ => ids::permit([meta.uid, meta.gid], meta.mode, WRITE)?,
        }
        meta.accessed = accessed.unwrap_or(meta.accessed);
        meta.modified = modified.unwrap_or(meta.modified);
        Ok(())
    })?;
    Ok(0)
}

/// `utimensat(directory, path, times, flags)`.
pub fn utimensat(args: Args<'_>) -> Result {
    let times: Option<[[i64; 2]; 2]> = match args.c() {
        0 => None,
        addr => Some(user::read(addr)?),
    };
    // As on Linux, the path is not read if both times stay.
    let stays = |time: &[i64; 2]| time[1] as u64 == u64::from(nr::UTIME_OMIT);
    if times.is_some_and(|times| times.iter().all(stays)) {
        return Ok(0);
    }
    // Without a path, the call applies to the descriptor.
    if args.b() == 0 && args.a() as i32 != AT_FDCWD {
        return set_times(&opened(args.a())?.inode, times);
    }
    set_times(&*find_at(args.a(), args.b(), args.d())?, times)
}

/// Times in seconds and microseconds.
fn micro(times: [[i64; 2]; 2]) -> Result<[[i64; 2]; 2]> {
    if times.iter().any(|time| !(0..1_000_000).contains(&time[1])) {
        return Err(Errno::EINVAL);
    }
    Ok(times.map(|[seconds, micro]| [seconds, micro * 1000]))
}

/// `utimes(path, times)`.
pub fn utimes(args: Args<'_>) -> Result {
    set_micro(HERE, args.a(), args.b())
}

/// `futimesat(directory, path, times)`.
pub fn futimesat(args: Args<'_>) -> Result {
    set_micro(args.a(), args.b(), args.c())
}

fn set_micro(fd: u64, path: u64, times: u64) -> Result {
    let times = match times {
        0 => None,
        addr => Some(micro(user::read(addr)?)?),
    };
    set_times(&*find_at(fd, path, 0)?, times)
}

/// `utime(path, times)`.
pub fn utime(args: Args<'_>) -> Result {
    let times = match args.b() {
        0 => None,
        addr => Some(user::read::<[i64; 2]>(addr)?.map(|seconds| [seconds, 0])),
    };
    set_times(&*find_existing(args.a(), Links::Follow)?, times)
}

fn tell_space(inode: &Inode, addr: u64) -> Result {
    /// `TMPFS_MAGIC` and `PROC_SUPER_MAGIC`
    const MEMORY: i64 = 0x0102_1994;
    const PROC: i64 = 0x9fa0;
    let vm = percpu::vm();
    // Files may not use all frames: the free blocks are the frames that a write can take.
    let (left, limit) = (frames_left_to_others(), vm.knobs().file_limit());
    let total = (vm.total_frames() - left).min(limit) as i64;
    let room = limit.saturating_sub(vm.charged_pages());
    let free = vm.free_frames().saturating_sub(left).min(room) as i64;
    let of_proc = matches!(inode.body, Body::Proc(_));
    let statfs = nr::statfs {
        f_type: if of_proc { PROC } else { MEMORY },
        f_bsize: PAGE_SIZE as i64,
        f_blocks: if of_proc { 0 } else { total },
        f_bfree: if of_proc { 0 } else { free },
        f_bavail: if of_proc { 0 } else { free },
        f_files: total,
        f_ffree: free,
        f_fsid: nr::__kernel_fsid_t { val: [0, DEVICE as i32] },
        f_namelen: 255,
        f_frsize: PAGE_SIZE as i64,
        f_flags: 0,
        f_spare: [0; 4],
    };
    user::write(addr, &Abi(statfs))?;
    Ok(0)
}

/// `statfs(path, statfs)`.
pub fn statfs(args: Args<'_>) -> Result {
    tell_space(&*find_existing(args.a(), Links::Follow)?, args.b())
}

/// `fstatfs(fd, statfs)`.
pub fn fstatfs(args: Args<'_>) -> Result {
    tell_space(&file(args.a())?.inode, args.b())
}
