//! `threads [CHECK…]`: the behaviour of threads, futexes, the scheduler and the clocks.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{PAGE, Region, Shared};
use faultless_guest::proc::{
    self, Meeting, Status, cpus, current_cpu, exit_now, fork, futex_wait, futex_wake, outcome, pid,
    pin, pin_to, tid, wait_until,
};
use faultless_guest::sys::{Errno, call, checked, doing};
use faultless_guest::{check, clock, ensure, same, signal};
use std::arch::asm;
use std::cell::Cell;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Barrier, Condvar, Mutex, RwLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

fn spawn_error(error: std::io::Error) -> String {
    format!("pthread_create: {error}")
}

/// Threads are made and end, many at a time, repeatedly.
fn storm() -> Verdict {
    let count = AtomicU64::new(0);
    for round in 0..30u64 {
        thread::scope(|scope| {
            for _ in 0..32 {
                let builder = thread::Builder::new().stack_size(64 << 10);
                let made = builder.spawn_scoped(scope, || {
                    let _ = count.fetch_add(1, Relaxed);
                });
                made.map_err(spawn_error)?;
            }
            Ok::<_, String>(())
        })?;
        same!(count.load(Relaxed), (round + 1) * 32, "threads that ran after round {round}");
    }
    Ok(())
}

/// A mutex excludes; a reader-writer lock does; a channel delivers.
fn mutex() -> Verdict {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 5000;
    let (locked, both) = (Mutex::new(0u64), RwLock::new((0u64, 0u64)));
    let (send, receive) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            let (locked, both, send) = (&locked, &both, send.clone());
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    *locked.lock().unwrap_or_else(|broken| broken.into_inner()) += 1;
                    if round % 16 == 0 {
                        let mut pair = both.write().unwrap_or_else(|broken| broken.into_inner());
                        pair.0 += 1;
                        pair.1 += 1;
                    } else {
                        let pair = both.read().unwrap_or_else(|broken| broken.into_inner());
                        if pair.0 != pair.1 {
                            let _ = send.send(u64::MAX);
                        }
                    }
                }
                let _ = send.send(ROUNDS);
            });
        }
        drop(send);
        let total: u64 = receive.iter().fold(0, u64::wrapping_add);
        same!(total, THREADS * ROUNDS, "rounds that threads reported");
        Ok(())
    })?;
    same!(locked.into_inner().unwrap_or(0), THREADS * ROUNDS, "additions under the mutex");
    Ok(())
}

/// Condition variables and barriers: every waiter is woken.
fn condvar() -> Verdict {
    const ROUNDS: u32 = 500;
    let turn = (Mutex::new(0u32), Condvar::new());
    let play = |me: u32| {
        for _ in 0..ROUNDS {
            let mut now = turn.0.lock().unwrap_or_else(|broken| broken.into_inner());
            while *now % 2 != me {
                now = turn.1.wait(now).unwrap_or_else(|broken| broken.into_inner());
            }
            *now += 1;
            turn.1.notify_all();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| play(0));
        play(1);
    });
    same!(turn.0.into_inner().unwrap_or(0), 2 * ROUNDS, "turns");
    let (barrier, leaders) = (Barrier::new(6), AtomicU32::new(0));
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                for _ in 0..50 {
                    leaders.fetch_add(u32::from(barrier.wait().is_leader()), Relaxed);
                }
            });
        }
    });
    same!(leaders.into_inner(), 50, "rounds of the barrier");
    let never = (Mutex::new(()), Condvar::new());
    let guard = never.0.lock().map_err(|error| error.to_string())?;
    let begin = Instant::now();
    let waited = never.1.wait_timeout(guard, Duration::from_millis(30));
    ensure!(waited.is_ok_and(|(_, timeout)| timeout.timed_out()), "the wait did not time out");
    ensure!(begin.elapsed().as_millis() >= 30, "the wait ended after {:?}", begin.elapsed());
    Ok(())
}

/// The futex call itself, private and shared, within a process and between processes.
fn futex() -> Verdict {
    let word = doing("mmap", Shared::new(AtomicU32::new(5)))?;
    for shared in [false, true] {
        let short = Some(Duration::from_millis(20));
        same!(
            futex_wait(&word, 4, short, shared),
            Err(Errno(libc::EAGAIN)),
            "a wait for another value"
        );
        let begin = Instant::now();
        same!(futex_wait(&word, 5, short, shared), Err(Errno(libc::ETIMEDOUT)), "a wait");
        ensure!(begin.elapsed().as_millis() >= 20, "the wait ended after {:?}", begin.elapsed());
        same!(futex_wake(&word, 9, shared), Ok(0), "woken threads without a waiter");
        // A thread of this process.
        thread::scope(|scope| {
            let waiter = scope.spawn(|| futex_wait(&word, 5, None, shared));
            let mut woken = 0;
            let begin = Instant::now();
            while woken == 0 && begin.elapsed().as_secs() < 10 {
                woken = futex_wake(&word, 1, shared).unwrap_or(0);
                proc::yield_now();
            }
            same!(woken, 1, "woken threads");
            same!(waiter.join().ok(), Some(Ok(())), "the result of the waiter");
            Ok(())
        })?;
    }
    // Another process; the word lies at the same address in both, but private futexes have
    // different keys.
    let child = doing(
        "fork",
        fork(|| {
            word.store(6, Release);
            i32::from(futex_wait(&word, 6, Some(Duration::from_secs(10)), true).is_err())
        }),
    )?;
    wait_until(|| word.load(Acquire) == 6);
    let begin = Instant::now();
    while futex_wake(&word, 1, true) != Ok(1) {
        ensure!(begin.elapsed().as_secs() < 9, "the process that waits is not found");
        clock::sleep_ms(1);
    }
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the process that waited");
    futex_refuses()
}

fn futex_refuses() -> Verdict {
    let ask = |addr: u64, operation: i32, value: u64, time: u64| {
        // SAFETY: the call neither waits nor wakes a thread.
        unsafe { call(libc::SYS_futex, [addr, operation as u64, value, time]) }.err()
    };
    let word = AtomicU32::new(0);
    let at = word.as_ptr() as u64;
    let bad = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000_000 };
    let region = doing("mmap", Region::anonymous(PAGE))?;
    doing("munmap", region.unmap(0, PAGE))?;
    same!(
        ask(at + 1, libc::FUTEX_WAIT, 0, 0),
        Some(Errno(libc::EINVAL)),
        "a word at an unaligned address"
    );
    same!(
        ask(region.start(), libc::FUTEX_WAIT, 0, 0),
        Some(Errno(libc::EFAULT)),
        "an unmapped word"
    );
    same!(ask(at, 99, 0, 0), Some(Errno(libc::ENOSYS)), "an unknown operation");
    let late = ask(at, libc::FUTEX_WAIT, 0, (&raw const bad) as u64);
    same!(late, Some(Errno(libc::EINVAL)), "a timeout of too many nanoseconds");
    Ok(())
}

/// `FUTEX_REQUEUE`, `FUTEX_CMP_REQUEUE` and `FUTEX_WAIT_BITSET` with its absolute time.
fn futex_more() -> Verdict {
    let (first, second) = (AtomicU32::new(0), AtomicU32::new(0));
    let done = AtomicU32::new(0);
    let private = libc::FUTEX_PRIVATE_FLAG;
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let _ = futex_wait(&first, 0, Some(Duration::from_secs(10)), false);
                done.fetch_add(1, Release);
            });
        }
        let move_all = || {
            let operation = (libc::FUTEX_CMP_REQUEUE | private) as u64;
            let (one, two) = (first.as_ptr() as u64, second.as_ptr() as u64);
            // SAFETY: both words are atomics.
            let result = unsafe { call(libc::SYS_futex, [one, operation, 0, 1, two, 0]) };
            doing("FUTEX_CMP_REQUEUE", result)
        };
        let mut moved = 0;
        let begin = Instant::now();
        // All waiters are moved to the second word as they arrive, and none is woken.
        while moved < 3 && begin.elapsed().as_secs() < 9 {
            moved += move_all()?;
            proc::yield_now();
        }
        same!(moved, 3, "threads that were requeued to another word");
        same!(done.load(Acquire), 0, "threads that were woken by the requeue");
        // A thread with a spurious wake-up waits for the first word again, also on Linux, and is
        // moved and counted twice.
        let mut woken = 0;
        while woken < 3 && begin.elapsed().as_secs() < 9 {
            woken += doing("FUTEX_WAKE", futex_wake(&second, 9, false))?;
            move_all()?;
            proc::yield_now();
        }
        same!(woken, 3, "threads that wait for the second word");
        Ok::<_, String>(())
    })?;
    let time = libc::timespec { tv_sec: 0, tv_nsec: 1 };
    let operation = (libc::FUTEX_WAIT_BITSET | private) as u64;
    let args =
        [first.as_ptr() as u64, operation, 0, (&raw const time) as u64, 0, u64::from(u32::MAX)];
    // SAFETY: the word is an atomic and the time a local.
    let past = unsafe { call(libc::SYS_futex, args) };
    same!(past, Err(Errno(libc::ETIMEDOUT)), "a wait until a past time");
    Ok(())
}

/// A thread that was requeued no longer waits for any word after its timeout or a signal.
fn requeued_waiters_leave() -> Verdict {
    unsafe extern "C" fn nothing(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    doing("sigaction", signal::handle(libc::SIGUSR1, nothing, 0))?;
    // Several pairs, because two words may have the same queue.
    const PAIRS: usize = 6;
    let words: Vec<[AtomicU32; 2]> = (0..PAIRS).map(|_| Default::default()).collect();
    let ids = [const { AtomicU32::new(0) }; PAIRS];
    let private = libc::FUTEX_PRIVATE_FLAG;
    let requeue = |[first, second]: &[AtomicU32; 2]| {
        let operation = (libc::FUTEX_CMP_REQUEUE | private) as u64;
        let (one, two) = (first.as_ptr() as u64, second.as_ptr() as u64);
        // SAFETY: both words are atomics.
        let result = unsafe { call(libc::SYS_futex, [one, operation, 0, 9, two, 0]) };
        doing("FUTEX_CMP_REQUEUE", result)
    };
    let wake_both = |[first, second]: &[AtomicU32; 2]| {
        let woken = doing("FUTEX_WAKE", futex_wake(first, 9, false))?;
        Ok::<_, String>(woken + doing("FUTEX_WAKE", futex_wake(second, 9, false))?)
    };
    thread::scope(|scope| {
        let mut waiters = Vec::new();
        for (pair, id) in words.iter().zip(&ids) {
            let timeout = Some(Duration::from_secs(3));
            let late = scope.spawn(move || futex_wait(&pair[0], 0, timeout, false));
            let interrupted = scope.spawn(move || {
                id.store(tid() as u32, Release);
                futex_wait(&pair[0], 0, None, false)
            });
            let woken = scope.spawn(move || futex_wait(&pair[0], 0, None, false));
            waiters.push((late, interrupted, woken));
        }
        let mut moved = [0; PAIRS];
        let begin = Instant::now();
        while moved != [3; PAIRS] && begin.elapsed().as_secs() < 9 {
            for (moved, pair) in moved.iter_mut().zip(&words) {
                *moved += requeue(pair)?;
            }
            proc::yield_now();
        }
        let mut verdict = Ok(());
        if moved != [3; PAIRS] {
            verdict = Err(format!("{moved:?} threads were requeued"));
        }
        for id in &ids {
            let id = u64::from(id.load(Acquire));
            // SAFETY: the signal has a handler.
            let sent = unsafe { call(libc::SYS_tgkill, [pid() as u64, id, libc::SIGUSR1 as u64]) };
            verdict = verdict.and(doing("tgkill", sent).map(|_| ()));
        }
        for (pair, (late, interrupted, woken)) in words.iter().zip(waiters) {
            let check = || -> Verdict {
                let result = |ended: thread::Result<_>| ended.map_err(|_| "a thread panicked");
                let ended = result(late.join())?;
                same!(ended, Err(Errno(libc::ETIMEDOUT)), "a requeued wait with a timeout");
                let ended = result(interrupted.join())?;
                same!(ended, Err(Errno(libc::EINTR)), "a requeued wait and a signal");
                same!(wake_both(pair)?, 1, "the remaining threads");
                same!(result(woken.join())?, Ok(()), "the wait of the remaining thread");
                same!(wake_both(pair)?, 0, "threads after the end of all waits");
                Ok(())
            };
            verdict = verdict.and(check());
        }
        // A failure leaves no thread waiting.
        words.iter().try_for_each(|pair| wake_both(pair).map(|_| ())).and(verdict)
    })
}

/// A thread runs on its allowed CPUs, and moves at once after a change.
fn affinity() -> Verdict {
    let all = doing("sched_getaffinity", cpus())?;
    for _ in 0..20 {
        for &cpu in &all {
            doing("sched_setaffinity", pin(cpu))?;
            same!(current_cpu(), cpu, "the CPU that runs this thread");
            same!(
                doing("sched_getaffinity", cpus())?,
                vec![cpu],
                "the CPUs of the thread's affinity"
            );
        }
    }
    same!(pin_to(&[]), Err(Errno(libc::EINVAL)), "confining to no CPU");
    same!(pin(1000), Err(Errno(libc::EINVAL)), "confining to a missing CPU");
    doing("sched_setaffinity", pin_to(&all))?;
    // Children inherit the CPUs; other threads keep their own.
    doing("sched_setaffinity", pin(all[0]))?;
    let inherited = thread::spawn(cpus).join().map_err(|_| "a thread panicked")?;
    same!(
        doing("sched_getaffinity", inherited)?,
        vec![all[0]],
        "the affinity that a thread inherits"
    );
    Ok(())
}

/// Threads that never yield share a CPU: the timer preempts them.
fn preemption() -> Verdict {
    let all = doing("sched_getaffinity", cpus())?;
    let counts = [const { AtomicU64::new(0) }; 3];
    let stop = AtomicU32::new(0);
    doing("sched_setaffinity", pin(all[0]))?;
    thread::scope(|scope| {
        for count in &counts {
            let stop = &stop;
            scope.spawn(move || {
                while stop.load(Relaxed) == 0 {
                    count.fetch_add(1, Relaxed);
                }
            });
        }
        clock::sleep_ms(100);
        stop.store(1, Relaxed);
    });
    for (index, count) in counts.iter().enumerate() {
        ensure!(count.load(Relaxed) > 0, "thread {index} never ran");
    }
    Ok(())
}

/// A yield lets the other thread of a CPU run.
fn yielding() -> Verdict {
    const ROUNDS: u32 = 2000;
    let all = doing("sched_getaffinity", cpus())?;
    doing("sched_setaffinity", pin(all[0]))?;
    let turn = AtomicU32::new(0);
    let begin = Instant::now();
    let play = |me: u32| {
        for _ in 0..ROUNDS {
            while turn.load(Acquire) % 2 != me {
                proc::yield_now();
            }
            turn.fetch_add(1, AcqRel);
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| play(0));
        play(1);
    });
    same!(turn.load(Acquire), 2 * ROUNDS, "turns");
    // If each turn had to wait for the timer, this would take a hundred times as long.
    ensure!(begin.elapsed().as_secs() < 10, "{} turns took {:?}", 2 * ROUNDS, begin.elapsed());
    Ok(())
}

thread_local! {
    static OWN: Cell<u64> = const { Cell::new(7) };
}

/// Thread-local storage is each thread's own, over any number of switches.
fn thread_local_storage() -> Verdict {
    let meeting = Meeting::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..6u64)
            .map(|me| {
                let meeting = &meeting;
                scope.spawn(move || -> Verdict {
                    same!(OWN.get(), 7, "thread {me}: the first value");
                    for round in 0..200 {
                        OWN.set(me << 32 | round);
                        if round % 20 == 0 {
                            meeting.wait(6);
                        }
                        proc::yield_now();
                        same!(OWN.get(), me << 32 | round, "thread {me}: round {round}");
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err("a thread panicked".into()))
        })
    })
}

/// Vector registers and the control word are each thread's own, over switches of all kinds.
fn vector_state() -> Verdict {
    let all = doing("sched_getaffinity", cpus())?;
    doing("sched_setaffinity", pin(all[0]))?;
    thread::scope(|scope| {
        let threads: Vec<_> = (1..=4u64)
            .map(|me| {
                scope.spawn(move || -> Verdict {
                    // Rounding is a property of the thread: up, down, to zero, to nearest.
                    let control = 0x1f80u32 | ((me as u32 & 3) << 13);
                    for round in 0..200 {
                        let (mut wrong, mut found) = (0u64, 0u32);
                        // SAFETY: all changes are declared; the control word is restored.
                        unsafe {
                            asm!(
                                "ldmxcsr [{control}]",
                                "movq xmm0, {value}", "movq xmm7, {value}", "movq xmm15, {value}",
                                "mov rax, 24", "syscall",
                                "mov ecx, 20000", "3:", "dec ecx", "jnz 3b",
                                "movq rax, xmm0", "sub rax, {value}", "mov {wrong}, rax",
                                "movq rax, xmm7", "sub rax, {value}", "or {wrong}, rax",
                                "movq rax, xmm15", "sub rax, {value}", "or {wrong}, rax",
                                "stmxcsr [{found}]",
                                "ldmxcsr [{normal}]",
                                value = in(reg) me << 40 | round,
                                control = in(reg) &raw const control,
                                found = in(reg) &raw mut found,
                                normal = in(reg) &raw const NORMAL,
                                wrong = inout(reg) wrong,
                                out("rax") _, out("rcx") _, out("r11") _,
                                out("xmm0") _, out("xmm7") _, out("xmm15") _,
                            );
                        }
                        same!(wrong, 0, "thread {me}, round {round}: changed bits of registers");
                        same!(found & 0x6000, control & 0x6000, "thread {me}: the rounding");
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err("a thread panicked".into()))
        })
    })
}

/// The SSE control word of a process that has not changed it.
static NORMAL: u32 = 0x1f80;

/// Identity of threads and processes.
fn identity() -> Verdict {
    let (process, main) = (pid(), tid());
    same!(process, main, "the first thread's id and the process's");
    let (thread_pid, thread_tid) =
        thread::spawn(|| (pid(), tid())).join().map_err(|_| "a thread panicked")?;
    same!(thread_pid, process, "a thread's process id");
    ensure!(thread_tid != main, "two threads have the same id");
    let child = outcome(|| {
        // SAFETY: plain calls.
        let parent = unsafe { libc::getppid() };
        i32::from(parent != process || pid() == process || pid() != tid())
    })?;
    same!(child, Status::Exited(0), "a child that checks its ids");
    Ok(())
}

/// `exit_group` ends all threads; the end of the first thread alone does not end the process.
fn group_exit() -> Verdict {
    let status = outcome(|| {
        for _ in 0..4 {
            thread::spawn(|| proc::spin_for_ever());
        }
        for _ in 0..4 {
            thread::spawn(|| thread::sleep(Duration::from_secs(1000)));
        }
        clock::sleep_ms(5);
        thread::spawn(|| exit_now(21));
        clock::sleep_ms(10_000);
        1
    })?;
    same!(status, Status::Exited(21), "a process ended by one of its threads");
    let status = outcome(|| {
        thread::spawn(|| {
            clock::sleep_ms(20);
            exit_now(22)
        });
        // SAFETY: ends this thread, whose stack stays: the thread is the process's first.
        let _ = unsafe { call(libc::SYS_exit, [0]) };
        1
    })?;
    same!(status, Status::Exited(22), "a process whose first thread has ended");
    let status = outcome(|| {
        let _ = signal::default(libc::SIGSEGV);
        thread::spawn(|| faultless_guest::mem::load(8));
        clock::sleep_ms(10_000);
        1
    })?;
    same!(status, Status::Killed(libc::SIGSEGV), "a process with a thread that faults");
    Ok(())
}

/// A fork in a process with threads: the child has one thread, and its memory is a snapshot.
fn fork_with_threads() -> Verdict {
    let stop = AtomicU32::new(0);
    let count = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while stop.load(Relaxed) == 0 {
                    count.fetch_add(1, Relaxed);
                }
            });
        }
        let forks = || -> Verdict {
            for round in 0..20 {
                let status = outcome(|| {
                    let before = count.load(Relaxed);
                    clock::sleep_ms(1);
                    i32::from(count.load(Relaxed) != before)
                })?;
                same!(
                    status,
                    Status::Exited(0),
                    "round {round}: a child with a thread that still counts"
                );
            }
            Ok(())
        };
        let verdict = forks();
        stop.store(1, Relaxed);
        verdict
    })
}

/// Time advances, sleeps last at least the requested time, and clocks agree.
fn clocks() -> Verdict {
    let read = |clock| {
        // SAFETY: a time of zeros is valid, and the call fills it.
        unsafe {
            let mut time: libc::timespec = std::mem::zeroed();
            let done = checked(libc::clock_gettime(clock, &raw mut time));
            done.map(|_| time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
        }
    };
    for clock in [libc::CLOCK_REALTIME, libc::CLOCK_MONOTONIC, libc::CLOCK_BOOTTIME] {
        let mut last = 0;
        for _ in 0..1000 {
            let now = doing("clock_gettime", read(clock))?;
            ensure!(now >= last, "clock {clock} fell from {last} to {now}");
            last = now;
        }
    }
    let (begin, ticks) = (Instant::now(), clock::ticks());
    clock::sleep_ms(30);
    ensure!(begin.elapsed().as_millis() >= 30, "a sleep of 30 ms took {:?}", begin.elapsed());
    ensure!(clock::ticks() > ticks, "the time stamp counter stands still");
    let used = doing("clock_gettime", read(libc::CLOCK_THREAD_CPUTIME_ID))?;
    let mut work = 0u64;
    while doing("clock_gettime", read(libc::CLOCK_THREAD_CPUTIME_ID))? < used + 1_000_000 {
        work = std::hint::black_box(work + 1);
        ensure!(begin.elapsed().as_secs() < 20, "the time of this thread stands still");
    }
    same!(read(9999), Err(Errno(libc::EINVAL)), "a missing clock");
    let late = libc::timespec { tv_sec: 0, tv_nsec: -1 };
    // SAFETY: the pointer is to a local.
    let refused = checked(unsafe { libc::nanosleep(&raw const late, std::ptr::null_mut()) });
    same!(refused, Err(Errno(libc::EINVAL)), "a sleep of negative time");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("identity", identity),
    ("clocks", clocks),
    ("storm", storm),
    ("mutex", mutex),
    ("condvar", condvar),
    ("futex", futex),
    ("futex_more", futex_more),
    ("requeued_waiters_leave", requeued_waiters_leave),
    ("affinity", affinity),
    ("preemption", preemption),
    ("yielding", yielding),
    ("thread_local_storage", thread_local_storage),
    ("vector_state", vector_state),
    ("group_exit", group_exit),
    ("fork_with_threads", fork_with_threads),
];

fn main() {
    let args = Args::read("threads", &[]);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
