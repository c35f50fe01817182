//! System calls for user and group ids, and capabilities.

use super::{Args, Errno, Result};
use crate::syscall::args::{Entry, calls};
use crate::task::current;
use crate::task::ids::{SAME, Set, privileged};
use faultless_bare::arch::user;
use faultless_collections::Vec;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (nr::__NR_getuid, |_| Ok(user_ids().real.into())),
    (nr::__NR_geteuid, |_| Ok(user_ids().effective.into())),
    (nr::__NR_getgid, |_| Ok(group_ids().real.into())),
    (nr::__NR_getegid, |_| Ok(group_ids().effective.into())),
    (nr::__NR_getresuid, |args| tell(&args, user_ids())),
    (nr::__NR_getresgid, |args| tell(&args, group_ids())),
    (nr::__NR_setuid, |args| set(&args, false)),
    (nr::__NR_setgid, |args| set(&args, true)),
    (nr::__NR_setreuid, |args| set_pair(&args, false)),
    (nr::__NR_setregid, |args| set_pair(&args, true)),
    (nr::__NR_setresuid, |args| set_all(&args, false)),
    (nr::__NR_setresgid, |args| set_all(&args, true)),
    (nr::__NR_setfsuid, |args| set_file(&args, false)),
    (nr::__NR_setfsgid, |args| set_file(&args, true)),
    (nr::__NR_getgroups, getgroups),
    (nr::__NR_setgroups, setgroups),
    (nr::__NR_capget, capget),
    (nr::__NR_capset, capset),
];

fn user_ids() -> Set {
    current().process.ids.user()
}

fn group_ids() -> Set {
    current().process.ids.group()
}

/// `getresuid(real, effective, saved)`, or `getresgid`.
fn tell(args: &Args<'_>, set: Set) -> Result {
    user::write(args.a(), &set.real)?;
    user::write(args.b(), &set.effective)?;
    user::write(args.c(), &set.saved)?;
    Ok(0)
}

/// `setuid(id)`, or `setgid`.
fn set(args: &Args<'_>, groups: bool) -> Result {
    let id = args.a() as u32;
    if id == SAME {
        return Err(Errno::EINVAL);
    }
    current().process.ids.change(groups, |set, privileged| set.set(id, privileged))?;
    Ok(0)
}

/// `setreuid(real, effective)`, or `setregid`.
fn set_pair(args: &Args<'_>, groups: bool) -> Result {
    let (real, effective) = (args.a() as u32, args.b() as u32);
    let ids = &current().process.ids;
    ids.change(groups, |set, privileged| set.set_pair(real, effective, privileged))?;
    Ok(0)
}

/// `setresuid(real, effective, saved)`, or `setresgid`.
fn set_all(args: &Args<'_>, groups: bool) -> Result {
    let all = [args.a() as u32, args.b() as u32, args.c() as u32];
    current().process.ids.change(groups, |set, privileged| set.set_all(all, privileged))?;
    Ok(0)
}

/// `setfsuid(id)`, or `setfsgid`: returns the id before, also after an error.
fn set_file(args: &Args<'_>, groups: bool) -> Result {
    let id = args.a() as u32;
    let ids = &current().process.ids;
    ids.change(groups, |set, privileged| Ok(set.set_file(id, privileged).into()))
}

/// `getgroups(size, list)`.
pub fn getgroups(args: Args<'_>) -> Result {
    let groups = current().process.ids.groups()?;
    let room = args.a() as i32;
    if room < 0 || room != 0 && (room as usize) < groups.len() {
        return Err(Errno::EINVAL);
    }
    if room != 0 {
        for (at, group) in groups.iter().enumerate() {
            user::write(args.b().wrapping_add(4 * at as u64), group)?;
        }
    }
    Ok(groups.len() as u64)
}

/// `setgroups(size, list)`.
pub fn setgroups(args: Args<'_>) -> Result {
    /// The maximum number of groups.
    const MOST: u32 = 65_536;
    privileged()?;
    let size = args.a() as u32;
    if size > MOST {
        return Err(Errno::EINVAL);
    }
    let mut groups = Vec::try_filled(0u32, size as usize)?;
    for (at, group) in groups.iter_mut().enumerate() {
        *group = user::read(args.b().wrapping_add(4 * at as u64))?;
        if *group == SAME {
            return Err(Errno::EINVAL);
        }
    }
    groups.sort_unstable();
    current().process.ids.set_groups(groups);
    Ok(0)
}

const CAPABILITIES: u32 = 0x2008_0522;

/// `capget(header, data)`: root has all capabilities, other users have no capability.
pub fn capget(args: Args<'_>) -> Result {
    const ALL: [u32; 2] = [u32::MAX, 0x1ff];
    let version: u32 = user::read(args.a())?;
    if version != CAPABILITIES {
        user::write(args.a(), &CAPABILITIES)?;
        return if args.b() == 0 { Ok(0) } else { Err(Errno::EINVAL) };
    }
    if args.b() != 0 {
        let [low, high] = if privileged().is_ok() { ALL } else { [0; 2] };
        // Effective, permitted, inheritable; the lower 32 bits first.
        user::write(args.b(), &[low, low, 0, high, high, 0])?;
    }
    Ok(0)
}

/// `capset(header, data)`: accepted from root, without effect. Other users have no capabilities to
/// set.
pub fn capset(args: Args<'_>) -> Result {
    let version: u32 = user::read(args.a())?;
    if version != CAPABILITIES {
        user::write(args.a(), &CAPABILITIES)?;
        return Err(Errno::EINVAL);
    }
    let wanted: [u32; 6] = user::read(args.b())?;
    if wanted != [0; 6] {
        privileged()?;
    }
    Ok(0)
}
