//! `faultless workloads` and `faultless knobs`: what there is.

use crate::error::CliError;
use crate::report::table;
use faultless::KNOBS;
use std::io::{self, Write};

/// Lists the workloads and their parameters.
pub fn workloads() -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    for info in faultless_workload::all() {
        writeln!(out, "{} - {}", info.name, info.summary)?;
        writeln!(out, "    counts {}", info.unit)?;
        for param in info.params() {
            let default = param.kind.show(param.default);
            writeln!(out, "    {:<26} {}", format!("{}={default}", param.name), param.help)?;
        }
        writeln!(out)?;
    }
    writeln!(out, "Sizes take K, M, G; `faultless stat NAME key=value...` runs one.")?;
    Ok(())
}

/// Lists the knobs.
pub fn knobs() -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    let mut table = table::plain(&["knob", "values", "meaning"]);
    for (name, values, meaning) in KNOBS {
        table.add_row([name, values, meaning]);
    }
    writeln!(out, "{table}")?;
    writeln!(out, "\nSet with --set KNOB=VALUE, on every command that runs something.")?;
    Ok(())
}
