//! `orphans [CHECK…]`: processes whose parent has ended: their adoption, the notifications, and
//! the duties of an init.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::Shared;
use faultless_guest::proc::{self, Status, exit_now, fork, kill, outcome, pid, wait};
use faultless_guest::sys::{self, Errno, checked, doing};
use faultless_guest::{check, clock, ensure, procfs, same, signal};
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

fn parent() -> i32 {
    // SAFETY: a plain call.
    unsafe { libc::getppid() }
}

/// Returns whether an init started the program, so that no other process reaps its orphans.
fn has_init() -> bool {
    // A check runs in a child of the program.
    parent() == 2
}

/// Calls `prctl` with one number or pointer.
fn control(option: i32, value: u64) -> sys::Result<i32> {
    // SAFETY: if the option expects a pointer, it points to a local of the caller.
    checked(unsafe { libc::prctl(option, value, 0, 0, 0) })
}

/// Returns the value that `prctl` stores for an option.
fn asked(option: i32) -> sys::Result<i32> {
    let mut value = -1;
    control(option, (&raw mut value) as u64).map(|_| value)
}

/// Waits until `condition` holds, for at most ten seconds; returns whether it holds.
fn comes(mut condition: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    while !condition() && begin.elapsed().as_secs() < 10 {
        clock::sleep_ms(1);
    }
    condition()
}

/// Returns whether a process disappears.
fn goes(process: i32) -> bool {
    comes(|| kill(process, 0) == Err(Errno(libc::ESRCH)))
}

/// Two numbers exchanged by processes.
type Told = Shared<(AtomicI32, AtomicI32)>;

fn told() -> Result<Told, String> {
    doing("mmap", Shared::new((AtomicI32::new(0), AtomicI32::new(0))))
}

/// An orphan is reaped by another process, and its parent's number has changed.
fn adopted() -> Verdict {
    let seen = told()?;
    let middle = fork(|| {
        let own = pid();
        let orphan = fork(|| {
            comes(|| parent() != own);
            seen.1.store(parent(), Release);
            seen.0.store(pid(), Release);
            0
        });
        i32::from(orphan.is_err())
    });
    same!(
        doing("wait4", doing("fork", middle)?.wait())?,
        Status::Exited(0),
        "the intermediate process"
    );
    ensure!(comes(|| seen.0.load(Acquire) != 0), "the orphan still has the same parent");
    let (orphan, by) = (seen.0.load(Acquire), seen.1.load(Acquire));
    ensure!(by > 0, "the orphan's parent is {by}");
    ensure!(by != pid(), "the grandparent, which is not a subreaper, adopted the orphan");
    if has_init() {
        same!(by, 1, "the new parent of the orphan");
        ensure!(goes(orphan), "the orphan was not reaped");
    }
    Ok(())
}

/// A zombie whose parent ends is reaped like any orphan.
fn zombies() -> Verdict {
    let seen = told()?;
    let middle = fork(|| {
        let Ok(zombie) = fork(|| 0) else { return 1 };
        let ended = |stat: String| stat.contains(") Z ");
        comes(|| procfs::text(&format!("/proc/{}/stat", zombie.pid)).is_ok_and(ended));
        seen.0.store(zombie.pid, Release);
        0
    });
    same!(
        doing("wait4", doing("fork", middle)?.wait())?,
        Status::Exited(0),
        "the intermediate process"
    );
    if has_init() {
        ensure!(goes(seen.0.load(Acquire)), "the zombie was not reaped");
    }
    Ok(())
}

/// Process 1: the last parent of every process, which no signal harms.
fn init() -> Verdict {
    if !has_init() {
        return Ok(());
    }
    let status = procfs::fields("/proc/1/status")?;
    let field = |name: &str| status.get(name).map(String::as_str);
    same!(field("PPid"), Some("0"), "the parent of process 1");
    same!(field("State"), Some("S (sleeping)"), "the state of process 1");
    same!(field("Threads"), Some("1"), "the threads of process 1");
    let program = procfs::fields(&format!("/proc/{}/status", parent()))?;
    same!(program.get("PPid").map(String::as_str), Some("1"), "the parent of the program");
    same!(procfs::text("/proc/1/maps")?, "", "the memory of process 1");
    for signal in [0, libc::SIGTERM, libc::SIGSTOP, libc::SIGCONT, libc::SIGKILL, libc::SIGRTMIN()]
    {
        same!(kill(1, signal), Ok(()), "signal {signal} to process 1");
    }
    clock::sleep_ms(20);
    same!(kill(1, 0), Ok(()), "process 1 after the signals");
    let status = procfs::fields("/proc/1/status")?;
    let waiting = ["SigPnd", "ShdPnd"].map(|name| status.get(name).map(String::as_str));
    same!(waiting, [Some("0000000000000000"); 2], "pending signals of process 1");
    same!(kill(-1, libc::SIGUSR2 + 1000), Err(Errno(libc::EINVAL)), "no signal to all processes");
    Ok(())
}

/// A signal to all processes reaches neither its sender nor process 1.
fn signal_to_all() -> Verdict {
    if !has_init() {
        return Ok(());
    }
    doing("sigaction", signal::handle(libc::SIGUSR1, signal::note, 0))?;
    let ready = told()?;
    let child = doing(
        "fork",
        fork(|| {
            let _ = signal::default(libc::SIGUSR1);
            ready.0.store(1, Release);
            loop {
                clock::sleep_ms(1000);
            }
        }),
    )?;
    comes(|| ready.0.load(Acquire) != 0);
    same!(kill(-1, libc::SIGUSR1), Ok(()), "a signal to all processes");
    same!(doing("wait4", child.wait())?, Status::Killed(libc::SIGUSR1), "another process");
    same!(signal::NOTED.count.load(Acquire), 0, "signals to the sender");
    Ok(())
}

/// A stopped group without a process that could continue it gets `SIGHUP` and continues; in such a
/// group a stop from the keyboard has no effect.
fn groups() -> Verdict {
    let seen = told()?;
    // A separate session, so that processes outside do not count.
    let status = outcome(|| {
        // SAFETY: a plain call.
        if unsafe { libc::setsid() } < 0 {
            return 1;
        }
        let leader = fork(|| {
            // SAFETY: a plain call.
            if unsafe { libc::setpgid(0, 0) } < 0 {
                return 2;
            }
            let Ok(member) = fork(|| {
                if signal::handle(libc::SIGHUP, signal::note, 0).is_err() {
                    return 3;
                }
                let _ = kill(pid(), libc::SIGSTOP);
                seen.1.store(signal::NOTED.count.load(Acquire) as i32, Relaxed);
                let _ = kill(pid(), libc::SIGTSTP);
                seen.0.store(1, Release);
                0
            }) else {
                return 4;
            };
            let mut status = 0;
            // SAFETY: the pointer is to a local.
            unsafe { libc::waitpid(member.pid, &raw mut status, libc::WUNTRACED) };
            if libc::WIFSTOPPED(status) { 0 } else { 5 }
        });
        let ended = leader.and_then(|leader| leader.wait());
        if ended != Ok(Status::Exited(0)) {
            return 6;
        }
        if comes(|| seen.0.load(Acquire) != 0) { 0 } else { 7 }
    })?;
    same!(status, Status::Exited(0), "the session");
    same!(seen.1.load(Relaxed), 1, "SIGHUP of the stopped process");
    Ok(())
}

/// `PR_SET_PDEATHSIG`: a signal at the end of the parent, not inherited by children.
fn death_signals() -> Verdict {
    const SET: i32 = libc::PR_SET_PDEATHSIG;
    let seen = told()?;
    let middle = fork(|| {
        let own = pid();
        let orphan = fork(|| {
            let handled = signal::handle(libc::SIGUSR2, signal::note, 0).is_ok();
            let set = control(SET, libc::SIGUSR2 as u64).is_ok();
            let inherited = outcome(|| asked(libc::PR_GET_PDEATHSIG).unwrap_or(99));
            let right = handled
                && set
                && asked(libc::PR_GET_PDEATHSIG) == Ok(libc::SIGUSR2)
                && inherited == Ok(Status::Exited(0));
            seen.0.store(if right { 1 } else { -1 }, Release);
            comes(|| signal::NOTED.count.load(Acquire) != 0);
            let sender = signal::NOTED.sender.load(Relaxed);
            seen.1.store(if sender == own { 1 } else { -1 }, Release);
            0
        });
        comes(|| seen.0.load(Acquire) != 0);
        i32::from(orphan.is_err())
    });
    same!(doing("wait4", doing("fork", middle)?.wait())?, Status::Exited(0), "the parent");
    ensure!(comes(|| seen.1.load(Acquire) != 0), "no signal at the end of the parent");
    same!(seen.0.load(Acquire), 1, "the setting of the child");
    same!(seen.1.load(Acquire), 1, "whether the parent is the sender of the signal");
    same!(control(SET, 65), Err(Errno(libc::EINVAL)), "an invalid signal number");
    Ok(())
}

/// `PR_SET_CHILD_SUBREAPER`: a subreaper adopts the orphans among its descendants, living or not.
fn subreapers() -> Verdict {
    const GET: i32 = libc::PR_GET_CHILD_SUBREAPER;
    same!(asked(GET), Ok(0), "whether the process is a subreaper");
    doing("prctl", control(libc::PR_SET_CHILD_SUBREAPER, 1))?;
    same!(asked(GET), Ok(1), "whether the process is a subreaper after the call");
    same!(
        outcome(|| asked(GET).unwrap_or(99))?,
        Status::Exited(0),
        "whether a child is a subreaper"
    );
    let seen = told()?;
    let middle = fork(|| {
        let own = pid();
        // Two generations further down, to test the search for the nearest subreaper.
        let next = fork(|| {
            let orphan = fork(|| {
                comes(|| parent() != own && seen.0.load(Acquire) != 0);
                7
            });
            if let Ok(orphan) = &orphan {
                seen.1.store(orphan.pid, Release);
            }
            i32::from(orphan.is_err())
        });
        match next.and_then(|next| next.wait()) {
            Ok(Status::Exited(0)) => {}
            _ => exit_now(1),
        }
        // A child that is a zombie when it is adopted.
        i32::from(fork(|| 8).is_err())
    });
    let middle = doing("fork", middle)?;
    same!(
        wait(middle.pid, 0),
        Ok(Some((middle.pid, Status::Exited(0)))),
        "the intermediate process"
    );
    seen.0.store(1, Release);
    let mut ends = [0; 2];
    for end in &mut ends {
        match doing("wait4", wait(-1, 0))? {
            Some((_, Status::Exited(status))) => *end = status,
            other => return Err(format!("an orphan: {other:?}")),
        }
    }
    ends.sort_unstable();
    same!(ends, [7, 8], "the ends of the orphans");
    same!(wait(-1, 0), Err(Errno(libc::ECHILD)), "waiting for more");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("adopted", adopted),
    ("zombies", zombies),
    ("init", init),
    ("signal_to_all", signal_to_all),
    ("groups", groups),
    ("death_signals", death_signals),
    ("subreapers", subreapers),
];

fn main() {
    let args = Args::read("orphans", &[]);
    proc::no_huge_pages();
    // For the check that sends this signal to all processes.
    let _ = signal::ignore(libc::SIGUSR1);
    std::process::exit(check::run(&args, CHECKS))
}
