//! Time: the time-stamp counter (TSC).
//!
//! The frequency comes from the hypervisor or the processor. Otherwise it is measured once, against
//! the legacy timer (PIT). Under an emulator that derives time from counted instructions the TSC
//! runs at 1 GHz; the measurement is a few counts off, and is rounded.

use core::arch::x86_64::_rdtsc;
use core::sync::atomic::{AtomicU64, Ordering};
use x86_64::instructions::port::Port;

/// The counter at boot.
static START: AtomicU64 = AtomicU64::new(0);
/// Nanoseconds per count, times 2^32.
static SCALE: AtomicU64 = AtomicU64::new(1 << 32);

const GHZ: u64 = 1_000_000_000;
/// PIT counts per second.
const CHIP_HZ: u64 = 1_193_182;

/// Nanoseconds since boot. Never goes back, on any CPU: all counters are synchronised.
#[inline]
pub fn now() -> u64 {
    let counts = counter().saturating_sub(START.load(Ordering::Relaxed));
    ((u128::from(counts) * u128::from(SCALE.load(Ordering::Relaxed))) >> 32) as u64
}

#[inline]
fn counter() -> u64 {
    // SAFETY: every 64-bit processor has the counter, and the kernel does not disable it in user
    // mode.
    unsafe { _rdtsc() }
}

/// Executes a thousand instructions. An emulator that counts instructions makes reading a clock as
/// expensive as thousands of instructions, so loops that wait for a time read the clock rarely.
fn lull() {
    // SAFETY: counts a register down.
    unsafe {
        core::arch::asm!("2: dec {0:e}", "jnz 2b", inout(reg) 512 => _, options(nomem, nostack));
    }
}

/// Spins for `ns` nanoseconds.
pub fn delay(ns: u64) {
    let end = now() + ns;
    while now() < end {
        lull();
    }
}

/// Determines the frequency.
pub(crate) fn init() {
    let hz = told().unwrap_or_else(measured);
    START.store(counter(), Ordering::Relaxed);
    SCALE.store(((u128::from(GHZ) << 32) / u128::from(hz)) as u64, Ordering::Relaxed);
}

/// The frequency according to the hypervisor or the processor.
fn told() -> Option<u64> {
    let cpuid = raw_cpuid::CpuId::new();
    let hypervisor = cpuid.get_hypervisor_info().and_then(|info| info.tsc_frequency());
    let by_hypervisor = hypervisor.map(|khz| u64::from(khz) * 1000);
    by_hypervisor.or_else(|| cpuid.get_tsc_info()?.tsc_frequency()).filter(|&hz| hz != 0)
}

/// Returns the TSC counts per second, measured with the PIT. A busy host can only make a
/// measurement too long, because the TSC is read before and after the measured time: the shortest
/// of several measurements is right.
fn measured() -> u64 {
    const TICKS: u16 = (CHIP_HZ / 200) as u16;
    let counts = (0..4).map(|_| counted(TICKS)).min().unwrap_or(0).max(1);
    let hz = counts * CHIP_HZ / u64::from(TICKS);
    if hz.abs_diff(GHZ) < GHZ / 1000 { GHZ } else { hz }
}

/// TSC counts from before the PIT begins to count `ticks` down until after it has ended.
fn counted(ticks: u16) -> u64 {
    /// Channel 0, both bytes of the count, one shot.
    const ONCE: u8 = 0b0011_0000;
    /// Latches the status of channel 0; its highest bit is set once the count is 0.
    const STATUS: u8 = 0b1110_0010;
    let (mut mode, mut data) = (Port::<u8>::new(0x43), Port::<u8>::new(0x40));
    // SAFETY: channel 0 has no other user, and the controller through which it could interrupt is
    // masked. (Channel 2, which has a gate, is missing on some boards.)
    unsafe {
        let start = counter();
        mode.write(ONCE);
        data.write(ticks as u8);
        data.write((ticks >> 8) as u8);
        loop {
            mode.write(STATUS);
            if data.read() & 1 << 7 != 0 {
                break;
            }
            lull();
        }
        counter() - start
    }
}
