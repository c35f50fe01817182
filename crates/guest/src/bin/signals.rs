//! `signals [CHECK…]`: the behaviour of signals.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::proc::{self, Status, fork, kill, pid, tid, wait_until};
use faultless_guest::signal::{self, NOTED, contains, handle, mask, note};
use faultless_guest::sys::{Errno, call, checked, doing};
use faultless_guest::{check, clock, ensure, same};
use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

/// Blocked signals are pending, once each, and are delivered when they are unblocked.
fn masks() -> Verdict {
    doing("sigaction", handle(libc::SIGUSR1, note, 0))?;
    doing("sigprocmask", mask(libc::SIG_BLOCK, &[libc::SIGUSR1]))?;
    for _ in 0..3 {
        doing("kill", kill(pid(), libc::SIGUSR1))?;
    }
    same!(NOTED.count.load(Acquire), 0, "signals handled while they are blocked");
    ensure!(contains(&signal::pending(), libc::SIGUSR1), "the signal is not pending");
    doing("sigprocmask", mask(libc::SIG_UNBLOCK, &[libc::SIGUSR1]))?;
    same!(NOTED.count.load(Acquire), 1, "signals handled after they are unblocked");
    same!(NOTED.sender.load(Relaxed), pid(), "si_pid");
    same!(NOTED.code.load(Relaxed), libc::SI_USER, "si_code of kill");
    ensure!(!contains(&signal::pending(), libc::SIGUSR1), "the signal is still pending");
    // SIGKILL and SIGSTOP cannot be blocked; the attempt is no error.
    doing("sigprocmask", mask(libc::SIG_BLOCK, &[libc::SIGKILL, libc::SIGSTOP]))?;
    ensure!(!contains(&signal::blocked(), libc::SIGKILL), "SIGKILL is blocked");
    same!(handle(libc::SIGKILL, note, 0), Err(Errno(libc::EINVAL)), "a handler for SIGKILL");
    same!(handle(65, note, 0).is_err(), true, "a handler for signal 65");
    Ok(())
}

/// Real-time signals queue, in order.
fn realtime_queues() -> Verdict {
    let signal = libc::SIGRTMIN() + 1;
    doing("sigaction", handle(signal, note, 0))?;
    doing("sigprocmask", mask(libc::SIG_BLOCK, &[signal]))?;
    for number in 0..5 {
        let value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(number) };
        // SAFETY: a plain call.
        doing("sigqueue", checked(unsafe { libc::sigqueue(pid(), signal, value) }))?;
    }
    doing("sigprocmask", mask(libc::SIG_UNBLOCK, &[signal]))?;
    same!(NOTED.count.load(Acquire), 5, "queued signals handled");
    same!(NOTED.code.load(Relaxed), libc::SI_QUEUE, "si_code of sigqueue");
    Ok(())
}

/// The signal of a running handler is blocked, except with `SA_NODEFER`; `SA_RESETHAND` handles
/// only one signal.
fn handler_flags() -> Verdict {
    extern "C" fn again(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        let depth = NOTED.count.fetch_add(1, Relaxed);
        if depth == 0 {
            let _ = kill(pid(), signal);
            // With the signal blocked in the handler, the second has not been delivered yet.
            NOTED.addr.store(NOTED.count.load(Relaxed), Relaxed);
        }
    }
    doing("sigaction", handle(libc::SIGUSR1, again, 0))?;
    doing("kill", kill(pid(), libc::SIGUSR1))?;
    same!(
        (NOTED.addr.load(Relaxed), NOTED.count.load(Relaxed)),
        (1, 2),
        "handlers within the handler, and all"
    );
    NOTED.count.store(0, Relaxed);
    doing("sigaction", handle(libc::SIGUSR1, again, libc::SA_NODEFER))?;
    doing("kill", kill(pid(), libc::SIGUSR1))?;
    same!(
        (NOTED.addr.load(Relaxed), NOTED.count.load(Relaxed)),
        (2, 2),
        "the same with SA_NODEFER"
    );
    let child = fork(|| {
        let _ = handle(libc::SIGUSR1, note, libc::SA_RESETHAND);
        let _ = kill(pid(), libc::SIGUSR1);
        let _ = kill(pid(), libc::SIGUSR1);
        0
    });
    let status = doing("fork", child).and_then(|child| doing("wait4", child.wait()))?;
    same!(status, Status::Killed(libc::SIGUSR1), "the second signal after SA_RESETHAND");
    Ok(())
}

/// Waits, for at most ten seconds, until `count` signals have been recorded.
fn await_count(count: u64) -> Verdict {
    let begin = Instant::now();
    while NOTED.count.load(Acquire) < count && begin.elapsed().as_secs() < 10 {
        clock::sleep_ms(1);
    }
    ensure!(
        NOTED.count.load(Acquire) >= count,
        "{} signals in ten seconds",
        NOTED.count.load(Acquire)
    );
    Ok(())
}

/// `alarm`, `setitimer` once and at intervals, and `timer_create`.
fn timers() -> Verdict {
    doing("sigaction", handle(libc::SIGALRM, note, 0))?;
    let time = |milliseconds: i64| libc::timeval {
        tv_sec: milliseconds / 1000,
        tv_usec: milliseconds % 1000 * 1000,
    };
    let arm = |interval, value| {
        let timer = libc::itimerval { it_interval: time(interval), it_value: time(value) };
        let args = [libc::ITIMER_REAL as u64, (&raw const timer) as u64, 0];
        // SAFETY: the pointer is to a local.
        doing("setitimer", unsafe { call(libc::SYS_setitimer, args) })
    };
    let begin = Instant::now();
    arm(0, 30)?;
    await_count(1)?;
    ensure!(begin.elapsed().as_millis() >= 30, "the timer expired after {:?}", begin.elapsed());
    arm(10, 10)?;
    await_count(4)?;
    arm(0, 0)?;
    let count = NOTED.count.load(Acquire);
    clock::sleep_ms(40);
    same!(NOTED.count.load(Acquire), count, "signals after the timer was stopped");
    // SAFETY: plain calls.
    let left = unsafe {
        libc::alarm(100);
        libc::alarm(1)
    };
    ensure!((99..=100).contains(&left), "alarm reported that {left} seconds remain of 100");
    await_count(count + 1)?;
    posix_timer(count + 1)
}

fn posix_timer(before: u64) -> Verdict {
    doing("sigaction", handle(libc::SIGUSR2, note, 0))?;
    // SAFETY: an event of zeros is valid; the pointers are to locals.
    unsafe {
        let mut event: libc::sigevent = zeroed();
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGUSR2;
        let mut timer: libc::timer_t = null_mut();
        let made = libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer);
        doing("timer_create", checked(made))?;
        let mut time: libc::itimerspec = zeroed();
        time.it_value.tv_nsec = 20_000_000;
        doing(
            "timer_settime",
            checked(libc::timer_settime(timer, 0, &raw const time, null_mut())),
        )?;
        await_count(before + 1)?;
        same!(NOTED.code.load(Relaxed), libc::SI_TIMER, "si_code of a timer");
        doing("timer_delete", checked(libc::timer_delete(timer)))?;
    }
    Ok(())
}

/// `kill` of processes and threads, and its errors.
fn kills() -> Verdict {
    same!(kill(pid(), 0), Ok(()), "kill of this process with signal 0");
    same!(kill(pid(), 65), Err(Errno(libc::EINVAL)), "kill with signal 65");
    same!(kill(1 << 22, 0), Err(Errno(libc::ESRCH)), "kill of a missing process");
    doing("sigaction", handle(libc::SIGUSR1, note, 0))?;
    let tgkill = |thread: i32, signal: i32| {
        let args = [pid() as u64, thread as u64, signal as u64];
        // SAFETY: a plain call.
        unsafe { call(libc::SYS_tgkill, args) }.map(|_| ())
    };
    doing("tgkill", tgkill(tid(), libc::SIGUSR1))?;
    same!(NOTED.count.load(Acquire), 1, "signals after tgkill of this thread");
    same!(NOTED.code.load(Relaxed), libc::SI_TKILL, "si_code of tgkill");
    same!(tgkill(1 << 22, 0), Err(Errno(libc::ESRCH)), "tgkill of a missing thread");
    // Only the addressed thread handles the signal.
    static HANDLED_BY: AtomicI32 = AtomicI32::new(0);
    extern "C" fn who(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        HANDLED_BY.store(tid(), Release);
    }
    doing("sigaction", handle(libc::SIGUSR2, who, 0))?;
    let other = AtomicI32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            other.store(tid(), Release);
            wait_until(|| HANDLED_BY.load(Acquire) != 0);
        });
        wait_until(|| other.load(Acquire) != 0);
        doing("tgkill", tgkill(other.load(Acquire), libc::SIGUSR2))?;
        wait_until(|| HANDLED_BY.load(Acquire) != 0);
        same!(HANDLED_BY.load(Acquire), other.load(Acquire), "the thread that handled the signal");
        Ok(())
    })
}

/// `SIGCHLD` comes when a child ends, and identifies the child.
fn child_signal() -> Verdict {
    doing("sigaction", handle(libc::SIGCHLD, note, 0))?;
    doing("sigprocmask", mask(libc::SIG_BLOCK, &[libc::SIGCHLD]))?;
    let child = doing("fork", fork(|| 7))?;
    while NOTED.count.load(Acquire) == 0 {
        signal::suspend(&[]);
    }
    same!(NOTED.sender.load(Relaxed), child.pid, "si_pid of SIGCHLD");
    const EXITED: i32 = 1;
    same!(NOTED.code.load(Relaxed), EXITED, "si_code of SIGCHLD");
    same!(doing("wait4", child.wait())?, Status::Exited(7), "the child");
    Ok(())
}

/// `sigsuspend` accepts signals that the mask otherwise blocks, and restores the mask.
fn suspends() -> Verdict {
    doing("sigaction", handle(libc::SIGUSR1, note, 0))?;
    doing("sigprocmask", mask(libc::SIG_BLOCK, &[libc::SIGUSR1]))?;
    let parent = pid();
    let child = doing(
        "fork",
        fork(|| {
            clock::sleep_ms(20);
            i32::from(kill(parent, libc::SIGUSR1).is_err())
        }),
    )?;
    while NOTED.count.load(Acquire) == 0 {
        signal::suspend(&[]);
    }
    ensure!(contains(&signal::blocked(), libc::SIGUSR1), "the mask was not restored");
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the child");
    // `sigtimedwait` takes a blocked signal without a handler.
    doing("kill", kill(pid(), libc::SIGUSR1))?;
    let (set, time) =
        (signal::set(&[libc::SIGUSR1]), libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 });
    // SAFETY: the pointers are to locals.
    let take =
        || checked(unsafe { libc::sigtimedwait(&raw const set, null_mut(), &raw const time) });
    same!(take(), Ok(libc::SIGUSR1), "sigtimedwait");
    same!(take(), Err(Errno(libc::EAGAIN)), "sigtimedwait without a signal");
    same!(NOTED.count.load(Acquire), 1, "signals handled");
    Ok(())
}

fn pipe() -> Result<(OwnedFd, OwnedFd), String> {
    let (reader, writer) = std::io::pipe().map_err(|error| format!("pipe: {error}"))?;
    Ok((reader.into(), writer.into()))
}

/// Reads one byte, once.
fn read_one(end: &OwnedFd) -> Result<isize, Errno> {
    let mut byte = 0u8;
    // SAFETY: the pointer is to a local.
    checked(unsafe { libc::read(end.as_raw_fd(), (&raw mut byte).cast(), 1) })
}

/// A signal ends a waiting call with `EINTR`; with `SA_RESTART` the call continues.
fn interrupted() -> Verdict {
    let (receive, send) = pipe()?;
    let parent = pid();
    // Signals are sent until the wait is over, because an early signal has no effect on the wait.
    let signals = |count: u64, byte: bool| {
        let send = send.as_raw_fd();
        fork(move || {
            for _ in 0..count {
                clock::sleep_ms(10);
                let _ = kill(parent, libc::SIGUSR1);
            }
            // SAFETY: the byte is a local.
            i32::from(byte && unsafe { libc::write(send, [1u8].as_ptr().cast(), 1) } != 1)
        })
    };
    doing("sigaction", handle(libc::SIGUSR1, note, 0))?;
    let child = doing("fork", signals(5, false))?;
    same!(read_one(&receive), Err(Errno(libc::EINTR)), "a read that a signal interrupted");
    let _ = child.wait();
    let child = doing("fork", signals(5, false))?;
    let time = libc::timespec { tv_sec: 5, tv_nsec: 0 };
    // SAFETY: a time of zeros is valid; the pointers are to locals.
    let (slept, left) = unsafe {
        let mut left: libc::timespec = zeroed();
        (checked(libc::nanosleep(&raw const time, &raw mut left)), left)
    };
    same!(slept, Err(Errno(libc::EINTR)), "a sleep that a signal interrupted");
    ensure!((3..5).contains(&left.tv_sec), "{} seconds remain of 5", left.tv_sec);
    let _ = child.wait();
    doing("sigaction", handle(libc::SIGUSR1, note, libc::SA_RESTART))?;
    NOTED.count.store(0, Relaxed);
    let child = doing("fork", signals(3, true))?;
    same!(read_one(&receive), Ok(1), "a read that restarts after signals");
    ensure!(NOTED.count.load(Acquire) > 0, "no signal arrived meanwhile");
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the child");
    Ok(())
}

/// The effect of signals on a process without handlers.
fn default_actions() -> Verdict {
    let ends = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGILL,
        libc::SIGABRT,
        libc::SIGFPE,
        libc::SIGKILL,
        libc::SIGSEGV,
        libc::SIGPIPE,
        libc::SIGALRM,
        libc::SIGTERM,
        libc::SIGUSR1,
        libc::SIGBUS,
        libc::SIGXCPU,
        libc::SIGSYS,
        40,
    ];
    for signal in ends {
        let child = doing(
            "fork",
            fork(|| {
                no_core();
                let _ = signal::default(signal);
                let _ = kill(pid(), signal);
                0
            }),
        )?;
        same!(doing("wait4", child.wait())?, Status::Killed(signal), "signal {signal}");
    }
    for signal in [libc::SIGCHLD, libc::SIGURG, libc::SIGWINCH, libc::SIGCONT] {
        let child = doing(
            "fork",
            fork(|| {
                let _ = signal::default(signal);
                let _ = kill(pid(), signal);
                5
            }),
        )?;
        same!(doing("wait4", child.wait())?, Status::Exited(5), "signal {signal}");
    }
    Ok(())
}

fn no_core() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
}

/// Stop and continue, as seen by the parent.
fn stop_and_continue() -> Verdict {
    let child = doing(
        "fork",
        fork(|| {
            loop {
                clock::sleep_ms(1000);
            }
        }),
    )?;
    let status = |options| {
        let mut status = 0;
        // SAFETY: the pointer is to a local.
        let found = checked(unsafe { libc::waitpid(child.pid, &raw mut status, options) });
        found.map(|_| status)
    };
    // The parent continues the child as soon as it knows of the stop, when the child may still be
    // reporting the stop.
    for _ in 0..200 {
        doing("kill", child.signal(libc::SIGSTOP))?;
        let stopped = doing("wait4", status(libc::WUNTRACED))?;
        ensure!(libc::WIFSTOPPED(stopped), "status {stopped:#x} is not of a stopped process");
        same!(libc::WSTOPSIG(stopped), libc::SIGSTOP, "the signal that stopped the process");
        doing("kill", child.signal(libc::SIGCONT))?;
        let continued = doing("wait4", status(libc::WCONTINUED))?;
        ensure!(
            libc::WIFCONTINUED(continued),
            "status {continued:#x} is not of a continued process"
        );
    }
    doing("kill", child.signal(libc::SIGKILL))?;
    same!(doing("wait4", child.wait())?, Status::Killed(libc::SIGKILL), "the child");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("masks", masks),
    ("realtime_queues", realtime_queues),
    ("handler_flags", handler_flags),
    ("timers", timers),
    ("kills", kills),
    ("child_signal", child_signal),
    ("suspends", suspends),
    ("interrupted", interrupted),
    ("default_actions", default_actions),
    ("stop_and_continue", stop_and_continue),
];

fn main() {
    let args = Args::read("signals", &[]);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
