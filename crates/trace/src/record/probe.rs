//! Checks whether the kernel lets this user record page faults.
//!
//! The number in `perf_event_paranoid` is not conclusive: from 3 on, vanilla kernels behave as at
//! 2, and kernels of Debian, Ubuntu and Android refuse all events. A security module or a seccomp
//! filter may refuse at any number. The check therefore opens the event and closes it again.

use std::os::fd::{FromRawFd, OwnedFd};

/// `PERF_TYPE_SOFTWARE`.
const SOFTWARE: u64 = 1;
/// Bytes of the first version of `perf_event_attr`.
const SIZE: u64 = 64;
/// `PERF_COUNT_SW_PAGE_FAULTS`.
const PAGE_FAULTS: u64 = 2;
/// `disabled`, `exclude_kernel` and `exclude_hv`.
const FLAGS: u64 = 1 | 1 << 5 | 1 << 6;
/// `PERF_FLAG_FD_CLOEXEC`.
const CLOSE_ON_EXEC: libc::c_ulong = 8;

/// Returns whether faults in user mode of this process can be recorded.
pub(super) fn user_faults() -> bool {
    // The 32-bit words `type` and `size`, `config`, the period, two masks, the flags, and two words
    // that this event does not use.
    let attr = [SOFTWARE | SIZE << 32, PAGE_FAULTS, 1, 0, 0, FLAGS, 0, 0];
    // SAFETY: `attr` has the layout and the size of the first version of `perf_event_attr`. The
    // kernel only reads it. The other arguments are this process, any CPU, and no group.
    let fd = unsafe {
        let (process, cpu, group) = (0, -1, -1);
        libc::syscall(libc::SYS_perf_event_open, attr.as_ptr(), process, cpu, group, CLOSE_ON_EXEC)
    };
    if fd < 0 {
        return false;
    }
    // SAFETY: the call returned this descriptor, which has no other owner.
    drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
    true
}
