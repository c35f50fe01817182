//! How a process ends.

use core::sync::atomic::{AtomicBool, AtomicU8};
use faultless_bare::sync::Mutex;
use linux_raw_sys::general as nr;

/// How a process ended, as `wait4` encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitStatus(pub u32);

impl ExitStatus {
    /// It called `exit` with this code.
    pub const fn exited(code: u8) -> Self {
        Self((code as u32) << 8)
    }

    /// A signal killed it.
    pub const fn killed(signal: u32) -> Self {
        Self(signal)
    }

    /// The signal that killed it; 0 if it exited; 0x7f if it stopped or continued.
    const fn low(self) -> u32 {
        self.0 & 0x7f
    }

    /// `si_code` of its `SIGCHLD`.
    pub const fn child_code(self) -> u32 {
        match self.low() {
            0 => nr::CLD_EXITED,
            0x7f if self.0 == 0xffff => nr::CLD_CONTINUED,
            0x7f => nr::CLD_STOPPED,
            _ => nr::CLD_KILLED,
        }
    }

    /// `si_status` of its `SIGCHLD`: the code or the signal.
    pub const fn child_status(self) -> u32 {
        match self.low() {
            0x7f if self.0 == 0xffff => nr::SIGCONT,
            0 | 0x7f => self.0 >> 8 & 0xff,
            signal => signal,
        }
    }

    /// The signal that killed it.
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
    /// How it ended, or will end: set once.
    pub status: Mutex<Option<ExitStatus>>,
    /// The `exit` code of its first thread: how it ends unless something else decides.
    pub leader_code: AtomicU8,
    /// Whether all of its threads have ended: it is a zombie until it is waited for.
    pub done: AtomicBool,
}
