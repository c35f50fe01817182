//! Time and instruction counts.

use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::time::Duration;

/// The time stamp counter, read after everything before it has executed and before anything after it
/// has begun. Under an emulator that counts instructions it is the number of instructions executed.
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

/// Sleeps.
pub fn sleep_ms(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}
