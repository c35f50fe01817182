//! How long threads and CPUs ran, and how much of that was the program's and how much the kernel's.
//!
//! *How long* is exact: the clock is read at each switch.
//!
//! *Whose time it was* is sampled, so that system calls and faults cost nothing for it: on a grid of one
//! [turn](super::TURN) each CPU that runs a thread looks where it is. What it finds counts from there on,
//! until the next sample finds something else. So both times only grow, their sum is exact, and neither
//! is scaled afterwards.
//!
//! *Where it is.* The timer interrupts user mode only, and comes late if the kernel was at work when it was
//! due: right at the return, before the program's next instruction. There the processor still shows what
//! was returned from. After a system call `rcx` and `r11` are where the program goes on and its flags, as
//! SYSCALL left them. After an exception the resume flag is set, which the next instruction clears (the entry of
//! page faults sets it, in one instruction, for emulators that do not). If
//! the kernel gives the CPU to another thread instead of returning, the switch sees that a sample is due.
//!
//! *The error.* One sample stands for a turn: of times much longer, the error is about the root of their
//! product with the turn; what runs for less than a turn in all is the program's, usually. What happens in
//! step with the grid (work that begins right after it, and ends before the next) is seen always or never.
//! A program is taken for the kernel if it is interrupted at the instruction behind a `syscall` that it has
//! jumped back to with nothing else in `rcx` and `r11`, or in the middle of a repeated string instruction; the
//! kernel for the program, where it returns with other registers than it came with (from a signal handler).

use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::arch::{RESUME, TrapFrame, clock};

/// User and system time, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// The program's.
    pub user: u64,
    /// The kernel's on behalf of the program.
    pub system: u64,
}

impl Times {
    /// Both.
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

/// The time of a thread or a CPU. One CPU at a time changes it; all may read it.
#[derive(Debug, Default)]
pub struct CpuTime {
    /// While it runs ([`ON`]): when it would have started, had it run ever since. Else how long it ran.
    ran: AtomicU64,
    /// While the kernel is at work ([`ON`]): how long the program was. Else how long the kernel was.
    other: AtomicU64,
}

/// The bit that says how to read the others.
const ON: u64 = 1 << 63;

/// What `read` makes of a word and something else, once the word stayed the same meanwhile.
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
    /// It begins to run.
    pub fn start(&self, now: u64) {
        let ran = self.ran.load(Ordering::Relaxed);
        self.ran.store(now.wrapping_sub(ran) & !ON | ON, Ordering::SeqCst);
    }

    /// It stops.
    pub fn stop(&self, now: u64) {
        let start = self.ran.load(Ordering::Relaxed);
        self.ran.store(now.wrapping_sub(start) & !ON, Ordering::SeqCst);
    }

    /// Nanoseconds that it ran so far.
    pub fn ran(&self) -> u64 {
        stable(&self.ran, |word| match word & ON {
            0 => word,
            _ => clock::now().wrapping_sub(word) & !ON,
        })
    }

    /// From here on the time is the kernel's, or the program's.
    pub fn sample(&self, kernel: bool) {
        let other = self.other.load(Ordering::Relaxed);
        if (other & ON != 0) != kernel {
            let flag = if kernel { ON } else { 0 };
            self.other.store(self.ran().saturating_sub(other & !ON) | flag, Ordering::SeqCst);
        }
    }

    /// How long it ran so far, and for whom.
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

/// Whether an interrupt that left the registers `frame` came while the kernel was at work.
pub(super) const fn was_in_kernel(frame: &TrapFrame) -> bool {
    !frame.of_user()
        || frame.rflags & RESUME != 0
        || frame.rcx == frame.rip && frame.r11 == frame.rflags
}
