//! How a process ends.

use core::sync::atomic::{AtomicBool, AtomicU8};
use faultless_bare::sync::Mutex;
use linux_raw_sys::general as nr;

/// The status of an ended process, as `wait4` encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitStatus(pub u32);

impl ExitStatus {
    /// Returns the status of a process that called `exit` with this code.
    pub const fn exited(code: u8) -> Self {
        Self((code as u32) << 8)
    }

    /// Returns the status of a process killed by a signal.
    pub const fn killed(signal: u32) -> Self {
        Self(signal)
    }

    /// Returns the fatal signal; 0 after an exit; 0x7f for a stop or a continue.
    const fn low(self) -> u32 {
        self.0 & 0x7f
    }

    /// Returns `si_code` of the process's `SIGCHLD`.
    pub const fn child_code(self) -> u32 {
        match self.low() {
            0 => nr::CLD_EXITED,
            0x7f if self.0 == 0xffff => nr::CLD_CONTINUED,
            0x7f => nr::CLD_STOPPED,
            _ => nr::CLD_KILLED,
        }
    }

    /// Returns `si_status` of the process's `SIGCHLD`: the code or the signal.
    pub const fn child_status(self) -> u32 {
        match self.low() {
            0x7f if self.0 == 0xffff => nr::SIGCONT,
            0 | 0x7f => self.0 >> 8 & 0xff,
            signal => signal,
        }
    }

    /// Returns the fatal signal, if any.
    pub const fn signal(self) -> Option<u32> {
        if self.low() == 0 { None } else { Some(self.low()) }
    }

    /// The status as in a shell: the code, or 128 plus the signal.
    pub const fn shell(self) -> u8 {
        if self.low() == 0 { (self.0 >> 8) as u8 } else { 128 + self.low() as u8 }
    }
}

/// The end of a process.
#[derive(Debug, Default)]
pub struct End {
    /// The present or future status of the end: set once.
    pub status: Mutex<Option<ExitStatus>>,
    /// The `exit` code of the first thread: the exit code of the process unless another status is
    /// set.
    pub leader_code: AtomicU8,
    /// Set when all threads have ended: the process is a zombie until the parent waits for it.
    pub done: AtomicBool,
}
