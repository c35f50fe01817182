//! Runs the command and checks its output.

#![allow(dead_code, reason = "each test uses a part")]

pub mod program;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The result of `faultless` with some arguments.
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Returns the command `faultless` with these arguments.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_faultless"));
    command.args(args);
    command
}

/// Runs `faultless`.
pub fn faultless(args: &[&str]) -> Ran {
    Ran::of(&mut command(args))
}

/// Runs `faultless` until a line of its progress ends with `within`, sends `signal` after `later`,
/// and waits for its end, which must not take long. Returns its exit status and its output.
pub fn interrupted(
    args: &[&str],
    within: &str,
    later: Duration,
    signal: Signal,
) -> (Option<i32>, String) {
    let mut child = command(args);
    let mut child =
        child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let mut progress = BufReader::new(child.stderr.take().expect("piped")).lines();
    assert!(
        progress.any(|line| line.expect("text").ends_with(within)),
        "the output contains {within}"
    );
    std::thread::sleep(later);
    let asked = Instant::now();
    send(&child, signal);
    progress.for_each(drop);
    let output = child.wait_with_output().expect("the command ends");
    assert!(asked.elapsed() < Duration::from_secs(20), "after {:?}", asked.elapsed());
    (output.status.code(), String::from_utf8(output.stdout).expect("text"))
}

/// Sends `signal` to a running command.
pub fn send(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().try_into().expect("a process"));
    kill(pid, signal).expect("a running command");
}

impl Ran {
    /// Runs `command` to its end.
    pub fn of(command: &mut Command) -> Self {
        let output: Output = command.output().expect("the command starts");
        Self {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).expect("text"),
            err: String::from_utf8(output.stderr).expect("text"),
        }
    }

    /// Asserts success. Returns the output.
    #[track_caller]
    pub fn succeeds(self) -> String {
        assert_eq!(self.code, Some(0), "{}{}", self.out, self.err);
        self.out
    }

    /// Asserts failure with `code`. Returns the messages on standard error.
    #[track_caller]
    pub fn fails(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{}{}", self.out, self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        self.err
    }
}

/// Parses JSON lines. Checks that each object has every field.
#[track_caller]
pub fn json_lines(text: &str) -> Vec<serde_json::Value> {
    let parse = |line: &str| {
        let object: serde_json::Value = serde_json::from_str(line).expect("a line is an object");
        for field in ["machine", "workload", "setting", "metric", "unit", "basis"] {
            assert!(object[field].is_string(), "{field} of {line}");
        }
        assert!(object["params"].is_object() && object["knobs"].is_object(), "{line}");
        assert!(object["cpus"].is_u64() && object["value"].is_number(), "{line}");
        object
    };
    text.lines().map(parse).collect()
}

/// Returns the value of `metric` in `lines` on `machine` with a setting that contains `setting`.
pub fn value(
    lines: &[serde_json::Value],
    machine: &str,
    setting: &str,
    metric: &str,
) -> Option<f64> {
    let of = |line: &&serde_json::Value| {
        line["machine"].as_str().is_some_and(|m| m.starts_with(machine))
            && line["setting"].as_str().is_some_and(|s| s.contains(setting))
            && line["metric"] == metric
    };
    lines.iter().find(of)?["value"].as_f64()
}
