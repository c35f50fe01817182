//! `/proc/PID/oom_score`, `oom_score_adj` and `oom_adj`: the preference for processes to
//! [kill](oom) when memory is out. Written values are kept, and children inherit the values.

use super::{Subject, Text};
use crate::errno::{Errno, Result};
use crate::fs::Transfer;
use crate::task::Process;
use crate::task::ids::privileged;
use crate::task::oom::{self, MOST};
use core::fmt::Write;
use core::sync::atomic::Ordering::Relaxed;

/// The `oom_adj` of a process that is never killed, and of a process that is killed first.
const NEVER: i32 = -17;
const FIRST: i32 = 15;

fn adjustment(of: &Subject) -> i32 {
    of.process.oom_score_adj.load(Relaxed)
}

pub(super) fn score_adj(of: &Subject, text: &mut Text) -> Result<()> {
    let _ = writeln!(text, "{}", adjustment(of));
    Ok(())
}

pub(super) fn adj(of: &Subject, text: &mut Text) -> Result<()> {
    let old = (adjustment(of) * -NEVER / MOST).min(FIRST);
    let _ = writeln!(text, "{old}");
    Ok(())
}

/// Writes the process's points: 0 to 1333; 667 for a process with little memory, and 0 for a
/// protected process.
pub(super) fn score(of: &Subject, text: &mut Text) -> Result<()> {
    let (total, most) = (oom::total_pages(), i64::from(MOST));
    let memory = of.process.memory();
    let points = memory.and_then(|memory| oom::badness(&of.process, &memory, total));
    let score = points.map_or(0, |points| ((most + points * most / total as i64) * 2 / 3).max(0));
    let _ = writeln!(text, "{score}");
    Ok(())
}

/// Sets `oom_score_adj`, or with `old` `oom_adj`.
///
/// # Errors
/// `EINVAL`: not a number, or out of range. `ERANGE`: more than 32 bits. `EFAULT`.
pub(super) fn write(process: &Process, old: bool, from: &mut Transfer<'_>) -> Result {
    let (given, taken) = read_number(from)?;
    let adjustment = match given {
        _ if !old => given,
        FIRST => MOST,
        NEVER..FIRST => given * MOST / -NEVER,
        _ => return Err(Errno::EINVAL),
    };
    if !(-MOST..=MOST).contains(&adjustment) {
        return Err(Errno::EINVAL);
    }
    if adjustment < process.oom_score_adj.load(Relaxed) && privileged().is_err() {
        return Err(Errno::EACCES);
    }
    oom::adjust(process, adjustment);
    Ok(taken)
}

/// Returns the number written to a file, and the number of bytes read.
///
/// # Errors
/// `EINVAL`: not a number. `ERANGE`: more than 32 bits. `EFAULT`.
pub(super) fn read_number(from: &mut Transfer<'_>) -> Result<(i32, u64)> {
    /// The maximum number of bytes to read, as on Linux.
    const LONGEST: usize = 12;
    let mut bytes = [0; LONGEST];
    let wanted = from.left().min(LONGEST as u64);
    let taken = from.take_bytes(&mut bytes);
    if taken < wanted {
        return Err(Errno::EFAULT);
    }
    Ok((number(&bytes[..taken as usize])?, taken))
}

/// Parses a number in Linux's format: decimal, octal after `0`, hexadecimal after `0x`, with blanks
/// around the digits.
fn number(text: &[u8]) -> Result<i32> {
    let text = core::str::from_utf8(text).map_err(|_| Errno::EINVAL)?;
    let text = text.split('\0').next().unwrap_or_default();
    let text = text.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\x0b');
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let hexadecimal = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X"));
    let (digits, radix) = match hexadecimal {
        Some(digits) => (digits, 16),
        None if digits.starts_with('0') => (digits, 8),
        None => (digits, 10),
    };
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return Err(Errno::EINVAL);
    }
    // Twelve digits fit.
    let value = i64::from_str_radix(digits, radix).map_err(|_| Errno::ERANGE)?;
    i32::try_from(if negative { -value } else { value }).map_err(|_| Errno::ERANGE)
}
