//! Locking policies, prefault and the other mechanisms, side by side.
//!
//! - [`subject`]: workloads and recordings, measured on this machine under several configurations;
//! - [`faults`]: the cost of one fault under each policy;
//! - [`many`]: workloads on many simulated CPUs;
//! - [`defaults`]: the effect of each mechanism;
//! - [`tiers`]: the effect of deferred flushes in tiered memory;
//! - [`host`]: the measuring machine, and its noise.

pub mod defaults;
pub mod faults;
pub mod host;
pub mod many;
pub mod subject;
pub mod tiers;

pub use subject::{Choice, ENTRIES, Scale, Subject};
pub use tiers::is_tiered;

use crate::columns::Report;
use crate::error::Error;
use crate::figures::Figures;
use crate::observer::Observer;
use crate::run;
use crate::stop;

/// Memory of the workloads' machine in bytes, and for each thread.
const MEMORY: u64 = 256 << 20;
const MEMORY_PER_THREAD: u64 = 32 << 20;

/// Shows a report.
pub type Show<'a, E> = &'a mut dyn FnMut(&Report) -> Result<(), E>;

/// Returns the reports of `subjects` by name. Each is shown, and passed to `figures`, as soon as it
/// is complete. Failures are added to `failures`.
///
/// # Errors
/// A subject or its machine cannot be created, or results cannot be shown or written.
pub fn measure<E: From<Error>>(
    subjects: Vec<Subject>,
    (choice, scale): (&Choice, &Scale),
    (figures, show): (&mut dyn Figures, Show<'_, E>),
    observer: &dyn Observer,
    failures: &mut Vec<String>,
) -> Result<Vec<(String, Report)>, E> {
    // A recording has a machine of its own size.
    let native = match subjects.iter().all(Subject::is_recording) {
        true => None,
        false => {
            let memory = MEMORY + MEMORY_PER_THREAD * scale.threads as u64;
            Some(run::machine(memory, scale.threads)?)
        }
    };
    let mut all = Vec::new();
    for subject in subjects {
        if stop::requested() {
            break;
        }
        let (name, turns) = (subject.name(), subject.turns(scale));
        observer.begin(&name);
        let Some((mut report, ready)) = subject.prepare(native.as_ref(), choice)? else { break };
        let sample = |column: &_| ready.sample(column);
        let failed = turns.run(&mut report, sample, |steps| observer.advance(steps));
        failures.extend(failed.iter().map(ToString::to_string));
        if !report.is_empty() {
            show(&report)?;
            report.figures(figures)?;
            all.push((name, report));
        }
    }
    Ok(all)
}
