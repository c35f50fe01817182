//! Ratios in words.

pub use faultless_analysis::rates::ends;

/// The relative difference below which ratios without noise, as of simulated figures, are called
/// the same.
const SAME: f64 = 0.01;

/// Returns whether a ratio without noise is called the same.
pub fn is_same(ratio: f64) -> bool {
    (ratio - 1.0).abs() < SAME
}

/// Describes a `ratio` of amounts: `12 % less time`, `3.1 times the time`, `the same time`.
pub fn amount(ratio: f64, of: &str) -> String {
    match ratio {
        _ if is_same(ratio) => format!("the same {of}"),
        _ if ratio < 1.0 => format!("{} less {of}", percent(1.0 - ratio)),
        _ if ratio < 2.0 => format!("{} more {of}", percent(ratio - 1.0)),
        _ => format!("{} times the {of}", times(ratio)),
    }
}

/// Describes a `ratio` of rates: `3.1 times as much`, `12 % less`.
pub fn rate(ratio: f64) -> String {
    match ratio {
        _ if is_same(ratio) => "the same".into(),
        _ if ratio < 1.0 => format!("{} less", percent(1.0 - ratio)),
        _ if ratio < 2.0 => format!("{} more", percent(ratio - 1.0)),
        _ => format!("{} times as much", times(ratio)),
    }
}

/// Describes the range of `ratios` of countable things: `21 % to 42 % fewer lines`.
pub fn fewer(ratios: impl Iterator<Item = f64>, of: &str) -> String {
    let (least, most) = ends(ratios);
    match (percent(1.0 - most), percent(1.0 - least)) {
        _ if is_same(least) && is_same(most) => format!("as many {of}"),
        _ if most > 1.0 => format!("{} times as many {of}", range(times(least), times(most))),
        (low, high) => format!("{} fewer {of}", range(low, high)),
    }
}

/// Returns `3 to 5`, or `3`.
pub fn range(low: String, high: String) -> String {
    if low == high { low } else { format!("{low} to {high}") }
}

/// Formats a share in percent, with one decimal place if it is small or nearly all, so that a
/// smaller share never appears as 100 %.
pub fn percent(share: f64) -> String {
    let share = 100.0 * share;
    match share {
        _ if share.abs() < 9.95 => format!("{share:.1} %"),
        _ if (98.5..100.0).contains(&share) => format!("{:.1} %", share.min(99.9)),
        _ => format!("{share:.0} %"),
    }
}

/// Formats a ratio with at least two figures.
pub fn times(ratio: f64) -> String {
    if ratio < 9.95 { format!("{ratio:.1}") } else { format!("{ratio:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_described_in_words() {
        let described = [0.5, 0.955, 0.995, 1.25, 3.12, 43.2].map(|ratio| amount(ratio, "time"));
        let words =
            ["50 % less", "4.5 % less", "the same", "25 % more", "3.1 times the", "43 times the"];
        assert_eq!(described, words.map(|words| format!("{words} time")));
        assert_eq!(fewer([0.5, 0.8].into_iter(), "lines"), "20 % to 50 % fewer lines");
        assert_eq!(fewer([0.5, 0.5].into_iter(), "lines"), "50 % fewer lines");
        assert_eq!(fewer([0.0002, 0.021].into_iter(), "lines"), "98 % to 99.9 % fewer lines");
        assert_eq!(fewer([0.0, 0.012].into_iter(), "lines"), "98.8 % to 100 % fewer lines");
        assert_eq!(fewer([1.0, 1.001].into_iter(), "lines"), "as many lines");
        assert_eq!(fewer([0.5, 2.0].into_iter(), "lines"), "0.5 to 2.0 times as many lines");
    }
}
