//! Records a program and writes the compact form: `record OUT.fltrace [MADE] -- CMD...`.
//!
//! `MADE` replaces the description of the recording's origin, for recordings to be published.
//! `record OUT.fltrace IN.perf.data` converts.

mod output;

use faultless_trace::{compact, read, record::Setup};
use std::error::Error;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    output::run(|out| record(out))
}

fn record(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let usage = "usage: record OUT.fltrace ([MADE] -- CMD... | IN.perf.data)";
    let output = Path::new(args.first().ok_or(usage)?);
    let trace = if let Some(split) = args.iter().position(|arg| arg == "--") {
        let data = output.with_extension("perf.data");
        let mut trace = Setup::find(false)?
            .record(&data, &args[split + 1..], |note| eprintln!("{note}"), |_| ())?
            .trace;
        if split == 2 {
            trace.header.made = args[1].to_string_lossy().into_owned();
            // The text after the version names the builder of the kernel.
            let kernel = &mut trace.header.kernel;
            kernel.truncate(kernel.find('-').unwrap_or(kernel.len()));
        }
        trace
    } else {
        read(Path::new(args.get(1).ok_or(usage)?))?
    };
    compact::write(output, &trace)?;
    writeln!(out, "{}: {:#?}\n{}", output.display(), trace.header, trace.summary())?;
    Ok(())
}
