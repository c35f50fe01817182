//! `streams [CHECK…] [dir=DIR]`: the behaviour of descriptors: pipes, waiting for many files at
//! once, locks, devices.

use faultless_guest::check::{Check, Verdict};
use faultless_guest::dir::{self, create, io, number, open};
use faultless_guest::mem::{PAGE, Region};
use faultless_guest::proc::{self, Status, fork};
use faultless_guest::sys::{Errno, call, checked, doing};
use faultless_guest::{clock, ensure, same, signal};
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::time::Instant;

fn pipe(flags: i32) -> Result<(File, File), String> {
    let mut ends = [0; 2];
    // SAFETY: the array has space for both, and the descriptors have no other owner.
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
    // A megabyte through a much smaller pipe, with a process at each end.
    const TOTAL: usize = 1 << 20;
    let byte = |at: usize| (at * 7 + at / 251) as u8;
    let reader = receive.as_raw_fd();
    let child = doing(
        "fork",
        fork(|| {
            // SAFETY: this process's copy of the descriptor, which is closed by the end of the
            // process.
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
    same!(number(send.write(b"x")), libc::EPIPE, "writing to a pipe without a reader");
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
    same!(filled, 65_536, "the capacity of the pipe");
    same!(number(send.seek(SeekFrom::Start(0))), libc::ESPIPE, "seeking in a pipe");
    Ok(())
}

/// Small writes to a pipe are not split, even with many writing processes.
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
    same!(torn, None, "the first torn record");
    for child in children {
        same!(doing("wait4", doing("fork", child)?.wait())?, Status::Exited(0), "a writer");
    }
    Ok(())
}

/// Opening `/proc/self/fd/N` of a pipe makes another end, without a wait; opening a named pipe
/// waits.
fn reopened() -> Verdict {
    // An endless wait fails the check. SAFETY: a plain call.
    unsafe { libc::alarm(20) };
    let again = |end: &File, flags: i32| {
        let path = CString::new(format!("/proc/self/fd/{}", end.as_raw_fd())).unwrap_or_default();
        // SAFETY: the path lives as long as the call, and the new descriptor has no other owner.
        unsafe { checked(libc::open(path.as_ptr(), flags)).map(|fd| File::from_raw_fd(fd)) }
    };
    let hung_up = |end: &File| {
        let mut entry = libc::pollfd { fd: end.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the pointer is to a local.
        unsafe { libc::poll(&raw mut entry, 1, 0) };
        entry.revents
    };
    let (receive, mut send) = pipe(0)?;
    io("write", send.write_all(b"abc"))?;
    drop(send);
    let mut second = doing("open to read without a writer", again(&receive, libc::O_RDONLY))?;
    drop(receive);
    let mut bytes = Vec::new();
    io("read", second.read_to_end(&mut bytes))?;
    same!(bytes, *b"abc", "the content of the pipe");
    same!(hung_up(&second), libc::POLLHUP, "an end opened after the last writer");
    let mut send = doing("open to write without a writer", again(&second, libc::O_WRONLY))?;
    drop(second);
    doing("sigaction", signal::ignore(libc::SIGPIPE))?;
    same!(number(send.write(b"x")), libc::EPIPE, "writing to a pipe without a reader");
    for flags in [libc::O_WRONLY, libc::O_WRONLY | libc::O_NONBLOCK, libc::O_RDWR] {
        doing("open to write without a reader", again(&send, flags))?;
    }
    let mut second = doing("open to read", again(&send, libc::O_RDONLY))?;
    io("write", send.write_all(b"de"))?;
    let mut bytes = [0; 2];
    io("read", second.read_exact(&mut bytes))?;
    same!(bytes, *b"de", "the bytes through the new end");

    let name = CString::new(dir::path("fifo").into_os_string().into_encoded_bytes());
    let name = name.unwrap_or_default();
    // SAFETY: the name lives as long as the call.
    doing("mkfifo", checked(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }))?;
    let named = |flags| open("fifo", flags).map(File::from);
    let nobody = named(libc::O_WRONLY | libc::O_NONBLOCK).err();
    same!(nobody, Some(Errno(libc::ENXIO)), "a named pipe without a reader");
    let child = doing("fork", fork(|| i32::from(named(libc::O_WRONLY).is_err())))?;
    let first = doing("open", named(libc::O_RDONLY))?;
    same!(
        doing("wait4", child.wait())?,
        Status::Exited(0),
        "the writer that waited for a reader of a named pipe"
    );
    let at_once = doing("open", named(libc::O_RDONLY | libc::O_NONBLOCK))?;
    same!(hung_up(&first), libc::POLLHUP, "an end after its writer closed");
    same!(hung_up(&at_once), 0, "an end that was opened after the close");
    Ok(())
}

/// `vmsplice` between memory and a pipe, and `tee` from a pipe to another.
fn spliced() -> Verdict {
    const NONBLOCK: u64 = libc::SPLICE_F_NONBLOCK as u64;
    let vmsplice = |fd: &File, bytes: &mut [u8], flags: u64| {
        let piece = [bytes.as_mut_ptr() as u64, bytes.len() as u64];
        let args = [fd.as_raw_fd() as u64, piece.as_ptr() as u64, 1, flags];
        // SAFETY: the piece consists of borrowed bytes.
        unsafe { call(libc::SYS_vmsplice, args) }
    };
    let tee = |from: &File, to: &File, len: u64, flags: u64| {
        // SAFETY: changes no memory.
        unsafe { call(libc::SYS_tee, [from.as_raw_fd() as u64, to.as_raw_fd() as u64, len, flags]) }
    };
    let refused = |errno| Err::<u64, _>(Errno(errno));
    let (mut receive, send) = pipe(0)?;
    let (mut second, copy) = pipe(0)?;
    // Bytes given to a pipe must not be changed before they are read: the pipe may share the pages.
    let mut given = [7; 6000];
    same!(vmsplice(&send, &mut given, 0), Ok(6000), "vmsplice to a pipe");
    same!(tee(&receive, &copy, 5000, 0), Ok(5000), "tee");
    let mut bytes = vec![0; 5500];
    same!(vmsplice(&receive, &mut bytes, 0), Ok(5500), "vmsplice from a pipe");
    ensure!(bytes.iter().all(|&byte| byte == 7), "the bytes through the pipe");
    let mut all = [0; 8192];
    same!(io("read", receive.read(&mut all))?, 500, "the remaining bytes after vmsplice");
    same!(io("read", second.read(&mut all))?, 5000, "the bytes that tee copied");
    ensure!(all[..5000].iter().all(|&byte| byte == 7), "the copy");
    same!(tee(&receive, &copy, 10, NONBLOCK), refused(libc::EAGAIN), "tee of an empty pipe");
    same!(
        vmsplice(&receive, &mut [0], NONBLOCK),
        refused(libc::EAGAIN),
        "vmsplice of an empty pipe"
    );
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
    same!(much(0), Ok(65_536), "vmsplice of more bytes than the capacity");
    same!(much(NONBLOCK), refused(libc::EAGAIN), "vmsplice to a full pipe");
    drop(send);
    io("read", receive.read_exact(&mut vec![0; 65_536]))?;
    same!(tee(&receive, &copy, 10, 0), Ok(0), "tee at the end");
    Ok(())
}

/// Each byte of a pipe goes to exactly one of several concurrent readers, which call `splice` or
/// `read`.
fn bytes_are_spliced_once() -> Verdict {
    const BLOCKS: u64 = 3000;
    const BLOCK: usize = 4096;
    let (receive, mut send) = pipe(0)?;
    let files = [create("first")?, create("second")?];
    let splice = |to: &File| {
        let args = [receive.as_raw_fd() as u64, 0, to.as_raw_fd() as u64, 0, BLOCK as u64, 0];
        // SAFETY: no memory is passed.
        while doing("splice", unsafe { call(libc::SYS_splice, args) })? != 0 {}
        Ok::<_, String>(())
    };
    let read = || {
        let (mut all, mut block) = (Vec::new(), [0; BLOCK]);
        loop {
            match io("read", (&receive).read(&mut block))? {
                0 => return Ok::<_, String>(all),
                len => all.extend_from_slice(&block[..len]),
            }
        }
    };
    let write = move || {
        (1..=BLOCKS).try_for_each(|block| {
            let words = block.to_ne_bytes().repeat(BLOCK / 8);
            io("write", send.write_all(&words))
        })
    };
    let mut all = std::thread::scope(|scope| {
        let splicers = files.each_ref().map(|file| scope.spawn(|| splice(file)));
        let (reader, writer) = (scope.spawn(read), scope.spawn(write));
        let panicked = |_| "a thread panicked".to_owned();
        writer.join().map_err(panicked)??;
        for splicer in splicers {
            splicer.join().map_err(panicked)??;
        }
        reader.join().map_err(panicked)?
    })?;
    for mut file in files {
        io("seek", file.seek(SeekFrom::Start(0)))?;
        io("read", file.read_to_end(&mut all))?;
    }
    let mut blocks = Vec::new();
    for block in all.chunks(BLOCK) {
        let words: Vec<&[u8]> = block.chunks(8).collect();
        ensure!(words.windows(2).all(|pair| pair[0] == pair[1]), "a block has several parts");
        blocks.push(words[0].try_into().map_or(0, u64::from_ne_bytes));
    }
    blocks.sort_unstable();
    ensure!(blocks.iter().copied().eq(1..=BLOCKS), "{} blocks arrived", blocks.len());
    Ok(())
}

/// A pipe can shrink to the size of its contents and not below, and keeps the contents.
fn pipe_sizes() -> Verdict {
    const BLOCK: usize = PAGE as usize;
    let (mut receive, mut send) = pipe(libc::O_NONBLOCK)?;
    let fd = send.as_raw_fd();
    let resize = |size: usize| control(fd, libc::F_SETPIPE_SZ, size as i32);
    let refused = |errno| Err(Errno(errno));
    let mut sent: Vec<u8> = (0..10 * BLOCK).map(|at| (at * 7 + at / 251) as u8).collect();
    io("write", send.write_all(&sent[..7 * BLOCK]))?;
    io("read", receive.read_exact(&mut vec![0; 2 * BLOCK]))?;
    same!(resize(4 * BLOCK), refused(libc::EBUSY), "a capacity of 4 pages with 5 in the pipe");
    same!(control(fd, libc::F_GETPIPE_SZ, 0), Ok(65_536), "the capacity after the refusal");
    same!(resize(8 * BLOCK), Ok(8 * PAGE as i32), "a capacity of 8 pages with 5 in the pipe");
    io("write", send.write_all(&sent[7 * BLOCK..]))?;
    same!(number(send.write(&[1])), libc::EAGAIN, "a write to a pipe with 8 pages of 8");
    same!(resize(8 * BLOCK - 1), Ok(8 * PAGE as i32), "a capacity of almost 8 pages");
    same!(resize(4 * BLOCK), refused(libc::EBUSY), "a capacity of 4 pages with 8 in the pipe");
    same!(resize(16 * BLOCK), Ok(16 * PAGE as i32), "a capacity of 16 pages");
    same!(resize(8 * BLOCK), Ok(8 * PAGE as i32), "a capacity as large as the contents");
    let mut got = vec![0; 9 * BLOCK];
    same!(io("read", receive.read(&mut got))?, 8 * BLOCK, "bytes after all changes");
    ensure!(got[..8 * BLOCK] == sent[2 * BLOCK..], "the bytes after all changes");
    same!(resize(0), Ok(PAGE as i32), "the least capacity");
    sent.truncate(2 * BLOCK);
    same!(io("write", send.write(&sent))?, BLOCK, "bytes that fit into a page");
    for size in [-1, i32::MIN + 1] {
        let resized = control(fd, libc::F_SETPIPE_SZ, size);
        same!(resized, refused(libc::EINVAL), "a capacity of {size:#x} bytes");
    }
    Ok(())
}

/// Bytes in an inaccessible page do not come into a pipe, nor do bytes before in the same part of a
/// page's size.
fn cut_writes() -> Verdict {
    let (mut receive, send) = pipe(libc::O_NONBLOCK)?;
    let region = doing("mmap", Region::anonymous(3 * PAGE))?;
    doing("munmap", region.unmap(2 * PAGE, PAGE))?;
    let write = |at: u64, len: u64| {
        // SAFETY: the kernel only reads the memory.
        unsafe { call(libc::SYS_write, [send.as_raw_fd() as u64, region.start() + at, len]) }
    };
    let refused = Err(Errno(libc::EFAULT));
    same!(write(2 * PAGE - 96, PAGE), refused, "96 bytes of a page");
    same!(write(PAGE + 1, 8000), refused, "all bytes of a page but the first");
    same!(number(receive.read(&mut [0])), libc::EAGAIN, "a read after the refused writes");
    same!(write(0, 3 * PAGE), Ok(2 * PAGE), "two pages of three");
    same!(write(100, 3 * PAGE), Ok(PAGE), "a page of two incomplete pages");
    let mut all = vec![0; 4 * PAGE as usize];
    same!(io("read", receive.read(&mut all))? as u64, 3 * PAGE, "bytes in the pipe");
    same!(write(0, 100), Ok(100), "a short write");
    same!(write(2 * PAGE - 5, 10), refused, "5 bytes of 10");
    same!(io("read", receive.read(&mut all))?, 100, "bytes in the pipe after the short write");
    Ok(())
}

/// After `sendfile` and `splice` to a pipe that becomes full, the position of the file is behind
/// the last byte in the pipe.
fn files_are_cut_at_full_pipes() -> Verdict {
    const BEGIN: usize = 1000;
    let bytes: Vec<u8> = (0..200_000).map(|at| (at * 7 + at / 251) as u8).collect();
    let mut file = create("long")?;
    io("write", file.write_all(&bytes))?;
    for filled in [0, 1, 11, 15].map(|pages| pages * PAGE as usize) {
        for splices in [false, true] {
            let what = format!("with {filled} bytes in the pipe, splice: {splices}");
            let (mut receive, mut send) = pipe(libc::O_NONBLOCK)?;
            io("write", send.write_all(&vec![1; filled]))?;
            io("seek", file.seek(SeekFrom::Start(BEGIN as u64)))?;
            let (from, to) = (file.as_raw_fd() as u64, send.as_raw_fd() as u64);
            // SAFETY: no memory is passed.
            let go = || unsafe {
                if splices {
                    call(libc::SYS_splice, [from, 0, to, 0, 200_000, 0])
                } else {
                    call(libc::SYS_sendfile, [to, from, 0, 200_000])
                }
            };
            let moved = doing("move", go())? as usize;
            ensure!(moved <= 65_536 - filled, "{what}: {moved} bytes moved");
            let end = (BEGIN + moved) as u64;
            same!(io("seek", file.stream_position())?, end, "{what}: the position");
            same!(go(), Err(Errno(libc::EAGAIN)), "{what}: another move");
            same!(io("seek", file.stream_position())?, end, "{what}: the position after it");
            drop(send);
            let mut got = Vec::new();
            io("read", receive.read_to_end(&mut got))?;
            same!(got.len(), filled + moved, "{what}: bytes in the pipe");
            ensure!(got[filled..] == bytes[BEGIN..BEGIN + moved], "{what}: the moved bytes");
        }
    }
    Ok(())
}

/// `RWF_APPEND` and `RWF_NOAPPEND` replace `O_APPEND`; errors of the file come before errors of the
/// flags.
fn append_flags() -> Verdict {
    const APPEND: u64 = 0x10;
    const NO_APPEND: u64 = 0x20;
    const UNKNOWN: u64 = 1 << 30;
    const HERE: u64 = u64::MAX;
    let make = |number: i64, fd: i32, len: u64, at: u64, flags: u64| {
        let mut word = *b"xyzw";
        let piece = [word.as_mut_ptr() as u64, len];
        // SAFETY: the piece is within a local.
        unsafe { call(number, [fd as u64, piece.as_ptr() as u64, 1, at, 0, flags]) }
    };
    let write = |fd: i32, at: u64, flags: u64| make(libc::SYS_pwritev2, fd, 3, at, flags);
    let read = |fd: i32, at: u64, flags: u64| make(libc::SYS_preadv2, fd, 3, at, flags);
    let refused = |errno| Err(Errno(errno));
    let mut file = create("append")?;
    io("write", file.write_all(b"0123456789"))?;
    io("seek", file.seek(SeekFrom::Start(2)))?;
    let appending = doing("open", open("append", libc::O_RDWR | libc::O_APPEND))?;
    let (fd, other) = (file.as_raw_fd(), appending.as_raw_fd());
    let mut content = |expected: &str| {
        let position = io("seek", file.stream_position())?;
        io("seek", file.seek(SeekFrom::Start(0)))?;
        let mut text = String::new();
        io("read", file.read_to_string(&mut text))?;
        io("seek", file.seek(SeekFrom::Start(position)))?;
        same!(text, expected, "the file");
        Ok::<_, String>(position)
    };
    same!(write(fd, 0, APPEND), Ok(3), "an append");
    same!(content("0123456789xyz")?, 2, "the position after an append with an offset");
    same!(write(fd, HERE, APPEND), Ok(3), "an append at the position");
    same!(content("0123456789xyzxyz")?, 16, "the position after an append without an offset");
    same!(write(other, 0, NO_APPEND), Ok(3), "a write with an offset to a file that appends");
    content("xyz3456789xyzxyz")?;
    same!(write(other, 5, 0), Ok(3), "a write to a file that appends");
    content("xyz3456789xyzxyzxyz")?;
    same!(read(fd, 0, APPEND), Ok(3), "a read with the flag");
    same!(write(fd, 0, APPEND | NO_APPEND), refused(libc::EINVAL), "both flags");
    for go in [&write, &read] as [&dyn Fn(i32, u64, u64) -> Result<u64, Errno>; 2] {
        same!(go(fd, 0, UNKNOWN | APPEND), refused(libc::EOPNOTSUPP), "an unknown flag");
        same!(go(-1, 0, UNKNOWN), refused(libc::EBADF), "an unknown flag without a file");
        same!(go(-1, HERE - 1, UNKNOWN), refused(libc::EINVAL), "an unknown flag at -2");
    }
    let reader = doing("open", open("append", libc::O_RDONLY))?;
    let denied = write(reader.as_raw_fd(), 0, UNKNOWN);
    same!(denied, refused(libc::EBADF), "an unknown flag and a file opened for reading");
    let none = make(libc::SYS_pwritev2, fd, 0, 0, UNKNOWN);
    same!(none, Ok(0), "an unknown flag without bytes");
    let (receive, send) = pipe(0)?;
    let (out, input) = (send.as_raw_fd(), receive.as_raw_fd());
    same!(write(out, 0, UNKNOWN), refused(libc::ESPIPE), "an unknown flag and a pipe's offset");
    same!(read(input, 0, UNKNOWN), refused(libc::ESPIPE), "the same for a read");
    same!(write(out, HERE, UNKNOWN), refused(libc::EOPNOTSUPP), "an unknown flag and a pipe");
    same!(write(out, HERE, APPEND), Ok(3), "an append to a pipe");
    content("xyz3456789xyzxyzxyz")?;
    Ok(())
}

fn dup(fd: RawFd) -> Result<i32, Errno> {
    // SAFETY: a new descriptor.
    checked(unsafe { libc::dup(fd) })
}

fn control(fd: RawFd, command: i32, value: i32) -> Result<i32, Errno> {
    // SAFETY: the checks request flags and new descriptors.
    checked(unsafe { libc::fcntl(fd, command, value) })
}

fn close(fd: RawFd) -> Result<i32, Errno> {
    // SAFETY: the checks close descriptors without another owner.
    checked(unsafe { libc::close(fd) })
}

/// `dup`, `dup2`, `fcntl`, close-on-exec and the lowest free number.
fn descriptors() -> Verdict {
    let mut file = create("a")?;
    let fd = file.as_raw_fd();
    let copy = doing("dup", dup(fd))?;
    same!(copy, fd + 1, "the lowest free descriptor");
    // SAFETY: the descriptor has no other owner.
    let mut copy = unsafe { File::from_raw_fd(copy) };
    io("write", file.write_all(b"12345"))?;
    same!(io("seek", copy.stream_position())?, 5, "the position is common to both");
    // SAFETY: descriptor 77 has no owner.
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
    same!(close(77), Err(Errno(libc::EBADF)), "closing the descriptor again");
    same!(dup(77), Err(Errno(libc::EBADF)), "dup of a closed descriptor");
    same!(io("write", file.write(b"6"))?, 1, "the file is still open");
    // A descriptor closed by a child stays open here; the position is shared.
    let child = doing(
        "fork",
        fork(|| {
            let _ = copy.seek(SeekFrom::Start(2));
            // SAFETY: this process's own copy, which is closed by the end of the process.
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
    same!(poll(&receive, libc::POLLIN, 10_000), Ok((1, libc::POLLIN)), "a byte that arrives later");
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the writer");
    io("read", receive.read_exact(&mut [0]))?;
    drop(send);
    same!(poll(&receive, libc::POLLIN, -1), Ok((1, libc::POLLHUP)), "a pipe without a writer");
    let file = create("a")?;
    let both = libc::POLLIN | libc::POLLOUT;
    same!(poll(&file, both, -1), Ok((1, both)), "a file");
    let mut closed = libc::pollfd { fd: 999, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to a local.
    let polled = checked(unsafe { libc::poll(&raw mut closed, 1, -1) });
    same!(polled, Ok(1), "poll of a closed descriptor");
    same!(closed.revents, libc::POLLNVAL, "the event of a closed descriptor");
    Ok(())
}

/// Requests a lock of `kind` on some bytes of a file; for `F_GETLK` and similar commands, returns
/// the conflicting lock.
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

/// Locks exclude other owners: locks of processes, of open files, and of whole files.
fn locks() -> Verdict {
    use libc::{F_GETLK, F_OFD_SETLK, F_RDLCK, F_SETLK, F_SETLKW, F_UNLCK, F_WRLCK};
    /// Returns the result of a lock request in another process.
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
    same!(elsewhere(F_SETLK, F_RDLCK, [0, 1])?, refused, "a locked byte");
    same!(elsewhere(F_SETLK, F_WRLCK, [40, 60])?, granted, "released bytes");
    same!(elsewhere(F_SETLK, F_WRLCK, [39, 60])?, refused, "one byte more");
    same!(elsewhere(F_SETLK, F_RDLCK, [60, 80])?, granted, "bytes with a shared lock");
    same!(elsewhere(F_SETLK, F_WRLCK, [60, 80])?, refused, "the same for writing");
    same!(
        elsewhere(F_GETLK, F_WRLCK, [0, 0])?,
        Status::Exited(F_WRLCK + 10),
        "the conflicting lock"
    );
    same!(elsewhere(F_GETLK, F_WRLCK, [40, 60])?, Status::Exited(F_UNLCK), "bytes without a lock");
    // A lock waits, and the end of a child releases its locks.
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
    // Closing any descriptor of the file releases the locks.
    drop(doing("open", open("locked", libc::O_RDONLY))?);
    same!(elsewhere(F_SETLK, F_WRLCK, [0, 0])?, granted, "a file after one descriptor was closed");
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
        "an exclusive flock beside a shared flock"
    );
    drop(file);
    doing("flock", flock(two, libc::LOCK_EX))?;
    doing("lock after the end of an open file", lock(&other, F_OFD_SETLK, F_RDLCK, [0, 0]))?;
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
    // SAFETY: the pointer is to a local of this length.
    let got = unsafe { libc::getrandom(random.as_mut_ptr().cast(), 32, 0) };
    same!(got, 32, "random bytes");
    ensure!(random != [0; 32], "32 random bytes are all 0");
    Ok(())
}

/// A write that does not fit into an event counter sleeps until enough was read, and a signal ends
/// the wait.
fn event_counters() -> Verdict {
    // SAFETY: the descriptor has no other owner.
    let mut counter = unsafe { File::from_raw_fd(doing("eventfd", checked(libc::eventfd(0, 0)))?) };
    same!(number(counter.write(&[0; 16])), libc::EINVAL, "a write of 16 bytes");
    let nearly = u64::MAX - 5;
    io("write", counter.write(&nearly.to_ne_bytes()))?;
    let child = doing(
        "fork",
        fork(|| {
            // The counter is writable, but not for this value.
            let more = counter.write(&10u64.to_ne_bytes());
            i32::from(more.ok() != Some(8)) + 2 * i32::from(clock::used() > 0.05)
        }),
    )?;
    clock::sleep_ms(100);
    let mut count = [0; 8];
    io("read", counter.read(&mut count))?;
    same!(u64::from_ne_bytes(count), nearly, "the count before the write");
    same!(doing("wait4", child.wait())?, Status::Exited(0), "a write that waited");
    io("read", counter.read(&mut count))?;
    same!(u64::from_ne_bytes(count), 10, "the count after the write");
    io("write", counter.write(&nearly.to_ne_bytes()))?;
    let child = doing(
        "fork",
        fork(|| {
            // SAFETY: a plain call.
            unsafe { libc::alarm(1) };
            let _ = counter.write(&10u64.to_ne_bytes());
            1
        }),
    )?;
    same!(doing("wait4", child.wait())?, Status::Killed(libc::SIGALRM), "a write that never fits");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("pipes", pipes),
    ("pipe_atomicity", pipe_atomicity),
    ("reopened", reopened),
    ("spliced", spliced),
    ("bytes_are_spliced_once", bytes_are_spliced_once),
    ("pipe_sizes", pipe_sizes),
    ("cut_writes", cut_writes),
    ("files_are_cut_at_full_pipes", files_are_cut_at_full_pipes),
    ("append_flags", append_flags),
    ("descriptors", descriptors),
    ("polls", polls),
    ("locks", locks),
    ("devices", devices),
    ("event_counters", event_counters),
];

fn main() {
    dir::run("streams", CHECKS);
}
