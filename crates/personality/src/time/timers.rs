//! The timers of a process: the three of `setitimer`, and those of `timer_create`.
//!
//! A timer on a clock that always runs stands in the queue of a CPU. A timer on CPU time is looked at
//! whenever the timer interrupt finds its process running.
//!
//! *Overruns.* The signal of a timer waits at most once: if it still does when the timer expires again,
//! its overrun count grows instead.

use super::Clock;
pub use super::queue::Key;
use super::queue::{Alarm, Due, TimerId};
use crate::errno::{Errno, Result};
use crate::signal::{self, Info};
use crate::task::{Process, Thread};
use core::sync::atomic::{AtomicBool, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Weak};
use linux_raw_sys::general::{SIGALRM, SIGPROF, SIGVTALRM};

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
    /// The memory of that; none for clocks of CPU time.
    alarm: Option<Arc<Alarm>>,
    /// How often it had expired unnoticed when its last signal was delivered.
    overrun: i32,
}

/// The timers of a process.
#[derive(Debug)]
pub struct ProcessTimers {
    timers: Mutex<Timers>,
    /// That of `ITIMER_REAL`: programs do not expect that it cannot be set.
    real: Arc<Alarm>,
    /// Whether one on CPU time may run.
    on_run_time: AtomicBool,
}

#[derive(Debug, Default)]
struct Timers {
    /// The three of `setitimer`, once they were set.
    fixed: [Option<Timer>; FIXED.len()],
    /// Those of `timer_create`, by number.
    created: Map<i32, Timer>,
    last_number: i32,
}

/// The keys of the timers that every process has.
const FIXED: [Key; 3] = [Key::Real, Key::Virtual, Key::Profile];

impl Timers {
    fn get(&self, key: Key) -> Option<&Timer> {
        match key {
            Key::Created(number) => self.created.get(&number),
            _ => self.fixed[FIXED.iter().position(|&fixed| fixed == key)?].as_ref(),
        }
    }

    fn get_mut(&mut self, key: Key) -> Option<&mut Timer> {
        match key {
            Key::Created(number) => self.created.get_mut(&number),
            _ => self.fixed[FIXED.iter().position(|&fixed| fixed == key)?].as_mut(),
        }
    }

    /// The first that goes by CPU time and comes after `key`, and for how long it runs still.
    fn running_after(&self, mut key: Option<Key>) -> Option<(Key, u64)> {
        loop {
            let fixed = FIXED.into_iter().find(|&fixed| key.is_none_or(|key| fixed > key));
            let created = match key {
                Some(Key::Created(number)) => self.created.after(Some(&number)),
                _ => self.created.first(),
            };
            let next = fixed.or(created.map(|(&number, _)| Key::Created(number)))?;
            if let Some(left) = self.left(next) {
                return Some((next, left));
            }
            key = Some(next);
        }
    }

    /// For how long a timer that goes by CPU time runs still, if it runs.
    fn left(&self, key: Key) -> Option<u64> {
        let timer = self.get(key)?;
        let expiry = timer.expiry.filter(|&expiry| timer.clock.since_boot(expiry).is_none())?;
        Some(expiry.saturating_sub(timer.clock.read()?))
    }
}

/// How many timers a process may create.
const MANY: usize = 1024;
/// A timer that expires more often than this, in nanoseconds, is served this often, and overruns.
const OFTEN: u64 = 50_000;

impl Timer {
    const fn new(clock: Clock, notify: Notify, alarm: Option<Arc<Alarm>>) -> Self {
        Self { clock, notify, interval: 0, expiry: None, queued: None, alarm, overrun: 0 }
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
        match (self.clock.since_boot(expiry), &self.alarm) {
            (Some(at), Some(alarm)) => {
                let due = Due::Timer(Arc::downgrade(process), key);
                self.queued = Some(super::add(at, due, alarm));
            }
            _ => process.signals.timers.on_run_time.store(true, Ordering::Relaxed),
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
    /// Those of a new process.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Self> {
        let real = Alarm::try_new()?;
        Ok(Self { timers: Mutex::default(), real, on_run_time: AtomicBool::new(false) })
    }

    /// Makes a timer, which does not run yet, and returns its number. `notify` is told the number.
    ///
    /// # Errors
    /// `EAGAIN` if the process has too many, or there is no memory.
    pub fn create(&self, clock: Clock, notify: impl FnOnce(i32) -> Notify) -> Result<i32> {
        let none = |_| Errno::EAGAIN;
        let is_run_time = clock.since_boot(0).is_none();
        let alarm = if is_run_time { None } else { Some(Alarm::try_new().map_err(none)?) };
        let mut timers = self.timers.lock();
        if timers.created.len() >= MANY {
            return Err(Errno::EAGAIN);
        }
        let mut number = timers.last_number;
        while timers.created.contains_key(&number) {
            number = number.checked_add(1).unwrap_or(0);
        }
        let timer = Timer::new(clock, notify(number), alarm);
        timers.created.try_insert(number, timer).map_err(|_| Errno::EAGAIN)?;
        timers.last_number = number.checked_add(1).unwrap_or(0);
        Ok(number)
    }

    /// Deletes a timer of `timer_create`.
    ///
    /// # Errors
    /// `EINVAL` if there is none.
    pub fn delete(&self, number: i32) -> Result<()> {
        let mut timer = self.timers.lock().created.remove(&number).ok_or(Errno::EINVAL)?;
        timer.stop();
        Ok(())
    }

    /// What a timer shows.
    ///
    /// # Errors
    /// `EINVAL` if there is none.
    pub fn get(&self, key: Key) -> Result<Setting> {
        match (self.timers.lock().get(key), key) {
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
        self.timers.lock().get(key).map(|timer| timer.overrun).ok_or(Errno::EINVAL)
    }

    /// The signal of a timer is delivered, with this overrun count.
    pub fn delivered(&self, number: i32, overrun: i32) {
        if let Some(timer) = self.timers.lock().created.get_mut(&number) {
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
        let mut timers = self.timers.lock();
        let keep = |key: Key, timer: &mut Timer| {
            let stays = stays(key);
            if !stays {
                timer.stop();
            }
            stays
        };
        for (fixed, key) in timers.fixed.iter_mut().zip(FIXED) {
            if fixed.as_mut().is_some_and(|timer| !keep(key, timer)) {
                *fixed = None;
            }
        }
        timers.created.retain(|&number, timer| keep(Key::Created(number), timer));
    }
}

/// Sets a timer of `process` and returns what it showed. With `absolute`, `value` is a time that its clock
/// shows rather than one from now.
///
/// # Errors
/// `EINVAL` if there is none.
pub fn set(process: &Arc<Process>, key: Key, new: Setting, absolute: bool) -> Result<Setting> {
    let mut timers = process.signals.timers.timers.lock();
    if let Some(at) = FIXED.iter().position(|&fixed| fixed == key) {
        timers.fixed[at].get_or_insert_with(|| {
            let own = || Arc::downgrade(process);
            let (clock, signal, alarm) = match key {
                Key::Virtual => (Clock::User(own()), SIGVTALRM, None),
                Key::Profile => (Clock::Process(own()), SIGPROF, None),
                _ => (Clock::Monotonic, SIGALRM, Some(process.signals.timers.real.clone())),
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

/// Sends the signal of a timer that expires, and sets it for the next time.
pub(super) fn expire(process: &Arc<Process>, key: Key) {
    let (notify, missed) = {
        let mut timers = process.signals.timers.timers.lock();
        let Some(timer) = timers.get_mut(key) else { return };
        let (Some(expiry), Some(now)) = (timer.expiry, timer.clock.read()) else { return };
        if now < expiry {
            // It was set anew while this expiry was on its way.
            return;
        }
        // It is in the queue where it was set anew meanwhile, and is due already.
        if let Some(queued) = timer.queued.take() {
            super::cancel(queued);
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

/// Serves the timers of the running process that go by CPU time, and returns for how many nanoseconds of it
/// none of them expires.
pub(super) fn check_run_time(process: &Arc<Process>) -> u64 {
    let own = &process.signals.timers;
    if !own.on_run_time.load(Ordering::Relaxed) {
        return u64::MAX;
    }
    // One at a time: an expiry locks the timers itself.
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
