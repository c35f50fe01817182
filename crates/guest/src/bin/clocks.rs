//! `clocks [CHECK…]`: CPU time, sleep, and files for time and signals.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::proc::{self, Status};
use faultless_guest::sys::{self, Errno, checked, doing};
use faultless_guest::{check, clock, ensure, same, signal};
use std::hint::black_box;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Returns the user and system time of `who` from `getrusage`.
fn rusage(who: i32) -> Result<[Duration; 2], String> {
    // SAFETY: zeros are valid, and the pointer is to a local.
    let usage = unsafe {
        let mut usage: libc::rusage = zeroed();
        doing("getrusage", checked(libc::getrusage(who, &raw mut usage)))?;
        usage
    };
    let duration = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    Ok([duration(usage.ru_utime), duration(usage.ru_stime)])
}

/// Returns the time of a clock.
fn time_of(id: i32) -> Result<Duration, String> {
    // SAFETY: zeros are valid, and the pointer is to a local.
    let time = unsafe {
        let mut time: libc::timespec = zeroed();
        doing("clock_gettime", checked(libc::clock_gettime(id, &raw mut time)))?;
        time
    };
    Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Calls `work` repeatedly until this thread has run for the time `least`; returns the user and
/// system time used.
fn burn(least: Duration, mut work: impl FnMut()) -> Result<[Duration; 2], String> {
    let before = rusage(libc::RUSAGE_THREAD)?;
    let end = time_of(libc::CLOCK_THREAD_CPUTIME_ID)? + least;
    while time_of(libc::CLOCK_THREAD_CPUTIME_ID)? < end {
        work();
    }
    let after = rusage(libc::RUSAGE_THREAD)?;
    Ok([after[0] - before[0], after[1] - before[1]])
}

fn count() {
    for number in 0..100_000u64 {
        black_box(number);
    }
}

const LONG: Duration = Duration::from_millis(400);

/// A loop without system calls is the program's time; calls and faults are the kernel's.
fn user_and_system_time() -> Verdict {
    let [user, system] = burn(LONG, count)?;
    ensure!(
        user > 8 * system,
        "a loop used {user:?} of the program's time, {system:?} of the kernel's"
    );
    let read = || {
        let mut zeros = [0u8; 16 << 10];
        for _ in 0..100 {
            // SAFETY: reads to a local; 16 KiB of random bytes are work for the kernel alone.
            unsafe { libc::getrandom(zeros.as_mut_ptr().cast(), zeros.len(), 0) };
        }
        black_box(&zeros);
    };
    let [user, system] = burn(LONG, read)?;
    ensure!(
        system > 2 * user,
        "calls used {user:?} of the program's time, {system:?} of the kernel's"
    );
    let fault = || {
        const BYTES: usize = 1 << 20;
        // SAFETY: a private mapping, which is written within its bounds and then removed.
        unsafe {
            let (access, kind) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let at = libc::mmap(std::ptr::null_mut(), BYTES, access, kind, -1, 0);
            if at != libc::MAP_FAILED {
                (0..BYTES)
                    .step_by(4096)
                    .for_each(|page| at.cast::<u8>().add(page).write_volatile(1));
                libc::munmap(at, BYTES);
            }
        }
    };
    let [user, system] = burn(LONG, fault)?;
    ensure!(
        system > user,
        "faults used {user:?} of the program's time, {system:?} of the kernel's"
    );
    Ok(())
}

/// The clocks of CPU time, `getrusage`, `times` and `/proc` report the same time, which includes
/// reaped children.
fn accounts() -> Verdict {
    burn(LONG, count)?;
    let [user, system] = rusage(libc::RUSAGE_SELF)?;
    let process = time_of(libc::CLOCK_PROCESS_CPUTIME_ID)?;
    let near = |what: &str, one: Duration, other: Duration| -> Verdict {
        let differ = one.abs_diff(other);
        ensure!(differ < Duration::from_millis(60), "{what}: {one:?} and {other:?}");
        Ok(())
    };
    near("getrusage and the clock", user + system, process)?;
    let thread = time_of(libc::CLOCK_THREAD_CPUTIME_ID)?;
    near("the only thread and its process", thread, process)?;
    // SAFETY: zeros are valid, and the pointer is to a local.
    let (times, ticks) = unsafe {
        let mut times: libc::tms = zeroed();
        doing("times", checked(libc::times(&raw mut times)))?;
        (times, libc::sysconf(libc::_SC_CLK_TCK) as u32)
    };
    let duration = |count: i64| Duration::from_secs(count as u64) / ticks;
    near("times and the clock", duration(times.tms_utime + times.tms_stime), process)?;
    let stat = std::fs::read_to_string("/proc/self/stat").map_err(|error| error.to_string())?;
    let fields: Vec<&str> =
        stat.rsplit_once(')').map_or(vec![], |(_, rest)| rest.split_whitespace().collect());
    let field =
        |at: usize| fields.get(at - 3).and_then(|field| field.parse::<i64>().ok()).unwrap_or(-1);
    near("/proc/self/stat and the clock", duration(field(14) + field(15)), process)?;
    let child = proc::fork(|| i32::from(burn(LONG, count).is_err()));
    let ended = doing("wait4", doing("fork", child)?.wait())?;
    same!(ended, Status::Exited(0), "a child that works");
    let [user, system] = rusage(libc::RUSAGE_CHILDREN)?;
    near("a child's time and the time that it reported", user + system, LONG)
}

/// Opens a timer of this clock.
fn timer(clock: i32, flags: i32) -> Result<OwnedFd, String> {
    // SAFETY: a plain call, and its descriptor has no other owner.
    unsafe {
        let fd = doing("timerfd_create", checked(libc::timerfd_create(clock, flags)))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn spec(value: Duration, interval: Duration) -> libc::itimerspec {
    let time = |time: Duration| libc::timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    libc::itimerspec { it_interval: time(interval), it_value: time(value) }
}

fn set(timer: &OwnedFd, flags: i32, value: Duration, interval: Duration) -> Verdict {
    let new = spec(value, interval);
    // SAFETY: the pointer is to a local.
    let done = unsafe {
        libc::timerfd_settime(timer.as_raw_fd(), flags, &raw const new, std::ptr::null_mut())
    };
    doing("timerfd_settime", checked(done)).map(|_| ())
}

/// Reads a file that returns one number.
fn number(file: &OwnedFd) -> sys::Result<u64> {
    let mut number = 0u64;
    // SAFETY: eight bytes of a local.
    unsafe { checked(libc::read(file.as_raw_fd(), (&raw mut number).cast(), 8)) }.map(|_| number)
}

/// Returns whether a file is ready to read within `limit`.
fn readable(file: &OwnedFd, limit: Duration) -> Result<bool, String> {
    let mut wanted = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one local.
    let count = unsafe { libc::poll(&raw mut wanted, 1, limit.as_millis() as i32) };
    Ok(doing("poll", checked(count))? == 1)
}

const MS: Duration = Duration::from_millis(1);

/// `timerfd`: one expiration, many, absolute ones, blocking and non-blocking reads, `poll`,
/// `epoll`, edges.
fn timer_files() -> Verdict {
    for clock_id in [libc::CLOCK_MONOTONIC, libc::CLOCK_REALTIME, libc::CLOCK_BOOTTIME] {
        let timer = timer(clock_id, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC)?;
        same!(number(&timer), Err(Errno(libc::EAGAIN)), "a read of a stopped timer");
        let begin = Instant::now();
        set(&timer, libc::TFD_TIMER_ABSTIME, time_of(clock_id)? + 20 * MS, Duration::ZERO)?;
        same!(number(&timer), Err(Errno(libc::EAGAIN)), "a read before the time");
        ensure!(readable(&timer, 10_000 * MS)?, "clock {clock_id}: no expiration in ten seconds");
        ensure!(
            begin.elapsed() >= 19 * MS,
            "clock {clock_id}: expired after {:?}",
            begin.elapsed()
        );
        same!(number(&timer), Ok(1), "expirations");
        ensure!(!readable(&timer, 30 * MS)?, "clock {clock_id}: a timer expired twice");
    }
    let timer = timer(libc::CLOCK_MONOTONIC, 0)?;
    set(&timer, 0, 5 * MS, 5 * MS)?;
    clock::sleep_ms(52);
    let count = doing("read", number(&timer))?;
    ensure!(count >= 10, "{count} expirations in 52 ms, with a period of 5 ms");
    same!(doing("read", number(&timer))? >= 1, true, "a read that waits");
    // SAFETY: zeros are valid, and the pointers are to locals.
    let (left, old) = unsafe {
        let (mut left, mut old): (libc::itimerspec, libc::itimerspec) = (zeroed(), zeroed());
        doing("timerfd_gettime", checked(libc::timerfd_gettime(timer.as_raw_fd(), &raw mut left)))?;
        let none = spec(Duration::ZERO, Duration::ZERO);
        let done = libc::timerfd_settime(timer.as_raw_fd(), 0, &raw const none, &raw mut old);
        doing("timerfd_settime", checked(done))?;
        (left, old)
    };
    same!((left.it_interval.tv_nsec, old.it_interval.tv_nsec), (5_000_000, 5_000_000), "intervals");
    ensure!((1..=5_000_000).contains(&left.it_value.tv_nsec), "{} ns left", left.it_value.tv_nsec);
    ensure!(!readable(&timer, 20 * MS)?, "a stopped timer expired");
    // A waiter is notified of a timer that is set later.
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| readable(&timer, 10_000 * MS));
        clock::sleep_ms(20);
        set(&timer, 0, 10 * MS, Duration::ZERO)?;
        same!(waits.join().map_err(|_| "a panic")?, Ok(true), "an earlier poll");
        Ok::<_, String>(())
    })?;
    edges(&timer)?;
    // SAFETY: plain calls with bad arguments.
    let bad = unsafe { [libc::timerfd_create(2, 0), libc::timerfd_create(1, 1)] };
    same!(bad, [-1, -1], "timers by a clock of CPU time, and with unknown flags");
    same!(set(&timer, 4, MS, MS).is_err(), true, "a timer set with unknown flags");
    Ok(())
}

/// Each expiration is an edge, after the previous one was read.
fn edges(timer: &OwnedFd) -> Verdict {
    // SAFETY: the descriptor has no other owner, and the events are locals.
    unsafe {
        let set_of = OwnedFd::from_raw_fd(doing("epoll_create1", checked(libc::epoll_create1(0)))?);
        let mut event =
            libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 7 };
        let (set_fd, fd) = (set_of.as_raw_fd(), timer.as_raw_fd());
        set(timer, 0, 10 * MS, 10 * MS)?;
        let added = libc::epoll_ctl(set_fd, libc::EPOLL_CTL_ADD, fd, &raw mut event);
        doing("epoll_ctl", checked(added))?;
        for edge in 0..3 {
            let count = libc::epoll_wait(set_fd, &raw mut event, 1, 10_000);
            same!(doing("epoll_wait", checked(count))?, 1, "edge {edge}");
            same!(libc::epoll_wait(set_fd, &raw mut event, 1, 30), 0, "an edge before the read");
            doing("read", number(timer))?;
        }
        set(timer, 0, 10 * MS, Duration::ZERO)?;
        let count = libc::epoll_wait(set_fd, &raw mut event, 1, 10_000);
        same!(doing("epoll_wait", checked(count))?, 1, "the last edge");
        same!(libc::epoll_wait(set_fd, &raw mut event, 1, 30), 0, "edges without expirations");
    }
    Ok(())
}

/// `signalfd`: signal, sender and value; blocking and non-blocking reads; `poll`.
fn signal_files() -> Verdict {
    let real_time = libc::SIGRTMIN() + 2;
    doing(
        "sigprocmask",
        signal::mask(libc::SIG_BLOCK, &[libc::SIGUSR1, libc::SIGCHLD, real_time]),
    )?;
    let open = |old: i32, signals: &[i32]| {
        let set = signal::set(signals);
        // SAFETY: the set is a local.
        let fd =
            unsafe { libc::signalfd(old, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) };
        doing("signalfd", checked(fd))
    };
    let fd = open(-1, &[libc::SIGUSR1])?;
    // SAFETY: the descriptor has no other owner.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let read = |file: &OwnedFd| {
        // SAFETY: zeros are valid, and the bytes are a local's.
        unsafe {
            let mut infos: [libc::signalfd_siginfo; 4] = zeroed();
            let bytes = size_of_val(&infos);
            let count = checked(libc::read(file.as_raw_fd(), infos.as_mut_ptr().cast(), bytes))?;
            Ok::<_, Errno>((count as usize / size_of::<libc::signalfd_siginfo>(), infos))
        }
    };
    same!(read(&file).err(), Some(Errno(libc::EAGAIN)), "a read without signals");
    ensure!(!readable(&file, MS)?, "a file without signals is ready");
    doing("kill", proc::kill(proc::pid(), libc::SIGUSR1))?;
    let value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(77) };
    // SAFETY: a plain call.
    doing("sigqueue", checked(unsafe { libc::sigqueue(proc::pid(), real_time, value) }))?;
    ensure!(readable(&file, MS)?, "a file with a signal is not ready");
    let (count, infos) = doing("read", read(&file))?;
    same!((count, infos[0].ssi_signo), (1, libc::SIGUSR1 as u32), "signals of the set");
    same!(infos[0].ssi_pid, proc::pid() as u32, "the sender");
    same!(open(fd, &[real_time, libc::SIGCHLD])?, fd, "the file with another set");
    let child = doing("fork", proc::fork(|| 5))?;
    let pid = child.pid as u32;
    same!(doing("wait4", child.wait())?, Status::Exited(5), "the child");
    let (count, infos) = doing("read", read(&file))?;
    same!(count, 2, "signals at once");
    same!(
        (infos[0].ssi_signo, infos[0].ssi_pid),
        (libc::SIGCHLD as u32, pid),
        "the end of a child"
    );
    same!(
        (infos[0].ssi_status, infos[0].ssi_code),
        (5, libc::CLD_EXITED),
        "the status of the child"
    );
    same!((infos[1].ssi_signo, infos[1].ssi_int), (real_time as u32, 77), "a signal with a value");
    // A waiter is woken.
    let (own, thread) = (proc::pid(), proc::tid());
    let waits = std::thread::scope(|scope| {
        scope.spawn(|| {
            clock::sleep_ms(20);
            // SAFETY: plain calls, and the value is not dereferenced.
            unsafe { libc::syscall(libc::SYS_tgkill, own, thread, real_time) }
        });
        readable(&file, 10_000 * MS)
    });
    same!(waits, Ok(true), "a poll from before the signal");
    same!(doing("read", read(&file))?.0, 1, "signals at the end");
    Ok(())
}

/// Returns the overrun beyond `wanted` of the longest of `count` sleeps; no sleep may be shorter.
fn overrun(wanted: Duration, count: u32) -> Result<Duration, String> {
    let mut worst = Duration::ZERO;
    for _ in 0..count {
        let begin = Instant::now();
        std::thread::sleep(wanted);
        let late = begin.elapsed().checked_sub(wanted);
        worst = worst.max(late.ok_or_else(|| format!("a sleep of {wanted:?} was too short"))?);
    }
    Ok(worst)
}

/// Sleeps end in time, with many sleepers and beside threads that never stop; an interrupted sleep
/// reports the remaining time.
fn sleeps() -> Verdict {
    let stop = AtomicBool::new(false);
    let spinners = doing("sched_getaffinity", proc::cpus())?.len();
    let worst = std::thread::scope(|scope| {
        for _ in 0..spinners {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    count();
                }
            });
        }
        let sleepers: Vec<_> =
            (1..=16).map(|number| scope.spawn(move || overrun(number * MS, 20))).collect();
        let worst: Result<Vec<Duration>, String> =
            sleepers.into_iter().map(|it| it.join().map_err(|_| "a panic")?).collect();
        stop.store(true, Relaxed);
        worst
    })?;
    let worst = worst.into_iter().max().unwrap_or_default();
    ensure!(worst < 250 * MS, "a sleep took {worst:?} too long");
    doing("sigaction", signal::handle(libc::SIGALRM, signal::note, libc::SA_RESTART))?;
    // A thread may wait for a processor before it sleeps, while its timer runs, but not each time.
    let mut least = Duration::MAX;
    for _ in 0..3 {
        least = least.min(interrupted_sleep()?);
        if least <= 1951 * MS {
            return Ok(());
        }
    }
    Err(format!("{least:?} remain of 2 s after 50 ms"))
}

/// Returns the rest of a sleep of 2 s that a timer of 50 ms interrupts.
fn interrupted_sleep() -> Result<Duration, String> {
    // SAFETY: the pointers are to locals.
    let (interrupted, left) = unsafe {
        let timer = libc::itimerval {
            it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 },
            it_value: libc::timeval { tv_sec: 0, tv_usec: 50_000 },
        };
        let (wanted, mut left) = (spec(2000 * MS, MS).it_value, zeroed::<libc::timespec>());
        let done = libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut());
        doing("setitimer", checked(done))?;
        (checked(libc::nanosleep(&raw const wanted, &raw mut left)), left)
    };
    same!(interrupted, Err(Errno(libc::EINTR)), "a sleep with a handler");
    let left = Duration::new(left.tv_sec as u64, left.tv_nsec as u32);
    ensure!(left > 1500 * MS, "{left:?} remain of 2 s after 50 ms");
    Ok(left)
}

/// Calls that are pure queries, or accept settings without an effect.
fn queries_and_no_ops() -> Verdict {
    // SAFETY: zeros are valid, and the pointers are to locals.
    unsafe {
        let mut state: libc::timex = zeroed();
        let status = doing("adjtimex", checked(libc::adjtimex(&raw mut state)))?;
        ensure!((0..=5).contains(&status), "adjtimex returned {status}");
        let now = time_of(libc::CLOCK_REALTIME)?.as_secs() as i64;
        ensure!((now - state.time.tv_sec).abs() < 2, "adjtimex returned another time");
        ensure!(state.tick == 10_000, "a tick of {} us", state.tick);
        let (attributes, short) = ([48u64, 0, 0, 0, 0, 0], [12u64, 0, 0, 0, 0, 0]);
        let at = attributes.as_ptr() as u64;
        doing("sched_setattr", sys::call(libc::SYS_sched_setattr, [0, at, 0]))?;
        same!(sys::call(libc::SYS_sched_setattr, [0, at, 1]), Err(Errno(libc::EINVAL)), "flags");
        let at = short.as_ptr() as u64;
        same!(sys::call(libc::SYS_sched_setattr, [0, at, 0]), Err(Errno(libc::E2BIG)), "a size");
        let usual = doing("ioprio_get", sys::call(libc::SYS_ioprio_get, [1, 0]))?;
        ensure!(usual >> 13 <= 3, "ioprio_get returned {usual:#x}");
        doing("ioprio_set", sys::call(libc::SYS_ioprio_set, [1, 0, 2 << 13 | 4]))?;
        let bad = sys::call(libc::SYS_ioprio_set, [1, 0, 7 << 13]);
        same!(bad, Err(Errno(libc::EINVAL)), "an unknown class");
    }
    Ok(())
}

fn main() {
    let args = Args::read("clocks", &[]);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}

const CHECKS: &[Check] = &[
    ("user_and_system_time", user_and_system_time),
    ("accounts", accounts),
    ("timer_files", timer_files),
    ("signal_files", signal_files),
    ("sleeps", sleeps),
    ("queries_and_no_ops", queries_and_no_ops),
];
