//! The text format of a case: one operation per line.
//!
//! ```text
//! # What it shows.
//! set locking=speculative
//! window 0x1fffc0000000
//! mmap p3 5p read|write private|anonymous|fixed
//! mmap p8 2p read shared|fixed object 1 4
//! mremap p3 2p 2p maymove|fixed p40
//! store p3+1000 7
//! madvise p3 5p 4
//! ```
//!
//! `window` is the start of the window, in front of all operations; without it, the middle of the
//! window is 2^45. `p3` is the window's page 3, `p3+1000` 1000 bytes further, `5p` five pages;
//! other addresses and lengths are bytes, in hexadecimal with `0x`. Flags are names or numbers,
//! joined by `|`; `none` is 0.

use crate::op::{OBJECTS, Op, PAGE, Window};
use faultless::Setting;
use std::fmt::{self, Write as _};
use std::str::FromStr;

/// A sequence of operations, and the settings of the subsystem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Case {
    /// `KNOB=VALUE`, each.
    pub settings: Vec<String>,
    /// The place of the window.
    pub window: Window,
    /// The operations.
    pub ops: Vec<Op>,
}

/// An unreadable line of a case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct CaseError {
    /// The number of the line, from 1.
    pub line: usize,
    /// A description of the error.
    pub what: String,
}

type Names = &'static [(&'static str, u64)];

const PROT: Names =
    &[("read", 1), ("write", 2), ("exec", 4), ("growsdown", 1 << 24), ("growsup", 1 << 25)];
const MAP: Names = &[
    ("shared", 1),
    ("private", 2),
    ("fixed", 0x10),
    ("anonymous", 0x20),
    ("growsdown", 0x100),
    ("noreserve", 0x4000),
    ("populate", 0x8000),
    ("stack", 0x2_0000),
    ("noreplace", 0x10_0000),
];
const REMAP: Names = &[("maymove", 1), ("fixed", 2), ("dontunmap", 4)];

fn addr(addr: u64, window: Window) -> String {
    match addr.checked_sub(window.start()) {
        Some(offset) if offset < 1 << 24 => match (offset / PAGE, offset % PAGE) {
            (page, 0) => format!("p{page}"),
            (page, within) => format!("p{page}+{within}"),
        },
        _ => format!("{addr:#x}"),
    }
}

fn len(len: u64) -> String {
    if len != 0 && len.is_multiple_of(PAGE) && len < 1 << 32 {
        format!("{}p", len / PAGE)
    } else {
        format!("{len:#x}")
    }
}

fn flags(names: Names, flags: u64) -> String {
    let mut text = String::new();
    let mut rest = flags;
    for &(name, bits) in names {
        if rest & bits == bits {
            rest &= !bits;
            let _ = write!(text, "{}{name}", if text.is_empty() { "" } else { "|" });
        }
    }
    if rest != 0 {
        let _ = write!(text, "{}{rest:#x}", if text.is_empty() { "" } else { "|" });
    }
    if text.is_empty() { "none".into() } else { text }
}

/// An operation in its window, as a line of a case.
#[derive(Debug)]
pub struct Line<'a>(pub &'a Op, pub Window);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addr = |at| addr(at, self.1);
        match *self.0 {
            Op::Map { addr: at, len: long, prot, flags: how, object } => {
                let (prot, how) = (flags(PROT, prot), flags(MAP, how));
                write!(f, "mmap {} {} {prot} {how}", addr(at), len(long))?;
                match object {
                    Some((number, first)) => write!(f, " object {number} {first}"),
                    None => Ok(()),
                }
            }
            Op::Unmap { addr: at, len: long } => write!(f, "munmap {} {}", addr(at), len(long)),
            Op::Protect { addr: at, len: long, prot } => {
                write!(f, "mprotect {} {} {}", addr(at), len(long), flags(PROT, prot))
            }
            Op::Remap { addr: at, len: long, new_len, flags: how, target } => {
                let (how, target) = (flags(REMAP, how), addr(target));
                write!(f, "mremap {} {} {} {how} {target}", addr(at), len(long), len(new_len))
            }
            Op::Advise { addr: at, len: long, advice } => {
                write!(f, "madvise {} {} {advice}", addr(at), len(long))
            }
            Op::Resident { addr: at, len: long } => {
                write!(f, "mincore {} {}", addr(at), len(long))
            }
            Op::Census => f.write_str("census"),
            Op::Load { addr: at } => write!(f, "load {}", addr(at)),
            Op::Store { addr: at, value } => write!(f, "store {} {value}", addr(at)),
            Op::Fetch { addr: at } => write!(f, "fetch {}", addr(at)),
            Op::Look => f.write_str("look"),
            Op::Touch => f.write_str("touch"),
            Op::Write { object, offset, value } => write!(f, "pwrite {object} {offset} {value}"),
            Op::Truncate { object, pages } => write!(f, "ftruncate {object} {pages}"),
            Op::Fork => f.write_str("fork"),
            Op::Switch { process } => write!(f, "switch {process}"),
            Op::Exit { process } => write!(f, "exit {process}"),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.iter().try_for_each(|setting| writeln!(f, "set {setting}"))?;
        if self.window != Window::default() {
            writeln!(f, "window {:#x}", self.window.start())?;
        }
        self.ops.iter().try_for_each(|op| writeln!(f, "{}", Line(op, self.window)))
    }
}

/// The words of a line, taken from the left, and the window of the case.
struct Words<'a>(std::str::SplitAsciiWhitespace<'a>, Window);

impl<'a> Words<'a> {
    fn next(&mut self, what: &str) -> Result<&'a str, String> {
        self.0.next().ok_or_else(|| format!("{what} is missing"))
    }

    fn number(&mut self, what: &str) -> Result<u64, String> {
        number(self.next(what)?)
    }

    fn addr(&mut self) -> Result<u64, String> {
        let word = self.next("an address")?;
        let Some(within) = word.strip_prefix('p') else {
            return number(word);
        };
        let (number_of, offset) = within.split_once('+').unwrap_or((within, "0"));
        let number_of = number(number_of)?;
        if number_of >= 1 << 16 {
            return Err(format!("`{word}` is outside the window"));
        }
        Ok(self.1.page(number_of).wrapping_add(number(offset)?))
    }

    fn len(&mut self) -> Result<u64, String> {
        let word = self.next("a length")?;
        match word.strip_suffix('p') {
            Some(pages) => Ok(number(pages)?.wrapping_mul(PAGE)),
            None => number(word),
        }
    }

    fn flags(&mut self, names: Names) -> Result<u64, String> {
        let words = self.next("flags")?.split('|');
        words.into_iter().try_fold(0, |so_far, word| {
            let known = names.iter().find(|(name, _)| *name == word).map(|&(_, bits)| bits);
            Ok(so_far
                | match known {
                    Some(bits) => bits,
                    None if word == "none" => 0,
                    None => number(word)?,
                })
        })
    }

    fn object(&mut self) -> Result<usize, String> {
        let number = self.number("an object's number")?;
        let number = usize::try_from(number).ok().filter(|&number| number < OBJECTS);
        number.ok_or_else(|| format!("objects are 0 to {}", OBJECTS - 1))
    }

    fn op(&mut self, name: &str) -> Result<Op, String> {
        Ok(match name {
            "mmap" => Op::Map {
                addr: self.addr()?,
                len: self.len()?,
                prot: self.flags(PROT)?,
                flags: self.flags(MAP)?,
                object: match self.0.next() {
                    None => None,
                    Some("object") => Some((self.object()?, self.number("a page")?)),
                    Some(word) => return Err(format!("`{word}` instead of `object`")),
                },
            },
            "munmap" => Op::Unmap { addr: self.addr()?, len: self.len()? },
            "mprotect" => {
                Op::Protect { addr: self.addr()?, len: self.len()?, prot: self.flags(PROT)? }
            }
            "mremap" => Op::Remap {
                addr: self.addr()?,
                len: self.len()?,
                new_len: self.len()?,
                flags: self.flags(REMAP)?,
                target: self.addr()?,
            },
            "madvise" => {
                let (addr, len) = (self.addr()?, self.len()?);
                Op::Advise { addr, len, advice: self.number("advice")? }
            }
            "mincore" => Op::Resident { addr: self.addr()?, len: self.len()? },
            "census" => Op::Census,
            "load" => Op::Load { addr: self.addr()? },
            "store" => Op::Store { addr: self.addr()?, value: self.number("a value")? },
            "fetch" => Op::Fetch { addr: self.addr()? },
            "look" => Op::Look,
            "touch" => Op::Touch,
            "pwrite" => {
                let (object, offset) = (self.object()?, self.number("an offset")?);
                Op::Write { object, offset, value: self.number("a value")? }
            }
            "ftruncate" => Op::Truncate { object: self.object()?, pages: self.number("a length")? },
            "fork" => Op::Fork,
            "switch" => Op::Switch { process: self.number("a process")? as usize },
            "exit" => Op::Exit { process: self.number("a process")? as usize },
            _ => return Err(format!("`{name}` is not an operation")),
        })
    }
}

fn number(word: &str) -> Result<u64, String> {
    let parsed = match word.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => word.parse(),
    };
    parsed.map_err(|error| format!("`{word}`: {error}"))
}

impl FromStr for Case {
    type Err = CaseError;

    fn from_str(text: &str) -> Result<Self, CaseError> {
        let mut case = Self::default();
        for (at, line) in text.lines().enumerate() {
            let wrong = |what: String| CaseError { line: at + 1, what };
            let line = line.split('#').next().unwrap_or("");
            let mut words = Words(line.split_ascii_whitespace(), case.window);
            match words.0.next() {
                None => continue,
                Some("set") => {
                    let setting = words.next("KNOB=VALUE").map_err(wrong)?;
                    setting.parse::<Setting>().map_err(|error| wrong(error.to_string()))?;
                    case.settings.push(setting.into());
                }
                Some("window") => {
                    let start = words.number("an address").map_err(wrong)?;
                    let window = Window::at(start).filter(|_| case.ops.is_empty());
                    case.window = window.ok_or_else(|| {
                        wrong(format!(
                            "`{start:#x}` is no page from 2^43 to 2^46, or follows an operation"
                        ))
                    })?;
                }
                Some(name) => case.ops.push(words.op(name).map_err(wrong)?),
            }
            if let Some(word) = words.0.next() {
                return Err(wrong(format!("`{word}` is superfluous")));
            }
        }
        Ok(case)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Generator;

    #[test]
    fn written_cases_are_read_back() {
        for seed in 0..200 {
            let case = Generator::new(seed).case(60);
            assert_eq!(case.to_string().parse(), Ok(case));
        }
    }

    #[test]
    fn bad_lines_are_named() {
        let error = |text: &str| text.parse::<Case>().expect_err(text).to_string();
        assert_eq!(error("look\nfly p3"), "line 2: `fly` is not an operation");
        assert_eq!(error("munmap p3"), "line 1: a length is missing");
        assert_eq!(error("load p3x"), "line 1: `3x`: invalid digit found in string");
        assert_eq!(error("look up"), "line 1: `up` is superfluous");
        assert_eq!(error("pwrite 9 0 0"), "line 1: objects are 0 to 2");
        assert!(error("window 0x100000000fff").starts_with("line 1: `0x100000000fff` is no page"));
        assert!(error("look\nwindow 0x100000000000").contains("or follows an operation"));
        assert!(error("set warp=9").starts_with("line 1: no such knob"));
    }
}
