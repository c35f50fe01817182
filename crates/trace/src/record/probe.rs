//! Checks whether the kernel lets this user record page faults.
//!
//! The number in `perf_event_paranoid` is not conclusive: from 3 on, vanilla kernels behave as at
//! 2, and kernels of Debian, Ubuntu and Android refuse all events. A security module or a seccomp
//! filter may refuse at any number. The check therefore opens the event and closes it again.

use std::io;
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

/// Checks whether faults in user mode of this process can be recorded.
///
/// # Errors
/// The refusal of the kernel.
pub(super) fn user_faults() -> io::Result<()> {
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
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned this descriptor, which has no other owner.
    drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
    Ok(())
}

/// Returns whether the text of `/proc/self/status` shows a seccomp filter.
pub(super) fn is_filtered(status: &str) -> bool {
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"))
}

/// Returns whether the text of `/proc/self/uid_map` is of the first user namespace. The kernel
/// ignores capabilities of all other user namespaces when it checks access to perf events.
pub(super) fn is_first_namespace(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_and_namespace_are_parsed() {
        assert!(is_filtered("Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"));
        assert!(!is_filtered("Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t2\n"));
        assert!(is_first_namespace("         0          0 4294967295\n"));
        assert!(!is_first_namespace("         0       1000          1\n"));
        assert!(!is_first_namespace("0 100000 65536\n"));
    }
}
