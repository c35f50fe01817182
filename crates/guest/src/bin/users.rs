//! `users [CHECK…]`: user and group ids and their permissions, scheduling policies, and calls
//! reserved for root.
//!
//! Root must start the program.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{Region, errno};
use faultless_guest::proc::{self, Status, fork};
use faultless_guest::sys::{self, Errno, call, checked, doing};
use faultless_guest::{ensure, same, signal};
use libc::{EACCES, EAGAIN, EBUSY, EINVAL, ENODEV, ENOENT, EPERM, ESRCH};
use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// A user and group without rights.
const USER: u64 = 1000;
/// Another one.
const OTHER: u64 = 1001;
/// A supplementary group of the user.
const GROUP: u32 = 2000;
/// The id of `setresuid` for no change.
const SAME: u64 = u32::MAX as u64;

/// Makes a call with this process's own memory.
fn make<const N: usize>(number: i64, args: [u64; N]) -> sys::Result<u64> {
    // SAFETY: every caller passes pointers to its own memory.
    unsafe { call(number, args) }
}

const fn fails<T>(number: i32) -> sys::Result<T> {
    Err(Errno(number))
}

/// Returns the error number of a call of the standard library, or 0.
fn number<T>(result: std::io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

fn io<T>(result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

fn text(path: &Path) -> Result<CString, String> {
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())
}

/// Runs `check` in a child whose user and group are `user`, with the supplementary group.
fn as_user(user: u64, check: impl FnOnce() -> Verdict) -> Verdict {
    let ended = proc::outcome(|| {
        let become_user = || -> sys::Result<()> {
            let groups = [GROUP];
            make(libc::SYS_setgroups, [1, groups.as_ptr() as u64])?;
            make(libc::SYS_setgid, [user])?;
            make(libc::SYS_setuid, [user]).map(drop)
        };
        let done = become_user().map_err(|errno| errno.to_string()).and_then(|()| check());
        if let Err(why) = &done {
            println!("# as user {user}: {why}");
        }
        i32::from(done.is_err())
    })?;
    ensure!(ended == Status::Exited(0), "as user {user}: {ended:?}");
    Ok(())
}

fn ids(number: i64) -> sys::Result<[u32; 3]> {
    let mut ids = [0u32; 3];
    let at = |at: usize| (&raw const ids[at]) as u64;
    let places = [at(0), at(1), at(2)];
    make(number, places)?;
    ids = std::hint::black_box(ids);
    Ok(ids)
}

/// Changes of ids, by the rules for root and for other users.
fn changing_ids() -> Verdict {
    for (get, set, pair, all, file) in [
        (
            libc::SYS_getresgid,
            libc::SYS_setgid,
            libc::SYS_setregid,
            libc::SYS_setresgid,
            libc::SYS_setfsgid,
        ),
        (
            libc::SYS_getresuid,
            libc::SYS_setuid,
            libc::SYS_setreuid,
            libc::SYS_setresuid,
            libc::SYS_setfsuid,
        ),
    ] {
        let is_user = set == libc::SYS_setuid;
        let fresh = |check: &dyn Fn() -> Verdict| -> Verdict {
            let ended = proc::outcome(|| match check() {
                Ok(()) => 0,
                Err(why) => {
                    println!("# {why}");
                    1
                }
            })?;
            ensure!(ended == Status::Exited(0), "ids, is_user {is_user}: {ended:?}");
            Ok(())
        };
        fresh(&|| {
            same!(ids(get), Ok([0; 3]), "the ids of root");
            same!(make(set, [SAME]), fails(EINVAL), "the id -1");
            same!(make(all, [10, 11, 12]), Ok(0), "three ids");
            same!(ids(get), Ok([10, 11, 12]), "three ids");
            same!(make(file, [SAME]), Ok(11), "the id for files");
            if is_user {
                same!(make(set, [13]), fails(EPERM), "another id");
                same!(make(set, [12]), Ok(0), "the saved id");
                same!(ids(get), Ok([10, 12, 12]), "the saved id is effective");
                same!(make(set, [11]), fails(EPERM), "an earlier effective id");
                same!(make(all, [SAME, 0, SAME]), fails(EPERM), "root again");
                same!(make(pair, [12, 10]), Ok(0), "swapping ids");
                same!(ids(get), Ok([12, 10, 10]), "swapped ids");
                same!(make(pair, [SAME, 5]), fails(EPERM), "another effective id");
                same!(make(file, [77]), Ok(10), "another id for files, refused");
                same!(make(file, [12]), Ok(10), "the real id for files");
                same!(make(file, [SAME]), Ok(12), "the id for files");
                let groups = make(libc::SYS_setgroups, [0, 0]);
                same!(groups, fails(EPERM), "setgroups");
                let status = io(fs::read_to_string("/proc/self/status"))?;
                ensure!(status.contains("\nUid:\t12\t10\t10\t12\n"), "Uid in {status}");
            }
            Ok(())
        })?;
        fresh(&|| {
            same!(make(set, [14]), Ok(0), "one id");
            same!(ids(get), Ok([14; 3]), "root's change of all");
            let back = make(set, [0]);
            same!(back, if is_user { fails(EPERM) } else { Ok(0) }, "the change back");
            Ok(())
        })?;
        fresh(&|| {
            same!(make(pair, [SAME, 15]), Ok(0), "an effective id");
            same!(ids(get), Ok([0, 15, 15]), "an effective id");
            same!(make(pair, [SAME, 0]), Ok(0), "the real id again");
            Ok(())
        })?;
    }
    let groups = [5u32, 6, 7];
    same!(make(libc::SYS_setgroups, [3, groups.as_ptr() as u64]), Ok(0), "setgroups");
    same!(make(libc::SYS_getgroups, [0, 0]), Ok(3), "the number of groups");
    let mut found = [0u32; 3];
    let at = found.as_mut_ptr() as u64;
    same!(make(libc::SYS_getgroups, [2, at]), fails(EINVAL), "getgroups with too small a buffer");
    same!(make(libc::SYS_getgroups, [3, at]), Ok(3), "getgroups");
    same!(found, groups, "the groups");
    same!(make(libc::SYS_setgroups, [65_537, at]), fails(EINVAL), "too many groups");
    let none = [u32::MAX];
    same!(make(libc::SYS_setgroups, [1, none.as_ptr() as u64]), fails(EINVAL), "the group -1");
    Ok(())
}

/// A directory of root, removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str, mode: u32) -> Result<Self, String> {
        let dir = Self(PathBuf::from(format!("/tmp/users.{}.{name}", std::process::id())));
        io(fs::create_dir(&dir.0))?;
        io(fs::set_permissions(&dir.0, Permissions::from_mode(mode)))?;
        Ok(dir)
    }

    /// A file with this owner, group and mode.
    fn file(&self, name: &str, [user, group]: [u32; 2], mode: u32) -> Result<PathBuf, String> {
        let path = self.0.join(name);
        io(fs::write(&path, "text"))?;
        io(chown(&path, Some(user), Some(group)))?;
        io(fs::set_permissions(&path, Permissions::from_mode(mode)))?;
        Ok(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn reads(path: &Path) -> i32 {
    number(File::open(path))
}

fn writes(path: &Path) -> i32 {
    number(File::options().write(true).open(path))
}

/// Opening files, as the owner, the group and other users.
fn opening_files() -> Verdict {
    let dir = Dir::new("open", 0o755)?;
    let user = USER as u32;
    let rows = [
        // Owner and group, mode; errors of reading and of writing.
        ([0, 0], 0o600, EACCES, EACCES),
        ([0, 0], 0o644, 0, EACCES),
        ([0, 0], 0o666, 0, 0),
        ([user, 0], 0o400, 0, EACCES),
        ([user, 0], 0o200, EACCES, 0),
        ([user, 0], 0o077, EACCES, EACCES),
        ([0, user], 0o640, 0, EACCES),
        ([0, GROUP], 0o060, 0, 0),
        ([0, GROUP], 0o606, EACCES, EACCES),
        ([0, 3000], 0o060, EACCES, EACCES),
    ];
    let made = rows.iter().enumerate().map(|(at, row)| dir.file(&at.to_string(), row.0, row.1));
    let paths: Vec<PathBuf> = made.collect::<Result<_, _>>()?;
    let hidden = Dir::new("hidden", 0o700)?;
    let inner = hidden.file("inner", [user, user], 0o666)?;
    let listed = Dir::new("listed", 0o744)?;
    let program = dir.file("program", [0, 0], 0o700)?;
    as_user(USER, || {
        for (path, (owner, mode, read, write)) in paths.iter().zip(rows) {
            same!(reads(path), read, "reading mode {mode:o} of {owner:?}");
            same!(writes(path), write, "writing mode {mode:o} of {owner:?}");
            let path = text(path)?;
            let access = |mode| errno(make(libc::SYS_access, [path.as_ptr() as u64, mode]));
            same!(access(4), read, "access, to read mode {mode:o} of {owner:?}");
            same!(access(2), write, "access, to write mode {mode:o} of {owner:?}");
        }
        same!(reads(&inner), EACCES, "a file in a directory without permissions");
        same!(number(fs::metadata(&inner)), EACCES, "stat of that file");
        same!(number(fs::read_dir(&hidden.0)), EACCES, "listing that directory");
        same!(number(fs::read_dir(&listed.0)), 0, "listing a readable directory");
        same!(number(fs::metadata(listed.0.join("x"))), EACCES, "a name in that directory");
        let open = |flags: i32| {
            let path = text(&paths[1])?;
            let args = [libc::AT_FDCWD as u64, path.as_ptr() as u64, flags as u64, 0];
            Ok::<i32, String>(errno(make(libc::SYS_openat, args)))
        };
        same!(open(libc::O_RDONLY | libc::O_TRUNC)?, EACCES, "O_TRUNC of a read-only file");
        same!(open(libc::O_PATH)?, 0, "O_PATH");
        let path = text(&paths[1])?;
        let truncated = make(libc::SYS_truncate, [path.as_ptr() as u64, 0]);
        same!(truncated, fails(EACCES), "truncate of a read-only file");
        let program = text(&program)?;
        let words = [program.as_ptr() as u64, 0];
        let ran = make(libc::SYS_execve, [words[0], words.as_ptr() as u64, 0]);
        same!(ran, fails(EACCES), "execve of root's file");
        Ok(())
    })?;
    // The real id counts for `access`, the effective id for other calls.
    let ended = proc::outcome(|| {
        let check = || -> Verdict {
            doing("setresuid", make(libc::SYS_setresuid, [USER, 0, 0]))?;
            let path = text(&paths[0])?;
            let read = make(libc::SYS_access, [path.as_ptr() as u64, 4]);
            same!(read, fails(EACCES), "access with the real id");
            same!(reads(&paths[0]), 0, "open with the effective id");
            Ok(())
        };
        check().map_err(|why| println!("# {why}")).is_err().into()
    })?;
    same!(ended, Status::Exited(0), "the real id");
    Ok(())
}

/// Names can be changed in writable directories, and the owner may change permissions.
fn changing_files() -> Verdict {
    let user = USER as u32;
    let [own, shared] = [Dir::new("own", 0o755)?, Dir::new("sticky", 0o1777)?];
    let open = Dir::new("all", 0o777)?;
    let [roots, mine] =
        [shared.file("roots", [0, 0], 0o666)?, shared.file("mine", [user, user], 0o666)?];
    let foreign = open.file("foreign", [0, 0], 0o600)?;
    let kept = own.file("kept", [user, user], 0o666)?;
    as_user(USER, || {
        same!(number(File::create(own.0.join("new"))), EACCES, "a new file in root's directory");
        same!(number(fs::create_dir(own.0.join("new"))), EACCES, "a new directory there");
        same!(number(fs::remove_file(&kept)), EACCES, "removing a file there");
        same!(number(fs::remove_file(own.0.join("none"))), ENOENT, "removing no file there");
        same!(number(fs::hard_link(&mine, own.0.join("link"))), EACCES, "a link there");
        same!(number(fs::rename(&mine, own.0.join("mine"))), EACCES, "moving a file there");
        same!(number(fs::remove_file(&roots)), EPERM, "removing another's file, sticky");
        same!(number(fs::rename(&roots, shared.0.join("x"))), EPERM, "renaming root's file");
        same!(number(fs::rename(&mine, &roots)), EPERM, "replacing root's file");
        same!(number(fs::rename(&mine, shared.0.join("moved"))), 0, "renaming the user's file");
        same!(number(fs::remove_file(shared.0.join("moved"))), 0, "removing the user's file");
        same!(number(fs::remove_file(&foreign)), 0, "removing another's file");
        let new = open.0.join("new");
        io(fs::write(&new, "x"))?;
        let meta = io(fs::metadata(&new))?;
        same!([meta.uid(), meta.gid()], [user, user], "the owner of a new file");
        let mode = |path: &Path| number(fs::set_permissions(path, Permissions::from_mode(0o600)));
        same!(mode(&new), 0, "chmod of the user's file");
        same!(mode(&roots), EPERM, "chmod of another's file");
        same!(number(chown(&new, Some(0), None)), EPERM, "chown to root");
        same!(number(chown(&new, None, Some(GROUP))), 0, "chown to a group of the user");
        same!(number(chown(&new, None, Some(3000))), EPERM, "chown to another group");
        same!(number(chown(&roots, None, Some(user))), EPERM, "chown of another's file");
        let path = text(&roots)?;
        let times = [[1i64, 0], [2, 0]];
        let set = |times: u64| {
            let args = [libc::AT_FDCWD as u64, path.as_ptr() as u64, times, 0];
            make(libc::SYS_utimensat, args)
        };
        same!(set(0), Ok(0), "the present time for a writable file");
        same!(set(times.as_ptr() as u64), fails(EPERM), "another time for this file");
        for (words, expected) in [
            ([libc::UTIME_NOW; 2], Ok(0)),
            ([libc::UTIME_OMIT; 2], Ok(0)),
            ([libc::UTIME_NOW, libc::UTIME_OMIT], fails(EPERM)),
        ] {
            let times = words.map(|word| [0i64, word]);
            same!(set(times.as_ptr() as u64), expected, "times {words:x?} for this file");
        }
        same!(make(libc::SYS_chown, [path.as_ptr() as u64, SAME, SAME]), Ok(0), "no change");
        let args = [path.as_ptr() as u64, (libc::O_RDONLY | libc::O_NOATIME) as u64, 0];
        same!(make(libc::SYS_open, args), fails(EPERM), "O_NOATIME of another's file");
        Ok(())
    })
}

/// The set-ID bits of a file end with a new owner, and with stores by other users than root. Files
/// in a directory with the set-group-ID bit have the group of the directory.
fn set_ids() -> Verdict {
    let user = USER as u32;
    let dir = Dir::new("bits", 0o777)?;
    let shared = Dir::new("group", 0o2777)?;
    io(chown(&shared.0, Some(0), Some(GROUP)))?;
    let foreign = Dir::new("foreign", 0o777)?;
    io(chown(&foreign.0, Some(0), Some(3000)))?;
    for made in [&shared, &foreign] {
        io(fs::set_permissions(&made.0, Permissions::from_mode(0o2777)))?;
    }
    let state = |path: &Path| -> Result<[u32; 2], String> {
        let meta = io(fs::symlink_metadata(path))?;
        Ok([meta.mode() & 0o7777, meta.gid()])
    };
    let roots = dir.file("roots", [0, 0], 0o6755)?;
    io(chown(&roots, Some(user), Some(user)))?;
    same!(state(&roots)?, [0o755, user], "chown by root");
    let group = dir.file("group", [0, 0], 0o6745)?;
    io(chown(&group, Some(0), Some(user)))?;
    same!(state(&group)?, [0o2745, user], "the bit of a group without execute permission");
    let stored = dir.file("stored", [0, 0], 0o6777)?;
    io(fs::write(&stored, "by root"))?;
    same!(state(&stored)?[0], 0o6777, "a store by root");
    let moved = dir.file("moved", [user, user], 0o6777)?;
    let cut = dir.file("cut", [user, user], 0o6777)?;
    let other = dir.file("other", [user, 3000], 0o755)?;
    let left = dir.file("left", [user, 3000], 0o2644)?;
    as_user(USER, || {
        let file = io(File::options().write(true).open(&stored))?;
        same!(state(&stored)?[0], 0o6777, "an open file");
        same!(std::io::Write::write(&mut &file, b"x").ok(), Some(1), "write");
        same!(state(&stored)?[0], 0o777, "a store");
        same!(number(chown(&moved, None, Some(GROUP))), 0, "chown to a group of the user");
        same!(state(&moved)?, [0o777, GROUP], "chown by the owner");
        same!(number(chown(&left, None, Some(GROUP))), 0, "chown from another's group");
        same!(state(&left)?, [0o644, GROUP], "the bit of the group before");
        io(File::options().write(true).open(&cut).and_then(|file| file.set_len(0)))?;
        same!(state(&cut)?[0], 0o777, "a truncated file");
        io(fs::set_permissions(&other, Permissions::from_mode(0o2755)))?;
        same!(state(&other)?, [0o755, 3000], "the bit of another's group");
        for (path, bits) in [(&shared.0, 0o2644), (&foreign.0, 0o644)] {
            let group = state(path)?[1];
            let file = path.join("file");
            io(File::create(&file))?;
            same!(state(&file)?[1], group, "the group of a file in {path:?}");
            io(fs::set_permissions(&file, Permissions::from_mode(0o2644)))?;
            same!(state(&file)?[0], bits, "the bit of a file in {path:?}");
            let inner = path.join("inner");
            io(fs::create_dir(&inner))?;
            same!(state(&inner)?[0] & 0o2000, 0o2000, "the bit of a directory in {path:?}");
            same!(state(&inner)?[1], group, "the group of a directory in {path:?}");
            io(std::os::unix::fs::symlink("x", path.join("link")))?;
            same!(state(&path.join("link"))?[1], group, "the group of a link in {path:?}");
        }
        Ok(())
    })
}

/// Calls reserved for root.
fn privileges() -> Verdict {
    as_user(USER, || {
        let slash = c"/".as_ptr() as u64;
        same!(make(libc::SYS_chroot, [slash]), fails(EPERM), "chroot");
        let mounted = make(libc::SYS_mount, [slash, slash, c"tmpfs".as_ptr() as u64, 0, 0]);
        same!(mounted, fails(EPERM), "mount");
        same!(make(libc::SYS_umount2, [slash, 0]), fails(EPERM), "umount");
        let device = [c"/tmp/users.device".as_ptr() as u64, u64::from(libc::S_IFCHR | 0o600)];
        let made = make(libc::SYS_mknod, [device[0], device[1], 1 << 8 | 3]);
        same!(made, fails(EPERM), "a device");
        let mut limit = [0u64; 2];
        let at = limit.as_mut_ptr() as u64;
        let files = u64::from(libc::RLIMIT_NOFILE);
        doing("prlimit64", make(libc::SYS_prlimit64, [0, files, 0, at]))?;
        let [soft, hard] = std::hint::black_box(limit);
        limit = std::hint::black_box([soft, hard + 1]);
        same!(
            make(libc::SYS_prlimit64, [0, files, limit.as_ptr() as u64, 0]),
            fails(EPERM),
            "a higher hard limit"
        );
        Ok(())
    })
}

/// Signals reach only processes of the same user, and `/proc` shows only these processes.
fn other_processes() -> Verdict {
    let root = proc::pid() as u64;
    let sleeper = |user: u64| {
        fork(|| {
            if make(libc::SYS_setuid, [user]).is_err() {
                return 1;
            }
            faultless_guest::clock::sleep_ms(30_000);
            0
        })
    };
    let [own, other] = [doing("fork", sleeper(USER))?, doing("fork", sleeper(OTHER))?];
    let has_user = |pid: i32, user: u64| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains(&format!("\nUid:\t{user}\t"))
    };
    let ready = || has_user(own.pid, USER) && has_user(other.pid, OTHER);
    let begin = std::time::Instant::now();
    while !ready() && begin.elapsed().as_secs() < 10 {
        faultless_guest::clock::sleep_ms(2);
    }
    let is_ready = ready();
    let region = doing("mmap", Region::anonymous(4096))?;
    region.store(0, 5);
    let checked = as_user(USER, || {
        ensure!(is_ready, "the ids of the children do not show");
        let kill = |pid: u64, signal: i32| make(libc::SYS_kill, [pid, signal as u64]);
        same!(kill(root, 0), fails(EPERM), "signal 0 to root");
        same!(kill(root, libc::SIGTERM), fails(EPERM), "a signal to root");
        same!(kill(root, libc::SIGCONT), Ok(0), "SIGCONT to root within the session");
        same!(kill(root, 99), fails(EINVAL), "a signal that does not exist, to root");
        // As on Linux, signals that are not permitted are no error here.
        same!(kill(u64::MAX, 0), Ok(0), "signal 0 to all processes");
        same!(kill(other.pid as u64, libc::SIGTERM), fails(EPERM), "a signal to another user");
        let thread = [other.pid as u64, other.pid as u64, libc::SIGTERM as u64];
        same!(make(libc::SYS_tgkill, thread), fails(EPERM), "tgkill to another user");
        same!(kill(own.pid as u64, 0), Ok(0), "signal 0 to the same user");
        let files = u64::from(libc::RLIMIT_NOFILE);
        let mut limit = [0u64; 2];
        let get = make(libc::SYS_prlimit64, [root, files, 0, limit.as_mut_ptr() as u64]);
        same!(get, fails(EPERM), "a limit of root's process");
        let none_such = make(libc::SYS_prlimit64, [root, 99, 0, limit.as_mut_ptr() as u64]);
        same!(none_such, fails(EPERM), "a limit that does not exist, of root's process");
        let mut value = 0u64;
        let pieces = [(&raw mut value) as u64, 8, region.start(), 8];
        let (here, there) = (pieces.as_ptr() as u64, pieces[2..].as_ptr() as u64);
        let read = make(libc::SYS_process_vm_readv, [root, here, 1, there, 1, 0]);
        same!(read, fails(EPERM), "memory of root's process");
        // It was root before.
        let read = make(libc::SYS_process_vm_readv, [own.pid as u64, here, 1, there, 1, 0]);
        same!(read, fails(EPERM), "memory of a process of the same user");
        same!(
            reads(Path::new(&format!("/proc/{}/maps", own.pid))),
            EACCES,
            "the maps of another process"
        );
        let dumpable = || make(libc::SYS_prctl, [libc::PR_GET_DUMPABLE as u64, 0, 0, 0, 0]);
        same!(dumpable(), Ok(0), "whether this process is dumpable");
        same!(reads(Path::new("/proc/self/mem")), EACCES, "the memory of this process");
        doing("prctl", make(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0, 0]))?;
        same!(dumpable(), Ok(1), "whether this process is dumpable now");
        same!(reads(Path::new("/proc/self/mem")), 0, "the memory of this process now");
        for name in ["maps", "environ", "smaps", "personality"] {
            let path = format!("/proc/{root}/{name}");
            same!(reads(Path::new(&path)), EACCES, "{path}");
        }
        same!(number(fs::read_link(format!("/proc/{root}/exe"))), EACCES, "root's program");
        same!(number(fs::read_dir(format!("/proc/{root}/fd"))), EACCES, "root's descriptors");
        same!(reads(Path::new(&format!("/proc/{root}/status"))), 0, "the status of root's process");
        same!(reads(Path::new("/proc/self/maps")), 0, "the maps of this process");
        let nice = |pid: u64| make(libc::SYS_setpriority, [0, pid, 5]);
        same!(nice(other.pid as u64), fails(EPERM), "the nice value of another user's process");
        same!(nice(own.pid as u64), Ok(0), "the nice value of a process of the same user");
        same!(kill(own.pid as u64, libc::SIGKILL), Ok(0), "a signal to the same user");
        Ok(())
    });
    // The ended child, and its user.
    let mut information = [0u32; 32];
    let args = [1, own.pid as u64, information.as_mut_ptr() as u64, libc::WEXITED as u64, 0];
    if checked.is_ok() {
        doing("waitid", make(libc::SYS_waitid, args))?;
    }
    let _ = own.signal(libc::SIGKILL);
    doing("kill", other.signal(libc::SIGKILL))?;
    doing("wait4", other.wait())?;
    checked?;
    let [signal, pid, user] = [information[0], information[4], information[5]];
    same!([signal, pid, user], [17, own.pid as u32, USER as u32], "the information of waitid");
    Ok(())
}

/// `sched_attr`, of which only the first fields are used.
fn attributes() -> sys::Result<[u32; 12]> {
    let mut words = [0u32; 12];
    make(libc::SYS_sched_getattr, [0, words.as_mut_ptr() as u64, 48, 0])?;
    Ok(words)
}

/// Policies and nice values are read back, and children inherit them.
fn schedules() -> Verdict {
    let nice = |which: u64, who: u64| make(libc::SYS_getpriority, [which, who]);
    let renice = |who: u64, value: i32| make(libc::SYS_setpriority, [0, who, value as u64]);
    let policy = || make(libc::SYS_sched_getscheduler, [0]);
    let zero = 0i32;
    let at = (&raw const zero) as u64;
    let set = |policy: i32| make(libc::SYS_sched_setscheduler, [0, policy as u64, at]);
    same!(nice(0, 0), Ok(20), "the first nice value, from 20");
    same!(renice(0, -5), Ok(0), "nice -5");
    same!(nice(0, 0), Ok(25), "nice -5");
    same!(renice(0, -100), Ok(0), "nice -100");
    same!(nice(0, 0), Ok(40), "the least nice value");
    same!(renice(0, 7), Ok(0), "nice 7");
    same!(attributes().map(|words| words[4]), Ok(7), "the nice value in the attributes");
    let stat = io(fs::read_to_string("/proc/self/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    same!(fields.get(15..17), Some(&["27", "7"][..]), "priority and nice value in stat");
    same!(policy(), Ok(libc::SCHED_OTHER as u64), "the first policy");
    same!(set(libc::SCHED_BATCH), Ok(0), "SCHED_BATCH");
    same!(policy(), Ok(libc::SCHED_BATCH as u64), "SCHED_BATCH");
    same!(nice(0, 0), Ok(13), "the nice value afterwards");
    let inherited = proc::outcome(|| {
        let same = policy() == Ok(libc::SCHED_BATCH as u64) && nice(0, 0) == Ok(13);
        i32::from(!same)
    })?;
    same!(inherited, Status::Exited(0), "the inherited schedule");
    same!(renice(0, -3), Ok(0), "nice -3");
    const RESET: i32 = 0x4000_0000;
    same!(set(libc::SCHED_OTHER | RESET), Ok(0), "SCHED_RESET_ON_FORK");
    same!(policy(), Ok(RESET as u64), "SCHED_RESET_ON_FORK");
    let reset = proc::outcome(|| i32::from(policy() != Ok(0) || nice(0, 0) != Ok(20)))?;
    same!(reset, Status::Exited(0), "a child after SCHED_RESET_ON_FORK");
    same!(set(77), fails(EINVAL), "a policy that does not exist");
    same!(set(-1), fails(EINVAL), "policy -1");
    same!(set(libc::SCHED_FIFO), fails(EINVAL), "SCHED_FIFO without a priority");
    let null = make(libc::SYS_sched_setscheduler, [0, 0, 0]);
    same!(null, fails(EINVAL), "no parameters");
    same!(nice(0, 0x7fff_fff0), fails(ESRCH), "a process that does not exist");
    same!(nice(9, 0), fails(EINVAL), "neither process, group nor user");
    let set_attributes = |policy: i32, nice: u32| {
        let mut words = attributes()?;
        (words[1], words[2], words[4]) = (policy as u32, 0, nice);
        make(libc::SYS_sched_setattr, [0, words.as_ptr() as u64, 0])?;
        attributes().map(|words| [words[1], words[4]])
    };
    same!(set_attributes(libc::SCHED_BATCH, 3), Ok([3, 3]), "SCHED_BATCH, nice 3");
    same!(set_attributes(libc::SCHED_IDLE, 9), Ok([5, 3]), "SCHED_IDLE keeps the nice value");
    doing("setpgid", make(libc::SYS_setpgid, [0, 0]))?;
    same!(nice(1, 0), Ok(17), "the nice value of the group");
    as_user(USER, || {
        same!(renice(0, 10), Ok(0), "a higher nice value");
        same!(renice(0, 9), fails(EACCES), "a lower nice value");
        same!(nice(0, 0), Ok(10), "the nice value");
        same!(set(libc::SCHED_BATCH), fails(EPERM), "a way out of SCHED_IDLE");
        same!(set(libc::SCHED_IDLE | RESET), Ok(0), "SCHED_RESET_ON_FORK of SCHED_IDLE");
        same!(set(libc::SCHED_IDLE), fails(EPERM), "no SCHED_RESET_ON_FORK any more");
        same!(policy(), Ok((libc::SCHED_IDLE | RESET) as u64), "the policy");
        Ok(())
    })
}

/// Rejected mounts.
fn mounts() -> Verdict {
    let dir = Dir::new("mount", 0o755)?;
    let path = text(&dir.0)?;
    let place = path.as_ptr() as u64;
    let none = c"/tmp/users.none".as_ptr() as u64;
    let mount = |target: u64, kind: u64| make(libc::SYS_mount, [none, target, kind, 0, 0]);
    let unknown = c"no such file system".as_ptr() as u64;
    same!(mount(none, unknown), fails(ENOENT), "mount of a missing directory");
    same!(mount(place, unknown), fails(ENODEV), "mount of an unknown file system");
    same!(mount(place, 0), fails(EINVAL), "mount without a type");
    same!(mount(8, unknown), fails(libc::EFAULT), "mount without a path");
    let umount = |target: u64, flags: u64| make(libc::SYS_umount2, [target, flags]);
    same!(umount(none, 0), fails(ENOENT), "umount of a missing directory");
    same!(umount(place, 0), fails(EINVAL), "umount of a directory");
    same!(umount(place, 0x100), fails(EINVAL), "umount with an unknown flag");
    same!(umount(c"/proc".as_ptr() as u64, 0), fails(EBUSY), "umount of /proc in use");
    Ok(())
}

/// `RLIMIT_SIGPENDING` limits the pending signals.
fn pending_signals() -> Verdict {
    const MOST: u64 = 8;
    let real_time = libc::SIGRTMIN();
    signal::mask(libc::SIG_BLOCK, &[real_time, libc::SIGUSR1]).map_err(String::from)?;
    let limit = libc::rlimit { rlim_cur: MOST, rlim_max: MOST };
    // SAFETY: a local.
    let limited = checked(unsafe { libc::setrlimit(libc::RLIMIT_SIGPENDING, &raw const limit) });
    doing("setrlimit", limited)?;
    let pid = proc::pid();
    let queue = || {
        let value = libc::sigval { sival_ptr: std::ptr::null_mut() };
        // SAFETY: a plain call.
        errno(checked(unsafe { libc::sigqueue(pid, real_time, value) }))
    };
    let pending = || {
        let status = io(fs::read_to_string("/proc/self/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("SigQ:\t"));
        let numbers = line.and_then(|line| line.split_once('/')).ok_or("no SigQ")?;
        Ok::<_, String>((numbers.0.parse::<u64>().unwrap_or(0), numbers.1.to_owned()))
    };
    let before = pending()?;
    same!(before.1, MOST.to_string(), "the limit in SigQ");
    same!(queue(), 0, "sigqueue");
    let after = pending()?;
    // Signals of other processes of this user may come or go.
    ensure!(after.0 > 0 && after.0 <= before.0 + 3, "SigQ of {after:?} after {before:?}");
    let full = (1..=MOST).find(|_| queue() != 0);
    // Signals of other processes of this user may be pending.
    ensure!(full.is_some_and(|full| full > MOST / 2), "a signal is refused after {full:?}");
    same!(queue(), EAGAIN, "sigqueue beyond the limit");
    let send = |signal: i32| make(libc::SYS_kill, [pid as u64, signal as u64]);
    same!(send(real_time), Ok(0), "kill beyond the limit");
    same!(send(libc::SIGUSR1), Ok(0), "kill with another signal");
    let thread = [pid as u64, proc::tid() as u64, real_time as u64];
    same!(make(libc::SYS_tgkill, thread), fails(EAGAIN), "tgkill beyond the limit");
    ensure!(signal::contains(&signal::pending(), libc::SIGUSR1), "SIGUSR1 is pending");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("changing_ids", changing_ids),
    ("opening_files", opening_files),
    ("changing_files", changing_files),
    ("set_ids", set_ids),
    ("privileges", privileges),
    ("other_processes", other_processes),
    ("schedules", schedules),
    ("mounts", mounts),
    ("pending_signals", pending_signals),
];

fn main() {
    std::process::exit(check::run(&Args::read("users", &[]), CHECKS));
}
