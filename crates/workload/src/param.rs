//! Parameters of workloads: `name=value`, declared by each program and checked here.

use std::fmt;
use std::time::Duration;

/// One parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// The name.
    pub name: &'static str,
    /// The kind of its values.
    pub kind: Kind,
    /// The default value.
    pub default: u64,
    /// The meaning, in one line.
    pub help: &'static str,
}

/// The kind of a parameter's values. All are stored as one `u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number from the first to the second, inclusive.
    Count(u64, u64),
    /// Bytes, a multiple of the page size, at least one page; `K`, `M`, `G` and `T` are powers of
    /// 1024.
    Size,
    /// Seconds, stored in microseconds; 0 is no time limit.
    Seconds,
    /// A choice of words, stored as an index.
    Choice(&'static [&'static str]),
}

/// An error in the arguments of a workload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParamError {
    /// No such workload exists.
    #[error("no workload is named {name:?}; there are {known}")]
    UnknownWorkload {
        /// The name given.
        name: String,
        /// The valid names.
        known: String,
    },
    /// An argument without `=`.
    #[error("{workload}: {argument:?} is not of the form name=value")]
    NotAnAssignment {
        /// The workload.
        workload: &'static str,
        /// The argument given.
        argument: String,
    },
    /// The workload has no such parameter.
    #[error("{workload} has no parameter {name:?}; it has {known}")]
    UnknownParam {
        /// The workload.
        workload: &'static str,
        /// The name given.
        name: String,
        /// The valid names.
        known: String,
    },
    /// A parameter is given twice.
    #[error("{workload}: {param} is specified twice")]
    Repeated {
        /// The workload.
        workload: &'static str,
        /// The parameter.
        param: &'static str,
    },
    /// The value is not valid for the parameter.
    #[error("{workload}: {param}={value}: expected {expected}")]
    BadValue {
        /// The workload.
        workload: &'static str,
        /// The parameter.
        param: &'static str,
        /// The value given.
        value: String,
        /// The valid values.
        expected: String,
    },
}

const PAGE: u64 = faultless::PAGE_SIZE;
/// The largest accepted size: the user half of the address space.
const MAX_SIZE: u64 = 1 << 46;
/// The longest accepted time: one day.
const MAX_SECONDS: f64 = 86_400.0;

impl Kind {
    /// Parses `text`; `None` for an invalid value.
    pub fn parse(self, text: &str) -> Option<u64> {
        match self {
            Self::Count(min, max) => {
                let value = text.parse().ok()?;
                (min..=max).contains(&value).then_some(value)
            }
            Self::Size => {
                let (digits, shift) = match text.char_indices().last()? {
                    (at, 'K' | 'k') => (&text[..at], 10),
                    (at, 'M' | 'm') => (&text[..at], 20),
                    (at, 'G' | 'g') => (&text[..at], 30),
                    (at, 'T' | 't') => (&text[..at], 40),
                    _ => (text, 0),
                };
                let value = digits.parse::<u64>().ok()?.checked_mul(1 << shift)?;
                (value % PAGE == 0 && (PAGE..=MAX_SIZE).contains(&value)).then_some(value)
            }
            Self::Seconds => {
                let value: f64 = text.parse().ok()?;
                // A cast of a small, checked number.
                (0.0..=MAX_SECONDS).contains(&value).then_some((value * 1e6) as u64)
            }
            Self::Choice(words) => words.iter().position(|word| *word == text).map(|at| at as u64),
        }
    }

    /// Formats `value` in the form read by [`parse`](Self::parse).
    pub fn show(self, value: u64) -> String {
        match self {
            Self::Count(..) => value.to_string(),
            Self::Size => [(40, "T"), (30, "G"), (20, "M"), (10, "K")]
                .into_iter()
                .find(|(shift, _)| value >> shift << shift == value && value >> shift > 0)
                .map_or(value.to_string(), |(shift, unit)| format!("{}{unit}", value >> shift)),
            Self::Seconds => format!("{}", value as f64 / 1e6),
            Self::Choice(words) => usize::try_from(value)
                .ok()
                .and_then(|at| words.get(at))
                .copied()
                .unwrap_or("?")
                .into(),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(min, max) => write!(f, "a number from {min} to {max}"),
            Self::Size => {
                let [least, most] = [PAGE, MAX_SIZE].map(|size| self.show(size));
                write!(f, "a size from {least} to {most}, a multiple of {PAGE} bytes, such as 128M")
            }
            Self::Seconds => write!(f, "seconds from 0 to {MAX_SECONDS}, such as 0.5"),
            Self::Choice(words) => write!(f, "one of {}", words.join(", ")),
        }
    }
}

/// The given parameters of a workload. Other parameters keep their defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    workload: &'static str,
    given: Vec<(&'static str, u64)>,
}

impl Settings {
    /// Parses `name=value` arguments for `workload` with the parameters `known`, each given at most
    /// once.
    ///
    /// # Errors
    /// All of [`ParamError`] except the unknown workload.
    pub fn parse<I>(
        workload: &'static str,
        known: &[&'static Param],
        arguments: I,
    ) -> Result<Self, ParamError>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let mut settings = Self { workload, given: Vec::new() };
        for argument in arguments {
            let argument = argument.as_ref();
            let Some((name, value)) = argument.split_once('=') else {
                return Err(ParamError::NotAnAssignment { workload, argument: argument.into() });
            };
            let Some(param) = known.iter().find(|param| param.name == name) else {
                let names: Vec<_> = known.iter().map(|param| param.name).collect();
                let known = names.join(", ");
                return Err(ParamError::UnknownParam { workload, name: name.into(), known });
            };
            let Some(value) = param.kind.parse(value) else {
                return Err(settings.bad_text(param, value, param.kind));
            };
            if settings.given(param).is_some() {
                return Err(ParamError::Repeated { workload, param: param.name });
            }
            settings.given.push((param.name, value));
        }
        Ok(settings)
    }

    /// Returns the value of `param`, if given.
    pub fn given(&self, param: &Param) -> Option<u64> {
        self.given.iter().find(|(name, _)| *name == param.name).map(|(_, value)| *value)
    }

    /// Returns the value of `param`.
    pub fn get(&self, param: &Param) -> u64 {
        self.given(param).unwrap_or(param.default)
    }

    /// Returns the value of `param`, a parameter of [`Kind::Seconds`]; `None` for 0.
    pub fn seconds(&self, param: &Param) -> Option<Duration> {
        Some(self.get(param)).filter(|&micros| micros > 0).map(Duration::from_micros)
    }

    /// Creates an error for the value of `param`, with the `expected` values.
    pub fn bad(&self, param: &Param, expected: impl fmt::Display) -> ParamError {
        self.bad_text(param, &param.kind.show(self.get(param)), expected)
    }

    fn bad_text(&self, param: &Param, value: &str, expected: impl fmt::Display) -> ParamError {
        ParamError::BadValue {
            workload: self.workload,
            param: param.name,
            value: value.into(),
            expected: expected.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    static SIZE: Param = Param { name: "size", kind: Kind::Size, default: 4096, help: "" };

    #[test]
    fn sizes() {
        assert_eq!(Kind::Size.parse("64K"), Some(65_536));
        assert_eq!(Kind::Size.parse("8192"), Some(8192));
        assert_eq!(Kind::Size.parse("1g"), Some(1 << 30));
        for bad in [
            "",
            "K",
            "0",
            "1K",
            "4097",
            "-4096",
            "1e6",
            "99999999T",
            "18446744073709551615T",
            "64é",
        ] {
            assert_eq!(Kind::Size.parse(bad), None, "{bad}");
        }
        assert_eq!(Kind::Size.show(96 << 20), "96M");
    }

    #[test]
    fn others() {
        assert_eq!(Kind::Count(1, 8).parse("8"), Some(8));
        assert_eq!(Kind::Count(1, 8).parse("9"), None);
        assert_eq!(Kind::Seconds.parse("0.25"), Some(250_000));
        for bad in ["-1", "nan", "inf", "1e9", "x"] {
            assert_eq!(Kind::Seconds.parse(bad), None, "{bad}");
        }
        assert_eq!(Kind::Choice(&["a", "b"]).parse("b"), Some(1));
        assert_eq!(Kind::Choice(&["a", "b"]).parse("c"), None);
    }

    #[test]
    fn parameters_are_given_once_and_keep_defaults() {
        let error = Settings::parse("w", &[&SIZE], ["size=4K", "size=8K"]).expect_err("twice");
        assert_eq!(error.to_string(), "w: size is specified twice");
        let settings = Settings::parse("w", &[&SIZE], ["size=8K"]).expect("a valid size");
        assert_eq!(settings.get(&SIZE), 8192);
        let settings = Settings::parse("w", &[&SIZE], [""; 0]).expect("valid defaults");
        assert_eq!(settings.get(&SIZE), 4096);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_a_panic(text in ".*") {
            for kind in [Kind::Size, Kind::Seconds, Kind::Count(0, 9), Kind::Choice(&["é"])] {
                if let Some(value) = kind.parse(&text) {
                    prop_assert_eq!(kind.parse(&kind.show(value)), Some(value));
                }
            }
        }

        #[test]
        fn sizes_round_trip(pages in 1u64..1 << 34) {
            let size = pages * 4096;
            prop_assert_eq!(Kind::Size.parse(&Kind::Size.show(size)), Some(size));
        }
    }
}
