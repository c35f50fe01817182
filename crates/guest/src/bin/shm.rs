//! `shm [CHECK…]`: System V's shared memory.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{PAGE, Region, load, store};
use faultless_guest::proc::{self, Status, exit_now, fork, outcome, pid};
use faultless_guest::sys::{self, Errno, call, checked, doing};
use faultless_guest::{check, ensure, procfs, same};
use libc::{EACCES, EEXIST, EFAULT, EINVAL, ENOENT};
use std::ffi::CString;

/// A segment; dropping the value removes the segment.
struct Segment {
    id: u64,
}

/// The result of a rejected call.
const fn refused<T>(errno: i32) -> sys::Result<T> {
    Err(Errno(errno))
}

fn get(key: i32, bytes: u64, flags: i32) -> sys::Result<u64> {
    // SAFETY: the call changes no memory.
    unsafe { call(libc::SYS_shmget, [key as u64, bytes, flags as u64]) }
}

/// Calls `shmat`; an address must not contain Rust objects.
fn attach(id: u64, addr: u64, flags: i32) -> sys::Result<u64> {
    // SAFETY: by the caller's care.
    unsafe { call(libc::SYS_shmat, [id, addr, flags as u64]) }
}

fn detach(addr: u64) -> sys::Result<u64> {
    // SAFETY: only attachments are detached, which contain no Rust objects.
    unsafe { call(libc::SYS_shmdt, [addr]) }
}

fn control(id: u64, command: i32, buffer: u64) -> sys::Result<u64> {
    // SAFETY: the buffer, if any, has the size of the command.
    unsafe { call(libc::SYS_shmctl, [id, command as u64, buffer]) }
}

fn state(id: u64) -> sys::Result<libc::shmid_ds> {
    // SAFETY: zeros are a value, the pointer is to a local.
    unsafe {
        let mut state: libc::shmid_ds = std::mem::zeroed();
        control(id, libc::IPC_STAT, (&raw mut state) as u64)?;
        Ok(state)
    }
}

impl Segment {
    fn new(bytes: u64) -> Result<Self, String> {
        let id = doing("shmget", get(libc::IPC_PRIVATE, bytes, libc::IPC_CREAT | 0o600))?;
        Ok(Self { id })
    }

    fn attach(&self) -> Result<u64, String> {
        doing("shmat", attach(self.id, 0, 0))
    }

    fn attachments(&self) -> sys::Result<u64> {
        state(self.id).map(|state| state.shm_nattch)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // The segment may already be removed.
        let _ = control(self.id, libc::IPC_RMID, 0);
    }
}

fn bytes_at(addr: u64) -> u64 {
    load(addr)
}

fn put(addr: u64, value: u64) {
    // SAFETY: attachments contain no Rust objects.
    unsafe { store(addr, value) }
}

/// Unmaps a part of an attachment.
fn unmap(addr: u64, len: u64) -> sys::Result<u64> {
    // SAFETY: attachments contain no Rust objects.
    unsafe { call(libc::SYS_munmap, [addr, len]) }
}

/// Returns an unused key.
fn new_key() -> i32 {
    0x4661_0000 ^ pid()
}

/// Finding segments by key, and the errors of `shmget`.
fn keys() -> Verdict {
    let key = new_key();
    let (create, exclusive) = (libc::IPC_CREAT, libc::IPC_EXCL);
    same!(get(key, PAGE, 0o600), refused(ENOENT), "no segment yet");
    same!(get(key, 0, create), refused(EINVAL), "no bytes");
    same!(get(libc::IPC_PRIVATE, 0, create), refused(EINVAL), "no bytes, without a key");
    same!(get(key, u64::MAX, create), refused(EINVAL), "too many bytes");
    let one = Segment { id: doing("shmget", get(key, 5000, create | exclusive | 0o640))? };
    same!(get(key, 5000, create), Ok(one.id), "the same key");
    same!(get(key, 0, 0), Ok(one.id), "the same key, any length");
    same!(get(key, 5001, 0), refused(EINVAL), "a length above the segment's");
    same!(get(key, 1, create | exclusive), refused(EEXIST), "the same key again");
    let other = Segment::new(PAGE)?;
    ensure!(other.id != one.id, "a private segment has the identifier of a key");
    let status = doing("IPC_STAT", state(one.id))?;
    same!(status.shm_segsz, 5000, "the length");
    same!(status.shm_perm.__key, key, "the key");
    same!(status.shm_perm.mode & 0o7777, 0o640, "the mode");
    same!(status.shm_cpid, pid(), "the creator");
    same!((status.shm_atime, status.shm_dtime, status.shm_lpid), (0, 0, 0), "not used yet");
    ensure!(status.shm_ctime > 0, "no time of creation");
    doing("IPC_RMID", control(one.id, libc::IPC_RMID, 0))?;
    same!(get(key, 1, 0), refused(ENOENT), "the key of a removed segment");
    same!(state(one.id).map(|_| ()), refused(EINVAL), "IPC_STAT of a removed segment");
    same!(attach(one.id, 0, 0), refused(EINVAL), "shmat of a removed segment");
    same!(control(one.id, libc::IPC_RMID, 0), refused(EINVAL), "removed twice");
    let again = Segment { id: doing("shmget", get(key, PAGE, create | 0o600))? };
    ensure!(again.id != one.id, "an identifier was reused immediately");
    let path = CString::new("/proc/self/exe").map_err(|error| error.to_string())?;
    // SAFETY: the string lives.
    let made = doing("ftok", checked(unsafe { libc::ftok(path.as_ptr(), 7) }))?;
    same!(made >> 24, 7, "the top of a key of ftok");
    Ok(())
}

/// The addresses of attachments, and the errors of `shmat` and `shmdt`.
fn places() -> Verdict {
    let segment = Segment::new(3 * PAGE - 100)?;
    let at = segment.attach()?;
    same!(at % PAGE, 0, "the place");
    put(at + 3 * PAGE - 8, 5);
    let other = segment.attach()?;
    same!(bytes_at(other + 3 * PAGE - 8), 5, "the value stored through the other attachment");
    same!(bytes_at(other), 0, "an untouched word");
    doing("shmdt", detach(other))?;
    same!(detach(other), refused(EINVAL), "shmdt twice");
    same!(detach(at + PAGE), refused(EINVAL), "shmdt in the middle");
    same!(detach(at + 1), refused(EINVAL), "shmdt of no page");

    // An address without Rust objects: in place of a region.
    let room = doing("mmap", Region::anonymous(8 * PAGE))?;
    let addr = room.start();
    same!(attach(segment.id, addr, 0), refused(EINVAL), "shmat over a mapping");
    same!(attach(segment.id, addr + 8, libc::SHM_REMAP), refused(EINVAL), "unaligned");
    same!(attach(segment.id, 0, libc::SHM_REMAP), refused(EINVAL), "SHM_REMAP without an address");
    same!(attach(u64::from(u32::MAX), 0, 0), refused(EINVAL), "no segment");
    same!(
        attach(segment.id + (1 << 15), 0, 0),
        refused(EINVAL),
        "another use of the address range"
    );
    room.store(0, 9);
    room.store(3 * PAGE, 9);
    same!(attach(segment.id, addr, libc::SHM_REMAP), Ok(addr), "SHM_REMAP");
    same!(room.load(0), 0, "the page that SHM_REMAP replaced");
    same!(room.load(3 * PAGE), 9, "the page after the segment");
    same!(room.load(3 * PAGE - 8), 5, "the segment");
    doing("shmdt", detach(addr))?;
    same!(attach(segment.id, addr + 100, libc::SHM_RND), Ok(addr), "SHM_RND");
    doing("shmdt", detach(addr))?;
    same!(attach(segment.id, addr, 0), Ok(addr), "shmat to an address that was unmapped");

    let maps = procfs::text("/proc/self/maps")?;
    let line = maps.lines().find(|line| line.starts_with(&format!("{addr:08x}-")));
    let line = line.ok_or("an attachment is not in /proc/self/maps")?;
    ensure!(line.contains("rw-s"), "{line}");
    ensure!(line.ends_with("/SYSV00000000 (deleted)"), "{line}");
    same!(line.split_whitespace().nth(4), Some(&*segment.id.to_string()), "the inode of {line:?}");
    Ok(())
}

/// A read-only attachment stays read-only.
fn read_only() -> Verdict {
    let segment = Segment::new(PAGE)?;
    let at = segment.attach()?;
    put(at, 7);
    let other = doing("shmat", attach(segment.id, 0, libc::SHM_RDONLY))?;
    same!(bytes_at(other), 7, "the stored value");
    let stores = || {
        put(other, 8);
        0
    };
    same!(outcome(stores)?, Status::Killed(libc::SIGSEGV), "a store");
    // SAFETY: an attachment, which contains no Rust objects.
    let protected = unsafe { call(libc::SYS_mprotect, [other, PAGE, 3]) };
    same!(protected, refused(EACCES), "mprotect");
    // SAFETY: as above.
    let remapped = unsafe { call(libc::SYS_remap_file_pages, [other, PAGE, 0, 0, 0]) };
    same!(remapped, refused(libc::EINVAL), "remap_file_pages");
    same!(bytes_at(at), 7, "the earlier value");
    Ok(())
}

/// Attachments are locked, and so resident, after `mlockall(MCL_FUTURE)`.
fn locked_in_future() -> Verdict {
    let segment = Segment::new(2 * PAGE)?;
    let ended = outcome(|| {
        // SAFETY: the call changes no memory of the program.
        if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
            return 1;
        }
        let Ok(at) = attach(segment.id, 0, 0) else { return 2 };
        let mut resident = [0; 2];
        let len = 2 * PAGE as usize;
        // SAFETY: the array has a byte for each page of the attachment.
        let asked = unsafe { libc::mincore(at as *mut _, len, resident.as_mut_ptr()) };
        if asked != 0 { 3 } else { i32::from(resident != [1, 1]) * 4 }
    })?;
    same!(ended, Status::Exited(0), "a process that locks its future mappings");
    Ok(())
}

/// The number of attachments: after `fork`, `execve`, ends of processes, and `munmap` of parts.
fn attachments() -> Verdict {
    let segment = Segment::new(8 * PAGE)?;
    let count = |what: &str| doing(what, segment.attachments());
    same!(count("IPC_STAT")?, 0, "not attached");
    let at = segment.attach()?;
    let other = segment.attach()?;
    same!(count("IPC_STAT")?, 2, "attached twice");
    let status = doing("IPC_STAT", state(segment.id))?;
    ensure!(status.shm_atime > 0, "attached at no time");
    same!(status.shm_lpid, pid(), "the last process to attach");

    let child = |body: &dyn Fn() -> i32| match outcome(body) {
        Ok(Status::Exited(count)) => Ok(count as u64),
        other => Err(format!("a child ended with {other:?}")),
    };
    let counted = || segment.attachments().map_or(99, |count| count as i32);
    same!(child(&counted)?, 4, "attachments in a forked child");
    same!(count("IPC_STAT")?, 2, "attachments after the end of the child");
    let detached = || detach(other).map_or(98, |_| counted());
    same!(child(&detached)?, 3, "attachments in a child that detached one");
    let killed = doing(
        "fork",
        fork(|| {
            loop {
                std::hint::spin_loop();
            }
        }),
    )?;
    same!(count("IPC_STAT")?, 4, "attachments while a child runs");
    doing("kill", killed.signal(libc::SIGKILL))?;
    doing("wait4", killed.wait())?;
    same!(count("IPC_STAT")?, 2, "attachments after the kill of the child");
    // The program after `execve` has no attachment; it counts and exits.
    let again = || {
        let program = CString::new(
            std::env::current_exe().unwrap_or_default().as_os_str().as_encoded_bytes(),
        );
        let (Ok(program), Ok(id)) = (program, CString::new(format!("count={}", segment.id))) else {
            return 97;
        };
        let arguments = [program.as_ptr(), id.as_ptr(), std::ptr::null()];
        // SAFETY: strings that live, and the terminating null.
        unsafe { libc::execv(program.as_ptr(), arguments.as_ptr()) };
        exit_now(96)
    };
    same!(child(&again)?, 2, "attachments in another program");

    doing("munmap", unmap(at + 3 * PAGE, PAGE))?;
    same!(count("IPC_STAT")?, 3, "attachments after a page of one was unmapped");
    doing("munmap", unmap(at, PAGE))?;
    same!(count("IPC_STAT")?, 3, "attachments after the first page was unmapped");
    put(other + PAGE, 6);
    same!(bytes_at(at + PAGE), 6, "the remaining page");
    // The parts lie at the same offsets as in the whole attachment.
    doing("shmdt", detach(at))?;
    same!(count("IPC_STAT")?, 1, "attachments after all parts of one were detached");
    doing("munmap", unmap(other, 8 * PAGE))?;
    same!(count("IPC_STAT")?, 0, "attachments after the other was unmapped");
    let third = segment.attach()?;
    same!(bytes_at(third + PAGE), 6, "the value stored before");
    Ok(())
}

/// A removed segment is freed with its last attachment, and not before.
fn removal() -> Verdict {
    let key = new_key();
    let id = doing("shmget", get(key, 4 * PAGE, libc::IPC_CREAT | 0o600))?;
    let segment = Segment { id };
    let at = segment.attach()?;
    put(at, 1);
    doing("IPC_RMID", control(id, libc::IPC_RMID, 0))?;
    same!(get(key, 1, 0), refused(ENOENT), "the key of the removed segment");
    let status = doing("IPC_STAT of a segment under removal", state(id))?;
    same!(status.shm_perm.mode & 0o1777, 0o1600, "the mode of a segment under removal");
    same!((status.shm_nattch, status.shm_perm.__key), (1, 0), "the attachments and the key");
    let other = segment.attach()?;
    same!(bytes_at(other), 1, "a segment under removal, attached again");
    doing("a second IPC_RMID", control(id, libc::IPC_RMID, 0))?;
    doing("shmdt", detach(at))?;
    same!(segment.attachments(), Ok(1), "the remaining attachments");
    put(other, 2);
    let child = outcome(|| {
        let one = bytes_at(other) == 2 && segment.attachments() == Ok(2);
        i32::from(!one)
    });
    same!(child?, Status::Exited(0), "the segment in a child");
    doing("shmdt", detach(other))?;
    same!(state(id).map(|_| ()), refused(EINVAL), "IPC_STAT after the last detach");
    same!(attach(id, 0, 0), refused(EINVAL), "shmat after the last detach");
    // Only the ends of the processes remove these attachments.
    for _ in 0..200 {
        let gone = Segment::new(64 * PAGE)?;
        let at = gone.attach()?;
        doing("IPC_RMID", control(gone.id, libc::IPC_RMID, 0))?;
        put(at, 1);
        if gone.id % 2 == 0 {
            doing("shmdt", detach(at))?;
        } else {
            doing("munmap", unmap(at, 64 * PAGE))?;
        }
        same!(
            state(gone.id).map(|_| ()),
            refused(EINVAL),
            "attachments after the end of the child"
        );
    }
    Ok(())
}

/// The other commands of `shmctl`.
fn commands() -> Verdict {
    const SHM_INFO: i32 = 14;
    const SHM_STAT: i32 = 13;
    let segment = Segment::new(2 * PAGE)?;
    let mut status = doing("IPC_STAT", state(segment.id))?;
    (status.shm_perm.uid, status.shm_perm.mode) = (12, 0o7444);
    doing("IPC_SET", control(segment.id, libc::IPC_SET, (&raw mut status) as u64))?;
    let now = doing("IPC_STAT", state(segment.id))?;
    same!((now.shm_perm.uid, now.shm_perm.mode), (12, 0o444), "the values of IPC_SET");
    same!(now.shm_perm.cuid, status.shm_perm.cuid, "the creator");
    doing("SHM_LOCK", control(segment.id, 11, 0))?;
    let locked = doing("IPC_STAT", state(segment.id))?;
    same!(locked.shm_perm.mode, 0o2444, "the mode when locked");
    doing("SHM_UNLOCK", control(segment.id, 12, 0))?;
    let mut info = [0u64; 9];
    let last = doing("IPC_INFO", control(0, libc::IPC_INFO, info.as_mut_ptr() as u64))?;
    same!(info[1..3], [1, 4096], "the least length and the limit of segments");
    let mut all = [0u64; 6];
    doing("SHM_INFO", control(0, SHM_INFO, all.as_mut_ptr() as u64))?;
    ensure!(all[0] as u32 >= 1 && all[1] >= 2, "SHM_INFO: {all:?}");
    // SAFETY: zeros are a value.
    let mut place: libc::shmid_ds = unsafe { std::mem::zeroed() };
    let buffer = (&raw mut place) as u64;
    let found = (0..=last).any(|at| control(at, SHM_STAT, buffer) == Ok(segment.id));
    ensure!(found, "SHM_STAT does not find the segment up to {last}");
    same!(control(segment.id, 99, 0), refused(EINVAL), "no command");
    same!(control(u64::MAX, libc::IPC_STAT, buffer), refused(EINVAL), "no segment");
    same!(control(segment.id, libc::IPC_STAT, 1), refused(EFAULT), "no buffer");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("keys", keys),
    ("places", places),
    ("read_only", read_only),
    ("locked_in_future", locked_in_future),
    ("attachments", attachments),
    ("removal", removal),
    ("commands", commands),
];

fn main() {
    let args = Args::read("shm", &["count"]);
    if let Some(id) = args.text("count") {
        let count = id.parse().map(|id| state(id).map_or(95, |state| state.shm_nattch as i32));
        std::process::exit(count.unwrap_or(94));
    }
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
