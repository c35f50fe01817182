//! `oom [CHECK…] [limit=MIB]`: exhausts each resource, in child processes. Each child must end by
//! an error or be killed; this process survives and finds the machine unchanged.
//!
//! Without `limit` the machine's memory is the limit, so the machine must have less than 2 GiB, and
//! must not be shared. With `limit` each child may map this number of MiB.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{NONE, PAGE, Region, WRITE};
use faultless_guest::proc::{Status, exit_now, fork, kill, outcome, wait};
use faultless_guest::procfs::{fields, kilobytes};
use faultless_guest::sys::{Errno, call, doing};
use faultless_guest::{clock, ensure, proc};
use std::io::Write;
use std::mem::forget;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::time::Instant;

/// The maximum number of bytes that each child may map, if limited.
static LIMIT: OnceLock<Option<u64>> = OnceLock::new();

const REFUSED: i32 = 50;
const ENOUGH: i32 = 51;

fn limit() -> Option<u64> {
    *LIMIT.get_or_init(|| None)
}

/// Ends a child after a refused request, if the error is an expected one.
fn refused(errno: Errno) -> i32 {
    match errno.0 {
        libc::ENOMEM | libc::EAGAIN | libc::ENOSPC | libc::EFBIG | libc::EMFILE | libc::ENFILE => {
            REFUSED
        }
        number => number,
    }
}

fn last_error(error: &std::io::Error) -> i32 {
    refused(Errno(error.raw_os_error().unwrap_or(0)))
}

/// Runs `body`, which takes memory until a failure, in a child; then checks the machine.
fn exhaust(body: fn() -> i32) -> Verdict {
    ends(body).map(drop)
}

/// The rest of [`exhaust`]. Returns the status of the child.
fn ends(body: fn() -> i32) -> Result<Status, String> {
    let free = free()?;
    let child = doing(
        "fork",
        fork(|| {
            // A separate process group, so that remaining processes can be found. SAFETY: a plain
            // call.
            unsafe { libc::setpgid(0, 0) };
            if let Some(limit) = limit() {
                let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
                // SAFETY: the pointer is to a local.
                unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
                // SAFETY: as above.
                unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
                // SAFETY: a plain call. Otherwise a file beyond the limit would be a signal.
                unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
            }
            body()
        }),
    )?;
    let group = child.pid;
    let status = doing("wait4", child.wait())?;
    // If the child was killed, its own children still live.
    let _ = kill(-group, libc::SIGKILL);
    let proper = [
        Status::Killed(libc::SIGKILL),
        // If a file system has no space for a page of a shared mapping.
        Status::Killed(libc::SIGBUS),
        // If the standard library gets no memory for its record of a thread, which a kernel may
        // refuse.
        Status::Killed(libc::SIGABRT),
        Status::Exited(REFUSED),
        Status::Exited(ENOUGH),
    ];
    ensure!(proper.contains(&status), "the child ended with {status:?}");
    println!("# {status:?}");
    after(free)?;
    Ok(status)
}

fn free() -> Result<u64, String> {
    let info = fields("/proc/meminfo")?;
    kilobytes(&info, "MemAvailable")
}

/// Checks that the machine is unchanged: the memory was freed, and processes work.
fn after(before: u64) -> Verdict {
    let begin = Instant::now();
    let mut found = 0;
    // On an exclusive machine all memory is freed; an ending process needs a moment to free its
    // memory.
    while limit().is_none() && begin.elapsed().as_secs() < 20 {
        found = free()?;
        if found >= before - before / 8 {
            break;
        }
        clock::sleep_ms(20);
    }
    ensure!(
        limit().is_some() || found >= before - before / 8,
        "{found} bytes are available after the kill, {before} before"
    );
    let status = outcome(|| {
        let Ok(region) = Region::anonymous(4 << 20) else { return 1 };
        region.fill(9);
        let fine = std::thread::spawn(|| 5).join().is_ok_and(|value| value == 5);
        i32::from(!fine || region.pages().any(|at| region.load(at) != 9))
    })?;
    ensure!(status == Status::Exited(0), "a process after the kill ended with {status:?}");
    Ok(())
}

/// Touches private memory until memory is out.
fn anonymous() -> Verdict {
    exhaust(|| {
        loop {
            match Region::anonymous(8 << 20) {
                Ok(region) => {
                    region.fill(1);
                    forget(region);
                }
                Err(errno) => return refused(errno),
            }
        }
    })
}

/// Reads need memory only for tables; there is a single zero page.
fn read_only() -> Verdict {
    exhaust(|| {
        loop {
            match Region::anonymous(1 << 30) {
                Ok(region) => {
                    for at in (0..region.len()).step_by(2 << 20) {
                        region.load(at);
                    }
                    forget(region);
                }
                Err(errno) => return refused(errno),
            }
        }
    })
}

/// The same through a shared mapping.
fn shared() -> Verdict {
    exhaust(|| {
        loop {
            match Region::shared(8 << 20) {
                Ok(region) => {
                    region.fill(1);
                    forget(region);
                }
                Err(errno) => return refused(errno),
            }
        }
    })
}

/// Copies: parent and child write to shared pages until memory is out.
fn copies() -> Verdict {
    exhaust(|| {
        let share = limit().unwrap_or(1 << 30) / 4;
        let Ok(region) = Region::anonymous(share.min(64 << 20)) else { return REFUSED };
        region.fill(1);
        for copy in 0..200u64 {
            let child = fork(|| {
                region.fill(copy + 2);
                clock::sleep_ms(100_000);
                0
            });
            match child {
                Ok(_) => {}
                Err(errno) => {
                    end_all();
                    return refused(errno);
                }
            }
            clock::sleep_ms(if limit().is_some() { 1 } else { 30 });
            // A process was killed for lack of memory: the test is complete.
            if wait(-1, libc::WNOHANG).is_ok_and(|ended| ended.is_some()) {
                end_all();
                return REFUSED;
            }
            if limit().is_some() && copy == 3 {
                end_all();
                return ENOUGH;
            }
        }
        end_all();
        ENOUGH
    })
}

/// Ends all children of this process.
fn end_all() {
    while let Some(children) = children() {
        for pid in &children {
            let _ = kill(*pid, libc::SIGKILL);
        }
        for pid in children {
            let _ = wait(pid, 0);
        }
    }
}

/// Returns this process's children, as listed by `/proc`; `None` without children.
fn children() -> Option<Vec<i32>> {
    let own = proc::pid();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(line) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let parent = line.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1));
        if parent.and_then(|parent| parent.parse().ok()) == Some(own) {
            found.push(pid);
        }
    }
    (!found.is_empty()).then_some(found)
}

/// A file that grows until no space is left.
fn file() -> Verdict {
    exhaust(|| {
        let path = format!("/tmp/oom.{}", proc::pid());
        let mut file = match std::fs::File::create(&path) {
            Ok(file) => file,
            Err(error) => return last_error(&error),
        };
        // The file is removed even if this process is killed.
        let _ = std::fs::remove_file(&path);
        let block = vec![7u8; 1 << 20];
        loop {
            if let Err(error) = file.write_all(&block) {
                return last_error(&error);
            }
        }
    })
}

/// A mapped file that is written until no space is left: the store fails, and no process is killed.
fn mapped_file() -> Verdict {
    let status = ends(|| {
        let path = format!("/tmp/oom.{}", proc::pid());
        let file =
            std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = match file {
            Ok(file) => file,
            Err(error) => return last_error(&error),
        };
        let _ = std::fs::remove_file(&path);
        let len = limit().map_or(4 << 30, |limit| limit / 2);
        if let Err(error) = file.set_len(len) {
            return last_error(&error);
        }
        let region = Region::map(len, WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0);
        match region {
            Ok(region) => {
                region.fill(1);
                ENOUGH
            }
            Err(errno) => refused(errno),
        }
    })?;
    // A disk may have space for the whole file.
    let ends = [Status::Killed(libc::SIGBUS), Status::Exited(ENOUGH)];
    ensure!(limit().is_some() || ends.contains(&status), "the child ended with {status:?}");
    Ok(())
}

/// Page tables: one page in each gigabyte, then in each 2 MiB.
fn tables() -> Verdict {
    exhaust(|| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let len = limit().map_or(1 << 44, |limit| limit / 2);
        let region = match Region::map(len, WRITE, flags, -1, 0) {
            Ok(region) => region,
            Err(errno) => return refused(errno),
        };
        for step in [1 << 30, 2 << 20] {
            let mut at = 0;
            while at < region.len() {
                region.store(at, 1);
                at += step;
            }
        }
        ENOUGH
    })
}

/// The maximum number of mappings, which cannot merge.
fn mappings() -> Verdict {
    exhaust(|| {
        let len = limit().map_or(1 << 30, |limit| limit / 2);
        let region = match Region::anonymous(len) {
            Ok(region) => region,
            Err(errno) => return refused(errno),
        };
        for at in region.pages().step_by(2) {
            if let Err(errno) = region.protect(at, PAGE, NONE) {
                // The failed call has no partial effect: the region still works.
                region.store(PAGE, 5);
                return if region.load(PAGE) == 5 { refused(errno) } else { 1 };
            }
        }
        ENOUGH
    })
}

/// Processes: a bounded number, or the maximum number, all alive at once.
fn processes() -> Verdict {
    exhaust(|| {
        let most = if limit().is_some() { 100 } else { 3000 };
        for _ in 0..most {
            let child = fork(|| {
                clock::sleep_ms(1_000_000);
                0
            });
            match child {
                Ok(_) => {}
                Err(errno) => {
                    end_all();
                    return refused(errno);
                }
            }
        }
        end_all();
        ENOUGH
    })
}

/// Threads: likewise.
fn threads() -> Verdict {
    exhaust(|| {
        let most = if limit().is_some() { 100 } else { 3000 };
        for _ in 0..most {
            let builder = std::thread::Builder::new().stack_size(64 << 10);
            match builder.spawn(|| clock::sleep_ms(1_000_000)) {
                Ok(_) => {}
                Err(error) => exit_now(last_error(&error)),
            }
        }
        exit_now(ENOUGH)
    })
}

/// Full pipes, whose contents are in the kernel's own memory.
fn pipes() -> Verdict {
    exhaust(|| {
        loop {
            let mut ends = [0i32; 2];
            // SAFETY: the arrays have space for the data.
            let made = unsafe {
                call(libc::SYS_pipe2, [ends.as_mut_ptr() as u64, libc::O_NONBLOCK as u64])
            };
            if let Err(errno) = made {
                return refused(errno);
            }
            let block = [1u8; 4096];
            // SAFETY: the block is read only.
            while unsafe { call(libc::SYS_write, [ends[1] as u64, block.as_ptr() as u64, 4096]) }
                == Ok(4096)
            {}
        }
    })
}

/// Makes a call with this process's own memory.
fn make<const N: usize>(number: i64, args: [u64; N]) -> Result<u64, Errno> {
    // SAFETY: every caller passes pointers to its own memory, which outlives the call.
    unsafe { call(number, args) }
}

/// With full kernel memory, makes all calls that could need memory. Calls that release something
/// succeed; other calls fail or succeed.
fn full() -> Verdict {
    exhaust(|| fill_and_ask().map_or_else(|what| 60 + what, |()| REFUSED))
}

/// Returns the number of the failed step, if any.
fn fill_and_ask() -> Result<(), i32> {
    let (ready, most) = if limit().is_some() { (300u64, 100) } else { (3000, usize::MAX) };
    let descriptors = libc::rlimit { rlim_cur: 200_000, rlim_max: 1 << 20 };
    if limit().is_none() {
        // SAFETY: the pointer is to a local.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const descriptors) };
    }
    // The objects to use when memory is full.
    let set = make(libc::SYS_epoll_create1, [0]).map_err(|_| 1)?;
    for fd in 0..ready {
        let event = make(libc::SYS_eventfd2, [1, 0]).map_err(|_| 2)?;
        let interest = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd };
        let at = &raw const interest as u64;
        make(libc::SYS_epoll_ctl, [set, libc::EPOLL_CTL_ADD as u64, event, at]).map_err(|_| 3)?;
    }
    let semaphores = make(libc::SYS_semget, [0, 32000, 0o600]).map_err(|_| 4)?;
    let queue = make(libc::SYS_msgget, [0, 0o600]).map_err(|_| 5)?;
    let lock = |kind: i32, start: i64, len: i64| {
        let request = libc::flock {
            l_type: kind as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: start,
            l_len: len,
            l_pid: 0,
        };
        make(libc::SYS_fcntl, [set, libc::F_SETLK as u64, &raw const request as u64])
    };
    lock(libc::F_WRLCK, 0, 1 << 40).map_err(|_| 6)?;
    let len = limit().map_or(64 << 20, |limit| limit / 2);
    let region = Region::anonymous(len).map_err(|_| 7)?;
    let signal = libc::SIGRTMIN() + 2;
    let blocked = 1u64 << (signal - 1);
    let at = &raw const blocked as u64;
    make(libc::SYS_rt_sigprocmask, [libc::SIG_BLOCK as u64, at, 0, 8]).map_err(|_| 8)?;
    let mut told = vec![libc::epoll_event { events: 0, u64: 0 }; 3000];
    let values = vec![1u16; 32000];

    // Fill memory with pipes, until a pipe is refused.
    let block = [1u8; 4096];
    for _ in 0..most {
        let mut ends = [0i32; 2];
        let at = ends.as_mut_ptr() as u64;
        if make(libc::SYS_pipe2, [at, libc::O_NONBLOCK as u64]).is_err() {
            break;
        }
        while make(libc::SYS_write, [ends[1] as u64, block.as_ptr() as u64, 4096]) == Ok(4096) {}
    }

    // Each call takes the remaining memory, until a refusal.
    let until_refused =
        |most: u64, what: i32, errors: &[i32], one: &dyn Fn(u64) -> Result<u64, Errno>| {
            for step in 0..most {
                match one(step) {
                    Ok(_) => {}
                    Err(Errno(errno)) if errors.contains(&errno) => return Ok(()),
                    Err(_) => return Err(what),
                }
            }
            Ok(())
        };
    until_refused(20_000, 10, &[libc::ENOMEM], &|step| {
        let at = region.start() + 2 * step * PAGE % region.len();
        make(libc::SYS_mprotect, [at, PAGE, libc::PROT_NONE as u64])
    })?;
    until_refused(5000, 11, &[libc::EAGAIN], &|_| {
        let mut id = 0i32;
        let made = [libc::CLOCK_MONOTONIC as u64, 0, &raw mut id as u64];
        make(libc::SYS_timer_create, made)?;
        let time = [0i64, 1_000_000, 1000, 0];
        make(libc::SYS_timer_settime, [id as u64, 0, time.as_ptr() as u64, 0])
    })?;
    until_refused(5000, 12, &[libc::EAGAIN], &|_| {
        let mut info = [0u8; 128];
        info[..4].copy_from_slice(&signal.to_ne_bytes());
        info[8..12].copy_from_slice(&libc::SI_QUEUE.to_ne_bytes());
        let args = [proc::pid() as u64, signal as u64, info.as_ptr() as u64];
        make(libc::SYS_rt_sigqueueinfo, args)
    })?;
    until_refused(100, 13, &[libc::ENOMEM, libc::EAGAIN], &|_| {
        let message = [1u64; 512];
        let at = message.as_ptr() as u64;
        make(libc::SYS_msgsnd, [queue, at, 4000, libc::IPC_NOWAIT as u64])
    })?;
    until_refused(100, 14, &[libc::ENOMEM], &|_| {
        make(libc::SYS_semctl, [semaphores, 0, libc::SETALL as u64, values.as_ptr() as u64])
    })?;
    let at = told.as_mut_ptr() as u64;
    until_refused(10, 15, &[libc::ENOMEM], &|_| make(libc::SYS_epoll_wait, [set, at, 3000, 0]))?;
    // In the middle: each unlock splits a lock.
    until_refused(5000, 16, &[libc::ENOLCK], &|step| lock(libc::F_UNLCK, 2 + 4 * step as i64, 1))?;
    until_refused(5000, 17, &[libc::ENOMEM, libc::EMFILE], &|_| make(libc::SYS_dup, [set]))?;
    for path in [c"/proc/self/maps", c"/proc/self/status", c"/proc/meminfo", c"/"] {
        let read = |_| {
            let at = path.as_ptr() as u64;
            let fd = make(libc::SYS_openat, [libc::AT_FDCWD as u64, at, 0, 0])?;
            let mut buffer = [0u8; 512];
            let read = make(libc::SYS_read, [fd, buffer.as_mut_ptr() as u64, 512]);
            make(libc::SYS_close, [fd])?;
            if path == c"/" { Ok(0) } else { read }
        };
        until_refused(2, 18, &[libc::ENOMEM, libc::EMFILE], &read)?;
    }
    // Calls that release, wait, or cannot report an error.
    let time = [0i64, 1_000_000];
    let at = time.as_ptr() as u64;
    make(libc::SYS_nanosleep, [at, 0]).map_err(|_| 20)?;
    make(libc::SYS_alarm, [0]).map_err(|_| 21)?;
    lock(libc::F_UNLCK, 0, 0).map_err(|_| 22)?;
    make(libc::SYS_semctl, [semaphores, 0, libc::IPC_RMID as u64]).map_err(|_| 23)?;
    make(libc::SYS_msgctl, [queue, libc::IPC_RMID as u64, 0]).map_err(|_| 24)?;
    make(libc::SYS_close, [set]).map_err(|_| 25)?;
    region.end().map_err(|_| 26)
}

/// Several processes at once, each of which takes as much as it can.
fn together() -> Verdict {
    exhaust(|| {
        let takers: Vec<_> = (0..4)
            .map(|_| {
                fork(|| {
                    loop {
                        match Region::anonymous(1 << 20) {
                            Ok(region) => {
                                region.fill(1);
                                forget(region);
                            }
                            Err(errno) => return refused(errno),
                        }
                    }
                })
            })
            .collect();
        let mut proper = true;
        for taker in takers.into_iter().flatten() {
            let ended = doing("wait4", taker.wait());
            proper &= matches!(ended, Ok(Status::Killed(libc::SIGKILL) | Status::Exited(REFUSED)));
        }
        if proper { ENOUGH } else { 1 }
    })
}

const CHECKS: &[Check] = &[
    ("anonymous", anonymous),
    ("read_only", read_only),
    ("shared", shared),
    ("copies", copies),
    ("file", file),
    ("mapped_file", mapped_file),
    ("tables", tables),
    ("mappings", mappings),
    ("processes", processes),
    ("threads", threads),
    ("pipes", pipes),
    ("full", full),
    ("together", together),
];

fn main() {
    let args = Args::read("oom", &["limit"]);
    let limit = args.text("limit").map(|_| args.get("limit", 0u64) << 20);
    let total = fields("/proc/meminfo").and_then(|info| kilobytes(&info, "MemTotal"));
    match (limit, total) {
        (Some(0..0x200_0000), _) => args.refuse("limit must be 32 at least"),
        (None, Ok(total)) if total >= 2 << 30 => {
            args.refuse(&format!("the machine has {} MiB: a limit is required", total >> 20));
        }
        (None, Err(why)) => args.refuse(&why),
        _ => {}
    }
    let _ = LIMIT.set(limit);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
