//! System calls that wait for several files.

use super::{Args, Errno, Result, file, files};
use crate::fs::File;
use crate::fs::epoll::{self, Told};
use crate::fs::poll::{ready, wait_for};
use crate::fs::stream::Events;
use crate::signal;
use crate::syscall::args::{Entry, calls};
use crate::time::deadline_after;
use faultless_bare::arch::{clock, user};
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_poll, poll),
    (nr::__NR_ppoll, ppoll),
    (nr::__NR_select, select),
    (nr::__NR_pselect6, pselect),
    (nr::__NR_epoll_ctl, epoll_ctl),
    (nr::__NR_epoll_wait, epoll_wait),
    (nr::__NR_epoll_pwait, epoll_pwait),
    (nr::__NR_epoll_pwait2, epoll_pwait2),
];

fn after_milliseconds(timeout: i32) -> Option<u64> {
    u64::try_from(timeout).ok().map(|ms| deadline_after(ms * 1_000_000))
}

/// A time in the program's memory: seconds, and fractions of which `in_second` make one.
fn time(addr: u64, in_second: i64) -> Result<Option<u64>> {
    if addr == 0 {
        return Ok(None);
    }
    let [seconds, part]: [i64; 2] = user::read(addr)?;
    if seconds < 0 || part < 0 || in_second == 1_000_000_000 && part >= in_second {
        return Err(Errno::EINVAL);
    }
    let ns = (seconds as u64).saturating_mul(1_000_000_000);
    let part = (part as u64).saturating_mul((1_000_000_000 / in_second) as u64);
    Ok(Some(deadline_after(ns.saturating_add(part))))
}

/// Stores the remaining time in the program's memory.
fn tell_left(addr: u64, deadline: Option<u64>, in_second: u64) -> Result<()> {
    let Some(deadline) = deadline else { return Ok(()) };
    let left = deadline.saturating_sub(clock::now());
    let part = left % 1_000_000_000 / (1_000_000_000 / in_second);
    Ok(user::write(addr, &[left / 1_000_000_000, part])?)
}

/// Makes a call with the signal mask at `addr`, if `addr` is not null.
fn masked(addr: u64, size: u64, call: impl FnOnce() -> Result) -> Result {
    if addr == 0 {
        return call();
    }
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    signal::with_blocked(user::read(addr)?, call)
}

/// `struct pollfd`.
struct Watched {
    file: Option<Arc<File>>,
    negative: bool,
    wanted: Events,
}

impl Watched {
    fn ready(&self) -> Events {
        match &self.file {
            Some(file) => ready(file, self.wanted),
            None if self.negative => Events::empty(),
            None => Events::NVAL,
        }
    }
}

fn poll_until(addr: u64, count: u64, deadline: Option<u64>) -> Result {
    let limit = crate::task::current().process.limits.rows.lock()[nr::RLIMIT_NOFILE as usize][0];
    if count > limit {
        return Err(Errno::EINVAL);
    }
    let mut watched = Vec::try_with_capacity(count as usize)?;
    for at in 0..count {
        let [low, high]: [u32; 2] = user::read(addr.wrapping_add(at * 8))?;
        let wanted = Events::from_bits_truncate(high & 0xffff);
        let fd = low as i32;
        watched.try_push(Watched { file: files().get(fd).ok(), negative: fd < 0, wanted })?;
    }
    let any = || watched.iter().any(|watched| !watched.ready().is_empty()).then_some(());
    wait_for(watched.iter().filter_map(|watched| watched.file.as_ref()), deadline, any)?;
    let mut count = 0;
    for (at, watched) in watched.iter().enumerate() {
        let told = watched.ready().bits() as u16;
        count += u64::from(told != 0);
        user::write(addr.wrapping_add(at as u64 * 8 + 6), &told)?;
    }
    Ok(count)
}

/// `poll(files, count, milliseconds)`.
pub fn poll(args: Args<'_>) -> Result {
    poll_until(args.a(), args.b() & 0xffff_ffff, after_milliseconds(args.c() as i32))
}

/// `ppoll(files, count, time, mask, mask_size)`.
pub fn ppoll(args: Args<'_>) -> Result {
    let deadline = time(args.c(), 1_000_000_000)?;
    let result =
        masked(args.d(), args.e(), || poll_until(args.a(), args.b() & 0xffff_ffff, deadline));
    if args.c() != 0 {
        tell_left(args.c(), deadline, 1_000_000_000)?;
    }
    result
}

/// The events of `select`'s three sets: requested, and reported.
const SETS: [(Events, Events); 3] = [
    (Events::READ, Events::READ.union(Events::HUP).union(Events::ERR)),
    (Events::WRITE, Events::WRITE.union(Events::ERR)),
    (Events::empty(), Events::empty()),
];

fn select_until(count: u64, sets: [u64; 3], deadline: Option<u64>) -> Result {
    /// The maximum number of descriptors in a set (`FD_SETSIZE`).
    const MOST: u64 = 1024;
    if count as i32 > MOST as i32 || (count as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let words = (count as u32 as usize).div_ceil(64);
    let mut masks = [[0u64; MOST as usize / 64]; 3];
    for (mask, addr) in masks.iter_mut().zip(sets) {
        for (at, word) in mask.iter_mut().enumerate().take(words).filter(|_| addr != 0) {
            *word = user::read(addr + at as u64 * 8)?;
        }
    }
    let has = |mask: &[u64], fd: usize| mask[fd / 64] & 1 << (fd % 64) != 0;
    let mut watched = Vec::new();
    for fd in 0..count as u32 as usize {
        if masks.iter().any(|mask| has(mask, fd)) {
            watched.try_push((fd, file(fd as u64)?))?;
        }
    }
    let told = |fd: usize, file: &File| {
        let now = file.ready();
        core::array::from_fn::<bool, 3, _>(|at| has(&masks[at], fd) && now.intersects(SETS[at].1))
    };
    let any = || watched.iter().any(|(fd, file)| told(*fd, file).contains(&true)).then_some(());
    wait_for(watched.iter().map(|(_, file)| file), deadline, any)?;
    let mut result = [[0u64; MOST as usize / 64]; 3];
    let mut sum = 0;
    for (fd, file) in &watched {
        for (at, is) in told(*fd, file).into_iter().enumerate().filter(|&(_, is)| is) {
            result[at][fd / 64] |= u64::from(is) << (fd % 64);
            sum += 1;
        }
    }
    for (mask, addr) in result.iter().zip(sets).filter(|&(_, addr)| addr != 0) {
        for (at, word) in mask.iter().enumerate().take(words) {
            user::write(addr + at as u64 * 8, word)?;
        }
    }
    Ok(sum)
}

/// `select(count, read, write, except, time)`.
pub fn select(args: Args<'_>) -> Result {
    let deadline = time(args.e(), 1_000_000)?;
    let result = select_until(args.a(), [args.b(), args.c(), args.d()], deadline);
    if args.e() != 0 {
        tell_left(args.e(), deadline, 1_000_000)?;
    }
    result
}

/// `pselect6(count, read, write, except, time, mask)`.
pub fn pselect(args: Args<'_>) -> Result {
    let deadline = time(args.e(), 1_000_000_000)?;
    let [mask, size] = if args.f() == 0 { [0; 2] } else { user::read(args.f())? };
    let result =
        masked(mask, size, || select_until(args.a(), [args.b(), args.c(), args.d()], deadline));
    if args.e() != 0 {
        tell_left(args.e(), deadline, 1_000_000_000)?;
    }
    result
}

/// `epoll_ctl(epoll, operation, fd, event)`.
pub fn epoll_ctl(args: Args<'_>) -> Result {
    let set = file(args.a())?;
    let file = file(args.c())?;
    let epoll = epoll::of(&set)?;
    let fd = args.c() as i32;
    let told = || -> Result<Told> {
        let [events, low, high]: [u32; 3] = user::read(args.d())?;
        Ok(Told { events, data: u64::from(low) | u64::from(high) << 32 })
    };
    match args.b() as u32 {
        nr::EPOLL_CTL_ADD => epoll.set(fd, &file, told()?, false)?,
        nr::EPOLL_CTL_MOD => epoll.set(fd, &file, told()?, true)?,
        nr::EPOLL_CTL_DEL => epoll.remove(fd, &file)?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

fn epoll_until(args: &Args<'_>, deadline: Option<u64>) -> Result {
    /// The maximum number of events of one call.
    const MOST: usize = 1024;
    let most = usize::try_from(args.c() as i32).ok().filter(|&most| most != 0);
    let most = most.filter(|&most| most <= i32::MAX as usize / 12).ok_or(Errno::EINVAL)?;
    super::rw::check_user(args.b(), most as u64 * 12)?;
    let most = most.min(MOST);
    let set = file(args.a())?;
    epoll::of(&set)?.wait(most, deadline, |at, told| {
        let event = [told.events, told.data as u32, (told.data >> 32) as u32];
        Ok(user::write(args.b().wrapping_add(at * 12), &event)?)
    })
}

/// `epoll_wait(epoll, events, most, milliseconds)`.
pub fn epoll_wait(args: Args<'_>) -> Result {
    epoll_until(&args, after_milliseconds(args.d() as i32))
}

/// `epoll_pwait(epoll, events, most, milliseconds, mask, mask_size)`.
pub fn epoll_pwait(args: Args<'_>) -> Result {
    let deadline = after_milliseconds(args.d() as i32);
    masked(args.e(), args.f(), || epoll_until(&args, deadline))
}

/// `epoll_pwait2(epoll, events, most, time, mask, mask_size)`.
pub fn epoll_pwait2(args: Args<'_>) -> Result {
    let deadline = time(args.d(), 1_000_000_000)?;
    masked(args.e(), args.f(), || epoll_until(&args, deadline))
}
