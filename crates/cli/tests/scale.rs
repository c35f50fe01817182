//! `faultless scale`: reproducible figures, plots and results, and messages about wrong arguments.

mod common;

use common::{Ran, command, faultless, interrupted, json_lines, value};
use faultless_trace::event::{
    Access, Backing, Birth, Event, Header, Kind, ProcessInfo, Prot, Recorded, ThreadInfo,
};
use faultless_trace::plan::Plan;
use faultless_trace::{Trace, compact, recordings};
use nix::sys::signal::Signal;
use std::time::Duration;

#[test]
fn scale_prints_the_same_figures_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let [json, plot] = ["x.jsonl", "x.svg"].map(|name| dir.path().join(name));
    let [json, plot] = [&json, &plot].map(|path| path.to_str().expect("text"));
    let args = ["scale", "pft", "--cpus", "1,2..8", "--seed", "3", "--json", json, "--plot", plot];
    let out = faultless(&args).succeeds();
    assert_eq!(out, faultless(&args).succeeds(), "the same seed");
    assert!(out.contains("simulated: two-socket") && out.contains("All figures are simulated"));
    for policy in ["speculative", "per_vma", "mmap_lock"] {
        for cpus in [1, 2, 4, 8] {
            let row = |line: &str| {
                let mut cells = line.split('|').map(str::trim).skip(1);
                cells.next() == Some(policy) && cells.next() == Some(&cpus.to_string())
            };
            assert!(out.lines().any(row), "{policy} {cpus}: {out}");
        }
    }
    assert!(out.contains(" at sync/") && out.contains("100 %"), "{out}");

    let lines = json_lines(&std::fs::read_to_string(json).expect("written"));
    let rate = |setting, cpus: u64| {
        let of: Vec<_> = lines.iter().filter(|line| line["cpus"] == cpus).cloned().collect();
        value(&of, "simulated-two-socket", setting, "operations_per_second").expect("a value")
    };
    for policy in ["locking=speculative", "locking=per_vma", "locking=mmap_lock"] {
        assert!(rate(policy, 2) > 1.5 * rate(policy, 1), "{policy}");
    }
    assert!(lines.iter().all(|line| line["params"]["seed"] == 3));
    for metric in
        ["line_transfers", "of_linear", "time in cache lines", "faults", "fault_latency_p99"]
    {
        assert!(value(&lines, "simulated", "per_vma", metric).is_some(), "{metric}");
    }

    let drawn = std::fs::read_to_string(plot).expect("written");
    assert!(drawn.starts_with("<svg") && drawn.trim_end().ends_with("</svg>"));
    for word in ["speculative", "per_vma", "mmap_lock", "pages a second", "simulated"] {
        assert!(drawn.contains(word), "{word}");
    }
}

/// Reads and evictions at the same time print the same figures at each layout of the host's
/// addresses, which the kernel chooses at random for each process.
#[test]
fn scale_of_llm_prints_the_same_figures_again() {
    let sizes = ["fast=2M", "passes=2", "--cpus", "6", "--policies", "speculative"];
    let args = [&["scale", "llm"], &sizes[..]].concat();
    let run = |padding: usize| {
        Ran::of(command(&args).env("FAULTLESS_TEST_PADDING", "x".repeat(padding))).succeeds()
    };
    let first = run(0);
    for number in 1..40 {
        assert_eq!(run(number * 100), first, "run {number}");
    }
}

#[test]
fn given_parameters_are_used() {
    let args = ["scale", "vma_mmap", "chunks=4", "passes=1", "--cpus", "2,3"];
    let more = ["--policies", "per_vma,speculative", "--details", "--profile", "eight-socket"];
    let out = faultless(&[&args[..], &more].concat()).succeeds();
    assert!(out.contains("eight-socket") && !out.contains("mmap_lock "), "{out}");
    assert!(
        out.contains("per_vma, 2 CPUs: the lines")
            && out.contains("speculative, 3 CPUs: the lines"),
        "{out}"
    );
    // No fault is timed.
    assert!(out.contains("an operation"), "{out}");
    let knob = ["--set", "locking=mmap_lock", "--set", "prefault_max_order=3"];
    let out =
        faultless(&[&["scale", "pft", "size=1M", "--cpus", "2"][..], &knob].concat()).succeeds();
    assert!(out.contains("mmap_lock") && !out.contains("per_vma"), "{out}");
    // More CPUs than the machine of the profile.
    let out =
        faultless(&["scale", "brk1", "passes=2", "--cpus", "200", "--policies", "speculative"]);
    assert!(out.succeeds().contains("more than the 192 CPUs of two-socket"));
}

/// The figures of the steady state exclude the start-up, in which CPUs conflict.
#[test]
fn warm_up_is_excluded_from_the_figures() {
    let args = ["scale", "mmap1", "passes=100", "--cpus", "1,8", "--policies", "speculative"];
    let run = |more: &[&str]| {
        let ran = faultless(&[&args[..], &["--json", "-"], more].concat());
        (ran.err.clone(), json_lines(&ran.succeeds()))
    };
    let steady = ["--warm-up", "100"];
    let (text, lines) = run(&steady);
    assert_eq!(run(&steady), (text.clone(), lines.clone()), "the same figures again");
    assert!(text.contains("without the first 100 calls and faults of each CPU"), "{text}");
    assert!(text.contains("start-up,") && text.contains("until the CPUs run at 90 %"), "{text}");
    let figure = |lines: &[serde_json::Value], cpus: u64, metric| {
        let of: Vec<_> = lines.iter().filter(|line| line["cpus"] == cpus).cloned().collect();
        value(&of, "simulated-two-socket", "speculative", metric)
    };
    let (_, whole) = run(&[]);
    let rate = |lines| figure(lines, 8, "operations_per_second").expect("a rate");
    assert!(rate(&lines) > 1.05 * rate(&whole), "{} {}", rate(&lines), rate(&whole));
    assert!(lines.iter().all(|line| line["params"]["warm_up"] == 100));
    assert!(whole.iter().all(|line| line["params"].get("warm_up").is_none()));
    for cpus in [1, 8] {
        // Of 200 calls of each CPU, and all CPUs end at about the same time.
        let calls = figure(&lines, cpus, "steady_calls").expect("counted") / cpus as f64;
        assert!((50.0..=101.0).contains(&calls), "{cpus} CPUs: {calls}");
        let wall = |lines| figure(lines, cpus, "wall_seconds").expect("a time");
        assert!(wall(&lines) < 0.6 * wall(&whole), "{cpus} CPUs");
        assert!(figure(&whole, cpus, "start_up_calls").is_none());
    }
    // The first calls fetch the lines of the space.
    let first = figure(&lines, 1, "start_up_calls");
    assert!(first.is_some_and(|calls| calls <= 4.0), "one CPU meets no other CPU: {first:?}");
    let conflicts =
        ["start_up_calls", "start_up_calls_min"].map(|metric| figure(&lines, 8, metric));
    assert!(conflicts.into_iter().flatten().any(|calls| calls > 4.0), "{conflicts:?}");
}

#[test]
fn too_long_warm_up_is_explained() {
    let args = ["scale", "vma_mmap", "chunks=8", "passes=2", "--cpus", "2", "--warm-up"];
    for (calls, says) in [
        ("16", "a CPU makes only 16 calls and faults, all of them in its warm-up"),
        ("17", "a CPU makes only 16 calls and faults, all of them in its warm-up"),
        ("15", "all CPUs work together for only"),
    ] {
        let error = faultless(&[&args[..], &[calls]].concat()).fails(1);
        let says = [says, "vma_mmap", "on 2 CPUs", "use a smaller --warm-up, or more work"];
        assert!(says.iter().all(|said| error.contains(said)), "{calls}: {error}");
    }
    faultless(&[&args[..], &["8"]].concat()).succeeds();
}

#[test]
fn every_bundled_recording_runs_with_its_recorded_faults() {
    for recording in recordings::all() {
        let lines = faultless(&["scale", recording.name, "--json", "-"]).succeeds();
        let lines = json_lines(&lines);
        let trace = recording.trace().expect("a valid recording");
        let summary = trace.summary();
        let threads = Plan::new(&trace).expect("a recording with a plan").threads().len();
        let recorded =
            (summary.user_faults + summary.kernel_faults - summary.unserved_faults) as f64;
        for policy in ["speculative", "per_vma", "mmap_lock"] {
            let faults = value(&lines, "simulated", policy, "faults").expect("counted");
            assert!((faults - recorded).abs() <= 0.04 * recorded, "{}: {faults}", recording.name);
            let rate = value(&lines, "simulated", policy, "operations_per_second");
            assert!(rate.is_some_and(|rate| rate > 0.0), "{}", recording.name);
        }
        assert!(lines.iter().all(|line| line["cpus"] == threads), "{}", recording.name);
    }
}

#[test]
fn table_shows_simulated_beside_published_figures() {
    let out = faultless(&["scale", "--table", "page_fault", "--json", "-"]);
    let table = out.err.clone();
    let lines = json_lines(&out.succeeds());
    let row = |label: &str| {
        let line = table.lines().find(|line| line.starts_with(&format!("| {label} ")));
        line.unwrap_or_else(|| panic!("{label}: {table}")).to_owned()
    };
    let printed = row("page_fault2, speculative");
    assert!(printed.contains("2,385,166") && printed.trim_end().ends_with("0.90x |"), "{table}");
    assert!(table.contains("Differences: ") && table.contains("simulated"), "{table}");
    let of = |workload: &str| {
        let lines = lines.iter().filter(|line| line["workload"] == workload);
        lines.cloned().collect::<Vec<_>>()
    };
    let machine = "simulated-two-socket";
    for workload in ["page_fault1", "page_fault2"] {
        let rate = |setting| value(&of(workload), machine, setting, "operations_per_second");
        let [base, ours] = ["locking=mmap_lock", "locking=speculative"].map(rate);
        assert!(ours > base && base > Some(0.0), "{workload}: {base:?} {ours:?}");
    }
    let published = value(&of("page_fault3"), machine, "locking=mmap_lock", "published");
    assert_eq!(published, Some(4_436_330.1));
    let speculative = |metric| value(&of("page_fault2"), machine, "locking=speculative", metric);
    assert!(speculative("published_to_base").is_some_and(|it| (it - 0.899).abs() < 0.001));
    assert!(speculative("to_base").is_some_and(|ratio| ratio > 2.0));
    for line in of("page_fault2") {
        let param_of = |param: &str| line["params"][param].as_str().unwrap_or_default().to_owned();
        assert_eq!(param_of("table"), "page_fault");
        assert!(param_of("row").starts_with("page_fault2, "), "{line}");
        assert!(param_of("published_by").starts_with("H. Song"), "{line}");
    }
    assert!(lines.iter().all(|line| line["cpus"] == 72), "{table}");
}

#[test]
fn table_with_cpus_has_only_their_rows_and_details() {
    let args = ["scale", "--table", "prefault", "--cpus", "1", "--details", "--json", "-"];
    let ran = faultless(&args);
    let table = ran.err.clone();
    let lines = json_lines(&ran.succeeds());
    assert!(lines.iter().all(|line| line["cpus"] == 1));
    let published: Vec<_> =
        lines.iter().filter(|line| line["metric"] == "published").map(|it| &it["value"]).collect();
    assert_eq!(published, [45_097.0, 45_058.0, 45_544.0]);
    let ratios = lines.iter().filter(|line| line["metric"] == "published_to_base").count();
    assert_eq!(ratios, 2, "the base has no ratio");
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| standard") || line.starts_with("| prefault"))
        .map(|line| line.split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows.len(), 6, "three rows, each with its details: {table}");
    let faults = |row: &[&str]| row[11].parse::<f64>().expect("a number");
    assert!(faults(&rows[3]) > 0.99 && faults(&rows[4]) < 0.4, "{table}");
    let parts: f64 = rows[3][4..11].iter().map(|part| part.parse::<f64>().expect("ns")).sum();
    let all: f64 = rows[3][3].parse().expect("ns");
    assert!((parts - all).abs() <= 4.0, "{table}");
}

/// A word is a bundled name, also with a file of the same name, which the user can name by a path.
#[test]
fn bundled_names_take_precedence_over_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let text = faultless(&["profile", "show", "two-socket"]).succeeds();
    let mine = text.replace("name = \"two-socket\"", "name = \"mine\"");
    std::fs::write(dir.path().join("two-socket"), mine).expect("written");
    std::fs::write(dir.path().join("sort"), "no recording").expect("written");
    let run =
        |args: &[&str]| Ran::of(command(&[&["scale"], args].concat()).current_dir(dir.path()));
    let brief = ["brk1", "passes=2", "--cpus", "1", "--policies", "speculative"];

    for profile in [&["--profile", "two-socket"][..], &[]] {
        let ran = run(&[&brief[..], profile].concat());
        assert!(ran.err.contains("two-socket is the bundled profile"), "{}", ran.err);
        assert!(ran.succeeds().contains("simulated: two-socket ("));
    }
    let ran = run(&[&brief[..], &["--profile", "./two-socket"]].concat());
    assert_eq!(ran.err.matches("bundled").count(), 0, "{}", ran.err);
    assert!(ran.succeeds().contains("simulated: mine ("));

    let ran = run(&["sort", "--policies", "speculative"]);
    assert!(ran.err.contains("sort is the bundled recording"), "{}", ran.err);
    ran.succeeds();
    run(&["./sort"]).fails(2);
}

/// A run of minutes ends in the middle, and earlier results are printed.
#[test]
fn interrupted_scale_ends_soon() {
    let dir = tempfile::tempdir().expect("a directory");
    let json = dir.path().join("x.jsonl");
    let list = ["scale", "page_fault1", "passes=2000", "--policies", "speculative", "--cpus"];
    let list = [&list[..], &["1,64", "--json", json.to_str().expect("text")]].concat();
    let table = vec!["scale", "--table", "vma"];
    for (args, within, signal, code) in [
        (&list, "64 CPUs ...", Signal::SIGTERM, 143),
        (&list, "64 CPUs ...", Signal::SIGINT, 130),
        (&table, "384 CPUs ...", Signal::SIGTERM, 143),
        (&table, "384 CPUs ...", Signal::SIGINT, 130),
    ] {
        // The simulation has started by then.
        let (status, out) = interrupted(args, within, Duration::from_millis(500), signal);
        assert_eq!(status, Some(code), "{args:?} {signal}: {out}");
        let rows = out.lines().filter(|line| line.starts_with("| ")).count();
        assert!(rows > 1, "earlier results are printed: {out}");
        assert!(out.contains("Interrupted: the results are not complete."), "{out}");
    }
    assert!(!json.exists());
    let partial = std::fs::read_to_string(json.with_extension("jsonl.partial")).expect("kept");
    assert!(json_lines(&partial).iter().all(|line| line["cpus"] == 1), "{partial}");
}

#[test]
fn wrong_arguments_are_explained() {
    let dir = tempfile::tempdir().expect("a directory");
    let profile = dir.path().join("mine.toml");
    std::fs::write(&profile, "name = 3").expect("written");
    let profile = profile.to_str().expect("text");
    for (args, says) in [
        (&["pfft"][..], "did you mean pft?"),
        (&["pft", "sice=1M"], "did you mean size?"),
        (&["pft", "threads=4"], "remove threads="),
        (&["pft", "--cpus", "0"], "from 1 to 1024"),
        (&["pft", "--cpus", "8..4"], "ends before it begins"),
        (&["pft", "--policies", "speculativ"], "did you mean speculative?"),
        (&["pft", "--policies", "per_vma", "--set", "locking=per_vma"], "use one of the two"),
        (&["pft", "--profile", "two-sockets"], "did you mean two-socket?"),
        (&["pft", "--profile", profile], "mine.toml"),
        (&["pft", "--profile", profile, "--plot", profile], "mine.toml"),
        (&["python", "--cpus", "4"], "one CPU for each thread"),
        (&["python", "size=4M"], "has no parameters"),
        (&["python", "--warm-up", "4"], "no steady state"),
        (&["pft", "--warm-up", "0"], "from 1 to"),
        (&["pft", "--warm-up", "many"], "'many' for '--warm-up <N>': expected a number from 1"),
        (&["pft", "--warm-up", "1.5"], "'1.5' for '--warm-up <N>': expected a number from 1"),
        (&["pft", "--warm-up=-1"], "'-1' for '--warm-up <N>': expected a number from 1"),
        (&["pft", "--warm-up=18446744073709551616"], "expected a number from 1"),
        (&["pft", "--warm-up"], "a value is required for '--warm-up <N>'"),
        (&["--table", "vma", "--warm-up", "4"], "cannot be used with"),
        (&["page_fault1_churn", "mode=processes"], "threads"),
        (&[], "<WORKLOAD|RECORDING|--table <NAME>>"),
        (&["--table", "prefaults"], "prefault"),
        (&["pft", "--table", "prefault"], "cannot be used with"),
        (&["--table", "prefault", "--cpus", "4"], "rows for 1, 8, 16, 64, 128, 512 CPUs only"),
        (&["--table", "prefault", "--policies", "per_vma"], "cannot be used with"),
    ] {
        let error = faultless(&[&["scale"], args].concat()).fails(2);
        assert!(error.contains(says), "{args:?}: {error}");
    }
}

/// A machine has at most 1,024 CPUs, and a simulated replay needs a CPU for each thread.
#[test]
fn recording_with_more_threads_than_cpus_is_not_simulated() {
    const THREADS: u32 = 1025;
    let rw = Prot::READ | Prot::WRITE;
    let (start, len, backing) = (1 << 30, u64::from(THREADS) << 12, Backing::Anon);
    let map = Kind::Map { start, len, prot: rw, flags: 0x22, backing };
    let spawn = |child| (0, Kind::Spawn { child, birth: Birth::Thread });
    let fault =
        |thread: u32| (thread, Kind::first(start + (u64::from(thread) << 12), Access::Write));
    let events =
        [(0, map)].into_iter().chain((1..THREADS).map(spawn)).chain((0..THREADS).map(fault));
    let trace = Trace {
        header: Header { page_size: 4096, recorded: Recorded::all(), ..Header::default() },
        processes: vec![ProcessInfo { parent: None, pid: None }],
        threads: vec![ThreadInfo { process: 0, name: String::new() }; THREADS as usize],
        events: (0..)
            .zip(events)
            .map(|(time_us, (thread, kind))| Event { time_us, thread, kind })
            .collect(),
        ..Trace::default()
    };
    let dir = tempfile::tempdir().expect("a directory");
    let [file, html] = ["many.fltrace", "many.html"].map(|name| dir.path().join(name));
    compact::write(&file, &trace).expect("written");
    let [file, html] = [&file, &html].map(|path| path.to_str().expect("text"));
    for args in [
        &["scale", file][..],
        &["compare", "--quick", "--only", file],
        &["replay", file, "--html", html],
    ] {
        let ran = faultless(args);
        assert_eq!(ran.out, "", "{args:?}");
        let error = ran.fails(2);
        for said in ["many: ", "1,025 threads", "at most 1,024 CPUs", "without --html"] {
            assert!(error.contains(said), "{args:?}: no {said:?} in {error}");
        }
    }
    // On this machine the threads share CPUs.
    faultless(&["replay", file]).succeeds();
}
