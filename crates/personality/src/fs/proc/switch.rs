//! `/proc/sys/vm/speculative_page_fault`: whether page faults are served without a lock, at the path that the
//! original proposal published.

use super::Text;
use super::oom::read_number;
use crate::errno::{Errno, Result};
use crate::fs::Transfer;
use core::fmt::{self, Write};
use faultless::{Locking, Setting};
use faultless_bare::percpu;

/// Its name.
pub(super) const NAME: &str = "speculative_page_fault";

/// 1: they are; 0: each takes the lock of its VMA, or that of its space.
pub(super) fn text(text: &mut Text) -> fmt::Result {
    let speculative = percpu::vm().knobs().locking() == Locking::Speculative;
    writeln!(text, "{}", u8::from(speculative))
}

/// Switches it on or off.
///
/// # Errors
/// `EINVAL`: it is neither 0 nor 1. `ERANGE`: it is beyond 32 bits. `EFAULT`.
pub(super) fn write(from: &mut Transfer<'_>) -> Result {
    let (given, taken) = read_number(from)?;
    let locking = match given {
        0 => Locking::PerVma,
        1 => Locking::Speculative,
        _ => return Err(Errno::EINVAL),
    };
    percpu::vm().set(Setting::Locking(locking));
    Ok(taken)
}
