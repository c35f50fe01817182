//! `seals [CHECK…]`: the guarantees of a memory file's seals.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{NONE, PAGE, READ, Region, WRITE, errno};
use faultless_guest::sys::{self, Errno, call, checked, doing};
use faultless_guest::{ensure, same};
use libc::{EBUSY, EINVAL, ENOMEM, EPERM, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_WRITE};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

const FUTURE_WRITE: i32 = 0x10;
const EXEC: i32 = 0x20;
const SHARED: i32 = libc::MAP_SHARED;

/// Makes a memory file of two pages that accepts seals.
fn sealable(flags: u32) -> Result<File, String> {
    // SAFETY: the name is text, and the new descriptor belongs to the file.
    let file = unsafe {
        let fd = checked(libc::memfd_create(c"seals".as_ptr(), libc::MFD_ALLOW_SEALING | flags));
        File::from_raw_fd(doing("memfd_create", fd)?)
    };
    file.set_len(2 * PAGE).map_err(|error| format!("ftruncate: {error}"))?;
    Ok(file)
}

/// Adds seals. Returns the number of the error, or 0.
fn seal(file: &File, seals: i32) -> i32 {
    // SAFETY: a plain call.
    errno(checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }))
}

fn seals(file: &File) -> i32 {
    // SAFETY: a plain call.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) }
}

fn map(file: &File, prot: i32, flags: i32) -> sys::Result<Region> {
    Region::map(PAGE, prot, flags, file.as_raw_fd(), 0)
}

/// Returns the error number of a call of the standard library, or 0.
fn number<T>(result: std::io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

/// `F_SEAL_WRITE` is refused while a mapping may store to the file.
fn writable_mappings_exclude_the_seal() -> Verdict {
    for prot in [WRITE, READ] {
        let file = sealable(0)?;
        let mapped = doing("mmap", map(&file, prot, SHARED))?;
        same!(seal(&file, F_SEAL_WRITE), EBUSY, "F_SEAL_WRITE with a mapping of {prot}");
        same!(seal(&file, F_SEAL_WRITE | F_SEAL_GROW), EBUSY, "both seals");
        same!(seals(&file), 0, "the seals after a refusal");
        same!(errno(mapped.protect(0, PAGE, WRITE)), 0, "mprotect after a refusal");
        drop(mapped);
        same!(seal(&file, F_SEAL_WRITE), 0, "F_SEAL_WRITE without a mapping");
    }
    // The mapping of a child counts, too.
    let file = sealable(0)?;
    let mapped = doing("mmap", map(&file, WRITE, SHARED))?;
    let mut ends = [0i32; 2];
    // SAFETY: the array has room for both.
    doing("pipe", checked(unsafe { libc::pipe(ends.as_mut_ptr()) }))?;
    let child = faultless_guest::proc::fork(|| {
        // SAFETY: a descriptor of this process, and a local.
        unsafe {
            libc::close(ends[1]);
            let mut byte = 0u8;
            libc::read(ends[0], (&raw mut byte).cast(), 1);
        }
        0
    });
    let child = doing("fork", child)?;
    drop(mapped);
    let refused = seal(&file, F_SEAL_WRITE);
    // SAFETY: a descriptor of this process.
    unsafe { libc::close(ends[1]) };
    doing("wait4", child.wait())?;
    same!(refused, EBUSY, "F_SEAL_WRITE with a mapping of a child");
    same!(seal(&file, F_SEAL_WRITE), 0, "F_SEAL_WRITE after the child's end");
    // Private mappings cannot change the file.
    let file = sealable(0)?;
    let private = doing("mmap", map(&file, WRITE, libc::MAP_PRIVATE))?;
    same!(seal(&file, F_SEAL_WRITE), 0, "F_SEAL_WRITE with a private mapping");
    private.store(0, 1);
    let mut byte = [9];
    same!(number(file.read_exact_at(&mut byte, 0)), 0, "pread");
    same!(byte, [0], "the file's first byte");
    Ok(())
}

/// A sealed file cannot be stored to, in any way.
fn sealed_files_cannot_be_changed() -> Verdict {
    let file = sealable(0)?;
    same!(seal(&file, F_SEAL_WRITE), 0, "F_SEAL_WRITE");
    same!(errno(map(&file, WRITE, SHARED)), EPERM, "a writable mapping");
    let read = doing("mmap", map(&file, READ, SHARED))?;
    same!(errno(read.protect(0, PAGE, WRITE)), libc::EACCES, "making a mapping writable");
    same!(number((&file).write(b"x")), EPERM, "write");
    same!(number((&file).write(b"")), 0, "a write of no bytes");
    same!(number(file.write_at(b"x", 3 * PAGE)), EPERM, "pwrite beyond the end");
    let hole = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u64;
    // SAFETY: no memory is passed.
    let punched = unsafe { call(libc::SYS_fallocate, [file.as_raw_fd() as u64, hole, 0, PAGE]) };
    same!(punched, Err(Errno(EPERM)), "a hole");
    same!(seal(&file, F_SEAL_SEAL), 0, "F_SEAL_SEAL");
    same!(seal(&file, F_SEAL_GROW), EPERM, "a seal after F_SEAL_SEAL");
    Ok(())
}

/// `F_SEAL_FUTURE_WRITE` does not affect older mappings.
fn future_writes() -> Verdict {
    let file = sealable(0)?;
    let [older, written] = [READ, WRITE].map(|prot| map(&file, prot, SHARED));
    let (older, written) = (doing("mmap", older)?, doing("mmap", written)?);
    same!(seal(&file, FUTURE_WRITE), 0, "F_SEAL_FUTURE_WRITE");
    written.store(0, 5);
    same!(errno(older.protect(0, PAGE, WRITE)), 0, "making an older mapping writable");
    let newer = doing("mmap", map(&file, READ, SHARED))?;
    same!(newer.load(0), 5, "the stored value");
    same!(errno(newer.protect(0, PAGE, WRITE)), libc::EACCES, "making a newer mapping writable");
    same!(errno(map(&file, WRITE, SHARED)), EPERM, "a writable mapping");
    same!(number((&file).write(b"x")), EPERM, "write");
    Ok(())
}

/// `MADV_REMOVE` frees the pages of a file, unless a seal forbids stores, even through an older
/// mapping.
fn sealed_files_have_no_new_holes() -> Verdict {
    let file = sealable(0)?;
    let mapped = doing("mmap", map(&file, WRITE, SHARED))?;
    mapped.store(0, 5);
    same!(errno(mapped.advise(0, PAGE, libc::MADV_REMOVE)), 0, "MADV_REMOVE");
    same!(mapped.load(0), 0, "the removed word");
    mapped.store(0, 6);
    same!(seal(&file, FUTURE_WRITE), 0, "F_SEAL_FUTURE_WRITE");
    same!(errno(mapped.advise(0, PAGE, libc::MADV_REMOVE)), EPERM, "MADV_REMOVE of a sealed file");
    same!(mapped.load(0), 6, "the word");
    // Memory without a file.
    let region = doing("mmap", Region::shared(PAGE))?;
    region.store(0, 7);
    same!(errno(region.advise(0, PAGE, libc::MADV_REMOVE)), 0, "MADV_REMOVE of anonymous memory");
    same!(region.load(0), 0, "its word");
    Ok(())
}

/// Mappings that cannot store to the file do not refuse a seal at any time.
fn harmless_mappings_allow_the_seal() -> Verdict {
    let (ended, fd) = (AtomicBool::new(false), AtomicI32::new(-1));
    for (prot, flags, access) in
        [(WRITE, libc::MAP_PRIVATE, libc::O_RDWR), (READ, SHARED, libc::O_RDONLY)]
    {
        ended.store(false, Ordering::Relaxed);
        let what = format!("F_SEAL_WRITE beside mappings of {prot} and {flags}");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    // The file may be closed.
                    drop(Region::map(PAGE, prot, flags, fd.load(Ordering::Relaxed), 0));
                }
            });
            let sealed = (0..2000).try_for_each(|round| {
                let file = sealable(0)?;
                let path = format!("/proc/self/fd/{}\0", file.as_raw_fd());
                // SAFETY: the path is text.
                let opened = checked(unsafe { libc::open(path.as_ptr().cast(), access) });
                let opened = doing("open", opened)?;
                fd.store(opened, Ordering::Relaxed);
                let sealed = (0..5).map(|_| seal(&file, F_SEAL_WRITE)).find(|error| *error != 0);
                // SAFETY: a descriptor of this check.
                unsafe { libc::close(opened) };
                same!(sealed, None, "{what}, round {round}");
                Ok(())
            });
            ended.store(true, Ordering::Relaxed);
            sealed
        })?;
    }
    Ok(())
}

/// Seals of the length, also for writes that cross the end.
fn lengths() -> Verdict {
    let file = sealable(0)?;
    same!(seal(&file, F_SEAL_GROW), 0, "F_SEAL_GROW");
    let bytes = vec![7u8; 2 * PAGE as usize];
    same!(file.write_at(&bytes, 8000).ok(), Some(192), "a write across the end");
    same!(number(file.write_at(&bytes, 2 * PAGE)), EPERM, "a write beyond the end");
    same!(number(file.set_len(3 * PAGE)), EPERM, "growing");
    same!(number(file.set_len(5000)), 0, "shrinking");
    same!(file.write_at(&bytes, 100).ok(), Some(3996), "a write of whole pages before the end");
    same!(number(file.write_at(&bytes, 4500)), EPERM, "a write of the last part of a page");
    same!(seal(&file, F_SEAL_SHRINK), 0, "F_SEAL_SHRINK");
    same!(number(file.set_len(4096)), EPERM, "shrinking a sealed file");
    Ok(())
}

/// Seals that do not exist, and a file's initial seals.
fn invalid_and_initial_seals() -> Verdict {
    let file = sealable(0)?;
    same!(seal(&file, 0x40), EINVAL, "an unknown seal");
    same!(seal(&file, 0x40 | F_SEAL_GROW), EINVAL, "an unknown and a known seal");
    same!(seals(&file), 0, "the seals");
    // SAFETY: the name is text, and the new descriptor belongs to the file.
    let plain = unsafe {
        let fd = checked(libc::memfd_create(c"plain".as_ptr(), 0));
        File::from_raw_fd(doing("memfd_create", fd)?)
    };
    same!(seals(&plain), F_SEAL_SEAL, "the seals of a file without sealing");
    same!(seal(&plain, F_SEAL_GROW), EPERM, "adding a seal to a file without sealing");
    // Sealing an executable file also seals its contents.
    same!(seal(&file, EXEC), 0, "F_SEAL_EXEC");
    let all = EXEC | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | FUTURE_WRITE;
    same!(seals(&file), all, "the seals of an executable file");
    let permissions = |mode| file.set_permissions(std::fs::Permissions::from_mode(mode));
    same!(number(permissions(0o600)), EPERM, "removing the execute permission");
    same!(number(permissions(0o711)), 0, "other permissions");
    let noexec = sealable(libc::MFD_NOEXEC_SEAL)?;
    same!(seals(&noexec), EXEC, "the seals of MFD_NOEXEC_SEAL");
    let mode = noexec.metadata().map_err(|error| error.to_string())?.permissions().mode();
    ensure!(mode & 0o111 == 0, "the mode is {mode:o}");
    Ok(())
}

/// Calls `act` again and again, while another thread tries to add `seals` to `file`. Returns the
/// last error of `act`, -1 if a seal was added, or 0.
fn beside_seals(file: &File, seals: i32, mut act: impl FnMut() -> sys::Result<()> + Send) -> i32 {
    let (ended, wrong) = (AtomicBool::new(false), AtomicI32::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..4_000 {
                if let Err(Errno(error)) = act() {
                    wrong.store(error, Ordering::Relaxed);
                }
            }
            ended.store(true, Ordering::Relaxed);
        });
        while !ended.load(Ordering::Relaxed) {
            if seal(file, seals) != EBUSY {
                wrong.store(-1, Ordering::Relaxed);
            }
        }
    });
    wrong.into_inner()
}

/// A seal that is refused has no effect at any time.
fn refused_seals_have_no_effect() -> Verdict {
    let file = sealable(0)?;
    let _mapped = doing("mmap", map(&file, WRITE, SHARED))?;
    let error = beside_seals(&file, F_SEAL_WRITE, || map(&file, WRITE, SHARED).map(drop));
    same!(error, 0, "the error of mmap beside refused seals");
    let mut mode = 0o700;
    let chmod = || {
        mode ^= 0o011;
        // SAFETY: no memory is passed.
        unsafe { call(libc::SYS_fchmod, [file.as_raw_fd() as u64, mode]) }.map(drop)
    };
    // The file is executable, so this seal contains `F_SEAL_WRITE`.
    same!(beside_seals(&file, EXEC, chmod), 0, "the error of fchmod beside refused seals");
    same!(seals(&file), 0, "the seals");
    Ok(())
}

/// A mapping that moves, or that `remap_file_pages` replaces, prevents the seal at any time.
fn moving_mappings_exclude_the_seal() -> Verdict {
    let file = sealable(0)?;
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    const PAGES: u64 = 4096;
    let reserved = doing("mmap", Region::map(PAGES * PAGE, NONE, private, -1, 0))?;
    let places = [reserved.start(), reserved.start() + (PAGES - 1) * PAGE];
    // Many mappings between the two places make a search for mappings slow.
    for page in (2..PAGES - 2).step_by(2) {
        doing("mprotect", reserved.protect(page * PAGE, PAGE, READ))?;
    }
    let fixed = (SHARED | libc::MAP_FIXED) as u64;
    let fd = file.as_raw_fd() as u64;
    // SAFETY: the reserved memory belongs to this check.
    let make = |number, args: [u64; 6]| unsafe { call(number, args) }.map(drop);
    let mapped = make(libc::SYS_mmap, [places[0], PAGE, WRITE as u64, fixed, fd, 0]);
    doing("mmap", mapped)?;
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut at = 0;
    let error = beside_seals(&file, F_SEAL_WRITE, || {
        let (from, to) = (places[at], places[1 - at]);
        at = 1 - at;
        make(libc::SYS_mremap, [from, PAGE, PAGE, flags, to, 0])
    });
    same!(error, 0, "the error of mremap beside refused seals");
    let remap = || make(libc::SYS_remap_file_pages, [places[at], PAGE, 0, 1, 0, 0]);
    let error = beside_seals(&file, F_SEAL_WRITE, remap);
    same!(error, 0, "the error of remap_file_pages beside refused seals");
    same!(seals(&file), 0, "the seals");
    Ok(())
}

/// `remap_file_pages` makes no mapping that may store to a sealed file.
fn sealed_files_are_not_mapped_again() -> Verdict {
    let ended = AtomicBool::new(false);
    let place = AtomicU64::new(0);
    // A thread that starts maps memory, possibly at the address that the check has just unmapped.
    let started = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            started.wait();
            while !ended.load(Ordering::Relaxed) {
                let at = place.load(Ordering::Relaxed);
                // SAFETY: the address belongs to this check.
                let _unless_gone = unsafe { call(libc::SYS_remap_file_pages, [at, PAGE, 0, 1, 0]) };
            }
        });
        started.wait();
        let checked = (0..500).try_for_each(|round| {
            let file = sealable(0)?;
            // Each round's file has a mark of its own in both pages.
            let mark: u64 = round + 1;
            for at in [0, PAGE] {
                same!(number(file.write_all_at(&mark.to_ne_bytes(), at)), 0, "pwrite");
            }
            let mapped = doing("mmap", map(&file, WRITE, SHARED))?;
            place.store(mapped.start(), Ordering::Relaxed);
            doing("munmap", mapped.unmap(0, PAGE))?;
            let sealed = seal(&file, F_SEAL_WRITE);
            let again = errno(mapped.protect(0, PAGE, WRITE));
            // On the bare kernel, the page may be mapped again: this file's, and then the seal is
            // refused, or the file of the previous round.
            let found = if again == 0 { mapped.load_outside(0).unwrap_or(0) } else { 0 };
            let is_mapped = again == 0 && sealed == if found == mark { EBUSY } else { 0 };
            let what = format!("F_SEAL_WRITE and mprotect in round {round}");
            ensure!(
                is_mapped || [sealed, again] == [0, ENOMEM],
                "{what}: {sealed}, {again}, and the mark {found} of the mapping"
            );
            Ok(())
        });
        ended.store(true, Ordering::Relaxed);
        checked
    })
}

const CHECKS: &[Check] = &[
    ("refused_seals_have_no_effect", refused_seals_have_no_effect),
    ("moving_mappings_exclude_the_seal", moving_mappings_exclude_the_seal),
    ("sealed_files_are_not_mapped_again", sealed_files_are_not_mapped_again),
    ("writable_mappings_exclude_the_seal", writable_mappings_exclude_the_seal),
    ("sealed_files_cannot_be_changed", sealed_files_cannot_be_changed),
    ("future_writes", future_writes),
    ("sealed_files_have_no_new_holes", sealed_files_have_no_new_holes),
    ("harmless_mappings_allow_the_seal", harmless_mappings_allow_the_seal),
    ("lengths", lengths),
    ("invalid_and_initial_seals", invalid_and_initial_seals),
];

fn main() {
    std::process::exit(check::run(&Args::read("seals", &[]), CHECKS));
}
