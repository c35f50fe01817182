//! `/proc/sys/vm/compact_memory`: writing 1 compacts all memory.

use super::oom::read_number;
use crate::errno::{Errno, Result};
use crate::fs::Transfer;
use faultless_bare::percpu;

/// How many blocks are made between two looks at what else there is to do.
const STEP: u64 = 4;

/// Makes all free blocks of 2 MiB that can be made.
///
/// # Errors
/// `EINVAL`: it is not 1, as on Linux. `ERANGE`: it exceeds 32 bits. `EFAULT`.
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
