//! Numbers of the command line.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Returns a parser of numbers in `range`. Its error names the range, for words, too.
pub fn within<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        let (least, most) = (range.start(), range.end());
        number.ok_or_else(|| format!("expected a number from {least} to {most}"))
    }
}

#[cfg(test)]
mod tests {
    use super::within;

    #[test]
    fn error_names_the_range() {
        let parse = within(1..=64_u16);
        assert_eq!((parse("1"), parse("64")), (Ok(1), Ok(64)));
        for wrong in ["0", "65", "-1", "x", ""] {
            assert_eq!(parse(wrong), Err("expected a number from 1 to 64".to_owned()), "{wrong:?}");
        }
    }
}
