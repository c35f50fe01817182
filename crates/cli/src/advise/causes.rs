//! The causes of faults beyond their kinds: allocators that return memory.

use crate::error::CliError;
use faultless_analysis::advise::findings::Findings;
use faultless_analysis::number::{grouped, plural};
use std::io::Write;

/// Prints the causes.
///
/// # Errors
/// The output is closed.
pub fn print(findings: &Findings, out: &mut dyn Write) -> Result<(), CliError> {
    print_allocators(findings, out)
}

/// Prints the allocators, and the memory that came back.
fn print_allocators(findings: &Findings, out: &mut dyn Write) -> Result<(), CliError> {
    let Findings { program, discards, .. } = findings;
    let names: Vec<_> = program.others.iter().map(ToString::to_string).collect();
    if !names.is_empty() {
        writeln!(out, " The allocator is {}.", names.join(", or "))?;
    }
    if discards.calls + discards.unmaps > 0 && discards.back() > 0 {
        writeln!(
            out,
            " {} of MADV_DONTNEED freed {}, and {} of them came back; {} of munmap freed {}, and \
             {} came back.\n These calls interrupted other CPUs {} at most (TLB shootdowns).",
            plural(discards.calls, "call"),
            plural(discards.pages, "page"),
            grouped(discards.refilled),
            plural(discards.unmaps, "call"),
            plural(discards.unmapped, "page"),
            grouped(discards.remapped),
            plural(discards.interrupts, "time")
        )?;
    }
    Ok(())
}
