//! `rlimits [CHECK…]`: the limits of a process's memory, and the most memory that it had.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{NONE, PAGE, READ, Region, WRITE, store};
use faultless_guest::proc::{self, Status};
use faultless_guest::sys::{self, Errno, call, checked, doing};
use faultless_guest::{ensure, same};
use libc::{E2BIG, ENOMEM};
use std::ffi::CString;
use std::fs;

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
    same!(map(end - 12 * MIB, 12 * MIB), Ok(end - 12 * MIB), "8 MiB that were free, and 4 more");
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
    same!(read.protect(0, 2 * MIB, READ), Ok(()), "making them readable again");
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
    ensure!(status("VmSize")? < size + 8 * MIB, "VmSize stays");
    ensure!(status("VmRSS")? < resident + 8 * MIB, "VmRSS stays");
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

const CHECKS: &[Check] = &[
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
