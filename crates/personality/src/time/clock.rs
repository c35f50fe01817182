//! The clocks that programs can read.
//!
//! Wall time is the time since boot plus a constant: the clock cannot be set.

use crate::abi::SECOND;
use crate::errno::{Errno, Result};
use crate::task::process::TABLE;
use crate::task::{Process, Thread, current};
use faultless_bare::arch::clock;
use faultless_collections::{Arc, Weak};
use linux_raw_sys::general as linux;

/// A clock.
#[derive(Clone, Debug)]
pub enum Clock {
    /// Since 1970.
    Real,
    /// Since boot.
    Monotonic,
    /// The CPU time of the threads of a process.
    Process(Weak<Process>),
    /// The user time of the threads of a process.
    User(Weak<Process>),
    /// The CPU time of a thread.
    Thread(Weak<Thread>),
}

/// The use of a clock by a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// To read the time.
    Read,
    /// To sleep, or for a timer.
    Wait,
}

/// The resolution of the coarse clocks, in nanoseconds.
const COARSE: u64 = 4_000_000;

/// In a negative clock number: the kind of CPU time, and the flag for a thread.
const KIND: i32 = 3;
const OF_THREAD: i32 = 4;

impl Clock {
    /// Returns the clock with the number `id`.
    ///
    /// # Errors
    /// `EINVAL` for an unknown clock; `EOPNOTSUPP` if the clock does not support `purpose`.
    pub fn numbered(id: i32, purpose: Use) -> Result<Self> {
        let Ok(number) = u32::try_from(id) else {
            return Self::of_cpu_time(id);
        };
        let clock = match number {
            linux::CLOCK_REALTIME
            | linux::CLOCK_REALTIME_COARSE
            | linux::CLOCK_REALTIME_ALARM
            | linux::CLOCK_TAI => Self::Real,
            linux::CLOCK_MONOTONIC
            | linux::CLOCK_MONOTONIC_RAW
            | linux::CLOCK_MONOTONIC_COARSE
            | linux::CLOCK_BOOTTIME
            | linux::CLOCK_BOOTTIME_ALARM => Self::Monotonic,
            linux::CLOCK_PROCESS_CPUTIME_ID => Self::Process(Arc::downgrade(&current().process)),
            linux::CLOCK_THREAD_CPUTIME_ID => Self::Thread(Arc::downgrade(&current().arc())),
            _ => return Err(Errno::EINVAL),
        };
        let only_read = matches!(
            number,
            linux::CLOCK_MONOTONIC_RAW
                | linux::CLOCK_REALTIME_COARSE
                | linux::CLOCK_MONOTONIC_COARSE
                | linux::CLOCK_REALTIME_ALARM
                | linux::CLOCK_BOOTTIME_ALARM
        );
        if only_read && purpose == Use::Wait { Err(Errno::EOPNOTSUPP) } else { Ok(clock) }
    }

    /// Returns the CPU-time clock with a negative number: the inverted number of the process or
    /// thread, above three bits.
    fn of_cpu_time(id: i32) -> Result<Self> {
        let number = !(id >> 3) as u32;
        if id & KIND == KIND {
            return Err(Errno::EINVAL);
        }
        if id & OF_THREAD == 0 {
            let process = match number {
                0 => Some(current().process.clone()),
                _ => TABLE.lock().processes.get(&number).cloned(),
            };
            return process.map(|it| Self::Process(Arc::downgrade(&it))).ok_or(Errno::EINVAL);
        }
        let thread = match number {
            0 => Some(current().arc()),
            _ => TABLE.lock().threads.get(&number).cloned(),
        };
        // The CPU time of a thread can be read by its own process only.
        thread
            .filter(|thread| Arc::ptr_eq(&thread.process, &current().process))
            .map(|thread| Self::Thread(Arc::downgrade(&thread)))
            .ok_or(Errno::EINVAL)
    }

    /// Returns the resolution of the clock with the number `id`, in nanoseconds.
    ///
    /// # Errors
    /// `EINVAL` for an unknown clock.
    pub fn resolution(id: i32) -> Result {
        Self::numbered(id, Use::Read)?;
        let coarse = [linux::CLOCK_REALTIME_COARSE, linux::CLOCK_MONOTONIC_COARSE];
        Ok(if u32::try_from(id).is_ok_and(|id| coarse.contains(&id)) { COARSE } else { 1 })
    }

    /// Returns the time in nanoseconds; `None` if the process or thread has ended.
    pub fn read(&self) -> Option<u64> {
        match self {
            Self::Real => Some(wall()),
            Self::Monotonic => Some(clock::now()),
            Self::Process(process) => process.upgrade().map(|process| process.times().total()),
            Self::User(process) => process.upgrade().map(|process| process.times().user),
            Self::Thread(thread) => thread.upgrade().map(|thread| thread.run_time()),
        }
    }

    /// Returns the nanoseconds from boot to the moment at which the clock shows `time`; `None` for
    /// CPU time.
    pub fn since_boot(&self, time: u64) -> Option<u64> {
        match self {
            Self::Real => Some(time.saturating_sub(crate::wall::at_boot())),
            Self::Monotonic => Some(time),
            Self::Process(_) | Self::User(_) | Self::Thread(_) => None,
        }
    }
}

/// Nanoseconds since 1970.
pub fn wall() -> u64 {
    crate::wall::now()
}

/// Seconds since 1970.
pub fn wall_seconds() -> u64 {
    wall() / SECOND
}
