//! `rlimits [CHECK…]`: the limits of a process's memory, files and descriptors, and the peaks of
//! its memory.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{NONE, PAGE, READ, Region, WRITE, store};
use faultless_guest::proc::{self, Status};
use faultless_guest::signal::{self, NOTED};
use faultless_guest::sys::{self, Errno, call, checked, doing};
use faultless_guest::{ensure, same};
use libc::{E2BIG, ENOMEM};
use std::ffi::CString;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::Ordering;

const MIB: u64 = 1 << 20;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Makes a call of this process's own memory.
fn make<const N: usize>(number: i64, args: [u64; N]) -> sys::Result<u64> {
    // SAFETY: every caller passes pointers to its own memory, or its own regions.
    unsafe { call(number, args) }
}

/// Sets a soft limit.
fn limit(resource: u32, bytes: u64) -> Verdict {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a local.
    unsafe {
        doing("getrlimit", checked(libc::getrlimit(resource, &raw mut limit)))?;
        limit.rlim_cur = bytes;
        doing("setrlimit", checked(libc::setrlimit(resource, &raw const limit)))?;
    }
    Ok(())
}

/// A field of `/proc/self/status`, in bytes.
fn status(name: &str) -> Result<u64, String> {
    let text = fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let field = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = field.and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kib.ok_or_else(|| format!("no {name} in /proc/self/status"))? << 10)
}

/// Maps a page that grows down, with unmapped memory below.
fn stack() -> Result<u64, String> {
    let region = doing("mmap", Region::map(4 * MIB, NONE, PRIVATE, -1, 0))?;
    let top = region.start() + region.len();
    let flags = PRIVATE | libc::MAP_GROWSDOWN;
    doing("mmap", region.replace(region.len() - PAGE, PAGE, WRITE, flags, -1, 0))?;
    doing("munmap", region.unmap(0, region.len() - PAGE))?;
    std::mem::forget(region);
    Ok(top)
}

/// Returns the status of a child that stores to `addr`.
fn stores(addr: u64) -> Result<Status, String> {
    proc::outcome(|| {
        // SAFETY: the memory belongs to a stack without other uses.
        unsafe { store(addr, 1) };
        0
    })
}

/// A stack grows to the soft limit, also after it was raised, and a child has the same limit.
fn stacks_grow_to_their_limit() -> Verdict {
    let top = stack()?;
    let killed = Status::Killed(libc::SIGSEGV);
    limit(libc::RLIMIT_STACK, 64 << 10)?;
    same!(stores(top - (64 << 10))?, Status::Exited(0), "the last page of the limit");
    same!(stores(top - (64 << 10) - 8)?, killed, "the page below");
    limit(libc::RLIMIT_STACK, 128 << 10)?;
    same!(stores(top - (64 << 10) - 8)?, Status::Exited(0), "the page below a raised limit");
    same!(stores(top - (128 << 10) - 8)?, killed, "a page below the raised limit");
    Ok(())
}

/// Runs this program with `count` arguments of 100,000 bytes. Returns the number of the error.
fn run_with(count: usize) -> Result<Status, String> {
    let long = CString::new(vec![b'x'; 100_000]).map_err(|error| error.to_string())?;
    let (program, end) = (c"/proc/self/exe", c"end");
    let mut words = vec![program.as_ptr() as u64, end.as_ptr() as u64];
    words.extend(std::iter::repeat_n(long.as_ptr() as u64, count));
    words.push(0);
    proc::outcome(|| {
        let args = [program.as_ptr() as u64, words.as_ptr() as u64, 0];
        make(libc::SYS_execve, args).err().map_or(0, |Errno(number)| number)
    })
}

/// Arguments take a quarter of the stack's limit at most, and 128 KiB in any case.
fn arguments_take_a_quarter_of_the_stack() -> Verdict {
    let refused = Status::Exited(E2BIG);
    limit(libc::RLIMIT_STACK, MIB)?;
    same!(run_with(2)?, Status::Exited(0), "200,000 bytes with 1 MiB");
    same!(run_with(3)?, refused, "300,000 bytes with 1 MiB");
    limit(libc::RLIMIT_STACK, 2 * MIB)?;
    same!(run_with(4)?, Status::Exited(0), "400,000 bytes with 2 MiB");
    limit(libc::RLIMIT_STACK, 200 << 10)?;
    same!(run_with(1)?, Status::Exited(0), "100,000 bytes with 200 KiB");
    same!(run_with(2)?, refused, "200,000 bytes with 200 KiB");
    Ok(())
}

/// A limit of the address space counts the pages that are mapped, each once.
fn address_space() -> Verdict {
    let mapped = || status("VmSize");
    let reserved = doing("mmap", Region::map(32 * MIB, NONE, PRIVATE, -1, 0))?;
    let has = mapped()?;
    limit(libc::RLIMIT_AS, has + 4 * MIB)?;
    let commit = reserved.replace(0, 16 * MIB, WRITE, PRIVATE, -1, 0);
    same!(commit, Ok(()), "a mapping in place of another");
    same!(mapped()?, has, "VmSize afterwards");
    let other = Region::map(8 * MIB, NONE, PRIVATE, -1, 0);
    same!(other.map(drop), Err(Errno(ENOMEM)), "a new mapping");
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP) as u64;
    let remap = |len: u64| make(libc::SYS_mremap, [reserved.start(), len, len, flags, 0]);
    same!(remap(8 * MIB), Err(Errno(ENOMEM)), "MREMAP_DONTUNMAP of 8 MiB");
    let copied = doing("mremap", remap(2 * MIB))?;
    doing("munmap", make(libc::SYS_munmap, [copied, 2 * MIB]))?;
    // A mapping that extends beyond the replaced mapping.
    let end = reserved.start() + 32 * MIB;
    doing("munmap", make(libc::SYS_munmap, [end - 8 * MIB, 8 * MIB]))?;
    let map = |at: u64, len: u64| {
        let flags = (PRIVATE | libc::MAP_FIXED) as u64;
        make(libc::SYS_mmap, [at, len, NONE as u64, flags, u64::MAX, 0])
    };
    same!(
        map(end - 12 * MIB, 12 * MIB),
        Ok(end - 12 * MIB),
        "8 MiB that were free, and 4 MiB more"
    );
    Ok(())
}

/// A limit of the data counts private writable memory.
fn data() -> Verdict {
    let heap = doing("brk", make(libc::SYS_brk, [0]))?;
    limit(libc::RLIMIT_DATA, status("VmData")? + 4 * MIB)?;
    let map = |len: u64, prot: i32, flags: i32| Region::map(len, prot, flags, -1, 0);
    let refused = Err(Errno(ENOMEM));
    same!(map(8 * MIB, WRITE, PRIVATE).map(drop), refused, "8 MiB of private memory");
    same!(map(2 * MIB, WRITE, PRIVATE).map(drop), Ok(()), "2 MiB of private memory");
    let shared = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    same!(map(8 * MIB, WRITE, shared).map(drop), Ok(()), "shared memory");
    same!(map(8 * MIB, WRITE, PRIVATE | libc::MAP_GROWSDOWN).map(drop), Ok(()), "a stack");
    let read = doing("mmap", map(8 * MIB, READ, PRIVATE))?;
    same!(read.protect(0, 8 * MIB, WRITE), refused, "making 8 MiB writable");
    same!(read.protect(0, 2 * MIB, WRITE), Ok(()), "making 2 MiB writable");
    same!(read.protect(0, 2 * MIB, READ), Ok(()), "making the pages readable again");
    same!(make(libc::SYS_brk, [heap + 8 * MIB]), Ok(heap), "8 MiB of heap");
    same!(make(libc::SYS_brk, [heap + 2 * MIB]), Ok(heap + 2 * MIB), "2 MiB of heap");
    same!(make(libc::SYS_brk, [heap]), Ok(heap), "the heap's first end");
    let grows = doing("mmap", map(MIB, WRITE, PRIVATE))?;
    let maymove = libc::MREMAP_MAYMOVE as u64;
    let grow = |len: u64| make(libc::SYS_mremap, [grows.start(), MIB, len, maymove]);
    same!(grow(8 * MIB).map(drop), refused, "a mapping that grows by 7 MiB");
    Ok(())
}

fn usage(of: i32) -> u64 {
    // SAFETY: zeros are a valid structure, which is a local.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(of, &raw mut usage);
        usage
    };
    (usage.ru_maxrss as u64) << 10
}

/// The peaks of mapped and resident memory.
fn peaks() -> Verdict {
    let [size, resident] = [status("VmSize")?, status("VmRSS")?];
    {
        let region = doing("mmap", Region::anonymous(48 * MIB))?;
        for page in region.pages().take((32 * MIB / PAGE) as usize) {
            region.store(page, 1);
        }
    }
    let near = MIB;
    let [most, most_resident] = [status("VmPeak")?, status("VmHWM")?];
    ensure!(most >= size + 48 * MIB, "VmPeak is {most}, VmSize was {size}");
    ensure!(most_resident + near >= resident + 32 * MIB, "VmHWM is {most_resident}");
    ensure!(status("VmSize")? < size + 8 * MIB, "VmSize is unchanged");
    ensure!(status("VmRSS")? < resident + 8 * MIB, "VmRSS is unchanged");
    let own = usage(libc::RUSAGE_SELF);
    ensure!(own + near >= resident + 32 * MIB, "ru_maxrss is {own}");
    // The peak of a child that unmaps no memory itself, and the peak that its parent reads.
    let ended = proc::outcome(|| {
        let Ok(region) = Region::anonymous(64 * MIB) else { return 1 };
        region.fill(1);
        0
    })?;
    same!(ended, Status::Exited(0), "the child");
    let children = usage(libc::RUSAGE_CHILDREN);
    ensure!(children >= 64 * MIB, "ru_maxrss of the children is {children}");
    Ok(())
}

/// Sets the limit of the size of files.
fn limit_files(bytes: u64) -> Verdict {
    limit(libc::RLIMIT_FSIZE, bytes)
}

/// A file grows to the limit; beyond it, the calls fail and the thread gets a signal.
fn sizes_of_files() -> Verdict {
    const LIMIT: u64 = 10_000;
    let file = limited_file()?;
    let (fd, bytes) = (file.as_raw_fd() as u64, [7u8; 2000]);
    let at = bytes.as_ptr() as u64;
    let length = || file.metadata().map_or(0, |meta| meta.len());
    // Makes a call, and checks the length and the number of signals afterwards.
    let expect = |what: &str, result: sys::Result<u64>, expected, len: u64, signals: u64| {
        let before = NOTED.count.swap(0, Ordering::Relaxed);
        same!(result, expected, "{what}");
        same!([before, length()], [signals, len], "the signals and the length after {what}");
        Ok::<_, String>(())
    };
    let write = |len: u64, to: u64| make(libc::SYS_pwrite64, [fd, at, len, to]);
    let set_length = |len: u64| make(libc::SYS_ftruncate, [fd, len]);
    let allocate = |mode: i32, len: u64| make(libc::SYS_fallocate, [fd, mode as u64, 0, len]);
    let refused = Err(Errno(libc::EFBIG));
    limit_files(LIMIT)?;
    expect("a write before the limit", write(2000, 7500), Ok(2000), 9500, 0)?;
    expect("a write across the limit", write(2000, 9900), Ok(100), LIMIT, 0)?;
    expect("a write at the limit", write(1, LIMIT), refused, LIMIT, 1)?;
    same!(NOTED.code.load(Ordering::Relaxed), libc::SI_USER, "the code of the signal");
    same!(NOTED.sender.load(Ordering::Relaxed), proc::pid(), "the sender of the signal");
    expect("a write beyond the limit", write(5, LIMIT + 500), refused, LIMIT, 1)?;
    expect("a write of no bytes", write(0, LIMIT + 500), Ok(0), LIMIT, 0)?;
    let wrong = make(libc::SYS_pwrite64, [fd, 8, 5, LIMIT]);
    expect("a write from an unmapped address", wrong, refused, LIMIT, 1)?;
    expect("a length at the limit", set_length(LIMIT), Ok(0), LIMIT, 0)?;
    expect("a length beyond the limit", set_length(LIMIT + 1), refused, LIMIT, 1)?;
    expect("shortening", set_length(100), Ok(0), 100, 0)?;
    expect("fallocate to the limit", allocate(0, LIMIT), Ok(0), LIMIT, 0)?;
    expect("fallocate beyond the limit", allocate(0, LIMIT + 1), refused, LIMIT, 1)?;
    let keep = libc::FALLOC_FL_KEEP_SIZE;
    expect("the same with KEEP_SIZE", allocate(keep, LIMIT + 1), refused, LIMIT, 1)?;
    let punch = keep | libc::FALLOC_FL_PUNCH_HOLE;
    expect("a hole beyond the limit", allocate(punch, LIMIT + 1), Ok(0), LIMIT, 0)?;
    // A file that is longer already.
    limit_files(libc::RLIM_INFINITY)?;
    expect("a length without a limit", set_length(2 * LIMIT), Ok(0), 2 * LIMIT, 0)?;
    limit_files(LIMIT)?;
    expect("a write beyond the limit", write(5, LIMIT + 500), refused, 2 * LIMIT, 1)?;
    expect("a write across the limit", write(200, LIMIT - 100), Ok(100), 2 * LIMIT, 0)?;
    expect("fallocate within the file", allocate(0, 2 * LIMIT), Ok(0), 2 * LIMIT, 0)?;
    expect("a shorter length", set_length(15_000), Ok(0), 15_000, 0)?;
    // Appending, and copies from other files.
    let set_flags = |flags: i32| make(libc::SYS_fcntl, [fd, libc::F_SETFL as u64, flags as u64]);
    doing("fcntl", set_flags(libc::O_APPEND))?;
    let append = || make(libc::SYS_write, [fd, at, 5]);
    expect("appending to a longer file", append(), refused, 15_000, 1)?;
    let source = doing("memfd_create", make(libc::SYS_memfd_create, [c"s".as_ptr() as u64, 0]))?;
    doing("ftruncate", make(libc::SYS_ftruncate, [source, 100]))?;
    let zero = 0u64;
    let from = (&raw const zero) as u64;
    let send = || make(libc::SYS_sendfile, [fd, source, from, 50]);
    let copy = || make(libc::SYS_copy_file_range, [source, from, fd, 0, 50, 0]);
    expect("copy_file_range with O_APPEND", copy(), Err(Errno(libc::EBADF)), 15_000, 0)?;
    let near = || {
        set_length(LIMIT - 3)?;
        make(libc::SYS_lseek, [fd, LIMIT - 3, libc::SEEK_SET as u64])
    };
    doing("ftruncate", near())?;
    expect("appending across the limit", append(), Ok(3), LIMIT, 0)?;
    doing("fcntl", set_flags(0))?;
    doing("ftruncate", near())?;
    expect("copy_file_range across the limit", copy(), Ok(3), LIMIT, 0)?;
    expect("copy_file_range at the limit", copy(), refused, LIMIT, 1)?;
    doing("ftruncate", near())?;
    expect("sendfile across the limit", send(), Ok(3), LIMIT, 1)?;
    expect("sendfile at the limit", send(), refused, LIMIT, 1)?;
    doing("sigaction", signal::ignore(libc::SIGXFSZ))?;
    same!(write(1, LIMIT), refused, "a write with the signal ignored");
    // The default action, and the limit of a child.
    let ended = proc::outcome(|| {
        let _ = signal::default(libc::SIGXFSZ);
        i32::from(write(1, LIMIT).is_err())
    })?;
    same!(ended, Status::Killed(libc::SIGXFSZ), "the default action");
    Ok(())
}

/// Makes a file for the limit of the size of files, and notes the signals of the limit.
fn limited_file() -> Result<fs::File, String> {
    doing("sigaction", signal::handle(libc::SIGXFSZ, signal::note, 0))?;
    // SAFETY: the name is text, and the new descriptor belongs to the file.
    unsafe {
        let fd = doing("memfd_create", checked(libc::memfd_create(c"rlimits".as_ptr(), 0)))?;
        Ok(fs::File::from_raw_fd(fd))
    }
}

/// Bytes of a pipe that a `splice` cannot write stay in the pipe.
fn spliced_bytes_stay_in_the_pipe() -> Verdict {
    let file = limited_file()?;
    let fd = file.as_raw_fd() as u64;
    let (mut from, mut to) = doing("pipe", std::io::pipe().map_err(|_| Errno::last()))?;
    let error = |error: std::io::Error| error.to_string();
    to.write_all(b"hello").map_err(error)?;
    let ends = [from.as_raw_fd(), to.as_raw_fd()].map(|fd| fd as u64);
    let splice = |len: u64| make(libc::SYS_splice, [ends[0], 0, fd, 0, len, 0]);
    let signals = || NOTED.count.swap(0, Ordering::Relaxed);
    let queued = || {
        let mut count = 0i32;
        let at = (&raw mut count) as u64;
        make(libc::SYS_ioctl, [ends[0], libc::FIONREAD, at])?;
        Ok::<_, Errno>(std::hint::black_box(count))
    };
    limit_files(3)?;
    same!(splice(5), Ok(3), "splice across the limit");
    same!(signals(), 1, "the signals of splice across the limit");
    same!(queued(), Ok(2), "the bytes left in the pipe");
    same!(splice(5), Err(Errno(libc::EFBIG)), "splice at the limit");
    same!(signals(), 1, "the signals of splice at the limit");
    same!(queued(), Ok(2), "the bytes left in the pipe at the limit");
    limit_files(libc::RLIM_INFINITY)?;
    same!(splice(5), Ok(2), "splice without a limit");
    same!(fs::read(format!("/proc/self/fd/{fd}")).map_err(error)?, b"hello", "the file");
    // A full pipe: the rest stays in the source.
    let (mut second, full) = doing("pipe", std::io::pipe().map_err(|_| Errno::last()))?;
    let [second_fd, full_fd] = [second.as_raw_fd(), full.as_raw_fd()].map(|fd| fd as u64);
    let capacity = make(libc::SYS_fcntl, [full_fd, libc::F_GETPIPE_SZ as u64]);
    let capacity = doing("fcntl", capacity)? as usize;
    file.set_len(2 * capacity as u64).map_err(error)?;
    let mut zero = 0u64;
    let at = (&raw mut zero) as u64;
    let fill = make(libc::SYS_splice, [fd, at, full_fd, 0, 2 * capacity as u64, 0]);
    same!(fill, Ok(capacity as u64), "splice of a file to a pipe that becomes full");
    same!(std::hint::black_box(zero), capacity as u64, "the offset in the file");
    to.write_all(b"world").map_err(error)?;
    let across = |flags: u64| make(libc::SYS_splice, [ends[0], 0, full_fd, 0, 5, flags]);
    let at_once = u64::from(libc::SPLICE_F_NONBLOCK);
    same!(across(at_once), Err(Errno(libc::EAGAIN)), "splice to a full pipe");
    same!(queued(), Ok(5), "the bytes left in the source");
    same!(across(64), Err(Errno(libc::EINVAL)), "splice with an unknown flag");
    second.read_exact(&mut vec![0; capacity]).map_err(error)?;
    same!(across(0), Ok(5), "splice to an empty pipe");
    let mut word = [0; 5];
    second.read_exact(&mut word).map_err(error)?;
    same!(&word, b"world", "the moved bytes");
    same!(
        make(libc::SYS_splice, [second_fd, 0, fd, 0, 5, at_once]),
        Err(Errno(libc::EAGAIN)),
        "splice of an empty pipe"
    );
    drop(full);
    same!(make(libc::SYS_splice, [second_fd, 0, fd, 0, 5, 0]), Ok(0), "splice at the end of file");
    let _ = from.read(&mut []);
    Ok(())
}

/// Unsupported modes of `fallocate` fail without a signal, also beyond the limit. A range beyond
/// the largest offset is invalid without a signal, too.
fn invalid_ranges_send_no_signal() -> Verdict {
    let file = limited_file()?;
    let fd = file.as_raw_fd() as u64;
    limit_files(100)?;
    let allocate = |mode: u64, len: u64| make(libc::SYS_fallocate, [fd, mode, 0, len]);
    for mode in [0x2, 0x8, 0x10, 0x11, 0x20, 0x40, 0x100] {
        same!(allocate(mode, 200), Err(Errno(libc::EOPNOTSUPP)), "fallocate of mode {mode:#x}");
    }
    same!(allocate(8, 0), Err(Errno(libc::EINVAL)), "fallocate of no bytes");
    let (bytes, most) = ([0u8; 10], i64::MAX as u64);
    for (name, number) in [("pread", libc::SYS_pread64), ("pwrite", libc::SYS_pwrite64)] {
        let call = |len: u64, at: u64| make(number, [fd, bytes.as_ptr() as u64, len, at]);
        same!(call(10, most), Err(Errno(libc::EINVAL)), "{name} across the largest offset");
        same!(call(10, most - 9), Err(Errno(libc::EINVAL)), "{name} of one byte too many");
        same!(call(0, most), Ok(0), "{name} of no bytes at the largest offset");
    }
    let position = make(libc::SYS_lseek, [fd, most, libc::SEEK_SET as u64]);
    same!(position, Ok(most), "lseek to the largest offset");
    for (name, number) in [("read", libc::SYS_read), ("write", libc::SYS_write)] {
        let moved = make(number, [fd, bytes.as_ptr() as u64, 10]);
        same!(moved, Err(Errno(libc::EINVAL)), "{name} at the largest offset");
    }
    same!(NOTED.count.load(Ordering::Relaxed), 0, "the signals");
    Ok(())
}

/// A process has at most `fs.nr_open` descriptors.
fn descriptors() -> Verdict {
    let text = fs::read_to_string("/proc/sys/fs/nr_open").map_err(|error| error.to_string())?;
    let most: u64 = text.trim().parse().map_err(|error| format!("{text}: {error}"))?;
    let mut old = [0u64; 2];
    let files = u64::from(libc::RLIMIT_NOFILE);
    let set =
        |new: [u64; 2], old: u64| make(libc::SYS_prlimit64, [0, files, new.as_ptr() as u64, old]);
    let get = [0, files, 0, old.as_mut_ptr() as u64];
    doing("prlimit", make(libc::SYS_prlimit64, get))?;
    let old = std::hint::black_box(old);
    same!(set([5, most + 1], 0), Err(Errno(libc::EPERM)), "more than nr_open");
    same!(set([5, u64::MAX], 0), Err(Errno(libc::EPERM)), "no limit");
    same!(set([most + 2, most + 1], 0), Err(Errno(libc::EINVAL)), "more than the hard limit");
    same!(set([5, old[1]], 0), Ok(0), "a lower limit");
    let opened = (0..9).find_map(|_| make(libc::SYS_dup, [1]).err());
    same!(opened, Some(Errno(libc::EMFILE)), "more descriptors");
    Ok(())
}

/// The errors of `prlimit`, in their order.
fn errors_of_limits() -> Verdict {
    const NONE_SUCH: u64 = 99;
    let mut limit = [0u64; 2];
    let at = limit.as_mut_ptr() as u64;
    let call = |pid: u64, resource, new: u64| make(libc::SYS_prlimit64, [pid, resource, new, at]);
    let own = proc::pid() as u64;
    same!(call(own, NONE_SUCH, 0), Err(Errno(libc::EINVAL)), "no resource");
    same!(call(1 << 30, NONE_SUCH, 0), Err(Errno(libc::ESRCH)), "no resource, no process");
    same!(call(1 << 30, NONE_SUCH, 8), Err(Errno(libc::EFAULT)), "an unmapped address, too");
    let files = u64::from(libc::RLIMIT_NOFILE);
    same!(call(1 << 30, files, 0), Err(Errno(libc::ESRCH)), "no process");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("sizes_of_files", sizes_of_files),
    ("spliced_bytes_stay_in_the_pipe", spliced_bytes_stay_in_the_pipe),
    ("invalid_ranges_send_no_signal", invalid_ranges_send_no_signal),
    ("descriptors", descriptors),
    ("errors_of_limits", errors_of_limits),
    ("stacks_grow_to_their_limit", stacks_grow_to_their_limit),
    ("arguments_take_a_quarter_of_the_stack", arguments_take_a_quarter_of_the_stack),
    ("address_space", address_space),
    ("data", data),
    ("peaks", peaks),
];

fn main() {
    if std::env::args().nth(1).is_some_and(|word| word == "end") {
        return;
    }
    proc::no_huge_pages();
    std::process::exit(check::run(&Args::read("rlimits", &[]), CHECKS));
}
