//! Recordings of processes that already run: their end, their contents, and errors.

mod common;

use common::{Ran, command, faultless, send};
use faultless_trace::{compact, plan::Plan};
use nix::sys::signal::Signal;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A recording made by perf.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../trace/tests/data/fixture.perf.data");

/// A stand-in for perf: acknowledges the command through the pipe, and writes a recording when it
/// is interrupted. Its arguments are in the file `arguments`. With `STAND_IN=fails` it fails, and
/// with `STAND_IN=fast` it writes many events unless it records a part of the faults.
const PERF: &str = r#"#!/bin/sh
echo "$*" > "$PLACE/arguments"
if [ "$STAND_IN" = fails ]; then
    echo "Permission error" >&2
    exit 255
fi
while [ $# -gt 0 ]; do
    case $1 in
    -o) out=$2; shift 2 ;;
    --control) pipes=${2#fifo:}; shift 2 ;;
    *) shift ;;
    esac
done
trap 'cat "$FIXTURE" > "$out"; exit 0' INT
read -r line < "${pipes%,*}"
[ "$line" = enable ] || exit 1
echo ack > "${pipes#*,}"
case $STAND_IN:$(cat "$PLACE/arguments") in
*period=*) ;;
fast:*) head -c 50000000 /dev/zero > "$out" ;;
esac
# The recorder reads the acknowledgement in this time.
sleep 0.5
: > "$PLACE/begun"
while :; do sleep 0.02; done
"#;

/// A directory with perf's stand-in.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let perf = dir.path().join("perf");
        fs::write(&perf, PERF).expect("written");
        fs::set_permissions(&perf, fs::Permissions::from_mode(0o755)).expect("ours");
        Self(dir)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn record(&self, args: &[&str]) -> Command {
        let file = self.file("x.fltrace");
        let output = file.to_str().expect("text");
        self.command(&[&["record", "--lesser", "-o", output][..], args].concat())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = command(args);
        command.env("FIXTURE", FIXTURE);
        let path = std::env::var("PATH").expect("a path");
        command.env("PATH", format!("{}:{path}", self.0.path().display()));
        command.env("PLACE", self.0.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

/// A process, killed when this is dropped.
struct Running(Child);

impl Running {
    fn shell(script: &str) -> Self {
        Self(Command::new("sh").args(["-c", script]).spawn().expect("a shell"))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().expect("a process that was not reaped");
        self.0.wait().expect("a child");
    }
}

fn wait_for(file: &Path) {
    let limit = Instant::now() + Duration::from_secs(30);
    while !file.exists() {
        assert!(Instant::now() < limit, "{} appears", file.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn recording_of_a_process_ends_after_its_seconds() {
    let place = Place::new();
    let own = std::process::id().to_string();
    let begun = Instant::now();
    let ran = Ran::of(&mut place.record(&["--pid", &own, "--seconds", "1"]));
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""), "{}", ran.err);
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert!(ran.err.contains("events a second; the recorder took"), "{}", ran.err);
    let bytes = fs::read(place.file("x.fltrace")).expect("written");
    let trace = compact::parse(Path::new("x"), &bytes).expect("the portable form");
    assert!(trace.header.made.starts_with(&format!("faultless record --pid {own}; ")));
    // The process has the recorder as a descendant, which is recorded, too.
    let arguments = fs::read_to_string(place.file("arguments")).expect("written");
    let pids = arguments.split(" -p ").nth(1).expect("processes").trim();
    assert!(pids.split(',').count() >= 2 && pids.starts_with(&own), "{arguments}");
    assert!(arguments.contains("-k monotonic -D -1"), "{arguments}");
}

#[test]
fn recording_beyond_the_limit_begins_again_with_fewer_faults() {
    let place = Place::new();
    let own = std::process::id().to_string();
    let args = ["--pid", &own, "--seconds", "3", "--max-rate", "10000"];
    let ran = Ran::of(place.record(&args).env("STAND_IN", "fast"));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let note = "events a second, more than the limit of 10000: one in ";
    assert!(ran.err.contains(note), "{}", ran.err);
    let arguments = fs::read_to_string(place.file("arguments")).expect("written");
    let period = arguments.split("-e page-faults/period=").nth(1).expect("a part of the faults");
    let period: u32 = period.split('/').next().and_then(|it| it.parse().ok()).expect("a number");
    // 446,429 events in a little more than two seconds, with a margin.
    assert!((23..=35).contains(&period) && period % 2 == 1, "{arguments}");
    assert!(ran.err.contains(&format!("one in {period} faults was recorded")), "{}", ran.err);
    // Below the limit, each fault is recorded.
    let args = ["--pid", &own, "--seconds", "3", "--max-rate", "4000000000"];
    let ran = Ran::of(place.record(&args).env("STAND_IN", "fast"));
    assert!(ran.code == Some(0) && !ran.err.contains("limit"), "{}", ran.err);
}

#[test]
fn interrupted_recording_is_complete() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let place = Place::new();
        let child = Running::shell("sleep 60");
        let recorder = place.record(&["--pid", &child.pid()]).spawn().expect("it starts");
        wait_for(&place.file("begun"));
        send(&recorder, signal);
        let output = recorder.wait_with_output().expect("it ends");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{signal}: {err}");
        assert!(place.file("x.fltrace").exists(), "{err}");
    }
}

#[test]
fn advice_for_a_running_process_has_the_time_of_its_recording() {
    let place = Place::new();
    let child = Running::shell("sleep 60");
    let args = ["advise", "--lesser", "--pid", &child.pid(), "--seconds", "1"];
    let ran = Ran::of(&mut place.command(&args));
    assert!(ran.err.contains("events a second; the recorder took"), "{}", ran.err);
    let out = ran.succeeds();
    for part in ["are spent in", "The time of the run is the time of the recording"] {
        assert!(out.contains(part), "{out}");
    }
    let args = ["advise", "--pid", "1", "--try"];
    let error = Ran::of(&mut place.command(&args)).fails(2);
    assert!(error.contains("cannot be used with"), "{error}");
}

#[test]
fn end_of_a_recorded_process_is_reported() {
    let place = Place::new();
    let child = Running::shell("exec sleep 1");
    let ran = Ran::of(&mut place.record(&["--pid", &child.pid(), "--seconds", "3"]));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let ended = format!("PID {} ended after ", child.pid());
    assert!(ran.err.contains(&ended) && ran.err.contains("an unknown time"), "{}", ran.err);
    let bytes = fs::read(place.file("x.fltrace")).expect("written");
    let trace = compact::parse(Path::new("x"), &bytes).expect("the portable form");
    assert_eq!(trace.header.processor_us, 0, "unknown");
}

#[test]
fn failed_recorder_leaves_no_file() {
    let place = Place::new();
    let child = Running::shell("sleep 60");
    let args = ["--pid", &child.pid(), "--seconds", "1"];
    let error = Ran::of(place.record(&args).env("STAND_IN", "fails")).fails(1);
    for part in ["Permission error", "no recording", "belong to this user"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!place.file("x.fltrace").exists());
}

#[test]
fn wrong_subjects_are_named() {
    let place = Place::new();
    for (args, code, expected) in [
        (&["--pid", "2147483647"][..], 1, "--pid 2147483647: no such process"),
        (&["--pid", "0"], 2, "a number from 1 to 2147483647"),
        (&["--pid", "1", "--all"], 2, "cannot be used with"),
        (&["--seconds", "1", "--", "true"], 2, "cannot be used with"),
        (&["--cgroup", "/no/such"], 1, "--cgroup /no/such: no such control group"),
        (&["--all", "--seconds", "0"], 2, "a number from 1 to 86400"),
        (&[], 2, "--pid <PID>"),
    ] {
        let error = Ran::of(&mut place.record(args)).fails(code);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    assert!(!place.file("x.fltrace").exists());
}

/// The processes of a shell script run before the recording; its commands begin and end in the
/// recorded time.
#[ignore = "needs perf and the permission for tracepoints; `.ci/long` runs it"]
#[test]
fn replay_of_running_processes_repeats_their_faults() {
    let place = Place::new();
    let script = "while :; do ls / >/dev/null; x=$(seq 20000); done";
    let child = Running::shell(script);
    std::thread::sleep(Duration::from_millis(500));
    let file = place.file("real.fltrace");
    let name = file.to_str().expect("text");
    faultless(&["record", "--pid", &child.pid(), "--seconds", "2", "-o", name]).succeeds();
    let bytes = fs::read(&file).expect("written");
    let trace = compact::parse(&file, &bytes).expect("the portable form");
    let summary = trace.summary();
    assert!(summary.processes > 10 && summary.resident_pages > 50, "{summary}");
    let plan = Plan::new(&trace).expect("a consistent trace");
    assert!(plan.threads()[0].restoring() > 0);
    let ran = faultless(&["replay", name]);
    assert!(!ran.err.contains("differs from the recorded faults"), "{}", ran.err);
    ran.succeeds();
}
