//! `clocks [CHECK…]`: what programs expect of CPU time, sleep, and files that tell of time and signals.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::proc;
use faultless_guest::sys::{checked, doing};
use faultless_guest::{check, ensure};
use std::hint::black_box;
use std::mem::zeroed;
use std::time::{Duration, Instant};

/// User and system time of `who`, as `getrusage` knows them.
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

/// What a clock shows.
fn clock(id: i32) -> Result<Duration, String> {
    // SAFETY: zeros are valid, and the pointer is to a local.
    let time = unsafe {
        let mut time: libc::timespec = zeroed();
        doing("clock_gettime", checked(libc::clock_gettime(id, &raw mut time)))?;
        time
    };
    Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Calls `work` again and again until this thread has run for so long; the user and system time of that.
fn burn(least: Duration, mut work: impl FnMut()) -> Result<[Duration; 2], String> {
    let before = rusage(libc::RUSAGE_THREAD)?;
    let end = clock(libc::CLOCK_THREAD_CPUTIME_ID)? + least;
    while clock(libc::CLOCK_THREAD_CPUTIME_ID)? < end {
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
    eprintln!("loop {user:?} {system:?}");
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
    eprintln!("calls {user:?} {system:?}");
    ensure!(
        system > 2 * user,
        "calls used {user:?} of the program's time, {system:?} of the kernel's"
    );
    let fault = || {
        const BYTES: usize = 1 << 20;
        // SAFETY: a mapping of its own, which is written to within its bounds and then removed.
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
    eprintln!("faults {user:?} {system:?}");
    ensure!(
        system > user,
        "faults used {user:?} of the program's time, {system:?} of the kernel's"
    );
    Ok(())
}

fn main() {
    let args = Args::read("clocks", &[]);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}

const CHECKS: &[Check] = &[("user_and_system_time", user_and_system_time)];
