//! System calls for shared memory.

use super::super::memory::{Added, room_for, space};
use super::super::mlock::{future_lock, lock_new};
use super::{Args, Errno, INFO, Permissions, RMID, Result, SET, STAT};
use crate::ipc::shm;
use crate::syscall::args::{Entry, calls};
use crate::task::current;
use crate::task::ids::{EXECUTE, READ, WRITE};
use faultless::{Backing, MapFlags, MemoryLock, PAGE_SIZE, Prot};
use faultless_bare::arch::user;
use faultless_bare::percpu;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_shmget, shmget),
    (nr::__NR_shmat, shmat),
    (nr::__NR_shmdt, shmdt),
    (nr::__NR_shmctl, shmctl),
];

/// `shmid64_ds`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct SegmentState {
    permissions: Permissions,
    bytes: u64,
    attached: u64,
    detached: u64,
    changed: u64,
    creator: u32,
    last_user: u32,
    attachments: u64,
    unused: [u64; 2],
}

const _: () = assert!(size_of::<SegmentState>() == 112);

// SAFETY: integers, with fields in place of padding.
unsafe impl user::Plain for SegmentState {}

/// `shmget(key, size, flags)`.
pub fn shmget(args: Args<'_>) -> Result {
    let pid = current().process.pid;
    Ok(shm::get(args.a() as i32, args.b(), args.c() as u32, pid)? as u64)
}

/// `shmat(id, address, flags)`.
pub fn shmat(args: Args<'_>) -> Result {
    const READ_ONLY: u32 = 0o10000;
    const ROUND: u32 = 0o20000;
    const REPLACE: u32 = 0o40000;
    const EXECUTABLE: u32 = 0o100_000;
    let (id, mut addr, how) = (args.a() as i32, args.b(), args.c() as u32);
    let asked = addr != 0;
    let replaces = how & REPLACE != 0;
    if how & ROUND != 0 {
        addr = faultless::page_down(addr);
    }
    if addr & (PAGE_SIZE - 1) != 0 || replaces && addr == 0 {
        return Err(Errno::EINVAL);
    }
    let mut wanted = READ;
    wanted |= if how & READ_ONLY == 0 { WRITE } else { 0 };
    wanted |= if how & EXECUTABLE == 0 { 0 } else { EXECUTE };
    let (object, bytes) = shm::object(id, wanted)?;
    let end = addr.checked_add(bytes).filter(|&end| replaces && end <= faultless::USER_END);
    let replaced = end.map(|end| faultless::VirtRange::new(addr, end));
    room_for(Added { bytes, replaced, ..Added::default() })?;
    let mut prot = Prot::READ;
    prot.set(Prot::WRITE, how & READ_ONLY == 0);
    prot.set(Prot::EXEC, how & EXECUTABLE != 0);
    let mut flags = MapFlags::SHARED;
    flags.set(MapFlags::FIXED, asked && replaces);
    flags.set(MapFlags::FIXED_NOREPLACE, asked && !replaces);
    let lock = future_lock();
    flags.set(MapFlags::LOCKED, lock != MemoryLock::No);
    let backing = Backing { object: &object, first: 0, may_write: how & READ_ONLY == 0 };
    let at = asked.then_some(addr);
    let start = space().mmap_object(percpu::cpu(), at, bytes, prot, flags, backing);
    let start = start.map_err(|error| match Errno::from(error) {
        // Existing mappings are replaced only with `SHM_REMAP`.
        Errno::EEXIST => Errno::EINVAL,
        errno => errno,
    })?;
    lock_new(start, bytes, lock, prot.contains(Prot::WRITE));
    shm::used(id, true, current().process.pid);
    Ok(start)
}

/// `shmdt(address)`.
pub fn shmdt(args: Args<'_>) -> Result {
    let addr = args.a();
    if addr & (PAGE_SIZE - 1) != 0 {
        return Err(Errno::EINVAL);
    }
    let (id, parts) = shm::parts(space(), addr)?;
    for part in parts {
        space().munmap(percpu::cpu(), part.start, part.len())?;
    }
    shm::used(id, false, current().process.pid);
    Ok(0)
}

/// `shmctl(id, command, buffer)`.
pub fn shmctl(args: Args<'_>) -> Result {
    const LOCK: u32 = 11;
    const UNLOCK: u32 = 12;
    const STAT_AT: u32 = 13;
    const TOTALS: u32 = 14;
    const STAT_AT_ANY: u32 = 15;
    let (id, command, buffer) = (args.a() as i32, args.b() as u32, args.c());
    if id < 0 {
        return Err(Errno::EINVAL);
    }
    match command {
        RMID => shm::remove(id)?,
        SET => {
            let new: SegmentState = user::read(buffer)?;
            let [uid, gid, ..] = new.permissions.owner;
            shm::set(id, uid, gid, new.permissions.mode)?;
        }
        STAT | STAT_AT | STAT_AT_ANY => {
            let of_place = command != STAT;
            let id = if of_place { shm::at(id)? } else { id };
            let wanted = if command == STAT_AT_ANY { 0 } else { READ };
            let state = shm::look(id, wanted, |common, segment, attachments| SegmentState {
                permissions: Permissions::of(id, common),
                bytes: segment.bytes,
                attached: segment.attached,
                detached: segment.detached,
                changed: common.changed,
                creator: segment.creator,
                last_user: segment.last_user,
                attachments,
                unused: [0; 2],
            })?;
            user::write(buffer, &state)?;
            return Ok(if of_place { id as u64 } else { 0 });
        }
        INFO => {
            let most = shm::MOST as u64;
            user::write(buffer, &[shm::LARGEST, 1, most, most, shm::LARGEST, 0, 0, 0, 0])?;
            return Ok(shm::totals()?.last_place);
        }
        TOTALS => {
            let totals = shm::totals()?;
            user::write(buffer, &[totals.segments, totals.pages, totals.resident, 0, 0, 0])?;
            return Ok(totals.last_place);
        }
        LOCK | UNLOCK => shm::lock(id, command == LOCK)?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}
