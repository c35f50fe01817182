//! Time: the time-stamp counter.
//!
//! How fast it counts is told by the hypervisor or the processor, or else measured against the old timer
//! chip, once. Under an emulator that counts instructions for time the counter runs at 1 GHz, and the
//! measurement finds that to within a few counts, which are rounded off.

use core::arch::x86_64::_rdtsc;
use core::sync::atomic::{AtomicU64, Ordering};
use x86_64::instructions::port::Port;

/// The counter at boot.
static START: AtomicU64 = AtomicU64::new(0);
/// Nanoseconds in a count, times 2^32.
static SCALE: AtomicU64 = AtomicU64::new(1 << 32);

const GHZ: u64 = 1_000_000_000;
/// Counts of the timer chip in a second.
const CHIP_HZ: u64 = 1_193_182;

/// Nanoseconds since boot. Never goes back, on any CPU: the counters of all run together.
#[inline]
pub fn now() -> u64 {
    let counts = counter().saturating_sub(START.load(Ordering::Relaxed));
    ((u128::from(counts) * u128::from(SCALE.load(Ordering::Relaxed))) >> 32) as u64
}

#[inline]
fn counter() -> u64 {
    // SAFETY: every 64-bit processor has it, and the kernel leaves it to everybody.
    unsafe { _rdtsc() }
}

/// Executes a thousand instructions. Where an emulator counts instructions for time, a look at any clock
/// costs it as much as thousands of others: who waits for time to pass looks now and then.
fn lull() {
    // SAFETY: counts a register down.
    unsafe {
        core::arch::asm!("2: dec {0:e}", "jnz 2b", inout(reg) 512 => _, options(nomem, nostack));
    }
}

/// Spins until `ns` nanoseconds have gone by.
pub fn delay(ns: u64) {
    let end = now() + ns;
    while now() < end {
        lull();
    }
}

/// Finds out what a count is.
pub(crate) fn init() {
    let hz = told().unwrap_or_else(measured);
    START.store(counter(), Ordering::Relaxed);
    SCALE.store(((u128::from(GHZ) << 32) / u128::from(hz)) as u64, Ordering::Relaxed);
}

/// What the hypervisor or the processor says of the counter.
fn told() -> Option<u64> {
    let cpuid = raw_cpuid::CpuId::new();
    let hypervisor = cpuid.get_hypervisor_info().and_then(|info| info.tsc_frequency());
    let by_hypervisor = hypervisor.map(|khz| u64::from(khz) * 1000);
    by_hypervisor.or_else(|| cpuid.get_tsc_info()?.tsc_frequency()).filter(|&hz| hz != 0)
}

/// Counts in a second, by the timer chip. A host that is busy elsewhere for a while makes a measurement
/// too long, and only that, since the counter is read outside of it: the shortest of a few is right.
fn measured() -> u64 {
    const TICKS: u16 = (CHIP_HZ / 200) as u16;
    let counts = (0..4).map(|_| counted(TICKS)).min().unwrap_or(0).max(1);
    let hz = counts * CHIP_HZ / u64::from(TICKS);
    if hz.abs_diff(GHZ) < GHZ / 1000 { GHZ } else { hz }
}

/// Counts from before the timer chip begins to count `ticks` down until after it has.
fn counted(ticks: u16) -> u64 {
    /// The first timer, both bytes of the count, down to zero once.
    const ONCE: u8 = 0b0011_0000;
    /// Asks for the first timer's status, whose highest bit then says that zero was reached.
    const STATUS: u8 = 0b1110_0010;
    let (mut mode, mut data) = (Port::<u8>::new(0x43), Port::<u8>::new(0x40));
    // SAFETY: the chip's first timer, which nobody else uses; the controller that it could interrupt
    // through is masked. (The third, which a gate can stop, is not on every board.)
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
