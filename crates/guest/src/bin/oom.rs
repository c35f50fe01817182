//! `oom [CHECK…] [limit=MIB]`: takes all there is of everything, in child processes. Each must end by
//! being refused or killed; this process lives on and finds the machine as it was.
//!
//! Without `limit` the machine's memory is what ends it, so it must have less than 2 GiB: a machine that is
//! shared with others is no place for that. With `limit` each child may map so many MiB.

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

/// What each child may map, in bytes, where that is limited.
static LIMIT: OnceLock<Option<u64>> = OnceLock::new();

const REFUSED: i32 = 50;
const ENOUGH: i32 = 51;

fn limit() -> Option<u64> {
    *LIMIT.get_or_init(|| None)
}

/// Ends a child that was refused what it asked for, if with an error that says so.
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

/// Runs `body`, which takes memory until it cannot, in a child; then looks at the machine.
fn exhaust(body: fn() -> i32) -> Verdict {
    let free = free()?;
    let child = doing(
        "fork",
        fork(|| {
            // A group of its own: what it leaves behind can be found.
            // SAFETY: a plain call.
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
    // Where it was killed, its children live on.
    let _ = kill(-group, libc::SIGKILL);
    let proper = [
        Status::Killed(libc::SIGKILL),
        // Where a file system has no more room for a page of a shared mapping.
        Status::Killed(libc::SIGBUS),
        Status::Exited(REFUSED),
        Status::Exited(ENOUGH),
    ];
    ensure!(proper.contains(&status), "the child ended with {status:?}");
    println!("# {status:?}");
    after(free)
}

fn free() -> Result<u64, String> {
    let info = fields("/proc/meminfo")?;
    kilobytes(&info, "MemAvailable")
}

/// That the machine is as it was: memory came back, and processes do what they did.
fn after(before: u64) -> Verdict {
    let begin = Instant::now();
    let mut found = 0;
    // On a machine of one's own all of it comes back; who ends needs a moment to give it.
    while limit().is_none() && begin.elapsed().as_secs() < 20 {
        found = free()?;
        if found >= before - before / 8 {
            break;
        }
        clock::sleep_ms(20);
    }
    ensure!(
        limit().is_some() || found >= before - before / 8,
        "{found} bytes are available after it, {before} were before"
    );
    let status = outcome(|| {
        let Ok(region) = Region::anonymous(4 << 20) else { return 1 };
        region.fill(9);
        let fine = std::thread::spawn(|| 5).join().is_ok_and(|value| value == 5);
        i32::from(!fine || region.pages().any(|at| region.load(at) != 9))
    })?;
    ensure!(status == Status::Exited(0), "a process after it ended with {status:?}");
    Ok(())
}

/// Touches private memory until there is no more.
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

/// Reads of it cost only tables; the zero page is one.
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

/// Copies: parent and child write to what they share, until there is no more.
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
            // Some have been killed for want of memory: that was it.
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

/// This process's children, as `/proc` lists them; `None` where there are none.
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

/// A file that grows until there is no more room.
fn file() -> Verdict {
    exhaust(|| {
        let path = format!("/tmp/oom.{}", proc::pid());
        let mut file = match std::fs::File::create(&path) {
            Ok(file) => file,
            Err(error) => return last_error(&error),
        };
        // Whatever ends this process, the file goes with it.
        let _ = std::fs::remove_file(&path);
        let block = vec![7u8; 1 << 20];
        loop {
            if let Err(error) = file.write_all(&block) {
                return last_error(&error);
            }
        }
    })
}

/// A mapped file that is written until there is no more room.
fn mapped_file() -> Verdict {
    exhaust(|| {
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
    })
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

/// Mappings: as many as there may be, no two of which can be one.
fn mappings() -> Verdict {
    exhaust(|| {
        let len = limit().map_or(1 << 30, |limit| limit / 2);
        let region = match Region::anonymous(len) {
            Ok(region) => region,
            Err(errno) => return refused(errno),
        };
        for at in region.pages().step_by(2) {
            if let Err(errno) = region.protect(at, PAGE, NONE) {
                // Nothing is half done: what is there still works.
                region.store(PAGE, 5);
                return if region.load(PAGE) == 5 { refused(errno) } else { 1 };
            }
        }
        ENOUGH
    })
}

/// Processes: a bounded number, or as many as there may be, all alive at once.
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

/// Pipes, full: what they hold is the kernel's own memory.
fn pipes() -> Verdict {
    exhaust(|| {
        loop {
            let mut ends = [0i32; 2];
            // SAFETY: the arrays have room for what is written and read.
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

/// Several at once, each of which takes all it can.
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
    ("together", together),
];

fn main() {
    let args = Args::read("oom", &["limit"]);
    let limit = args.text("limit").map(|_| args.get("limit", 0u64) << 20);
    let total = fields("/proc/meminfo").and_then(|info| kilobytes(&info, "MemTotal"));
    match (limit, total) {
        (Some(0..0x200_0000), _) => args.refuse("limit must be 32 at least"),
        (None, Ok(total)) if total >= 2 << 30 => {
            args.refuse(&format!("the machine has {} MiB: give a limit", total >> 20));
        }
        (None, Err(why)) => args.refuse(&why),
        _ => {}
    }
    let _ = LIMIT.set(limit);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
