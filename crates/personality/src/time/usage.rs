//! The run time of threads and CPUs, divided into user and system time.
//!
//! *The run time* is exact: the clock is read at each switch.
//!
//! *User and system time* are sampled, at no cost for system calls and faults: on a grid of one
//! [time slice](super::TURN), each CPU with a running thread checks whether it runs the kernel or
//! the program. The result counts until the next sample differs. So both times only grow, their sum
//! is exact, and neither is scaled afterwards.
//!
//! *The sample.* The timer interrupts only user mode. If the kernel ran when the interrupt was due,
//! the interrupt comes late: directly at the return, before the program's next instruction. In this
//! case the registers still show that the kernel returned. After a system call, `rcx` and `r11`
//! hold the program's `rip` and flags, as SYSCALL stored them. After an exception the resume flag
//! is set, which the next instruction clears (the entry of page faults sets the flag, for emulators
//! that do not). If the kernel switches to another thread instead of returning, the switch takes
//! the sample.
//!
//! *The error.* One sample represents one time slice. For much longer times, the error is about the
//! square root of the product of the time and the time slice. A run time of less than one slice in
//! total usually counts as user time. Code in step with the grid (starting directly after a sample,
//! and ending before the next one) is seen always or never. A program is mistaken for the kernel if
//! it is interrupted at the instruction after a `syscall` to which it has jumped back with `rcx`
//! and `r11` unchanged, or in a repeated string instruction. The kernel is mistaken for the program
//! if it returns with other registers than those of the entry (from a signal handler).

use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::arch::{RESUME, TrapFrame, clock};

/// User and system time, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// In user mode.
    pub user: u64,
    /// In the kernel.
    pub system: u64,
}

impl Times {
    /// The sum.
    pub const fn total(self) -> u64 {
        self.user + self.system
    }
}

impl core::ops::Add for Times {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { user: self.user + other.user, system: self.system + other.system }
    }
}

impl core::ops::Sub for Times {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { user: self.user - other.user, system: self.system - other.system }
    }
}

impl core::iter::Sum for Times {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| sum + one)
    }
}

/// The time of a thread or a CPU. One CPU at a time changes the time; all CPUs may read it.
#[derive(Debug, Default)]
pub struct CpuTime {
    /// While the owner runs ([`ON`]): the present time minus the run time. Otherwise the run time.
    ran: AtomicU64,
    /// After a sample in the kernel ([`ON`]): the user time. Otherwise the system time.
    other: AtomicU64,
}

/// The flag in both words.
const ON: u64 = 1 << 63;

/// Returns the result of `read` for a word that did not change during the call.
fn stable<R>(word: &AtomicU64, read: impl Fn(u64) -> R) -> R {
    loop {
        let seen = word.load(Ordering::SeqCst);
        let result = read(seen);
        if word.load(Ordering::SeqCst) == seen {
            return result;
        }
    }
}

impl CpuTime {
    /// Starts a run.
    pub fn start(&self, now: u64) {
        let ran = self.ran.load(Ordering::Relaxed);
        self.ran.store(now.wrapping_sub(ran) & !ON | ON, Ordering::SeqCst);
    }

    /// Ends a run.
    pub fn stop(&self, now: u64) {
        let start = self.ran.load(Ordering::Relaxed);
        self.ran.store(now.wrapping_sub(start) & !ON, Ordering::SeqCst);
    }

    /// Returns the run time so far, in nanoseconds.
    pub fn ran(&self) -> u64 {
        stable(&self.ran, |word| match word & ON {
            0 => word,
            _ => clock::now().wrapping_sub(word) & !ON,
        })
    }

    /// Counts the time from now on as the kernel's, or as the program's.
    pub fn sample(&self, kernel: bool) {
        let other = self.other.load(Ordering::Relaxed);
        if (other & ON != 0) != kernel {
            let flag = if kernel { ON } else { 0 };
            self.other.store(self.ran().saturating_sub(other & !ON) | flag, Ordering::SeqCst);
        }
    }

    /// Returns the user and system time so far.
    pub fn times(&self) -> Times {
        stable(&self.other, |word| {
            let ran = self.ran();
            let other = (word & !ON).min(ran);
            match word & ON {
                0 => Times { user: ran - other, system: other },
                _ => Times { user: other, system: ran - other },
            }
        })
    }
}

/// Returns whether an interrupt with the registers `frame` was due while the kernel ran.
pub(super) const fn was_in_kernel(frame: &TrapFrame) -> bool {
    !frame.of_user()
        || frame.rflags & RESUME != 0
        || frame.rcx == frame.rip && frame.r11 == frame.rflags
}
