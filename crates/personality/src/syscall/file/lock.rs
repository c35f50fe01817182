//! System calls for file locks.

use super::{Args, Errno, Result, files, opened};
use crate::fs::File;
use crate::fs::lock::{self, Lock, Owner, WHOLE};
use crate::syscall::args::{Entry, calls};
use crate::task::current;
use core::ops::RangeInclusive;
use faultless_bare::arch::user::{self, Plain};
use faultless_collections::Arc;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![(nr::__NR_flock, flock)];

/// `struct flock`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    kind: u16,
    whence: u16,
    padding: u32,
    start: i64,
    len: i64,
    pid: i32,
    unused: u32,
}
const _: () = assert!(size_of::<Request>() == size_of::<nr::flock>());
// SAFETY: integers without padding.
unsafe impl Plain for Request {}

impl Request {
    /// Returns the range of the lock.
    fn range(&self, file: &File) -> Result<RangeInclusive<u64>> {
        let base = match u32::from(self.whence) {
            nr::SEEK_SET => 0,
            nr::SEEK_CUR => file.seek(0, nr::SEEK_CUR)? as i64,
            nr::SEEK_END => file.inode.length() as i64,
            _ => return Err(Errno::EINVAL),
        };
        let start = base.checked_add(self.start).ok_or(Errno::EOVERFLOW)?;
        let (first, last) = match self.len {
            0 => (start, i64::MAX),
            1.. => (start, start.checked_add(self.len - 1).ok_or(Errno::EOVERFLOW)?),
            _ => (start.checked_add(self.len).ok_or(Errno::EINVAL)?, start - 1),
        };
        // Up to the end of the file, even if the end moves.
        let last = if last == i64::MAX { u64::MAX } else { last as u64 };
        Ok(u64::try_from(first).map_err(|_| Errno::EINVAL)?..=last)
    }
}

/// `F_GETLK`, `F_SETLK`, `F_SETLKW`, and the same for open files.
pub(super) fn range(file: &Arc<File>, command: u32, addr: u64) -> Result {
    let mut request: Request = user::read(addr)?;
    let of_file = matches!(command, nr::F_OFD_GETLK | nr::F_OFD_SETLK | nr::F_OFD_SETLKW);
    if u32::from(request.kind) > nr::F_UNLCK || of_file && request.pid != 0 {
        return Err(Errno::EINVAL);
    }
    let owner = if of_file { Owner::file(file) } else { Owner::Table(files().table()) };
    let range = request.range(file)?;
    let writes = u32::from(request.kind) == nr::F_WRLCK;
    let wanted = Lock { owner, range, writes, pid: current().process.pid };
    if matches!(command, nr::F_GETLK | nr::F_OFD_GETLK) {
        if u32::from(request.kind) == nr::F_UNLCK {
            return Err(Errno::EINVAL);
        }
        match lock::obstacle(file, &wanted) {
            None => request.kind = nr::F_UNLCK as u16,
            Some(held) => {
                let (start, end) = (*held.range.start(), *held.range.end());
                request = Request {
                    kind: (if held.writes { nr::F_WRLCK } else { nr::F_RDLCK }) as u16,
                    whence: nr::SEEK_SET as u16,
                    start: start as i64,
                    len: if end == u64::MAX { 0 } else { (end - start + 1) as i64 },
                    pid: if let Owner::Table(_) = held.owner { held.pid as i32 } else { -1 },
                    ..request
                };
            }
        }
        user::write(addr, &request)?;
        return Ok(0);
    }
    let may = match u32::from(request.kind) {
        nr::F_RDLCK => file.reads(),
        nr::F_WRLCK => file.writes(),
        _ => {
            lock::unlock(file, owner, &wanted.range)?;
            return Ok(0);
        }
    };
    if !may {
        return Err(Errno::EBADF);
    }
    lock::lock(file, &wanted, matches!(command, nr::F_SETLK | nr::F_OFD_SETLK))?;
    if !of_file {
        // If the descriptor was closed concurrently, its close did not release this lock.
        let still = files().get_any(file);
        if !still {
            lock::unlock(file, owner, &wanted.range)?;
        }
    }
    Ok(0)
}

/// `flock(fd, operation)`.
pub fn flock(args: Args<'_>) -> Result {
    const SHARED: u64 = 1;
    const EXCLUSIVE: u64 = 2;
    const AT_ONCE: u64 = 4;
    const UNLOCK: u64 = 8;
    let file = opened(args.a())?;
    let owner = Owner::whole(&file);
    let operation = args.b() & !AT_ONCE;
    match operation {
        SHARED | EXCLUSIVE => {
            let writes = operation == EXCLUSIVE;
            let wanted = Lock { owner, range: WHOLE, writes, pid: current().process.pid };
            lock::lock(&file, &wanted, args.b() & AT_ONCE != 0)?;
        }
        UNLOCK => lock::unlock(&file, owner, &WHOLE)?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}
