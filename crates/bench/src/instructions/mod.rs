//! Instructions per fault, counted by callgrind.
//!
//! This program runs itself under `valgrind --tool=callgrind`, with collection toggled at the
//! entry and return of the function that makes one fault, so that only the subsystem is counted:
//! from the fault's entry to its return, including the call itself and the tables and anon_vmas
//! needed by the faults, over 4,096 fresh pages. The cost of filling the page is known exactly from
//! the same profile (separate functions zero and copy, and are called in the same way for each
//! page) and is subtracted; the zeroing of page tables is not. The figures are exactly reproducible
//! on one build.

pub mod callgrind;
pub mod cases;
mod run;
pub mod source;

use crate::facts::said;
use crate::machine::{COPY, ZERO};
use crate::report::Report;
use callgrind::Profile;
use cases::{CASE_END, COUNTED, Case, What};
use faultless::{AnonVmaCheck, Locking};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Command;

/// The largest number of instructions of a speculative fault of each kind, besides filling its
/// page; for reads of files and prefault, per mapped page.
const MOST: [(What, Option<f64>); 16] = [
    (What::Write, Some(250.0)),
    (What::Read, None),
    (What::Reuse, None),
    (What::Copy, None),
    (What::FileRead, Some(150.0)),
    (What::FileWrite, Some(500.0)),
    (What::FileCopy, Some(600.0)),
    (What::FileMajor, Some(600.0)),
    (What::StoredWrite, Some(600.0)),
    (What::StoredCopy, Some(600.0)),
    (What::HugeRead, Some(400.0)),
    (What::HugeMap, Some(20.0)),
    (What::Ahead { order: 3, pooled: false }, Some(260.0)),
    (What::Ahead { order: 3, pooled: true }, Some(268.0)),
    (What::Ahead { order: 5, pooled: false }, Some(122.0)),
    (What::Ahead { order: 5, pooled: true }, Some(122.0)),
];

/// Functions of the host's allocator that a call may reach. Their cost does not belong to the
/// subsystem.
const HEAP: [&str; 5] = ["malloc", "free", "posix_memalign", "aligned_alloc", "calloc"];

/// The largest number of instructions of calls of the subsystem, without the heap: a third of Linux
/// 6.12's cost, less the cost around the call (entry and return, the heap, the fault's own
/// exception). The last two are in a space that another CPU runs, too.
const CALLS: [(What, bool, f64); 9] = [
    (What::Unmap, false, 115.0),
    (What::MapUnmap, false, 2000.0),
    (What::MapTouchUnmap, false, 4700.0),
    (What::Break, false, 1600.0),
    (What::Protect, false, 2800.0),
    (What::Fork, false, 100.0),
    (What::ForkExit, false, 135.0),
    (What::MapUnmap, true, 5400.0),
    (What::Break, true, 5200.0),
];

/// The hidden argument for starting this program as the measured program.
pub const CHILD: &str = "counted";

/// Runs the counts. Prints the distribution of instructions of the workload named by `explain`.
///
/// # Errors
/// An error or missing feature of valgrind, or a fault that was not served in the intended way.
pub fn run(quick: bool, explain: Option<&str>) -> Result<Report, String> {
    if said("valgrind", &["--version"]).is_none() {
        return Err("instructions are counted by valgrind, which is not installed; \
                    on Debian and Ubuntu: apt-get install valgrind"
            .into());
    }
    let cases = cases::all(quick);
    let profiles = profile(&cases, quick)?;
    let counted: Vec<_> = cases
        .iter()
        .zip(&profiles)
        .map(|(case, own)| (case, besides(case, own, &profiles)))
        .collect();
    let mut report = Report::default();
    for ((case, per_operation), profile) in counted.iter().zip(&profiles) {
        let (workload, setting) = (case.workload(), case.setting());
        let at = (workload, 1, &setting[..]);
        report.row(at, ("instructions_besides_filling", "instructions"), *per_operation);
        if CALLS.iter().any(|&(what, ..)| what == case.what) {
            let heap = heap(case, profile);
            report.row(at, ("instructions_of_the_heap", "instructions"), heap);
        }
        if explain == Some(workload) {
            println!("{workload} {setting}\n{}", explained(profile, case.operations()));
        }
    }
    gates(&mut report, &counted, &profiles);
    for ((case, per_operation), profile) in counted.iter().zip(&profiles) {
        let of = |what, shared| what == case.what && shared == case.shared;
        let most = CALLS.iter().find(|&&(what, shared, _)| of(what, shared));
        if case.gated
            && let Some(&(.., most)) = most
        {
            let ours = per_operation - heap(case, profile);
            let shared = if case.shared { ", shared" } else { "" };
            let promise = format!("{}{shared}: at most {most} instructions", case.workload());
            report.gate(promise, format!("{ours:.2}"), ours <= most);
        }
    }
    simulated(&mut report, &counted, &profiles)?;
    Ok(report)
}

/// The instructions of a path in the virtual machine's profile.
#[derive(serde::Deserialize)]
struct Simulated {
    case: String,
    #[serde(default)]
    shared: bool,
    instructions: f64,
}

/// The largest accepted relative difference from the counts.
const CURRENT: f64 = 0.02;

/// Checks whether the virtual machine charges the currently counted instructions.
fn simulated(
    report: &mut Report,
    counted: &[(&Case, f64)],
    profiles: &[Profile],
) -> Result<(), String> {
    let text = include_str!("../../../virtual/instructions.toml");
    let paths: BTreeMap<String, Simulated> =
        toml::from_str(text).map_err(|error| format!("instructions.toml: {error}"))?;
    for path in paths.into_values() {
        let at = counted.iter().position(|(case, _)| {
            let plain = case.locking == Locking::Speculative && case.check == AnonVmaCheck::Late;
            plain && case.workload() == path.case && case.shared == path.shared
        });
        let at = at.ok_or_else(|| format!("instructions.toml: no case {}", path.case))?;
        let (case, ours) = counted[at];
        let calls = CALLS.iter().any(|&(what, ..)| what == case.what);
        let ours = if calls { ours - heap(case, &profiles[at]) } else { ours };
        let shared = if path.shared { ", shared" } else { "" };
        let most = path.instructions;
        let promise = format!("{}{shared}: simulated as {most:.2} instructions", path.case);
        let met = (ours - path.instructions).abs() <= CURRENT * path.instructions;
        report.gate(promise, format!("{ours:.2}"), met);
    }
    Ok(())
}

/// Returns the instructions of the host's allocator per operation.
fn heap(case: &Case, profile: &Profile) -> f64 {
    let spent: u64 = HEAP.iter().map(|name| profile.function(name).in_calls).sum();
    spent as f64 / case.operations() as f64
}

fn gates(report: &mut Report, counted: &[(&Case, f64)], profiles: &[Profile]) {
    let of = |what, locking| {
        let at = counted.iter().position(|(case, _)| {
            case.what == what && case.locking == locking && case.check == AnonVmaCheck::Late
        })?;
        let (case, all) = counted[at];
        // The cost of the host's allocator depends on earlier requests, and not on the policy.
        Some((case, all, all - heap(case, &profiles[at])))
    };
    for (what, most) in MOST {
        let Some((case, all, ours)) = of(what, Locking::Speculative) else { continue };
        if let Some(most) = most {
            let setting =
                if let What::Ahead { .. } = what { case.setting() } else { String::new() };
            let name = format!("{} {setting}", case.workload());
            let promise = format!("{}: at most {most} instructions", name.trim_end());
            report.gate(promise, format!("{all:.2}"), all <= most);
        }
        for locked in [Locking::MmapLock, Locking::PerVma] {
            let Some((.., theirs)) = of(what, locked) else { continue };
            let name = (case.workload(), locked.name());
            let promise =
                format!("{}: at most as many as under {}, without the heap", name.0, name.1);
            report.gate(promise, format!("{ours:.2}, {theirs:.2}"), ours <= theirs);
        }
    }
}

/// Returns the instructions per operation, besides filling the page.
fn besides(case: &Case, profile: &Profile, all: &[Profile]) -> f64 {
    let copies = matches!(case.what, What::Copy | What::FileCopy | What::Migrate);
    let filler = if copies { COPY } else { ZERO };
    // The cost of a page is constant. The calls of a part include some uncounted earlier calls. The
    // part with the fewest uncounted calls determines the cost.
    let page = all.iter().map(|profile| {
        let filler = profile.function(filler);
        filler.in_calls as f64 / filler.calls.max(1) as f64
    });
    let filling = page.fold(0.0, f64::max) * case.pages_filled() as f64;
    (profile.total as f64 - filling) / case.operations() as f64
}

/// Runs the cases under callgrind: a profile for each, in their order.
fn profile(cases: &[Case], quick: bool) -> Result<Vec<Profile>, String> {
    let own =
        std::env::current_exe().map_err(|error| format!("the path of this program: {error}"))?;
    let dir = tempfile::tempdir().map_err(|error| format!("a temporary directory: {error}"))?;
    let parts = dir.path().join("part");
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--quiet", "--collect-atstart=no"]);
    command.args(COUNTED.map(|symbol| format!("--toggle-collect={symbol}")));
    command.arg(format!("--dump-after={CASE_END}"));
    command.arg(format!("--callgrind-out-file={}", parts.display()));
    command.arg(own).arg(CHILD).args(quick.then_some("--quick"));
    let output = command.output().map_err(|error| format!("valgrind: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("under valgrind ({}): {}", output.status, said.trim()));
    }
    (1..=cases.len()).map(|part| read_part(&parts, part)).collect()
}

fn read_part(parts: &Path, part: usize) -> Result<Profile, String> {
    let path = parts.with_extension(part.to_string());
    let text = std::fs::read_to_string(&path)
        .map_err(|error| format!("part {part} of callgrind's profile: {error}"))?;
    let profile = Profile::parse(&text)
        .map_err(|error| format!("part {part} of callgrind's profile: {error}"))?;
    if profile.total == 0 {
        return Err(format!("part {part} of callgrind's profile is empty"));
    }
    Ok(profile)
}

/// Returns the functions and source lines with the highest cost, per operation.
fn explained(profile: &Profile, operations: u64) -> String {
    let each = |cost: u64| cost as f64 / operations as f64;
    // Functions without a cost of their own only led to the counted code.
    let mut functions: Vec<_> =
        profile.functions.iter().filter(|(_, function)| function.own != 0).collect();
    functions.sort_by_key(|(name, function)| (Reverse(function.own + function.called), *name));
    let mut text = String::from("      in all        own  function\n");
    for (name, function) in functions.iter().take(24) {
        let (all, own) = (each(function.own + function.called), each(function.own));
        text += &format!("  {all:>10.2} {own:>10.2}  {name}\n");
    }
    text += "         own  function of the source, inlined or not\n";
    for (function, cost) in source::functions(&profile.lines).iter().take(64) {
        text += &format!("  {:>10.2}  {} {}\n", each(*cost), short(&function.file), function.name);
    }
    let mut files = HashMap::<&str, u64>::new();
    for ((file, _), cost) in &profile.lines {
        *files.entry(file).or_default() += cost;
    }
    let mut files: Vec<_> = files.into_iter().collect();
    files.sort_by_key(|&(file, cost)| (Reverse(cost), file));
    text += "         own  file\n";
    for (file, cost) in files.iter().take(16) {
        text += &format!("  {:>10.2}  {}\n", each(*cost), short(file));
    }
    let mut lines: Vec<_> = profile.lines.iter().collect();
    lines.sort_by_key(|&(place, cost)| (Reverse(cost), place));
    text += "         own  line\n";
    for ((file, line), cost) in lines.iter().take(48) {
        text += &format!("  {:>10.2}  {}:{line}\n", each(**cost), short(file));
    }
    text
}

/// Returns the significant end of a path.
fn short(file: &str) -> &str {
    file.find("crates/").or_else(|| file.find("library/")).map_or(file, |at| &file[at..])
}
