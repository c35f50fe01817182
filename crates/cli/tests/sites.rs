//! `advise` of a recording with call stacks: call sites, and exports to other tools.

mod common;

use common::{faultless, json_lines};
use faultless_trace::event::{
    Access, Backing, Event, Frame, Function, Header, Kind, ProcessInfo, Prot, Recorded, StackId,
    Stacks, ThreadInfo,
};
use faultless_trace::{Trace, compact};
use std::fs;
use std::path::Path;

const PAGES: u64 = 4096;

/// Writes a recording of a program whose function `load` fills 16 MiB by `memset`, in line 7, and
/// whose `main` touches one page in sixteen of further 16 MiB. `main` has mapped the first 16 MiB,
/// and `malloc` of `load` the others. Without `stacks`, the recording has
/// no call stacks.
fn write(path: &Path, stacks: bool) {
    let (start, prot, backing) = (1 << 40, Prot::READ | Prot::WRITE, Backing::Anon);
    let len = PAGES << 12;
    let map = |at: u64| Kind::Map { start: at, len, prot, flags: 0x22, backing };
    let fault = |page: u64, number: u32| {
        let mut kind = Kind::first(start + (page << 12), Access::Write);
        if let Kind::Fault { stack, .. } = &mut kind
            && stacks
        {
            *stack = StackId::new(number);
        }
        kind
    };
    let called = |number| stacks.then(|| Kind::Caller { stack: StackId::new(number) });
    let maps = [called(1), Some(map(start)), called(4), Some(map(start + len))];
    let kinds = maps
        .into_iter()
        .flatten()
        .chain((0..PAGES).map(|page| fault(page, 3)))
        .chain((PAGES..2 * PAGES).step_by(16).map(|page| fault(page, 1)));
    compact::write(path, &app(kinds, stacks)).expect("written");
}

/// Returns a recording of a program with these events. Its call stacks are those of `main` in line
/// 20, which calls `load`, in line 7 of which `memset` and `malloc` are called.
fn app(kinds: impl Iterator<Item = Kind>, stacks: bool) -> Trace {
    let function = |(name, module, file): (&str, &str, &str)| Function {
        name: name.into(),
        module: module.into(),
        file: file.into(),
    };
    let frame = |caller, function, line| Frame { caller: StackId::new(caller), function, line };
    let functions = [
        ("main", "app", "app.c"),
        ("load", "app", "app.c"),
        ("__memset_avx2", "libc.so.6", ""),
        ("malloc", "libc.so.6", ""),
    ];
    let recorded = Recorded::all() - Recorded::STACKS;
    let trace = Trace {
        header: Header {
            program: "app".into(),
            page_size: 4096,
            recorded: if stacks { Recorded::all() } else { recorded },
            ..Header::default()
        },
        processes: vec![ProcessInfo { parent: None, pid: None }],
        threads: vec![ThreadInfo { process: 0, name: "app".into() }],
        events: (0..)
            .zip(kinds)
            .map(|(time_us, kind)| Event { time_us: time_us * 100, thread: 0, kind })
            .collect(),
        stacks: Stacks {
            functions: functions.map(function).to_vec(),
            frames: vec![frame(0, 0, 20), frame(1, 1, 7), frame(2, 2, 0), frame(2, 3, 0)],
        },
    };
    if stacks { trace } else { Trace { stacks: Stacks::default(), ..trace } }
}

#[test]
fn call_sites_are_listed_with_a_change() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("app.fltrace");
    write(&file, true);
    let path = file.to_str().expect("text");
    let text = faultless(&["advise", path]).succeeds();
    let rows: Vec<_> = text.lines().filter(|line| line.contains("app.c:")).collect();
    assert!(rows[0].contains("1. load app.c:7 (app)") && rows[0].contains("4,096"), "{text}");
    assert!(rows[0].contains("16 MiB"), "{text}");
    assert!(rows[1].contains("2. main app.c:20 (app)") && rows[1].contains("256"), "{text}");
    assert!(text.contains(" 1. called by main: "), "{text}");
    assert!(text.contains("\n    memory of mmap in main app.c:20 (app): 16 MiB\n"), "{text}");
    let other = "\n    memory of mmap in load app.c:7 (app), by malloc: 1 MiB\n";
    assert!(text.contains(other), "{text}");
    let page = dir.path().join("app.html");
    let html = page.to_str().expect("text");
    let lines = json_lines(&faultless(&["advise", path, "--json", "-", "--html", html]).succeeds());
    let faults = common::value(&lines, "linux", "call site load app.c:7", "site_faults");
    assert_eq!(faults, Some(4096.0));
    let memory = "call site load app.c:7 (app), memory of mmap in main app.c:20 (app)";
    let bytes = common::value(&lines, "linux", memory, "site_bytes_by_call");
    assert_eq!(bytes, Some(f64::from(16 << 20)));
    let page = fs::read_to_string(page).expect("written");
    assert!(
        page.contains("Calls that create memory")
            && page.contains(">\nmmap in main app.c:20 (app)\n<")
    );
}

/// The faults of `memset`, and the `mmap` of `malloc`, in a program without frame pointers.
#[test]
fn call_sites_without_a_caller_share_a_row() {
    let (start, prot, backing) = (1 << 40, Prot::READ | Prot::WRITE, Backing::Anon);
    let len = PAGES << 12;
    let fault = |page: u64, number: u32| {
        let mut kind = Kind::first(start + (page << 12), Access::Write);
        if let Kind::Fault { stack, .. } = &mut kind {
            *stack = StackId::new(number);
        }
        kind
    };
    let called = Kind::Caller { stack: StackId::new(6) };
    let kinds = [called, Kind::Map { start, len, prot, flags: 0x22, backing }]
        .into_iter()
        .chain((0..2048).map(|page| fault(page, 5)))
        .chain((2048..3072).map(|page| fault(page, 6)))
        .chain((3072..PAGES).map(|page| fault(page, 2)));
    let mut trace = app(kinds, true);
    let frame = |function| Frame { caller: StackId::NONE, function, line: 0 };
    trace.stacks.frames.extend([frame(2), frame(3)]);
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("app.fltrace");
    compact::write(&file, &trace).expect("written");
    let path = file.to_str().expect("text");
    let ran = faultless(&["advise", path, "--json", "-"]);
    let (text, lines) = (ran.err.clone(), json_lines(&ran.succeeds()));
    assert!(text.contains("1. caller unknown ") && text.contains("2. load app.c:7"), "{text}");
    assert!(!text.contains("memset") && !text.contains("further call site"), "{text}");
    assert!(text.contains("    memory of mmap, caller unknown: 12 MiB\n"), "{text}");
    assert!(text.contains("--stacks=dwarf shows the callers"), "{text}");
    let faults = common::value(&lines, "linux", "call site caller unknown", "site_faults");
    assert_eq!(faults, Some(3072.0));
    write(&file, true);
    let text = faultless(&["advise", path]).succeeds();
    assert!(!text.contains("caller unknown"), "{text}");
}

/// `main` touches memory that `load` lets grow, by `mremap` and `malloc`, and frees, by `madvise`
/// and `munmap`.
#[test]
fn calls_that_create_and_free_memory_are_named() {
    const MIB: u64 = 1 << 20;
    let (start, prot, backing) = (1 << 40, Prot::READ | Prot::WRITE, Backing::Anon);
    let called = |number| Kind::Caller { stack: StackId::new(number) };
    let map = |start, len| Kind::Map { start, len, prot, flags: 0x22, backing };
    let touch = |start: u64, mib: u64| {
        (start..start + mib * MIB).step_by(4096).map(|at| {
            let mut kind = Kind::first(at, Access::Write);
            if let Kind::Fault { stack, .. } = &mut kind {
                *stack = StackId::new(1);
            }
            kind
        })
    };
    let (grown, heap) = (start + 16 * MIB, start + 64 * MIB);
    let remap = Kind::Remap { old: start, old_len: MIB, new: grown, new_len: 3 * MIB, flags: 1 };
    let discard = Kind::Advise { start: grown + MIB, len: 2 * MIB, advice: 4 };
    let kinds = [called(1), map(start, MIB), called(2), remap]
        .into_iter()
        .chain(touch(grown, 3))
        .chain([Kind::Brk { end: heap }, called(4), Kind::Brk { end: heap + MIB }])
        .chain(touch(heap, 1))
        .chain([called(2), discard])
        .chain(touch(grown + MIB, 2))
        .chain([called(2), Kind::Unmap { start: grown, len: MIB }])
        .chain([called(1), map(grown, MIB)])
        .chain(touch(grown, 1));
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("app.fltrace");
    compact::write(&file, &app(kinds, true)).expect("written");
    let ran = faultless(&["advise", file.to_str().expect("text"), "--json", "-"]);
    let (text, lines) = (ran.err.clone(), json_lines(&ran.succeeds()));
    let load = "in load app.c:7 (app)";
    let memory = format!(
        "\n    memory of mremap {load}: 4 MiB; mmap in main app.c:20 (app): 2 MiB; brk {load}, by \
         malloc: 1 MiB\n"
    );
    assert!(text.contains(&memory), "no {memory:?} in {text}");
    let again = format!(
        "\n    touches again the memory freed by madvise {load}: 2 MiB; munmap {load}: 1 MiB\n"
    );
    assert!(text.contains(&again), "no {again:?} in {text}");
    for (call, mib) in [("madvise", 2), ("munmap", 1)] {
        let setting = format!("call site main app.c:20 (app), memory freed by {call} {load}");
        let bytes = common::value(&lines, "linux", &setting, "site_bytes_touched_again");
        assert_eq!(bytes, Some(f64::from(mib << 20)), "{call}");
    }
}

#[test]
fn results_are_exported_for_other_tools() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str| dir.path().join(name);
    write(&file("app.fltrace"), true);
    let formats = ["collapsed", "flamegraph", "firefox", "pprof", "csv", "openmetrics"];
    let mut args = vec!["advise".to_owned(), file("app.fltrace").display().to_string()];
    for format in formats {
        args.extend(["--export".to_owned(), format!("{format}={}", file(format).display())]);
    }
    faultless(&args.iter().map(String::as_str).collect::<Vec<_>>()).succeeds();
    let text = |name: &str| fs::read_to_string(file(name)).expect("written");
    assert_eq!(text("collapsed"), "app;main 256\napp;main;load;__memset_avx2 4096\n");
    assert!(text("flamegraph").contains("<title>load ("), "{}", text("flamegraph"));
    let profile: serde_json::Value = serde_json::from_str(&text("firefox")).expect("JSON");
    assert_eq!(profile["threads"][0]["samples"]["length"], 4352);
    assert!(fs::read(file("pprof")).expect("written").starts_with(&[0x1f, 0x8b]), "gzip");
    assert!(text("firefox").contains("mmap in main app.c:20 (app)"));
    assert!(text("csv").contains("memory of mmap in main app.c:20 (app)"), "{}", text("csv"));
    let row = text("csv").lines().find(|line| line.contains("site_faults")).map(str::to_owned);
    assert!(
        row.is_some_and(|row| row.ends_with(",site_faults,count,4096,measured")),
        "{}",
        text("csv")
    );
    let metrics = text("openmetrics");
    assert!(metrics.contains("faultless_site_faults{") && metrics.ends_with("# EOF\n"));
}

#[test]
fn each_figure_is_measured_or_predicted() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str| dir.path().join(name).display().to_string();
    write(Path::new(&file("app.fltrace")), true);
    let (recording, metrics) = (file("app.fltrace"), format!("openmetrics={}", file("om")));
    let args = ["advise", &recording, "--json", "-", "--export", &metrics];
    let lines = json_lines(&faultless(&args).succeeds());
    let basis_of = |metric: &str| -> Vec<&str> {
        let lines = lines.iter().filter(|line| line["metric"] == metric);
        lines.map(|line| line["basis"].as_str().expect("a name")).collect()
    };
    for metric in ["seconds", "page_ns", "faults"] {
        assert_eq!(basis_of(metric), ["measured"], "{metric}");
    }
    for metric in ["fault_seconds", "faults_expected"] {
        assert_eq!(basis_of(metric), ["predicted"], "{metric}");
    }
    assert_eq!(basis_of("site_faults"), ["measured"; 2]);
    let of_item = |metric: &str| metric.starts_with("predicted_") || metric == "unused_bytes";
    let (mut predictions, text) = (0, fs::read_to_string(file("om")).expect("written"));
    for line in &lines {
        let (metric, basis) = (&line["metric"], line["basis"].as_str().expect("a name"));
        let metric = metric.as_str().expect("a name");
        if of_item(metric) {
            assert_eq!(basis, "predicted", "{line}");
            predictions += 1;
        }
        let (name, label) = (format!("faultless_{metric}{{"), format!("basis=\"{basis}\""));
        let has = |row: &str| row.starts_with(&name) && row.contains(&label);
        assert!(text.lines().any(has), "{line}: {text}");
    }
    assert!(predictions > 10, "{predictions}");
}

#[test]
fn export_of_missing_stacks_names_the_remedy() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("app.fltrace");
    let path = file.to_str().expect("text");
    write(&file, false);
    let out = dir.path().join("out.svg");
    let target = format!("flamegraph={}", out.display());
    let error = faultless(&["advise", path, "--export", &target]).fails(2);
    assert!(error.contains("record with --stacks") && !out.exists(), "{error}");
    let same = format!("csv={path}");
    let error = faultless(&["advise", path, "--export", &same]).fails(2);
    assert!(error.contains("would overwrite the input"), "{error}");
    let error = faultless(&["advise", path, "--export", "svg=a"]).fails(2);
    assert!(error.contains("no format svg; the formats are collapsed"), "{error}");
    let error = faultless(&["stat", "pft", "--export", &target]).fails(2);
    assert!(error.contains("use csv or openmetrics here"), "{error}");
}

#[test]
fn figures_of_a_workload_are_exported() {
    let dir = tempfile::tempdir().expect("a directory");
    let out = dir.path().join("out.om");
    let target = format!("openmetrics={}", out.display());
    faultless(&["stat", "pft", "size=4M", "--export", &target]).succeeds();
    let text = fs::read_to_string(&out).expect("written");
    assert!(text.contains("# TYPE faultless_wall_seconds gauge"), "{text}");
}
