//! `pages [CHECK…] [dir=DIR]`: calls about pages, and their errors: locks, advice,
//! synchronisation, and invalid mappings.

use faultless_guest::check::{Check, Verdict};
use faultless_guest::dir::{self, create, io, open};
use faultless_guest::mem::{NONE, PAGE, READ, Region, WRITE};
use faultless_guest::proc::{Status, outcome};
use faultless_guest::procfs::{fields, kilobytes};
use faultless_guest::sys::{self, Errno, call, doing};
use faultless_guest::{ensure, same};
use libc::{
    EACCES, EBADF, EBUSY, EINVAL, ENODEV, ENOMEM, EOPNOTSUPP, MAP_ANONYMOUS, MAP_PRIVATE,
    MAP_SHARED, MS_ASYNC, MS_INVALIDATE, MS_SYNC, O_RDONLY, O_RDWR, O_WRONLY,
};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// The result of a rejected call.
const fn refused<T>(errno: i32) -> sys::Result<T> {
    Err(Errno(errno))
}

/// Makes a call about a region of memory.
fn ask(number: i64, addr: u64, len: u64, more: i32) -> sys::Result<u64> {
    // SAFETY: the call changes bytes of regions, which contain no Rust objects.
    unsafe { call(number, [addr, len, more as u64]) }
}

fn lock(addr: u64, pages: u64) -> sys::Result<u64> {
    ask(libc::SYS_mlock, addr, pages * PAGE, 0)
}

fn unlock(addr: u64, pages: u64) -> sys::Result<u64> {
    ask(libc::SYS_munlock, addr, pages * PAGE, 0)
}

/// Returns the number of this process's locked pages.
fn locked() -> Result<u64, String> {
    Ok(kilobytes(&fields("/proc/self/status")?, "VmLck")? / PAGE)
}

/// Locked pages count once, while they are mapped.
fn locked_pages_count() -> Verdict {
    let mut region = doing("mmap", Region::anonymous(8 * PAGE))?;
    let at = |region: &Region, page: u64| region.start() + page * PAGE;
    same!(locked()?, 0, "pages at the start");
    doing("mlock", lock(at(&region, 1), 3))?;
    same!(locked()?, 3, "pages after mlock");
    doing("mlock", lock(at(&region, 2), 4))?;
    same!(locked()?, 5, "pages after mlock of further pages");
    doing("munlock", unlock(at(&region, 3), 1))?;
    same!(locked()?, 4, "pages after munlock of one page");
    doing("mlock2", ask(libc::SYS_mlock2, at(&region, 7), PAGE, libc::MLOCK_ONFAULT as i32))?;
    same!(locked()?, 5, "pages after mlock2 on fault");
    doing("munmap", region.unmap(0, 2 * PAGE))?;
    same!(locked()?, 4, "pages after munmap");
    let child = outcome(|| locked().map_or(100, |pages| pages as i32));
    same!(child?, Status::Exited(0), "pages of a child");
    doing("mprotect", region.protect(4 * PAGE, PAGE, READ))?;
    same!(locked()?, 4, "pages after mprotect");
    same!(lock(at(&region, 0), 8), refused(ENOMEM), "mlock that begins with a hole");
    same!(locked()?, 4, "pages after this mlock");
    doing("munmap", region.unmap(6 * PAGE, PAGE))?;
    same!(lock(at(&region, 2), 6), refused(ENOMEM), "mlock over a hole");
    same!(locked()?, 5, "pages after this mlock, which locks pages below the hole");
    doing("munlock", unlock(at(&region, 2), 4))?;
    same!(locked()?, 1, "pages after munlock of all but one page");
    drop(region);
    same!(locked()?, 0, "pages after munmap of all");

    let flags = MAP_PRIVATE | MAP_ANONYMOUS | libc::MAP_LOCKED;
    region = doing("mmap", Region::map(2 * PAGE, WRITE, flags, -1, 0))?;
    same!(locked()?, 2, "pages of MAP_LOCKED");
    doing("mremap", region.resize(5 * PAGE))?;
    same!(locked()?, 5, "pages after the mapping grew");
    same!(in_core(&region)?, [true; 5], "resident pages");
    doing("mremap", region.resize(PAGE))?;
    same!(locked()?, 1, "pages after the mapping shrank");
    Ok(())
}

/// `mlockall` and `munlockall`, for present and future memory.
fn all_may_be_locked() -> Verdict {
    let all = |flags: i32| ask(libc::SYS_mlockall, flags as u64, 0, 0);
    let region = doing("mmap", Region::anonymous(4 * PAGE))?;
    let limited = refused(ENOMEM);
    match all(libc::MCL_CURRENT | libc::MCL_ONFAULT) {
        result if result == limited => return Ok(()),
        result => doing("mlockall", result)?,
    };
    let pages = locked()?;
    ensure!(pages > 100, "only {pages} pages are locked");
    same!(in_core(&region)?, [false; 4], "pages resident after MCL_ONFAULT");
    same!(region.advise(0, PAGE, libc::MADV_DONTNEED), refused(EINVAL), "advice on locked pages");
    doing("munlockall", ask(libc::SYS_munlockall, 0, 0, 0))?;
    same!(locked()?, 0, "pages after munlockall");
    doing("madvise", region.advise(0, PAGE, libc::MADV_DONTNEED))?;
    doing("mlockall", all(libc::MCL_FUTURE))?;
    same!(locked()?, 0, "pages at MCL_FUTURE");
    let later = doing("mmap", Region::anonymous(3 * PAGE))?;
    same!(locked()?, 3, "pages of a later mapping");
    same!(in_core(&later)?, [true; 3], "resident pages");
    doing("mlockall", all(libc::MCL_FUTURE | libc::MCL_ONFAULT))?;
    let last = doing("mmap", Region::anonymous(2 * PAGE))?;
    same!(locked()?, 5, "pages of a mapping locked on fault");
    same!(in_core(&last)?, [false; 2], "resident pages");
    let child = outcome(|| {
        let more = Region::anonymous(PAGE);
        locked().map_or(100, |pages| pages as i32) + i32::from(more.is_err())
    });
    same!(child?, Status::Exited(0), "pages of a child");
    doing("munlockall", ask(libc::SYS_munlockall, 0, 0, 0))?;
    let end = doing("mmap", Region::anonymous(2 * PAGE))?;
    same!(locked()?, 0, "pages of the last mapping, at {:#x}", end.start());
    Ok(())
}

/// Returns the present pages of a region.
fn in_core(region: &Region) -> Result<Vec<bool>, String> {
    doing("mincore", region.in_core())
}

/// Cached pages of a file are present, independent of the mapping and of the process that read
/// them.
fn cached_pages() -> Verdict {
    let file = create("cached")?;
    io("write", file.write_all_at(&[1; 4 * PAGE as usize], 0))?;
    let fd = file.as_raw_fd();
    for (name, prot, flags) in [
        ("shared", WRITE, MAP_SHARED),
        ("shared and readable", READ, MAP_SHARED),
        ("private", WRITE, MAP_PRIVATE),
        ("private, not accessible", NONE, MAP_PRIVATE),
    ] {
        let region = doing("mmap", Region::map(4 * PAGE, prot, flags, fd, 0))?;
        same!(in_core(&region)?, [true; 4], "pages of a file, {name}");
        let tail = doing("mmap", Region::map(PAGE, prot, flags, fd, 3 * PAGE))?;
        same!(in_core(&tail)?, [true], "the last page of a file, {name}");
    }
    let anonymous = doing("mmap", Region::shared(4 * PAGE))?;
    same!(in_core(&anonymous)?, [false; 4], "untouched shared memory");
    let child = outcome(|| {
        anonymous.store(PAGE, 1);
        0
    });
    same!(child?, Status::Exited(0), "a child that stores");
    same!(in_core(&anonymous)?, [false, true, false, false], "a page with a child's store");
    Ok(())
}

/// `msync`.
fn synchronisation() -> Verdict {
    let file = create("sync")?;
    io("ftruncate", file.set_len(4 * PAGE))?;
    let map = || doing("mmap", Region::map(4 * PAGE, WRITE, MAP_SHARED, file.as_raw_fd(), 0));
    let region = map()?;
    let sync = |at: u64, len: u64, flags| ask(libc::SYS_msync, region.start() + at, len, flags);
    for flags in [0, MS_ASYNC, MS_SYNC, MS_INVALIDATE, MS_SYNC | MS_INVALIDATE] {
        same!(sync(0, 4 * PAGE, flags), Ok(0), "msync with {flags}");
    }
    same!(sync(0, PAGE, MS_ASYNC | MS_SYNC), refused(EINVAL), "both kinds");
    same!(sync(0, PAGE, -1), refused(EINVAL), "all flags");
    same!(sync(0, PAGE, 8), refused(EINVAL), "another flag");
    same!(sync(1, PAGE, MS_SYNC), refused(EINVAL), "an unaligned address");
    same!(sync(0, u64::MAX - 2 * PAGE, MS_SYNC), refused(ENOMEM), "a length that wraps");
    same!(sync(0, 0, MS_SYNC), Ok(0), "no length");
    doing("mlock", lock(region.start() + PAGE, 1))?;
    same!(sync(0, 4 * PAGE, MS_INVALIDATE), refused(EBUSY), "invalidating locked pages");
    same!(
        sync(0, 4 * PAGE, MS_SYNC | MS_INVALIDATE),
        refused(EBUSY),
        "invalidating locked pages synchronously"
    );
    same!(sync(2 * PAGE, PAGE, MS_INVALIDATE), Ok(0), "invalidating the pages beside");
    same!(sync(0, 4 * PAGE, MS_SYNC), Ok(0), "synchronising locked pages");
    doing("munlock", unlock(region.start(), 4))?;
    same!(sync(0, 4 * PAGE, MS_INVALIDATE), Ok(0), "invalidating unlocked pages");
    doing("munmap", region.unmap(2 * PAGE, PAGE))?;
    same!(sync(0, 4 * PAGE, MS_SYNC), refused(ENOMEM), "a hole");
    same!(sync(2 * PAGE, PAGE, MS_ASYNC), refused(ENOMEM), "nothing");
    Ok(())
}

/// `madvise`.
fn advice() -> Verdict {
    let file = create("advised")?;
    io("write", file.write_all_at(&[7; 4 * PAGE as usize], 0))?;
    let fd = file.as_raw_fd();
    let shared = doing("mmap", Region::map(4 * PAGE, WRITE, MAP_SHARED, fd, 0))?;
    let private = doing("mmap", Region::map(4 * PAGE, WRITE, MAP_PRIVATE, fd, 0))?;
    let read_only = doing("open", open("advised", O_RDONLY))?;
    let reader = doing("mmap", Region::map(4 * PAGE, READ, MAP_SHARED, read_only.as_raw_fd(), 0))?;
    let memory = doing("mmap", Region::anonymous(4 * PAGE))?;
    let of_all = doing("mmap", Region::shared(4 * PAGE))?;
    let advise =
        |region: &Region, at, what| ask(libc::SYS_madvise, region.start() + at, PAGE, what);
    const REMOVE: i32 = libc::MADV_REMOVE;
    same!(advise(&memory, 1, libc::MADV_NORMAL), refused(EINVAL), "an unaligned address");
    same!(advise(&memory, 0, 1212), refused(EINVAL), "no advice");
    for (name, region) in [("shared", &shared), ("private", &private), ("shared memory", &of_all)] {
        same!(advise(region, 0, libc::MADV_FREE), refused(EINVAL), "MADV_FREE, {name}");
        same!(advise(region, 0, libc::MADV_WIPEONFORK), refused(EINVAL), "MADV_WIPEONFORK, {name}");
    }
    same!(advise(&memory, 0, libc::MADV_WILLNEED), Ok(0), "MADV_WILLNEED without a file");
    same!(advise(&memory, 0, REMOVE), refused(EINVAL), "MADV_REMOVE without a file");
    same!(advise(&private, 0, REMOVE), refused(EACCES), "MADV_REMOVE of private copies");
    same!(advise(&reader, 0, REMOVE), refused(EACCES), "MADV_REMOVE of a read-only mapping");
    private.store(PAGE, 9);
    private.load(0);
    same!(advise(&shared, PAGE, REMOVE), Ok(0), "MADV_REMOVE");
    same!((shared.load(PAGE), reader.load(PAGE)), (0, 0), "the removed page");
    ensure!(shared.load(2 * PAGE) != 0, "a neighbour of the removed page");
    same!(private.load(PAGE), 9, "a private copy of the removed page");
    same!(advise(&shared, 0, REMOVE), Ok(0), "MADV_REMOVE of another page");
    same!(private.load(0), 0, "a removed page of the file");
    of_all.store(3 * PAGE, 1);
    same!(advise(&of_all, 3 * PAGE, REMOVE), Ok(0), "MADV_REMOVE of shared memory");
    same!(of_all.load(3 * PAGE), 0, "the removed page of this memory");

    for region in [&shared, &private, &memory] {
        region.store(3 * PAGE, 5);
        doing("mlock", lock(region.start() + 2 * PAGE, 2))?;
        for what in [libc::MADV_DONTNEED, libc::MADV_FREE, REMOVE] {
            same!(advise(region, 3 * PAGE, what), refused(EINVAL), "advice {what}, locked");
        }
        same!(region.load(3 * PAGE), 5, "the locked page");
        // The part before the locked page is discarded.
        same!(region.advise(0, 4 * PAGE, libc::MADV_DONTNEED), refused(EINVAL), "the whole region");
    }
    same!(private.load(PAGE), 0, "a private copy before the locked page");
    same!(private.load(3 * PAGE), 5, "a locked private copy");
    match advise(&memory, 3 * PAGE, libc::MADV_DONTNEED_LOCKED) {
        // Available on Linux since 5.18.
        Err(Errno(EINVAL)) => {}
        result => {
            doing("MADV_DONTNEED_LOCKED", result)?;
            same!(memory.load(3 * PAGE), 0, "a discarded locked page");
        }
    }
    doing("munmap", memory.unmap(PAGE, PAGE))?;
    for what in [libc::MADV_NORMAL, libc::MADV_WILLNEED, libc::MADV_DONTNEED] {
        same!(memory.advise(0, 2 * PAGE, what), refused(ENOMEM), "advice {what} about a hole");
    }
    doing("munmap", of_all.unmap(PAGE, PAGE))?;
    of_all.store(2 * PAGE, 3);
    same!(of_all.advise(0, 3 * PAGE, REMOVE), refused(ENOMEM), "MADV_REMOVE over a hole");
    same!(of_all.load(2 * PAGE), 0, "the page after the hole");
    Ok(())
}

/// The errors of `mmap`.
fn mappings_refused() -> Verdict {
    let file = create("mapped")?;
    io("ftruncate", file.set_len(PAGE))?;
    let opened = |flags| doing("open", open("mapped", flags));
    let [reads, writes, both] = [O_RDONLY, O_WRONLY, O_RDWR].map(opened);
    let (reads, writes, both) = (reads?, writes?, both?);
    let map = |len, prot, flags, file: &OwnedFd| {
        sys::Result::map(Region::map(len, prot, flags, file.as_raw_fd(), 0), drop)
    };
    const VALIDATE: i32 = libc::MAP_SHARED_VALIDATE;
    for flags in [MAP_SHARED, MAP_PRIVATE, VALIDATE] {
        for prot in [NONE, READ, libc::PROT_WRITE, WRITE] {
            same!(map(PAGE, prot, flags, &both), Ok(()), "{prot}, {flags}, read and write");
            same!(map(PAGE, prot, flags, &writes), refused(EACCES), "{prot}, {flags}, write");
            let may = flags == MAP_PRIVATE || prot & libc::PROT_WRITE == 0;
            let expected = if may { Ok(()) } else { refused(EACCES) };
            same!(map(PAGE, prot, flags, &reads), expected, "{prot}, {flags}, read");
        }
        same!(map(0, READ, flags, &both), refused(EINVAL), "no length, {flags}");
        same!(map(0, READ, flags, &writes), refused(EINVAL), "no length, {flags}, write");
        let nowhere = Region::map(0, READ, flags, 999, 0).map(drop);
        same!(nowhere, refused(EBADF), "no length of no file, {flags}");
        let odd = Region::map(0, READ, flags, 999, 1).map(drop);
        same!(odd, refused(EINVAL), "no length of no file at an unaligned offset, {flags}");
    }
    for (kind, file) in [(0, &both), (0, &writes), (4, &both), (9, &both), (10, &writes)] {
        same!(map(PAGE, READ, kind, file), refused(EINVAL), "the kind {kind}");
    }
    // Only flags that were added with this kind of mapping, or later, are unknown flags.
    const UNKNOWN: i32 = 1 << 9;
    same!(map(PAGE, READ, MAP_SHARED | UNKNOWN, &both), Ok(()), "an unknown flag");
    for flags in [UNKNOWN, libc::MAP_FIXED_NOREPLACE] {
        let found = map(PAGE, READ, VALIDATE | flags, &both);
        same!(found, refused(EOPNOTSUPP), "{flags:#x} with validation");
        let found = map(PAGE, READ, VALIDATE | flags, &writes);
        same!(found, refused(EOPNOTSUPP), "{flags:#x} with validation, write");
    }
    let known = libc::MAP_NORESERVE | libc::MAP_POPULATE | libc::MAP_STACK | libc::MAP_DENYWRITE;
    same!(map(PAGE, WRITE, VALIDATE | known, &both), Ok(()), "known flags");
    let region = doing("mmap", Region::map(PAGE, WRITE, VALIDATE, both.as_raw_fd(), 0))?;
    region.store(0, 77);
    let mut bytes = [0; 8];
    io("read", file.read_exact_at(&mut bytes, 0))?;
    same!(u64::from_ne_bytes(bytes), 77, "a store to a shared validated mapping");
    for flags in [0, VALIDATE, 9] {
        let found = Region::map(PAGE, READ, MAP_ANONYMOUS | flags, -1, 0).map(drop);
        same!(found, refused(EINVAL), "memory without a file of kind {flags}");
    }

    let device = |path: &str, write| {
        let file = std::fs::File::options().read(true).write(write).open(path);
        io(path, file).map(OwnedFd::from)
    };
    let null = device("/dev/null", true)?;
    same!(map(PAGE, READ, MAP_PRIVATE, &null), refused(ENODEV), "/dev/null");
    let zero = device("/dev/zero", false)?;
    same!(map(PAGE, WRITE, MAP_SHARED, &zero), refused(EACCES), "/dev/zero, writable");
    let region = doing("mmap", Region::map(PAGE, READ, MAP_SHARED, zero.as_raw_fd(), 0))?;
    same!(region.protect(0, PAGE, WRITE), refused(EACCES), "mprotect of /dev/zero");
    same!(region.load(0), 0, "/dev/zero");
    let region = doing("mmap", Region::map(PAGE, READ, MAP_PRIVATE, zero.as_raw_fd(), 0))?;
    doing("mprotect", region.protect(0, PAGE, WRITE))?;
    region.store(0, 1);
    let zero = device("/dev/zero", true)?;
    let region = doing("mmap", Region::map(PAGE, READ, MAP_SHARED, zero.as_raw_fd(), 0))?;
    doing("mprotect", region.protect(0, PAGE, WRITE))?;
    region.store(0, 1);
    Ok(())
}

const CHECKS: &[Check] = &[
    ("locked_pages_count", locked_pages_count),
    ("all_may_be_locked", all_may_be_locked),
    ("cached_pages", cached_pages),
    ("synchronisation", synchronisation),
    ("advice", advice),
    ("mappings_refused", mappings_refused),
];

fn main() {
    dir::run("pages", CHECKS);
}
