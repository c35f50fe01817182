//! The timers of a process: the three of `setitimer`, and those of `timer_create`.
//!
//! A timer on a clock that always runs stands in the queue of a CPU. A timer on CPU time is looked at
//! whenever the timer interrupt finds its process running.
//!
//! *Overruns.* The signal of a timer waits at most once: if it still does when the timer expires again,
//! its overrun count grows instead.

use super::Clock;
use super::queue::{Due, TimerId};
use crate::signal::{self, Info};
use crate::sync::Mutex;
use crate::syscall::{Errno, Result};
use crate::task::{Process, Thread};
use alloc::collections::BTreeMap;
use alloc::collections::btree_map::Entry;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};
use linux_raw_sys::general::{SIGALRM, SIGPROF, SIGVTALRM};

/// Names a timer of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// `ITIMER_REAL`.
    Real,
    /// `ITIMER_VIRTUAL`.
    Virtual,
    /// `ITIMER_PROF`.
    Profile,
    /// One of `timer_create`.
    Created(i32),
}

/// What happens when a timer expires.
#[derive(Clone, Debug)]
pub enum Notify {
    /// Nothing: it is only asked for its time.
    Nobody,
    /// The process gets this signal, and this value.
    Process(u32, u64),
    /// A thread of it gets them.
    Thread(Weak<Thread>, u32, u64),
}

/// What a timer shows and is set to, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// Until it expires; 0 if it does not run.
    pub value: u64,
    /// From one expiry to the next; 0 if it expires once.
    pub interval: u64,
}

#[derive(Debug)]
struct Timer {
    clock: Clock,
    notify: Notify,
    interval: u64,
    /// What its clock shows when it expires.
    expiry: Option<u64>,
    /// Where it stands in a queue.
    queued: Option<TimerId>,
    /// How often it had expired unnoticed when its last signal was delivered.
    overrun: i32,
}

/// The timers of a process.
#[derive(Debug, Default)]
pub struct ProcessTimers {
    timers: Mutex<Timers>,
    /// Whether one on CPU time may run.
    on_run_time: AtomicBool,
}

#[derive(Debug, Default)]
struct Timers {
    by_key: BTreeMap<Key, Timer>,
    last_number: i32,
}

/// How many timers a process may create.
const MANY: usize = 1024;
/// A timer that expires more often than this, in nanoseconds, is served this often, and overruns.
const OFTEN: u64 = 50_000;

impl Timer {
    const fn new(clock: Clock, notify: Notify) -> Self {
        Self { clock, notify, interval: 0, expiry: None, queued: None, overrun: 0 }
    }

    fn setting(&self) -> Setting {
        let left = |expiry: u64| {
            // A timer that is due but was not served yet runs still.
            self.clock.read().map_or(0, |now| expiry.saturating_sub(now).max(1))
        };
        Setting { value: self.expiry.map_or(0, left), interval: self.interval }
    }

    /// Puts it where its expiry is noticed.
    fn start(&mut self, process: &Arc<Process>, key: Key) {
        let Some(expiry) = self.expiry else { return };
        match self.clock.since_boot(expiry) {
            Some(at) => {
                self.queued = Some(super::add(at, Due::Timer(Arc::downgrade(process), key)));
            }
            None => process.signals.timers.on_run_time.store(true, Ordering::Relaxed),
        }
    }

    fn stop(&mut self) {
        self.expiry = None;
        if let Some(queued) = self.queued.take() {
            super::cancel(queued);
        }
    }
}

impl ProcessTimers {
    /// Makes a timer, which does not run yet, and returns its number. `notify` is told the number.
    ///
    /// # Errors
    /// `EAGAIN` if the process has too many.
    pub fn create(&self, clock: Clock, notify: impl FnOnce(i32) -> Notify) -> Result<i32> {
        let mut timers = self.timers.lock();
        if timers.by_key.len() >= MANY {
            return Err(Errno::EAGAIN);
        }
        let mut number = timers.last_number;
        while timers.by_key.contains_key(&Key::Created(number)) {
            number = number.checked_add(1).unwrap_or(0);
        }
        timers.last_number = number.checked_add(1).unwrap_or(0);
        let timer = Timer::new(clock, notify(number));
        timers.by_key.insert(Key::Created(number), timer);
        Ok(number)
    }

    /// Deletes a timer.
    ///
    /// # Errors
    /// `EINVAL` if there is none.
    pub fn delete(&self, key: Key) -> Result<()> {
        let mut timer = self.timers.lock().by_key.remove(&key).ok_or(Errno::EINVAL)?;
        timer.stop();
        Ok(())
    }

    /// What a timer shows.
    ///
    /// # Errors
    /// `EINVAL` if there is none.
    pub fn get(&self, key: Key) -> Result<Setting> {
        match (self.timers.lock().by_key.get(&key), key) {
            (Some(timer), _) => Ok(timer.setting()),
            (None, Key::Created(_)) => Err(Errno::EINVAL),
            (None, _) => Ok(Setting::default()),
        }
    }

    /// How often a timer had expired unnoticed when its last signal was delivered.
    ///
    /// # Errors
    /// `EINVAL` if there is none.
    pub fn overrun(&self, key: Key) -> Result<i32> {
        self.timers.lock().by_key.get(&key).map(|timer| timer.overrun).ok_or(Errno::EINVAL)
    }

    /// The signal of a timer is delivered, with this overrun count.
    pub fn delivered(&self, number: i32, overrun: i32) {
        if let Some(timer) = self.timers.lock().by_key.get_mut(&Key::Created(number)) {
            timer.overrun = overrun;
        }
    }

    /// Deletes those of `timer_create`: the program is replaced.
    pub fn exec(&self) {
        self.retain(|key| !matches!(key, Key::Created(_)));
    }

    /// Deletes all: the process has ended.
    pub fn end(&self) {
        self.retain(|_| false);
    }

    fn retain(&self, stays: impl Fn(Key) -> bool) {
        self.timers.lock().by_key.retain(|&key, timer| {
            let stays = stays(key);
            if !stays {
                timer.stop();
            }
            stays
        });
    }
}

/// Sets a timer of `process` and returns what it showed. With `absolute`, `value` is a time that its clock
/// shows rather than one from now.
///
/// # Errors
/// `EINVAL` if there is none.
pub fn set(process: &Arc<Process>, key: Key, new: Setting, absolute: bool) -> Result<Setting> {
    let mut timers = process.signals.timers.timers.lock();
    let timer = match timers.by_key.entry(key) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => {
            let own = || Arc::downgrade(process);
            let (clock, signal) = match key {
                Key::Real => (Clock::Monotonic, SIGALRM),
                Key::Virtual => (Clock::User(own()), SIGVTALRM),
                Key::Profile => (Clock::Process(own()), SIGPROF),
                Key::Created(_) => return Err(Errno::EINVAL),
            };
            entry.insert(Timer::new(clock, Notify::Process(signal, 0)))
        }
    };
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

/// Sends the signal of a timer that expires, and sets it for the next time.
pub(super) fn expire(process: &Arc<Process>, key: Key) {
    let (notify, missed) = {
        let mut timers = process.signals.timers.timers.lock();
        let Some(timer) = timers.by_key.get_mut(&key) else { return };
        let (Some(expiry), Some(now)) = (timer.expiry, timer.clock.read()) else { return };
        if now < expiry {
            // It was set anew while this expiry was on its way.
            return;
        }
        timer.queued = None;
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

/// Serves the timers of the running process that go by CPU time, and returns for how many nanoseconds of it
/// none of them expires.
pub(super) fn check_run_time(process: &Arc<Process>) -> u64 {
    let own = &process.signals.timers;
    if !own.on_run_time.load(Ordering::Relaxed) {
        return u64::MAX;
    }
    let running = || -> Vec<(Key, u64)> {
        let timers = own.timers.lock();
        let left = |(&key, timer): (&Key, &Timer)| {
            let expiry = timer.expiry.filter(|&expiry| timer.clock.since_boot(expiry).is_none())?;
            Some((key, expiry.saturating_sub(timer.clock.read()?)))
        };
        timers.by_key.iter().filter_map(left).collect()
    };
    for (key, left) in running() {
        if left == 0 {
            expire(process, key);
        }
    }
    let soonest = running().into_iter().map(|(_, left)| left).min();
    own.on_run_time.store(soonest.is_some(), Ordering::Relaxed);
    soonest.unwrap_or(u64::MAX)
}
