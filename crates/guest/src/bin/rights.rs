//! `rights [CHECK…]`: more of what user and group ids permit: moving directories, System V's
//! objects, signals to all processes, times and owners of files, nice values, and the policy
//! `SCHED_IDLE`.
//!
//! It must be started by root.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{PAGE, Region, Shared};
use faultless_guest::proc::{self, Status, fork};
use faultless_guest::sys::{self, Errno, call, doing};
use faultless_guest::{clock, ensure, same};
use libc::{EACCES, EEXIST, EINVAL, ENOENT, ENOTDIR, ENOTEMPTY, EPERM, ESRCH};
use std::ffi::CString;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// A user and group that no other process has.
const USER: u64 = 54_321;
/// A supplementary group of the user.
const GROUP: u64 = 54_322;

/// Makes a call of this process's own memory.
fn make<const N: usize>(number: i64, args: [u64; N]) -> sys::Result<u64> {
    // SAFETY: every caller passes pointers to its own memory.
    unsafe { call(number, args) }
}

const fn fails<T>(number: i32) -> sys::Result<T> {
    Err(Errno(number))
}

fn io<T>(result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

fn text(path: &Path) -> Result<CString, String> {
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())
}

/// Runs `check` in a child whose user and group are [`USER`], with the group [`GROUP`].
fn as_user(check: impl FnOnce() -> Verdict) -> Verdict {
    let ended = proc::outcome(|| {
        let done = become_user().map_err(|errno| errno.to_string()).and_then(|()| check());
        if let Err(why) = &done {
            println!("# as user {USER}: {why}");
        }
        i32::from(done.is_err())
    })?;
    ensure!(ended == Status::Exited(0), "as user {USER}: {ended:?}");
    Ok(())
}

fn become_user() -> sys::Result<()> {
    let groups = [GROUP as u32];
    make(libc::SYS_setgroups, [1, groups.as_ptr() as u64])?;
    make(libc::SYS_setgid, [USER])?;
    make(libc::SYS_setuid, [USER]).map(drop)
}

/// A directory of root, removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str, mode: u32) -> Result<Self, String> {
        let dir = Self(PathBuf::from(format!("/tmp/rights.{}.{name}", std::process::id())));
        io(fs::create_dir(&dir.0))?;
        io(fs::set_permissions(&dir.0, Permissions::from_mode(mode)))?;
        Ok(dir)
    }

    /// A file or directory with this owner and mode.
    fn entry(&self, name: &str, is_dir: bool, user: u64, mode: u32) -> Result<PathBuf, String> {
        let path = self.0.join(name);
        if is_dir {
            io(fs::create_dir(&path))?;
        } else {
            io(fs::write(&path, "text"))?;
        }
        io(chown(&path, Some(user as u32), Some(user as u32)))?;
        io(fs::set_permissions(&path, Permissions::from_mode(mode)))?;
        Ok(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A directory that gets another parent must be writable, as its `..` changes.
fn moving_directories() -> Verdict {
    let [a, b, closed] = [Dir::new("a", 0o777)?, Dir::new("b", 0o777)?, Dir::new("closed", 0o755)?];
    let roots = a.entry("roots", true, 0, 0o755)?;
    let shared = a.entry("shared", true, 0, 0o777)?;
    let own = a.entry("own", true, USER, 0o755)?;
    let locked = a.entry("locked", true, USER, 0o555)?;
    let file = a.entry("file", false, USER, 0o600)?;
    let full = b.entry("full", true, USER, 0o755)?;
    io(fs::write(full.join("x"), "x"))?;
    let target = b.entry("target", false, USER, 0o600)?;
    let theirs = b.entry("theirs", true, 0, 0o755)?;
    let taken = closed.entry("taken", false, 0, 0o644)?;
    as_user(|| {
        let rename = |from: &Path, to: &Path, flags: u32| {
            let (from, to) = (text(from)?, text(to)?);
            let here = libc::AT_FDCWD as u64;
            let args = [here, from.as_ptr() as u64, here, to.as_ptr() as u64, flags.into()];
            Ok::<_, String>(make(libc::SYS_renameat2, args))
        };
        let new = |name: &str| b.0.join(name);
        const KEEP: u32 = libc::RENAME_NOREPLACE;
        const EXCHANGE: u32 = libc::RENAME_EXCHANGE;
        same!(rename(&roots, &new("roots"), 0)?, fails(EACCES), "root's directory");
        same!(rename(&roots, &roots.join("x"), 0)?, fails(EINVAL), "root's directory into itself");
        same!(rename(&roots, &target, 0)?, fails(ENOTDIR), "root's directory over a file");
        same!(
            rename(&roots, &full, 0)?,
            fails(EACCES),
            "root's directory over a non-empty directory"
        );
        same!(
            rename(&roots, &full, KEEP)?,
            fails(EEXIST),
            "root's directory, with RENAME_NOREPLACE"
        );
        same!(rename(&file, &theirs, EXCHANGE)?, fails(EACCES), "an exchange with root's");
        same!(rename(&roots, &target, EXCHANGE)?, fails(EACCES), "an exchange of root's");
        same!(
            rename(&locked, &new("locked"), 0)?,
            fails(EACCES),
            "the user's directory, without write permission"
        );
        same!(
            rename(&own, &full, 0)?,
            fails(ENOTEMPTY),
            "the user's directory over a non-empty directory"
        );
        same!(rename(&own, &full, EXCHANGE)?, Ok(0), "an exchange of two directories of the user");
        same!(
            rename(&shared, &new("shared"), 0)?,
            Ok(0),
            "root's directory, with write permission for others"
        );
        same!(
            rename(&roots, &a.0.join("renamed"), 0)?,
            Ok(0),
            "root's directory, within the same directory"
        );
        same!(
            rename(&locked, &a.0.join("other"), 0)?,
            Ok(0),
            "the user's directory, within the same directory"
        );
        same!(rename(&file, &taken, 0)?, fails(EACCES), "a file into root's directory");
        same!(rename(&file, &taken, KEEP)?, fails(EEXIST), "the same, with RENAME_NOREPLACE");
        let none = closed.0.join("none");
        same!(rename(&none, &new("x"), 0)?, fails(ENOENT), "no file");
        same!(rename(&taken, &closed.0.join("none"), EXCHANGE)?, fails(ENOENT), "with no file");
        same!(rename(&taken, &none, 0)?, fails(EACCES), "a file in root's directory");
        same!(rename(&taken, &closed.0, 0)?, fails(ENOTEMPTY), "a file to its own directory");
        let truncated = make(libc::SYS_truncate, [text(&closed.0)?.as_ptr() as u64, 0]);
        same!(truncated, fails(libc::EISDIR), "truncate of root's directory");
        Ok(())
    })
}

const IPC_SET: u64 = 1;
const IPC_STAT: u64 = 2;
const GETVAL: u64 = 12;
const SETVAL: u64 = 16;
const SHM_LOCK: u64 = 11;
/// `shmid64_ds`, `semid64_ds` or `msqid64_ds`, which begin with `ipc64_perm`.
type IpcState = [u32; 32];

/// A System V object, removed at the end.
struct Object {
    id: u64,
    control: i64,
}

impl Object {
    fn control(&self, command: u64, argument: u64) -> sys::Result<u64> {
        if self.control == libc::SYS_semctl {
            make(self.control, [self.id, 0, command, argument])
        } else {
            make(self.control, [self.id, command, argument])
        }
    }

    fn state(&self) -> sys::Result<IpcState> {
        let mut state = [0; 32];
        self.control(IPC_STAT, state.as_mut_ptr() as u64)?;
        Ok(std::hint::black_box(state))
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.control(libc::IPC_RMID as u64, 0);
    }
}

/// Makes a segment, a set of semaphores and a queue with this mode.
fn objects(key: u64, mode: u64) -> Result<[Object; 3], String> {
    let flags = libc::IPC_CREAT as u64 | mode;
    let make = |name, number, args: [u64; 3], control| {
        Ok::<_, String>(Object { id: doing(name, make(number, args))?, control })
    };
    Ok([
        make("shmget", libc::SYS_shmget, [key, 4096, flags], libc::SYS_shmctl)?,
        make("semget", libc::SYS_semget, [key, 2, flags], libc::SYS_semctl)?,
        make("msgget", libc::SYS_msgget, [key, flags, 0], libc::SYS_msgctl)?,
    ])
}

/// The permissions of the owner, the group and other users of System V objects.
fn ids_of_ipc() -> Verdict {
    let key = 0x5a00_0000 + proc::pid() as u64;
    let rows = [
        // Mode, the errors of reading and of writing for others.
        (0o600, EACCES, EACCES),
        (0o644, 0, EACCES),
        (0o622, EACCES, 0),
        (0o666, 0, 0),
    ];
    for (row, (mode, read, write)) in (0u64..).zip(rows) {
        let key = key + (row << 22);
        let all = objects(key, mode)?;
        let result = |number| if number == 0 { Ok(()) } else { fails(number) };
        let [read, write] = [result(read), result(write)];
        let both = read.and(write);
        as_user(|| {
            let what = format!("mode {mode:o}");
            let [segment, set, queue] = &all;
            let shmget = |mode: u64, len: u64| make(libc::SYS_shmget, [key, len, mode]).map(drop);
            same!(shmget(0, 0), Ok(()), "shmget without permissions, {what}");
            same!(shmget(0o600, 0), both, "shmget to read and write, {what}");
            same!(shmget(0o400, 0), read, "shmget to read, {what}");
            same!(shmget(0o020, 0), write, "shmget to write, {what}");
            same!(shmget(0o600, 8192), fails(EINVAL), "shmget of a longer segment, {what}");
            let exclusive = (libc::IPC_CREAT | libc::IPC_EXCL) as u64;
            same!(shmget(exclusive | 0o600, 0), fails(EEXIST), "shmget, exclusive, {what}");
            let semget = |mode: u64| make(libc::SYS_semget, [key, 0, mode]).map(drop);
            same!(semget(0o600), both, "semget, {what}");
            let msgget = |mode: u64| make(libc::SYS_msgget, [key, mode]).map(drop);
            same!(msgget(0o200), write, "msgget, {what}");
            let attach = |flags: i32| {
                let at = make(libc::SYS_shmat, [segment.id, 0, flags as u64])?;
                make(libc::SYS_shmdt, [at]).map(drop)
            };
            same!(attach(0), both, "shmat, {what}");
            same!(attach(libc::SHM_RDONLY), read, "shmat to read, {what}");
            let wanted = libc::SHM_RDONLY | libc::SHM_EXEC;
            same!(attach(wanted), fails(EACCES), "shmat to execute, {what}");
            let value = |at: u64, command: u64, value: u64| {
                make(libc::SYS_semctl, [set.id, at, command, value]).map(drop)
            };
            same!(value(0, SETVAL, 1), write, "SETVAL, {what}");
            same!(value(0, SETVAL, 40_000), fails(libc::ERANGE), "a large SETVAL, {what}");
            same!(value(7, SETVAL, 1), fails(EINVAL), "SETVAL of a missing semaphore, {what}");
            same!(value(0, GETVAL, 0), read, "GETVAL, {what}");
            same!(
                value(7, GETVAL, 0),
                read.and(fails(EINVAL)),
                "GETVAL of a missing semaphore, {what}"
            );
            let semop = |sem_num: u16, sem_op: i16| {
                let sem_flg = libc::IPC_NOWAIT as i16;
                let change = libc::sembuf { sem_num, sem_op, sem_flg };
                make(libc::SYS_semop, [set.id, (&raw const change) as u64, 1]).map(drop)
            };
            same!(semop(1, 1), write, "semop, {what}");
            same!(semop(0, 0).err() == Some(Errno(EACCES)), read.is_err(), "semop for 0, {what}");
            same!(semop(7, 1), fails(libc::EFBIG), "semop of a missing semaphore, {what}");
            let message = [1u64, 2];
            let at = message.as_ptr() as u64;
            let flags = libc::IPC_NOWAIT as u64;
            same!(make(libc::SYS_msgsnd, [queue.id, at, 8, flags]).map(drop), write, "msgsnd");
            let mut got = [0u64; 2];
            let to = got.as_mut_ptr() as u64;
            let empty = if write.is_ok() { Ok(()) } else { fails(libc::ENOMSG) };
            let received = make(libc::SYS_msgrcv, [queue.id, to, 8, 0, flags]).map(drop);
            same!(received, read.and(empty), "msgrcv, {what}");
            for object in &all {
                let kind = object.control;
                same!(object.state().map(drop), read, "IPC_STAT, {what}, of {kind}");
                let state = [0u32; 32];
                let set = object.control(IPC_SET, state.as_ptr() as u64);
                same!(set, fails(EPERM), "IPC_SET, {what}, of {kind}");
                let removed = object.control(libc::IPC_RMID as u64, 0);
                same!(removed, fails(EPERM), "IPC_RMID, {what}, of {kind}");
            }
            same!(segment.control(SHM_LOCK, 0), fails(EPERM), "SHM_LOCK, {what}");
            Ok(())
        })?;
    }
    // The group, and an object of the user that gets another owner.
    let all = objects(libc::IPC_PRIVATE as u64, 0o640)?;
    for object in &all {
        let mut state = doing("IPC_STAT", object.state())?;
        same!(state[1..5], [0; 4], "owner and creator");
        state[2] = GROUP as u32;
        doing("IPC_SET", object.control(IPC_SET, state.as_ptr() as u64))?;
    }
    as_user(|| {
        for object in &all {
            same!(object.state().map(|state| state[2]), Ok(GROUP as u32), "IPC_STAT by the group");
        }
        same!(
            make(libc::SYS_shmat, [all[0].id, 0, 0]).map(drop),
            fails(EACCES),
            "shmat by the group"
        );
        for object in objects(libc::IPC_PRIVATE as u64, 0o600)? {
            let user = USER as u32;
            let mut state = doing("IPC_STAT", object.state())?;
            same!(state[1..5], [user; 4], "owner and creator");
            (state[1], state[5]) = (77, 0o600);
            let set = object.control(IPC_SET, state.as_ptr() as u64);
            same!(set.map(drop), Ok(()), "IPC_SET of the user's object, {}", object.control);
            let now = object.state().map(|state| [state[1], state[3]]);
            same!(now, Ok([77, user]), "the new owner and the creator");
            let removed = object.control(libc::IPC_RMID as u64, 0);
            same!(removed.map(drop), Ok(()), "IPC_RMID by the creator");
        }
        Ok(())
    })
}

/// `kill(-1, signal)` reaches the processes of the user.
fn signals_to_all() -> Verdict {
    let kill = |signal: i32| make(libc::SYS_kill, [-1i64 as u64, signal as u64]);
    as_user(|| {
        same!(kill(0), Ok(0), "signal 0, without another process of the user");
        same!(kill(libc::SIGTERM), Ok(0), "SIGTERM, without another process of the user");
        same!(kill(99), fails(EINVAL), "a signal that does not exist");
        same!(make(libc::SYS_kill, [i64::from(i32::MIN) as u64, 0]), fails(ESRCH), "no group");
        let child = doing(
            "fork",
            fork(|| {
                clock::sleep_ms(30_000);
                0
            }),
        )?;
        same!(kill(libc::SIGTERM), Ok(0), "SIGTERM");
        same!(child.wait(), Ok(Status::Killed(libc::SIGTERM)), "the child");
        Ok(())
    })
}

/// The errors of setting times and owners.
fn times_and_owners() -> Verdict {
    const NOW: i64 = libc::UTIME_NOW;
    const OMIT: i64 = libc::UTIME_OMIT;
    let dir = Dir::new("times", 0o755)?;
    let closed = dir.entry("closed", false, 0, 0o644)?;
    let open = dir.entry("open", false, 0, 0o666)?;
    let set_id = dir.entry("set_id", false, 0, 0o4755)?;
    let own = dir.entry("own", false, USER, 0o444)?;
    as_user(|| {
        let set = |path: &Path, parts: Option<[i64; 2]>| {
            let times = parts.map(|[a, b]| [[1i64, a], [1, b]]);
            let at = times.as_ref().map_or(0, |times| times.as_ptr() as u64);
            let path = text(path)?;
            let args = [libc::AT_FDCWD as u64, path.as_ptr() as u64, at, 0];
            Ok::<_, String>(make(libc::SYS_utimensat, args))
        };
        let rows = [
            // Times; the errors for a file that is closed, open, and the user's.
            (None, EACCES, 0, 0),
            (Some([NOW, NOW]), EACCES, 0, 0),
            (Some([NOW, OMIT]), EPERM, EPERM, 0),
            (Some([OMIT, NOW]), EPERM, EPERM, 0),
            (Some([OMIT, OMIT]), 0, 0, 0),
            (Some([0, NOW]), EPERM, EPERM, 0),
            (Some([0, OMIT]), EPERM, EPERM, 0),
            (Some([5, 5]), EPERM, EPERM, 0),
            (Some([-1, 0]), EINVAL, EINVAL, EINVAL),
            (Some([NOW, 1_000_000_000]), EINVAL, EINVAL, EINVAL),
            (Some([OMIT, 1_000_000_000]), EINVAL, EINVAL, EINVAL),
        ];
        for (times, of_closed, of_open, of_own) in rows {
            for (path, error) in [(&closed, of_closed), (&open, of_open), (&own, of_own)] {
                let expected = if error == 0 { Ok(0) } else { fails(error) };
                same!(set(path, times)?, expected, "{times:?} of {path:?}");
            }
        }
        let none = dir.0.join("none");
        same!(set(&none, Some([OMIT, OMIT]))?, Ok(0), "two unchanged times, of a missing file");
        same!(set(&none, Some([OMIT, NOW]))?, fails(ENOENT), "a time of a missing file");
        same!(set(&none, Some([-1, NOW]))?, fails(ENOENT), "a wrong time of a missing file");
        let chown = |path: &Path, user: i64, group: i64| {
            let path = text(path)?;
            let args = [path.as_ptr() as u64, user as u64, group as u64];
            Ok::<_, String>(make(libc::SYS_chown, args))
        };
        same!(chown(&closed, -1, -1)?, Ok(0), "an unchanged owner and group");
        same!(chown(&set_id, -1, -1)?, fails(EPERM), "the same, of a set-user-ID file");
        same!(chown(&closed, 0, -1)?, fails(EPERM), "the same owner");
        same!(chown(&closed, -1, 0)?, fails(EPERM), "the same group");
        same!(chown(&own, USER as i64, -1)?, Ok(0), "the user's file, the same owner");
        same!(chown(&own, -1, GROUP as i64)?, Ok(0), "the user's file, a group of the user");
        same!(chown(&own, -1, -1)?, Ok(0), "the user's file, no change");
        Ok(())
    })?;
    let mode = |path: &Path| io(fs::metadata(path)).map(|meta| meta.mode() & 0o7777);
    same!(mode(&set_id)?, 0o4755, "the mode of the set-user-ID file");
    // A new owner of a file does not inherit its set-ID bits.
    for (set, left, is_dir) in [
        (0o4755, 0o755, false),
        (0o2755, 0o755, false),
        (0o2644, 0o2644, false),
        (0o7777, 0o1777, false),
        (0o6755, 0o6755, true),
    ] {
        let path = dir.entry(&format!("{set:o}{is_dir}"), is_dir, 0, set)?;
        io(chown(&path, Some(USER as u32), None))?;
        same!(mode(&path)?, left, "the mode {set:o} after chown, directory: {is_dir}");
    }
    Ok(())
}

/// The checks and the change of owner and mode are one step.
fn owners_beside_modes() -> Verdict {
    let dir = Dir::new("owners", 0o755)?;
    let path = dir.entry("file", false, USER, 0o600)?;
    let ended = doing("mmap", Shared::new(AtomicBool::new(false)))?;
    let users = [(); 3].map(|()| {
        fork(|| {
            let Ok(path) = text(&path) else { return 1 };
            let became = become_user();
            while !ended.load(Ordering::Relaxed) {
                // The file may be root's.
                let _ = make(libc::SYS_chmod, [path.as_ptr() as u64, 0o777]);
            }
            i32::from(became.is_err())
        })
    });
    let rounds = (0..10_000).try_for_each(|round| {
        io(chown(&path, Some(0), Some(0)))?;
        io(fs::set_permissions(&path, Permissions::from_mode(0o600)))?;
        for _ in 0..3 {
            let mode = io(fs::metadata(&path))?.mode() & 0o7777;
            same!(mode, 0o600, "the mode of root's file in round {round}");
        }
        io(chown(&path, Some(USER as u32), None))
    });
    ended.store(true, Ordering::Relaxed);
    for user in users {
        same!(doing("fork", user)?.wait(), Ok(Status::Exited(0)), "a process of the user");
    }
    rounds
}

/// In a sticky directory, a user cannot remove root's file that replaces the user's file during the
/// call.
fn sticky_directories() -> Verdict {
    let dir = Dir::new("sticky", 0o1777)?;
    let (ended, name) = (doing("mmap", Shared::new(AtomicBool::new(false)))?, dir.0.join("name"));
    let user = doing(
        "fork",
        fork(|| {
            let Ok(path) = text(&name) else { return 1 };
            let became = become_user();
            while !ended.load(Ordering::Relaxed) {
                for number in [libc::SYS_unlink, libc::SYS_rmdir] {
                    // The name may be root's, or gone.
                    let _ = make(number, [path.as_ptr() as u64]);
                }
            }
            i32::from(became.is_err())
        }),
    )?;
    let rounds = (0..8_000).try_for_each(|round| {
        let is_dir = round % 2 == 1;
        let users = dir.entry("users", is_dir, USER, 0o755)?;
        let roots = dir.entry("roots", is_dir, 0, 0o755)?;
        io(fs::rename(&users, &name))?;
        io(fs::rename(&roots, &name))?;
        let removed = if is_dir { fs::remove_dir(&name) } else { fs::remove_file(&name) };
        removed.map_err(|error| format!("root's name in round {round}: {error}"))
    });
    ended.store(true, Ordering::Relaxed);
    same!(user.wait(), Ok(Status::Exited(0)), "the user's process");
    rounds
}

/// A process that was root may use its own descriptors in `/proc`, and sees no frame numbers.
fn own_descriptors() -> Verdict {
    let region = doing("mmap", Region::anonymous(PAGE))?;
    region.store(0, 1);
    let entry = || {
        let file = io(fs::File::open("/proc/self/pagemap"))?;
        let mut entry = [0u8; 8];
        io(file.read_exact_at(&mut entry, region.start() / PAGE * 8))?;
        Ok::<_, String>(u64::from_le_bytes(entry))
    };
    const PRESENT: u64 = 1 << 63;
    const NUMBER: u64 = (1 << 55) - 1;
    same!(entry()? & PRESENT, PRESENT, "the page is present, root");
    ensure!(entry()? & NUMBER != 0, "root sees no frame number");
    as_user(|| {
        let opened = io(fs::read_dir("/proc/self/fd"))?.count();
        ensure!(opened >= 3, "{opened} descriptors");
        io(fs::symlink_metadata("/proc/self/fd/0"))?;
        same!(access("/proc/self/fd", 5)?, Ok(0), "access to /proc/self/fd");
        for name in ["environ", "pagemap"] {
            let opened = fs::File::open(format!("/proc/self/{name}"));
            let error = opened.err().and_then(|error| error.raw_os_error());
            same!(error, Some(EACCES), "opening {name} of a process that was root");
        }
        let parent = format!("/proc/{}/fd", parent());
        let error = fs::read_dir(parent).err().and_then(|error| error.raw_os_error());
        same!(error, Some(EACCES), "the descriptors of the parent, which is root");
        doing("prctl", make(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0, 0]))?;
        region.store(0, 2);
        same!(entry()? & (PRESENT | NUMBER), PRESENT, "the page is present, without its number");
        Ok(())
    })
}

fn access(path: &str, wanted: u64) -> Result<sys::Result<u64>, String> {
    let path = text(Path::new(path))?;
    Ok(make(libc::SYS_access, [path.as_ptr() as u64, wanted]))
}

fn parent() -> i32 {
    // SAFETY: a plain call.
    unsafe { libc::getppid() }
}

/// The capabilities for files follow the user id for files.
fn ids_for_files() -> Verdict {
    let dir = Dir::new("fsuid", 0o777)?;
    let roots = dir.entry("roots", false, 0, 0o666)?;
    let own = dir.entry("own", false, USER, 0o6755)?;
    let set_id = dir.entry("set_id", false, 0, 0o4777)?;
    let device = dir.0.join("device");
    let set = |id: u64| make(libc::SYS_setfsuid, [id]);
    same!(set(USER), Ok(0), "setfsuid");
    let [first, second, third] = [text(&roots)?, text(&own)?, text(&device)?];
    let chown =
        |path: &CString, user: u64| make(libc::SYS_chown, [path.as_ptr() as u64, user, user]);
    same!(chown(&first, 0), fails(EPERM), "chown of root's file");
    same!(chown(&second, 77), fails(EPERM), "chown of the own file");
    let chmod = make(libc::SYS_chmod, [first.as_ptr() as u64, 0o600]);
    same!(chmod, fails(EPERM), "chmod of root's file");
    let mode = u64::from(libc::S_IFCHR | 0o600);
    let mknod = || make(libc::SYS_mknod, [third.as_ptr() as u64, mode, 0x103]);
    same!(mknod(), fails(EPERM), "mknod of a device");
    io(fs::OpenOptions::new().write(true).open(&set_id).and_then(|mut file| file.write_all(b"x")))?;
    same!(io(fs::metadata(&set_id))?.mode() & 0o7777, 0o777, "the mode after a write");
    same!(set(0), Ok(USER), "setfsuid back");
    same!(chown(&second, 77), Ok(0), "chown of the own file, root");
    same!(mknod(), Ok(0), "mknod of a device, root");
    Ok(())
}

/// A user may only lower a hard limit.
fn hard_limits() -> Verdict {
    as_user(|| {
        let set = |new: [u64; 2]| {
            let mut old = [0u64; 2];
            let core = u64::from(libc::RLIMIT_CORE);
            let args = [0, core, new.as_ptr() as u64, old.as_mut_ptr() as u64];
            make(libc::SYS_prlimit64, args).map(|_| std::hint::black_box(old))
        };
        doing("prlimit", set([2, 5]))?;
        same!(set([6, 5]), fails(EINVAL), "a soft limit above the hard limit");
        same!(set([6, 6]), fails(EPERM), "a higher hard limit");
        same!(set([5, 5]), Ok([2, 5]), "a higher soft limit");
        same!(set([0, 4]), Ok([5, 5]), "a lower hard limit");
        same!(set([0, 5]), fails(EPERM), "the hard limit before");
        Ok(())
    })
}

/// A nice value within `RLIMIT_NICE` needs no privilege; leaving `SCHED_IDLE` needs the permission
/// to set the present nice value.
fn nice_values() -> Verdict {
    const IDLE: u64 = libc::SCHED_IDLE as u64;
    let limit = |most: u64| {
        let limit = [most, 40];
        let args = [0, u64::from(libc::RLIMIT_NICE), limit.as_ptr() as u64, 0];
        doing("prlimit", make(libc::SYS_prlimit64, args))
    };
    let set = |policy: u64, nice: i32| {
        let words = [48 | policy << 32, 0, u64::from(nice as u32), 0, 0, 0];
        make(libc::SYS_sched_setattr, [0, words.as_ptr() as u64, 0])
    };
    let setpriority = |nice: i32| make(libc::SYS_setpriority, [0, 0, nice as u64]);
    if limit(0).is_err() {
        println!("# CAP_SYS_RESOURCE is missing");
        return Ok(());
    }
    as_user(|| {
        same!(setpriority(5), Ok(0), "a larger nice value");
        same!(setpriority(4), fails(EACCES), "a smaller nice value without a limit");
        limit(17)?;
        same!(setpriority(3), Ok(0), "the smallest nice value of the limit");
        same!(setpriority(2), fails(EACCES), "a nice value below the limit");
        same!(set(0, 2), fails(EPERM), "the same by sched_setattr");
        same!(set(0, 4), Ok(0), "a larger nice value by sched_setattr");
        same!(set(0, 3), Ok(0), "the smallest nice value by sched_setattr");
        same!(set(IDLE, 0), Ok(0), "SCHED_IDLE");
        limit(1)?;
        same!(set(0, 19), fails(EPERM), "leaving SCHED_IDLE with a larger nice value");
        limit(17)?;
        same!(set(0, 19), Ok(0), "leaving SCHED_IDLE with the permission for the present value");
        Ok(())
    })
}

/// A user may leave `SCHED_IDLE` only if it could set the nice value.
fn idle_policy() -> Verdict {
    let zero = 0i32;
    let at = (&raw const zero) as u64;
    let set = |policy: i32| make(libc::SYS_sched_setscheduler, [0, policy as u64, at]);
    const RESET: i32 = 0x4000_0000;
    same!(set(libc::SCHED_IDLE), Ok(0), "SCHED_IDLE, root");
    same!(set(libc::SCHED_OTHER), Ok(0), "SCHED_OTHER after SCHED_IDLE, root");
    as_user(|| {
        same!(set(libc::SCHED_BATCH), Ok(0), "SCHED_BATCH");
        same!(set(libc::SCHED_OTHER), Ok(0), "SCHED_OTHER after the change");
        same!(set(libc::SCHED_IDLE), Ok(0), "SCHED_IDLE");
        same!(set(libc::SCHED_IDLE), Ok(0), "SCHED_IDLE again");
        same!(set(libc::SCHED_OTHER), fails(EPERM), "SCHED_OTHER after the change");
        same!(set(libc::SCHED_BATCH), fails(EPERM), "SCHED_BATCH after the change");
        same!(set(libc::SCHED_FIFO), fails(EINVAL), "SCHED_FIFO without a priority");
        same!(set(libc::SCHED_IDLE | RESET), Ok(0), "SCHED_RESET_ON_FORK");
        same!(set(libc::SCHED_IDLE), fails(EPERM), "SCHED_IDLE without SCHED_RESET_ON_FORK");
        same!(make(libc::SYS_sched_getscheduler, [0]), Ok(5 | RESET as u64), "the policy");
        Ok(())
    })
}

const CHECKS: &[Check] = &[
    ("moving_directories", moving_directories),
    ("ids_of_ipc", ids_of_ipc),
    ("signals_to_all", signals_to_all),
    ("times_and_owners", times_and_owners),
    ("owners_beside_modes", owners_beside_modes),
    ("sticky_directories", sticky_directories),
    ("own_descriptors", own_descriptors),
    ("ids_for_files", ids_for_files),
    ("hard_limits", hard_limits),
    ("nice_values", nice_values),
    ("idle_policy", idle_policy),
];

fn main() {
    std::process::exit(check::run(&Args::read("rights", &[]), CHECKS));
}
