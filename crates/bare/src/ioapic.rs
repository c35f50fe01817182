//! The I/O interrupt controllers, which route interrupt lines of devices to CPUs. The ACPI tables
//! list the controllers.

use crate::arch::apic::{self, Vector};
use crate::paging::direct;
use core::sync::atomic::{AtomicU64, Ordering};

/// The controllers: the number of the first line, above the physical address of the registers; 0
/// for an unused entry.
static CONTROLLERS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// The register with the number of the last line, in bits 16 to 23.
const VERSION: u32 = 1;
/// The first two registers of the first line.
const LINES: u32 = 0x10;
/// Flag of a line: level-triggered.
const LEVEL: u32 = 1 << 15;

/// Adds a controller with its registers at `address` and the first line `first`.
pub(crate) fn add(address: u32, first: u32) {
    let word = u64::from(first) << 32 | u64::from(address);
    let free = |place: &&AtomicU64| place.load(Ordering::Relaxed) == 0;
    if let Some(place) = CONTROLLERS.iter().find(free) {
        place.store(word, Ordering::Relaxed);
    }
}

/// Routes `line`, which is level-triggered, to this CPU as [`Vector::Device`]. `false`: no
/// controller has the line.
pub fn route(line: u32) -> bool {
    CONTROLLERS.iter().map(|place| place.load(Ordering::Relaxed)).filter(|&word| word != 0).any(
        |word| {
            let (window, first) = (direct(word & 0xffff_ffff).cast::<u32>(), (word >> 32) as u32);
            let select = |register: u32| {
                // SAFETY: the registers are mapped, and used here alone, at boot.
                unsafe { window.write_volatile(register) };
                // The data of the selected register.
                window.wrapping_byte_add(0x10)
            };
            // SAFETY: as above.
            let last = unsafe { select(VERSION).read_volatile() } >> 16 & 0xff;
            let Some(at) = line.checked_sub(first).filter(|&at| at <= last) else { return false };
            // SAFETY: as above; the kernel handles the interrupt.
            unsafe {
                select(LINES + 2 * at + 1).write_volatile(u32::from(apic::id()) << 24);
                select(LINES + 2 * at).write_volatile(LEVEL | Vector::Device as u32);
            }
            true
        },
    )
}
