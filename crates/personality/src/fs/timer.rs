//! Timers as files (`timerfd`).
//!
//! The expiry of such a timer triggers no action: a reader computes the number of expirations, and
//! a waiter gets the time [of the next check](Stream::look_again). As on Linux, an expired timer
//! reports no further edges until it is read.

use super::stream::{Events, Stream};
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::wait::Changes;
use crate::time::timers::Setting;
use crate::time::{self, Clock};
use faultless_bare::sync::Mutex;
use faultless_collections::Arc;

/// A timer with expirations to read.
#[derive(Debug)]
pub struct TimerFile {
    clock: Clock,
    state: Mutex<State>,
    /// Announces changes of the setting.
    changes: Arc<Changes>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// The first expiry after the last read, in nanoseconds since boot; `None` if the timer does
    /// not run.
    expiry: Option<u64>,
    interval: u64,
    /// The number of reads and settings after an expiry: one edge each.
    told: u64,
}

impl State {
    /// Returns the number of expirations since the last read.
    fn expirations(&self, now: u64) -> u64 {
        match self.expiry {
            Some(expiry) if now >= expiry => {
                (now - expiry).checked_div(self.interval).unwrap_or(0).saturating_add(1)
            }
            _ => 0,
        }
    }

    /// Returns the time of the next expiry after `now`.
    fn next(&self, now: u64) -> Option<u64> {
        match self.expirations(now) {
            0 => self.expiry,
            _ if self.interval == 0 => None,
            count => Some(self.expiry?.saturating_add(count.saturating_mul(self.interval))),
        }
    }

    fn setting(&self, now: u64) -> Setting {
        Setting { value: self.next(now).map_or(0, |next| next - now), interval: self.interval }
    }
}

impl TimerFile {
    /// Returns a stopped timer, on a clock other than CPU time.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(clock: Clock) -> Result<Arc<Self>> {
        let changes = Arc::try_new(Changes::default())?;
        Ok(Arc::try_new(Self { clock, state: Mutex::default(), changes })?)
    }

    /// Its setting.
    pub fn setting(&self) -> Setting {
        self.state.lock().setting(time::now())
    }

    /// Changes the setting and returns the old one. With `absolute`, `value` is a time of the
    /// timer's clock rather than a duration.
    pub fn set(&self, new: Setting, absolute: bool) -> Setting {
        let now = time::now();
        let expiry = match new.value {
            0 => None,
            value if absolute => self.clock.since_boot(value),
            value => Some(now.saturating_add(value)),
        };
        let old = {
            let mut state = self.state.lock();
            let told = state.told + u64::from(state.expirations(now) != 0);
            let old =
                core::mem::replace(&mut *state, State { expiry, interval: new.interval, told });
            old.setting(now)
        };
        self.changes.announce();
        old
    }
}

impl Stream for TimerFile {
    fn read(&self, to: &mut Transfer<'_>) -> Result {
        if to.left() < 8 {
            return Err(Errno::EINVAL);
        }
        let count = {
            let mut state = self.state.lock();
            let now = time::now();
            let count = state.expirations(now);
            if count == 0 {
                return Err(Errno::EAGAIN);
            }
            state.expiry = state.next(now);
            state.told += 1;
            count
        };
        to.put_bytes(&count.to_ne_bytes());
        to.result()
    }

    fn ready(&self) -> Events {
        match self.state.lock().expirations(time::now()) {
            0 => Events::empty(),
            _ => Events::READ,
        }
    }

    fn changes(&self) -> Option<&Arc<Changes>> {
        Some(&self.changes)
    }

    fn edges(&self) -> Option<u64> {
        let state = *self.state.lock();
        let expired = state.expirations(time::now()) != 0;
        Some(self.changes.count() + state.told + u64::from(expired))
    }

    fn look_again(&self) -> Option<u64> {
        self.state.lock().expiry.filter(|&expiry| time::now() < expiry)
    }
}
