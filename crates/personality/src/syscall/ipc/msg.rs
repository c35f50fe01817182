//! System calls for message queues.

use super::{Args, Errno, INFO, Permissions, RMID, Result, SET, STAT};
use crate::ipc::msg::{self, CAPACITY, LONGEST, MOST, Message, QUEUES, Queue, Wanted};
use crate::syscall::args::{Entry, calls};
use crate::task::current;
use crate::task::ids::{READ, WRITE, privileged};
use faultless_bare::arch::user;
use faultless_collections::Vec;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_msgget, msgget),
    (nr::__NR_msgsnd, msgsnd),
    (nr::__NR_msgrcv, msgrcv),
    (nr::__NR_msgctl, msgctl),
];

/// Do not wait.
const NO_WAIT: u32 = 0o4000;

/// `msqid64_ds`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct QueueState {
    permissions: Permissions,
    times: [u64; 3],
    bytes: u64,
    messages: u64,
    capacity: u64,
    last_users: [u32; 2],
    unused: [u64; 2],
}

const _: () = assert!(size_of::<QueueState>() == 120);

// SAFETY: integers, with fields in place of padding.
unsafe impl user::Plain for QueueState {}

/// `msgget(key, flags)`.
pub fn msgget(args: Args<'_>) -> Result {
    let make = |_| Queue::try_new();
    Ok(QUEUES.lock().get(args.a() as i32, args.b() as u32, |_| Ok(()), make)? as u64)
}

/// `msgsnd(id, message, length, flags)`.
pub fn msgsnd(args: Args<'_>) -> Result {
    let (id, at, len, flags) = (args.a() as i32, args.b(), args.c(), args.d() as u32);
    let kind: i64 = user::read(at)?;
    if len > LONGEST || id < 0 || kind < 1 {
        return Err(Errno::EINVAL);
    }
    if faultless_bare::heap::low() {
        return Err(Errno::ENOMEM);
    }
    let mut text = Vec::try_filled(0, len as usize)?;
    user::read_bytes(&mut text, at.wrapping_add(8))?;
    let message = Message::try_new(kind, text)?;
    msg::find(id, WRITE)?.send(message, current().process.pid, flags & NO_WAIT != 0)?;
    Ok(0)
}

/// `msgrcv(id, message, length, kind, flags)`.
pub fn msgrcv(args: Args<'_>) -> Result {
    const CUT: u32 = 0o10000;
    const EXCEPT: u32 = 0o20000;
    const COPY: u32 = 0o40000;
    let (id, at, len) = (args.a() as i32, args.b(), args.c());
    let (kind, flags) = (args.d() as i64, args.e() as u32);
    if len > i64::MAX as u64 || id < 0 {
        return Err(Errno::EINVAL);
    }
    if flags & COPY != 0 {
        return Err(Errno::ENOSYS);
    }
    let wanted = match kind {
        0 => Wanted::Any,
        ..0 => Wanted::UpTo(kind.checked_neg().unwrap_or(i64::MAX)),
        _ if flags & EXCEPT != 0 => Wanted::Not(kind),
        _ => Wanted::Kind(kind),
    };
    let (cut, at_once) = (flags & CUT != 0, flags & NO_WAIT != 0);
    let message = msg::find(id, READ)?.receive(wanted, len, cut, current().process.pid, at_once)?;
    let text = &message.text[..message.text.len().min(len as usize)];
    user::write(at, &message.kind)?;
    user::write_bytes(at.wrapping_add(8), text)?;
    Ok(text.len() as u64)
}

/// `msgctl(id, command, buffer)`.
pub fn msgctl(args: Args<'_>) -> Result {
    const STAT_AT: u32 = 11;
    const TOTALS: u32 = 12;
    const STAT_AT_ANY: u32 = 13;
    let (id, command, buffer) = (args.a() as i32, args.b() as u32, args.c());
    if id < 0 {
        return Err(Errno::EINVAL);
    }
    match command {
        RMID => msg::remove(id)?,
        SET => {
            let new: QueueState = user::read(buffer)?;
            let [uid, gid, ..] = new.permissions.owner;
            let queue = QUEUES.lock().find_own(id)?.1.clone();
            if new.capacity > CAPACITY {
                privileged()?;
            }
            QUEUES.lock().set(id, uid, gid, new.permissions.mode)?;
            queue.set_capacity(new.capacity);
        }
        STAT | STAT_AT | STAT_AT_ANY => {
            let of_place = command != STAT;
            let (id, state) = {
                let mut all = QUEUES.lock();
                let id = if of_place { all.at(id)? } else { id };
                let wanted = if command == STAT_AT_ANY { 0 } else { READ };
                let (common, queue) = all.find_for(id, wanted)?;
                let state = queue.look(|state| QueueState {
                    permissions: Permissions::of(id, common),
                    times: [state.times[0], state.times[1], common.changed],
                    bytes: state.bytes,
                    messages: state.len(),
                    capacity: state.capacity,
                    last_users: state.last_users,
                    unused: [0; 2],
                });
                (id, state)
            };
            user::write(buffer, &state)?;
            return Ok(if of_place { id as u64 } else { 0 });
        }
        INFO | TOTALS => {
            let (mut queues, mut messages, mut bytes) =
                ((MOST as u64 * CAPACITY / 1024) as u32, CAPACITY as u32, CAPACITY as u32);
            let last = {
                let all = QUEUES.lock();
                if command == TOTALS {
                    (queues, messages, bytes) = (0, 0, 0);
                    for (.., queue) in all.all() {
                        let (count, sum) = queue.look(|state| (state.len(), state.bytes));
                        queues += 1;
                        messages += count as u32;
                        bytes += sum as u32;
                    }
                }
                all.last_place()
            };
            let (longest, capacity, most) = (LONGEST as u32, CAPACITY as u32, MOST as u32);
            user::write(buffer, &[queues, messages, longest, capacity, most, 16, bytes, 0xffff])?;
            return Ok(last);
        }
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}
