//! `limits [CHECK…] [dir=DIR]`: limits of depth and length: chains of epolls, paths, directories;
//! and files that shrink during a fork. Files are made, and removed, in a private directory in DIR
//! (`/tmp`).

use faultless_guest::check::{Check, Verdict};
use faultless_guest::dir::{self, dir, io};
use faultless_guest::mem::{PAGE, Region, Shared, WRITE};
use faultless_guest::proc::{Status, exit_now, fork, wait_until};
use faultless_guest::procfs::{fields, kilobytes};
use faultless_guest::sys::{Errno, call, checked, doing};
use faultless_guest::{ensure, same, signal};
use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

fn epoll() -> Result<OwnedFd, String> {
    // SAFETY: the new descriptor has no other owner.
    unsafe {
        doing("epoll_create1", checked(libc::epoll_create1(0))).map(|fd| OwnedFd::from_raw_fd(fd))
    }
}

/// Puts `inner` into `outer`.
fn watch(outer: &OwnedFd, inner: &OwnedFd) -> Result<i32, Errno> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    let (outer, inner) = (outer.as_raw_fd(), inner.as_raw_fd());
    // SAFETY: the event is a local.
    checked(unsafe { libc::epoll_ctl(outer, libc::EPOLL_CTL_ADD, inner, &raw mut event) })
}

/// Epolls in epolls: short chains are allowed, growing at either end; a circle is never allowed;
/// and an event at the bottom is visible at the top.
fn epoll_chains() -> Verdict {
    let grows = |outwards: bool| -> Result<usize, String> {
        let mut chain = vec![epoll()?];
        loop {
            let next = epoll()?;
            let last = &chain[chain.len() - 1];
            let put = if outwards { watch(&next, last) } else { watch(last, &next) };
            match put {
                Ok(_) if chain.len() < 50 => chain.push(next),
                Ok(_) => return Err("a chain of 50 epolls is allowed".to_owned()),
                Err(Errno(libc::ELOOP)) => return Ok(chain.len()),
                Err(errno) => return Err(format!("{} epolls deep: {errno}", chain.len())),
            }
        }
    };
    same!(grows(true)?, 5, "depth of nested epolls, created outwards");
    same!(grows(false)?, 5, "depth of nested epolls, created inwards");
    let chain = [epoll()?, epoll()?, epoll()?, epoll()?];
    for pair in chain.windows(2) {
        same!(watch(&pair[0], &pair[1]), Ok(0), "a chain of four");
    }
    same!(watch(&chain[0], &chain[0]), Err(Errno(libc::EINVAL)), "an epoll in itself");
    same!(watch(&chain[3], &chain[0]), Err(Errno(libc::ELOOP)), "a circle of four");
    // SAFETY: the new descriptor has no other owner.
    let event = unsafe { OwnedFd::from_raw_fd(doing("eventfd", checked(libc::eventfd(1, 0)))?) };
    same!(watch(&chain[3], &event), Ok(0), "an event at the bottom");
    let mut seen = libc::epoll_event { events: 0, u64: 1 };
    // SAFETY: there is space for one event.
    let count = unsafe { libc::epoll_wait(chain[0].as_raw_fd(), &raw mut seen, 1, 0) };
    same!(count, 1, "events at the top");
    Ok(())
}

/// Reads the directory; returns the length of the result, with its NUL.
fn cwd(buffer: &mut [u8]) -> Result<u64, Errno> {
    // SAFETY: the buffer has the passed length.
    unsafe { call(libc::SYS_getcwd, [buffer.as_mut_ptr() as u64, buffer.len() as u64]) }
}

/// Directories nested deeper than the maximum path length: they can be entered and left, and have
/// no path.
fn deep_paths() -> Verdict {
    const LEVELS: usize = 40;
    io("chdir", std::env::set_current_dir(dir()))?;
    let name = "d".repeat(200);
    let mut buffer = vec![0; 20_000];
    let mut told = doing("getcwd", cwd(&mut buffer))?;
    let mut deepest_named = 0;
    for level in 1..=LEVELS {
        io("mkdir", fs::create_dir(&name))?;
        io("chdir", std::env::set_current_dir(&name))?;
        match cwd(&mut buffer) {
            Ok(len) => {
                same!(len, told + 201, "how long the path of level {level} is");
                (told, deepest_named) = (len, level);
            }
            Err(errno) => same!(errno, Errno(libc::ENAMETOOLONG), "getcwd at level {level}"),
        }
    }
    ensure!(told <= 4096, "getcwd returned a path of {told} bytes");
    ensure!(told + 201 > 4096, "getcwd returned no path longer than {told} bytes");
    ensure!(deepest_named < LEVELS, "all levels have a path");
    // Relative paths work from there as usual.
    io("write", fs::write("file", b"deep"))?;
    same!(io("read", fs::read("file"))?, b"deep", "the file at the bottom");
    io("unlink", fs::remove_file("file"))?;
    for _ in 0..LEVELS {
        io("chdir", std::env::set_current_dir(".."))?;
        io("rmdir", fs::remove_dir(&name))?;
    }
    let len = doing("getcwd", cwd(&mut buffer))? as usize;
    same!(cwd(&mut buffer[..len - 1]), Err(Errno(libc::ERANGE)), "getcwd without room");
    same!(cwd(&mut buffer[..len]), Ok(len as u64), "getcwd with just enough room");
    let long = CString::new("x/".repeat(2100)).map_err(|error| error.to_string())?;
    // SAFETY: the path ends in NUL.
    let opened = checked(unsafe { libc::open(long.as_ptr(), libc::O_RDONLY) });
    same!(opened, Err(Errno(libc::ENAMETOOLONG)), "a path of 4200 bytes");
    Ok(())
}

/// A directory of thousands, listed through buffers of various sizes: each name appears once.
fn many_entries() -> Verdict {
    const MANY: usize = 3000;
    let many = dir().join("many");
    io("mkdir", fs::create_dir(&many))?;
    let name = |number: usize| format!("{number}{}", "n".repeat(number % 50));
    for number in 0..MANY {
        io("create", fs::File::create(many.join(name(number))))?;
    }
    let expected: BTreeSet<String> =
        (0..MANY).map(name).chain([".", ".."].map(str::to_owned)).collect();
    for size in [80, 100, 333, 4096, 1 << 20] {
        let opened = io("open", fs::File::open(&many))?;
        let mut found = BTreeSet::new();
        let mut buffer = vec![0u8; size];
        loop {
            let fd = opened.as_raw_fd() as u64;
            // SAFETY: the buffer has the passed length.
            let len = unsafe {
                call(libc::SYS_getdents64, [fd, buffer.as_mut_ptr() as u64, size as u64])
            };
            let len = doing("getdents64", len)? as usize;
            if len == 0 {
                break;
            }
            let mut at = 0;
            while at < len {
                let entry = usize::from(u16::from_le_bytes([buffer[at + 16], buffer[at + 17]]));
                let name = buffer[at + 19..at + entry].split(|&byte| byte == 0).next();
                let name = String::from_utf8_lossy(name.unwrap_or_default()).into_owned();
                ensure!(found.insert(name.clone()), "{name} twice, with {size} bytes");
                at += entry;
            }
            same!(at, len, "the end of the last entry, with {size} bytes");
        }
        same!(found.len(), expected.len(), "the number of names, with {size} bytes");
        ensure!(found == expected, "other names, with {size} bytes");
    }
    let opened = io("open", fs::File::open(&many))?;
    let mut small = [0u8; 16];
    let ask = [opened.as_raw_fd() as u64, small.as_mut_ptr() as u64, 16];
    // SAFETY: the buffer has the passed length.
    let refused = unsafe { call(libc::SYS_getdents64, ask) };
    same!(refused, Err(Errno(libc::EINVAL)), "a buffer smaller than one entry");
    io("rmdir", fs::remove_dir_all(&many))
}

/// A file is shortened during a fork: the copy does not have the removed pages either.
fn shortened_in_fork() -> Verdict {
    const PAGES: u64 = 64;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    let file = io("create", options.open(dir().join("short")))?;
    let whole = vec![7u8; (PAGES * PAGE) as usize];
    // Memory that makes the fork slow.
    let ballast = doing("mmap", Region::anonymous(512 * PAGE))?;
    ballast.fill(1);
    let told = doing("mmap", Shared::new([const { AtomicU64::new(0) }; 2]))?;
    for round in 1..=40u64 {
        io("write", std::os::unix::fs::FileExt::write_all_at(&file, &whole, 0))?;
        let fd = file.as_raw_fd();
        let mapped = doing("mmap", Region::map(PAGES * PAGE, WRITE, libc::MAP_PRIVATE, fd, 0))?;
        // Private copies are dropped too; fork copies only private copies.
        mapped.fill(7);
        let status = std::thread::scope(|scope| {
            let shorten = scope.spawn(|| {
                wait_until(|| told[0].load(Acquire) == round);
                let done = io("ftruncate", file.set_len(PAGE));
                told[1].store(round, Release);
                done
            });
            told[0].store(round, Release);
            for _ in 0..round % 8 * 100 {
                std::hint::spin_loop();
            }
            let child = fork(|| {
                let _ = signal::default(libc::SIGBUS);
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                // SAFETY: the limit is a local.
                unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
                wait_until(|| told[1].load(Acquire) == round);
                if mapped.load(0) & 0xff != 7 {
                    exit_now(1);
                }
                mapped.load((PAGES - 1) * PAGE);
                2
            });
            let status = child.and_then(|child| child.wait());
            shorten.join().map_err(|_| "the thread panicked".to_owned())??;
            doing("fork", status)
        })?;
        same!(status, Status::Killed(libc::SIGBUS), "reading a truncated page, round {round}");
    }
    Ok(())
}

/// As many concurrent threads as the machine should support: 3000 in 1 GiB.
fn many_threads() -> Verdict {
    let memory = kilobytes(&fields("/proc/meminfo")?, "MemTotal")?;
    let most = ((memory >> 20) * 345 / 100).min(3000) as usize;
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let mut threads = Vec::new();
    let mut verdict = Ok(());
    for number in 0..most {
        let own = gate.clone();
        let builder = thread::Builder::new().stack_size(64 << 10);
        let spawned = builder.spawn(move || {
            let (open, changed) = &*own;
            let open = open.lock().unwrap_or_else(PoisonError::into_inner);
            drop(changed.wait_while(open, |open| !*open));
        });
        match spawned {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                verdict = Err(format!("thread {number} of {most}: {error}"));
                break;
            }
        }
    }
    *gate.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
    gate.1.notify_all();
    for thread in threads {
        ensure!(thread.join().is_ok(), "a thread panicked");
    }
    println!("# {most} threads");
    verdict
}

/// A closed descriptor with a high number takes no memory, neither here nor in children.
fn closed_descriptors() -> Verdict {
    const CHILDREN: usize = 24;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is a local.
    let high = unsafe {
        doing("getrlimit", checked(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit)))?;
        limit.rlim_cur = limit.rlim_max.min(1 << 18);
        doing("setrlimit", checked(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit)))?;
        doing("dup2", checked(libc::dup2(0, limit.rlim_cur as i32 - 1)))?
    };
    // SAFETY: the new descriptor has no other owner.
    doing("close", checked(unsafe { libc::close(high) }))?;
    let gate = doing("mmap", Shared::new(AtomicU64::new(0)))?;
    let held = || {
        wait_until(|| gate.load(Acquire) != 0);
        0
    };
    let children: Vec<_> = (0..CHILDREN).map(|_| fork(held)).collect();
    gate.store(1, Release);
    for (number, child) in children.into_iter().enumerate() {
        let status = doing("wait4", doing(&format!("fork {number}"), child)?.wait())?;
        same!(status, Status::Exited(0), "child {number}");
    }
    Ok(())
}

const CHECKS: &[Check] = &[
    ("closed_descriptors", closed_descriptors),
    ("many_threads", many_threads),
    ("epoll_chains", epoll_chains),
    ("deep_paths", deep_paths),
    ("many_entries", many_entries),
    ("shortened_in_fork", shortened_in_fork),
];

fn main() {
    dir::run("limits", CHECKS);
}
