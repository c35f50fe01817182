//! System calls for semaphores.

use super::{Args, Errno, INFO, Permissions, RMID, Result, SET, STAT};
use crate::abi;
use crate::ipc::sem::{self, Change, LARGEST, MOST, MOST_CHANGES, SETS, Set, State};
use crate::syscall::args::{Entry, calls};
use crate::task::current;
use crate::task::ids::{READ, WRITE};
use crate::time;
use faultless_bare::arch::user;
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_semget, semget),
    (nr::__NR_semop, semop),
    (nr::__NR_semtimedop, semtimedop),
    (nr::__NR_semctl, semctl),
];

/// `semid64_ds`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct SetState {
    permissions: Permissions,
    used: [u64; 2],
    changed: [u64; 2],
    count: u64,
    unused: [u64; 2],
}

const _: () = assert!(size_of::<SetState>() == 104 && size_of::<Change>() == 6);

// SAFETY: integers, with fields in place of padding.
unsafe impl user::Plain for SetState {}
// SAFETY: three half words.
unsafe impl user::Plain for Change {}

/// `semget(key, count, flags)`.
pub fn semget(args: Args<'_>) -> Result {
    let count = args.b() as i32;
    let count = usize::try_from(count).ok().filter(|&count| count <= MOST).ok_or(Errno::EINVAL)?;
    let suits = |set: &Arc<Set>| {
        if count > set.look(|state| state.all.len()) { Err(Errno::EINVAL) } else { Ok(()) }
    };
    let make = |_| Set::try_new(count);
    Ok(SETS.lock().get(args.a() as i32, args.c() as u32, suits, make)? as u64)
}

/// `semop(id, changes, count)`.
pub fn semop(args: Args<'_>) -> Result {
    change(&args, 0)
}

/// `semtimedop(id, changes, count, timeout)`.
pub fn semtimedop(args: Args<'_>) -> Result {
    change(&args, args.d())
}

fn change(args: &Args<'_>, timeout: u64) -> Result {
    let deadline = match timeout {
        0 => None,
        at => Some(time::now().saturating_add(abi::read_timespec(at)?)),
    };
    let count = u64::from(args.c() as u32);
    if count == 0 || (args.a() as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    if count > MOST_CHANGES {
        return Err(Errno::E2BIG);
    }
    let mut changes = Vec::try_with_capacity(count as usize)?;
    for at in 0..count {
        let change: Change = user::read(args.b().wrapping_add(at * size_of::<Change>() as u64))?;
        changes.try_push(change)?;
    }
    let id = args.a() as i32;
    let last = changes.iter().map(|change| usize::from(change.at)).max().unwrap_or(0);
    if last >= sem::find(id, 0)?.look(|state| state.all.len()) {
        return Err(Errno::EFBIG);
    }
    let wanted = if changes.iter().any(|change| change.by != 0) { WRITE } else { READ };
    sem::find(id, wanted)?.change(&changes, deadline, current().process.pid)?;
    Ok(0)
}

/// `semctl(id, semaphore, command, argument)`.
pub fn semctl(args: Args<'_>) -> Result {
    const GET_PID: u32 = 11;
    const GET_VALUE: u32 = 12;
    const GET_ALL: u32 = 13;
    const GET_WAITING: u32 = 14;
    const GET_WAITING_FOR_ZERO: u32 = 15;
    const SET_VALUE: u32 = 16;
    const SET_ALL: u32 = 17;
    const STAT_AT: u32 = 18;
    const TOTALS: u32 = 19;
    const STAT_AT_ANY: u32 = 20;
    let (id, at, command, argument) = (args.a() as i32, args.b(), args.c() as u32, args.d());
    if id < 0 {
        return Err(Errno::EINVAL);
    }
    let pid = current().process.pid;
    let at = at as u32 as usize;
    match command {
        RMID => sem::remove(id)?,
        SET => {
            let new: SetState = user::read(argument)?;
            let [uid, gid, ..] = new.permissions.owner;
            SETS.lock().set(id, uid, gid, new.permissions.mode)?;
        }
        STAT | STAT_AT | STAT_AT_ANY => {
            let of_place = command != STAT;
            let state = {
                let mut all = SETS.lock();
                let id = if of_place { all.at(id)? } else { id };
                let wanted = if command == STAT_AT_ANY { 0 } else { READ };
                let (common, set) = all.find_for(id, wanted)?;
                let (used, count) = set.look(|state| (state.used, state.all.len() as u64));
                let permissions = Permissions::of(id, common);
                let changed = [common.changed, 0];
                (id, SetState { permissions, used: [used, 0], changed, count, unused: [0; 2] })
            };
            user::write(argument, &state.1)?;
            return Ok(if of_place { state.0 as u64 } else { 0 });
        }
        INFO | TOTALS => {
            let (mut sets, mut semaphores, last) = (20, LARGEST, {
                let all = SETS.lock();
                all.last_place()
            });
            if command == TOTALS {
                let all = SETS.lock();
                let counts = all.all().map(|(.., set)| set.look(|state| state.all.len() as i32));
                (sets, semaphores) =
                    counts.fold((0, 0), |(sets, sum), count| (sets + 1, sum + count));
            }
            let (most, all) = (MOST as i32, MOST as i32 * MOST as i32);
            let ops = MOST_CHANGES as i32;
            user::write(
                argument,
                &[all, most, all, all, most, ops, ops, sets, LARGEST, semaphores],
            )?;
            return Ok(last);
        }
        GET_ALL => {
            let mut values = Vec::new();
            let copy = |state: &State| -> Result<()> {
                values.try_reserve(2 * state.all.len())?;
                Ok(values.try_extend(state.all.iter().flat_map(|one| one.value.to_le_bytes()))?)
            };
            sem::find(id, READ)?.look(copy)?;
            user::write_bytes(argument, &values)?;
        }
        SET_ALL => {
            let set = sem::find(id, WRITE)?;
            let count = set.look(|state| state.all.len());
            let mut bytes = Vec::try_filled(0, 2 * count)?;
            user::read_bytes(&mut bytes, argument)?;
            let values =
                bytes.chunks_exact(2).map(|value| u16::from_le_bytes([value[0], value[1]]));
            let values = Vec::try_from_iter(values)?;
            set.set(0, &values, pid)?;
            touch(id);
        }
        SET_VALUE => {
            let value = u16::try_from(argument as i32).map_err(|_| Errno::ERANGE)?;
            if i32::from(value) > LARGEST {
                return Err(Errno::ERANGE);
            }
            if at >= sem::find(id, 0)?.look(|state| state.all.len()) {
                return Err(Errno::EINVAL);
            }
            sem::find(id, WRITE)?.set(at, &[value], pid)?;
            touch(id);
        }
        GET_PID | GET_VALUE | GET_WAITING | GET_WAITING_FOR_ZERO => {
            let semaphore = sem::find(id, READ)?.look(|state| state.all.get(at).copied());
            let semaphore = semaphore.ok_or(Errno::EINVAL)?;
            return Ok(match command {
                GET_PID => semaphore.last_user,
                GET_VALUE => semaphore.value.into(),
                GET_WAITING => semaphore.waiting[0],
                _ => semaphore.waiting[1],
            }
            .into());
        }
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

/// Records that `semctl` changed a set.
fn touch(id: i32) {
    if let Ok((common, _)) = SETS.lock().find(id) {
        common.changed = crate::ipc::seconds();
    }
}
