//! `/proc/sys/vm/compact_memory`: writing 1 compacts all memory.

use super::oom::read_number;
use crate::errno::{Errno, Result};
use crate::fs::Transfer;
use faultless_bare::percpu;

/// The number of blocks to make between two checks for other work.
const STEP: u64 = 4;

/// Makes as many free blocks of 2 MiB as possible.
///
/// # Errors
/// `EINVAL`: the number is not 1, as on Linux. `ERANGE`: the number exceeds 32 bits. `EFAULT`.
pub(super) fn write(from: &mut Transfer<'_>) -> Result {
    let (given, taken) = read_number(from)?;
    if given != 1 {
        return Err(Errno::EINVAL);
    }
    while percpu::cpu().compact(STEP).blocks == STEP {
        percpu::cpu().serve_flushes();
    }
    Ok(taken)
}
