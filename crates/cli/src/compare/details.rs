//! Measures subjects on this machine, one after the other.

use super::subject::{Choice, Scale, Subject};
use crate::error::CliError;
use crate::interrupt;
use crate::report::columns::Report;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::run;

/// Memory of the workloads' machine in bytes, and for each thread.
const MEMORY: u64 = 256 << 20;
const MEMORY_PER_THREAD: u64 = 32 << 20;

/// Prints a report.
pub type Show<'a> = &'a mut dyn FnMut(&Report) -> Result<(), CliError>;

/// Returns the reports of `subjects` by name. Each is written and printed as soon as it is
/// complete. Failures are added to `failures`.
///
/// # Errors
/// A subject or its machine cannot be created, or results cannot be written.
pub fn measure(
    subjects: Vec<Subject>,
    (choice, scale): (&Choice, &Scale),
    (json, show): (&mut Json, Show<'_>),
    progress: &Progress,
    failures: &mut Vec<String>,
) -> Result<Vec<(String, Report)>, CliError> {
    let native = run::machine(MEMORY + MEMORY_PER_THREAD * scale.threads as u64, scale.threads)?;
    let mut all = Vec::new();
    for subject in subjects {
        if interrupt::requested() {
            break;
        }
        let (name, turns) = (subject.name(), subject.turns(scale));
        progress.begin(&name);
        let Some((mut report, ready)) = subject.prepare(&native, choice)? else { break };
        let sample = |column: &_| ready.sample(column);
        let failed = turns.run(&mut report, sample, |steps| progress.advance(steps));
        failures.extend(failed.iter().map(ToString::to_string));
        if !report.is_empty() {
            show(&report)?;
            report.json(json)?;
            all.push((name, report));
        }
    }
    Ok(all)
}
