//! The date: the real-time clock (RTC) at boot, and the time since.

use crate::calendar::{Moment, from_bcd};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::arch::clock;
use x86_64::instructions::port::Port;

/// Nanoseconds from 1970 to the boot.
static WALL_START: AtomicU64 = AtomicU64::new(0);

/// Reads the RTC. Called once, before [`now`].
pub fn init() {
    WALL_START.store(battery_clock().nanoseconds().saturating_sub(clock::now()), Ordering::Relaxed);
}

/// Nanoseconds since 1970, by the RTC at boot.
pub fn now() -> u64 {
    WALL_START.load(Ordering::Relaxed) + clock::now()
}

/// Nanoseconds from 1970 to the boot.
pub fn at_boot() -> u64 {
    WALL_START.load(Ordering::Relaxed)
}

/// The time of the RTC.
fn battery_clock() -> Moment {
    let (mut index, mut data) = (Port::<u8>::new(0x70), Port::<u8>::new(0x71));
    let mut register = |number: u8| {
        // SAFETY: reading the RTC's registers has no side effects.
        unsafe {
            index.write(number);
            data.read()
        }
    };
    let mut read = || {
        // Not during an update; without an RTC the bit is always set.
        for _ in 0..10_000 {
            if register(0x0a) & 0x80 == 0 {
                break;
            }
        }
        [0u8, 2, 4, 7, 8, 9].map(&mut register)
    };
    let mut seen = read();
    loop {
        let again = read();
        if again == seen {
            break;
        }
        seen = again;
    }
    // One bit selects the 24-hour format, the other selects binary numbers instead of BCD.
    let format = register(0x0b);
    let plain = |value: u8| if format & 4 == 0 { from_bcd(value) } else { value };
    let afternoon = format & 2 == 0 && seen[2] & 0x80 != 0;
    let mut hour = plain(seen[2] & 0x7f);
    if format & 2 == 0 {
        hour = hour % 12 + if afternoon { 12 } else { 0 };
    }
    Moment {
        year: 2000 + u16::from(plain(seen[5])),
        month: plain(seen[4]),
        day: plain(seen[3]),
        hour,
        minute: plain(seen[1]),
        second: plain(seen[0]),
    }
}
