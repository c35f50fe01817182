//! `/proc/sys/vm/speculative_page_fault`: enables page faults without a lock. The path is the path
//! of the original proposal.

use super::Text;
use super::oom::read_number;
use crate::errno::{Errno, Result};
use crate::fs::Transfer;
use core::fmt::{self, Write};
use faultless::{Locking, Setting};
use faultless_bare::percpu;

/// 1: without a lock; 0: with the lock of the VMA, or of the space.
pub(super) fn text(text: &mut Text) -> fmt::Result {
    let speculative = percpu::vm().knobs().locking() == Locking::Speculative;
    writeln!(text, "{}", u8::from(speculative))
}

/// Enables or disables faults without a lock.
///
/// # Errors
/// `EINVAL`: neither 0 nor 1. `ERANGE`: more than 32 bits. `EFAULT`.
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
