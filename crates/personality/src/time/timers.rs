//! The timers of a process: the three of `setitimer`, and the timers of `timer_create`.
//!
//! A timer on a wall or boot clock is in the queue of a CPU. The timer interrupt checks the
//! CPU-time timers of the interrupted process.
//!
//! *Overruns.* The signal of a timer is queued at most once: if the signal is still pending at the
//! next expiry, its overrun count is incremented instead.

use super::clock::Clock;
pub use super::deadline::Key;
use super::deadline::{Alarm, Due, TimerId, add, cancel};
use crate::errno::{Errno, Result};
use crate::task::{Process, Thread};
use core::sync::atomic::{AtomicBool, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Weak};

/// The action at the expiry of a timer.
#[derive(Clone, Debug)]
pub enum Notify {
    /// No action: the program only reads the timer.
    Nobody,
    /// The process gets this signal, and this value.
    Process(u32, u64),
    /// A thread of the process gets a signal and a value.
    Thread(Weak<Thread>, u32, u64),
}

/// The setting of a timer, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// The time until the expiry; 0 for a stopped timer.
    pub value: u64,
    /// The time between two expiries; 0 for a one-shot timer.
    pub interval: u64,
}

#[derive(Debug)]
pub(super) struct Timer {
    pub(super) clock: Clock,
    pub(super) notify: Notify,
    pub(super) interval: u64,
    /// The time of the timer's clock at the expiry.
    pub(super) expiry: Option<u64>,
    /// The deadline in a queue.
    pub(super) queued: Option<TimerId>,
    /// The memory for the deadline; `None` for clocks of CPU time.
    alarm: Option<Arc<Alarm>>,
    /// The overrun count of the last delivered signal.
    pub(super) overrun: i32,
}

/// The timers of a process.
#[derive(Debug)]
pub struct ProcessTimers {
    pub(super) timers: Mutex<Timers>,
    /// The alarm of `ITIMER_REAL`, allocated in advance: setting this timer must not fail.
    pub(super) real: Arc<Alarm>,
    /// Set if a timer on CPU time may run.
    pub(super) on_run_time: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    /// The three timers of `setitimer`; `None` until the first setting.
    pub(super) fixed: [Option<Timer>; FIXED.len()],
    /// The timers of `timer_create`, by number.
    created: Map<i32, Timer>,
    last_number: i32,
}

/// The keys of the timers of every process.
pub(super) const FIXED: [Key; 3] = [Key::Real, Key::Virtual, Key::Profile];

impl Timers {
    fn get(&self, key: Key) -> Option<&Timer> {
        match key {
            Key::Created(number) => self.created.get(&number),
            _ => self.fixed[FIXED.iter().position(|&fixed| fixed == key)?].as_ref(),
        }
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Timer> {
        match key {
            Key::Created(number) => self.created.get_mut(&number),
            _ => self.fixed[FIXED.iter().position(|&fixed| fixed == key)?].as_mut(),
        }
    }

    /// The first timer on CPU time after `key`, and the time until it expires.
    pub(super) fn running_after(&self, mut key: Option<Key>) -> Option<(Key, u64)> {
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

    /// Returns the time until the expiry of a timer on CPU time, if the timer runs.
    pub(super) fn left(&self, key: Key) -> Option<u64> {
        let timer = self.get(key)?;
        let expiry = timer.expiry.filter(|&expiry| timer.clock.since_boot(expiry).is_none())?;
        Some(expiry.saturating_sub(timer.clock.read()?))
    }
}

/// The maximum number of timers that a process may create.
const MANY: usize = 1024;

impl Timer {
    pub(super) const fn new(clock: Clock, notify: Notify, alarm: Option<Arc<Alarm>>) -> Self {
        Self { clock, notify, interval: 0, expiry: None, queued: None, alarm, overrun: 0 }
    }

    pub(super) fn setting(&self) -> Setting {
        let left = |expiry: u64| {
            // A timer that is due but was not served yet still runs.
            self.clock.read().map_or(0, |now| expiry.saturating_sub(now).max(1))
        };
        Setting { value: self.expiry.map_or(0, left), interval: self.interval }
    }

    /// Starts the timer.
    pub(super) fn start(&mut self, process: &Arc<Process>, key: Key) {
        let Some(expiry) = self.expiry else { return };
        match (self.clock.since_boot(expiry), &self.alarm) {
            (Some(at), Some(alarm)) => {
                let due = Due::Timer(Arc::downgrade(process), key);
                self.queued = Some(add(at, due, alarm));
            }
            _ => process.timers.on_run_time.store(true, Ordering::Relaxed),
        }
    }

    pub(super) fn stop(&mut self) {
        self.expiry = None;
        if let Some(queued) = self.queued.take() {
            cancel(queued);
        }
    }
}

impl ProcessTimers {
    /// The timers of a new process.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Self> {
        let real = Alarm::try_new()?;
        Ok(Self { timers: Mutex::default(), real, on_run_time: AtomicBool::new(false) })
    }

    /// Makes a stopped timer, and returns its number. `notify` gets the number.
    ///
    /// # Errors
    /// `EAGAIN` if the process has too many timers, or memory is out.
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
    /// `EINVAL` for an unknown timer.
    pub fn delete(&self, number: i32) -> Result<()> {
        let mut timer = self.timers.lock().created.remove(&number).ok_or(Errno::EINVAL)?;
        timer.stop();
        Ok(())
    }

    /// Returns the setting of a timer.
    ///
    /// # Errors
    /// `EINVAL` for an unknown timer.
    pub fn get(&self, key: Key) -> Result<Setting> {
        match (self.timers.lock().get(key), key) {
            (Some(timer), _) => Ok(timer.setting()),
            (None, Key::Created(_)) => Err(Errno::EINVAL),
            (None, _) => Ok(Setting::default()),
        }
    }

    /// Returns the overrun count of a timer's last delivered signal.
    ///
    /// # Errors
    /// `EINVAL` for an unknown timer.
    pub fn overrun(&self, key: Key) -> Result<i32> {
        self.timers.lock().get(key).map(|timer| timer.overrun).ok_or(Errno::EINVAL)
    }

    /// Stores the overrun count of a delivered signal.
    pub fn delivered(&self, number: i32, overrun: i32) {
        if let Some(timer) = self.timers.lock().created.get_mut(&number) {
            timer.overrun = overrun;
        }
    }

    /// Deletes the timers of `timer_create`, because the program is replaced.
    pub fn exec(&self) {
        self.retain(|key| !matches!(key, Key::Created(_)));
    }

    /// Deletes all timers at the end of the process.
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
