//! Numbers for people.

/// Formats `1234567` as `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats a rate with three figures and a prefix, like `perf stat`: `1.52 M`.
pub fn scaled(rate: f64) -> String {
    let (value, prefix) = match rate {
        r if r >= 1e9 => (r / 1e9, " G"),
        r if r >= 1e6 => (r / 1e6, " M"),
        r if r >= 1e3 => (r / 1e3, " K"),
        r => (r, " "),
    };
    let places = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.places$}{prefix}")
}

/// Formats a label of an axis: like [`scaled`], without zeros at the end of the fraction.
pub fn label(value: f64) -> String {
    let text = scaled(value);
    let (number, prefix) = text.split_once(' ').unwrap_or((&text, ""));
    let number = match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.'),
        false => number,
    };
    format!("{number} {prefix}").trim_end().to_owned()
}

/// Formats a number with this many decimal places. A number that rounds to zero has no sign.
pub fn fixed(value: f64, places: usize) -> String {
    let text = format!("{value:.places$}");
    match text.strip_prefix('-') {
        Some(zero) if zero.bytes().all(|byte| matches!(byte, b'0' | b'.')) => zero.to_owned(),
        _ => text,
    }
}

/// Formats a number of things: `1 CPU`, `2 CPUs`.
pub fn plural(n: u64, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}

/// Formats a number of processes: `1 process`, `2 processes`.
pub fn processes(n: usize) -> String {
    format!("{n} process{}", if n == 1 { "" } else { "es" })
}

/// Formats a part of a whole in percent; `-` if the whole is 0.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".into();
    }
    format!("{:.2} %", 100.0 * part as f64 / whole as f64)
}

/// Formats a number of bytes for people.
pub fn size(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;
    match bytes {
        0..GIB => format!("{} MiB", bytes >> 20),
        GIB..TIB => format!("{:.1} GiB", bytes as f64 / GIB as f64),
        TIB.. => format!("{:.1} TiB", bytes as f64 / TIB as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_has_no_sign() {
        let fixed = |value, places| super::fixed(value, places);
        assert_eq!([fixed(-0.0004, 3), fixed(-0.04, 1), fixed(-0.4, 0)], ["0.000", "0.0", "0"]);
        assert_eq!([fixed(-0.0006, 3), fixed(-10.0, 0), fixed(0.05, 2)], ["-0.001", "-10", "0.05"]);
    }

    #[test]
    fn numbers_are_formatted_for_people() {
        assert_eq!(
            ["0", "999", "1,000", "12,345,678"].map(str::to_owned),
            [grouped(0), grouped(999), grouped(1000), grouped(12_345_678)]
        );
        assert_eq!(scaled(1_523_000.0), "1.52 M");
        assert_eq!(scaled(45_300.0), "45.3 K");
        assert_eq!(scaled(999.0), "999 ");
        let labels = [0.0, 5.0, 0.25, 9e6, 1e7, 2.5e7, 3e8].map(label);
        assert_eq!(labels, ["0", "5", "0.25", "9 M", "10 M", "25 M", "300 M"]);
        assert_eq!((plural(1, "CPU"), plural(2, "CPU")), ("1 CPU".into(), "2 CPUs".into()));
        assert_eq!((processes(1), processes(2)), ("1 process".into(), "2 processes".into()));
        assert_eq!(percent(1, 3), "33.33 %");
        assert_eq!(percent(0, 0), "-");
    }

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(size(300 << 20), "300 MiB");
        assert_eq!(size(5 << 29), "2.5 GiB");
    }
}
