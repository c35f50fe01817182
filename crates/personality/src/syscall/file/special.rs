//! Timers and signals as files.

use super::open::add;
use super::{Args, Errno, Result, file};
use crate::fs::File;
use crate::fs::inode::Body;
use crate::fs::signals::SignalFile;
use crate::fs::timer::TimerFile;
use crate::signal::Set;
use crate::syscall::args::{Entry, calls};
use crate::syscall::time::{itimerspec, read_itimerspec};
use crate::time::Clock;
use crate::time::clock::Use;
use core::any::Any;
use faultless_bare::arch::user;
use faultless_collections::Arc;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_timerfd_create, timerfd_create),
    (nr::__NR_timerfd_settime, timerfd_settime),
    (nr::__NR_timerfd_gettime, timerfd_gettime),
    (nr::__NR_signalfd, signalfd),
    (nr::__NR_signalfd4, signalfd4),
];

/// The stream of a file, as type `T`.
fn of<T: Any>(file: &File) -> Result<&T> {
    let stream: &dyn Any = &**file.stream().ok_or(Errno::EINVAL)?;
    stream.downcast_ref().ok_or(Errno::EINVAL)
}

/// `timerfd_create(clock, flags)`.
pub fn timerfd_create(args: Args<'_>) -> Result {
    let (clock, flags) = (args.a() as u32, args.b() as u32);
    let counts = matches!(
        clock,
        nr::CLOCK_REALTIME
            | nr::CLOCK_MONOTONIC
            | nr::CLOCK_BOOTTIME
            | nr::CLOCK_REALTIME_ALARM
            | nr::CLOCK_BOOTTIME_ALARM
    );
    if !counts || flags & !nr::TFD_CREATE_FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    let timer = TimerFile::try_new(Clock::numbered(clock as i32, Use::Read)?)?;
    add(Body::Anonymous("[timerfd]"), timer, nr::O_RDWR | flags)
}

/// `timerfd_settime(fd, flags, new, old)`.
pub fn timerfd_settime(args: Args<'_>) -> Result {
    let flags = args.b() as u32;
    // The clock cannot be set, so no timer is cancelled.
    if flags & !(nr::TFD_TIMER_ABSTIME | nr::TFD_TIMER_CANCEL_ON_SET) != 0 {
        return Err(Errno::EINVAL);
    }
    let new = read_itimerspec(args.c())?;
    let file = file(args.a())?;
    let old = of::<TimerFile>(&file)?.set(new, flags & nr::TFD_TIMER_ABSTIME != 0);
    if args.d() != 0 {
        user::write(args.d(), &itimerspec(old))?;
    }
    Ok(0)
}

/// `timerfd_gettime(fd, value)`.
pub fn timerfd_gettime(args: Args<'_>) -> Result {
    let file = file(args.a())?;
    user::write(args.b(), &itimerspec(of::<TimerFile>(&file)?.setting()))?;
    Ok(0)
}

/// `signalfd(fd, set, size)`.
pub fn signalfd(args: Args<'_>) -> Result {
    make_signals(&args, 0)
}

/// `signalfd4(fd, set, size, flags)`.
pub fn signalfd4(args: Args<'_>) -> Result {
    let flags = args.d() as u32;
    make_signals(&args, flags)
}

/// Makes a descriptor for a set of signals, or changes the set of a descriptor.
fn make_signals(args: &Args<'_>, flags: u32) -> Result {
    /// `SFD_CLOEXEC`, `SFD_NONBLOCK`
    const KNOWN: u32 = nr::O_CLOEXEC | nr::O_NONBLOCK;
    if args.c() != size_of::<Set>() as u64 || flags & !KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    let set: Set = user::read(args.b())?;
    if args.a() as i32 == -1 {
        let signals: Arc<SignalFile> = SignalFile::try_new(set)?;
        return add(Body::Anonymous("[signalfd]"), signals, nr::O_RDWR | flags);
    }
    let file = file(args.a())?;
    of::<SignalFile>(&file)?.set(set);
    Ok(u64::from(args.a() as u32))
}
