//! Both sides, step by step.

use crate::case::{Case, Line};
use crate::differences::{Context, DIFFERENCES, Then};
use crate::linux::{Linux, LinuxError};
use crate::op::{Op, Roster, SEEN_PAGES, Window, with_last_looks};
use crate::ours::{Ours, OursError};
use crate::seen::{Area, NAMELESS, Outcome, Seen};
use faultless::Setting;
use std::collections::HashMap;
use std::fmt;

/// Both sides, ready for cases.
#[derive(Debug)]
pub struct Oracle {
    linux: Linux,
    /// One machine for each collection of settings.
    ours: HashMap<Vec<String>, Ours>,
}

/// The result of a case without differences other than the [permitted
/// differences](crate::differences).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Agreement {
    /// The number of compared steps of the case.
    pub compared: usize,
    /// The number of occurrences of each known difference.
    pub known: [usize; DIFFERENCES.len()],
}

/// Why a case failed.
#[derive(Debug)]
pub enum Failure {
    /// The sides differ.
    Differs(Box<Differs>),
    /// The subsystem failed its own check.
    Ours(OursError),
}

/// A step in which the sides differ.
#[derive(Debug)]
pub struct Differs {
    /// The operation's index; the indices behind the last operation of the case belong to the final
    /// checks of all pages.
    pub step: usize,
    /// The operation.
    pub op: Op,
    /// The window of the case.
    pub window: Window,
    /// The process of the operation.
    pub process: usize,
    /// The VMAs before, on Linux.
    pub before: Vec<Area>,
    /// The result on Linux.
    pub linux: Seen,
    /// The result of the subsystem.
    pub ours: Seen,
}

impl Oracle {
    /// Prepares both sides.
    ///
    /// # Errors
    /// The host's.
    pub fn new() -> Result<Self, LinuxError> {
        Ok(Self { linux: Linux::new()?, ours: HashMap::new() })
    }

    /// Runs `case` on both sides and compares.
    ///
    /// # Errors
    /// The host could not run it.
    pub fn run(&mut self, case: &Case) -> Result<Result<Agreement, Failure>, LinuxError> {
        let steps = with_last_looks(&case.ops);
        let linux = self.linux.run(&steps, case.window)?;
        let ran = self
            .ours(&case.settings)
            .and_then(|ours| Ok((ours.maps_ahead(), ours.run(&steps, case.window)?)));
        let (ahead, ours) = match ran {
            Ok(ran) => ran,
            Err(error) => return Ok(Err(Failure::Ours(error))),
        };
        Ok(compare((&steps, case.window), linux, ours, ahead).map_err(Failure::Differs))
    }

    fn ours(&mut self, settings: &[String]) -> Result<&mut Ours, OursError> {
        if !self.ours.contains_key(settings) {
            // A case contains only parsed settings.
            let parsed: Vec<Setting> = settings.iter().filter_map(|one| one.parse().ok()).collect();
            self.ours.insert(settings.to_vec(), Ours::new(&parsed)?);
        }
        let ours = self.ours.get_mut(settings);
        ours.ok_or_else(|| OursError::Stopped("no machine of these settings".into()))
    }
}

fn compare(
    (steps, window): (&[Op], Window),
    linux: Vec<Seen>,
    ours: Vec<Seen>,
    ahead: bool,
) -> Result<Agreement, Box<Differs>> {
    let mut agreement = Agreement::default();
    let mut roster = Roster::default();
    let mut areas: HashMap<usize, Vec<Area>> = HashMap::new();
    for (step, ((op, linux), ours)) in steps.iter().zip(linux).zip(ours).enumerate() {
        let process = roster.doer(op);
        let before = areas.entry(process).or_default().clone();
        if linux != ours {
            let context =
                Context { op, window, before: &before, linux: &linux, ours: &ours, ahead };
            let known = DIFFERENCES.iter().position(|known| (known.applies)(&context));
            let Some(known) = known else {
                let op = op.clone();
                let differs = Differs { step, op, window, process, before, linux, ours };
                return Err(Box::new(differs));
            };
            agreement.known[known] += 1;
            if DIFFERENCES[known].then == Then::Stop {
                return Ok(agreement);
            }
        }
        if let Some(made) = roster.made_by(op) {
            areas.insert(made, linux.areas.clone());
        }
        areas.insert(process, linux.areas);
        roster.after(op);
        agreement.compared += 1;
    }
    Ok(agreement)
}

/// A list of VMAs, one per line.
struct Listing<'a>(&'a [Area], Window);

impl fmt::Display for Listing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for area in self.0 {
            let at = |addr: u64| (addr as i64 - self.1.start() as i64) >> 12;
            let bit = |bit, letter| if area.prot & bit != 0 { letter } else { '-' };
            let (r, w, x) = (bit(1, 'r'), bit(2, 'w'), bit(4, 'x'));
            let s = if area.shared { 's' } else { 'p' };
            write!(f, "    p{}..p{} {r}{w}{x}{s}", at(area.start), at(area.end))?;
            match area.object {
                0 => writeln!(f)?,
                NAMELESS => writeln!(f, " shared memory from its page {}", area.offset >> 12)?,
                number => writeln!(f, " object {} from {}", number - 1, area.offset >> 12)?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Differs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, op, window, process, before, linux, ours } = self;
        writeln!(f, "step {step} (process {process}): {}", Line(op, *window))?;
        write!(f, "  before:\n{}", Listing(before, *window))?;
        if linux.outcome != ours.outcome {
            match (&linux.outcome, &ours.outcome) {
                (Outcome::Pages(linux), Outcome::Pages(ours)) => {
                    for number in 0..SEEN_PAGES as usize {
                        let (linux, ours) = (linux.get(number), ours.get(number));
                        if linux != ours {
                            writeln!(f, "  p{number}: Linux {linux:x?}, ours {ours:x?}")?;
                        }
                    }
                }
                (linux, ours) => writeln!(f, "  Linux: {linux}\n  ours:  {ours}")?,
            }
        }
        if linux.areas != ours.areas {
            let [linux, ours] = [linux, ours].map(|seen| Listing(&seen.areas, *window));
            write!(f, "  Linux afterwards:\n{linux}  ours afterwards:\n{ours}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Differs(differs) => differs.fmt(f),
            Self::Ours(error) => writeln!(f, "{error}"),
        }
    }
}
