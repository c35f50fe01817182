//! `memory [CHECK…]`: memory calls other than mapping: locking memory, rearranging pages, and
//! accessing the memory of other processes.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{NONE, PAGE, READ, Region, WRITE};
use faultless_guest::proc::{self, Status, fork, outcome, pid};
use faultless_guest::sys::{self, Errno, call, checked, doing};
use faultless_guest::{check, ensure, procfs, same, signal};
use libc::{EBUSY, EFAULT, EINVAL, EIO, ENOMEM, ESRCH};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::Acquire;

/// The result of a rejected call.
const fn refused<T>(errno: i32) -> sys::Result<T> {
    Err(Errno(errno))
}

/// Returns the present pages of a region.
fn in_core(region: &Region) -> Result<Vec<bool>, String> {
    doing("mincore", region.in_core())
}

/// A call to lock or unlock.
fn lock(number: i64, addr: u64, len: u64, flags: u64) -> sys::Result<u64> {
    // SAFETY: the call has no effect visible to a program.
    unsafe { call(number, [addr, len, flags]) }
}

/// `mlock` and `mlock2` fault pages in, `munlock` changes no page, and unmapped memory is an error.
fn locking() -> Verdict {
    let region = doing("mmap", Region::anonymous(8 * PAGE))?;
    let at = |page: u64| region.start() + page * PAGE;
    doing("mlock", lock(libc::SYS_mlock, at(1) + 5, PAGE, 0))?;
    let there = [false, true, true, false, false, false, false, false];
    same!(in_core(&region)?, there, "pages after mlock");
    doing("munlock", lock(libc::SYS_munlock, at(1), 7 * PAGE, 0))?;
    same!(in_core(&region)?, there, "pages after munlock");
    doing("mlock2", lock(libc::SYS_mlock2, at(4), PAGE, 1))?;
    ensure!(!in_core(&region)?[4], "MLOCK_ONFAULT faulted in");
    doing("mlock2", lock(libc::SYS_mlock2, at(4), PAGE, 0))?;
    ensure!(in_core(&region)?[4], "mlock2 did not fault in");
    same!(lock(libc::SYS_mlock2, at(4), PAGE, 2), refused(EINVAL), "mlock2 with another flag");
    for (name, number) in [("mlock", libc::SYS_mlock), ("munlock", libc::SYS_munlock)] {
        same!(lock(number, at(0), 0, 0), Ok(0), "{name} of no bytes");
        same!(lock(number, at(0), u64::MAX, 0), Ok(0), "{name} of a length that wraps to 0");
        same!(lock(number, at(1), u64::MAX - 2 * PAGE, 0), refused(EINVAL), "{name} of too much");
    }
    doing("munmap", region.unmap(6 * PAGE, PAGE))?;
    same!(lock(libc::SYS_mlock, at(5), 2 * PAGE, 0), refused(ENOMEM), "mlock over a hole");
    same!(lock(libc::SYS_munlock, at(5), 2 * PAGE, 0), refused(ENOMEM), "munlock over a hole");
    same!(lock(libc::SYS_munlock, at(6), PAGE, 0), refused(ENOMEM), "munlock of a hole");
    doing("mprotect", region.protect(5 * PAGE, PAGE, NONE))?;
    same!(lock(libc::SYS_mlock, at(5), PAGE, 0), refused(ENOMEM), "mlock of PROT_NONE");
    Ok(())
}

/// `mlockall`: present memory, future memory, and neither.
fn locking_all() -> Verdict {
    const ALL: i64 = libc::SYS_mlockall;
    let region = doing("mmap", Region::anonymous(4 * PAGE))?;
    same!(lock(ALL, 0, 0, 0), refused(EINVAL), "mlockall without flags");
    same!(lock(ALL, 4, 0, 0), refused(EINVAL), "only MCL_ONFAULT");
    same!(lock(ALL, 8, 0, 0), refused(EINVAL), "another flag");
    // The whole program may need more memory than a limit allows; privileged users have no limit.
    let limited = Err(Errno(ENOMEM));
    match lock(ALL, 1, 0, 0) {
        result if result == limited => return Ok(()),
        result => doing("MCL_CURRENT", result)?,
    };
    same!(in_core(&region)?, [true; 4], "pages after MCL_CURRENT");
    let later = doing("mmap", Region::anonymous(2 * PAGE))?;
    same!(in_core(&later)?, [false; 2], "a mapping created after MCL_CURRENT");
    doing("MCL_FUTURE", lock(ALL, 2, 0, 0))?;
    same!(in_core(&later)?, [false; 2], "a mapping created before MCL_FUTURE");
    let mut future = doing("mmap", Region::anonymous(2 * PAGE))?;
    same!(in_core(&future)?, [true; 2], "a mapping created after MCL_FUTURE");
    doing("mremap", future.resize(5 * PAGE))?;
    same!(in_core(&future)?, [true; 5], "a mapping that grew after MCL_FUTURE");
    let child = outcome(|| {
        let region = Region::anonymous(PAGE).map_err(String::from).and_then(|new| in_core(&new));
        i32::from(region != Ok(vec![false]))
    });
    same!(child?, Status::Exited(0), "a forked child's memory");
    doing("munlockall", lock(libc::SYS_munlockall, 0, 0, 0))?;
    let last = doing("mmap", Region::anonymous(2 * PAGE))?;
    same!(in_core(&last)?, [false; 2], "a mapping created after munlockall");
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_LOCKED;
    let locked = doing("MAP_LOCKED", Region::map(2 * PAGE, WRITE, flags, -1, 0))?;
    same!(in_core(&locked)?, [true; 2], "MAP_LOCKED");
    Ok(())
}

fn remap(at: u64, len: u64, prot: u64, page: u64) -> sys::Result<u64> {
    // SAFETY: the call changes regions, which contain no Rust objects.
    unsafe { call(libc::SYS_remap_file_pages, [at, len, prot, page, 0]) }
}

/// `remap_file_pages` maps other pages of a shared object.
fn rearranged() -> Verdict {
    // SAFETY: the name lives; the descriptor has no other owner.
    let file = unsafe {
        let fd = doing("memfd_create", checked(libc::memfd_create(c"pages".as_ptr(), 0)))?;
        File::from(OwnedFd::from_raw_fd(fd))
    };
    file.set_len(8 * PAGE).map_err(|error| error.to_string())?;
    let shared = |prot| Region::map(8 * PAGE, prot, libc::MAP_SHARED, file.as_raw_fd(), 0);
    let region = doing("mmap", shared(WRITE))?;
    for page in 0..8 {
        region.store(page * PAGE, page + 1);
    }
    let at = |page: u64| region.start() + page * PAGE;
    same!(remap(at(1), 2 * PAGE, 0, 5), Ok(0), "remap_file_pages");
    let shows = || (0..8).map(|page| region.load(page * PAGE)).collect::<Vec<_>>();
    same!(shows(), [1, 6, 7, 4, 5, 6, 7, 8], "the mapped pages");
    region.store(PAGE, 60);
    same!(region.load(5 * PAGE), 60, "one page, shown twice");
    same!(remap(at(1) + 9, PAGE + 9, 0, 0), Ok(0), "unaligned");
    same!(region.load(PAGE), 1, "the page after the unaligned call");
    same!(remap(at(0), 8 * PAGE, 0, 0), Ok(0), "all rearranged pages");
    same!(shows(), [1, 2, 3, 4, 5, 60, 7, 8], "the mapped pages afterwards");
    same!(remap(at(0), PAGE, 3, 0), refused(EINVAL), "a protection");
    same!(remap(at(0), 0, 0, 0), refused(EINVAL), "no length");
    same!(remap(at(0), u64::MAX, 0, 0), refused(EINVAL), "a length that wraps");
    same!(remap(at(0), PAGE, 0, u64::MAX), refused(EINVAL), "a page that wraps");
    doing("mprotect", region.protect(4 * PAGE, PAGE, READ))?;
    same!(remap(at(3), 2 * PAGE, 0, 0), refused(EINVAL), "two different mappings");
    doing("munmap", region.unmap(4 * PAGE, PAGE))?;
    same!(remap(at(3), 2 * PAGE, 0, 0), refused(EINVAL), "a hole behind");
    same!(remap(at(4), PAGE, 0, 0), refused(EINVAL), "a hole");
    let private = doing("mmap", Region::anonymous(2 * PAGE))?;
    same!(remap(private.start(), PAGE, 0, 1), refused(EINVAL), "private memory");
    let anonymous = doing("mmap", Region::shared(4 * PAGE))?;
    anonymous.store(3 * PAGE, 7);
    same!(remap(anonymous.start(), PAGE, 0, 3), Ok(0), "shared memory without a file");
    same!(anonymous.load(0), 7, "the mapped page of this memory");
    let locked = doing("mmap", Region::shared(4 * PAGE))?;
    if lock(libc::SYS_mlock, locked.start(), 4 * PAGE, 0).is_ok() {
        same!(remap(locked.start(), PAGE, 0, 3), Ok(0), "locked memory");
        // SAFETY: the call changes no memory.
        let sync =
            unsafe { call(libc::SYS_msync, [locked.start(), PAGE, libc::MS_INVALIDATE as u64]) };
        same!(sync, refused(EBUSY), "a locked page after the call");
    }
    Ok(())
}

/// `/proc/PID/mem` is the memory of a process.
fn memory_as_a_file() -> Verdict {
    let turn = doing("mmap", Region::shared(PAGE))?;
    let theirs = doing("mmap", Region::anonymous(4 * PAGE))?;
    theirs.store(PAGE, 5);
    let at = |page: u64| theirs.start() + page * PAGE;
    let open = |pid| {
        let path = format!("/proc/{pid}/mem");
        let file = File::options().read(true).write(true).open(&path);
        file.map_err(|error| format!("{path}: {error}"))
    };
    let errno = |result: std::io::Result<usize>| match result {
        Ok(moved) => Ok(moved as u64),
        Err(error) => Err(Errno(error.raw_os_error().unwrap_or(0))),
    };
    let own = open(pid())?;
    let mut word = [0; 8];
    let read = |file: &File, at, to: &mut [u8]| errno(file.read_at(to, at));
    same!(read(&own, at(1), &mut word), Ok(8), "a read");
    same!(u64::from_ne_bytes(word), 5, "the value that was read");
    same!(errno(own.write_at(&6u64.to_ne_bytes(), at(2))), Ok(8), "a write");
    same!(theirs.load(2 * PAGE), 6, "the written value");
    doing("munmap", theirs.unmap(3 * PAGE, PAGE))?;
    let mut long = vec![0; 2 * PAGE as usize];
    same!(read(&own, at(2) + 8, &mut long), Ok(PAGE - 8), "a read up to a hole");
    same!(read(&own, at(3), &mut word), refused(EIO), "a read of a hole");
    same!(errno(own.write_at(&[1], at(3))), refused(EIO), "a write to a hole");
    same!(read(&own, at(3), &mut []), Ok(0), "no bytes of a hole");
    let mut positioned = &own;
    let sought = positioned.seek(SeekFrom::Start(at(1))).map_err(|error| error.to_string())?;
    same!((sought, errno(positioned.read(&mut word))), (at(1), Ok(8)), "a read at the position");
    let reached = positioned.stream_position().map_err(|error| error.to_string())?;
    same!(reached, at(1) + 8, "the position then");
    let child = fork(|| {
        theirs.store(0, 9);
        turn.store(0, 1);
        while turn.load(0) != 2 {
            std::thread::yield_now();
        }
        i32::from(theirs.load(PAGE) != 11)
    });
    let child = doing("fork", child)?;
    while turn.load(0) != 1 {
        std::thread::yield_now();
    }
    let other = open(child.pid)?;
    same!((read(&other, at(0), &mut word), u64::from_ne_bytes(word)), (Ok(8), 9), "a child's");
    same!(errno(other.write_at(&11u64.to_ne_bytes(), at(1))), Ok(8), "a write to a child");
    turn.store(0, 2);
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the child");
    same!(theirs.load(PAGE), 5, "the parent's page");
    same!(read(&other, at(0), &mut word), Ok(0), "a read after the end of the process");
    Ok(())
}

/// Pieces of memory: address and length.
type Pieces<'a> = &'a [[u64; 2]];

/// A call between this process's memory and another's.
fn across(number: i64, pid: i32, here: Pieces<'_>, there: Pieces<'_>) -> sys::Result<u64> {
    let [(here, heres), (there, theres)] =
        [here, there].map(|pieces| (pieces.as_ptr() as u64, pieces.len() as u64));
    // SAFETY: the callers' pieces are regions, which contain no Rust objects.
    unsafe { call(number, [pid as u64, here, heres, there, theres, 0]) }
}

/// `process_vm_readv` and `process_vm_writev`.
fn other_processes() -> Verdict {
    const GET: i64 = libc::SYS_process_vm_readv;
    const PUT: i64 = libc::SYS_process_vm_writev;
    let turn = doing("mmap", Region::shared(PAGE))?;
    let theirs = doing("mmap", Region::anonymous(8 * PAGE))?;
    let ours = doing("mmap", Region::anonymous(64 * PAGE))?;
    let wait_for = |value| {
        while turn.load(0) != value {
            std::thread::yield_now();
        }
    };
    let child = doing(
        "fork",
        fork(|| {
            theirs.store(0, 1);
            theirs.store(PAGE, 2);
            let _ = theirs.protect(3 * PAGE, PAGE, READ);
            let _ = theirs.unmap(5 * PAGE, PAGE);
            turn.store(0, 1);
            wait_for(2);
            i32::from(theirs.load(2 * PAGE) != 77 || theirs.load(PAGE) != 2)
        }),
    )?;
    wait_for(1);
    let (it, at) = (child.pid, |page: u64| theirs.start() + page * PAGE);
    let here = ours.start();
    same!(across(GET, it, &[[here, 16]], &[[at(0), 8], [at(1), 8]]), Ok(16), "two pieces to one");
    same!((ours.load(0), ours.load(8)), (1, 2), "the copied values");
    same!(theirs.load(0), 0, "the memory of this process");
    let (to, from) = ([[here + PAGE, 4], [here + PAGE + 4, 100]], [[at(0), 8]]);
    same!(across(GET, it, &to, &from), Ok(8), "one piece to two");
    same!(ours.load(PAGE), 1, "the value that was copied in parts");
    ours.store(0, 77);
    // A page that is not present is made.
    same!(across(PUT, it, &[[here, 8]], &[[at(2), 8]]), Ok(8), "a write");
    same!(
        across(PUT, it, &[[here, 8]], &[[at(3), 8]]),
        refused(EFAULT),
        "a write to read-only memory"
    );
    same!(across(GET, it, &[[here, 8]], &[[at(3), 8]]), Ok(8), "a read of read-only memory");
    same!(across(GET, it, &[[here, 8]], &[[at(5), 8]]), refused(EFAULT), "a hole");
    let around = across(GET, it, &[[here, 4 * PAGE]], &[[at(4) + 100, 2 * PAGE]]);
    same!(around, Ok(PAGE - 100), "up to a hole");
    let around = across(GET, it, &[[here, 4 * PAGE]], &[[at(4), PAGE], [at(5), 8], [at(6), 8]]);
    same!(around, Ok(PAGE), "pieces up to a hole");
    same!(across(PUT, it, &[[8, 8]], &[[at(0), 8]]), refused(EFAULT), "an unmapped local source");
    same!(across(GET, it, &[[8, 8]], &[[at(0), 8]]), refused(EFAULT), "an unmapped local target");
    same!(across(GET, it, &[], &[[at(5), 8]]), Ok(0), "no local pieces");
    same!(across(GET, it, &[[here, 8]], &[]), Ok(0), "no remote pieces");
    let own = across(GET, pid(), &[[here, 8]], &[[ours.start() + PAGE, 8]]);
    same!((own, ours.load(0)), (Ok(8), 1), "this process itself");
    // SAFETY: as in `across`.
    let flagged = unsafe { call(GET, [it as u64, 0, 0, 0, 0, 1]) };
    same!(flagged, refused(EINVAL), "a flag");
    let many = vec![[here, 1]; 1025];
    same!(across(GET, it, &many, &[[at(0), 8]]), refused(EINVAL), "too many local pieces");
    same!(across(GET, it, &[[here, 8]], &many), refused(EINVAL), "too many remote pieces");
    same!(across(GET, 1 << 22, &[[here, 8]], &[[at(0), 8]]), refused(ESRCH), "a stranger");
    turn.store(0, 2);
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the result of the child");

    let child = doing("fork", fork(|| 0))?;
    let ended = || {
        // SAFETY: zeros are a value; the pointer is to a local.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let how = libc::WEXITED | libc::WNOWAIT;
            checked(libc::waitid(libc::P_PID, child.pid as u32, &raw mut info, how))
        }
    };
    doing("waitid", ended())?;
    same!(across(GET, child.pid, &[[here, 8]], &[[at(0), 8]]), refused(ESRCH), "a zombie");
    doing("wait4", child.wait())?;
    Ok(())
}

/// Signals that come during `process_vm_readv` and `process_vm_writev` wait until the end of the
/// call.
fn other_processes_signalled() -> Verdict {
    const LEN: u64 = 512 * PAGE;
    let whole = |number| {
        let (ours, theirs) = (Region::anonymous(LEN), Region::anonymous(LEN));
        let (ours, theirs) = (doing("mmap", ours)?, doing("mmap", theirs)?);
        for page in 0..LEN / PAGE {
            ours.store(page * PAGE, page);
            theirs.store(page * PAGE, page);
        }
        let pieces = [ours.start(), theirs.start()].map(|at| [[at, LEN]]);
        for round in 0..50 {
            same!(across(number, pid(), &pieces[0], &pieces[1]), Ok(LEN), "call {round}");
        }
        Ok(())
    };
    doing("sigaction", signal::handle(libc::SIGALRM, signal::note, 0))?;
    let often = libc::timeval { tv_sec: 0, tv_usec: 200 };
    let timer = libc::itimerval { it_interval: often, it_value: often };
    // SAFETY: the pointers are to a local, and to nowhere.
    doing("setitimer", unsafe {
        checked(libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()))
    })?;
    whole(libc::SYS_process_vm_readv)?;
    whole(libc::SYS_process_vm_writev)?;
    let came = signal::NOTED.count.load(Acquire);
    ensure!(came >= 10, "{came} signals arrived meanwhile");
    Ok(())
}

/// `/proc/self/pagemap`.
fn pagemap_reports_pages() -> Verdict {
    const PRESENT: u64 = 1 << 63;
    const OF_FILE: u64 = 1 << 61;
    const EXCLUSIVE: u64 = 1 << 56;
    const FRAME: u64 = (1 << 55) - 1;
    let region = doing("mmap", Region::anonymous(4 * PAGE))?;
    same!(procfs::page_map(&region)?, [0; 4], "untouched pages");
    region.store(PAGE, 1);
    region.store(2 * PAGE, 1);
    region.load(3 * PAGE);
    let map = procfs::page_map(&region)?;
    let marks = |entry: u64| entry & (PRESENT | OF_FILE | EXCLUSIVE);
    same!(marks(map[0]), 0, "an untouched page");
    same!(marks(map[1]), PRESENT | EXCLUSIVE, "the written value");
    same!(marks(map[3]), PRESENT, "the page of zeros");
    // Only privileged users see frame numbers.
    if map[1] & FRAME != 0 {
        ensure!(map[1] & FRAME != map[2] & FRAME, "two pages with the same frame: {map:x?}");
        ensure!(map[1] & FRAME != map[3] & FRAME, "a page in the frame of zeros: {map:x?}");
    }
    let entry = || procfs::page_map(&region).map_or(0, |map| map[1]);
    let child = outcome(|| {
        let before = entry();
        region.store(PAGE, 2);
        let after = entry();
        i32::from(marks(before) != PRESENT)
            | i32::from(marks(after) != PRESENT | EXCLUSIVE) << 1
            | i32::from(map[1] & FRAME != 0 && (before ^ map[1]) & FRAME != 0) << 2
            | i32::from(map[1] & FRAME != 0 && (after ^ map[1]) & FRAME == 0) << 3
    });
    same!(child?, Status::Exited(0), "a child's view before and after its store");
    let shared = doing("mmap", Region::shared(2 * PAGE))?;
    shared.store(0, 1);
    let map = procfs::page_map(&shared)?;
    same!(marks(map[0]), PRESENT | OF_FILE | EXCLUSIVE, "shared memory of one process");
    same!(map[1], 0, "untouched shared memory");
    let child = outcome(|| {
        shared.load(0);
        let both = procfs::page_map(&shared).map_or(0, |map| marks(map[0]));
        i32::from(both != PRESENT | OF_FILE)
    });
    same!(child?, Status::Exited(0), "shared memory of two processes");
    doing("munmap", region.unmap(2 * PAGE, PAGE))?;
    same!(procfs::page_map(&region)?[2], 0, "an unmapped page");

    let file = File::open("/proc/self/pagemap").map_err(|error| error.to_string())?;
    let number = |len: usize, at: u64| {
        file.read_at(&mut vec![0; len], at).map_err(|error| error.raw_os_error())
    };
    let at = region.start() / PAGE * 8;
    same!(number(8, at + 4), Err(Some(EINVAL)), "between two entries");
    same!(number(12, at), Err(Some(EINVAL)), "an entry and a half");
    same!(number(0, at), Ok(0), "nothing");
    same!(number(8, (1 << 47) / PAGE * 8), Ok(0), "beyond the end");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("locking", locking),
    ("locking_all", locking_all),
    ("rearranged", rearranged),
    ("memory_as_a_file", memory_as_a_file),
    ("other_processes", other_processes),
    ("other_processes_signalled", other_processes_signalled),
    ("pagemap_reports_pages", pagemap_reports_pages),
];

fn main() {
    let args = Args::read("memory", &[]);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
