//! Result files: they never overwrite inputs, and are put in place only when complete. `record`
//! returns the exit status of the program. A script stands in for perf, so that the tests need no
//! permission.

mod common;

use common::{Ran, command, faultless, json_lines, send, value};
use faultless_trace::recordings;
use nix::sys::signal::Signal;
use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A recording made by perf.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../trace/tests/data/fixture.perf.data");

/// Runs the command after `--`, and leaves the recording of another program. With `STAND_IN=fails`
/// it fails after half of the recording, without a message.
const PERF: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
    -o) out=$2; shift 2 ;;
    --) shift; break ;;
    *) shift ;;
    esac
done
if [ "$STAND_IN" = fails ]; then
    head -c 300 "$FIXTURE" > "$out"
    exit 255
fi
"$@"
status=$?
cat "$FIXTURE" > "$out"
[ $status -gt 128 ] && kill -$((status - 128)) $$
exit $status
"#;

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

fn script(path: &Path, contents: &str, mode: u32) {
    fs::write(path, contents).expect("written");
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("ours");
}

/// A directory for perf's stand-in, and a directory for recordings.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("bin")).expect("made");
        fs::create_dir(dir.path().join("out")).expect("made");
        script(&dir.path().join("bin/perf"), PERF, 0o755);
        Self { dir }
    }

    fn out(&self, name: &str) -> PathBuf {
        self.dir.path().join("out").join(name)
    }

    /// Returns the files in the directory of recordings.
    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path().join("out")).expect("a directory");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("read").file_name();
        let mut names: Vec<_> = entries.map(|e| name(e).into_string().expect("text")).collect();
        names.sort();
        names
    }

    fn command(&self, output: &Path, program: &[&str]) -> Command {
        let mut command = command(&["record", "--lesser", "-o", text(output), "--"]);
        let path = std::env::var("PATH").expect("a path");
        command.args(program).env("FIXTURE", FIXTURE);
        command.env("PATH", format!("{}:{path}", text(&self.dir.path().join("bin"))));
        command
    }

    fn record(&self, output: &Path, program: &[&str]) -> Ran {
        Ran::of(&mut self.command(output, program))
    }
}

#[test]
fn results_never_overwrite_their_inputs() {
    let place = Place::new();
    let good = recordings::find("sort").expect("shipped").bytes;
    let (file, link, hard) = (place.out("x.fltrace"), place.out("link"), place.out("hard"));
    fs::write(&file, good).expect("written");
    symlink("x.fltrace", &link).expect("made");
    fs::hard_link(&file, &hard).expect("made");
    let round = place.out("../out/x.fltrace");
    for json in [&file, &link, &hard, &round].map(|path| text(path)) {
        for args in [
            &["replay", text(&file), "--json", json][..],
            &["replay", text(&link), "--policies", "--json", json],
            &["replay", text(&file), "--plot", json],
            &["compare", "--quick", "--only", text(&file), "--json", json],
            &["boot", "--json", json, text(&file)],
            &["boot", "--json", json, "--files", text(&place.out("")), "rows"],
            &["boot", "--json", json, "--kernel", text(&file), "rows"],
            &["versus", "--kernel", text(&file), "--json", json],
        ] {
            let ran = faultless(args);
            assert_eq!(ran.out, "", "{args:?}");
            // A recording is no program, and this error may be detected first.
            let error = ran.fails(2);
            let explained = error.contains("would overwrite") || error.contains("not an ELF file");
            assert!(
                explained && (args[0] == "boot" || !error.contains("ELF")),
                "{args:?}: {error}"
            );
            assert_eq!(fs::read(&file).expect("there"), good, "{args:?}");
        }
    }
    // Another file is no input, even with the same contents.
    let copy = place.out("copy");
    fs::write(&copy, good).expect("written");
    faultless(&["replay", text(&file), "--json", text(&copy)]).succeeds();
    assert_eq!(fs::read(&file).expect("there"), good);
    // A recording does not replace the recorded program, either.
    let program = place.out("program");
    script(&program, "#!/bin/sh\nexit 0\n", 0o755);
    let error = place.record(&program, &[text(&program)]).fails(2);
    assert!(error.contains("would overwrite"), "{error}");
    assert!(fs::read(&program).expect("there").starts_with(b"#!"));
}

/// A failed or interrupted command leaves the earlier results.
#[test]
fn results_replace_the_file_when_complete() {
    let place = Place::new();
    let (file, partial) = (place.out("k.json"), place.out("k.json.partial"));
    let before = "the earlier file";
    fs::write(&file, before).expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("ours");
    for (args, code) in [
        (&["stat", "pft", "--set", "frame_limit=1"][..], 1),
        (&["replay", "redis", "--set", "frame_limit=10"], 1),
        (&["versus", "--kernel", "/no/such/kernel"], 2),
    ] {
        faultless(&[args, &["--json", text(&file)]].concat()).fails(code);
        assert_eq!(fs::read_to_string(&file).expect("there"), before, "{args:?}");
        assert_eq!(place.left(), ["k.json"], "{args:?}");
    }
    for args in [&["stat", "pft", "seconds=60"][..], &["compare", "--details", "--only", "pft"]] {
        let args = [args, &["--json", text(&file)]].concat();
        let quiet = || Stdio::piped();
        let mut command = command(&args);
        let child = command.stdout(quiet()).stderr(quiet()).spawn().expect("the command starts");
        std::thread::sleep(Duration::from_millis(1500));
        send(&child, Signal::SIGINT);
        let output = child.wait_with_output().expect("the command ends");
        let printed = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(130), "{args:?}: {printed}");
        assert!(printed.contains("not complete: partial results are in"), "{args:?}: {printed}");
        assert_eq!(fs::read_to_string(&file).expect("there"), before, "{args:?}");
        assert!(!json_lines(&fs::read_to_string(&partial).expect("there")).is_empty());
        fs::remove_file(&partial).expect("there");
    }
    faultless(&["stat", "pft", "size=1M", "--json", text(&file)]).succeeds();
    assert!(!json_lines(&fs::read_to_string(&file).expect("there")).is_empty());
    assert_eq!(fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o640);
    assert_eq!(place.left(), ["k.json"]);
}

#[test]
fn record_returns_the_exit_status_of_the_program() {
    let place = Place::new();
    for (program, code) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)]
    {
        for name in ["perf.data", "x.fltrace"] {
            let ran = place.record(&place.out(name), &["sh", "-c", program]);
            assert_eq!(ran.code, Some(code), "{program}: {}", ran.err);
            assert_eq!(place.left(), [name], "{program}");
            assert!(ran.err.contains("next: faultless replay"), "{program}: {}", ran.err);
            faultless(&["replay", text(&place.out(name))]).succeeds();
            // The same behaviour as perf.
            let old = format!("{name}.old");
            fs::write(place.out(name), "the earlier file").expect("written");
            assert_eq!(place.record(&place.out(name), &["true"]).code, Some(0));
            assert_eq!(place.left(), [name, &old]);
            assert_eq!(fs::read(place.out(&old)).expect("there"), b"the earlier file");
            fs::remove_file(place.out(&old)).expect("there");
            fs::remove_file(place.out(name)).expect("there");
        }
    }
}

/// perf puts the directory of its own path in front of PATH. The stand-in does the same: it is a
/// shell, which keeps its path as argument 0 and runs the script `record`.
#[test]
fn recorded_program_is_the_first_in_path() {
    let place = Place::new();
    let (bin, first) = (place.dir.path().join("bin"), place.dir.path().join("first"));
    fs::create_dir(&first).expect("made");
    fs::remove_file(bin.join("perf")).expect("there");
    std::os::unix::fs::symlink("/bin/sh", bin.join("perf")).expect("a link");
    let own = "own=$(tr '\\0' '\\n' < /proc/$$/cmdline | head -n 1)\n\
               case $own in */*) PATH=${own%/*}:$PATH ;; esac\n";
    script(&place.dir.path().join("record"), &format!("{own}{PERF}"), 0o644);
    script(&first.join("which-one"), "#!/bin/sh\necho first\n", 0o755);
    script(&bin.join("which-one"), "#!/bin/sh\necho beside perf\n", 0o755);
    let mut record = place.command(&place.out("x.fltrace"), &["which-one"]);
    let path = std::env::var("PATH").expect("a path");
    let path = format!("{}:{}:{path}", text(&first), text(&bin));
    let ran = Ran::of(record.env("PATH", path).current_dir(place.dir.path()));
    assert_eq!(ran.succeeds(), "first\n");
}

#[test]
fn failures_are_explained_and_leave_no_files() {
    let place = Place::new();
    let plain = place.dir.path().join("plain");
    script(&plain, "#!/bin/sh\n", 0o644);
    let lost = place.dir.path().join("lost");
    script(&lost, "#!/no/such/shell\n", 0o755);
    let dir = text(place.dir.path());
    for (program, why) in [
        (dir, "Is a directory"),
        (text(&plain), "Permission denied"),
        (text(&lost), "/no/such/shell: No such file"),
        ("/no/such/program", "No such file"),
        ("no-such-program-at-all", "No such file"),
    ] {
        for name in ["perf.data", "x.fltrace"] {
            let error = place.record(&place.out(name), &[program]).fails(2);
            assert!(error.contains(&format!("cannot run {program}")), "{error}");
            assert!(error.contains(why), "{error}");
            assert_eq!(place.left(), [""; 0], "{program}");
        }
    }
    let full = Path::new("/dev/full");
    let error = place.record(full, &["true"]).fails(2);
    assert!(error.contains("/dev/full") && error.contains("--compact"), "{error}");
    let mut compact = place.command(full, &["true"]);
    let args: Vec<_> = compact.get_args().map(ToOwned::to_owned).collect();
    let mut with = command(&["record", "--compact"]);
    with.args(&args[1..]);
    with.envs(compact.get_envs().filter_map(|(name, value)| Some((name, value?))));
    compact = with;
    let error = Ran::of(&mut compact).fails(1);
    assert!(error.contains("/dev/full: No space left on device"), "{error}");
    assert!(!Path::new("/dev/full.perf.data").exists());
    fs::remove_file(kept(&error)).expect("the recording is kept");
    let error = place.record(&place.out("none/x.data"), &["true"]).fails(1);
    assert!(error.contains("none does not exist"), "{error}");
    let error = place.record(&place.out(""), &["true"]).fails(1);
    assert!(error.contains("Is a directory"), "{error}");
}

/// Returns the file in which the recording is kept after a failure.
fn kept(error: &str) -> &str {
    let (_, file) = error.split_once("is kept in the form of perf: ").expect("a name");
    file.split(';').next().expect("a file")
}

#[test]
fn recording_is_kept_if_its_last_step_fails() {
    let place = Place::new();
    let output = place.out("perf.data");
    fs::write(&output, "the earlier file").expect("written");
    let mark = place.out("perf.data.old");
    // The program itself creates the directory.
    let error = place.record(&output, &["mkdir", text(&mark)]).fails(1);
    assert!(error.contains("perf.data.old: Is a directory"), "{error}");
    let data = fs::read(kept(&error)).expect("the recording");
    assert_eq!(data, fs::read(FIXTURE).expect("there"));
    fs::remove_file(kept(&error)).expect("there");
    // At the next start the program is not run.
    for name in ["perf.data", "x.fltrace"] {
        let output = place.out(name);
        fs::write(&output, "the earlier file").expect("written");
        let old = place.out(&format!("{name}.old"));
        fs::create_dir_all(&old).expect("made");
        let error = place.record(&output, &["touch", text(&place.out("ran"))]).fails(1);
        assert!(error.contains(&format!("{name}.old is a directory")), "{error}");
    }
    assert_eq!(place.left(), ["perf.data", "perf.data.old", "x.fltrace", "x.fltrace.old"]);
}

#[test]
fn failed_recording_leaves_the_earlier_one() {
    let place = Place::new();
    for name in ["perf.data", "x.fltrace"] {
        let output = place.out(name);
        fs::write(&output, "the earlier file").expect("written");
        let mut failing = place.command(&output, &["true"]);
        let error = Ran::of(failing.env("STAND_IN", "fails")).fails(1);
        assert!(error.contains("exit status: 255 and no recording: "), "{error}");
        assert!(!error.contains(".perf.data."), "a name that the user did not give: {error}");
        assert_eq!(fs::read(&output).expect("there"), b"the earlier file");
        assert_eq!(place.left(), [name]);
        fs::remove_file(output).expect("there");
    }
}

#[test]
fn record_forwards_signals_to_the_program() {
    let place = Place::new();
    // Ten seconds without a signal.
    let waits =
        |trap: &str| format!("{trap}\necho ready\nfor n in $(seq 500); do sleep 0.02; done");
    for (signal, trap, code) in [
        (Signal::SIGTERM, "trap 'exit 5' TERM", 5),
        (Signal::SIGINT, "trap 'exit 6' INT", 6),
        (Signal::SIGHUP, "trap 'exit 8' HUP", 8),
        (Signal::SIGQUIT, "trap 'exit 9' QUIT", 9),
        (Signal::SIGTERM, "", 143),
        (Signal::SIGQUIT, "", 131),
    ] {
        let output = place.out("perf.data");
        let mut command = place.command(&output, &["sh", "-c", &waits(trap)]);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the command starts");
        let mut line = String::new();
        let mut printed = BufReader::new(child.stdout.take().expect("piped"));
        printed.read_line(&mut line).expect("text");
        assert_eq!(line, "ready\n");
        send(&child, signal);
        assert_eq!(child.wait().expect("the command ends").code(), Some(code), "{signal} {trap}");
        assert!(place.left().contains(&"perf.data".to_owned()), "a complete recording");
    }
}

#[test]
fn replay_waiting_for_a_pipe_can_be_interrupted() {
    let place = Place::new();
    let pipe = place.out("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129), (Signal::SIGINT, 130)] {
        let mut child = command(&["replay", text(&pipe)]).spawn().expect("the command starts");
        std::thread::sleep(Duration::from_millis(300));
        send(&child, signal);
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().expect("ours") {
                break status;
            }
            if began.elapsed() > Duration::from_secs(10) {
                child.kill().expect("ours");
                panic!("{signal} does not end it");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.code(), Some(code), "{signal}");
    }
}

#[test]
fn compare_accepts_the_inputs_of_replay() {
    let place = Place::new();
    let file = place.out("mine.fltrace");
    fs::write(&file, recordings::find("sort").expect("shipped").bytes).expect("written");
    let json = place.out("c.jsonl");
    let args = ["compare", "--quick", "--only", text(&file), "--json", text(&json)];
    let out = faultless(&args).succeeds();
    for row in ["| mine ", "| replay:mine ", "| prefault_max_order=0, 5 "] {
        assert!(out.contains(row), "no {row:?} in {out}");
    }
    let lines = json_lines(&fs::read_to_string(&json).expect("written"));
    let mine: Vec<_> = lines.into_iter().filter(|it| it["workload"] == "replay:mine").collect();
    assert!(value(&mine, "native", "prefault_max_order=5", "faults_saved").is_some());
    assert!(value(&mine, "native", "locking=per_vma", "wall_seconds").is_some());
    assert!(value(&mine, "simulated-", "locking=per_vma", "wall_seconds").is_some());
    // A name does not need `--only`.
    let details = faultless(&["compare", text(&file), "--quick", "--details"]);
    assert!(details.succeeds().contains("replay:mine - "));
    // `stat` and `replay` know all listed names.
    let error = faultless(&["compare", "--only", "page_fault_read_churn"]).fails(2);
    let (_, names) = error.split_once("there are ").expect("a list");
    let (names, meant) = names.split_once("; did you mean ").expect("a similar name");
    assert_eq!(meant.trim(), "page_fault_read?");
    let workloads: Vec<_> = faultless_workload::all().iter().map(|info| info.name).collect();
    for name in names.trim().split(", ") {
        assert!(workloads.contains(&name) || recordings::find(name).is_some(), "{name}");
    }
    let damaged = place.out("damaged");
    fs::write(&damaged, b"no recording at all").expect("written");
    let error = faultless(&["compare", "--only", text(&damaged)]).fails(2);
    assert!(error.contains("damaged"), "{error}");
}

#[test]
fn outputs_must_be_different_files() {
    let place = Place::new();
    let [one, link] = ["one", "link"].map(|name| place.out(name));
    std::os::unix::fs::symlink(&one, &link).expect("a link");
    for command in [&["stat", "pft"][..], &["compare", "xsbench", "--quick"], &["scale", "pft"]] {
        for (json, html) in [(&one, &one), (&one, &link)] {
            fs::write(&one, "kept").expect("written");
            let outputs = ["--json", text(json), "--html", text(html)];
            let error = faultless(&[command, &outputs[..]].concat()).fails(2);
            assert!(error.contains("--json and --html: both would write"), "{error}");
            assert_eq!(fs::read_to_string(&one).expect("there"), "kept");
        }
        fs::remove_file(&one).expect("there");
        let error = faultless(&[command, &["--json", text(&one), "--html", text(&one)]].concat());
        assert!(error.fails(2).contains("specify two files"));
        let error = faultless(&[command, &["--html", "-"]].concat()).fails(2);
        assert!(error.contains("--html -: the output is a file"), "{error}");
    }
}

#[test]
fn memory_in_tiers_is_compared_at_given_ratios_and_cpus() {
    let out = faultless(&[
        "compare", "xsbench", "--quick", "--ratios", "1:8,1:1", "--cpus", "2,3", "--json", "-",
    ]);
    let out = out.succeeds();
    let times = out.lines().filter(|line| line.contains("\"metric\":\"wall_seconds\""));
    for cpus in [2, 3] {
        for ratio in ["1:1", "1:8"] {
            let ours = |line: &&str| {
                [format!("\"threads\":{cpus}"), format!("\"ratio\":\"{ratio}\"")]
                    .iter()
                    .all(|word| line.contains(word))
            };
            // Reads and writes, without deferral and with deferral.
            assert_eq!(times.clone().filter(ours).count(), 2 * 2, "{cpus} {ratio}: {out}");
        }
    }
    assert_eq!(times.count(), 2 * 2 * 2 * 2, "{out}");
}

#[test]
#[ignore = "takes half a minute; `.ci/long` runs it"]
fn memory_in_tiers_is_compared_at_each_ratio() {
    let place = Place::new();
    let json = place.out("tiers.jsonl");
    let page = place.out("tiers.html");
    let out = faultless(&[
        "compare",
        "xsbench",
        "llm",
        "--quick",
        "--seeds",
        "2",
        "--json",
        text(&json),
        "--html",
        text(&page),
    ]);
    let out = out.succeeds();
    for text in [
        "1:99 |",
        "access=write on",
        "mean of 2 seeds",
        "shootdown interrupts",
        "pages without a flush",
        "allocations ",
        "allocation p99.9, ns",
        "Simulated: ",
        "; frames in use ",
        "; allocation p99 ",
        "Counted: ",
    ] {
        assert!(out.contains(text), "{text}: {out}");
    }
    assert!(out.lines().all(|line| line.chars().count() <= 120), "{out}");
    let lines = fs::read_to_string(&json).expect("written");
    for metric in ["tlb_shootdown_sent", "allocation_p99", "frames_in_use_mean", "wall_seconds"] {
        assert!(lines.contains(&format!("\"metric\":\"{metric}\"")), "{metric}");
    }
    // Each seed has separate results.
    let times = lines.lines().filter(|line| line.contains("\"metric\":\"wall_seconds\""));
    for seed in [0, 1] {
        let of = times.clone().filter(|line| line.contains(&format!("\"seed\":{seed}")));
        // Three subjects here and on simulated CPUs, at five, three and five ratios, without
        // deferral and with deferral.
        assert_eq!(of.count(), 2 * (5 + 3 + 5) * 2, "{seed}");
    }
    let simulated = times.filter(|line| line.contains("\"machine\":\"simulated"));
    let time = |line: &str| line.rsplit(':').next().map(str::to_owned);
    let times: HashSet<_> = simulated.clone().filter_map(time).collect();
    assert_eq!(times.len(), simulated.count(), "another seed is another run");
    // First without deferral, with no deferred flushes.
    let deferred: Vec<_> =
        out.lines().filter(|line| line.starts_with("| flushes deferred")).collect();
    assert_eq!(deferred.len(), 6, "{out}");
    assert!(
        deferred.iter().all(|line| line
            .split('|')
            .skip(2)
            .all(|cell| cell.is_empty() || cell.trim().starts_with('0'))),
        "{deferred:?}"
    );
    let shown = fs::read_to_string(&page).expect("written");
    assert_eq!(shown.matches("<figure>").count(), 6, "a plot of each table");
    assert!(shown.contains("Tiers in figures") && shown.contains("shootdown interrupts"));
    for (option, value) in [("--seeds", "2"), ("--ratios", "1:4"), ("--cpus", "4")] {
        let error = faultless(&["compare", option, value]).fails(2);
        assert!(error.contains(&format!("{option}: requires xsbench or llm")), "{error}");
    }
    let error = faultless(&["compare", "llm", "--ratios", "1:5"]).fails(2);
    assert!(error.contains("possible values: 1:1, 1:2.3"), "{error}");
    let error = faultless(&["compare", "llm", "--set", "deferred_flush=0"]).fails(2);
    assert!(error.contains("both settings of deferred_flush are compared"), "{error}");
    let twice = ["--set", "locking=per_vma", "--set", "locking=mmap_lock"];
    let error = faultless(&[&["compare", "llm"], &twice[..]].concat()).fails(2);
    assert!(error.contains("--set locking=mmap_lock: llm: only one value"), "{error}");
    let error = faultless(&["compare", "xsbench", "--details"]).fails(2);
    assert!(error.contains("--details: xsbench: the table already has all"), "{error}");
    let error = faultless(&["stat", "xsbench", "fast=4K"]).fails(2);
    assert!(error.contains("fast=4K: expected a size from 1M on"), "{error}");
}
