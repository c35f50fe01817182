//! System calls that lock pages in memory.

use super::memory::{areas, populate, room, space};
use super::{Args, Errno, Result};
use crate::syscall::args::{Entry, calls};
use crate::task::current;
use faultless::{MemoryLock, VirtRange};
use faultless_bare::percpu;
use linux_raw_sys::general as linux;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (linux::__NR_mlock, mlock),
    (linux::__NR_mlock2, mlock2),
    (linux::__NR_munlock, munlock),
    (linux::__NR_mlockall, mlockall),
    (linux::__NR_munlockall, munlockall),
];

/// Returns the lock mode of the caller's new mappings.
pub(super) fn future_lock() -> MemoryLock {
    current().process.limits.locks_future.get()
}

/// Completes the `lock` of a new mapping, which was made with `MapFlags::LOCKED` unless `lock` is
/// `No`: faults its pages in, for writing or for reading, or marks it for locks at the first fault.
pub(super) fn lock_new(start: u64, len: u64, lock: MemoryLock, write: bool) {
    match lock {
        MemoryLock::No => {}
        MemoryLock::Now => {
            // As on Linux, pages that cannot be faulted in now are skipped.
            let _ = populate(start, len, write);
        }
        MemoryLock::OnFault => {
            // If the VMA cannot be split, the mapping keeps its lock state.
            let _ = space().mlock(percpu::cpu(), start, len, lock);
        }
    }
}

/// Locks or unlocks the pages of a call, and returns their range. There is
/// no limit, also for users other than root.
fn lock(args: &Args<'_>, how: MemoryLock) -> Result<VirtRange> {
    let start = faultless::page_down(args.a());
    let len = args.b().wrapping_add(args.a() - start);
    // As on Linux, a length near the maximum is rounded up to 0.
    let len = faultless::page_up(len).unwrap_or(0);
    let end = start.checked_add(len).ok_or(Errno::EINVAL)?;
    space().mlock(percpu::cpu(), start, len, how)?;
    Ok(VirtRange::new(start, end))
}

/// `mlock(addr, length)`: locks the pages, and faults them in.
pub fn mlock(args: Args<'_>) -> Result {
    room()?;
    let range = lock(&args, MemoryLock::Now)?;
    for (part, write) in areas(range)? {
        populate(part.start, part.len(), write).map_err(|errno| match errno {
            Errno::RESTART => errno,
            _ => Errno::ENOMEM,
        })?;
    }
    Ok(0)
}

/// `mlock2(addr, length, flags)`.
pub fn mlock2(args: Args<'_>) -> Result {
    const ON_FAULT: u64 = linux::MLOCK_ONFAULT as u64;
    match args.c() {
        0 => mlock(args),
        ON_FAULT => room().and_then(|()| lock(&args, MemoryLock::OnFault)).map(|_| 0),
        _ => Err(Errno::EINVAL),
    }
}

/// `munlock(addr, length)`: resident pages stay.
pub fn munlock(args: Args<'_>) -> Result {
    lock(&args, MemoryLock::No)?;
    Ok(0)
}

/// Locks or unlocks all mappings. Needs no memory for a list of mappings, and so does not fail.
fn lock_all(how: MemoryLock) {
    let mut left = VirtRange::USER;
    loop {
        // One area at a time, in its present state.
        let mut found = None;
        space().each_area(percpu::cpu(), left, |area| {
            found = Some(area.range.intersect(left));
            false
        });
        let Some(part) = found else { return };
        // Skips a mapping that was removed concurrently, or for which memory is out.
        let _ = space().mlock(percpu::cpu(), part.start, part.len(), how);
        left = VirtRange::new(part.end, left.end);
    }
}

/// `mlockall(flags)`.
pub fn mlockall(args: Args<'_>) -> Result {
    const CURRENT: u64 = linux::MCL_CURRENT as u64;
    const FUTURE: u64 = linux::MCL_FUTURE as u64;
    const ON_FAULT: u64 = linux::MCL_ONFAULT as u64;
    room()?;
    let flags = args.a();
    if flags & !(CURRENT | FUTURE | ON_FAULT) != 0 || flags & (CURRENT | FUTURE) == 0 {
        return Err(Errno::EINVAL);
    }
    let how = if flags & ON_FAULT == 0 { MemoryLock::Now } else { MemoryLock::OnFault };
    current().process.limits.locks_future.set(if flags & FUTURE != 0 {
        how
    } else {
        MemoryLock::No
    });
    if flags & CURRENT != 0 {
        lock_all(how);
    }
    if flags & CURRENT != 0 && how == MemoryLock::Now {
        for (part, write) in areas(VirtRange::USER)? {
            // Skips pages that cannot be faulted in.
            if populate(part.start, part.len(), write) == Err(Errno::RESTART) {
                return Err(Errno::RESTART);
            }
        }
    }
    Ok(0)
}

/// `munlockall()`.
pub fn munlockall(_: Args<'_>) -> Result {
    current().process.limits.locks_future.set(MemoryLock::No);
    lock_all(MemoryLock::No);
    Ok(0)
}
