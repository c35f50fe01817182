//! Time and instruction counts.

use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::time::Duration;

/// Returns the time stamp counter, read after all earlier instructions have executed and before any
/// later one has begun. Under an emulator that counts instructions, the result is the number of
/// executed instructions.
#[inline(always)]
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 CPU has both instructions, and no kernel here forbids them to user mode.
    unsafe {
        _mm_lfence();
        let ticks = _rdtsc();
        _mm_lfence();
        ticks
    }
}

/// Returns the CPU time used by this process, in seconds.
pub fn used() -> f64 {
    let mut used = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut used) };
    used.tv_sec as f64 + used.tv_nsec as f64 / 1e9
}

/// Sleeps.
pub fn sleep_ms(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}
