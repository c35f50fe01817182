//! System calls for scheduling. The scheduler is round-robin: policies and nice values are only
//! read back.

use super::process::thread_or_own;
use super::{Args, Errno, Result};
use crate::syscall::args::{Entry, calls};
use crate::task::ids::{may_schedule, privileged};
use crate::task::process;
use crate::task::schedule::Schedule;
use crate::task::{Process, Thread, current, scheduler};
use core::sync::atomic::Ordering;
use faultless_bare::arch::user;
use faultless_bare::percpu;
use faultless_collections::Arc;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (nr::__NR_sched_yield, sched_yield),
    (nr::__NR_sched_setaffinity, sched_setaffinity),
    (nr::__NR_sched_getaffinity, sched_getaffinity),
    (nr::__NR_sched_setscheduler, sched_setscheduler),
    (nr::__NR_sched_getscheduler, sched_getscheduler),
    (nr::__NR_sched_setparam, sched_setparam),
    (nr::__NR_sched_getparam, sched_getparam),
    (nr::__NR_sched_getattr, sched_getattr),
    (nr::__NR_sched_setattr, sched_setattr),
    (nr::__NR_ioprio_get, ioprio_get),
    (nr::__NR_ioprio_set, ioprio_set),
    (nr::__NR_sched_get_priority_max, |args| sched_get_priority(args, 99)),
    (nr::__NR_sched_get_priority_min, |args| sched_get_priority(args, 1)),
    (nr::__NR_sched_rr_get_interval, sched_rr_get_interval),
    (nr::__NR_getpriority, getpriority),
    (nr::__NR_setpriority, setpriority),
    (nr::__NR_getcpu, getcpu),
];

/// Bytes of a CPU set, with a bit for each possible CPU.
const SET: u64 = 8;

/// `sched_yield()`.
pub fn sched_yield(_: Args<'_>) -> Result {
    scheduler::yield_now();
    Ok(0)
}

/// The existing CPUs, as bits.
fn all_cpus() -> u64 {
    u64::MAX >> (u64::BITS as usize - percpu::cpus())
}

/// `sched_setaffinity(tid, size, set)`.
pub fn sched_setaffinity(args: Args<'_>) -> Result {
    let len = args.b().min(SET) as usize;
    let mut bytes = [0; SET as usize];
    user::read_bytes(&mut bytes[..len], args.c())?;
    let thread = thread_or_own(args.a())?;
    if !may_schedule(&thread.process) {
        privileged()?;
    }
    let set = u64::from_le_bytes(bytes) & all_cpus();
    if set == 0 {
        return Err(Errno::EINVAL);
    }
    thread.affinity.store(set, Ordering::SeqCst);
    // Makes the thread leave a CPU that is now excluded.
    scheduler::notify(&thread);
    Ok(0)
}

/// `sched_getaffinity(tid, size, set)`.
pub fn sched_getaffinity(args: Args<'_>) -> Result {
    if args.b() < SET || !args.b().is_multiple_of(SET) {
        return Err(Errno::EINVAL);
    }
    let set = thread_or_own(args.a())?.affinity.load(Ordering::Relaxed) & all_cpus();
    user::write(args.c(), &set)?;
    Ok(SET)
}

/// `getcpu(cpu, node)`. All CPUs are in node 0; other nodes have only memory.
pub fn getcpu(args: Args<'_>) -> Result {
    if args.a() != 0 {
        user::write(args.a(), &u32::from(percpu::id().0))?;
    }
    if args.b() != 0 {
        user::write(args.b(), &0u32)?;
    }
    Ok(0)
}

/// The thread of a scheduling call.
fn thread(tid: u64) -> Result<Arc<Thread>> {
    if (tid as i32) < 0 { Err(Errno::EINVAL) } else { thread_or_own(tid) }
}

/// `sched_getscheduler(tid)`.
pub fn sched_getscheduler(args: Args<'_>) -> Result {
    Ok(thread(args.a())?.schedule.lock().word().into())
}

/// `sched_setscheduler(tid, policy, parameters)`: policies without priorities are accepted.
pub fn sched_setscheduler(args: Args<'_>) -> Result {
    if args.c() == 0 || (args.b() as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let priority: i32 = user::read(args.c())?;
    let thread = thread(args.a())?;
    let (word, nice) = (args.b() as u32, thread.schedule.lock().nice);
    let policy = word & !nr::SCHED_RESET_ON_FORK;
    set_schedule(&thread, Schedule { policy, nice, resets: policy != word }, priority)
}

/// Sets the schedule of `thread`, if its policy is accepted: policies without priorities are
/// accepted.
fn set_schedule(thread: &Thread, new: Schedule, priority: i32) -> Result {
    match new.policy {
        nr::SCHED_NORMAL | nr::SCHED_BATCH | nr::SCHED_IDLE if priority == 0 => {}
        nr::SCHED_FIFO | nr::SCHED_RR if (1..=99).contains(&priority) => return Err(Errno::EPERM),
        _ => return Err(Errno::EINVAL),
    }
    let mut schedule = thread.schedule.lock();
    let old = *schedule;
    // As on Linux, leaving `SCHED_IDLE` requires the permission to set the present nice value.
    let leaves = old.policy == nr::SCHED_IDLE && new.policy != nr::SCHED_IDLE;
    let refused =
        new.nice < old.nice && !may_have(thread, new.nice) || leaves && !may_have(thread, old.nice);
    let clears = old.resets && !new.resets;
    if !may_schedule(&thread.process) || refused || clears {
        privileged()?;
    }
    *schedule = new;
    Ok(0)
}

/// `sched_getparam(tid, parameters)`.
pub fn sched_getparam(args: Args<'_>) -> Result {
    if args.b() == 0 {
        return Err(Errno::EINVAL);
    }
    thread(args.a())?;
    user::write(args.b(), &0i32)?;
    Ok(0)
}

/// `sched_setparam(tid, parameters)`.
pub fn sched_setparam(args: Args<'_>) -> Result {
    if args.b() == 0 {
        return Err(Errno::EINVAL);
    }
    let priority: i32 = user::read(args.b())?;
    let thread = thread(args.a())?;
    let same = *thread.schedule.lock();
    set_schedule(&thread, same, priority)
}

/// `sched_get_priority_max(policy)`, and `min`.
pub fn sched_get_priority(args: Args<'_>, of_real_time: u64) -> Result {
    match args.a() as u32 {
        nr::SCHED_FIFO | nr::SCHED_RR => Ok(of_real_time),
        nr::SCHED_NORMAL | nr::SCHED_BATCH | nr::SCHED_IDLE | nr::SCHED_DEADLINE => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

/// `sched_rr_get_interval(tid, time)`.
pub fn sched_rr_get_interval(args: Args<'_>) -> Result {
    thread_or_own(args.a())?;
    user::write(args.b(), &[0, crate::time::TURN])?;
    Ok(0)
}

/// `sched_getattr(tid, attributes, size, flags)`.
pub fn sched_getattr(args: Args<'_>) -> Result {
    /// Size, policy, flags, nice, priority, runtime, deadline, period.
    const FIRST_SIZE: u64 = 48;
    if args.b() == 0 || !(FIRST_SIZE..=faultless::PAGE_SIZE).contains(&args.c()) || args.d() != 0 {
        return Err(Errno::EINVAL);
    }
    let schedule = *thread(args.a())?.schedule.lock();
    let mut words = [0u64; FIRST_SIZE as usize / 8];
    words[0] = FIRST_SIZE | u64::from(schedule.policy) << 32;
    words[1] = u64::from(schedule.resets) * u64::from(nr::SCHED_FLAG_RESET_ON_FORK);
    words[2] = u64::from(schedule.nice as u32);
    user::write(args.b(), &words)?;
    Ok(0)
}

/// `sched_setattr(tid, attributes, flags)`: as `sched_setscheduler`.
pub fn sched_setattr(args: Args<'_>) -> Result {
    /// Size and policy, flags, nice and priority, runtime, deadline, period.
    const FIRST_SIZE: u32 = 48;
    if args.b() == 0 || args.c() != 0 {
        return Err(Errno::EINVAL);
    }
    let size = match user::read::<u32>(args.b())? {
        0 => FIRST_SIZE,
        size => size,
    };
    if size < FIRST_SIZE || u64::from(size) > faultless::PAGE_SIZE {
        user::write(args.b(), &FIRST_SIZE)?;
        return Err(Errno::E2BIG);
    }
    let words: [u64; FIRST_SIZE as usize / 8] = user::read(args.b())?;
    let (policy, priority) = ((words[0] >> 32) as u32, (words[2] >> 32) as i32);
    let thread = thread(args.a())?;
    let flags = words[1];
    if flags & !u64::from(nr::SCHED_FLAG_ALL) != 0 {
        return Err(Errno::EINVAL);
    }
    let has = |flag: u32| flags & u64::from(flag) != 0;
    let mut new = *thread.schedule.lock();
    if !has(nr::SCHED_FLAG_KEEP_POLICY) {
        (new.policy, new.resets) = (policy, has(nr::SCHED_FLAG_RESET_ON_FORK));
    }
    // As on Linux, `SCHED_IDLE` keeps the nice value.
    if !has(nr::SCHED_FLAG_KEEP_PARAMS) && new.policy != nr::SCHED_IDLE {
        new.nice = (words[2] as i32).clamp(LEAST, MOST);
    }
    set_schedule(&thread, new, priority)
}

/// `ioprio_get(which, who)`: all processes have Linux's default priority.
pub fn ioprio_get(args: Args<'_>) -> Result {
    const USUAL: u64 = 2 << 13 | 4;
    const PROCESS: u64 = 1;
    match args.a() {
        PROCESS => thread_or_own(args.b()).map(|_| USUAL),
        2 | 3 => Ok(USUAL),
        _ => Err(Errno::EINVAL),
    }
}

/// `ioprio_set(which, who, priority)`: accepted.
pub fn ioprio_set(args: Args<'_>) -> Result {
    let (class, level) = ((args.c() as u32) >> 13 & 7, args.c() as u32 & 0x1fff);
    if class > 3 || class == 0 && level != 0 {
        return Err(Errno::EINVAL);
    }
    ioprio_get(args).map(|_| 0)
}

/// Whether `RLIMIT_NICE` lets `thread` have a nice value without privileges.
fn may_have(thread: &Thread, nice: i32) -> bool {
    (20 - nice) as u64 <= thread.process.limits.soft(nr::RLIMIT_NICE)
}

/// The range of nice values.
const LEAST: i32 = -20;
/// See [`LEAST`].
const MOST: i32 = 19;

/// Calls `each` with the threads selected by the arguments `which` and `who` of `getpriority`.
/// Returns the first error.
fn each_of(which: u64, who: u64, mut each: impl FnMut(&Thread) -> Result<()>) -> Result<()> {
    const PROCESS: u64 = 0;
    const GROUP: u64 = 1;
    const USER: u64 = 2;
    let own = current();
    let who = who as u32;
    let group = if who == 0 { own.process.relatives.group.load(Ordering::Relaxed) } else { who };
    let user = if who == 0 { own.process.ids.user().real } else { who };
    let is_meant: &dyn Fn(&Process) -> bool = match which {
        PROCESS => return each(&*thread_or_own(who.into())?),
        GROUP => &|process| process.relatives.group.load(Ordering::Relaxed) == group,
        USER => &|process| process.ids.user().real == user,
        _ => return Err(Errno::EINVAL),
    };
    let (mut found, mut result) = (false, Ok(()));
    process::each(|process| {
        if is_meant(process) {
            for thread in process.threads.lock().iter() {
                found = true;
                result = result.and(each(thread));
            }
        }
    });
    if found { result } else { Err(Errno::ESRCH) }
}

/// `getpriority(which, who)`: returns 20 minus the least nice value.
pub fn getpriority(args: Args<'_>) -> Result {
    let mut least = MOST;
    each_of(args.a(), args.b(), |thread| {
        least = least.min(thread.schedule.lock().nice);
        Ok(())
    })?;
    Ok((20 - least) as u64)
}

/// `setpriority(which, who, nice)`.
pub fn setpriority(args: Args<'_>) -> Result {
    let nice = (args.c() as i32).clamp(LEAST, MOST);
    each_of(args.a(), args.b(), |thread| {
        if !may_schedule(&thread.process) {
            return Err(Errno::EPERM);
        }
        let mut schedule = thread.schedule.lock();
        if nice < schedule.nice && !may_have(thread, nice) && privileged().is_err() {
            return Err(Errno::EACCES);
        }
        schedule.nice = nice;
        Ok(())
    })?;
    Ok(0)
}
