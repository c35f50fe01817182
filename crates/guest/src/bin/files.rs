//! `files [CHECK…] [dir=DIR]`: what programs expect of files, mapped ones too, of pipes and of `/proc`.
//! Files are made, and removed, in a directory of their own in DIR (`/tmp`).

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{PAGE, READ, Region, WRITE, load};
use faultless_guest::proc::{self, Status, fork, pid};
use faultless_guest::sys::{Errno, call, checked, doing};
use faultless_guest::{check, clock, ensure, same, signal};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Instant;

static DIR: OnceLock<PathBuf> = OnceLock::new();

fn path(name: &str) -> PathBuf {
    DIR.get().map_or_else(|| PathBuf::from("/tmp"), Clone::clone).join(name)
}

/// The error of `std::io`, with what was being done.
fn io<T>(what: &str, result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{what}: {error}"))
}

/// The error number of a result of `std::io`, or 0.
fn number<T>(result: std::io::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.raw_os_error().unwrap_or(-1))
}

fn create(name: &str) -> Result<File, String> {
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path(name));
    io(&format!("create {name}"), file)
}

fn c_string(path: &std::path::Path) -> Result<CString, String> {
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())
}

/// Opens with flags of Linux's own.
fn open(name: &str, flags: i32) -> Result<OwnedFd, Errno> {
    let path = c_string(&path(name)).map_err(|_| Errno(libc::EINVAL))?;
    // SAFETY: the path lives as long as the call, and nobody else owns what is opened.
    unsafe { checked(libc::open(path.as_ptr(), flags, 0o644)).map(|fd| OwnedFd::from_raw_fd(fd)) }
}

/// Reads, writes and positions.
fn read_write() -> Verdict {
    let mut file = create("a")?;
    same!(io("write", file.write(b"hello, world"))?, 12, "bytes written");
    same!(io("seek", file.stream_position())?, 12, "the position");
    same!(io("seek", file.seek(SeekFrom::Start(7)))?, 7, "the position");
    let mut buffer = [0; 64];
    same!(io("read", file.read(&mut buffer))?, 5, "bytes read");
    same!(&buffer[..5], b"world", "what was read");
    same!(io("read", file.read(&mut buffer))?, 0, "bytes read at the end");
    same!(io("pread", file.read_at(&mut buffer, 1))?, 11, "bytes read at 1");
    same!(io("pwrite", file.write_at(b"W", 7))?, 1, "bytes written at 7");
    same!(io("seek", file.stream_position())?, 12, "the position, which pwrite leaves alone");
    // Beyond the end: what lies between is zero.
    same!(io("pwrite", file.write_at(b"!", 10_000))?, 1, "bytes written far beyond the end");
    same!(io("stat", file.metadata())?.len(), 10_001, "the length");
    let all = io("read", fs::read(path("a")))?;
    same!(&all[..12], b"hello, World", "the beginning");
    ensure!(all[12..10_000].iter().all(|&byte| byte == 0), "the hole is not zero");
    same!(number(file.seek(SeekFrom::Current(-100_000))), libc::EINVAL, "seeking below 0");
    same!(io("seek", file.seek(SeekFrom::End(-1)))?, 10_000, "the position of the last byte");
    let read_only = doing("open", open("a", libc::O_RDONLY))?;
    let mut read_only = File::from(read_only);
    same!(number(read_only.write(b"x")), libc::EBADF, "writing to what is open for reading");
    let append = doing("open", open("a", libc::O_WRONLY | libc::O_APPEND))?;
    let mut append = File::from(append);
    same!(io("write", append.write(b"end"))?, 3, "bytes appended");
    same!(io("stat", append.metadata())?.len(), 10_004, "the length after appending");
    same!(number(append.read(&mut buffer)), libc::EBADF, "reading what is open for writing");
    Ok(())
}

/// Vectors, and buffers that are not memory.
fn vectors_and_faults() -> Verdict {
    let file = create("a")?;
    let fd = file.as_raw_fd() as u64;
    let vectors = [(b"one ".as_ptr() as u64, 4u64), (0, 0), (b"two".as_ptr() as u64, 3)];
    // SAFETY: the buffers live; the kernel only reads them.
    let written = unsafe { call(libc::SYS_writev, [fd, vectors.as_ptr() as u64, 3]) };
    same!(written, Ok(7), "writev");
    let ask = |number, buffer: u64, len: u64| {
        // SAFETY: the buffers are no memory that Rust knows of, or not written.
        unsafe { call(number, [fd, buffer, len, 0]) }
    };
    let region = doing("mmap", Region::anonymous(2 * PAGE))?;
    doing("munmap", region.unmap(PAGE, PAGE))?;
    let fault = Err(Errno(libc::EFAULT));
    let gone = region.start() + PAGE;
    for bad in [8, gone, 0xffff_8000_0000_0000, 0x8000_0000_0000_0000, u64::MAX - 3] {
        same!(ask(libc::SYS_pwrite64, bad, 4), fault, "pwrite from {bad:#x}");
        same!(ask(libc::SYS_pread64, bad, 4), fault, "pread to {bad:#x}");
    }
    // What is there up to the fault is written.
    doing("ftruncate", checked(truncate(&file, 0)))?;
    let partial = ask(libc::SYS_pwrite64, gone - 16, 64);
    ensure!(
        partial == fault || partial == Ok(16),
        "pwrite of a buffer of which 16 bytes are mapped: {partial:?}"
    );
    same!(ask(libc::SYS_pwrite64, region.start(), 0), Ok(0), "pwrite of nothing");
    same!(ask(libc::SYS_pwrite64, 8, 0), Ok(0), "pwrite of nothing from nowhere");
    let read_only =
        doing("mmap", Region::map(PAGE, READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0))?;
    io("write", file.write_all_at(b"content", 0))?;
    same!(ask(libc::SYS_pread64, read_only.start(), 4), fault, "pread to read-only memory");
    // SAFETY: a plain call.
    let closed = unsafe { call(libc::SYS_read, [9999, region.start(), 4]) };
    same!(closed, Err(Errno(libc::EBADF)), "reading what is not open");
    let bad = c"/no/such/dir/file";
    // SAFETY: a plain call.
    let missing = checked(unsafe { libc::open(bad.as_ptr(), libc::O_RDONLY) });
    same!(missing, Err(Errno(libc::ENOENT)), "opening what is not there");
    // SAFETY: the path is no memory, which the kernel must find.
    let nowhere = unsafe { call(libc::SYS_open, [8, 0, 0]) };
    same!(nowhere, Err(Errno(libc::EFAULT)), "opening a path that is no memory");
    Ok(())
}

fn truncate(file: &impl AsRawFd, len: i64) -> i32 {
    // SAFETY: a plain call.
    unsafe { libc::ftruncate(file.as_raw_fd(), len) }
}

/// Shared mappings and the file are one; private ones see the file until they are written.
fn mappings() -> Verdict {
    let file = create("a")?;
    let fd = file.as_raw_fd();
    for page in 0..8u64 {
        io("pwrite", file.write_all_at(&page.to_ne_bytes(), page * PAGE))?;
    }
    doing("ftruncate", checked(truncate(&file, 8 * PAGE as i64)))?;
    let map = |len, prot, flags, at| doing("mmap", Region::map(len, prot, flags, fd, at));
    let shared = map(8 * PAGE, WRITE, libc::MAP_SHARED, 0)?;
    let private = map(8 * PAGE, WRITE, libc::MAP_PRIVATE, 0)?;
    let later = map(PAGE, READ, libc::MAP_SHARED, 3 * PAGE)?;
    for page in 0..8 {
        same!(shared.load(page * PAGE), page, "page {page}, shared");
        same!(private.load(page * PAGE), page, "page {page}, private");
    }
    same!(later.load(0), 3, "the page mapped at an offset");
    let word = |at| {
        let mut bytes = [0; 8];
        io("pread", file.read_exact_at(&mut bytes, at)).map(|()| u64::from_ne_bytes(bytes))
    };
    shared.store(3 * PAGE, 33);
    same!(word(3 * PAGE)?, 33, "a store to the shared mapping, read from the file");
    same!(later.load(0), 33, "the same in another mapping");
    same!(private.load(3 * PAGE), 33, "the same in a private mapping that was only read");
    io("pwrite", file.write_all_at(&44u64.to_ne_bytes(), 4 * PAGE))?;
    same!(shared.load(4 * PAGE), 44, "what was written to the file, in the shared mapping");
    private.store(5 * PAGE, 55);
    same!((shared.load(5 * PAGE), word(5 * PAGE)?), (5, 5), "the file after a private store");
    shared.store(5 * PAGE, 66);
    same!(private.load(5 * PAGE), 55, "the private copy after a shared store");
    doing("madvise", private.advise(5 * PAGE, PAGE, libc::MADV_DONTNEED))?;
    same!(private.load(5 * PAGE), 66, "a private copy that was given up");
    // Children share the one and not the other.
    let child = doing(
        "fork",
        fork(|| {
            shared.store(6 * PAGE, 77);
            private.store(6 * PAGE, 88);
            0
        }),
    )?;
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the child");
    same!((shared.load(6 * PAGE), word(6 * PAGE)?), (77, 77), "what a child stored, shared");
    same!(private.load(6 * PAGE), 77, "what a child stored, private");
    doing("msync", sync(&shared))?;
    let read_only = doing("open", open("a", libc::O_RDONLY))?;
    let refused = |len, prot, flags, fd, at| Region::map(len, prot, flags, fd, at).err();
    let fd_read = read_only.as_raw_fd();
    same!(
        refused(PAGE, WRITE, libc::MAP_SHARED, fd_read, 0),
        Some(Errno(libc::EACCES)),
        "a writable shared mapping of a file open for reading"
    );
    same!(refused(PAGE, WRITE, libc::MAP_PRIVATE, fd_read, 0), None, "a private one");
    same!(
        refused(PAGE, READ, libc::MAP_SHARED, 999, 0),
        Some(Errno(libc::EBADF)),
        "a mapping of no file"
    );
    same!(refused(PAGE, READ, libc::MAP_SHARED, fd, 1), Some(Errno(libc::EINVAL)), "an odd offset");
    same!(
        refused(0, READ, libc::MAP_SHARED, fd, 0),
        Some(Errno(libc::EINVAL)),
        "a mapping of nothing"
    );
    let region = doing("mmap", Region::map(PAGE, READ, libc::MAP_SHARED, fd_read, 0))?;
    same!(region.protect(0, PAGE, WRITE), Err(Errno(libc::EACCES)), "mprotect of it for writing");
    Ok(())
}

fn sync(region: &Region) -> Result<(), Errno> {
    let args = [region.start(), region.len(), libc::MS_SYNC as u64];
    // SAFETY: changes nothing in memory.
    unsafe { call(libc::SYS_msync, args) }.map(|_| ())
}

/// A mapping outlives the descriptor, the name, and the process that made the file.
fn mappings_outlive() -> Verdict {
    let file = create("a")?;
    doing("ftruncate", checked(truncate(&file, 4 * PAGE as i64)))?;
    let region =
        doing("mmap", Region::map(4 * PAGE, WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0))?;
    region.fill(3);
    io("unlink", fs::remove_file(path("a")))?;
    same!(io("fstat", file.metadata())?.nlink(), 0, "the links of a file that was unlinked");
    let again = create("a")?;
    same!(io("fstat", again.metadata())?.len(), 0, "the length of a new file of the same name");
    drop(file);
    for at in region.pages() {
        same!(region.load(at), 3, "page {at:#x} of a file without name and descriptor");
        region.store(at, 4);
    }
    let child = doing("fork", fork(|| i32::from(region.pages().any(|at| region.load(at) != 4))))?;
    same!(doing("wait4", child.wait())?, Status::Exited(0), "a child that reads the mapping");
    Ok(())
}

/// Whether a load from `addr` ends a child by `SIGBUS`.
fn load_ends(addr: u64) -> Result<Status, String> {
    let child = fork(|| {
        let _ = signal::default(libc::SIGBUS);
        load(addr);
        0
    });
    doing("wait4", doing("fork", child)?.wait())
}

/// Beyond the end of the file a mapping is `SIGBUS`, also where the file was cut off under it, and not
/// where it was lengthened again. The rest of the last page is zero.
fn beyond_the_end() -> Verdict {
    let file = create("a")?;
    let resize = |len: u64| doing("ftruncate", checked(truncate(&file, len as i64)));
    resize(4 * PAGE)?;
    let map = |flags| doing("mmap", Region::map(8 * PAGE, WRITE, flags, file.as_raw_fd(), 0));
    let (shared, private) = (map(libc::MAP_SHARED)?, map(libc::MAP_PRIVATE)?);
    for at in shared.pages().take(4) {
        shared.store(at, 1);
        shared.store(at + PAGE / 2, 2);
    }
    private.store(0, 9);
    private.store(2 * PAGE, 9);
    let (fine, bus) = (Status::Exited(0), Status::Killed(libc::SIGBUS));
    for region in [&shared, &private] {
        same!(load_ends(region.start() + 3 * PAGE)?, fine, "the last page");
        same!(load_ends(region.start() + 4 * PAGE)?, bus, "the first page beyond the end");
    }
    resize(PAGE + PAGE / 2)?;
    same!(load_ends(shared.start() + PAGE)?, fine, "the page that was cut in two");
    same!(shared.load(PAGE), 1, "what was left of it");
    same!(shared.load(PAGE + PAGE / 2), 0, "what was cut off of it");
    same!(load_ends(shared.start() + 2 * PAGE)?, bus, "a page that was cut off");
    same!(load_ends(private.start() + 2 * PAGE)?, bus, "a private copy of a page that was cut off");
    same!(private.load(0), 9, "a private copy of a page that was not");
    resize(4 * PAGE)?;
    for at in shared.pages().take(4).skip(2) {
        same!(
            (shared.load(at), shared.load(at + PAGE / 2)),
            (0, 0),
            "the file when it is longer again"
        );
    }
    // One thread reads while another cuts off and lengthens: it sees what was there or a signal, never
    // another file's bytes.
    for round in 0..50u64 {
        resize(4 * PAGE)?;
        shared.store(3 * PAGE, round);
        same!(shared.load(3 * PAGE), round, "round {round}");
        resize(0)?;
        resize(4 * PAGE)?;
        same!(shared.load(3 * PAGE), 0, "round {round}: a page after its file was cut off");
    }
    same!(checked(truncate(&file, -1)), Err(Errno(libc::EINVAL)), "a negative length");
    Ok(())
}

fn pipe(flags: i32) -> Result<(File, File), String> {
    let mut ends = [0; 2];
    // SAFETY: the array has room for both, and nobody else owns them.
    unsafe {
        doing("pipe2", checked(libc::pipe2(ends.as_mut_ptr(), flags)))?;
        Ok((File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1])))
    }
}

/// Pipes carry bytes in order, block when they are full or empty, and end.
fn pipes() -> Verdict {
    let (mut receive, mut send) = pipe(0)?;
    same!(io("write", send.write(b"abc"))?, 3, "bytes written");
    let mut buffer = [0; 2];
    same!(io("read", receive.read(&mut buffer))?, 2, "bytes read");
    same!(io("read", receive.read(&mut buffer))?, 1, "bytes read of the rest");
    // A megabyte through a pipe that holds much less, with a process at each end.
    const TOTAL: usize = 1 << 20;
    let byte = |at: usize| (at * 7 + at / 251) as u8;
    let reader = receive.as_raw_fd();
    let child = doing(
        "fork",
        fork(|| {
            // SAFETY: this process's copy of the descriptor; it ends with it.
            unsafe { libc::close(reader) };
            let all: Vec<u8> = (0..TOTAL).map(byte).collect();
            i32::from(send.write_all(&all).is_err())
        }),
    )?;
    drop(send);
    let mut all = Vec::new();
    io("read", receive.read_to_end(&mut all))?;
    same!(all.len(), TOTAL, "bytes through the pipe");
    let wrong = all.iter().enumerate().find(|&(at, &found)| found != byte(at));
    same!(wrong, None, "the first wrong byte");
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the writer");
    // Without a reader: an error, or the signal.
    let (receive, mut send) = pipe(0)?;
    drop(receive);
    doing("sigaction", signal::ignore(libc::SIGPIPE))?;
    same!(number(send.write(b"x")), libc::EPIPE, "writing where nobody reads");
    let child = doing(
        "fork",
        fork(|| {
            let _ = signal::default(libc::SIGPIPE);
            let _ = send.write(b"x");
            0
        }),
    )?;
    same!(doing("wait4", child.wait())?, Status::Killed(libc::SIGPIPE), "the same with the signal");
    // Without blocking.
    let (mut receive, mut send) = pipe(libc::O_NONBLOCK)?;
    same!(number(receive.read(&mut buffer)), libc::EAGAIN, "reading from an empty pipe");
    let mut filled = 0;
    let full = loop {
        match send.write(&[1; 4096]) {
            Ok(count) => filled += count,
            Err(error) => break error.raw_os_error(),
        }
    };
    same!(full, Some(libc::EAGAIN), "writing to a full pipe");
    same!(filled, 65_536, "what the pipe holds");
    same!(number(send.seek(SeekFrom::Start(0))), libc::ESPIPE, "seeking in a pipe");
    Ok(())
}

/// Small writes to a pipe are not torn apart, though many processes write.
fn pipe_atomicity() -> Verdict {
    let (mut receive, mut send) = pipe(0)?;
    let children: Vec<_> = (0..4u8)
        .map(|writer| {
            fork(|| {
                let line = [b'a' + writer; 64];
                i32::from((0..200).any(|_| send.write(&line).ok() != Some(64)))
            })
        })
        .collect();
    drop(send);
    let mut all = Vec::new();
    io("read", receive.read_to_end(&mut all))?;
    same!(all.len(), 4 * 200 * 64, "bytes through the pipe");
    let torn = all.chunks(64).position(|line| line.iter().any(|&byte| byte != line[0]));
    same!(torn, None, "the first record that was torn");
    for child in children {
        same!(doing("wait4", doing("fork", child)?.wait())?, Status::Exited(0), "a writer");
    }
    Ok(())
}

fn dup(fd: RawFd) -> Result<i32, Errno> {
    // SAFETY: a new descriptor.
    checked(unsafe { libc::dup(fd) })
}

fn control(fd: RawFd, command: i32, value: i32) -> Result<i32, Errno> {
    // SAFETY: the checks ask for flags and new descriptors.
    checked(unsafe { libc::fcntl(fd, command, value) })
}

fn close(fd: RawFd) -> Result<i32, Errno> {
    // SAFETY: the checks close what nobody else owns.
    checked(unsafe { libc::close(fd) })
}

/// `dup`, `dup2`, `fcntl`, close-on-exec and the lowest free number.
fn descriptors() -> Verdict {
    let mut file = create("a")?;
    let fd = file.as_raw_fd();
    let copy = doing("dup", dup(fd))?;
    same!(copy, fd + 1, "the lowest free descriptor");
    // SAFETY: nobody else owns it.
    let mut copy = unsafe { File::from_raw_fd(copy) };
    io("write", file.write_all(b"12345"))?;
    same!(io("seek", copy.stream_position())?, 5, "the position is common to both");
    // SAFETY: nobody owns descriptor 77.
    same!(checked(unsafe { libc::dup2(fd, 77) }), Ok(77), "dup2");
    same!(control(77, libc::F_GETFD, 0), Ok(0), "the flags of a copy");
    same!(control(77, libc::F_SETFD, libc::FD_CLOEXEC), Ok(0), "F_SETFD");
    same!(control(77, libc::F_GETFD, 0), Ok(libc::FD_CLOEXEC), "the flags after F_SETFD");
    same!(control(fd, libc::F_DUPFD, 100), Ok(100), "F_DUPFD from 100");
    let mode = doing("F_GETFL", control(fd, libc::F_GETFL, 0))?;
    same!(mode & libc::O_ACCMODE, libc::O_RDWR, "the access mode");
    same!(control(fd, libc::F_SETFL, libc::O_APPEND), Ok(0), "F_SETFL");
    let mode = doing("F_GETFL", control(100, libc::F_GETFL, 0))?;
    same!(mode & libc::O_APPEND, libc::O_APPEND, "flags are common to copies");
    same!(close(77), Ok(0), "close");
    same!(close(77), Err(Errno(libc::EBADF)), "closing it again");
    same!(dup(77), Err(Errno(libc::EBADF)), "dup of what is closed");
    same!(io("write", file.write(b"6"))?, 1, "the file is still open");
    // What a child closes stays open here; the position is common.
    let child = doing(
        "fork",
        fork(|| {
            let _ = copy.seek(SeekFrom::Start(2));
            // SAFETY: this process's own copy; it ends with it.
            unsafe { libc::close(fd) };
            0
        }),
    )?;
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the child");
    same!(io("seek", file.stream_position())?, 2, "the position that the child set");
    Ok(())
}

/// `poll` of pipes and files, with and without a timeout.
fn polls() -> Verdict {
    let (mut receive, mut send) = pipe(0)?;
    let poll = |fd: &File, events: i16, timeout: i32| {
        let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
        // SAFETY: the pointer is to a local.
        let ready = checked(unsafe { libc::poll(&raw mut entry, 1, timeout) });
        ready.map(|count| (count, entry.revents))
    };
    let begin = Instant::now();
    same!(poll(&receive, libc::POLLIN, 20), Ok((0, 0)), "an empty pipe");
    ensure!(begin.elapsed().as_millis() >= 20, "poll waited {:?} for 20 ms", begin.elapsed());
    same!(poll(&send, libc::POLLOUT, 0), Ok((1, libc::POLLOUT)), "a pipe with room");
    io("write", send.write_all(b"x"))?;
    same!(poll(&receive, libc::POLLIN, -1), Ok((1, libc::POLLIN)), "a pipe with a byte");
    io("read", receive.read_exact(&mut [0]))?;
    let child = doing(
        "fork",
        fork(|| {
            clock::sleep_ms(20);
            i32::from(send.write_all(b"y").is_err())
        }),
    )?;
    same!(poll(&receive, libc::POLLIN, 10_000), Ok((1, libc::POLLIN)), "a byte that comes later");
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the writer");
    io("read", receive.read_exact(&mut [0]))?;
    drop(send);
    same!(poll(&receive, libc::POLLIN, -1), Ok((1, libc::POLLHUP)), "a pipe without a writer");
    let file = create("a")?;
    let both = libc::POLLIN | libc::POLLOUT;
    same!(poll(&file, both, -1), Ok((1, both)), "a file");
    let mut nobody = libc::pollfd { fd: 999, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to a local.
    same!(checked(unsafe { libc::poll(&raw mut nobody, 1, -1) }), Ok(1), "what is not open");
    same!(nobody.revents, libc::POLLNVAL, "what is said of it");
    Ok(())
}

/// Asks for a lock of `kind` on some bytes of a file; for `F_GETLK` and the like, what is in the way.
fn lock(
    file: &impl AsRawFd,
    command: i32,
    kind: i32,
    bytes: [i64; 2],
) -> Result<(i32, i32), Errno> {
    // SAFETY: zeros are valid, and the pointer is to a local.
    unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = kind as i16;
        (lock.l_start, lock.l_len) = (bytes[0], bytes[1] - bytes[0]);
        checked(libc::fcntl(file.as_raw_fd(), command, &raw mut lock))?;
        Ok((i32::from(lock.l_type), lock.l_pid))
    }
}

/// Locks keep others out: those of processes, of open files, and of whole files.
fn locks() -> Verdict {
    use libc::{F_GETLK, F_OFD_SETLK, F_RDLCK, F_SETLK, F_SETLKW, F_UNLCK, F_WRLCK};
    /// What another process gets that asks for a lock.
    fn elsewhere(command: i32, kind: i32, bytes: [i64; 2]) -> Result<Status, String> {
        proc::outcome(|| {
            let Ok(file) = open("locked", libc::O_RDWR) else { return 100 };
            match lock(&file, command, kind, bytes) {
                Err(errno) => errno.0,
                Ok((kind, holder)) if command == F_GETLK => kind + 10 * i32::from(holder > 0),
                Ok(_) => 0,
            }
        })
    }
    let (granted, refused) = (Status::Exited(0), Status::Exited(libc::EAGAIN));
    let file = create("locked")?;
    doing("lock", lock(&file, F_SETLK, F_WRLCK, [0, 100]))?;
    doing("unlock", lock(&file, F_SETLK, F_UNLCK, [40, 60]))?;
    doing("share", lock(&file, F_SETLK, F_RDLCK, [60, 80]))?;
    same!(elsewhere(F_SETLK, F_RDLCK, [0, 1])?, refused, "a byte that is locked");
    same!(elsewhere(F_SETLK, F_WRLCK, [40, 60])?, granted, "bytes that were released");
    same!(elsewhere(F_SETLK, F_WRLCK, [39, 60])?, refused, "one byte more");
    same!(elsewhere(F_SETLK, F_RDLCK, [60, 80])?, granted, "bytes that are shared");
    same!(elsewhere(F_SETLK, F_WRLCK, [60, 80])?, refused, "the same for writing");
    same!(elsewhere(F_GETLK, F_WRLCK, [0, 0])?, Status::Exited(F_WRLCK + 10), "what is in the way");
    same!(elsewhere(F_GETLK, F_WRLCK, [40, 60])?, Status::Exited(F_UNLCK), "where nothing is");
    // A lock waits, and a child that ends releases what it had.
    let child = doing(
        "fork",
        fork(|| {
            let took = lock(&file, F_SETLK, F_WRLCK, [200, 300]);
            clock::sleep_ms(50);
            i32::from(took.is_err())
        }),
    )?;
    while lock(&file, F_GETLK, F_WRLCK, [200, 300]) == Ok((F_UNLCK, 0)) {
        clock::sleep_ms(1);
    }
    doing("wait for a lock", lock(&file, F_SETLKW, F_WRLCK, [200, 300]))?;
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the child");
    // Any descriptor that is closed ends them.
    drop(doing("open", open("locked", libc::O_RDONLY))?);
    same!(
        elsewhere(F_SETLK, F_WRLCK, [0, 0])?,
        granted,
        "a file of which one descriptor was closed"
    );
    let reader = doing("open", open("locked", libc::O_RDONLY))?;
    same!(
        lock(&reader, F_SETLK, F_WRLCK, [0, 0]),
        Err(Errno(libc::EBADF)),
        "a reader's write lock"
    );
    let other = doing("open", open("locked", libc::O_RDWR))?;
    doing("lock of an open file", lock(&file, F_OFD_SETLK, F_WRLCK, [0, 0]))?;
    let error = Err(Errno(libc::EAGAIN));
    same!(lock(&other, F_OFD_SETLK, F_RDLCK, [0, 0]), error, "another open file's lock");
    let flock = |fd: RawFd, operation| {
        // SAFETY: a plain call.
        checked(unsafe { libc::flock(fd, operation | libc::LOCK_NB) }).map(|_| ())
    };
    let (one, two) = (file.as_raw_fd(), other.as_raw_fd());
    doing("flock", flock(one, libc::LOCK_SH))?;
    doing("flock", flock(two, libc::LOCK_SH))?;
    same!(
        flock(two, libc::LOCK_EX),
        Err(Errno(libc::EAGAIN)),
        "an exclusive flock beside a shared one"
    );
    drop(file);
    doing("flock", flock(two, libc::LOCK_EX))?;
    doing("lock after the end of an open file", lock(&other, F_OFD_SETLK, F_RDLCK, [0, 0]))?;
    Ok(())
}

/// Directories: made, listed, renamed, removed.
fn directories() -> Verdict {
    let dir = path("d");
    io("mkdir", fs::create_dir(&dir))?;
    same!(number(fs::create_dir(&dir)), libc::EEXIST, "mkdir of what is there");
    same!(number(fs::create_dir(dir.join("x/y"))), libc::ENOENT, "mkdir in what is not there");
    for name in 0..200 {
        io("create", File::create(dir.join(format!("file{name:03}"))))?;
    }
    let mut names = Vec::new();
    for entry in io("getdents", fs::read_dir(&dir))? {
        let entry = io("getdents", entry)?;
        ensure!(io("type", entry.file_type())?.is_file(), "{:?} is no file", entry.file_name());
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let expected: Vec<_> = (0..200).map(|name| format!("file{name:03}")).collect();
    same!(names, expected, "the directory's names");
    same!(number(fs::remove_dir(&dir)), libc::ENOTEMPTY, "rmdir of a directory with files");
    same!(number(fs::remove_file(&dir)), libc::EISDIR, "unlink of a directory");
    io("write", fs::write(dir.join("file000"), b"zero"))?;
    io("rename", fs::rename(dir.join("file000"), dir.join("file001")))?;
    same!(number(fs::metadata(dir.join("file000"))), libc::ENOENT, "the old name");
    same!(io("read", fs::read(dir.join("file001")))?, b"zero", "the new name's content");
    same!(
        number(fs::rename(dir.join("none"), dir.join("x"))),
        libc::ENOENT,
        "renaming what is not there"
    );
    io("mkdir", fs::create_dir(dir.join("sub")))?;
    same!(
        number(fs::rename(&dir, dir.join("sub/d"))),
        libc::EINVAL,
        "moving a directory into itself"
    );
    same!(number(fs::read(dir.join("file001/x"))), libc::ENOTDIR, "a path through a file");
    same!(number(fs::read(&dir)), libc::EISDIR, "reading a directory");
    io("chdir", std::env::set_current_dir(dir.join("sub")))?;
    same!(io("getcwd", std::env::current_dir())?, dir.join("sub"), "the working directory");
    same!(io("read", fs::read("../file001"))?, b"zero", "a relative path");
    io("rmtree", fs::remove_dir_all(&dir))?;
    same!(number(fs::metadata(&dir)), libc::ENOENT, "what was removed");
    Ok(())
}

/// Links, symbolic and hard, and what `stat` says.
fn links_and_stat() -> Verdict {
    let mut file = create("a")?;
    io("write", file.write_all(&[1; 5000]))?;
    let (link, hard) = (path("link"), path("hard"));
    io("symlink", symlink("a", &link))?;
    same!(io("readlink", fs::read_link(&link))?, PathBuf::from("a"), "the link");
    same!(io("read", fs::read(&link))?.len(), 5000, "what it leads to");
    ensure!(io("lstat", fs::symlink_metadata(&link))?.is_symlink(), "lstat does not see the link");
    same!(number(fs::read_link(path("a"))), libc::EINVAL, "readlink of a file");
    io("link", fs::hard_link(path("a"), &hard))?;
    let (one, two) = (io("stat", fs::metadata(path("a")))?, io("stat", fs::metadata(&hard))?);
    same!((one.ino(), one.nlink()), (two.ino(), 2), "number and links of a file with two names");
    same!((one.len(), one.is_file()), (5000, true), "length and type");
    ensure!(one.blksize() > 0, "the block size is 0");
    io("chmod", fs::set_permissions(path("a"), fs::Permissions::from_mode(0o640)))?;
    same!(io("stat", file.metadata())?.mode(), libc::S_IFREG | 0o640, "the mode after chmod");
    io("unlink", fs::remove_file(path("a")))?;
    same!(number(fs::read(&link)), libc::ENOENT, "a link that leads nowhere");
    same!(io("read", fs::read(&hard))?.len(), 5000, "the other name");
    io("symlink", symlink("loop2", path("loop1")))?;
    io("symlink", symlink("loop1", path("loop2")))?;
    same!(number(fs::read(path("loop1"))), libc::ELOOP, "links in a circle");
    let long = "x".repeat(300);
    same!(number(fs::read(path(&long))), libc::ENAMETOOLONG, "a name of 300 letters");
    let exclusive = open("hard", libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY);
    same!(exclusive.err(), Some(Errno(libc::EEXIST)), "O_EXCL where a file is");
    let directory = open("hard", libc::O_RDONLY | libc::O_DIRECTORY);
    same!(directory.err(), Some(Errno(libc::ENOTDIR)), "O_DIRECTORY where a file is");
    for name in ["link", "hard", "loop1", "loop2"] {
        io("unlink", fs::remove_file(path(name)))?;
    }
    Ok(())
}

/// A descriptor keeps an unlinked file, and `memfd_create` makes one that never had a name.
fn nameless() -> Verdict {
    let mut file = create("a")?;
    io("unlink", fs::remove_file(path("a")))?;
    io("write", file.write_all(b"still there"))?;
    let mut all = String::new();
    io("seek", file.rewind())?;
    io("read", file.read_to_string(&mut all))?;
    same!(all, "still there", "what an unlinked file holds");
    // SAFETY: nobody else owns the descriptor.
    let mut memory = unsafe {
        let fd = doing("memfd_create", checked(libc::memfd_create(c"x".as_ptr(), 0)))?;
        File::from_raw_fd(fd)
    };
    io("write", memory.write_all(&[7; 100]))?;
    let region = doing("mmap", Region::map(PAGE, WRITE, libc::MAP_SHARED, memory.as_raw_fd(), 0))?;
    same!(region.load(92), 0x0707_0707_0707_0707, "the mapped memory file");
    region.store(0, 0);
    io("seek", memory.rewind())?;
    let mut bytes = [1; 16];
    io("read", memory.read_exact(&mut bytes))?;
    same!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7], "what was stored to it");
    Ok(())
}

/// `vmsplice` between memory and a pipe, and `tee` from a pipe to another.
fn spliced() -> Verdict {
    const NONBLOCK: u64 = libc::SPLICE_F_NONBLOCK as u64;
    let vmsplice = |fd: &File, bytes: &mut [u8], flags: u64| {
        let piece = [bytes.as_mut_ptr() as u64, bytes.len() as u64];
        let args = [fd.as_raw_fd() as u64, piece.as_ptr() as u64, 1, flags];
        // SAFETY: the piece is of bytes that are lent.
        unsafe { call(libc::SYS_vmsplice, args) }
    };
    let tee = |from: &File, to: &File, len: u64, flags: u64| {
        // SAFETY: changes no memory.
        unsafe { call(libc::SYS_tee, [from.as_raw_fd() as u64, to.as_raw_fd() as u64, len, flags]) }
    };
    let refused = |errno| Err::<u64, _>(Errno(errno));
    let (mut receive, send) = pipe(0)?;
    let (mut second, copy) = pipe(0)?;
    // What is given to a pipe is not to be changed before it is read: the pages may be the same.
    let mut given = [7; 6000];
    same!(vmsplice(&send, &mut given, 0), Ok(6000), "vmsplice to a pipe");
    same!(tee(&receive, &copy, 5000, 0), Ok(5000), "tee");
    let mut bytes = vec![0; 5500];
    same!(vmsplice(&receive, &mut bytes, 0), Ok(5500), "vmsplice from a pipe");
    ensure!(bytes.iter().all(|&byte| byte == 7), "what came through the pipe");
    let mut all = [0; 8192];
    same!(io("read", receive.read(&mut all))?, 500, "what vmsplice left");
    same!(io("read", second.read(&mut all))?, 5000, "what tee copied");
    ensure!(all[..5000].iter().all(|&byte| byte == 7), "the copy");
    same!(tee(&receive, &copy, 10, NONBLOCK), refused(libc::EAGAIN), "tee of nothing");
    same!(vmsplice(&receive, &mut [0], NONBLOCK), refused(libc::EAGAIN), "vmsplice of nothing");
    same!(tee(&receive, &copy, 0, 0), Ok(0), "tee of no bytes");
    same!(tee(&receive, &send, 10, 0), refused(libc::EINVAL), "tee of a pipe to itself");
    same!(tee(&send, &copy, 10, 0), refused(libc::EBADF), "tee from the wrong end");
    same!(tee(&receive, &copy, 10, 64), refused(libc::EINVAL), "tee with a flag");
    same!(vmsplice(&send, &mut [0], 64), refused(libc::EINVAL), "vmsplice with a flag");
    let file = create("spliced")?;
    same!(tee(&receive, &file, 10, 0), refused(libc::EINVAL), "tee to a file");
    same!(vmsplice(&file, &mut [0], 0), refused(libc::EBADF), "vmsplice to a file");
    let region = doing("mmap", Region::anonymous(20 * PAGE))?;
    let much = |flags: u64| {
        let piece = [region.start(), region.len()];
        let args = [send.as_raw_fd() as u64, piece.as_ptr() as u64, 1, flags];
        // SAFETY: the region lives until the pipe is empty.
        unsafe { call(libc::SYS_vmsplice, args) }
    };
    same!(much(0), Ok(65_536), "vmsplice of more than fits");
    same!(much(NONBLOCK), refused(libc::EAGAIN), "vmsplice to a full pipe");
    drop(send);
    io("read", receive.read_exact(&mut vec![0; 65_536]))?;
    same!(tee(&receive, &copy, 10, 0), Ok(0), "tee at the end");
    Ok(())
}

/// `/dev/null`, `/dev/zero`, `/dev/full`.
fn devices() -> Verdict {
    for name in ["/dev/null", "/dev/zero", "/dev/full"] {
        let mut device = io(name, OpenOptions::new().read(true).open(name))?;
        for place in [SeekFrom::Start(100), SeekFrom::Current(-5), SeekFrom::End(-1)] {
            same!(io("seek", device.seek(place))?, 0, "{name}: the position after {place:?}");
        }
    }
    let full = io("/dev/full", OpenOptions::new().write(true).open("/dev/full"));
    same!(number(full?.write(b"x")), libc::ENOSPC, "writing to /dev/full");
    let mut null = io("/dev/null", OpenOptions::new().read(true).write(true).open("/dev/null"))?;
    same!(io("write", null.write(b"gone"))?, 4, "bytes written to /dev/null");
    same!(io("read", null.read(&mut [0; 4]))?, 0, "bytes read from /dev/null");
    let mut random = [0u8; 32];
    // SAFETY: the pointer is to a local of that length.
    let got = unsafe { libc::getrandom(random.as_mut_ptr().cast(), 32, 0) };
    same!(got, 32, "random bytes");
    ensure!(random != [0; 32], "32 random bytes are all 0");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("read_write", read_write),
    ("vectors_and_faults", vectors_and_faults),
    ("mappings", mappings),
    ("mappings_outlive", mappings_outlive),
    ("beyond_the_end", beyond_the_end),
    ("pipes", pipes),
    ("pipe_atomicity", pipe_atomicity),
    ("descriptors", descriptors),
    ("polls", polls),
    ("locks", locks),
    ("directories", directories),
    ("links_and_stat", links_and_stat),
    ("nameless", nameless),
    ("devices", devices),
    ("spliced", spliced),
];

fn main() {
    let args = Args::read("files", &["dir"]);
    let dir = PathBuf::from(args.text("dir").unwrap_or("/tmp")).join(format!("files.{}", pid()));
    if let Err(error) = fs::create_dir_all(&dir) {
        args.refuse(&format!("cannot make {}: {error}", dir.display()));
    }
    let _ = DIR.set(dir.clone());
    proc::no_huge_pages();
    let status = check::run(&args, CHECKS);
    let _ = std::env::set_current_dir("/");
    let _ = fs::remove_dir_all(&dir);
    std::process::exit(status)
}
