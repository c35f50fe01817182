//! The observations of a step, on either side, and their form in shared memory: words.

use crate::op::Window;
use std::fmt;

/// The address of an `mmap` or `mremap` far from the window: a free choice, not compared. Such a
/// mapping is unmapped at once.
pub const ELSEWHERE: u64 = 1;

/// A signal: its number and its code (`SEGV_MAPERR` and so on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// `SIG*`.
    pub number: i32,
    /// `si_code`.
    pub code: i32,
}

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A call's value, or a loaded value.
    Done(u64),
    /// A call's error.
    Refused(i32),
    /// An access's signal.
    Signal(Signal),
    /// A call's error, or 0, and the vector of `mincore`.
    Resident(i32, Vec<u8>),
    /// A digest of every page of the window, or the signal of the access to it.
    Pages(Vec<Result<u64, Signal>>),
}

/// A VMA as shown in listings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Area {
    /// First address.
    pub start: u64,
    /// The address behind the VMA.
    pub end: u64,
    /// `PROT_*`.
    pub prot: u64,
    /// Whether stores are shared.
    pub shared: bool,
    /// Byte offset into the object.
    pub offset: u64,
    /// 0 for private anonymous memory, the object's number and 1, or [`NAMELESS`].
    pub object: u64,
}

/// The object of shared anonymous memory.
pub const NAMELESS: u64 = 255;

/// The observations of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The outcome.
    pub outcome: Outcome,
    /// The VMAs near the window afterwards.
    pub areas: Vec<Area>,
}

/// Returns the address returned by a call, if it is compared.
pub fn near(addr: u64, window: Window) -> u64 {
    if window.near().contains(&addr) { addr } else { ELSEWHERE }
}

/// Combines words into one number, which depends on their order and position.
pub fn digest(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0, |so_far: u64, word| {
        (so_far.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(ELSEWHERE) => f.write_str("elsewhere"),
            Self::Done(value) => write!(f, "{value:#x}"),
            Self::Refused(errno) => error(*errno).fmt(f),
            Self::Signal(Signal { number, code }) => write!(f, "signal {number}, code {code}"),
            Self::Resident(0, vector) => write!(f, "{vector:?}"),
            Self::Resident(errno, vector) => write!(f, "{vector:?}, {}", error(*errno)),
            Self::Pages(pages) => write!(f, "{} pages", pages.len()),
        }
    }
}

fn error(errno: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno)
}

impl Signal {
    fn word(self) -> u64 {
        (self.number as u64) << 32 | u64::from(self.code as u32)
    }

    fn of(word: u64) -> Self {
        Self { number: (word >> 32) as i32, code: word as u32 as i32 }
    }
}

impl Seen {
    /// Appends the words of the observation.
    pub fn write(&self, mut put: impl FnMut(u64)) {
        let mut head = |kind, value| {
            put(kind);
            put(value);
        };
        match &self.outcome {
            Outcome::Done(value) => head(0, *value),
            Outcome::Refused(errno) => head(1, *errno as u64),
            Outcome::Signal(signal) => head(2, signal.word()),
            Outcome::Resident(errno, vector) => {
                head(3, *errno as u64);
                put(vector.len() as u64);
                vector.iter().for_each(|&byte| put(byte.into()));
            }
            Outcome::Pages(pages) => {
                head(4, pages.len() as u64);
                pages.iter().for_each(|page| match page {
                    Ok(digest) => head(0, *digest),
                    Err(signal) => head(1, signal.word()),
                });
            }
        }
        put(self.areas.len() as u64);
        for area in &self.areas {
            let Area { start, end, prot, shared, offset, object } = *area;
            [start, end, prot, shared.into(), offset, object].into_iter().for_each(&mut put);
        }
    }

    /// Takes a step's words off the front. `None`: there are too few.
    pub fn read(words: &mut impl Iterator<Item = u64>) -> Option<Self> {
        let mut next = || words.next();
        let (kind, value) = (next()?, next()?);
        let outcome = match kind {
            0 => Outcome::Done(value),
            1 => Outcome::Refused(value as i32),
            2 => Outcome::Signal(Signal::of(value)),
            3 => {
                let len = next()?;
                let vector: Option<_> = (0..len).map(|_| next().map(|word| word as u8)).collect();
                Outcome::Resident(value as i32, vector?)
            }
            _ => {
                let page = |_| {
                    let (failed, word) = (next()?, next()?);
                    Some(if failed == 0 { Ok(word) } else { Err(Signal::of(word)) })
                };
                Outcome::Pages((0..value).map(page).collect::<Option<_>>()?)
            }
        };
        let count = next()?;
        let area = |_| {
            let (start, end, prot) = (next()?, next()?, next()?);
            let (shared, offset, object) = (next()? != 0, next()?, next()?);
            Some(Area { start, end, prot, shared, offset, object })
        };
        let areas: Option<_> = (0..count).map(area).collect();
        Some(Self { outcome, areas: areas? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        let signal = Signal { number: 11, code: -6 };
        let outcomes = [
            Outcome::Done(u64::MAX),
            Outcome::Refused(22),
            Outcome::Signal(signal),
            Outcome::Resident(12, vec![1, 0, 7]),
            Outcome::Pages(vec![Ok(3), Err(signal)]),
        ];
        let area = Area { start: 1, end: 2, prot: 3, shared: true, offset: 4, object: NAMELESS };
        let mut words = Vec::new();
        let seen = outcomes.map(|outcome| Seen { outcome, areas: vec![area; 2] });
        seen.iter().for_each(|seen| seen.write(|word| words.push(word)));
        let mut words = words.into_iter();
        for seen in seen {
            assert_eq!(Seen::read(&mut words), Some(seen));
        }
        assert_eq!(Seen::read(&mut words), None);
    }
}
