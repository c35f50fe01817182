//! The cost of a program's page faults on this host, and the settings of today's Linux that reduce
//! it.
//!
//! The program is recorded once, and runs once without a recorder. The recording yields the effect
//! of each setting in faults ([`findings`]), measurements on this host the cost of a fault
//! ([`costs`]), and their product is the advice ([`items`], [`answer`]). Each setting that can be
//! applied to one run is applied to pairs of runs ([`trial`]), which gives the measured saving.

mod allocator;
pub mod answer;
pub mod collector;
pub mod costs;
mod counter;
pub mod findings;
pub mod heap;
pub mod interval;
pub mod item;
pub mod items;
pub mod once;
mod preload;
pub mod program;
mod runtime;
mod supervise;
pub mod sysfs;
mod thp_flag;
pub mod time;
pub mod trial;

use crate::error::Error;
use crate::observer::Observer;
use crate::replay::Source;
use crate::stop;
use collector::Collector;
use costs::Meter;
use findings::Findings;
use item::Apply;
use once::{Run, once};
use program::Program;
use std::ffi::OsString;
use sysfs::{Shmem, Sizes};

/// Rounds in which costs are measured before anything is predicted.
const ROUNDS: usize = 7;

/// The steps of progress of [`measure`].
pub const STEPS: u64 = Findings::STEPS + ROUNDS as u64;

/// The measurements for the advice to one program.
#[derive(Debug)]
pub struct Measured {
    /// The counts of the recording.
    pub findings: Findings,
    /// The costs of a page on this host.
    pub meter: Meter,
    /// The run without the recorder; `None` if there is only a recording.
    pub plain: Option<Run>,
}

/// Counts the recording `source` of `program`, and measures the costs of a page on this host. Runs
/// `command`, if given, without a recorder. With `consent`, system-wide settings are changed for a
/// measurement.
///
/// # Errors
/// The recording is inconsistent, the host has too little memory, or the program cannot be started.
pub fn measure(
    source: &Source,
    program: Program,
    command: Option<&[OsString]>,
    consent: bool,
    observer: &dyn Observer,
) -> Result<Measured, Error> {
    let (sizes, shmem) = (Sizes::read(), Shmem::read());
    let mut findings = Findings::of(source, program, sizes, shmem, observer)?;
    let mut meter = Meter::new(consent, findings.census.shared > 0)?;
    let mut plain = None;
    for round in 0..ROUNDS {
        // One round suffices for a result. Without a plain run, the result uses the time of the
        // recording.
        if round > 0 && stop::requested() {
            break;
        }
        observer.begin("measures the cost of a page");
        meter.round(observer)?;
        observer.advance(1);
        // The plain run is in the middle of the rounds, so that both run under the same load.
        if let Some(command) = command.filter(|_| plain.is_none()) {
            observer.note(
                "the program runs again without the recorder; its output is discarded, and Ctrl-C ends this run",
            );
            observer.begin("runs the program without the recorder");
            plain = once(command, &Apply::Nothing, observer)?;
            if program.go && !runtime::chosen() && !stop::requested() {
                findings.collector = Some(Collector::of_run(command)?);
            }
        }
    }
    if plain.is_some_and(|run| run.thp_off) {
        findings.switch_huge_off();
    }
    Ok(Measured { findings, meter, plain })
}
