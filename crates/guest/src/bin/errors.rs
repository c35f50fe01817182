//! `errors [CHECK…]`: the errors of calls with unusual arguments, and the progress of calls before
//! an error.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{NONE, PAGE, READ, Region, WRITE};
use faultless_guest::proc::{self, Status};
use faultless_guest::same;
use faultless_guest::sys::{self, Errno, call, checked, doing};
use libc::{EAGAIN, EBADF, EBUSY, EFAULT, EINVAL, ENOENT, ENOMEM, ENOTSOCK};
use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::atomic::{AtomicBool, Ordering};

/// An address of the kernel.
const KERNEL: u64 = 0xffff_8000_0000_0000;
/// No bytes are mapped there.
const NULL_PAGE: u64 = 8;

/// Makes a call with this process's own memory and descriptors.
fn make<const N: usize>(number: i64, args: [u64; N]) -> sys::Result<u64> {
    // SAFETY: every caller passes pointers to its own memory, or to unmapped memory.
    unsafe { call(number, args) }
}

const fn fails<T>(number: i32) -> sys::Result<T> {
    Err(Errno(number))
}

fn private(prot: i32) -> Result<Region, String> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    doing("mmap", Region::map(PAGE, prot, flags, -1, 0))
}

/// Maps two readable pages and an inaccessible page.
fn ends_in_nothing() -> Result<Region, String> {
    let region = doing("mmap", Region::anonymous(3 * PAGE))?;
    region.fill(0x0101_0101_0101_0101);
    doing("mprotect", region.protect(2 * PAGE, PAGE, NONE))?;
    Ok(region)
}

fn memory_file() -> Result<File, String> {
    // SAFETY: the name is text, and the new descriptor belongs to the file.
    unsafe {
        let fd = doing("memfd_create", checked(libc::memfd_create(c"errors".as_ptr(), 0)))?;
        Ok(File::from_raw_fd(fd))
    }
}

fn fd(file: &impl AsRawFd) -> u64 {
    file.as_raw_fd() as u64
}

fn length(file: &File) -> Result<u64, String> {
    Ok(file.metadata().map_err(|error| error.to_string())?.len())
}

fn pipe() -> Result<[File; 2], String> {
    let (reader, writer) = std::io::pipe().map_err(|error| format!("pipe: {error}"))?;
    Ok([OwnedFd::from(reader).into(), OwnedFd::from(writer).into()])
}

/// A word without `FUTEX_PRIVATE_FLAG` must be in memory accessible to the process.
fn futexes() -> Verdict {
    let [read, none, written] = [private(READ)?, private(NONE)?, private(WRITE)?];
    let rows = [
        (&read, fails(EFAULT), fails(EFAULT), fails(EAGAIN)),
        (&none, fails(EFAULT), fails(EFAULT), fails(EFAULT)),
        (&written, Ok(0), fails(EAGAIN), fails(EAGAIN)),
    ];
    for (region, wake, wait, wait_private) in rows {
        let futex = |operation: i32, value| {
            make(libc::SYS_futex, [region.start(), operation as u64, value, 0])
        };
        let private = libc::FUTEX_PRIVATE_FLAG;
        same!(futex(libc::FUTEX_WAKE, 1), wake, "FUTEX_WAKE");
        same!(futex(libc::FUTEX_WAKE | private, 1), Ok(0), "FUTEX_WAKE of a private word");
        same!(futex(libc::FUTEX_WAIT, 9), wait, "FUTEX_WAIT");
        same!(futex(libc::FUTEX_WAIT | private, 9), wait_private, "FUTEX_WAIT, private");
    }
    // A page of a file mapped shared may be read-only.
    let file = memory_file()?;
    file.set_len(PAGE).map_err(|error| error.to_string())?;
    let region = Region::map(PAGE, READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
    let region = doing("mmap", region)?;
    let wait = make(libc::SYS_futex, [region.start(), libc::FUTEX_WAIT as u64, 9, 0]);
    same!(wait, fails(EAGAIN), "FUTEX_WAIT in a shared file");
    Ok(())
}

/// Pointers that are rejected, or not read, although no byte is moved.
fn pointers() -> Verdict {
    let file = memory_file()?;
    let zero = |number, at| make(number, [fd(&file), at, 0]);
    for (name, number) in [("read", libc::SYS_read), ("write", libc::SYS_write)] {
        same!(zero(number, KERNEL), fails(EFAULT), "{name} of no bytes at a kernel address");
        same!(zero(number, NULL_PAGE), Ok(0), "{name} of no bytes at an unmapped address");
        same!(make(number, [999, KERNEL, 0]), fails(EBADF), "{name} of a closed file");
    }
    let one = |number, at: u64, len: u64| {
        let piece = [at, len];
        make(number, [fd(&file), piece.as_ptr() as u64, 1])
    };
    for (name, number) in [("readv", libc::SYS_readv), ("writev", libc::SYS_writev)] {
        same!(one(number, KERNEL, 0), fails(EFAULT), "{name} of no bytes at a kernel address");
        same!(one(number, KERNEL, 9), fails(EFAULT), "{name} at a kernel address");
        same!(one(number, NULL_PAGE, 0), Ok(0), "{name} of no bytes at an unmapped address");
        let pieces = [(&raw const file) as u64, 4, KERNEL, 9];
        let both = make(number, [fd(&file), pieces.as_ptr() as u64, 2]);
        same!(both, fails(EFAULT), "{name} of which the second piece is at a kernel address");
        same!(make(number, [999, NULL_PAGE, 1]), fails(EBADF), "{name} of a closed file");
        let long = [NULL_PAGE, i64::MAX as u64, NULL_PAGE, 0];
        let both = make(number, [fd(&file), long.as_ptr() as u64, 2]);
        same!(both, fails(EFAULT), "{name} of a piece beyond user space");
    }
    same!(one(libc::SYS_readv, NULL_PAGE, 9), Ok(0), "readv at the end");
    same!(one(libc::SYS_readv, NULL_PAGE, i64::MAX as u64), Ok(0), "a long readv at the end");
    same!(one(libc::SYS_writev, NULL_PAGE, 9), fails(EFAULT), "writev from an unmapped address");
    let at_zero = |number, at: u64, len: u64| make(number, [fd(&file), at, len, 0]);
    for (name, number) in [("pread", libc::SYS_pread64), ("pwrite", libc::SYS_pwrite64)] {
        same!(at_zero(number, KERNEL, 0), fails(EFAULT), "{name} of no bytes at a kernel address");
        same!(at_zero(number, NULL_PAGE, 0), Ok(0), "{name} of no bytes at an unmapped address");
        let [reader, writer] = pipe()?;
        let end = if number == libc::SYS_pread64 { fd(&reader) } else { fd(&writer) };
        same!(make(number, [end, KERNEL, 9, 0]), fails(libc::ESPIPE), "{name} of a pipe");
        let other = if number == libc::SYS_pread64 { fd(&writer) } else { fd(&reader) };
        same!(make(number, [other, KERNEL, 9, 0]), fails(libc::ESPIPE), "{name} of the other end");
    }
    let set = doing("epoll_create1", make(libc::SYS_epoll_create1, [0]))?;
    let wait = |at, most: u64| make(libc::SYS_epoll_wait, [set, at, most, 0]);
    same!(wait(KERNEL, 1), fails(EFAULT), "epoll_wait at a kernel address");
    same!(wait(NULL_PAGE, 1), Ok(0), "epoll_wait at an unmapped address");
    let region = ends_in_nothing()?;
    same!(wait(region.start(), 0), fails(EINVAL), "epoll_wait for 0 events");
    let most = i32::MAX as u64;
    same!(wait(region.start(), most), fails(EINVAL), "epoll_wait for too many events");
    for (name, number) in [("sendmsg", libc::SYS_sendmsg), ("recvmsg", libc::SYS_recvmsg)] {
        same!(make(number, [fd(&file), NULL_PAGE, 0]), fails(ENOTSOCK), "{name} of a file");
        same!(make(number, [999, 0, 0]), fails(EBADF), "{name} of a closed file");
    }
    same!(make(libc::SYS_sched_getparam, [0, 0]), fails(EINVAL), "sched_getparam to NULL");
    let own = u64::from(std::process::id());
    let ended = libc::WEXITED as u64;
    let waited = make(libc::SYS_waitid, [1, own, NULL_PAGE, ended | 1, 0]);
    same!(waited, fails(EFAULT), "waitid without children, to an unmapped address");
    let waited = make(libc::SYS_waitid, [0, 0, 0, ended, 0]);
    same!(waited, fails(libc::ECHILD), "waitid without children, to NULL");
    let random = |at, len: u64| make(libc::SYS_getrandom, [at, len, 0]);
    let page = region.start() + 2 * PAGE;
    same!(random(page - 10, 100), Ok(10), "getrandom across the end of memory");
    same!(random(page, 10), fails(EFAULT), "getrandom to an unmapped address");
    Ok(())
}

/// Positions in `/proc/PID/mem` and `/proc/PID/pagemap` are addresses, and may be negative.
fn positions() -> Verdict {
    let mut word = 0u64;
    let at = (&raw mut word) as u64;
    for (path, past_end, below) in
        [("/proc/self/mem", libc::EOVERFLOW, libc::EIO), ("/proc/self/pagemap", EINVAL, EINVAL)]
    {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let seek = |offset: i64, whence: i32| {
            make(libc::SYS_lseek, [fd(&file), offset as u64, whence as u64])
        };
        let read = || make(libc::SYS_read, [fd(&file), at, 8]);
        // A small negative position has the value of an error.
        same!(seek(-8, libc::SEEK_SET), fails(8), "position -8 of {path}");
        same!(seek(0, libc::SEEK_CUR), fails(8), "the position of the file");
        same!(read(), fails(past_end), "a read at -8");
        same!(seek(-8000, libc::SEEK_CUR), Ok(-8008i64 as u64), "position -8008");
        same!(read(), fails(below), "a read at -8008");
        same!(seek(8016, libc::SEEK_CUR), Ok(8), "position 8");
        let most = i64::MAX as u64;
        same!(seek(i64::MAX, libc::SEEK_SET), Ok(most), "the largest position");
        same!(seek(1, libc::SEEK_CUR), Ok(most + 1), "the position after the largest");
        same!(seek(0, libc::SEEK_END), fails(EINVAL), "a position from the end");
        same!(seek(-1, libc::SEEK_DATA), fails(EINVAL), "the data before the start");
        let offset = [fd(&file), at, 8, -8i64 as u64];
        same!(make(libc::SYS_pread64, offset), fails(EINVAL), "pread at -8");
    }
    Ok(())
}

/// `readlinkat` without a path, and with an empty path.
fn links() -> Verdict {
    let file = memory_file()?;
    let mut buffer = [0u8; 64];
    let at = buffer.as_mut_ptr() as u64;
    let empty = c"".as_ptr() as u64;
    let read = |path, len: u64| make(libc::SYS_readlinkat, [fd(&file), path, at, len]);
    same!(read(0, 10), fails(EFAULT), "readlinkat of NULL");
    same!(read(empty, 10), fails(ENOENT), "readlinkat of an empty path");
    same!(read(empty, 0), fails(EINVAL), "readlinkat to no bytes");
    same!(make(libc::SYS_readlink, [0, at, 10]), fails(EFAULT), "readlink of NULL");
    same!(make(libc::SYS_readlink, [empty, at, 10]), fails(ENOENT), "readlink of an empty path");
    let name = format!("/tmp/errors.{}", std::process::id());
    std::os::unix::fs::symlink("target", &name).map_err(|error| error.to_string())?;
    let path = CString::new(name.as_str()).map_err(|error| error.to_string())?;
    let flags = (libc::O_PATH | libc::O_NOFOLLOW) as u64;
    let link = make(libc::SYS_openat, [libc::AT_FDCWD as u64, path.as_ptr() as u64, flags]);
    let _ = fs::remove_file(&name);
    let link = doing("openat", link)?;
    same!(make(libc::SYS_readlinkat, [link, empty, at, 64]), Ok(6), "readlinkat of a link");
    same!(&buffer[..6], b"target", "the target");
    Ok(())
}

/// The expected contents of a file.
struct Model<'a> {
    file: &'a File,
    bytes: Vec<u8>,
}

impl Model<'_> {
    /// Stores `bytes` at `at`; bytes between the end and `at` are zero.
    fn write(&mut self, at: u64, bytes: &[u8]) {
        let at = at as usize;
        self.resize(self.bytes.len().max(at + bytes.len()) as u64);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn resize(&mut self, len: u64) {
        self.bytes.resize(len as usize, 0);
    }

    /// Checks the length and the contents of the file.
    fn check(&self, what: &str) -> Verdict {
        same!(length(self.file)?, self.bytes.len() as u64, "the length after {what}");
        let mut found = vec![0; self.bytes.len()];
        self.file.read_exact_at(&mut found, 0).map_err(|error| error.to_string())?;
        let wrong = found.iter().zip(&self.bytes).position(|(found, expected)| found != expected);
        same!(wrong, None, "the offset of the first wrong byte after {what}");
        Ok(())
    }
}

/// A write from memory that ends writes the available bytes.
fn short_writes() -> Verdict {
    let region = ends_in_nothing()?;
    let bytes: Vec<u8> = (0..2 * PAGE).map(|at| (at % 251) as u8 + 1).collect();
    for (page, words) in bytes.chunks_exact(8).enumerate() {
        let word = words.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        region.store(8 * page as u64, word);
    }
    let end = region.start() + 2 * PAGE;
    let tail = |len: u64| &bytes[(2 * PAGE - len) as usize..];
    let file = memory_file()?;
    let mut model = Model { file: &file, bytes: Vec::new() };
    let write = |from: u64, len: u64, to: u64| make(libc::SYS_pwrite64, [fd(&file), from, len, to]);
    same!(write(end, 10, 0), fails(EFAULT), "a write from an unmapped address");
    model.check("a write from an unmapped address")?;
    same!(write(end - 100, PAGE, 0), Ok(100), "a write to a new page");
    model.write(0, tail(100));
    model.check("a write to a new page")?;
    same!(write(region.start() + PAGE - 100, 3 * PAGE, 0), Ok(4196), "a write to two new pages");
    model.write(0, tail(4196));
    model.check("a write to two new pages")?;
    same!(write(end - 4, 10, 4 * PAGE - 2), Ok(4), "a write across two pages");
    model.write(4 * PAGE - 2, tail(4));
    model.check("a write across two pages")?;
    for (page, what) in [(PAGE, "a page that is there"), (2 * PAGE, "a hole")] {
        same!(write(end - 100, PAGE, page), Ok(100), "a short write to {what}");
        model.write(page, tail(100));
        model.check(&format!("a short write to {what}"))?;
    }
    // A mapping of the file beyond its end cannot be read, even by the write that would move the
    // end.
    let file = memory_file()?;
    file.write_all_at(&bytes[..PAGE as usize], 0).map_err(|error| error.to_string())?;
    let mut model = Model { file: &file, bytes: bytes[..PAGE as usize].to_vec() };
    let own = Region::map(4 * PAGE, WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0);
    let own = doing("mmap", own)?;
    let write = |from: u64, len: u64| make(libc::SYS_pwrite64, [fd(&file), from, len, PAGE]);
    same!(write(own.start() + PAGE, PAGE), fails(EFAULT), "a write from beyond the own end");
    model.check("a write from beyond the own end")?;
    // Bytes that the write itself adds can be read.
    for (before, from, len, to) in [
        (PAGE, 0, 2 * PAGE, PAGE),
        (PAGE, 0, 2 * PAGE, 4000),
        (PAGE, 100, 3 * PAGE, PAGE),
        (PAGE, 0, 2 * PAGE, 2 * PAGE),
        (PAGE + 100, 0, 3 * PAGE, PAGE + 100),
    ] {
        file.set_len(before).map_err(|error| error.to_string())?;
        model.resize(before);
        let args = [fd(&file), own.start() + from, len, to];
        let what = format!("{len} bytes of {before} from byte {from} of the same file to {to}");
        same!(make(libc::SYS_pwrite64, args), Ok(len), "{what}");
        // The bytes are copied in order, and each copied byte is in the file at once.
        model.resize(to + len);
        for at in 0..len {
            model.bytes[(to + at) as usize] = model.bytes[(from + at) as usize];
        }
        model.check(&what)?;
    }
    Ok(())
}

/// A part of a pipe that cannot be stored is not lost.
fn vectors_of_pipes() -> Verdict {
    let mut buffer = vec![0u8; PAGE as usize];
    let at = buffer.as_mut_ptr() as u64;
    let rows: [(u64, u64, usize, sys::Result<u64>, usize); 4] = [
        (10, 10, 20, fails(EFAULT), 20),
        (10, 10, 10, Ok(10), 0),
        (PAGE, 10, PAGE as usize + 5, Ok(PAGE), 5),
        (PAGE, PAGE, 2 * PAGE as usize, Ok(PAGE), PAGE as usize),
    ];
    for (first, second, bytes, expected, expected_left) in rows {
        let [mut reader, mut writer] = pipe()?;
        writer.write_all(&vec![7; bytes]).map_err(|error| error.to_string())?;
        let pieces = [at, first, NULL_PAGE, second];
        let read = make(libc::SYS_readv, [fd(&reader), pieces.as_ptr() as u64, 2]);
        same!(read, expected, "readv of {bytes} bytes to {first} and an unmapped address");
        drop(writer);
        let mut left = Vec::new();
        reader.read_to_end(&mut left).map_err(|error| error.to_string())?;
        same!(left.len(), expected_left, "the remaining bytes");
    }
    Ok(())
}

/// Memory of other processes must be readable for them, even if the processor could read it.
fn other_memory() -> Verdict {
    let [read, none, written] = [private(READ)?, private(NONE)?, private(WRITE)?];
    let only_written = private(libc::PROT_WRITE)?;
    let mut value = 0u64;
    let rows = [
        (&only_written, fails(EFAULT), Ok(8)),
        (&read, Ok(8), fails(EFAULT)),
        (&none, fails(EFAULT), fails(EFAULT)),
        (&written, Ok(8), Ok(8)),
    ];
    for (region, loads, stores) in rows {
        let pieces = [(&raw mut value) as u64, 8, region.start(), 8];
        let (here, there) = (pieces.as_ptr() as u64, pieces[2..].as_ptr() as u64);
        let own = u64::from(std::process::id());
        same!(make(libc::SYS_process_vm_readv, [own, here, 1, there, 1, 0]), loads, "a read");
        same!(make(libc::SYS_process_vm_writev, [own, here, 1, there, 1, 0]), stores, "a write");
    }
    Ok(())
}

/// `msync` of no bytes, and of a length that wraps to 0 when rounded up.
fn syncs() -> Verdict {
    let region = private(WRITE)?;
    let sync = |len: u64, flags: i32| make(libc::SYS_msync, [region.start(), len, flags as u64]);
    same!(sync(0, libc::MS_SYNC), Ok(0), "msync of no bytes");
    same!(sync(u64::MAX, libc::MS_SYNC), Ok(0), "msync of a length that wraps");
    same!(sync(u64::MAX - PAGE + 1, libc::MS_SYNC), fails(ENOMEM), "msync across the end");
    doing("mlock", make(libc::SYS_mlock, [region.start(), PAGE]))?;
    let invalidate = libc::MS_INVALIDATE;
    same!(sync(0, libc::MS_SYNC | invalidate), Ok(0), "MS_INVALIDATE of no locked bytes");
    same!(sync(PAGE, libc::MS_SYNC | invalidate), fails(EBUSY), "MS_INVALIDATE of a locked page");
    same!(sync(1, libc::MS_ASYNC | invalidate), fails(EBUSY), "MS_INVALIDATE of a locked byte");
    Ok(())
}

/// A heap that ends in a hole: a new end within the hole is refused, and a new end below the hole
/// is accepted.
fn heap() -> Verdict {
    let brk = |to| make(libc::SYS_brk, [to]);
    let start = doing("brk", brk(0))?.next_multiple_of(PAGE);
    let end = start + 10 * PAGE;
    same!(brk(end), Ok(end), "brk");
    doing("munmap", make(libc::SYS_munmap, [end - 4 * PAGE, 4 * PAGE]))?;
    same!(brk(end - 2 * PAGE), Ok(end), "a new end within the hole");
    same!(brk(end - 4 * PAGE), Ok(end), "a new end at the hole");
    same!(brk(end - 6 * PAGE), Ok(end - 6 * PAGE), "a new end below the hole");
    same!(brk(start), Ok(start), "the start");
    Ok(())
}

/// Copies within a file must not overlap, even if a position supplies an offset.
fn overlaps() -> Verdict {
    let mut file = memory_file()?;
    file.write_all(&[1; 20_000]).map_err(|error| error.to_string())?;
    file.seek(SeekFrom::Start(0)).map_err(|error| error.to_string())?;
    let mut from = 50u64;
    let at = (&raw mut from) as u64;
    let copy =
        |from, len: u64| make(libc::SYS_copy_file_range, [fd(&file), from, fd(&file), 0, len, 0]);
    same!(copy(at, 100), fails(EINVAL), "a copy of 100 bytes over 50");
    same!(copy(0, 100), fails(EINVAL), "a copy of bytes to themselves");
    same!(copy(at, 50), Ok(50), "a copy of 50 bytes over 50");
    same!(from, 100, "the offset afterwards");
    // Bytes beyond the end do not overlap.
    let (mut first, mut second) = (19_950u64, 20_000u64);
    let ends = [(&raw mut first) as u64, (&raw mut second) as u64];
    let args = [fd(&file), ends[0], fd(&file), ends[1], 1000, 0];
    same!(make(libc::SYS_copy_file_range, args), Ok(50), "a copy of the last 50 bytes");
    same!(length(&file)?, 20_050, "the length");
    Ok(())
}

/// `sendfile` and `splice` do not append to a file.
fn appending_copies() -> Verdict {
    let (file, mut source) = (memory_file()?, memory_file()?);
    source.write_all(b"bytes").map_err(|error| error.to_string())?;
    let [reader, mut writer] = pipe()?;
    writer.write_all(b"bytes").map_err(|error| error.to_string())?;
    let zero = 0u64;
    let at = (&raw const zero) as u64;
    let send = |to: &File| make(libc::SYS_sendfile, [fd(to), fd(&source), at, 5]);
    let splice = |to: &File| make(libc::SYS_splice, [fd(&reader), 0, fd(to), 0, 5, 0]);
    let append = |file: &File| {
        let flags = libc::O_APPEND as u64;
        doing("fcntl", make(libc::SYS_fcntl, [fd(file), libc::F_SETFL as u64, flags]))
    };
    append(&file)?;
    same!(send(&file), fails(EINVAL), "sendfile to a file that appends");
    same!(splice(&file), fails(EINVAL), "splice to a file that appends");
    append(&writer)?;
    same!(send(&writer), Ok(5), "sendfile to a pipe that appends");
    let (read, written) = (File::open("/proc/self/status"), File::open("/dev/null"));
    let (Ok(read), Ok(written)) = (read, written) else { return Err("no /dev/null".to_owned()) };
    same!(send(&written), fails(EBADF), "sendfile to a file opened for reading");
    let splice = make(libc::SYS_splice, [fd(&writer), 0, fd(&read), 0, 5, 0]);
    same!(splice, fails(EBADF), "splice from the wrong end");
    // A pipe has no offsets.
    let target = memory_file()?;
    let splice = |from: (&File, u64), to: (&File, u64)| {
        make(libc::SYS_splice, [fd(from.0), from.1, fd(to.0), to.1, 5, 0])
    };
    same!(
        splice((&reader, at), (&target, 0)),
        fails(libc::ESPIPE),
        "splice at an offset of a pipe"
    );
    same!(
        splice((&source, 0), (&writer, at)),
        fails(libc::ESPIPE),
        "splice to an offset of a pipe"
    );
    same!(splice((&reader, NULL_PAGE), (&target, 0)), fails(libc::ESPIPE), "an unmapped offset");
    let send = make(libc::SYS_sendfile, [fd(&target), fd(&reader), at, 5]);
    same!(send, fails(libc::ESPIPE), "sendfile from an offset of a pipe");
    same!(length(&target)?, 0, "the length of the target");
    Ok(())
}

/// Calls that need an open file fail for a descriptor made with `O_PATH`.
fn paths_are_not_open() -> Verdict {
    let path = make(libc::SYS_open, [c"/tmp".as_ptr() as u64, libc::O_PATH as u64]);
    let path = doing("open", path)?;
    let file = memory_file()?;
    let other = fd(&file);
    let calls: [(&str, i64, [u64; 6]); 9] = [
        ("fchmod", libc::SYS_fchmod, [path, 0o1777, 0, 0, 0, 0]),
        ("fchown", libc::SYS_fchown, [path, u64::MAX, u64::MAX, 0, 0, 0]),
        ("utimensat", libc::SYS_utimensat, [path, 0, 0, 0, 0, 0]),
        ("copy_file_range", libc::SYS_copy_file_range, [path, 0, other, 0, 5, 0]),
        ("copy_file_range to", libc::SYS_copy_file_range, [other, 0, path, 0, 5, 0]),
        ("sendfile", libc::SYS_sendfile, [other, path, 0, 5, 0, 0]),
        ("fsync", libc::SYS_fsync, [path, 0, 0, 0, 0, 0]),
        ("flock", libc::SYS_flock, [path, libc::LOCK_UN as u64, 0, 0, 0, 0]),
        ("ftruncate", libc::SYS_ftruncate, [path, 0, 0, 0, 0, 0]),
    ];
    for (name, number, args) in calls {
        same!(make(number, args), fails(EBADF), "{name} of a path");
    }
    Ok(())
}

/// A read of a descriptor that another thread replaces is a read of one of the files.
fn replaced_descriptors() -> Verdict {
    let mut read = memory_file()?;
    read.write_all(&[7; 10]).map_err(|error| error.to_string())?;
    let written = File::create("/dev/null").map_err(|error| error.to_string())?;
    let place = make(libc::SYS_dup, [fd(&read)]);
    let place = doing("dup", place)?;
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for file in [&written, &read] {
                    // The descriptor belongs to this check.
                    let _ = make(libc::SYS_dup3, [fd(file), place, 0]);
                }
            }
        });
        let mut buffer = [0u8; 10];
        let at = buffer.as_mut_ptr() as u64;
        let wrong = (0..50_000).find_map(|_| {
            let moved = make(libc::SYS_pread64, [place, at, 10, 0]);
            (moved != Ok(10) && moved != fails(EBADF)).then_some(moved)
        });
        ended.store(true, Ordering::Relaxed);
        same!(wrong, None, "a read of a file of 10 bytes, or of a file opened for writing");
        Ok(())
    })
}

/// Names before a slash, and names that cannot be moved.
fn names() -> Verdict {
    let dir = format!("/tmp/errors.{}.names", std::process::id());
    fs::create_dir(&dir).map_err(|error| error.to_string())?;
    let checked = names_in(&dir);
    let _ = fs::remove_dir_all(&dir);
    checked
}

fn names_in(dir: &str) -> Verdict {
    let error = |error: std::io::Error| error.to_string();
    for name in ["d", "dd", "a", "a/s"] {
        fs::create_dir(format!("{dir}/{name}")).map_err(error)?;
    }
    for name in ["f", "g", "a/f"] {
        fs::write(format!("{dir}/{name}"), name).map_err(error)?;
    }
    for (target, name) in [("d", "ld"), ("none", "dangling"), ("g", "lg")] {
        std::os::unix::fs::symlink(target, format!("{dir}/{name}")).map_err(error)?;
    }
    let path = |name: &str| {
        // A path from the root stays as it is.
        let path = if name.starts_with('/') { name.to_owned() } else { format!("{dir}/{name}") };
        CString::new(path).map_err(|error| error.to_string())
    };
    let rows: &[(&str, i64, i32)] = &[
        ("ld/", libc::SYS_unlink, libc::ENOTDIR),
        ("lg/", libc::SYS_unlink, libc::ENOTDIR),
        ("g/", libc::SYS_unlink, libc::ENOTDIR),
        ("d/", libc::SYS_unlink, libc::EISDIR),
        ("none/", libc::SYS_unlink, ENOENT),
        ("/", libc::SYS_unlink, libc::EISDIR),
        ("ld/", libc::SYS_rmdir, libc::ENOTDIR),
        ("lg/", libc::SYS_rmdir, libc::ENOTDIR),
        ("g/", libc::SYS_rmdir, libc::ENOTDIR),
        ("d/.", libc::SYS_rmdir, EINVAL),
        ("d/..", libc::SYS_rmdir, libc::ENOTEMPTY),
        ("/", libc::SYS_rmdir, EBUSY),
        ("dangling/", libc::SYS_mkdir, libc::EEXIST),
        ("g/", libc::SYS_mkdir, libc::EEXIST),
    ];
    for &(name, number, expected) in rows {
        let made = make(number, [path(name)?.as_ptr() as u64, 0o755]);
        same!(made, fails(expected), "the call {number} of {name}");
    }
    const KEEP: u32 = libc::RENAME_NOREPLACE;
    const EXCHANGE: u32 = libc::RENAME_EXCHANGE;
    let rename = |old: &str, new: &str, flags: u32| {
        let (old, new, here) = (path(old)?, path(new)?, libc::AT_FDCWD as u64);
        let args = [here, old.as_ptr() as u64, here, new.as_ptr() as u64, flags.into()];
        Ok::<_, String>(make(libc::SYS_renameat2, args))
    };
    let rows: &[(&str, &str, u32, i32)] = &[
        ("d", "g/", EXCHANGE, libc::ENOTDIR),
        ("d", "none/", EXCHANGE, ENOENT),
        ("f", "dd/", EXCHANGE, 0),
        ("f", "dd", EXCHANGE, 0),
        ("d", "..", KEEP, libc::EEXIST),
        ("d", ".", KEEP, libc::EEXIST),
        ("d", "/", KEEP, libc::EEXIST),
        ("none", "..", KEEP, libc::EEXIST),
        ("..", "g", KEEP, EBUSY),
        ("d", "..", 0, EBUSY),
        ("none", "g/", 0, ENOENT),
        ("ld/", "new", 0, libc::ENOTDIR),
        ("g", "new/", 0, libc::ENOTDIR),
        ("d", "lg/", 0, libc::ENOTDIR),
        ("d", "dangling/", 0, libc::ENOTDIR),
        ("a/f", "a", 0, libc::ENOTEMPTY),
        ("a/s", "a", 0, libc::ENOTEMPTY),
        ("a/f", "a", KEEP, libc::EEXIST),
        ("a/f", "a", EXCHANGE, EINVAL),
        ("a", "a/new", 0, EINVAL),
        ("a", "a/f", 0, EINVAL),
        ("a", "a/f", KEEP, libc::EEXIST),
    ];
    for &(old, new, flags, number) in rows {
        let expected = if number == 0 { Ok(0) } else { fails(number) };
        same!(rename(old, new, flags)?, expected, "rename of {old} to {new} with {flags}");
    }
    // A mount point keeps its name.
    let beside = format!("/errors.{}", std::process::id());
    if fs::create_dir(&beside).is_ok() {
        let exchanged = rename(&beside, "/proc", EXCHANGE);
        let replaced = rename(&beside, "/proc", 0);
        let _ = fs::remove_dir(&beside);
        same!(exchanged?, fails(EBUSY), "an exchange with a mount point");
        same!(replaced?, fails(EBUSY), "a move to a mount point");
    }
    Ok(())
}

/// `madvise` that would split a VMA at the limit can be retried.
fn many_areas() -> Verdict {
    const PAIRS: u64 = 33_000;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // With other permissions, to prevent a merge with the region below.
    let whole = doing("mmap", Region::map(4 * PAGE, WRITE, flags, -1, 0))?;
    let region = doing("mmap", Region::map(2 * PAIRS * PAGE, NONE, flags, -1, 0))?;
    let split = |page| region.protect(page * PAGE, PAGE, READ);
    let full = (0..PAIRS).map(|pair| split(2 * pair + 1)).find(Result::is_err);
    same!(full, Some(fails(ENOMEM)), "mprotect");
    // There may be space for one more VMA.
    let _ = whole.protect(3 * PAGE, PAGE, READ);
    let advised = whole.advise(PAGE, PAGE, libc::MADV_DONTFORK);
    same!(advised, fails(EAGAIN), "MADV_DONTFORK of a part");
    same!(whole.unmap(PAGE, PAGE), fails(ENOMEM), "munmap of a part");
    same!(whole.advise(0, 4 * PAGE, libc::MADV_DONTFORK), Ok(()), "MADV_DONTFORK of all");
    Ok(())
}

/// Runs `path`, which prints to a pipe. Returns its output and the error number of `execve`.
fn run(path: &str) -> Result<(String, i32), String> {
    let [mut reader, writer] = pipe()?;
    let program = CString::new(path).map_err(|error| error.to_string())?;
    let words = [program.as_ptr() as u64, 0];
    let status = proc::outcome(|| {
        // SAFETY: descriptors of this process; and the words live until the program runs.
        unsafe {
            libc::dup2(writer.as_raw_fd(), 1);
            let ran = call(libc::SYS_execve, [words[0], words.as_ptr() as u64, 0]);
            faultless_guest::mem::errno(ran)
        }
    })?;
    drop(writer);
    let mut printed = String::new();
    reader.read_to_string(&mut printed).map_err(|error| error.to_string())?;
    match status {
        Status::Exited(number) => Ok((printed, number)),
        Status::Killed(signal) => Err(format!("{path} was ended by signal {signal}")),
    }
}

fn script(path: &str, first_line: &str) -> Result<(), String> {
    let written = fs::write(path, format!("{first_line}\n"));
    let written = written.and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o755)));
    written.map_err(|error| format!("{path}: {error}"))
}

/// Scripts that are interpreters of scripts, and long first lines.
fn scripts() -> Verdict {
    let own = fs::read_link("/proc/self/exe").map_err(|error| error.to_string())?;
    let own = own.to_str().ok_or("the path is not text")?;
    let dir = format!("/tmp/errors.{}.d", std::process::id());
    let made = fs::create_dir(&dir).or_else(|_| fs::create_dir_all(&dir));
    made.map_err(|error| error.to_string())?;
    let path = |level: usize| format!("{dir}/{level}");
    script(&path(1), &format!("#!{own} print"))?;
    for level in 2..=6 {
        script(&path(level), &format!("#!{}", path(level - 1)))?;
    }
    let [five, six] = [run(&path(5))?, run(&path(6))?];
    // An argument that continues beyond the read part of the file is cut off.
    let name = path(7);
    let long = "x".repeat(300);
    script(&name, &format!("#!{own} print {long}"))?;
    let cut = run(&name)?;
    // A name that may continue beyond the read part is invalid.
    script(&name, &format!("#!/{long}"))?;
    let unnamed = run(&name)?;
    script(&name, &format!("#!{}{own}", " ".repeat(300)))?;
    let blank = run(&name)?;
    let _ = fs::remove_dir_all(&dir);
    let words = format!("print {} {} {} {} {}\n", path(1), path(2), path(3), path(4), path(5));
    same!(five, (words, 0), "five scripts");
    same!(six, (String::new(), libc::ELOOP), "six scripts");
    let line = format!("#!{own} print {long}");
    let (argument, script) = (&line[own.len() + 3..255], &name);
    same!(cut, (format!("{argument} {script}\n"), 0), "a long argument");
    same!(unnamed, (String::new(), libc::ENOEXEC), "a long name");
    same!(blank, (String::new(), libc::ENOEXEC), "300 blanks");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("futexes", futexes),
    ("pointers", pointers),
    ("positions", positions),
    ("links", links),
    ("short_writes", short_writes),
    ("vectors_of_pipes", vectors_of_pipes),
    ("other_memory", other_memory),
    ("syncs", syncs),
    ("heap", heap),
    ("overlaps", overlaps),
    ("appending_copies", appending_copies),
    ("paths_are_not_open", paths_are_not_open),
    ("replaced_descriptors", replaced_descriptors),
    ("names", names),
    ("many_areas", many_areas),
    ("scripts", scripts),
];

fn main() {
    // As the interpreter of a script.
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word.starts_with("print")) {
        println!("{}", words.join(" "));
        return;
    }
    std::process::exit(check::run(&Args::read("errors", &[]), CHECKS));
}
