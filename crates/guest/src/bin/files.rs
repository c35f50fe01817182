//! `files [CHECK…] [dir=DIR]`: the behaviour of files, including mapped files. Files are made,
//! and removed, in a private directory in DIR (`/tmp`).

use faultless_guest::check::{Check, Verdict};
use faultless_guest::dir::{self, create, io, number, open, path};
use faultless_guest::mem::{PAGE, READ, Region, Shared, WRITE, load};
use faultless_guest::proc::{Child, Meeting, Status, fork, wait_until};
use faultless_guest::sys::{Errno, call, checked, doing};
use faultless_guest::{ensure, same, signal};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::time::Duration;

/// Reads, writes and positions.
fn read_write() -> Verdict {
    let mut file = create("a")?;
    same!(io("write", file.write(b"hello, world"))?, 12, "bytes written");
    same!(io("seek", file.stream_position())?, 12, "the position");
    same!(io("seek", file.seek(SeekFrom::Start(7)))?, 7, "the position");
    let mut buffer = [0; 64];
    same!(io("read", file.read(&mut buffer))?, 5, "bytes read");
    same!(&buffer[..5], b"world", "the bytes that were read");
    same!(io("read", file.read(&mut buffer))?, 0, "bytes read at the end");
    same!(io("pread", file.read_at(&mut buffer, 1))?, 11, "bytes read at 1");
    same!(io("pwrite", file.write_at(b"W", 7))?, 1, "bytes written at 7");
    same!(io("seek", file.stream_position())?, 12, "the position, unchanged by pwrite");
    // Beyond the end: the gap is zero.
    same!(io("pwrite", file.write_at(b"!", 10_000))?, 1, "bytes written far beyond the end");
    same!(io("stat", file.metadata())?.len(), 10_001, "the length");
    let all = io("read", fs::read(path("a")))?;
    same!(&all[..12], b"hello, World", "the beginning");
    ensure!(all[12..10_000].iter().all(|&byte| byte == 0), "the hole is not zero");
    same!(number(file.seek(SeekFrom::Current(-100_000))), libc::EINVAL, "seeking below 0");
    same!(io("seek", file.seek(SeekFrom::End(-1)))?, 10_000, "the position of the last byte");
    let read_only = doing("open", open("a", libc::O_RDONLY))?;
    let mut read_only = File::from(read_only);
    same!(number(read_only.write(b"x")), libc::EBADF, "writing to a file that is open for reading");
    let append = doing("open", open("a", libc::O_WRONLY | libc::O_APPEND))?;
    let mut append = File::from(append);
    same!(io("write", append.write(b"end"))?, 3, "bytes appended");
    same!(io("stat", append.metadata())?.len(), 10_004, "the length after appending");
    same!(number(append.read(&mut buffer)), libc::EBADF, "reading a file that is open for writing");
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
        // SAFETY: the buffers contain no Rust objects, or are not written.
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
    // The bytes up to the fault are written.
    doing("ftruncate", checked(truncate(&file, 0)))?;
    let partial = ask(libc::SYS_pwrite64, gone - 16, 64);
    ensure!(
        partial == fault || partial == Ok(16),
        "pwrite of a buffer of which 16 bytes are mapped: {partial:?}"
    );
    same!(ask(libc::SYS_pwrite64, region.start(), 0), Ok(0), "pwrite of no bytes");
    same!(ask(libc::SYS_pwrite64, 8, 0), Ok(0), "pwrite of no bytes from an unmapped address");
    let read_only =
        doing("mmap", Region::map(PAGE, READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0))?;
    io("write", file.write_all_at(b"content", 0))?;
    same!(ask(libc::SYS_pread64, read_only.start(), 4), fault, "pread to read-only memory");
    // SAFETY: a plain call.
    let closed = unsafe { call(libc::SYS_read, [9999, region.start(), 4]) };
    same!(closed, Err(Errno(libc::EBADF)), "reading a closed file");
    let bad = c"/no/such/dir/file";
    // SAFETY: a plain call.
    let missing = checked(unsafe { libc::open(bad.as_ptr(), libc::O_RDONLY) });
    same!(missing, Err(Errno(libc::ENOENT)), "opening a missing file");
    // SAFETY: the path is no memory, which the kernel must detect.
    let nowhere = unsafe { call(libc::SYS_open, [8, 0, 0]) };
    same!(nowhere, Err(Errno(libc::EFAULT)), "opening a path at an unmapped address");
    Ok(())
}

fn truncate(file: &impl AsRawFd, len: i64) -> i32 {
    // SAFETY: a plain call.
    unsafe { libc::ftruncate(file.as_raw_fd(), len) }
}

/// Shared mappings show the file; private mappings show the file until they are written.
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
    same!(private.load(3 * PAGE), 33, "the same in a private mapping without stores");
    io("pwrite", file.write_all_at(&44u64.to_ne_bytes(), 4 * PAGE))?;
    same!(shared.load(4 * PAGE), 44, "bytes written to the file, in the shared mapping");
    private.store(5 * PAGE, 55);
    same!((shared.load(5 * PAGE), word(5 * PAGE)?), (5, 5), "the file after a private store");
    shared.store(5 * PAGE, 66);
    same!(private.load(5 * PAGE), 55, "the private copy after a shared store");
    doing("madvise", private.advise(5 * PAGE, PAGE, libc::MADV_DONTNEED))?;
    same!(private.load(5 * PAGE), 66, "a discarded private copy");
    // Children share the shared mapping and not the private one.
    let child = doing(
        "fork",
        fork(|| {
            shared.store(6 * PAGE, 77);
            private.store(6 * PAGE, 88);
            0
        }),
    )?;
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the child");
    same!((shared.load(6 * PAGE), word(6 * PAGE)?), (77, 77), "a child's store, shared");
    same!(private.load(6 * PAGE), 77, "a child's store, private");
    doing("msync", sync(&shared))?;
    let read_only = doing("open", open("a", libc::O_RDONLY))?;
    let refused = |len, prot, flags, fd, at| Region::map(len, prot, flags, fd, at).err();
    let fd_read = read_only.as_raw_fd();
    same!(
        refused(PAGE, WRITE, libc::MAP_SHARED, fd_read, 0),
        Some(Errno(libc::EACCES)),
        "a writable shared mapping of a file open for reading"
    );
    same!(refused(PAGE, WRITE, libc::MAP_PRIVATE, fd_read, 0), None, "a private mapping");
    same!(
        refused(PAGE, READ, libc::MAP_SHARED, 999, 0),
        Some(Errno(libc::EBADF)),
        "a mapping of no file"
    );
    same!(
        refused(PAGE, READ, libc::MAP_SHARED, fd, 1),
        Some(Errno(libc::EINVAL)),
        "an unaligned offset"
    );
    same!(
        refused(0, READ, libc::MAP_SHARED, fd, 0),
        Some(Errno(libc::EINVAL)),
        "a mapping of length 0"
    );
    let region = doing("mmap", Region::map(PAGE, READ, libc::MAP_SHARED, fd_read, 0))?;
    same!(
        region.protect(0, PAGE, WRITE),
        Err(Errno(libc::EACCES)),
        "mprotect of this mapping for writing"
    );
    Ok(())
}

fn sync(region: &Region) -> Result<(), Errno> {
    let args = [region.start(), region.len(), libc::MS_SYNC as u64];
    // SAFETY: the call does not change memory.
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
    same!(io("fstat", file.metadata())?.nlink(), 0, "the links of an unlinked file");
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

/// Returns the status of a child that loads from `addr`.
fn load_ends(addr: u64) -> Result<Status, String> {
    let child = fork(|| {
        let _ = signal::default(libc::SIGBUS);
        load(addr);
        0
    });
    doing("wait4", doing("fork", child)?.wait())
}

/// Beyond the end of the file an access to a mapping is `SIGBUS`, also after a truncation of the
/// mapped file, and not after the file grows again. The rest of the last page is zero.
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
    same!(load_ends(shared.start() + PAGE)?, fine, "the page with the new end");
    same!(shared.load(PAGE), 1, "the remaining part of the page");
    same!(shared.load(PAGE + PAGE / 2), 0, "the truncated part of the page");
    same!(load_ends(shared.start() + 2 * PAGE)?, bus, "a truncated page");
    same!(load_ends(private.start() + 2 * PAGE)?, bus, "a private copy of a truncated page");
    same!(private.load(0), 9, "a private copy of a remaining page");
    resize(4 * PAGE)?;
    for at in shared.pages().take(4).skip(2) {
        same!(
            (shared.load(at), shared.load(at + PAGE / 2)),
            (0, 0),
            "the file after it was extended again"
        );
    }
    // One thread reads while another truncates and extends the file: the reader sees old data or a
    // signal, never another file's bytes.
    for round in 0..50u64 {
        resize(4 * PAGE)?;
        shared.store(3 * PAGE, round);
        same!(shared.load(3 * PAGE), round, "round {round}");
        resize(0)?;
        resize(4 * PAGE)?;
        same!(shared.load(3 * PAGE), 0, "round {round}: a page after the truncation of its file");
    }
    same!(checked(truncate(&file, -1)), Err(Errno(libc::EINVAL)), "a negative length");
    Ok(())
}

/// Directories: made, listed, renamed, removed.
fn directories() -> Verdict {
    let dir = path("d");
    io("mkdir", fs::create_dir(&dir))?;
    same!(number(fs::create_dir(&dir)), libc::EEXIST, "mkdir of an existing directory");
    same!(number(fs::create_dir(dir.join("x/y"))), libc::ENOENT, "mkdir in a missing directory");
    for name in 0..200 {
        io("create", File::create(dir.join(format!("file{name:03}"))))?;
    }
    let mut names = Vec::new();
    for entry in io("getdents", fs::read_dir(&dir))? {
        let entry = io("getdents", entry)?;
        ensure!(io("type", entry.file_type())?.is_file(), "{:?} is not a file", entry.file_name());
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
        "renaming a missing file"
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
    same!(number(fs::metadata(&dir)), libc::ENOENT, "the removed directory");
    Ok(())
}

/// Links, symbolic and hard, and the fields of `stat`.
fn links_and_stat() -> Verdict {
    let mut file = create("a")?;
    io("write", file.write_all(&[1; 5000]))?;
    let (link, hard) = (path("link"), path("hard"));
    io("symlink", symlink("a", &link))?;
    same!(io("readlink", fs::read_link(&link))?, PathBuf::from("a"), "the link");
    same!(io("read", fs::read(&link))?.len(), 5000, "the target of the link");
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
    same!(number(fs::read(&link)), libc::ENOENT, "a dangling link");
    same!(io("read", fs::read(&hard))?.len(), 5000, "the other name");
    io("symlink", symlink("loop2", path("loop1")))?;
    io("symlink", symlink("loop1", path("loop2")))?;
    same!(number(fs::read(path("loop1"))), libc::ELOOP, "links in a circle");
    let long = "x".repeat(300);
    same!(number(fs::read(path(&long))), libc::ENAMETOOLONG, "a name of 300 letters");
    let exclusive = open("hard", libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY);
    same!(exclusive.err(), Some(Errno(libc::EEXIST)), "O_EXCL of an existing file");
    let directory = open("hard", libc::O_RDONLY | libc::O_DIRECTORY);
    same!(directory.err(), Some(Errno(libc::ENOTDIR)), "O_DIRECTORY of a file");
    for name in ["link", "hard", "loop1", "loop2"] {
        io("unlink", fs::remove_file(path(name)))?;
    }
    Ok(())
}

/// A hole reads as zeros everywhere except in private copies made before.
fn holes() -> Verdict {
    const PUNCH: u64 = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u64;
    let file = create("a")?;
    let fd = file.as_raw_fd();
    for page in 0..8u64 {
        io("pwrite", file.write_all_at(&[page as u8 + 1; PAGE as usize], page * PAGE))?;
    }
    let byte = |value: u64| u64::from_ne_bytes([value as u8; 8]);
    let map = |flags| doing("mmap", Region::map(8 * PAGE, WRITE, flags, fd, 0));
    let (shared, private) = (map(libc::MAP_SHARED)?, map(libc::MAP_PRIVATE)?);
    let child_sees = || {
        let found = fork(|| i32::from(private.load(0) != 70 || private.load(5 * PAGE) != 75));
        same!(doing("wait4", doing("fork", found)?.wait())?, Status::Exited(0), "a child's copies");
        Ok(())
    };
    for page in 0..8 {
        same!(shared.load(page * PAGE), byte(page + 1), "page {page}, shared");
        same!(private.load(page * PAGE), byte(page + 1), "page {page}, private");
    }
    private.store(0, 70);
    private.store(5 * PAGE, 75);
    let punch = |at: u64, len: u64| {
        // SAFETY: the call changes the file, whose mappings are regions.
        doing("fallocate", unsafe { call(libc::SYS_fallocate, [fd as u64, PUNCH, at, len]) })
    };
    punch(0, PAGE)?;
    same!((private.load(0), private.load(5 * PAGE)), (70, 75), "private copies after a hole");
    same!((shared.load(0), shared.load(PAGE)), (0, byte(2)), "the hole and the next page, shared");
    child_sees()?;
    // A part of the first and of the last page, and all pages in between.
    punch(PAGE + 8, 5 * PAGE)?;
    same!((private.load(0), private.load(5 * PAGE)), (70, 75), "private copies after another");
    same!((private.load(PAGE), private.load(PAGE + 8)), (byte(2), 0), "the hole's first page");
    same!((private.load(6 * PAGE), private.load(6 * PAGE + 8)), (0, byte(7)), "the hole's last");
    for region in [&shared, &private] {
        same!(region.load(3 * PAGE), 0, "a page in the hole");
        same!(region.load(7 * PAGE), byte(8), "the page after the hole");
    }
    shared.store(4 * PAGE, 44);
    same!(private.load(4 * PAGE), 44, "a store to the hole");
    child_sees()?;
    same!(io("stat", file.metadata())?.len(), 8 * PAGE, "the length");
    // Truncation drops the copies.
    doing("ftruncate", checked(truncate(&file, 0)))?;
    doing("ftruncate", checked(truncate(&file, 8 * PAGE as i64)))?;
    same!((private.load(0), private.load(5 * PAGE)), (0, 0), "copies of truncated pages");
    Ok(())
}

/// While one process truncates a file, another extends it and stores to its private mapping: the
/// store is kept.
fn extended_during_truncation() -> Verdict {
    const ROUNDS: u32 = 300;
    const LEN: i64 = 8 * PAGE as i64;
    let file = create("a")?;
    let length = || file.metadata().map_or(u64::MAX, |data| data.len());
    let region =
        doing("mmap", Region::map(LEN as u64, WRITE, libc::MAP_PRIVATE, file.as_raw_fd(), 0))?;
    let place = doing("mmap", Shared::new(Meeting::new()))?;
    // Memories from which the pages must be removed first.
    let idle = || {
        std::thread::sleep(Duration::from_secs(60));
        0
    };
    let others: Vec<Child> = (0..24).map_while(|_| fork(idle).ok()).collect();
    let child = fork(|| {
        let mut lost = 0;
        for round in 1..=ROUNDS {
            place.wait(2);
            wait_until(|| length() == 0);
            truncate(&file, LEN);
            region.store(PAGE, u64::from(round));
            place.wait(2);
            lost += i32::from(region.load(PAGE) != u64::from(round));
            place.wait(2);
        }
        lost.min(100)
    });
    let child = doing("fork", child)?;
    for _ in 0..ROUNDS {
        doing("ftruncate", checked(truncate(&file, LEN)))?;
        place.wait(2);
        doing("ftruncate", checked(truncate(&file, 0)))?;
        place.wait(2);
        place.wait(2);
    }
    same!(doing("wait4", child.wait())?, Status::Exited(0), "lost stores to added pages");
    for other in others {
        doing("kill", other.signal(libc::SIGKILL))?;
        doing("wait4", other.wait())?;
    }
    Ok(())
}

/// A descriptor keeps an unlinked file, and `memfd_create` makes a file without a name.
fn files_without_names() -> Verdict {
    let mut file = create("a")?;
    io("unlink", fs::remove_file(path("a")))?;
    io("write", file.write_all(b"still there"))?;
    let mut all = String::new();
    io("seek", file.rewind())?;
    io("read", file.read_to_string(&mut all))?;
    same!(all, "still there", "the content of an unlinked file");
    // SAFETY: the descriptor has no other owner.
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
    same!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7], "the bytes stored to the file");
    Ok(())
}

/// Calls of `open` that give no access, or that fail without an effect.
fn open_modes() -> Verdict {
    create("a")?;
    let made = open("new", libc::O_CREAT | libc::O_DIRECTORY | libc::O_RDWR);
    same!(made.err(), Some(Errno(libc::EINVAL)), "a new directory");
    ensure!(!path("new").exists(), "the failed open made a file");
    let emptied = open(".", libc::O_RDONLY | libc::O_TRUNC);
    same!(emptied.err(), Some(Errno(libc::EISDIR)), "O_TRUNC of a directory");
    let mut neither = File::from(doing("open", open("a", libc::O_ACCMODE))?);
    same!(number(neither.read(&mut [0])), libc::EBADF, "a read with access mode 3");
    same!(number(neither.write(b"x")), libc::EBADF, "a write with access mode 3");
    Ok(())
}

/// `fallocate` of present pages needs no memory. On a small machine, less memory is free than the
/// file has.
fn allocated_again() -> Verdict {
    const MOST: u64 = 64 << 20;
    let mut file = create("a")?;
    // SAFETY: zeros are valid values of both; the pointers are to locals.
    let (room, free) = unsafe {
        let (mut system, mut memory) =
            (std::mem::zeroed::<libc::statvfs>(), std::mem::zeroed::<libc::sysinfo>());
        doing("fstatvfs", checked(libc::fstatvfs(file.as_raw_fd(), &raw mut system)))?;
        doing("sysinfo", checked(libc::sysinfo(&raw mut memory)))?;
        (system.f_bavail * system.f_bsize, memory.freeram * u64::from(memory.mem_unit))
    };
    let len = (room / 10 * 9).min(free / 4).min(MOST) / PAGE * PAGE;
    let page = [1; PAGE as usize];
    for _ in 0..len / PAGE {
        io("write", file.write_all(&page))?;
    }
    let left = free - len;
    let others = if left < 8 * MOST { left.saturating_sub(len / 2) / PAGE } else { 1 };
    let region = doing("mmap", Region::anonymous(others.max(1) * PAGE))?;
    region.fill(1);
    for mode in [0, libc::FALLOC_FL_KEEP_SIZE] {
        // SAFETY: the call changes no memory of the program.
        let allocated = checked(unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, len as i64) });
        same!(allocated, Ok(0), "fallocate with mode {mode}");
    }
    Ok(())
}

const CHECKS: &[Check] = &[
    ("read_write", read_write),
    ("vectors_and_faults", vectors_and_faults),
    ("mappings", mappings),
    ("mappings_outlive", mappings_outlive),
    ("beyond_the_end", beyond_the_end),
    ("holes", holes),
    ("extended_during_truncation", extended_during_truncation),
    ("directories", directories),
    ("links_and_stat", links_and_stat),
    ("files_without_names", files_without_names),
    ("open_modes", open_modes),
    ("allocated_again", allocated_again),
];

fn main() {
    dir::run("files", CHECKS);
}
