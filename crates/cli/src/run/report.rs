//! `--report`: the operations of the preloaded library in each process of the program.

use crate::error::CliError;
use crate::record::{exit_code, not_found};
use crate::report::json::Json;
use crate::report::{JsonArgs, say};
use faultless_analysis::advise::preload::Operations;
use faultless_analysis::advise::report::{Count, Process, Report, Reported, error};
use faultless_analysis::{Context, Figures, Number};
use faultless_trace::record::Signals;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The largest number of processes that are printed one by one.
const MOST: usize = 20;
/// The largest number of names of processes without an operation.
const NAMES: usize = 5;
/// The counts in JSON lines: the operation, the name of the count, and its unit.
const FIGURES: [(&str, &str, &str, Count); 13] = [
    ("huge-text", "collapsed_segments", "count", Count::CollapsedSegments),
    ("huge-text", "collapsed_bytes", "bytes", Count::CollapsedBytes),
    ("huge-text", "copied_segments", "count", Count::CopiedSegments),
    ("huge-text", "copied_bytes", "bytes", Count::CopiedBytes),
    ("huge-text", "later_segments", "count", Count::LaterSegments),
    ("populate", "populated_blocks", "count", Count::PopulatedBlocks),
    ("populate", "populated_bytes", "bytes", Count::PopulatedBytes),
    ("populate", "resident_blocks", "count", Count::ResidentBlocks),
    ("prefault-ahead", "watched_blocks", "count", Count::WatchedBlocks),
    ("prefault-ahead", "unwatched_blocks", "count", Count::UnwatchedBlocks),
    ("prefault-ahead", "prefaulted_bytes", "bytes", Count::PrefaultedBytes),
    ("populate-files", "populated_files", "count", Count::PopulatedFiles),
    ("populate-files", "populated_file_bytes", "bytes", Count::PopulatedFileBytes),
];

/// Runs the program `name`, and prints the report. Returns the exit status of the program.
///
/// # Errors
/// The program cannot be executed, or the report cannot be written.
pub fn run(
    command: &mut Command,
    name: &OsStr,
    operations: &Operations,
    json: Option<&Path>,
) -> Result<ExitCode, CliError> {
    if json == Some(Path::new("-")) {
        let why = "standard output belongs to the program; --json ./- is a file of that name";
        return Err(CliError::Usage(format!("--json -: {why}")));
    }
    let mut json = Json::open(&JsonArgs { json: json.map(Path::to_owned) }, &[])?;
    let report = Report::new()?;
    let signals = Signals::hold();
    let status =
        signals.run(command.envs([report.variable()])).map_err(|error| not_found(name, error))?;
    let reported = report.read()?;
    for line in lines(&reported, operations) {
        say!("{line}");
    }
    for process in &reported.processes {
        write(&mut json, process, operations)?;
    }
    json.complete()?;
    Ok(exit_code(status))
}

/// Returns the lines of the report.
fn lines(reported: &Reported, operations: &Operations) -> Vec<String> {
    let all = &reported.processes;
    let mut lines = vec![format!("faultless: the preloaded library in {}:", processes(all.len()))];
    let (empty, mut rest): (Vec<_>, Vec<_>) = all.iter().partition(|process| process.is_empty());
    rest.sort_by_key(|process| std::cmp::Reverse(process.bytes()));
    for process in rest.iter().take(MOST) {
        lines.push(format!("  {} ({})", process.name, process.pid));
        lines.extend(of_process(process, operations).into_iter().map(|line| format!("    {line}")));
    }
    if let Some(further) = rest.get(MOST..).filter(|further| !further.is_empty()) {
        let bytes = further.iter().map(|process| process.bytes()).sum();
        lines.push(format!("  {} more, with {} in all", processes(further.len()), mib(bytes)));
    }
    if !empty.is_empty() {
        let names: BTreeSet<_> = empty.iter().map(|process| &*process.name).collect();
        let more = if names.len() > NAMES { ", ..." } else { "" };
        let names = names.into_iter().take(NAMES).collect::<Vec<_>>().join(", ");
        let without = without(operations);
        lines.push(format!("  {} without {without}: {names}{more}", processes(empty.len())));
    }
    if reported.omitted > 0 {
        lines.push(format!("  {} not counted: the report is full", reported.omitted));
    }
    lines
}

/// Returns the name of the memory for which a process had no operation.
fn without(operations: &Operations) -> String {
    let blocks = operations.populate.is_some() || operations.ahead.is_some();
    let names = [
        (blocks, "large blocks"),
        (operations.files.is_some(), "large mapped files"),
        (operations.huge_text.is_some(), "text of 2 MiB"),
    ];
    let names = names.into_iter().filter(|(requested, _)| *requested);
    names.map(|(_, name)| name).collect::<Vec<_>>().join(" and without ")
}

/// Returns a line for each requested operation with an effect, and for each reason of refusals.
fn of_process(process: &Process, operations: &Operations) -> Vec<String> {
    let count = |of| process.count(of);
    let mut lines = Vec::new();
    if operations.huge_text.is_some() {
        for (way, segments, bytes) in [
            ("collapsed to", Count::CollapsedSegments, Count::CollapsedBytes),
            ("copied to", Count::CopiedSegments, Count::CopiedBytes),
        ] {
            if let number @ 1.. = count(segments) {
                let (number, size) = (counted(number, "segment"), mib(count(bytes)));
                lines.push(format!("huge-text: {number} of {size} {way} huge pages"));
            }
        }
    }
    if let number @ 1.. = count(Count::LaterSegments) {
        let number = counted(number, "segment");
        lines.push(format!("huge-text: {number} of these in libraries opened by the program"));
    }
    if let number @ 1.. = count(Count::PopulatedBlocks) {
        let (number, size) = (counted(number, "block"), mib(count(Count::PopulatedBytes)));
        lines.push(format!("populate: {number} of {size}"));
    }
    if let number @ 1.. = count(Count::ResidentBlocks) {
        lines.push(format!("populate: {} already resident", counted(number, "block")));
    }
    if let number @ 1.. = count(Count::WatchedBlocks) {
        let (number, size) = (counted(number, "block"), mib(count(Count::PrefaultedBytes)));
        lines.push(format!("prefault-ahead: {size} populated in {number}"));
    }
    if let number @ 1.. = count(Count::UnwatchedBlocks) {
        let number = counted(number, "block");
        lines.push(format!("prefault-ahead: {number} not watched, more than 32 at a time"));
    }
    if let number @ 1.. = count(Count::PopulatedFiles) {
        let (number, size) = (counted(number, "mapping"), mib(count(Count::PopulatedFileBytes)));
        lines.push(format!("populate-files: {number} of {size}"));
    }
    for refusal in process.refusals() {
        let (why, remedy) = refusal.reason.text(refusal.code);
        let code = match error(refusal.code) {
            0 => String::new(),
            code => format!(" (error {code})"),
        };
        let (operation, times) = (refusal.reason.operation(), counted(refusal.times, "time"));
        lines.push(format!("{operation}: refused {times}: {why}{code}: {remedy}"));
    }
    lines
}

/// Writes the counts of a process as JSON lines.
fn write(json: &mut Json, process: &Process, operations: &Operations) -> Result<(), CliError> {
    let mut context = Context::new("host", process.name.clone(), 0);
    context.params.insert("process".into(), process.pid.into());
    let requested = |operation: &str| match operation {
        "huge-text" => operations.huge_text.is_some(),
        "populate" => operations.populate.is_some(),
        "populate-files" => operations.files.is_some(),
        _ => operations.ahead.is_some(),
    };
    for (operation, metric, unit, count) in FIGURES {
        if requested(operation) {
            context.setting = operation.into();
            json.figure(&context, metric, unit, Number::Whole(process.count(count)))?;
        }
    }
    for refusal in process.refusals() {
        context.setting = refusal.reason.operation().into();
        let (why, remedy) = refusal.reason.text(refusal.code);
        for (name, value) in [
            ("reason", why.into()),
            ("remedy", remedy.into()),
            ("code", error(refusal.code).into()),
        ] {
            context.params.insert(name.into(), value);
        }
        json.figure(&context, "refused", "count", Number::Whole(refusal.times))?;
    }
    Ok(())
}

fn processes(number: usize) -> String {
    if number == 1 { "1 process".into() } else { format!("{number} processes") }
}

fn counted(number: u64, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
