//! The system call `futex`.

use super::{Args, Errno, Result};
use crate::abi;
use crate::syscall::args::{Entry, calls};
use crate::task::futex;
use crate::time::{self, Clock};
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![(nr::__NR_futex, futex)];

/// `futex(word, operation, value, timeout, second word, third value)`.
pub fn futex(args: Args<'_>) -> Result {
    let operation = args.b() as u32;
    let private = operation & nr::FUTEX_PRIVATE_FLAG != 0;
    let real = operation & nr::FUTEX_CLOCK_REALTIME != 0;
    let command = operation & !(nr::FUTEX_PRIVATE_FLAG | nr::FUTEX_CLOCK_REALTIME);
    let (word, value, second, third) = (args.a(), args.c() as u32, args.e(), args.f() as u32);
    // Operations without a timeout use this register for a number.
    let more = args.d() as u32;
    if real && !matches!(command, nr::FUTEX_WAIT | nr::FUTEX_WAIT_BITSET) {
        return Err(Errno::ENOSYS);
    }
    match command {
        nr::FUTEX_WAIT | nr::FUTEX_WAIT_BITSET => {
            let absolute = command == nr::FUTEX_WAIT_BITSET;
            let bits = if absolute { third } else { nr::FUTEX_BITSET_MATCH_ANY };
            if bits == 0 {
                return Err(Errno::EINVAL);
            }
            wait(word, private, value, bits, args.d(), absolute, real)
        }
        nr::FUTEX_WAKE => {
            futex::wake(word, private, (value as i32).max(1) as u32, nr::FUTEX_BITSET_MATCH_ANY)
        }
        nr::FUTEX_WAKE_BITSET if third == 0 => Err(Errno::EINVAL),
        nr::FUTEX_WAKE_BITSET => futex::wake(word, private, (value as i32).max(1) as u32, third),
        nr::FUTEX_REQUEUE | nr::FUTEX_CMP_REQUEUE => {
            if value as i32 | more as i32 >= 0 {
                let expected = (command == nr::FUTEX_CMP_REQUEUE).then_some(third);
                let (woken, moved) = futex::requeue(word, second, private, value, more, expected)?;
                Ok(woken + moved)
            } else {
                Err(Errno::EINVAL)
            }
        }
        nr::FUTEX_WAKE_OP => futex::wake_op(word, second, private, value, more, third),
        _ => Err(Errno::ENOSYS),
    }
}

fn wait(
    word: u64,
    private: bool,
    value: u32,
    bits: u32,
    timeout: u64,
    absolute: bool,
    real: bool,
) -> Result {
    let mut relative = None;
    let deadline = if timeout == 0 {
        None
    } else {
        let time = abi::read_timespec(timeout)?;
        Some(if !absolute {
            let deadline = time::deadline_after(time);
            relative = Some(deadline);
            deadline
        } else if real {
            Clock::Real.since_boot(time).unwrap_or(time)
        } else {
            time
        })
    };
    let waited = futex::wait(word, private, value, bits, deadline);
    match (waited, relative) {
        // The restarted call waits for the rest of the time.
        (Err(Errno::RESTART), Some(deadline)) => Err(time::interrupted(deadline)),
        (waited, _) => waited.map(|()| 0),
    }
}
