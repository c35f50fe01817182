//! The measuring machine and its noise, in words.

use crate::error::CliError;
use crate::report::filled;
use faultless_analysis::compare::host::{Host, Noise, exceptions};
use faultless_analysis::number::plural;
use std::io::Write;

/// The load per CPU from which other programs disturb the measurements.
const BUSY: f64 = 0.3;

/// Prints the description of the host.
pub fn print(host: &Host, out: &mut dyn Write, width: usize) -> Result<(), CliError> {
    let Host { cpu, kernel, faults, .. } = host;
    let kind = if host.is_virtual { ", a virtual machine" } else { "" };
    let load = host.load.map_or(String::new(), |load| {
        let busy = if load > BUSY * host.cpus as f64 { " (busy)" } else { "" };
        format!("; load average {load}{busy}")
    });
    let cpus = plural(host.cpus as u64, "CPU");
    let least = exceptions().fold(f64::INFINITY, f64::min);
    let most = exceptions().fold(0.0, f64::max);
    let shadowed = match host.is_shadowed() {
        true => "; shadowed page tables may explain that, and slow Linux here",
        false => "",
    };
    let text = format!(
        "Machine: {cpu}, {cpus}{kind}, {kernel}{load}. A first touch of a page takes {:.0} ns under its kernel, {:.0} ns of them the exception ({least:.0} to {most:.0} ns on the hardware of the bundled profiles{shadowed}).",
        faults.touch,
        faults.exception(),
    );
    writeln!(out, "{}", filled(&text, width))?;
    Ok(())
}

/// Prints the noise.
pub fn print_noise(noise: Noise, out: &mut dyn Write, width: usize) -> Result<(), CliError> {
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    let text = format!(
        "Noise: half of the repetitions of a replay are within {} of their median; the medians of two halves of the same repetitions \
         differ by {} (in the middle), at most {}.",
        percent(noise.single),
        percent(noise.typical),
        percent(noise.largest),
    );
    writeln!(out, "{}", filled(&text, width))?;
    Ok(())
}
