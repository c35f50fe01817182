//! System calls for clocks, sleep and timers.

use super::{Args, Errno, Result};
use crate::abi::{self, Abi};
use crate::signal;
use crate::syscall::args::{Entry, calls};
use crate::task::wait::{Stop, wait_until};
use crate::task::{current, process::TABLE};
use crate::time::clock::{self, Use};
use crate::time::timers::{Key, Notify, Setting};
use crate::time::{self, Clock};
use faultless_bare::arch::user;
use faultless_collections::Arc;
use linux_raw_sys::general as nr;
use linux_raw_sys::general::{
    __kernel_itimerspec, __kernel_old_itimerval, CLOCK_REALTIME, ITIMER_PROF, ITIMER_REAL,
    ITIMER_VIRTUAL, SIGALRM, SIGEV_NONE, SIGEV_SIGNAL, SIGEV_THREAD, SIGEV_THREAD_ID,
    TIMER_ABSTIME,
};

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (nr::__NR_clock_gettime, clock_gettime),
    (nr::__NR_clock_getres, clock_getres),
    (nr::__NR_clock_settime, clock_settime),
    (nr::__NR_adjtimex, adjtimex),
    (nr::__NR_clock_adjtime, clock_adjtime),
    (nr::__NR_gettimeofday, gettimeofday),
    (nr::__NR_time, time),
    (nr::__NR_nanosleep, nanosleep),
    (nr::__NR_clock_nanosleep, clock_nanosleep),
    (nr::__NR_getitimer, getitimer),
    (nr::__NR_setitimer, setitimer),
    (nr::__NR_alarm, alarm),
    (nr::__NR_timer_create, timer_create),
    (nr::__NR_timer_settime, timer_settime),
    (nr::__NR_timer_gettime, timer_gettime),
    (nr::__NR_timer_getoverrun, timer_getoverrun),
    (nr::__NR_timer_delete, timer_delete),
];

/// `clock_gettime(clock, time)`.
pub fn clock_gettime(args: Args<'_>) -> Result {
    let clock = Clock::numbered(args.a() as i32, Use::Read)?;
    let time = clock.read().ok_or(Errno::EINVAL)?;
    user::write(args.b(), &abi::timespec(time))?;
    Ok(0)
}

/// `clock_getres(clock, resolution)`.
pub fn clock_getres(args: Args<'_>) -> Result {
    let resolution = Clock::resolution(args.a() as i32)?;
    if args.b() != 0 {
        user::write(args.b(), &abi::timespec(resolution))?;
    }
    Ok(0)
}

/// `clock_settime(clock, time)`: the clock cannot be set.
pub fn clock_settime(args: Args<'_>) -> Result {
    match Clock::numbered(args.a() as i32, Use::Read)? {
        Clock::Real => {
            abi::read_timespec(args.b())?;
            Err(Errno::EPERM)
        }
        Clock::Monotonic => Err(Errno::EINVAL),
        Clock::Process(_) | Clock::User(_) | Clock::Thread(_) => Err(Errno::EPERM),
    }
}

/// `adjtimex(state)`: the clock cannot be adjusted.
pub fn adjtimex(args: Args<'_>) -> Result {
    adjust(args.a())
}

/// `clock_adjtime(clock, state)`.
pub fn clock_adjtime(args: Args<'_>) -> Result {
    match Clock::numbered(args.a() as i32, Use::Read)? {
        Clock::Real if args.a() as u32 == CLOCK_REALTIME => adjust(args.b()),
        _ => Err(Errno::EOPNOTSUPP),
    }
}

/// Stores the state of an uncorrected clock in the `timex` at `addr`.
fn adjust(addr: u64) -> Result {
    /// `ADJ_OFFSET_SS_READ`: only reads.
    const ASK: u32 = 0xa001;
    /// `STA_UNSYNC`, and the resulting return value `TIME_ERROR`.
    const UNCORRECTED: u64 = 0x40;
    const ERROR: u64 = 5;
    /// The estimated error in microseconds: Linux's maximum, without corrections.
    const WRONG: u64 = 16_000_000;
    let modes: u32 = user::read(addr)?;
    if modes != 0 && modes != ASK {
        return Err(Errno::EPERM);
    }
    let Abi(now) = abi::timeval(clock::wall());
    let (seconds, microseconds) = (now.tv_sec as u64, now.tv_usec as u64);
    // After offset and frequency: errors, status, constant, precision, tolerance, time, and the
    // microseconds of a tick; the other fields describe corrections.
    let words = [0, 0, WRONG, WRONG, UNCORRECTED, 2, 1, 32_768_000, seconds, microseconds, 10_000];
    user::write(addr.wrapping_add(8), &words)?;
    user::write(addr.wrapping_add(8 + 8 * words.len() as u64), &[0u64; 14])?;
    Ok(ERROR)
}

/// `gettimeofday(time, zone)`.
pub fn gettimeofday(args: Args<'_>) -> Result {
    if args.a() != 0 {
        user::write(args.a(), &abi::timeval(clock::wall()))?;
    }
    if args.b() != 0 {
        // Minutes west of Greenwich, and the kind of daylight saving time.
        user::write(args.b(), &[0_u32; 2])?;
    }
    Ok(0)
}

/// `time(seconds)`.
pub fn time(args: Args<'_>) -> Result {
    let seconds = clock::wall_seconds();
    if args.a() != 0 {
        user::write(args.a(), &seconds)?;
    }
    Ok(seconds)
}

/// `nanosleep(time, remaining)`.
pub fn nanosleep(args: Args<'_>) -> Result {
    let duration = abi::read_timespec(args.a())?;
    sleep_for(duration, args.b())
}

/// `clock_nanosleep(clock, flags, time, remaining)`.
pub fn clock_nanosleep(args: Args<'_>) -> Result {
    let clock = Clock::numbered(args.a() as i32, Use::Wait)?;
    if matches!(clock, Clock::Thread(_)) {
        return Err(Errno::EINVAL);
    }
    let wanted = abi::read_timespec(args.c())?;
    let absolute = args.b() as u32 & TIMER_ABSTIME != 0;
    match (clock.since_boot(wanted), absolute) {
        (Some(_), false) => sleep_for(wanted, args.d()),
        (Some(deadline), true) => match wait_until(&[], Some(deadline), || None::<()>) {
            Err(Stop::Signal) => Err(Errno::RESTART_UNHANDLED),
            Ok(()) | Err(Stop::Timeout) => Ok(0),
        },
        (None, _) => sleep_by_run_time(&clock, wanted, absolute),
    }
}

/// Sleeps. If a signal comes, writes the remaining time to `remaining`, unless this is null.
fn sleep_for(duration: u64, remaining: u64) -> Result {
    let deadline = time::deadline_after(duration);
    match wait_until(&[], Some(deadline), || None::<()>) {
        Ok(()) | Err(Stop::Timeout) => Ok(0),
        Err(Stop::Signal) => {
            if remaining != 0 {
                let left = deadline.saturating_sub(time::now());
                user::write(remaining, &abi::timespec(left))?;
            }
            Err(time::interrupted(deadline))
        }
    }
}

/// Sleeps until a CPU-time clock reaches a time. Checks it once for each time slice.
fn sleep_by_run_time(clock: &Clock, wanted: u64, absolute: bool) -> Result {
    let read = || clock.read().ok_or(Errno::EINVAL);
    let until = if absolute { wanted } else { read()?.saturating_add(wanted) };
    loop {
        let left = until.saturating_sub(read()?);
        if left == 0 {
            return Ok(0);
        }
        let look = time::now() + left.min(time::TURN);
        if wait_until(&[], Some(look), || None::<()>) == Err(Stop::Signal) {
            return Err(Errno::EINTR);
        }
    }
}

fn interval_timer(which: u64) -> Result<Key> {
    match which as u32 {
        ITIMER_REAL => Ok(Key::Real),
        ITIMER_VIRTUAL => Ok(Key::Virtual),
        ITIMER_PROF => Ok(Key::Profile),
        _ => Err(Errno::EINVAL),
    }
}

const fn itimerval(setting: Setting) -> Abi<__kernel_old_itimerval> {
    Abi(__kernel_old_itimerval {
        it_interval: abi::timeval(setting.interval).0,
        // Rounded up, because 0 means a stopped timer.
        it_value: abi::timeval(match setting.value {
            1..1_000 => 1_000,
            value => value,
        })
        .0,
    })
}

pub(super) const fn itimerspec(setting: Setting) -> Abi<__kernel_itimerspec> {
    Abi(__kernel_itimerspec {
        it_interval: abi::timespec(setting.interval).0,
        it_value: abi::timespec(setting.value).0,
    })
}

/// `getitimer(which, value)`.
pub fn getitimer(args: Args<'_>) -> Result {
    let key = interval_timer(args.a())?;
    let setting = current().process.timers.get(key)?;
    user::write(args.b(), &itimerval(setting))?;
    Ok(0)
}

/// `setitimer(which, new, old)`: a null `new` counts as 0.
pub fn setitimer(args: Args<'_>) -> Result {
    let new = match args.b() {
        0 => Setting::default(),
        at => {
            let Abi(new): Abi<__kernel_old_itimerval> = user::read(at)?;
            Setting {
                value: abi::nanoseconds_of_timeval(&new.it_value)?,
                interval: abi::nanoseconds_of_timeval(&new.it_interval)?,
            }
        }
    };
    let key = interval_timer(args.a())?;
    let old = time::set_timer(&current().process, key, new, false)?;
    if args.c() != 0 {
        user::write(args.c(), &itimerval(old))?;
    }
    Ok(0)
}

/// `alarm(seconds)`.
pub fn alarm(args: Args<'_>) -> Result {
    let new = Setting { value: u64::from(args.a() as u32) * abi::SECOND, interval: 0 };
    let left = time::set_timer(&current().process, Key::Real, new, false)?.value;
    // Rounded, but not to 0, which means a stopped timer.
    let rounded = (left + abi::SECOND / 2) / abi::SECOND;
    Ok(if left == 0 { 0 } else { rounded.max(1) })
}

/// The part of `sigevent` read by the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct Event {
    value: u64,
    signal: i32,
    notify: i32,
    thread: i32,
    unused: [u32; 11],
}
// SAFETY: integers without padding.
unsafe impl user::Plain for Event {}
const _: () = assert!(size_of::<Event>() == size_of::<linux_raw_sys::general::sigevent_t>());

/// `timer_create(clock, event, id)`.
pub fn timer_create(args: Args<'_>) -> Result {
    let clock = Clock::numbered(args.a() as i32, Use::Wait)?;
    let own = &current().process;
    let of_own = match &clock {
        Clock::Real | Clock::Monotonic => true,
        Clock::Process(process) | Clock::User(process) => process.as_ptr() == Arc::as_ptr(own),
        // Threads of other processes have already failed.
        Clock::Thread(_) => true,
    };
    if !of_own {
        return Err(Errno::EINVAL);
    }
    let event: Option<Event> = if args.b() == 0 { None } else { Some(user::read(args.b())?) };
    let notify = match event {
        None => None,
        Some(event) => Some(notification(&event)?),
    };
    let id = own
        .timers
        .create(clock, |id| notify.unwrap_or(Notify::Process(SIGALRM, u64::from(id as u32))))?;
    if let Err(fault) = user::write(args.c(), &id) {
        own.timers.delete(id)?;
        return Err(fault.into());
    }
    Ok(0)
}

fn notification(event: &Event) -> Result<Notify> {
    let signal = || signal::number(event.signal as u64).ok_or(Errno::EINVAL);
    // `SIGEV_THREAD` is implemented by the C library, and is an ordinary signal here.
    const THREAD_ID: u32 = SIGEV_SIGNAL | SIGEV_THREAD_ID;
    match event.notify as u32 {
        SIGEV_NONE => Ok(Notify::Nobody),
        SIGEV_SIGNAL | SIGEV_THREAD => Ok(Notify::Process(signal()?, event.value)),
        THREAD_ID => {
            let number = u32::try_from(event.thread).map_err(|_| Errno::EINVAL)?;
            let thread = TABLE.lock().threads.get(&number).cloned();
            let thread = thread
                .filter(|thread| Arc::ptr_eq(&thread.process, &current().process))
                .ok_or(Errno::EINVAL)?;
            Ok(Notify::Thread(Arc::downgrade(&thread), signal()?, event.value))
        }
        _ => Err(Errno::EINVAL),
    }
}

fn created(id: u64) -> Key {
    Key::Created(id as i32)
}

/// The setting of a timer in the program's memory.
pub(super) fn read_itimerspec(addr: u64) -> Result<Setting> {
    let Abi(new): Abi<__kernel_itimerspec> = user::read(addr)?;
    Ok(Setting {
        value: abi::nanoseconds(&new.it_value)?,
        interval: abi::nanoseconds(&new.it_interval)?,
    })
}

/// `timer_settime(id, flags, new, old)`.
pub fn timer_settime(args: Args<'_>) -> Result {
    if args.c() == 0 {
        return Err(Errno::EINVAL);
    }
    let new = read_itimerspec(args.c())?;
    let absolute = args.b() as u32 & TIMER_ABSTIME != 0;
    let old = time::set_timer(&current().process, created(args.a()), new, absolute)?;
    if args.d() != 0 {
        user::write(args.d(), &itimerspec(old))?;
    }
    Ok(0)
}

/// `timer_gettime(id, value)`.
pub fn timer_gettime(args: Args<'_>) -> Result {
    let setting = current().process.timers.get(created(args.a()))?;
    user::write(args.b(), &itimerspec(setting))?;
    Ok(0)
}

/// `timer_getoverrun(id)`.
pub fn timer_getoverrun(args: Args<'_>) -> Result {
    Ok(current().process.timers.overrun(created(args.a()))? as u64)
}

/// `timer_delete(id)`.
pub fn timer_delete(args: Args<'_>) -> Result {
    current().process.timers.delete(args.a() as i32)?;
    Ok(0)
}
