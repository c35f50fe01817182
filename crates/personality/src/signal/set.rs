//! Sets of signals; the alternate stack; the last exception of a thread.

use faultless_bare::arch::user::Plain;
use linux_raw_sys::general as linux;

/// A set of signals: bit 0 is signal 1.
pub type Set = u64;

/// The largest signal.
pub const LAST: u32 = 64;
/// Signals that can be neither blocked, nor ignored, nor handled.
pub const UNBLOCKABLE: Set = bit(linux::SIGKILL) | bit(linux::SIGSTOP);

/// Returns the set of one signal.
pub const fn bit(signal: u32) -> Set {
    1 << (signal - 1)
}

/// Returns the signal with this number, if it exists.
pub fn number(number: u64) -> Option<u32> {
    let number = number as u32;
    (1..=LAST).contains(&number).then_some(number)
}

/// The alternate stack of handlers: `stack_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AlternateStack {
    /// The lowest address.
    pub start: u64,
    /// `SS_DISABLE`, or `SS_AUTODISARM`.
    pub flags: u32,
    pub(super) padding: u32,
    /// The size in bytes.
    pub size: u64,
}
const _: () = assert!(size_of::<AlternateStack>() == size_of::<linux::stack_t>());

// SAFETY: integers without padding.
unsafe impl Plain for AlternateStack {}

impl AlternateStack {
    /// No alternate stack.
    pub const NONE: Self = Self { start: 0, flags: linux::SS_DISABLE, padding: 0, size: 0 };

    /// Returns whether `sp` is on the stack and the next handler stays on this stack.
    pub const fn holds(&self, sp: u64) -> bool {
        self.flags & linux::SS_AUTODISARM == 0 && self.spans(sp)
    }

    /// Returns whether `sp` is on the stack.
    pub(super) const fn spans(&self, sp: u64) -> bool {
        sp > self.start && sp - self.start <= self.size
    }
}

/// The last exception of a thread, for its signal frames.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trap {
    pub(super) vector: u64,
    pub(super) error: u64,
    pub(super) addr: u64,
}
