//! Information about a signal: `siginfo_t`.

use crate::task::Process;
use crate::task::status::ExitStatus;
use core::mem::offset_of;
use faultless_bare::arch::user::Plain;
use linux_raw_sys::general::{self as linux, siginfo_t};

/// Information about a signal, in Linux's layout.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Info {
    signal: u32,
    errno: i32,
    code: i32,
    padding: u32,
    /// By kind of signal, from `_sifields` on.
    fields: [u64; 14],
}

// SAFETY: integers without padding.
unsafe impl Plain for Info {}

const _: () = {
    assert!(size_of::<Info>() == size_of::<siginfo_t>());
    // The unions begin at `fields`, with the members at the offsets used by the functions below.
    type Child = linux::__sifields__bindgen_ty_4;
    type Timer = linux::__sifields__bindgen_ty_2;
    type Queued = linux::__sifields__bindgen_ty_3;
    assert!(offset_of!(Info, fields) == 16);
    assert!(offset_of!(linux::siginfo__bindgen_ty_1__bindgen_ty_1, _sifields) == 16);
    assert!(offset_of!(Child, _status) == 8 && offset_of!(Child, _utime) == 16);
    assert!(offset_of!(Timer, _overrun) == 4 && offset_of!(Timer, _sigval) == 8);
    assert!(offset_of!(Queued, _uid) == 4 && offset_of!(Queued, _sigval) == 8);
};

/// Bytes of a `signalfd_siginfo`.
pub const TOLD: usize = 128;

/// The number and the real user id of a process, as in `siginfo_t`.
fn sender(process: &Process) -> u64 {
    u64::from(process.pid) | u64::from(process.ids.user().real) << 32
}

impl Info {
    const fn new(signal: u32, code: i32) -> Self {
        Self { signal, errno: 0, code, padding: 0, fields: [0; 14] }
    }

    /// From the kernel, without details.
    pub const fn kernel(signal: u32) -> Self {
        Self::new(signal, linux::SI_KERNEL as i32)
    }

    /// From the process `from`, which called `kill`, or (`to_thread`) `tgkill`.
    pub fn sent(signal: u32, from: &Process, to_thread: bool) -> Self {
        let code = if to_thread { linux::SI_TKILL } else { linux::SI_USER as i32 };
        let mut info = Self::new(signal, code);
        info.fields[0] = sender(from);
        info
    }

    /// A signal without its information, which did not fit the queue.
    pub(super) const fn lost(signal: u32) -> Self {
        Self::new(signal, linux::SI_USER as i32)
    }

    /// From a program's access to `addr`, with the reason `code`.
    pub const fn fault(signal: u32, code: u32, addr: u64) -> Self {
        let mut info = Self::new(signal, code as i32);
        info.fields[0] = addr;
        info
    }

    /// From the timer `number` of `timer_create`, with its overrun count.
    pub(crate) const fn timer(signal: u32, number: i32, overrun: i32, value: u64) -> Self {
        let mut info = Self::new(signal, linux::SI_TIMER);
        info.fields[0] = number as u32 as u64 | (overrun as u32 as u64) << 32;
        info.fields[1] = value;
        info
    }

    /// Returns the number and the overrun count of the timer that sent the signal.
    pub(crate) const fn of_timer(&self) -> Option<(i32, i32)> {
        if self.code != linux::SI_TIMER {
            return None;
        }
        Some((self.fields[0] as i32, (self.fields[0] >> 32) as i32))
    }

    /// Adds `more` expirations of the timer that sent the signal.
    pub(super) const fn overrun_more(&mut self, more: i32) {
        let overrun = ((self.fields[0] >> 32) as i32).saturating_add(more);
        self.fields[0] = self.fields[0] as u32 as u64 | (overrun as u32 as u64) << 32;
    }

    /// About `child`.
    pub(super) fn child(signal: u32, child: &Process, status: ExitStatus) -> Self {
        /// Clock ticks per second.
        const TICKS: u64 = 100;
        let mut info = Self::new(signal, status.child_code() as i32);
        let (pid, status, times) = (sender(child), u64::from(status.child_status()), child.times());
        let [user, system] =
            [times.user, times.system].map(|time| time / (crate::abi::SECOND / TICKS));
        info.fields[..4].copy_from_slice(&[pid, status, user, system]);
        info
    }

    /// The same information for `signal`, for `rt_sigqueueinfo`.
    pub(crate) const fn as_signal(mut self, signal: u32) -> Self {
        self.signal = signal;
        self
    }

    /// The same for `signalfd`: `signalfd_siginfo`.
    pub fn told(&self) -> [u8; TOLD] {
        let mut told = [0; TOLD];
        let mut put = |at: usize, bytes: &[u8]| told[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.signal.to_ne_bytes());
        put(4, &self.errno.to_ne_bytes());
        put(8, &self.code.to_ne_bytes());
        let [first, second, third, fourth, ..] = self.fields;
        let (low, high) = (&first.to_ne_bytes()[..4], &first.to_ne_bytes()[4..]);
        let faults = [linux::SIGSEGV, linux::SIGBUS, linux::SIGILL, linux::SIGFPE, linux::SIGTRAP];
        if self.code == linux::SI_TIMER {
            put(24, low);
            put(32, high);
        } else if self.code > 0 && faults.contains(&self.signal) {
            put(72, &first.to_ne_bytes());
            return told;
        } else {
            put(12, low);
            put(16, high);
        }
        if self.code > 0 && self.signal == linux::SIGCHLD {
            put(40, &second.to_ne_bytes()[..4]);
            put(56, &third.to_ne_bytes());
            put(64, &fourth.to_ne_bytes());
        } else {
            put(44, &second.to_ne_bytes()[..4]);
            put(48, &second.to_ne_bytes());
        }
        told
    }

    /// The signal.
    pub const fn signal(&self) -> u32 {
        self.signal
    }

    /// Returns the reason for the signal; only the kernel uses codes above 0.
    pub const fn code(&self) -> i32 {
        self.code
    }
}
