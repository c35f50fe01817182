//! The limit of the rate of events, beyond which a recording of running processes omits faults.

use std::time::Duration;

/// The events of a recording with the default limit.
const MOST_EVENTS: f64 = 1e7;
/// The seconds for which a recording without a time is planned.
const MINUTE: f64 = 60.0;
/// The factor by which the rate may increase after the measurement.
const MARGIN: f64 = 1.5;
/// The most faults for each recorded fault.
pub(super) const MOST_OMITTED: u32 = 1 << 16;

/// The limits of a recording of running processes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The recorded time. `None` stands for a recording until a signal.
    pub time: Option<Duration>,
    /// The events in a second beyond which the recorder omits faults; `None` for the default, with
    /// which the recording has about ten million events in its time, or in a minute.
    pub rate: Option<u32>,
}

impl Limits {
    /// Returns the events in a second beyond which the recorder omits faults.
    pub fn rate(&self) -> f64 {
        let seconds = self.time.map_or(MINUTE, |time| time.as_secs_f64().max(1.0));
        self.rate.map_or(MOST_EVENTS / seconds, f64::from)
    }
}

/// Returns the faults for each recorded fault of the next attempt, if `measured` events in a second
/// with `period` are more than `limit`: an odd number, because programs have patterns of powers of
/// two.
pub(super) fn next_period(period: u32, measured: f64, limit: f64) -> u32 {
    let factor = (MARGIN * measured / limit.max(1.0)).ceil();
    let next = f64::from(period) * factor.max(2.0);
    next.min(f64::from(MOST_OMITTED)) as u32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_omitted_beyond_the_limit() {
        let limits = |seconds: u64, rate| Limits {
            time: (seconds > 0).then(|| Duration::from_secs(seconds)),
            rate,
        };
        // Ten million events in the time, or in a minute.
        assert_eq!(limits(10, None).rate(), 1e6);
        assert_eq!(limits(0, None).rate(), 1e7 / 60.0);
        assert_eq!(limits(10, Some(5)).rate(), 5.0);
        assert_eq!(next_period(1, 1.1e6, 1e6), 3);
        assert_eq!(next_period(1, 4e6, 1e6), 7);
        assert_eq!(next_period(7, 2e6, 1e6), 21);
        assert!(next_period(1000, 1e9, 1.0) >= MOST_OMITTED);
    }
}
