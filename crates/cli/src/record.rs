//! `faultless record`: the right `perf record` for this system.

use crate::args::RecordArgs;
use crate::error::CliError;
use faultless_trace::compact;
use faultless_trace::record::{Extent, Setup};
use std::fs;
use std::path::{Path, PathBuf};

/// Records a program.
pub fn run(args: &RecordArgs) -> Result<(), CliError> {
    let named = |output: &PathBuf| output.extension().is_some_and(|e| e == compact::EXTENSION);
    let compact = args.compact || args.output.as_ref().is_some_and(named);
    let output = args
        .output
        .clone()
        .unwrap_or_else(|| PathBuf::from(if compact { "recording.fltrace" } else { "perf.data" }));
    let setup = Setup::find(args.lesser).map_err(|missing| {
        let hint = if args.lesser {
            ""
        } else {
            "\n--lesser accepts a recording without what needs permission, where perf can make one"
        };
        CliError::Failed(format!("{missing}{hint}"))
    })?;
    if setup.extent() != Extent::Full {
        eprintln!("faultless: this recording will be lesser than it could be:");
        for shortfall in setup.shortfalls() {
            eprintln!("- {shortfall}");
        }
    }
    // Found out now, and not when the program has run.
    let data = if compact { output.with_extension("perf.data") } else { output.clone() };
    writable(&output)?;
    let recorded = setup.record(&data, &args.program).map_err(failed)?;
    let trace = recorded.trace().map_err(failed)?;
    for note in &recorded.notes {
        eprintln!("faultless: {note}");
    }
    if compact {
        compact::write(&output, &trace).map_err(failed)?;
        // The portable form holds all that replay uses.
        let _ = fs::remove_file(&data);
    }
    let size = fs::metadata(&output).map_or(0, |meta| meta.len());
    // Standard output is the program's.
    eprintln!("{}: {:.1} KB", output.display(), size as f64 / 1e3);
    eprintln!("{}", trace.summary());
    eprintln!("next: faultless replay {} --policies", output.display());
    Ok(())
}

fn failed(error: impl std::fmt::Display) -> CliError {
    CliError::Failed(error.to_string())
}

/// Leaves things as they were: perf looks at what is there.
fn writable(output: &Path) -> Result<(), CliError> {
    let there = output.exists();
    let open = fs::File::options().append(true).create(true).open(output);
    open.map_err(|error| CliError::failed(output.display(), error))?;
    if !there {
        let _ = fs::remove_file(output);
    }
    Ok(())
}
