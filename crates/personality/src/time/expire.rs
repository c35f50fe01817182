//! Setting and expiry of the timers of a process.

use super::clock::Clock;
use super::deadline::{Key, cancel};
use super::timers::{FIXED, Notify, Setting, Timer};
use crate::errno::{Errno, Result};
use crate::signal::{self, Info};
use crate::task::Process;
use core::sync::atomic::Ordering;
use faultless_collections::Arc;
use linux_raw_sys::general::{SIGALRM, SIGPROF, SIGVTALRM};

/// The minimum interval between two services of a timer, in nanoseconds; a faster timer overruns.
const OFTEN: u64 = 50_000;

/// Sets a timer of `process` and returns the old setting. With `absolute`, `value` is a time of the
/// timer's clock rather than a duration.
///
/// # Errors
/// `EINVAL` for an unknown timer.
pub fn set_timer(
    process: &Arc<Process>,
    key: Key,
    new: Setting,
    absolute: bool,
) -> Result<Setting> {
    let mut timers = process.timers.timers.lock();
    if let Some(at) = FIXED.iter().position(|&fixed| fixed == key) {
        timers.fixed[at].get_or_insert_with(|| {
            let own = || Arc::downgrade(process);
            let (clock, signal, alarm) = match key {
                Key::Virtual => (Clock::User(own()), SIGVTALRM, None),
                Key::Profile => (Clock::Process(own()), SIGPROF, None),
                _ => (Clock::Monotonic, SIGALRM, Some(process.timers.real.clone())),
            };
            Timer::new(clock, Notify::Process(signal, 0), alarm)
        });
    }
    let timer = timers.get_mut(key).ok_or(Errno::EINVAL)?;
    let old = timer.setting();
    timer.stop();
    timer.interval = new.interval;
    timer.overrun = 0;
    if new.value != 0 {
        let start = if absolute { Some(0) } else { timer.clock.read() };
        timer.expiry = start.map(|start| start.saturating_add(new.value));
        timer.start(process, key);
    }
    Ok(old)
}

/// Sends the signal of an expired timer, and sets the timer for the next expiry.
pub(super) fn expire(process: &Arc<Process>, key: Key) {
    let (notify, missed) = {
        let mut timers = process.timers.timers.lock();
        let Some(timer) = timers.get_mut(key) else { return };
        let (Some(expiry), Some(now)) = (timer.expiry, timer.clock.read()) else { return };
        if now < expiry {
            // The timer was set again before this expiry was served.
            return;
        }
        // The timer may have been set again, and may already be due: then the timer is in the
        // queue.
        if let Some(queued) = timer.queued.take() {
            cancel(queued);
        }
        let mut missed = 0;
        timer.expiry = match timer.interval {
            0 => None,
            interval => {
                let next = if interval < OFTEN { now.saturating_add(OFTEN) } else { now };
                missed = (next - expiry) / interval;
                Some(expiry.saturating_add(interval.saturating_mul(missed + 1)))
            }
        };
        timer.start(process, key);
        (timer.notify.clone(), i32::try_from(missed).unwrap_or(i32::MAX))
    };
    let info = |signal, value| match key {
        Key::Created(number) => Info::timer(signal, number, missed, value),
        _ => Info::kernel(signal),
    };
    match notify {
        Notify::Nobody => {}
        Notify::Process(signal, value) => signal::send_process(process, info(signal, value)),
        Notify::Thread(thread, signal, value) => {
            if let Some(thread) = thread.upgrade() {
                signal::send_thread(&thread, info(signal, value));
            }
        }
    }
}

/// Serves the timers of the running process on CPU time, and returns the nanoseconds of CPU time
/// until the next expiry.
pub(super) fn check_run_time(process: &Arc<Process>) -> u64 {
    let own = &process.timers;
    if !own.on_run_time.load(Ordering::Relaxed) {
        return u64::MAX;
    }
    // One timer at a time: an expiry locks the timers itself.
    let mut running = {
        let mut last = None;
        move || {
            let (key, left) = own.timers.lock().running_after(last)?;
            last = Some(key);
            Some((key, left))
        }
    };
    let mut soonest = None::<u64>;
    while let Some((key, mut left)) = running() {
        if left == 0 {
            expire(process, key);
            let again = own.timers.lock().left(key);
            let Some(again) = again else { continue };
            left = again;
        }
        soonest = Some(soonest.map_or(left, |soonest| soonest.min(left)));
    }
    own.on_run_time.store(soonest.is_some(), Ordering::Relaxed);
    soonest.unwrap_or(u64::MAX)
}
