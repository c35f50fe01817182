//! `faultless workloads`, `knobs` and `counters`: the lists.

use crate::error::CliError;
use crate::report::table;
use faultless::{Counter, KNOBS};
use faultless_analysis::settings::Settings;
use faultless_native::TLB_COUNTERS;
use faultless_native::tlb::PROCESSOR;
use std::io::{self, Write};

/// Lists the workloads and their parameters.
pub fn workloads() -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    for info in faultless_workload::all() {
        writeln!(out, "{} - {}", info.name, info.summary)?;
        writeln!(out, "    counts {}", info.unit)?;
        let mut table = table::plain();
        for param in info.params() {
            let default = param.kind.show(info.default(param));
            table.add_row([format!("   {}={default}", param.name), info.help(param)]);
        }
        writeln!(out, "{}\n", table.trim_fmt())?;
    }
    writeln!(out, "Sizes take K, M, G; `faultless stat NAME key=value...` runs one.")?;
    Ok(())
}

/// Lists the knobs.
pub fn knobs() -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    let mut table = table::plain();
    table.set_header(["knob", "values", "default", "meaning"]);
    let defaults = Settings::new(&[]).knobs();
    for (name, values, meaning) in KNOBS {
        let default = defaults.get(*name).map_or_else(String::new, |value| match value.as_str() {
            Some(text) => text.to_owned(),
            None => value.to_string(),
        });
        table.add_row([name, values, default.as_str(), meaning]);
    }
    writeln!(out, "{}", table.trim_fmt())?;
    writeln!(
        out,
        "\nSet a knob with --set KNOB=VALUE, in every command that runs a workload, recording or program."
    )?;
    Ok(())
}

/// Lists the counters.
pub fn counters() -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    let mut table = table::plain();
    table.set_header(["counter", "counts"]);
    for counter in Counter::ALL {
        table.add_row([counter.name(), counter.meaning()]);
    }
    for (name, meaning) in TLB_COUNTERS {
        table.add_row([name, meaning]);
    }
    writeln!(out, "{}", table.trim_fmt())?;
    writeln!(
        out,
        "\n`stat`, `replay` and `boot` print the counters above zero; --json has all \
         counters.\n`spf` is named `speculative_pgfault`, as the event of the original patches, \
         if a program prints all totals.\n`stat` simulates TLBs on the native machine, with the \
         sizes of {PROCESSOR}; simulated CPUs have the TLBs of their profile (`compare xsbench`)."
    )?;
    Ok(())
}
