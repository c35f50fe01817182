//! Dates as seconds since 1970.

/// A date and time, in the Gregorian calendar, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// 1970 or later.
    pub year: u16,
    /// 1 to 12.
    pub month: u8,
    /// 1 to 31.
    pub day: u8,
    /// 0 to 23.
    pub hour: u8,
    /// 0 to 59.
    pub minute: u8,
    /// 0 to 59.
    pub second: u8,
}

impl Moment {
    /// Returns the nanoseconds since 1970. A month or day that does not exist is replaced by a
    /// nearby date.
    pub fn nanoseconds(self) -> u64 {
        // Years that start in March have the leap day as their last day.
        let month = u64::from(self.month.clamp(1, 12));
        let year = u64::from(self.year.max(1970)) - u64::from(month <= 2);
        let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + u64::from(self.day.max(1)) - 1;
        let days = year * 365 + year / 4 - year / 100 + year / 400 + day_of_year;
        // The days from 1 March of year 0 to 1970.
        let days = days - 719_468;
        let seconds = u64::from(self.hour) * 3600 + u64::from(self.minute) * 60;
        (days * 86_400 + seconds + u64::from(self.second)) * 1_000_000_000
    }
}

/// Returns the number with the two decimal digits in the halves of `value`.
pub const fn from_bcd(value: u8) -> u8 {
    (value >> 4) * 10 + (value & 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(year: u16, month: u8, day: u8, hour: u8, minute: u8, second: u8) -> u64 {
        Moment { year, month, day, hour, minute, second }.nanoseconds() / 1_000_000_000
    }

    #[test]
    fn known_moments() {
        assert_eq!(seconds(1970, 1, 1, 0, 0, 0), 0);
        assert_eq!(seconds(2000, 2, 29, 12, 0, 0), 951_825_600);
        assert_eq!(seconds(2000, 3, 1, 0, 0, 0), 951_868_800);
        assert_eq!(seconds(2026, 1, 1, 0, 0, 0), 1_767_225_600);
        assert_eq!(seconds(2038, 1, 19, 3, 14, 8), 1 << 31);
    }

    #[test]
    fn impossible_dates_do_not_panic() {
        assert_eq!(seconds(0, 0, 0, 0, 0, 0), 0);
        assert_eq!(from_bcd(0x59), 59);
    }
}
