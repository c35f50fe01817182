//! `/proc/PID/oom_score`, `oom_score_adj` and `oom_adj`: the preference for processes to kill when memory runs
//! out. Written values are kept, and children inherit them. But this kernel kills the process that finds no free
//! memory, whatever its values.

use super::process::tables;
use super::{Subject, Text};
use crate::errno::{Errno, Result};
use crate::fs::Transfer;
use crate::task::Process;
use core::fmt::Write;
use core::sync::atomic::Ordering::Relaxed;
use faultless_bare::percpu;

/// The largest `oom_score_adj`; the negative of it is the smallest.
const MOST: i32 = 1000;
/// The `oom_adj` of a process that is never killed, and of one that is killed first.
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

/// The process's share of memory, plus its adjustment: 0 to 1333; 667 for a process with little memory.
pub(super) fn score(of: &Subject, text: &mut Text) -> Result<()> {
    let total = percpu::vm().total_frames().max(1) as i64;
    let pages = of.process.memory().map_or(0, |memory| {
        (memory.space().resident_pages(percpu::cpu()) + tables(&memory)) as i64
    });
    let score = match adjustment(of) {
        adjustment if adjustment == -MOST => 0,
        adjustment => {
            let most = i64::from(MOST);
            let points = pages + i64::from(adjustment) * (total / most);
            ((most + points * most / total) * 2 / 3).max(0)
        }
    };
    let _ = writeln!(text, "{score}");
    Ok(())
}

/// Sets `oom_score_adj`, or with `old` `oom_adj`.
///
/// # Errors
/// `EINVAL`: it is no number, or out of range. `ERANGE`: it exceeds 32 bits. `EFAULT`.
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
    process.oom_score_adj.store(adjustment, Relaxed);
    Ok(taken)
}

/// The number written to a file, and how many bytes of it were read.
///
/// # Errors
/// `EINVAL`: it is no number. `ERANGE`: it exceeds 32 bits. `EFAULT`.
pub(super) fn read_number(from: &mut Transfer<'_>) -> Result<(i32, u64)> {
    /// The most bytes that are read, as on Linux.
    const LONGEST: usize = 12;
    let mut bytes = [0; LONGEST];
    let wanted = from.left().min(LONGEST as u64);
    let taken = from.take_bytes(&mut bytes);
    if taken < wanted {
        return Err(Errno::EFAULT);
    }
    Ok((number(&bytes[..taken as usize])?, taken))
}

/// A number in Linux's format: decimal, octal after `0`, hexadecimal after `0x`, with blanks around.
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
