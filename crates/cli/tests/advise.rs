//! `advise`: its output for a recording and for a program, its errors, and the restoration of
//! system settings.

mod common;

use common::{Ran, command, faultless, json_lines, send, value};
use faultless_analysis::advise::file::decode;
use faultless_trace::recordings;
use nix::sys::signal::Signal;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A recording made by perf.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../trace/tests/data/fixture.perf.data");
/// A stand-in for perf: runs the command after `--`, writes a recording, and returns the exit
/// status of the program.
const PERF: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
    -o) out=$2; shift 2 ;;
    --) shift; break ;;
    *) shift ;;
    esac
done
"$@"
status=$?
cat "$FIXTURE" > "$out"
[ $status -gt 128 ] && kill -$((status - 128)) $$
exit $status
"#;
/// The sizes of huge pages.
const SIZES: &str = "/sys/kernel/mm/transparent_hugepage";

/// A lock for tests during which the settings of the system must not change.
static SETTINGS: Mutex<()> = Mutex::new(());

fn settled() -> MutexGuard<'static, ()> {
    SETTINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns `faultless advise --lesser` with these arguments, with the stand-in for perf in `bin`.
fn advise(bin: &Path, args: &[&str]) -> Command {
    let perf = bin.join("perf");
    fs::write(&perf, PERF).expect("written");
    fs::set_permissions(&perf, fs::Permissions::from_mode(0o755)).expect("ours");
    let mut advise = command(&["advise", "--lesser"]);
    let path = std::env::var("PATH").expect("a path");
    advise.args(args).env("FIXTURE", FIXTURE).env("PATH", format!("{}:{path}", bin.display()));
    advise
}

#[test]
fn cold_requires_a_trial_and_a_mapped_file() {
    let error = faultless(&["advise", "--cold", "--", "true"]).fails(2);
    assert!(error.contains("--try"), "{error}");
    let _settled = settled();
    let bin = tempfile::tempdir().expect("a directory");
    let ran = Ran::of(&mut advise(bin.path(), &["--try", "--cold", "--", "true"]));
    let out = ran.succeeds();
    assert!(out.contains("No setting was tried: the program maps no file of 8 MiB"), "{out}");
}

#[test]
fn advice_for_a_recording_fits_one_screen_and_takes_seconds() {
    let _settled = settled();
    let out = faultless(&["advise", "python"]).succeeds();
    for expected in [
        "python: ",
        " are spent in 24,",
        "second to eighth page of a sequence",
        "A zeroed page costs",
        "The time of the run is the time of the recording",
        "on today's Linux",
    ] {
        assert!(out.contains(expected), "no {expected:?} in {out}");
    }
    assert!(out.lines().count() <= 40, "{out}");
    assert!(!out.contains("pages touched"), "a single process: {out}");
    assert!(!out.contains("Java") && !out.contains("Go frees"), "neither Java nor Go: {out}");
}

#[test]
fn closed_output_does_not_prevent_the_files() {
    let _settled = settled();
    let dir = tempfile::tempdir().expect("a directory");
    let names = ["a.toml", "a.jsonl", "a.html", "a.csv"];
    let [save, json, html, csv] = names.map(|name| dir.path().join(name).display().to_string());
    let csv = format!("csv={csv}");
    let args = ["--save", &save, "--json", &json, "--html", &html, "--export", &csv];
    let mut child = command(&["advise", "python"]);
    let mut child = child.args(args).stdout(Stdio::piped()).spawn().expect("started");
    // As by `head`, which has read enough.
    drop(child.stdout.take());
    assert!(child.wait().expect("ended").success());
    for name in names {
        let size = fs::metadata(dir.path().join(name)).map_or(0, |data| data.len());
        assert!(size > 0, "{name} is missing or empty");
    }
}

#[test]
fn processes_of_a_recording_are_counted_apart() {
    let _settled = settled();
    let ran = faultless(&["advise", "gcc", "--json", "-"]);
    for row in ["| 1 cc1 (of 0) | 38,719 |  89.86 % |", "| all          | 43,089 | 100.00 % |"] {
        assert!(ran.err.contains(row), "{}", ran.err);
    }
    let lines = json_lines(&ran.succeeds());
    let of_cc1 = lines
        .iter()
        .find(|line| line["metric"] == "process_faults" && line["params"]["process_name"] == "cc1");
    let of_cc1 = of_cc1.expect("a line for the process");
    assert_eq!(
        (of_cc1["value"].as_u64(), of_cc1["params"]["process"].as_u64()),
        (Some(38_719), Some(1))
    );
}

/// Returns the lines of `advise gcc --json`. A busy host can reverse the order of costs, which are
/// differences of measured times: measures again then, at most four times.
fn measured_lines() -> Vec<serde_json::Value> {
    for round in 0..5 {
        let ran = faultless(&["advise", "gcc", "--json", "-"]);
        assert!(ran.err.contains("second to eighth page"), "{}", ran.err);
        let lines = json_lines(&ran.succeeds());
        let time = |metric: &str| value(&lines, "linux-", "default", metric).expect(metric);
        let times = ["page_ns", "exception_ns", "kernel_path_ns", "zeroing_ns"].map(time);
        // A page of a window costs less than a fault, and hardly any page is unused.
        let prefault =
            value(&lines, "linux-", "prefault by the kernel", "predicted_saving_seconds");
        let prefault = prefault.expect("predicted");
        if times.iter().all(|time| *time >= 0.0)
            && times[0] > times[3]
            && prefault.abs() < time("fault_seconds")
        {
            return lines;
        }
        eprintln!("round {round}: {times:?}, {prefault} s");
    }
    panic!("no round measured costs in their order");
}

#[test]
fn every_figure_is_in_the_json() {
    let _settled = settled();
    let lines = measured_lines();
    let of = |setting: &str, metric: &str| value(&lines, "linux-", setting, metric);
    let count = |metric: &str| of("default", metric).expect(metric);
    let kinds =
        ["faults_zeroed", "faults_zero_page", "faults_copied", "faults_file", "faults_shared"];
    assert_eq!(count("faults"), kinds.map(count).iter().sum::<f64>());
    assert!(count("faults_in_sequence") < count("faults_zeroed"));
    assert!(count("fault_seconds") > 0.0 && count("seconds") > 0.0);
    let always = settings().contains("[always]");
    if Path::new(SIZES).join("hugepages-64kB").exists() && !always {
        // The saving may be negative if the host has taken memory back. Unit tests check the exact
        // value.
        let saved = of("mTHP 64 kB", "predicted_saving_seconds").expect("predicted");
        assert!(saved != 0.0 && saved < count("fault_seconds"), "{saved}");
    }
}

#[test]
fn advise_passes_output_and_exit_status_through() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = ["--", "sh", "-c", "echo its own output; exit 7"];
    let ran = Ran::of(&mut advise(dir.path(), &program));
    assert_eq!(ran.code, Some(7), "{}", ran.err);
    // Output of the recorded run; the output of the other run is dropped.
    assert_eq!(ran.out.matches("its own output").count(), 1, "{}", ran.out);
    assert!(ran.out.contains("of a run without the recorder"), "{}", ran.out);
    let killed = Ran::of(&mut advise(dir.path(), &["--", "sh", "-c", "kill -9 $$"]));
    assert_eq!(killed.code, Some(128 + 9), "{}", killed.err);
    assert!(killed.err.contains("signal: 9 (SIGKILL)\nfaultless: no prediction"), "{}", killed.err);
}

/// The stand-in ends with the program's first process, as perf does.
#[test]
fn advise_reports_a_daemon_and_does_not_rerun_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let starts = dir.path().join("starts");
    let script = format!("echo one >> {}; (exec sleep 3 >/dev/null 2>&1 &)", starts.display());
    let ran = Ran::of(&mut advise(dir.path(), &["--", "sh", "-c", &script]));
    for expected in ["still run and are not recorded further: sleep", "continues in the background"]
    {
        assert!(ran.err.contains(expected), "no {expected:?} in {}", ran.err);
    }
    assert_eq!(fs::read_to_string(&starts).expect("the program ran"), "one\n");
    ran.succeeds();
}

/// A command with approximately the faults of the bundled recording of python, and thus
/// approximately its kernel time.
const FAULTS: &str = "dd if=/dev/zero of=/dev/null bs=96M count=1 2>/dev/null";

/// The program has approximately the faults of the stand-in recording, so each advice is tried.
#[test]
fn try_pairs_runs_with_and_without_each_advice() {
    let _settled = settled();
    let dir = tempfile::tempdir().expect("a directory");
    let recording = dir.path().join("python.fltrace");
    fs::write(&recording, recordings::find("python").expect("bundled").bytes).expect("written");
    let file = dir.path().join("variables");
    let shell = format!(
        "echo \"${{MALLOC_MMAP_MAX_-}};${{GLIBC_TUNABLES-}}\" >> {}; {FAULTS}",
        file.display()
    );
    let saved = dir.path().join("saved.toml");
    let save = saved.to_str().expect("text");
    let args = ["--try", "--rounds", "2", "--save", save, "--json", "-", "--", "sh", "-c", &shell];
    let measured = "measured_seconds";
    let is_tried = |lines: &[serde_json::Value], name: &str| {
        lines.iter().any(|line| line["metric"] == measured && line["setting"] == name)
    };
    // On a busy host a setting can seem useless, and is not tried: tries again, at most four times.
    let (text, lines) = (0..5)
        .map(|_| {
            let _ = fs::remove_file(&file);
            let ran = Ran::of(advise(dir.path(), &args).env("FIXTURE", &recording));
            (ran.err.clone(), json_lines(&ran.succeeds()))
        })
        .find(|(_, lines)| is_tried(lines, "malloc keeps memory"))
        .expect("one of five runs with kept memory");
    for words in [
        "| tried ",
        " predicted | ",
        "95 % interval",
        "too few rounds",
        "Savings in 2 pairs of runs",
    ] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    for line in lines.iter().filter(|line| line["metric"] == measured) {
        let setting = line["setting"].as_str().expect("text");
        // Two rounds have no interval of 95 %.
        assert_eq!(value(&lines, "linux-", setting, "interval_from_seconds"), None, "{setting}");
    }
    // Without an interval no saving is confirmed.
    let advice = fs::read_to_string(&saved).expect("saved");
    assert_eq!(decode(&saved, &advice).map_err(|error| error.to_string()), Ok(Vec::new()));
    assert!(text.contains(&format!("{save}: no advice")), "{text}");
    let written = fs::read_to_string(&file).expect("the program ran");
    let runs = |with: &str| written.lines().filter(|line| line.contains(with)).count();
    assert_eq!(runs("0;"), 2, "{written}");
    assert_eq!(
        runs("glibc.malloc.hugetlb=1"),
        2 * usize::from(is_tried(&lines, "malloc on THP")),
        "{written}"
    );
    // The recorded run, the run without a recorder, and the runs of the rounds.
    assert!(written.lines().filter(|line| *line == ";").count() >= 4, "{written}");
}

#[test]
fn wrong_arguments_are_explained() {
    let dir = tempfile::tempdir().expect("a directory");
    let not = dir.path().join("not");
    fs::write(&not, "nothing of the kind").expect("written");
    let not = not.to_str().expect("text");
    let wrong: [(&[&str], &[&str]); 10] = [
        (&["advise", "true"], &["no such file, and no recording", "faultless advise -- true"]),
        (&["advise"], &["required", "FILE|NAME"]),
        (&["advise", "no-such-recording"], &["no-such-recording", "python"]),
        (&["advise", "python", "--", "true"], &["cannot be used with"]),
        (&["advise", "--try", "python"], &["--try", "cannot be used with"]),
        (&["advise", "--rounds", "1", "--", "true"], &["--rounds", "a number from 2 to 1000"]),
        (&["advise", "--rounds", "9", "--", "true"], &["required", "--try"]),
        (&["advise", "--", "/no/such/program"], &["cannot run /no/such/program: "]),
        (&["advise", not], &[not, "neither a perf.data file"]),
        (&["advise", "ls-addresses"], &["ls-addresses", "a trace of addresses has no faults"]),
    ];
    for (args, expected) in wrong {
        let error = faultless(args).fails(2);
        for expected in expected {
            assert!(error.contains(expected), "{args:?} does not print {expected:?}:\n{error}");
        }
    }
    let ran = faultless(&["advise", "python", "--json", "/nowhere/x.jsonl"]);
    assert_eq!(ran.out, "");
    assert!(ran.fails(1).contains("--json /nowhere/x.jsonl: the directory /nowhere does"));
}

/// Interrupts a trial when it prints a line that starts with `begin`, and returns its output. The
/// runs of the program take `seconds` more than their faults.
fn interrupted_trial(begin: &str, seconds: f64) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let recording = dir.path().join("python.fltrace");
    fs::write(&recording, recordings::find("python").expect("bundled").bytes).expect("written");
    let script = format!("{FAULTS}; sleep {seconds}");
    let args = ["--try", "--rounds", "1000", "--", "sh", "-c", &script];
    let mut advise = advise(dir.path(), &args);
    advise.env("FIXTURE", &recording);
    let mut child =
        advise.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let mut printed = BufReader::new(child.stderr.take().expect("piped")).lines();
    let reached = printed.any(|line| line.expect("text").starts_with(begin));
    assert!(reached, "the command prints {begin:?}");
    let asked = Instant::now();
    send(&child, Signal::SIGINT);
    printed.for_each(drop);
    let output = child.wait_with_output().expect("the command ends");
    let out = String::from_utf8(output.stdout).expect("text");
    assert_eq!(output.status.code(), Some(130), "{out}");
    assert!(asked.elapsed() < Duration::from_secs(20), "after {:?}", asked.elapsed());
    out
}

#[test]
fn interrupted_trial_prints_its_results_so_far() {
    let _settled = settled();
    let out = interrupted_trial("run 2 of 1000", 0.2);
    assert!(out.contains("| tried ") && out.contains("Interrupted"), "{out}");
}

#[test]
fn trial_interrupted_before_its_first_pair_reports_that_nothing_was_tried() {
    let _settled = settled();
    let out = interrupted_trial("run 1 of 1000", 0.5);
    assert!(out.contains("Interrupted before the first pair"), "{out}");
    assert!(out.contains("no setting") && !out.contains("| tried "), "{out}");
}

/// The program ends at once when it is recorded. Its second run, and the child of this run, ignore
/// SIGTERM.
#[test]
fn interrupted_advise_leaves_no_process() {
    let _settled = settled();
    let script = r#"
        [ -e "$0/recorded" ] || { : > "$0/recorded"; exit 0; }
        trap '' TERM INT
        sleep 100 &
        echo $$ $! > "$0/pids.new"; mv "$0/pids.new" "$0/pids"
        sleep 100; sleep 100"#;
    for signals in [1, 2] {
        let dir = tempfile::tempdir().expect("a directory");
        let place = dir.path().to_str().expect("text");
        let mut advise = advise(dir.path(), &["--", "sh", "-c", script, place]);
        let mut child =
            advise.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        let pids = dir.path().join("pids");
        let limit = Instant::now() + Duration::from_secs(60);
        while !pids.exists() {
            assert!(Instant::now() < limit, "it runs without the recorder");
            std::thread::sleep(Duration::from_millis(10));
        }
        let asked = Instant::now();
        for _ in 0..signals {
            send(&child, Signal::SIGINT);
            std::thread::sleep(Duration::from_millis(300));
        }
        let status = child.wait().expect("it ends");
        assert_eq!(status.code(), Some(130), "{signals} signals");
        assert!(asked.elapsed() < Duration::from_secs(15), "after {:?}", asked.elapsed());
        let pids = fs::read_to_string(&pids).expect("there");
        // The supervisor reaps the processes after the command ends.
        let limit = Instant::now() + Duration::from_secs(5);
        while pids.split_whitespace().any(|pid| Path::new("/proc").join(pid).exists()) {
            assert!(Instant::now() < limit, "{signals} signals: a process of {pids} still runs");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn failed_run_without_input_is_reported() {
    let _settled = settled();
    let dir = tempfile::tempdir().expect("a directory");
    let program = ["--", "sh", "-c", "read line || exit 3"];
    let mut advise = advise(dir.path(), &program);
    let mut child = advise
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    std::io::Write::write_all(&mut child.stdin.take().expect("piped"), b"a line\n")
        .expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let [out, err] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("text"));
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
    assert!(err.contains("its input is empty"), "{err}");
    assert!(out.contains("whose standard input is empty, failed (exit status: 3)"), "{out}");
}

/// Returns all settings in one text.
fn settings() -> String {
    let mut files: Vec<_> = fs::read_dir(SIZES)
        .map(|dir| dir.flatten().map(|entry| entry.path().join("enabled")).collect())
        .unwrap_or_default();
    files.sort();
    files.push(Path::new(SIZES).join("enabled"));
    files.iter().map(|file| fs::read_to_string(file).unwrap_or_default()).collect()
}

/// The command is killed with SIGKILL while a setting is changed.
#[test]
fn killed_command_restores_system_settings() {
    let _settled = settled();
    let before = settings();
    let file = Path::new(SIZES).join("hugepages-64kB/enabled");
    if fs::OpenOptions::new().write(true).open(&file).is_err() {
        eprintln!("{} cannot be written: not tested", file.display());
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut advise =
        advise(dir.path(), &["--try", "--sysfs", "--rounds", "1000", "--", "sleep", "0.3"]);
    let mut child =
        advise.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the command starts");
    let limit = Instant::now() + Duration::from_secs(60);
    while settings() == before {
        assert!(Instant::now() < limit, "it changes a setting");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().expect("a running command");
    child.wait().expect("a command that ended");
    let limit = Instant::now() + Duration::from_secs(10);
    while settings() != before {
        assert!(Instant::now() < limit, "{} is not {before}", settings());
        std::thread::sleep(Duration::from_millis(5));
    }
}
