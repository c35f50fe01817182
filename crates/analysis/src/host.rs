//! Memory that this process may take from its host.
//!
//! A Linux host overcommits memory, and kills a process that uses more than is available. A run
//! that needs more memory therefore fails before it begins.

use crate::error::Error;
use std::fmt;
use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};

/// The divisor of the share of the available memory that is left to other processes.
const LEFT: u64 = 16;

/// The available memory, and the limit that determines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Available {
    bytes: u64,
    source: &'static str,
}

/// Returns the available memory of the host, or the memory that the control group of this process
/// may still take, whichever is less. `limit` is the limit of the group and its use. Files in the
/// page cache do not count as used, because the kernel can reclaim them.
fn available(host: u64, limit: Option<(u64, u64)>) -> Available {
    let left = limit.map(|(limit, used)| limit.saturating_sub(used));
    match left.filter(|left| *left < host) {
        Some(bytes) => Available { bytes, source: "under the memory limit of its control group" },
        None => Available { bytes: host, source: "on the host (MemAvailable)" },
    }
}

/// Queries the host. Returns `None` if the host does not report its memory.
fn ask() -> Option<Available> {
    let mut system = System::new().ok()?;
    system.refresh_memory();
    let host = system.available_memory();
    if host == 0 {
        return None;
    }
    let own = sysinfo::get_current_pid().ok()?;
    let nothing = ProcessRefreshKind::nothing();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[own]), false, nothing);
    // The limit of the group or of an enclosing group; versions 1 and 2.
    let limits = system.process(own).and_then(sysinfo::Process::cgroup_limits);
    Some(available(host, limits.map(|limits| (limits.total_memory, limits.rss))))
}

/// Returns an error if the host does not have `bytes` of memory available, plus a margin.
///
/// # Errors
/// The host has too little memory for `what`.
pub fn afford(what: impl fmt::Display, bytes: u64) -> Result<(), Error> {
    let Some(available) = ask() else { return Ok(()) };
    let spare = available.bytes / LEFT;
    if bytes <= available.bytes - spare {
        return Ok(());
    }
    Err(Error::Memory {
        what: what.to_string(),
        needed: bytes,
        available: available.bytes,
        limit: available.source,
        spare,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lower_limit_of_host_and_group_applies() {
        let bytes = |limit| available(1000, limit).bytes;
        assert_eq!(bytes(None), 1000);
        assert_eq!(bytes(Some((600, 100))), 500);
        assert_eq!(bytes(Some((5000, 100))), 1000);
        // A limit may be lowered below the current use.
        assert_eq!(bytes(Some((100, 600))), 0);
        assert!(available(1000, Some((600, 0))).source.contains("control group"));
    }

    #[test]
    fn afford_keeps_a_margin() {
        let there = ask().expect("the host reports its memory").bytes;
        assert!(afford("a little", 1 << 20).is_ok());
        let error = afford("a lot", there.saturating_mul(2)).expect_err("too much").to_string();
        assert!(error.starts_with("a lot: needs ") && error.contains(" are available "), "{error}");
    }
}
